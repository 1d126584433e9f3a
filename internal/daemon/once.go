package daemon

import (
	"context"
	"errors"
	"fmt"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/reconciliation"
	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/reconcile"
)

// Names of the jobs, in the order in which a single pass runs them: what the
// scanner leaves to the fencer, and the fencer to the compensator, is settled
// in the same pass, and nothing of it while PostgreSQL has changed.
const (
	JobRefence     = "refence"
	JobScanner     = "scanner"
	JobFencer      = "fencer"
	JobCompensator = "compensator"
)

// worker is a job's pass.
type worker struct {
	name string
	pass func(context.Context) (*pass.Tally, error)
}

func (d *Daemon) workers() []worker {
	return []worker{
		{JobRefence, d.refencer.Pass},
		{JobScanner, d.scanner.Pass},
		{JobFencer, d.fencer.Pass},
		{JobCompensator, d.compensator.Pass},
		{JobTransfer, d.transfers.worker.Pass},
	}
}

// Verdict is what one pass of every worker came to.
type Verdict struct {
	Jobs       []JobVerdict `json:"jobs"`
	Incomplete bool         `json:"incomplete"` // a decision, or the comparison, rested on evidence that could not be read
	Drift      bool         `json:"drift"`      // both sides contradict each other after it
	// Reconciliation compared both sides after the workers; nil: it could not.
	Reconciliation *reconcile.Report `json:"reconciliation"`
}

// JobVerdict is one worker's part of a [Verdict].
type JobVerdict struct {
	Job       string         `json:"job"`
	Counts    map[string]int `json:"counts"`
	Rows      map[string]int `json:"rows"` // decisions by row of the table
	Decisions []pass.Counted `json:"decisions"`
	Error     string         `json:"error,omitempty"`
}

// Once runs one pass of every worker, then a quick pass of the reconciliation.
// Its verdict is incomplete when a decision rested on evidence that could not be
// read, or a scope could not be (interface §7); open tasks alone change nothing.
func (d *Daemon) Once(ctx context.Context) Verdict {
	var v Verdict
	for _, w := range d.workers() {
		tally, err := w.pass(ctx)
		d.count(tally)
		job := JobVerdict{Job: w.name, Counts: tally.Counts(), Rows: tally.ByRow(), Decisions: tally.Sorted()}
		if err != nil {
			job.Error = err.Error()
		}
		v.Jobs = append(v.Jobs, job)
		v.Incomplete = v.Incomplete || err != nil || tally.Unknown > 0
	}
	return v.with(d.compareOnce(ctx))
}

// compareOnce makes the quick pass of [Daemon.Once].
func (d *Daemon) compareOnce(ctx context.Context) (reconciliation.Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, d.cfg.Reconcile.QuickLimit)
	defer cancel()
	return d.comparison.runner.Run(ctx, d.request(false))
}

// with is the verdict with what the comparison came to.
func (v Verdict) with(out reconciliation.Outcome, err error) Verdict {
	job := JobVerdict{Job: JobReconcileQuick, Counts: map[string]int{}, Rows: map[string]int{}, Decisions: []pass.Counted{}}
	if err == nil {
		v.Reconciliation, job.Counts = out.Report, counted(out)
		v.Drift = out.Report.Drift()
		err = errors.Join(verdictError(out.Report), out.NotStored)
	}
	if err != nil {
		job.Error, v.Incomplete = err.Error(), true
	}
	v.Jobs = append(v.Jobs, job)
	return v
}

// job makes a scheduled job of a worker.
func (d *Daemon) job(w worker) func(context.Context) (schedule.Result, error) {
	return func(ctx context.Context) (schedule.Result, error) {
		tally, err := w.pass(ctx)
		d.count(tally)
		return schedule.Result(tally.Counts()), err
	}
}

// count exports what a pass decided.
func (d *Daemon) count(tally *pass.Tally) {
	for decision, n := range tally.Decisions {
		d.metrics.Decided(pass.RowName(decision.Row), string(decision.Verb), n)
	}
}

// errIncomplete ends a command with the status of incomplete evidence.
var errIncomplete = errors.New("evidence is incomplete")

// Err is nil for a complete verdict.
func (v Verdict) Err() error {
	if !v.Incomplete {
		return nil
	}
	var errs []error
	for _, job := range v.Jobs {
		if job.Error != "" {
			errs = append(errs, fmt.Errorf("%s: %s", job.Job, job.Error))
		}
	}
	return errors.Join(append([]error{errIncomplete}, errs...)...)
}
