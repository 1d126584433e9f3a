package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/seckill/reconciler/internal/admin"
	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/schedule"
)

// Names of the jobs that watch and change nothing.
const (
	JobBacklog = "backlog" // how much waits, for the metrics
	JobProbe   = "probe"   // how the services are, for the metrics
)

// JobNames lists every job that a running daemon has.
func JobNames() []string {
	return []string{JobRefence, JobScanner, JobFencer, JobCompensator, JobTransfer, JobRebalance, JobReconcileQuick, JobReconcileDeep, JobBacklog, JobSamples, JobProbe, JobPurge}
}

// OffBy says which setting keeps a job from being scheduled; empty: none does.
func OffBy(c config.Config, job string) string {
	switch {
	case job == JobRebalance && !c.Rebalance.Enabled:
		return "rebalance.enabled is false"
	case job == JobReconcileQuick && c.Reconcile.Quick == "":
		return "reconcile.quick is empty"
	case job == JobReconcileDeep && c.Reconcile.Deep == "":
		return "reconcile.deep is empty"
	case job == JobPurge && c.Purge.Schedule == "":
		return "purge.schedule is empty"
	default:
		return ""
	}
}

// Config is the settings in force, with what reloads took over.
func (d *Daemon) Config() config.Config { return d.inForce() }

// Acquire gets the lease without waiting for it, for a single pass; another
// holder is [pgstore.ErrLeaseHeld].
func (d *Daemon) Acquire(ctx context.Context) (*pgstore.Lease, error) {
	return pgstore.AcquireLease(ctx, d.leaseOptions(false))
}

// holder names this process to others.
func holder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown-host"
	}
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}

func (d *Daemon) leaseOptions(wait bool) pgstore.LeaseOptions {
	return pgstore.LeaseOptions{
		URL: d.cfg.Postgres.URL, Holder: holder(), Wait: wait,
		TTL: d.cfg.Lease.TTL, ConnectTimeout: d.cfg.Postgres.ConnectTimeout,
		Standby: func(holder pgstore.LeaseHolder) {
			d.log.Info("standing by: another instance holds the lease", "holder", holder.Holder, "since", holder.AcquiredAt)
			d.supervisor.Ready(fmt.Sprintf("standing by, mode %s: %s holds the lease", d.Mode(), holder.Holder))
		},
	}
}

// Run is the service: it waits for the lease, runs the jobs under it, stops
// all work when it is lost and waits for it again, until ctx ends. Then
// running passes are told to end and waited for. The HTTP server answers all
// the while.
func (d *Daemon) Run(ctx context.Context) error {
	state := &leaseState{metrics: d.metrics}
	state.set(admin.LeaseWaiting)
	stopping := context.AfterFunc(ctx, func() { d.supervisor.Stopping(StopLimit(d.cfg)) })
	defer stopping()
	if d.cfg.Admin.Listen != "" {
		server, err := d.adminServer(state)
		if err != nil {
			return err
		}
		if err := server.Start(ctx); err != nil {
			return err
		}
		d.log.Info("listening", "address", server.Addr())
		defer func() {
			stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), adminStopLimit)
			defer cancel()
			if err := server.Stop(stop); err != nil {
				d.log.Warn("admin server did not stop cleanly", "error", err)
			}
		}()
	}
	d.log.Info("waiting for the lease", "mode", d.Mode())
	d.supervisor.Status("waiting for the lease")
	for ctx.Err() == nil {
		lease, err := pgstore.AcquireLease(ctx, d.leaseOptions(true))
		if errors.Is(err, pgstore.ErrTransactionPooler) {
			return err
		}
		if err != nil {
			if ctx.Err() == nil {
				d.log.Error("the lease cannot be had; trying again", "error", err)
				d.supervisor.Status("the lease cannot be had; trying again: " + err.Error())
			}
			pause(ctx, leaseRetry)
			continue
		}
		state.set(admin.LeaseHeld)
		d.log.Info("holding the lease: working", "mode", d.Mode())
		d.supervisor.Ready("working, mode " + d.Mode())
		if err := d.workUnder(ctx, lease); err != nil {
			return err
		}
		if ctx.Err() == nil {
			state.set(admin.LeaseLost)
			d.log.Error("the lease was lost: all work has stopped; waiting for it again")
			d.supervisor.Status("the lease was lost: all work has stopped; waiting for it again")
		}
	}
	d.log.Info("stopped")
	return nil
}

const (
	adminStopLimit  = 5 * time.Second
	leaseRetry      = time.Second
	requestInterval = time.Second
	probeInterval   = 30 * time.Second
	backlogInterval = 5 * time.Second
	refenceInterval = 5 * time.Second
	refenceLimit    = 10 * time.Minute // it goes through every reservation of the live versions
	releaseLimit    = 3 * time.Second
)

