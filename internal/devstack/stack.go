package devstack

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sync/errgroup"
)

// Options say what a stack consists of.
type Options struct {
	// Dir keeps data, logs and state. "" is a new temporary directory, removed
	// by Stop; a detached stack needs a name.
	Dir string
	// Cache keeps what was installed; "" is [DefaultCache].
	Cache string
	// Log gets progress lines; nil drops them.
	Log io.Writer

	Redis        bool // standalone, 8.x
	RedisFloor   bool // standalone, 7.0
	Cluster      bool // 3 masters and 3 replicas, 8.x
	ClusterFloor bool // 3 masters and 3 replicas, 7.0
	Sentinel     bool // a master, a replica and 3 sentinels, 8.x
	Postgres     bool
	Brokers      int // RocketMQ brokers; a name server comes with the first

	// RedisArgs are added to the command line of every Redis server, for
	// example "--maxmemory", "64mb".
	RedisArgs []string
	// PostgresSettings are added to PostgreSQL's, for example
	// "deadlock_timeout=200ms".
	PostgresSettings []string
	// BrokerSettings are added to every broker's, for example
	// "messageDelayLevel=…" or "maxMessageSize=1024".
	BrokerSettings []string
}

// merge makes the options name all that either names. Extra settings belong to
// the services that are started with them, so they are not merged.
func (o Options) merge(old parts) parts {
	return parts{
		Redis:        o.Redis || old.Redis,
		RedisFloor:   o.RedisFloor || old.RedisFloor,
		Cluster:      o.Cluster || old.Cluster,
		ClusterFloor: o.ClusterFloor || old.ClusterFloor,
		Sentinel:     o.Sentinel || old.Sentinel,
		Postgres:     o.Postgres || old.Postgres,
		Brokers:      max(o.Brokers, old.Brokers),
	}
}

// parts are the services of a stack, as the state file keeps them.
type parts struct {
	Redis        bool `json:"redis"`
	RedisFloor   bool `json:"redis_floor"`
	Cluster      bool `json:"cluster"`
	ClusterFloor bool `json:"cluster_floor"`
	Sentinel     bool `json:"sentinel"`
	Postgres     bool `json:"postgres"`
	Brokers      int  `json:"brokers"`
}

// state is the content of the state file.
type state struct {
	Parts parts `json:"parts"`
	// PostgresDir is set if PostgreSQL could not keep its data under Dir.
	PostgresDir string   `json:"postgres_dir,omitempty"`
	Services    []record `json:"services"`
}

// Stack is a set of running services.
type Stack struct {
	dir     string
	opts    Options
	log     io.Writer
	install *Installer
	spawn   *spawner // nil for a detached stack
	shared  bool     // attached to: others use it too
	temp    bool     // dir is ours to remove

	portsMu sync.Mutex
	ports   ports

	mu          sync.Mutex
	parts       parts
	postgresDir string
	services    []*Service
}

const (
	stateFile = "stack.json"
	lockFile  = "stack.lock"
)

