package devstack

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// identity names one process for good: a pid alone is reused by the kernel.
type identity struct {
	PID int `json:"pid"`
	// Start is field 22 of /proc/PID/stat: clock ticks from boot to its start.
	Start uint64 `json:"start"`
	// Boot is the kernel's random id of the boot that Start counts from.
	Boot string `json:"boot"`
}

// procStat is what this package needs of /proc/PID/stat.
type procStat struct {
	state byte
	ppid  int
	start uint64
}

func readStat(pid int) (procStat, error) {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return procStat{}, fmt.Errorf("read the state of process %d: %w", pid, err)
	}
	// The command name, in parentheses, may hold anything: cut after the last one.
	_, rest, found := bytes.Cut(raw[max(0, bytes.LastIndexByte(raw, ')')):], []byte(") "))
	fields := strings.Fields(string(rest))
	if !found || len(fields) < 20 {
		return procStat{}, fmt.Errorf("process %d: unexpected /proc stat %q", pid, raw)
	}
	ppid, err := strconv.Atoi(fields[1])
	if err != nil {
		return procStat{}, fmt.Errorf("process %d: parent pid: %w", pid, err)
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return procStat{}, fmt.Errorf("process %d: start time: %w", pid, err)
	}
	return procStat{state: fields[0][0], ppid: ppid, start: start}, nil
}

func bootID() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

func identify(pid int) (identity, error) {
	stat, err := readStat(pid)
	if err != nil {
		return identity{}, err
	}
	boot, err := bootID()
	if err != nil {
		return identity{}, err
	}
	return identity{PID: pid, Start: stat.start, Boot: boot}, nil
}

// alive reports whether this very process still runs. A zombie does not: it
// only waits for its parent to collect it.
func (id identity) alive() bool {
	if id.PID <= 0 {
		return false
	}
	stat, err := readStat(id.PID)
	if err != nil || stat.start != id.Start || stat.state == 'Z' || stat.state == 'X' {
		return false
	}
	boot, err := bootID()
	return err == nil && boot == id.Boot
}

// stopped reports whether the process is suspended by SIGSTOP.
func (id identity) stopped() bool {
	stat, err := readStat(id.PID)
	return err == nil && stat.start == id.Start && stat.state == 'T'
}

// children are the live direct children. PostgreSQL has one per connection,
// each in a session of its own, so no process-group signal reaches them.
func (id identity) children() []identity {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var out []identity
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if stat, err := readStat(pid); err == nil && stat.ppid == id.PID {
			out = append(out, identity{PID: pid, Start: stat.start, Boot: id.Boot})
		}
	}
	return out
}

func (id identity) signal(sig syscall.Signal) error {
	if !id.alive() {
		return nil
	}
	if err := syscall.Kill(id.PID, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("send %s to process %d: %w", sig, id.PID, err)
	}
	return nil
}

// signalLimit bounds the wait for what a signal does. The kernel does it when
// the process runs next, which may take its time on a busy machine.
const signalLimit = 10 * time.Second

// freeze suspends the process and returns it behind its children. It waits
// until the process has stopped: before, it could make another child, and would
// look as if it ran.
func (id identity) freeze() ([]identity, error) {
	if err := id.signal(syscall.SIGSTOP); err != nil {
		return nil, err
	}
	if err := awaitStop([]identity{id}); err != nil {
		return nil, err
	}
	return append(id.children(), id), nil
}

// awaitStop waits until all processes are suspended; one that died is too.
func awaitStop(tree []identity) error {
	return await(tree, "suspended", func(p identity) bool { return p.stopped() || !p.alive() })
}

// await waits until all processes are in a state.
func await(tree []identity, state string, reached func(identity) bool) error {
	for deadline := time.Now().Add(signalLimit); ; time.Sleep(5 * time.Millisecond) {
		late := slices.IndexFunc(tree, func(p identity) bool { return !reached(p) })
		if late < 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("process %d is not %s %s after the signal", tree[late].PID, state, signalLimit)
		}
	}
}

