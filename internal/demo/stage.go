package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"text/template"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/lua"
)

// stage is where the demo plays: services of its own and what it needs to reach them.
type stage struct {
	dir    string
	stack  *devstack.Stack
	unlock func()
	daemon *daemon

	client   redis.UniversalClient
	scripts  *lua.Runner
	owner    *pgxpool.Pool // for the check: sees everything
	shop     *pgxpool.Pool // the consumers', as their login
	sender   *rocketmq.Sender
	activity upstream.Activity

	subscriber *upstream.Subscriber
	endSale    context.CancelFunc
	saleEnd    <-chan struct{}
}

// Files in the demo's directory.
const (
	configFile = "config.yaml" // the daemon's
	stackDir   = "stack"       // the services'
	stackMark  = ".made-by-demo"
)

// claimDir makes the directory the demo's, for one demo at a time, and removes
// what an earlier one left. It touches nothing that it did not make.
func claimDir(dir string) (unlock func(), err error) {
	if err := makeDir(dir); err != nil {
		return nil, fmt.Errorf("create the demo's directory: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the demo's directory: %w", err)
	}
	unlock = func() { _ = lock.Close() }
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		unlock()
		return nil, fmt.Errorf("another demo runs in %s: wait for it, or choose another --dir", dir)
	}
	services := filepath.Join(dir, stackDir)
	entries, err := os.ReadDir(services)
	_, markErr := os.Stat(filepath.Join(services, stackMark))
	switch {
	case err != nil && !errors.Is(err, os.ErrNotExist):
	case len(entries) > 0 && markErr != nil:
		err = fmt.Errorf("%s is not the demo's: choose another --dir", services)
	default:
		err = errors.Join(os.RemoveAll(services), makeDir(services), writeFile(filepath.Join(services, stackMark), nil))
	}
	if err != nil {
		unlock()
		return nil, fmt.Errorf("prepare the demo's directory: %w", err)
	}
	return unlock, nil
}

// makeDir makes a directory that PostgreSQL's own account can pass through,
// which runs the server when we are root.
func makeDir(dir string) error {
	return os.MkdirAll(dir, 0o755) //nolint:gosec // see above
}

// setStage starts the services. On an error nothing is left running.
func setStage(ctx context.Context, o Options, progress io.Writer) (_ *stage, err error) {
	s := &stage{activity: o.activity()}
	if s.dir, err = filepath.Abs(o.Dir); err != nil {
		return nil, fmt.Errorf("find the demo's directory: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.strike())
		}
	}()
	if s.unlock, err = claimDir(s.dir); err != nil {
		return nil, err
	}
	s.stack, err = devstack.Start(ctx, devstack.Options{
		Dir: filepath.Join(s.dir, stackDir), Log: progress, Redis: true, Postgres: true, Brokers: 1,
	})
	if err != nil {
		return nil, fmt.Errorf("start the services: %w", err)
	}
	if err := s.stack.PrepareDatabase(ctx); err != nil {
		return nil, err
	}
	if err := s.stack.CreateTopic(ctx, devstack.Topic, devstack.TopicQueues); err != nil {
		return nil, err
	}
	return s, s.stack.CreateGroup(ctx, devstack.ConsumerGroup)
}

// Logins of the demo's PostgreSQL, which asks for no passwords.
const (
	ownerLogin  = "postgres"
	daemonLogin = "reconciler"
	shopLogin   = "shop_consumer"
)