// Mode is observe or act, as the daemon works.
func (d *Daemon) Mode() string {
	if d.observes {
		return "observe"
	}
	return "act"
}

// workUnder runs the jobs until ctx ends or the lease is lost.
func (d *Daemon) workUnder(ctx context.Context, lease *pgstore.Lease) error {
	defer func() {
		release, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseLimit)
		defer cancel()
		if err := lease.Release(release); err != nil {
			d.log.Warn("the lease was not given back; a successor waits until it has run out", "error", err)
		}
	}()
	journal := newJournal(d.Postgres, d.log)
	scheduler := schedule.New(schedule.Options{Logger: d.log, Recorder: recorders{d.metrics, journal}, Gate: jobGate{d.Postgres, lease}})
	if err := d.addJobs(scheduler); err != nil {
		return err
	}
	if err := scheduler.Start(); err != nil {
		return err
	}
	d.working.Store(scheduler)
	defer d.working.Store(nil)
	var background sync.WaitGroup
	work, cancel := context.WithCancel(ctx)
	background.Go(func() { journal.write(work) })
	background.Go(func() { d.runRequested(work, scheduler) })
	if d.notifier != nil {
		background.Go(func() { d.notifier.Run(work) })
	}
	select {
	case <-ctx.Done():
	case <-lease.Lost():
	}
	stop, cancelStop := context.WithTimeout(context.WithoutCancel(ctx), d.cfg.Run.StopTimeout)
	defer cancelStop()
	err := scheduler.Stop(stop)
	cancel()
	background.Wait()
	return err
}

func (d *Daemon) addJobs(s *schedule.Scheduler) error {
	for _, job := range d.jobs() {
		if err := s.Add(job); err != nil {
			return err
		}
	}
	return nil
}

// jobs are all jobs of the service: the workers, what compares, what watches.
// Each is also in [JobNames].
func (d *Daemon) jobs() []schedule.Job {
	every := map[string]struct{ pause, limit time.Duration }{
		JobRefence:     {refenceInterval, refenceLimit},
		JobScanner:     {d.cfg.Scanner.Every, hardLimit(d.cfg.Scanner.PassLimit)},
		JobFencer:      {d.cfg.Fencer.Every, hardLimit(d.cfg.Fencer.PassLimit)},
		JobCompensator: {d.cfg.Compensator.Every, hardLimit(d.cfg.Compensator.PassLimit)},
		JobTransfer:    {d.cfg.Transfer.Every, hardLimit(d.cfg.Transfer.PassLimit)},
	}
	var jobs []schedule.Job
	for _, w := range d.workers() {
		e := every[w.name]
		jobs = append(jobs, schedule.Job{
			Name: w.name, Schedule: "@every " + e.pause.String(), Limit: e.limit, Quiet: pass.QuietCounts(), Run: d.job(w),
		})
	}
	jobs = append(jobs, d.comparisons()...)
	jobs = append(jobs, d.rebalancing()...)
	jobs = append(jobs, d.purging()...)
	return append(jobs,
		schedule.Job{Name: JobBacklog, Schedule: "@every " + backlogInterval.String(), Limit: backlogInterval, Run: d.watchBacklog},
		schedule.Job{Name: JobSamples, Schedule: "@every " + samplesInterval.String(), Limit: samplesInterval, Quiet: []string{"kept"}, Run: d.keepSamples},
		schedule.Job{Name: JobProbe, Schedule: "@every " + probeInterval.String(), Limit: probeInterval, Run: d.sample})
}

// hardLimit is when a pass is cut off that does not end by itself: a pass
// begins no further round after its limit, and one round takes no longer.
func hardLimit(limit time.Duration) time.Duration { return 2*limit + 10*time.Second }

// runRequested runs the jobs that people asked for by `job run`.
func (d *Daemon) runRequested(ctx context.Context, s *schedule.Scheduler) {
	var runs sync.WaitGroup
	defer runs.Wait()
	for ; ctx.Err() == nil; pause(ctx, requestInterval) {
		names, err := d.Postgres.TakeRunRequests(ctx)
		if err != nil {
			d.log.Debug("requests to run jobs cannot be read", "error", err)
			continue
		}
		for _, name := range names {
			runs.Go(func() {
				if _, err := s.Run(ctx, name); err != nil {
					d.log.Warn("a job run by hand failed", "job", name, "error", err)
				}
			})
		}
	}
}

// probe looks at RocketMQ, so that a broker is known before the first sweep.
func (d *Daemon) probe(ctx context.Context) error {
	health, err := d.Evidence.Probe(ctx)
	return errors.Join(err, health.Err())
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