func signalAll(tree []identity, sig syscall.Signal) error {
	errs := make([]error, 0, len(tree))
	for _, p := range tree {
		errs = append(errs, p.signal(sig))
	}
	return errors.Join(errs...)
}

// kill ends the process and its children and waits until all are gone.
func (id identity) kill() error {
	tree, err := id.freeze()
	if err != nil {
		return err
	}
	if err := signalAll(tree, syscall.SIGKILL); err != nil {
		return err
	}
	return await(tree, "gone", func(p identity) bool { return !p.alive() })
}

// launch describes how to start one process. It is kept in the state file, so
// a later command can start the same service again.
type launch struct {
	Path string   `json:"path"`
	Args []string `json:"args"`
	Env  []string `json:"env,omitempty"` // added to the environment
	Dir  string   `json:"dir"`
	Log  string   `json:"log"`            // stdout and stderr are appended to it
	User string   `json:"user,omitempty"` // only root can name another user
}

func (l launch) command() (*exec.Cmd, error) {
	// No context: the service outlives the call that starts it.
	cmd := &exec.Cmd{Path: l.Path, Args: append([]string{l.Path}, l.Args...)}
	cmd.Dir = l.Dir
	cmd.Env = append(os.Environ(), l.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if l.User == "" {
		return cmd, nil
	}
	cred, err := credential(l.User)
	if err != nil {
		return nil, err
	}
	cmd.SysProcAttr.Credential = cred
	return cmd, nil
}

func credential(name string) (*syscall.Credential, error) {
	account, err := user.Lookup(name)
	if err != nil {
		return nil, fmt.Errorf("look up the account that runs the service: %w", err)
	}
	groups, err := account.GroupIds()
	if err != nil {
		return nil, fmt.Errorf("list the groups of %s: %w", name, err)
	}
	ids := make([]uint32, 0, len(groups)+2)
	for _, s := range append([]string{account.Uid, account.Gid}, groups...) {
		n, err := strconv.ParseUint(s, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("account %s: id %q: %w", name, s, err)
		}
		ids = append(ids, uint32(n))
	}
	return &syscall.Credential{Uid: ids[0], Gid: ids[1], Groups: ids[2:]}, nil
}

// start runs the process in a session of its own and returns it with its
// identity. The locks of the port blocks are inherited on purpose.
func (l launch) start(locks []*os.File, deathsig syscall.Signal) (*exec.Cmd, identity, error) {
	cmd, err := l.command()
	if err != nil {
		return nil, identity{}, err
	}
	out, err := os.OpenFile(l.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, identity{}, fmt.Errorf("open the log: %w", err)
	}
	defer func() { _ = out.Close() }() // the child has its own descriptor
	cmd.Stdout, cmd.Stderr = out, out
	cmd.ExtraFiles = locks
	cmd.SysProcAttr.Pdeathsig = deathsig
	if err := cmd.Start(); err != nil {
		return nil, identity{}, fmt.Errorf("start %s: %w", l.Path, err)
	}
	id, err := identify(cmd.Process.Pid)
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, identity{}, err
	}
	return cmd, id, nil
}

// spawner starts the children of an owned stack. The kernel sends the parent
// death signal when the *thread* that started a child ends, not the process,
// and Go may end a thread at any time: so one goroutine keeps one thread for
// as long as the stack lives.
type spawner struct {
	jobs chan func()
	done chan struct{}
	end  sync.Once
}

func newSpawner() *spawner {
	s := &spawner{jobs: make(chan func()), done: make(chan struct{})}
	go func() {
		defer close(s.done)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for job := range s.jobs {
			job()
		}
	}()
	return s
}

func (s *spawner) do(job func()) {
	ran := make(chan struct{})
	s.jobs <- func() { defer close(ran); job() }
	<-ran
}

func (s *spawner) close() {
	s.end.Do(func() { close(s.jobs) })
	<-s.done
}
