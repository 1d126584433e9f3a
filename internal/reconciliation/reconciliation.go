// Package reconciliation carries out reconciliations, for the daemon's jobs and
// for the command alike: it takes the locks, stores each run with its report,
// continues one that was cut off, and asks a person about what only a person can
// put right (protocol §5).
//
//	locks → begin or continue → rounds, set pass, repairs → report → tasks
//
// What a run leaves behind in PostgreSQL is enough for the next one: locks end
// with the session that holds them, and a run without a report is one that was
// cut off.
package reconciliation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// Runner carries out runs. All fields but Archive are needed.
type Runner struct {
	Reconciler *reconcile.Reconciler
	Store      *pgstore.Store
	Locks      LockOptions
	Holder     string // names the process, in locks and stored runs
	Log        *slog.Logger
	// Archive keeps a report elsewhere too; nil: nowhere.
	Archive func(*reconcile.Report) error
}

// LockOptions say how the session of the locks is opened.
type LockOptions struct {
	URL            string
	ConnectTimeout time.Duration
}

// Request is one run.
type Request struct {
	Options reconcile.Options
	// Resume continues the newest interrupted deep run of the selection;
	// [ErrNothingToResume] if there is none.
	Resume bool
	// ResumeIfAny does so if there is one.
	ResumeIfAny bool
	// Wait is how long to wait for another run's locks.
	Wait time.Duration
	// LockRepairs takes the locks of repairs at the start. Otherwise they are
	// taken once something is to be repaired, without a wait.
	LockRepairs bool
	// NoStore keeps the run out of PostgreSQL and its archive; no tasks either.
	NoStore bool
	// Tasks opens tasks for what is found and resolves those that are over, in
	// the name of Actor.
	Tasks bool
	Actor string
	// EscalateAfter is how long a deficit is tried again before it is a task.
	EscalateAfter time.Duration
}

// Outcome is what a run came to. NotStored is why its report is not in
// PostgreSQL, or its tasks are not up to date; what the report says stands all
// the same.
type Outcome struct {
	Report    *reconcile.Report
	Opened    int // tasks that were reported, new or not
	Resolved  int // tasks that are over
	NotStored error
}

// ErrNothingToResume says that no deep run of the selection was cut off.
var ErrNothingToResume = errors.New("there is nothing to resume: no deep run of this selection was cut off in the last two hours. Run without --resume")

const (
	// resumeWithin is how old an interrupted run may be: what it compared is no
	// news any more then.
	resumeWithin = 2 * time.Hour
	// storeLimit bounds what is stored after a run, also after one that was told
	// to stop.
	storeLimit = 30 * time.Second
	// lifeSign is how often a run under way says so.
	lifeSign = 20 * time.Second
)

// Run makes a run. Errors are those of [reconcile.Reconciler.Run],
// [*pgstore.RunLockedError], [ErrNothingToResume], and what kept it from being
// begun: then there is no report.
func (r *Runner) Run(ctx context.Context, q Request) (Outcome, error) {
	o := q.Options
	locks, err := r.lock(ctx, q)
	if err != nil {
		return Outcome{}, err
	}
	if locks != nil {
		defer func() { _ = locks.Release() }() // the end of the session ends them too
	}
	if o.Repair != nil && !q.LockRepairs {
		repair := *o.Repair
		repair.Lock = r.lockRepairs
		o.Repair = &repair
	}
	began, err := r.Store.Now(ctx)
	if err != nil {
		return Outcome{}, err
	}
	// What cannot be stored is compared all the same.
	var out Outcome
	if !q.NoStore {
		out.NotStored = r.begin(ctx, q, &o)
	}
	if errors.Is(out.NotStored, ErrNothingToResume) {
		return Outcome{}, out.NotStored
	}
	stored := !q.NoStore && out.NotStored == nil
	report, err := r.reconcile(ctx, o, stored)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeLimit)
	defer cancel()
	if err != nil && stored {
		err = errors.Join(err, r.fail(ctx, o.RunID, err.Error()))
	}
	if err != nil {
		return Outcome{}, err
	}
	out.Report = report
	switch {
	case q.NoStore:
	case !stored:
		out.NotStored = errors.Join(out.NotStored, r.archive(report))
	default:
		r.after(ctx, q, began, &out)
	}
	return out, nil
}

