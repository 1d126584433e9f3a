package daemon

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/seckill/reconciler/internal/admin"
	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/schedule"
)

// jobGate lets a job run while the lease is valid and nobody has paused it.
type jobGate struct {
	store *pgstore.Store
	lease *pgstore.Lease
}

// Enter is part of [schedule.Gate].
func (g jobGate) Enter(ctx context.Context, job string, manual bool) (func(), error) {
	// A process that was suspended must not go on with a lease that has passed
	// to another meanwhile.
	if !g.lease.Valid() {
		return nil, fmt.Errorf("the lease is not valid: %w", schedule.ErrStopped)
	}
	if !manual {
		jobs, err := g.store.Jobs(ctx)
		if err != nil {
			return nil, fmt.Errorf("whether the job is paused cannot be read: %w", err)
		}
		for _, j := range jobs {
			if j.Name == job && j.Paused {
				return nil, schedule.ErrPaused
			}
		}
	}
	return func() {}, nil
}

// ListJobs lists every job by its name, also one that has never run.
func ListJobs(ctx context.Context, store *pgstore.Store) ([]pgstore.Job, error) {
	jobs, err := store.Jobs(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range JobNames() {
		if !slices.ContainsFunc(jobs, func(j pgstore.Job) bool { return j.Name == name }) {
			jobs = append(jobs, pgstore.Job{Name: name})
		}
	}
	slices.SortFunc(jobs, func(x, y pgstore.Job) int { return strings.Compare(x.Name, y.Name) })
	return jobs, nil
}

// journal writes the runs of jobs to PostgreSQL, behind their backs: no run
// waits for it, and runs that it cannot write are dropped.
type journal struct {
	store *pgstore.Store
	log   *slog.Logger
	runs  chan schedule.Run

	mu      sync.Mutex
	written map[string]time.Time // when a job's run was last passed on
}

// quietInterval is how often runs that did nothing are noted.
const quietInterval = 10 * time.Second

func newJournal(store *pgstore.Store, log *slog.Logger) *journal {
	return &journal{store: store, log: log, runs: make(chan schedule.Run, 64), written: map[string]time.Time{}}
}

// JobStarted is part of [schedule.Recorder].
func (j *journal) JobStarted(schedule.Run) {}

// JobSkipped is part of [schedule.Recorder].
func (j *journal) JobSkipped(string, error) {}

// JobFinished is part of [schedule.Recorder].
func (j *journal) JobFinished(run schedule.Run) {
	j.mu.Lock()
	quiet := !run.Manual && run.Err == nil && !run.Changed && run.Finished.Sub(j.written[run.Job]) < quietInterval
	if !quiet {
		j.written[run.Job] = run.Finished
	}
	j.mu.Unlock()
	if quiet {
		return
	}
	select {
	case j.runs <- run:
	default:
	}
}

// write writes what comes in, and at the end what is left.
func (j *journal) write(ctx context.Context) {
	for {
		select {
		case run := <-j.runs:
			j.writeOne(ctx, run)
		case <-ctx.Done():
			for {
				select {
				case run := <-j.runs:
					j.writeOne(ctx, run)
				default:
					return
				}
			}
		}
	}
}

const journalLimit = 2 * time.Second

func (j *journal) writeOne(ctx context.Context, run schedule.Run) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), journalLimit)
	defer cancel()
	note := pgstore.JobRun{Name: run.Job, StartedAt: run.Started, FinishedAt: run.Finished, Result: run.Items}
	if run.Err != nil {
		note.Error = run.Err.Error()
	}
	if err := j.store.RecordJob(ctx, note); err != nil {
		j.log.Debug("a job's run was not noted", "job", run.Job, "error", err)
	}
}

// recorders passes runs on to all of them.
type recorders []schedule.Recorder

// JobStarted is part of [schedule.Recorder].
func (r recorders) JobStarted(run schedule.Run) {
	for _, one := range r {
		one.JobStarted(run)
	}
}

// JobFinished is part of [schedule.Recorder].
func (r recorders) JobFinished(run schedule.Run) {
	for _, one := range r {
		one.JobFinished(run)
	}
}

// JobSkipped is part of [schedule.Recorder].
func (r recorders) JobSkipped(job string, reason error) {
	for _, one := range r {
		one.JobSkipped(job, reason)
	}
}

// leaseState is what /readyz tells of the lease.
type leaseState struct {
	metrics *observe.Metrics

	mu    sync.Mutex
	state admin.LeaseState
	since time.Time
}

func (l *leaseState) set(state admin.LeaseState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state, l.since = state, time.Now()
	l.metrics.SetLease(state == admin.LeaseHeld, state == admin.LeaseLost)
}

func (l *leaseState) get() admin.Lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	return admin.Lease{State: l.state, Since: l.since}
}

// adminServer serves health, readiness and metrics, and the pages that were
// added.
func (d *Daemon) adminServer(state *leaseState) (*admin.Server, error) {
	c := d.cfg.Admin
	encryption, err := serverTLS(c)
	if err != nil {
		return nil, err
	}
	server := admin.New(admin.Options{
		TLS: encryption, Listen: c.Listen, AllowRemote: c.AllowRemote, AllowedHosts: c.AllowedHosts, CheckTimeout: c.CheckTimeout,
		Lease: state.get, Metrics: d.metrics.Handler(), Logger: d.log,
		Checks: []admin.Check{
			{Name: "redis", Run: d.clients.Ping},
			{Name: "postgres", Run: d.Postgres.Ping},
			{Name: "rocketmq", Run: d.probe},
		},
	})
	if d.pages != nil {
		if err := d.pages(d, server); err != nil {
			return nil, err
		}
	}
	return server, nil
}

// serverTLS is the admin server's certificate; nil without one.
func serverTLS(c config.Admin) (*tls.Config, error) {
	if c.TLSCertFile == "" {
		return nil, nil
	}
	pair, err := tls.LoadX509KeyPair(c.TLSCertFile, c.TLSKeyFile)
	if err != nil {
		return nil, fmt.Errorf("admin.tls_cert_file and admin.tls_key_file: %w", err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}}, nil
}