// Start starts an owned stack and returns when every service serves. Everything
// ends with [Stack.Stop], or with the calling process. On an error nothing is
// left running.
func Start(ctx context.Context, opts Options) (*Stack, error) {
	s, err := newStack(opts)
	if err != nil {
		return nil, err
	}
	s.spawn = newSpawner()
	s.parts = opts.merge(parts{})
	if err := s.bringUp(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// Up starts a detached stack in opts.Dir, or completes the one that is there:
// what is alive stays, what is dead or missing is started. The stack then has
// all services of this call and of earlier ones.
func Up(ctx context.Context, opts Options) (*Stack, error) {
	if opts.Dir == "" {
		return nil, errors.New("start a detached stack: it needs a directory")
	}
	s, err := newStack(opts)
	if err != nil {
		return nil, err
	}
	unlock, err := lockDir(ctx, s.dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	old, err := readState(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	s.adopt(old)
	s.parts = opts.merge(old.Parts)
	defer s.ports.release()
	if err := s.reacquirePorts(); err != nil {
		return nil, err
	}
	if err := s.bringUp(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// Open attaches to the detached stack in dir. Such a stack serves others too,
// so its services can be used but not broken.
func Open(dir string) (*Stack, error) {
	old, err := readState(dir)
	if err != nil {
		return nil, err
	}
	s, err := newStack(Options{Dir: dir})
	if err != nil {
		return nil, err
	}
	s.shared = true
	s.adopt(old)
	s.parts = old.Parts
	return s, nil
}

// IsUp reports whether a service of the detached stack in dir runs.
func IsUp(dir string) bool {
	s, err := Open(dir)
	return err == nil && slices.ContainsFunc(s.Services(), (*Service).Alive)
}

// Down ends the detached stack in dir and removes its data. Only processes that
// [Up] started there are touched. It is no error if there is none.
func Down(ctx context.Context, dir string, log io.Writer) error {
	if _, err := os.Stat(filepath.Join(dir, stateFile)); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	unlock, err := lockDir(ctx, dir)
	if err != nil {
		return err
	}
	defer unlock()
	old, err := readState(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	s, err := newStack(Options{Dir: dir, Log: log})
	if err != nil {
		return err
	}
	s.adopt(old)
	return s.Stop()
}

func newStack(opts Options) (*Stack, error) {
	s := &Stack{opts: opts, log: opts.Log}
	if s.log == nil {
		s.log = io.Discard
	}
	var err error
	if opts.Dir == "" {
		s.temp = true
		if s.dir, err = os.MkdirTemp("", "devstack-"); err != nil {
			return nil, fmt.Errorf("create a directory for the stack: %w", err)
		}
		// MkdirTemp gives 0700, through which PostgreSQL's account cannot go.
		if err := os.Chmod(s.dir, 0o755); err != nil {
			return nil, fmt.Errorf("open the stack's directory to PostgreSQL: %w", err)
		}
	} else if s.dir, err = filepath.Abs(opts.Dir); err != nil {
		return nil, fmt.Errorf("find the stack's directory: %w", err)
	}
	s.install, err = NewInstaller(opts.Cache, s.log)
	if err != nil {
		return nil, err
	}
	return s, nil
}

// lockDir keeps two commands from changing one detached stack at a time.
func lockDir(ctx context.Context, dir string) (func(), error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create the stack's directory: %w", err)
	}
	return lockPath(ctx, filepath.Join(dir, lockFile))
}

// lockPath takes an exclusive file lock, waiting for it as long as ctx allows.
func lockPath(ctx context.Context, path string) (func(), error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock file: %w", err)
	}
	if err := flock(ctx, f, syscall.LOCK_EX); err != nil {
		_ = f.Close()
		return nil, err
	}
	return func() { _ = f.Close() }, nil
}

// flock waits for a file lock as long as ctx allows.
func flock(ctx context.Context, f *os.File, how int) error {
	err := poll(ctx, func(context.Context) error {
		err := syscall.Flock(int(f.Fd()), how|syscall.LOCK_NB)
		if err != nil && !errors.Is(err, syscall.EWOULDBLOCK) {
			return permanent(err)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return nil
}

func readState(dir string) (state, error) {
	var st state
	raw, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil {
		return st, fmt.Errorf("read the stack's state: %w", err)
	}
	if err := json.Unmarshal(raw, &st); err != nil {
		return st, fmt.Errorf("read the stack's state in %s: %w", filepath.Join(dir, stateFile), err)
	}
	return st, nil
}

func (s *Stack) adopt(old state) {
	s.postgresDir = old.PostgresDir
	for _, rec := range old.Services {
		s.services = append(s.services, &Service{stack: s, rec: rec})
	}
}

func (s *Stack) reacquirePorts() error {
	for _, svc := range s.services {
		if err := s.ports.reacquire(svc.rec.Port); err != nil {
			return err
		}
	}
	return nil
}

// save writes the state file of a detached stack; an owned one needs none.
func (s *Stack) save() error {
	if s.spawn != nil || s.shared {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	st := state{Parts: s.parts, PostgresDir: s.postgresDir}
	for _, svc := range s.services {
		st.Services = append(st.Services, svc.snapshot())
	}
	raw, err := json.MarshalIndent(st, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the stack's state: %w", err)
	}
	return writeFile(filepath.Join(s.dir, stateFile), raw)
}

// writeFile replaces a file in one step, so that a reader never sees half of it.
func writeFile(path string, content []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, content, 0o644); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func (s *Stack) progressf(format string, args ...any) {
	_, _ = fmt.Fprintf(s.log, format+"\n", args...) // progress is only a courtesy
}

// mayBreak refuses to break a stack that other tests are using.
func (s *Stack) mayBreak() error {
	if s.shared {
		return errors.New("this stack is shared with others: break a service of a stack of your own")
	}
	return nil
}

// bringUp installs, starts and waits, the three kinds of server side by side.
func (s *Stack) bringUp(ctx context.Context) error {
	if err := s.install.Ensure(ctx, s.parts); err != nil {
		return err
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return fmt.Errorf("create the stack's directory: %w", err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.bringUpRedis(ctx) })
	g.Go(func() error { return s.bringUpPostgres(ctx) })
	g.Go(func() error { return s.bringUpRocketMQ(ctx) })
	if err := g.Wait(); err != nil {
		return err
	}
	return s.save()
}

// service finds a service by name or makes one with n consecutive ports, of
// which it listens on the one at offset. define completes the record of a new one.
func (s *Stack) service(name string, n, offset int, define func(*record) error) (*Service, error) {
	if svc := s.Service(name); svc != nil {
		return svc, nil
	}
	s.portsMu.Lock()
	first, err := s.ports.take(n)
	s.portsMu.Unlock()
	if err != nil {
		return nil, err
	}
	rec := record{Name: name, Port: first + offset, Dir: filepath.Join(s.dir, name)}
	if name == postgresName && s.postgresDir != "" {
		rec.Dir = s.postgresDir
	}
	if err := os.MkdirAll(rec.Dir, 0o755); err != nil {
		return nil, fmt.Errorf("create the directory of %s: %w", name, err)
	}
	rec.Launch.Dir = rec.Dir
	rec.Launch.Log = filepath.Join(rec.Dir, "log")
	if err := define(&rec); err != nil {
		return nil, err
	}
	svc := &Service{stack: s, rec: rec}
	s.mu.Lock()
	s.services = append(s.services, svc)
	s.mu.Unlock()
	return svc, nil
}

// run starts a service unless it is alive, and waits until it serves.
func (s *Stack) run(ctx context.Context, svc *Service) error {
	if svc.Alive() {
		s.progressf("%s is running on %s", svc.Name(), svc.Addr())
	} else {
		s.progressf("starting %s %s on %s", svc.Name(), svc.Version(), svc.Addr())
	}
	return svc.Start(ctx)
}

// start starts the process of a service; the caller holds svc.mu.
func (s *Stack) start(svc *Service) error {
	var (
		cmd *exec.Cmd
		id  identity
		err error
	)
	s.portsMu.Lock()
	locks := slices.Clone(s.ports.locks)
	s.portsMu.Unlock()
	if s.spawn == nil {
		cmd, id, err = svc.rec.Launch.start(locks, 0)
	} else {
		s.spawn.do(func() { cmd, id, err = svc.rec.Launch.start(locks, syscall.SIGKILL) })
	}
	if err != nil {
		return err
	}
	svc.rec.Process = id
	reaped := make(chan struct{})
	svc.reaped = reaped
	go func() {
		defer close(reaped)
		_ = cmd.Wait() // how it ended is in its log
	}()
	return nil
}

// Stop ends every service of the stack and removes its data.
func (s *Stack) Stop() error {
	if err := s.mayBreak(); err != nil {
		return err
	}
	var errs []error
	for _, svc := range slices.Backward(s.Services()) {
		if svc.Alive() {
			s.progressf("stopping %s", svc.Name())
		}
		errs = append(errs, svc.Kill())
	}
	if s.spawn != nil {
		s.spawn.close()
	}
	s.ports.release()
	if err := errors.Join(errs...); err != nil {
		return err // the data stays: a process may still use it
	}
	return s.removeData()
}

func (s *Stack) removeData() error {
	var errs []error
	if s.temp {
		errs = append(errs, os.RemoveAll(s.dir))
	}
	for _, svc := range s.Services() {
		errs = append(errs, os.RemoveAll(svc.Dir()))
	}
	for _, name := range []string{stateFile, EnvFile, ConfigFile, borrowedFile} {
		if err := os.Remove(filepath.Join(s.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("remove the stack's data: %w", err)
	}
	return nil
}

// Dir is the stack's directory.
func (s *Stack) Dir() string { return s.dir }

// Services are all services in the order in which they were first started.
func (s *Stack) Services() []*Service {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.services)
}

// Service finds a service by name; nil if the stack has none.
func (s *Stack) Service(name string) *Service {
	for _, svc := range s.Services() {
		if svc.Name() == name {
			return svc
		}
	}
	return nil
}

// Redis is the standalone 8.x server; nil if the stack has none.
func (s *Stack) Redis() *Service { return s.Service(redisName) }

// RedisFloor is the standalone 7.0 server; nil if the stack has none.
func (s *Stack) RedisFloor() *Service { return s.Service(redisFloorName) }

// Cluster has the nodes of the 8.x cluster; empty if the stack has none.
func (s *Stack) Cluster() RedisCluster { return s.named(clusterName + "-") }

// ClusterFloor has the nodes of the 7.0 cluster; empty if the stack has none.
func (s *Stack) ClusterFloor() RedisCluster { return s.named(clusterFloorName + "-") }

// Postgres is the PostgreSQL server; nil if the stack has none.
func (s *Stack) Postgres() *Service { return s.Service(postgresName) }

// NameServer is RocketMQ's name server; nil if the stack has none.
func (s *Stack) NameServer() *Service { return s.Service(nameServerName) }

// Brokers are RocketMQ's brokers, each a master of its own name.
func (s *Stack) Brokers() []*Service { return s.named(brokerName + "-") }

// named are the services whose names are the prefix and a number.
func (s *Stack) named(prefix string) []*Service {
	var out []*Service
	for _, svc := range s.Services() {
		number, ok := strings.CutPrefix(svc.Name(), prefix)
		if ok && len(number) == 1 && number[0] >= '0' && number[0] <= '9' {
			out = append(out, svc)
		}
	}
	slices.SortFunc(out, func(a, b *Service) int { return strings.Compare(a.Name(), b.Name()) })
	return out
}

// DefaultCache is .run/cache of the module that the working directory is in,
// else a directory of the user's cache.
func DefaultCache() (string, error) {
	if root, err := ModuleRoot(); err == nil {
		return filepath.Join(root, ".run", "cache"), nil
	}
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a directory for downloads: %w", err)
	}
	return filepath.Join(base, "seckill-devstack"), nil
}

// ModuleRoot is the directory of the go.mod above the working directory.
func ModuleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the module: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("find the module: no go.mod above the working directory")
		}
		dir = parent
	}
}