// connect opens the demo's own connections.
func (s *stage) connect(ctx context.Context) (err error) {
	s.client = redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{
		Addrs: []string{s.stack.Redis().Addr()}, ReadTimeout: 5 * time.Second, WriteTimeout: 5 * time.Second,
	}))
	if s.scripts, err = lua.NewRunner(s.client); err != nil {
		return err
	}
	if s.owner, err = pgxpool.New(ctx, s.stack.PostgresURL(devstack.Database, ownerLogin)); err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	shop, err := pgxpool.ParseConfig(s.stack.PostgresURL(devstack.Database, shopLogin))
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL as %s: %w", shopLogin, err)
	}
	shop.MaxConns = consumerGoroutines
	if s.shop, err = pgxpool.NewWithConfig(ctx, shop); err != nil {
		return fmt.Errorf("connect to PostgreSQL as %s: %w", shopLogin, err)
	}
	s.sender, err = rocketmq.NewSender(rocketmq.Config{
		NameServers: []string{s.stack.NameServer().Addr()}, Topic: devstack.Topic, ConsumerGroup: devstack.ConsumerGroup,
		SendTimeout: 2 * time.Second,
	}, slog.New(slog.DiscardHandler))
	return err
}

// configTemplate is the demo's daemon. Its waits are seconds where a real
// sale's are minutes or hours, so that all of it is seen in one sitting.
var configTemplate = template.Must(template.New(configFile).Parse(`# The daemon of the demo. Compare with config.yaml of the repository: the waits are
# seconds here where a real sale's are minutes or hours.
mode: act
redis:
  addrs: [{{ .Redis }}]
postgres:
  url: {{ .Postgres }}
  migrate_url: {{ .Owner }}
rocketmq:
  name_servers: [{{ .NameServer }}]
  topic: {{ .Topic }}
  consumer_group: {{ .Group }}
  send_timeout: 2s
  request_timeout: 2s
scanner:
  every: 500ms
  send_grace: 1500ms
fencer:
  every: 1s
  settle: 2s
  recheck: 2s
  dead_letter_after: 5s
  escalate_after: 60s
  backoff_min: 500ms
  backoff_max: 3s
  # The faults of this demo are one in three: an ordinary limit would, rightly, stop it.
  max_release: {percent: 100, min: {{ .Units }}, window: 10m}
compensator:
  every: 500ms
# The demo itself runs "reconciler reconcile --repair" when the sale is over, to show what it
# does, and keeps each bucket to its own units.
reconcile:
  settle: 500ms
  quick: ""
  deep: ""
transfer:
  fill_deficit: off
lease:
  ttl: 3s
admin:
  listen: {{ .Admin }}
`))

// writeConfig writes the daemon's settings.
func (s *stage) writeConfig(admin string) error {
	var text strings.Builder
	err := configTemplate.Execute(&text, map[string]any{
		"Redis": s.stack.Redis().Addr(), "NameServer": s.stack.NameServer().Addr(), "Admin": admin,
		"Postgres": s.stack.PostgresURL(devstack.Database, daemonLogin), "Owner": s.stack.PostgresURL(devstack.Database, ownerLogin),
		"Topic": devstack.Topic, "Group": devstack.ConsumerGroup, "Units": s.activity.Total,
	})
	if err != nil {
		return fmt.Errorf("make the daemon's settings: %w", err)
	}
	if err := writeFile(filepath.Join(s.dir, configFile), []byte(text.String())); err != nil {
		return fmt.Errorf("write the daemon's settings: %w", err)
	}
	return nil
}

// strike ends everything that the stage holds.
func (s *stage) strike() error {
	var errs []error
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	if s.endSale != nil {
		s.endSale()
		<-s.saleEnd // a broker that the sale stopped is started again first
	}
	if s.subscriber != nil {
		errs = append(errs, s.subscriber.Stop(ctx))
	}
	if s.daemon != nil && s.daemon.alive() {
		errs = append(errs, s.daemon.kill())
	}
	if s.sender != nil {
		errs = append(errs, s.sender.Close(ctx))
	}
	if s.client != nil {
		errs = append(errs, s.client.Close())
	}
	for _, pool := range []*pgxpool.Pool{s.owner, s.shop} {
		if pool != nil {
			pool.Close()
		}
	}
	if s.stack != nil {
		errs = append(errs, s.stack.Stop())
	}
	if s.unlock != nil {
		s.unlock()
	}
	return errors.Join(errs...)
}