// after stores the report and brings the tasks up to date.
func (r *Runner) after(ctx context.Context, q Request, began time.Time, out *Outcome) {
	if out.NotStored = r.keep(ctx, out.Report); out.NotStored == nil && q.Tasks {
		out.NotStored = r.tasks(ctx, q, began, out)
	}
}

// lock takes the locks of the run's modes, one for each activity (protocol §5).
// Other runs take none.
func (r *Runner) lock(ctx context.Context, q Request) (*pgstore.RunLocks, error) {
	repairs := q.Options.Repair != nil && q.LockRepairs
	if !q.Options.Deep && !repairs {
		return nil, nil
	}
	skus, err := r.Store.SKUs(ctx, q.Options.Filter.ActivityID, q.Options.Filter.SKUID)
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, sku := range skus {
		if q.Options.Deep {
			names["deep:"+sku.ActivityID] = true
		}
		if repairs {
			names["repair:"+sku.ActivityID] = true
		}
	}
	return r.take(ctx, slices.Collect(maps.Keys(names)), q.Wait)
}

// lockRepairs takes the repairs of one activity.
func (r *Runner) lockRepairs(ctx context.Context, activityID string) (func(), error) {
	locks, err := r.take(ctx, []string{"repair:" + activityID}, 0)
	if err != nil {
		return nil, err
	}
	return func() { _ = locks.Release() }, nil
}

func (r *Runner) take(ctx context.Context, names []string, wait time.Duration) (*pgstore.RunLocks, error) {
	return pgstore.LockRuns(ctx, pgstore.RunLockOptions{
		URL: r.Locks.URL, Names: names, Holder: r.Holder, Wait: wait, ConnectTimeout: r.Locks.ConnectTimeout,
	})
}

// begin notes the run, or finds the one that it continues.
func (r *Runner) begin(ctx context.Context, q Request, o *reconcile.Options) error {
	if o.Deep && (q.Resume || q.ResumeIfAny) {
		found, err := r.Store.Interrupted(ctx, pgstore.Selection(*o), time.Now().Add(-resumeWithin))
		switch {
		case err == nil:
			o.Resume, o.RunID = &found, found.RunID
			if err := r.Store.RecordRunProgress(ctx, found.RunID, nil); err != nil {
				return err
			}
			r.Log.Info("continuing an interrupted reconciliation", "run_id", found.RunID,
				"started_at", found.StartedAt, "members", found.Progress.Looked, "suspects", len(found.Progress.Suspects))
			return nil
		case !errors.Is(err, pgstore.ErrNotFound):
			return err
		case q.Resume:
			return ErrNothingToResume
		}
	}
	o.RunID = reconcile.NewRunID()
	return r.beginNew(ctx, *o, time.Now())
}

func (r *Runner) beginNew(ctx context.Context, o reconcile.Options, at time.Time) error {
	return r.Store.BeginRun(ctx, pgstore.NewRun{
		ID: o.RunID, Mode: modeOf(o), Selection: pgstore.Selection(o), StartedBy: r.Holder, StartedAt: at,
	})
}

func modeOf(o reconcile.Options) string {
	if o.Deep {
		return reconcile.ModeDeep
	}
	return reconcile.ModeQuick
}

// Unreachable makes, stores and archives the report of a run that could not
// begin, because a source other than PostgreSQL cannot be reached. It needs no
// Reconciler.
func (r *Runner) Unreachable(ctx context.Context, q Request, source string, cause error) Outcome {
	report := reconcile.Unreachable(source, cause)
	report.Mode = modeOf(q.Options)
	out := Outcome{Report: report}
	if q.NoStore {
		return out
	}
	q.Options.RunID = report.RunID
	if out.NotStored = r.beginNew(ctx, q.Options, report.StartedAt); out.NotStored == nil {
		out.NotStored = r.Store.FinishRun(ctx, report)
	}
	out.NotStored = errors.Join(out.NotStored, r.archive(report))
	return out
}

