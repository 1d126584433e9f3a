// Package daemon puts the reconciler together: stores, workers, schedule,
// lease and HTTP server, for the service and for a single pass alike.
//
// Both modes run the same workers over the same adapters (architecture: one
// code path): [Daemon.Run] schedules them until it is told to stop,
// [Daemon.Once] runs one pass of each and returns the verdict.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seckill/reconciler/compensator"
	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/admin"
	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/notify"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/migrations"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/scanner"
)

// Options says how a daemon is to be put together.
type Options struct {
	Config  config.Config
	Logger  *slog.Logger
	Metrics *observe.Metrics
	// DryRun decides and reports as mode observe does, whatever the mode.
	DryRun bool
	// Supervisor is told how a running daemon stands; nil: nobody.
	Supervisor Supervisor
	// Pages adds pages to the admin server before it starts; nil: there are none
	// beside health, readiness and metrics.
	Pages func(*Daemon, *admin.Server) error
}

// Daemon is the reconciler with its connections. Close it when done.
type Daemon struct {
	Redis    *redisstore.Store
	Postgres *pgstore.Store
	Evidence *rocketmq.Evidence

	cfg      config.Config
	log      *slog.Logger
	metrics  *observe.Metrics
	observes bool

	supervisor Supervisor
	pages      func(*Daemon, *admin.Server) error
	reloading  sync.Mutex    // guards live
	live       config.Config // cfg with what reloads took over
	policies   atomic.Pointer[reservation.Policy]
	working    atomic.Pointer[schedule.Scheduler] // while the lease is held

	clients     *redisstore.Clients
	sender      *rocketmq.Sender
	dispatch    *scanner.Dispatcher
	scanner     *scanner.Scanner
	fencer      *fencer.Fencer
	compensator *compensator.Compensator
	refencer    *fencer.Refencer
	transfers   transfers
	comparison  comparison
	notifier    *notify.Notifier // nil: nobody is told
	watcher     *watcher
	gate        *fencer.Gate
}

// startLimit bounds what a start waits for its dependencies.
const startLimit = 15 * time.Second

// Open connects to Redis and PostgreSQL, both of which must answer, and checks
// that the schema is one that this binary knows. RocketMQ may be away: then
// everything that needs it waits.
func Open(ctx context.Context, o Options) (_ *Daemon, err error) {
	d := &Daemon{
		cfg: o.Config, live: o.Config, log: o.Logger, metrics: o.Metrics, supervisor: orNobody(o.Supervisor), pages: o.Pages,
		observes: o.DryRun || o.Config.Mode != config.ModeAct,
	}
	defer func() {
		if err != nil {
			d.Close(context.WithoutCancel(ctx))
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	redisstore.RouteLibraryLog(o.Logger)
	if d.clients, err = redisstore.Open(ctx, o.Config.Redis); err != nil {
		return nil, err
	}
	if err = d.clients.Ping(ctx); err != nil {
		return nil, err
	}
	traced := o.Config.Tracing.Endpoint != ""
	if traced {
		if err = d.clients.Trace(); err != nil {
			return nil, err
		}
	}
	if d.Redis, err = redisstore.New(d.clients, o.Config.Redis.CommandTimeout); err != nil {
		return nil, err
	}
	p := o.Config.Postgres
	d.Postgres, err = pgstore.Open(ctx, pgstore.Config{
		URL: p.URL, MaxConns: p.MaxConns, ConnectTimeout: p.ConnectTimeout, StatementTimeout: p.StatementTimeout,
		Trace: traced,
	})
	if err != nil {
		return nil, err
	}
	if err = d.Postgres.Ping(ctx); err != nil {
		return nil, err
	}
	if err = migrations.Check(ctx, d.Postgres.Pool()); err != nil {
		return nil, err
	}
	if err = d.openRocketMQ(); err != nil {
		return nil, err
	}
	d.assemble()
	if err = d.openWatcher(ctx); err != nil {
		return nil, err
	}
	if err = d.openComparison(ctx); err != nil {
		return nil, err
	}
	d.notifier = d.newNotifier()
	return d, nil
}

func (d *Daemon) openRocketMQ() (err error) {
	mq, err := rocketmq.FromSettings(d.cfg.RocketMQ)
	if err != nil {
		return err
	}
	if d.sender, err = rocketmq.NewSender(mq, d.log); err != nil {
		return fmt.Errorf("rocketmq sender: %w", err)
	}
	if d.Evidence, err = rocketmq.NewEvidence(mq, queueRegistry{d.Postgres}, d.log); err != nil {
		return fmt.Errorf("rocketmq evidence: %w", err)
	}
	return nil
}

// assemble wires the workers to the adapters.
func (d *Daemon) assemble() {
	applying := effects{d.Redis, d.log, observe.NewUserHasher(d.cfg.Observe.UserHashKey)}
	actor := &pass.Actor{Effects: applying, Observe: d.observes}
	known := &identity{postgres: d.Postgres, redis: d.Redis, observes: d.observes, log: d.log}
	claims := claims{Store: d.Postgres, identity: known, metrics: d.metrics}
	pages := pages{d.Redis, d.metrics}
	d.setPolicy(d.cfg)
	policy := func() reservation.Policy { return *d.policies.Load() }
	live := scopes{d.Postgres, d.Redis, known}
	d.gate = &fencer.Gate{Claims: claims, Stock: stock{d.Redis}, Tasks: d.Postgres, Max: maxRelease(d.cfg)}
	d.dispatch = &scanner.Dispatcher{
		Effects: applying, Sender: messageSender{d.sender}, Actor: actor, RefusalsKept: policy().EscalateAfter,
	}
	d.scanner = &scanner.Scanner{
		Actor: actor, Claims: claims, Dispatch: d.dispatch, Pager: pages, Scopes: live, Tasks: d.Postgres,
		Policy: policy, Limits: limits(d.cfg.Scanner.Pass),
	}
	d.compensator = &compensator.Compensator{
		Actor: actor, Claims: claims, Gate: d.gate, Events: d.Redis, Pager: pages, Scopes: live, Tasks: d.Postgres,
		Policy: policy, Limits: limits(d.cfg.Compensator.Pass),
	}
	d.refencer = &fencer.Refencer{
		Observe: d.observes, Claims: claims, Changed: claims, Released: d.Redis, Scopes: live, Tasks: d.Postgres,
	}
	d.transfers = d.newTransfers()
	d.fencer = &fencer.Fencer{
		Actor: actor, Claims: claims, Messages: messages{d.Evidence, d.metrics}, Settler: d.compensator, Resender: d.dispatch,
		Pager: pages, Scopes: live, Tasks: d.Postgres, Policy: policy, Limits: limits(d.cfg.Fencer.Pass),
	}
}

func limits(p config.Pass) pass.Limits {
	return pass.Limits{Batch: p.Batch, Items: p.PassItems, Time: p.PassLimit}
}

// Close ends every connection. Workers must have stopped.
func (d *Daemon) Close(ctx context.Context) {
	var errs []error
	if d.sender != nil {
		errs = append(errs, d.sender.Close(ctx))
	}
	if d.Evidence != nil {
		d.Evidence.Close()
	}
	if d.clients != nil {
		errs = append(errs, d.clients.Close())
	}
	errs = append(errs, d.watcher.close())
	errs = append(errs, d.comparison.close())
	if d.Postgres != nil {
		d.Postgres.Close()
	}
	if err := errors.Join(errs...); err != nil {
		d.log.Warn("connections were not closed cleanly", "error", err)
	}
}
