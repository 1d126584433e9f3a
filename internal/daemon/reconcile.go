package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/reconciliation"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/reportfile"
	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/reconcile"
)

// Names of the jobs that compare both sides (protocol §5).
const (
	JobReconcileQuick = "reconcile-quick" // numbers of all scopes, members of those with drift
	JobReconcileDeep  = "reconcile-deep"  // members of all scopes
)

// actor is who acts where nobody asked the daemon to.
const actor = "reconciler"

// comparison is the part of the daemon that reconciles. It has pools of its
// own, so that the workers never wait for it.
type comparison struct {
	clients  *redisstore.Clients
	postgres *pgstore.Store
	runner   *reconciliation.Runner
}

// comparisonConns is one connection for the snapshot of the orders, one for
// claims, and one each for what is stored meanwhile and for the webhook.
const comparisonConns = 4

func (d *Daemon) openComparison(ctx context.Context) (err error) {
	c := &d.comparison
	if c.clients, err = redisstore.Open(ctx, d.cfg.Redis); err != nil {
		return err
	}
	redis, err := redisstore.New(c.clients, d.cfg.Redis.CommandTimeout)
	if err != nil {
		return err
	}
	p := d.cfg.Postgres
	c.postgres, err = pgstore.Open(ctx, pgstore.Config{
		URL: p.URL, MaxConns: comparisonConns, ApplicationName: "reconciler reconcile",
		ConnectTimeout: p.ConnectTimeout, StatementTimeout: p.StatementTimeout,
	})
	if err != nil {
		return err
	}
	c.runner = &reconciliation.Runner{
		Reconciler: reconciliation.Reconciler(redis, c.postgres), Store: c.postgres,
		Locks:  reconciliation.LockOptions{URL: p.URL, ConnectTimeout: p.ConnectTimeout},
		Holder: holder(), Log: d.log, Archive: reportfile.Archive(d.cfg.Reconcile.ReportDir),
	}
	return nil
}

func (c *comparison) close() error {
	if c.postgres != nil {
		c.postgres.Close()
	}
	if c.clients == nil {
		return nil
	}
	return c.clients.Close()
}

// comparing is a job that compares, and how far it may go.
type comparing struct {
	name     string
	schedule string
	limit    time.Duration
	deep     bool
	quietly  string // the findings of the last pass, so that only what changed is logged
}

// storing is what a pass may take beyond its limit, to store what it found.
const storing = time.Minute

// comparisons are the jobs that compare; one that has no schedule is none.
func (d *Daemon) comparisons() []schedule.Job {
	r := d.cfg.Reconcile
	var jobs []schedule.Job
	for _, c := range []*comparing{
		{name: JobReconcileQuick, schedule: r.Quick, limit: r.QuickLimit},
		{name: JobReconcileDeep, schedule: r.Deep, limit: r.DeepLimit, deep: true},
	} {
		if c.schedule == "" {
			continue
		}
		jobs = append(jobs, schedule.Job{
			Name: c.name, Schedule: c.schedule, Limit: c.limit + storing, Quiet: []string{"scopes", "drift", "incomplete", "findings", "tasks"},
			Run: func(ctx context.Context) (schedule.Result, error) { return d.compare(ctx, c) },
		})
	}
	return jobs
}

// compare makes one pass. Where another run holds the locks it steps aside.
func (d *Daemon) compare(ctx context.Context, c *comparing) (schedule.Result, error) {
	limited, cancel := limit(ctx, c)
	defer cancel()
	out, err := d.comparison.runner.Run(limited, d.request(c.deep))
	if locked, ok := errors.AsType[*pgstore.RunLockedError](err); ok {
		d.log.Info("stepping aside: another run is at work", "job", c.name, "lock", locked.Name, "holder", locked.Holder)
		return schedule.Result{"stepped_aside": 1}, nil
	}
	if err != nil {
		return nil, err
	}
	d.observed(out.Report)
	d.tell(c, out.Report)
	return counted(out), errors.Join(context.Cause(ctx), verdictError(out.Report), out.NotStored)
}