// reconcile makes the run, and gives signs of life meanwhile if it is stored.
func (r *Runner) reconcile(ctx context.Context, o reconcile.Options, stored bool) (*reconcile.Report, error) {
	if !stored {
		return r.Reconciler.Run(ctx, o)
	}
	note := func(ctx context.Context, progress any) {
		if err := r.Store.RecordRunProgress(ctx, o.RunID, progress); err != nil && ctx.Err() == nil {
			r.Log.Debug("how far a reconciliation got was not noted", "run_id", o.RunID, "error", err)
		}
	}
	if o.Deep {
		o.Checkpoint = func(ctx context.Context, p reconcile.Progress) { note(ctx, p) }
	}
	living, stop := context.WithCancel(ctx)
	var life sync.WaitGroup
	life.Go(func() {
		ticker := time.NewTicker(lifeSign)
		defer ticker.Stop()
		for {
			select {
			case <-living.Done():
				return
			case <-ticker.C:
				note(living, nil)
			}
		}
	})
	defer life.Wait()
	defer stop()
	return r.Reconciler.Run(ctx, o)
}

// keep stores the report. Of a deep pass that was told to stop it keeps how far
// it got instead, for the run that continues it, unless it changed something.
func (r *Runner) keep(ctx context.Context, report *reconcile.Report) error {
	if report.Resumable() {
		return r.fail(ctx, report.RunID, "it was told to stop; continue it with --resume")
	}
	return errors.Join(r.Store.FinishRun(ctx, report), r.archive(report))
}

func (r *Runner) archive(report *reconcile.Report) error {
	if r.Archive == nil {
		return nil
	}
	return r.Archive(report)
}

func (r *Runner) fail(ctx context.Context, id, reason string) error {
	return r.Store.FailRun(ctx, id, reason)
}

// tasks opens what the report asks a person about, and resolves what it shows
// to be over. began is the server's time before the run.
func (r *Runner) tasks(ctx context.Context, q Request, began time.Time, out *Outcome) error {
	reports, err := r.escalated(ctx, q, out.Report)
	if err != nil {
		return err
	}
	if err := r.Store.ReportTasks(ctx, reports); err != nil {
		return err
	}
	out.Opened = len(reports)
	if !out.Report.Complete() {
		return nil
	}
	open, err := r.Store.Tasks(ctx, pgstore.TaskFilter{States: []pgstore.TaskState{pgstore.TaskOpen}, Kinds: reconcile.ReportKinds()})
	if err != nil {
		return err
	}
	var over []int64
	for _, t := range open {
		s, err := reservation.ParseTag(t.Scope)
		named := slices.ContainsFunc(reports, func(n reservation.TaskReport) bool {
			return n.Kind == t.Kind && n.Scope == t.Scope && n.Cause == t.Cause
		})
		if err == nil && !named && out.Report.Disproves(t.Kind, s) && !workersOnly(t) {
			over = append(over, t.ID)
		}
	}
	out.Resolved, err = r.Store.ResolveOver(ctx, over, began, q.Actor, fmt.Sprintf("reconciliation %s looked for it and found it no more", out.Report.RunID))
	return err
}

// workersOnly says whether a task rests on what only a worker meets: a script
// that refused a reservation whose hash looks as it should.
func workersOnly(t pgstore.Task) bool {
	return t.Kind == reservation.TaskMalformed && (t.Cause == "wrong_data" || t.Cause == "id_conflict")
}

// escalated are the tasks of the report, of deficits only those that were tried
// for long.
func (r *Runner) escalated(ctx context.Context, q Request, report *reconcile.Report) ([]reservation.TaskReport, error) {
	deficits := report.Deficits()
	if len(deficits) == 0 {
		return report.Tasks(nil), nil
	}
	// Of what healed and came again long afterwards the earlier time does not count.
	first, err := r.Store.FirstFound(ctx, reconcile.CheckDeficit, deficits, time.Now().Add(-2*q.EscalateAfter-resumeWithin))
	if err != nil {
		return nil, err
	}
	return report.Tasks(func(id string) bool {
		at, known := first[id]
		return known && report.FinishedAt.Sub(at) >= q.EscalateAfter
	}), nil
}