// limit bounds a pass. A quick one reports what it could not read in time; a
// deep one is told to stop, and the next one continues it.
func limit(ctx context.Context, c *comparing) (context.Context, context.CancelFunc) {
	if !c.deep {
		return context.WithTimeout(ctx, c.limit)
	}
	ctx, cancel := context.WithCancel(ctx)
	timer := time.AfterFunc(c.limit, cancel)
	return ctx, func() { timer.Stop(); cancel() }
}

// request is a pass of the daemon: all scopes, all checks, its own repairs.
func (d *Daemon) request(deep bool) reconciliation.Request {
	r := d.cfg.Reconcile
	q := reconciliation.Request{
		Options:     reconcile.Options{Settle: r.Settle, Batch: r.Batch, Rate: r.Rate, Deep: deep, StuckAfter: d.cfg.Transfer.StuckAfter},
		ResumeIfAny: true, Tasks: true, Actor: actor, EscalateAfter: d.policies.Load().EscalateAfter,
	}
	if r.Repair == config.RepairAuto && !d.observes {
		q.Options.Repair = &reconcile.RepairOptions{
			Actor: actor, Max: r.MaxRepairs, Policy: *d.policies.Load(), Approve: func(int) bool { return true },
			FillDeficit: d.cfg.Transfer.FillDeficit == config.FillAuto,
		}
	}
	return q
}

// counted is what a pass came to.
func counted(out reconciliation.Outcome) schedule.Result {
	items := schedule.Result{"scopes": len(out.Report.Scopes), "tasks": out.Opened, "resolved": out.Resolved}
	for _, s := range out.Report.Scopes {
		if s.Verdict != reconcile.VerdictConsistent {
			items[string(s.Verdict)]++
		}
	}
	for _, f := range out.Report.Findings {
		if f.Stands() {
			items["findings"]++
		} else {
			items["repaired"]++
		}
	}
	return items
}

// verdictError is why a pass is incomplete; drift is no error of the pass.
func verdictError(r *reconcile.Report) error {
	if r.Verdict != reconcile.VerdictIncomplete {
		return nil
	}
	first := r.Incomplete[0]
	where := "all scopes"
	if first.Scope != nil {
		where = first.Scope.Reservation().Tag()
	}
	return fmt.Errorf("incomplete in %d places, such as %s of %s: %s", len(r.Incomplete), first.Source, where, first.Reason)
}

// observed exports what a pass found.
func (d *Daemon) observed(r *reconcile.Report) {
	scopes := map[string]int{
		string(reconcile.VerdictConsistent): 0, string(reconcile.VerdictDrift): 0, string(reconcile.VerdictIncomplete): 0,
	}
	var invariant, deviation int64
	for _, s := range r.Scopes {
		scopes[string(s.Verdict)]++
		if n := s.Redis; n != nil && n.Initial != nil && n.Available != nil && n.Reserved != nil {
			invariant += abs(*n.Initial - *n.Available - *n.Reserved)
		}
		if s.Deviation != nil {
			deviation += abs(*s.Deviation)
		}
	}
	d.metrics.SetReconciled(r.Mode, scopes, r.Summary)
	if r.Verdict != reconcile.VerdictIncomplete {
		d.metrics.SetDeviation(invariant, deviation)
	}
}

func abs(n int64) int64 { return max(n, -n) }

// tell logs what a pass found, if it is not what the one before found.
func (d *Daemon) tell(c *comparing, r *reconcile.Report) {
	var found []string
	for _, check := range slices.Sorted(maps.Keys(r.Summary)) {
		if n := r.Summary[check]; n > 0 {
			found = append(found, fmt.Sprintf("%s=%d", check, n))
		}
	}
	findings := strings.Join(found, " ")
	if findings == c.quietly || (findings == "" && r.Verdict == reconcile.VerdictIncomplete) {
		return
	}
	c.quietly = findings
	if findings == "" {
		d.log.Info("what was found before is found no more", "job", c.name, "run_id", r.RunID)
		return
	}
	d.log.Warn("both sides contradict each other", "job", c.name, "run_id", r.RunID, "findings", findings)
}
