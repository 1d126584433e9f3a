// Package retention deletes what has been kept for long enough (protocol §4,
// purge): claims, decided tasks, reports, the journal of transfers and forgotten
// jobs, each by its own policy. A plan says beforehand what would go.
//
// Each kind goes by rules that the policy cannot loosen: a claim stays while
// its order exists and until its version is CLOSED and past its retention, the
// journal until its version's retention has passed, and what is undecided or
// under way always. The audit trail is never deleted.
package retention

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/reportfile"
)

// KindReportFiles are the files in reconcile.report_dir of this machine; the
// other kinds are pgstore's.
const KindReportFiles pgstore.PurgeKind = "report_files"

// Policy is how long each kind is kept; 0 keeps it for ever.
type Policy struct {
	Claims    time.Duration
	Tasks     time.Duration
	Reports   time.Duration // and files
	Transfers time.Duration
	Jobs      time.Duration
	Samples   time.Duration
	ReportDir string // "" for none
	Batch     int    // rows in one statement
	// Act is false in mode observe: then claims and the journal of transfers
	// stay (interface §7).
	Act bool
}

// PolicyOf is the policy that the settings make.
func PolicyOf(c config.Config) Policy {
	return Policy{
		Claims: c.Purge.ClaimsAfter, Tasks: c.Purge.TasksAfter, Reports: c.Reconcile.Retention,
		Transfers: c.Purge.TransfersAfter, Jobs: c.Purge.JobsAfter, Samples: c.Purge.SamplesAfter, ReportDir: c.Reconcile.ReportDir,
		Batch: c.Purge.Batch, Act: c.Mode == config.ModeAct,
	}
}

// Amount is what of one kind may be deleted, or was.
type Amount struct {
	Kind pgstore.PurgeKind
	Keep time.Duration // 0: for ever
	pgstore.Purgeable
	Skipped string // why nothing of it is deleted, or empty
}

// kept is one kind with its policy.
type kept struct {
	kind    pgstore.PurgeKind
	keep    time.Duration
	skipped string
}

// kinds lists the kinds in the order in which they are purged.
func (p Policy) kinds() []kept {
	observed := ""
	if !p.Act {
		observed = "mode is observe"
	}
	all := []kept{
		{pgstore.PurgeClaims, p.Claims, observed},
		{pgstore.PurgeTransfers, p.Transfers, observed},
		{pgstore.PurgeTasks, p.Tasks, ""},
		{pgstore.PurgeReports, p.Reports, ""},
		{pgstore.PurgeJobs, p.Jobs, ""},
		{pgstore.PurgeSamples, p.Samples, ""},
	}
	if p.ReportDir != "" {
		all = append(all, kept{KindReportFiles, p.Reports, ""})
	}
	for i := range all {
		if all[i].keep <= 0 {
			all[i].skipped = "kept for ever"
		}
	}
	return all
}

// Plan counts what may be deleted of each kind, and changes nothing. A kind
// that cannot be counted is in the error, and the others are counted all the
// same.
func Plan(ctx context.Context, store *pgstore.Store, p Policy) ([]Amount, error) {
	var plan []Amount
	var failures []error
	for _, k := range p.kinds() {
		a := Amount{Kind: k.kind, Keep: k.keep, Skipped: k.skipped}
		if k.keep > 0 {
			var err error
			if a.Purgeable, err = count(ctx, store, p, k); err != nil {
				failures = append(failures, err)
				a.Skipped = "could not be counted"
			}
		}
		plan = append(plan, a)
	}
	return plan, errors.Join(failures...)
}

func count(ctx context.Context, store *pgstore.Store, p Policy, k kept) (pgstore.Purgeable, error) {
	if k.kind != KindReportFiles {
		return store.PlanPurge(ctx, k.kind, k.keep, p.Batch)
	}
	files, err := reportfile.Older(p.ReportDir, time.Now().Add(-k.keep))
	if err != nil || len(files) == 0 {
		return pgstore.Purgeable{}, err
	}
	return pgstore.Purgeable{Count: int64(len(files)), Oldest: files[0].At, Newest: files[len(files)-1].At}, nil
}

// By is who purges and why, for the audit trail.
type By struct{ Actor, Reason string }

// Apply deletes what may be deleted now, in bounded batches, and returns how
// much it was of each kind (without times). What was deleted before an error
// stays deleted and is counted. Two entries in the audit trail say that it began,
// without which nothing is deleted, and what it deleted.
func Apply(ctx context.Context, store *pgstore.Store, p Policy, by By) ([]Amount, error) {
	policy := map[string]any{}
	for _, k := range p.kinds() {
		policy[string(k.kind)] = cmp.Or(k.skipped, k.keep.String())
	}
	if err := store.Audit(ctx, pgstore.AuditEntry{Actor: by.Actor, Action: "purge_started", Reason: by.Reason, Detail: policy}); err != nil {
		return nil, err
	}
	var done []Amount
	var failures []error
	deleted := map[string]any{}
	for _, k := range p.kinds() {
		a := Amount{Kind: k.kind, Keep: k.keep, Skipped: k.skipped}
		if k.skipped == "" {
			var err error
			if a.Count, err = purge(ctx, store, p, k); err != nil {
				failures = append(failures, err)
			}
			deleted[string(k.kind)] = a.Count
		}
		done = append(done, a)
	}
	// What is gone is noted also if this process is told to stop.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), auditLimit)
	defer cancel()
	failures = append(failures, store.Audit(end, pgstore.AuditEntry{
		Actor: by.Actor, Action: "purge_ended", Reason: by.Reason, Detail: map[string]any{"deleted": deleted, "complete": len(failures) == 0},
	}))
	return done, errors.Join(failures...)
}

// auditLimit bounds the last entry of a run that was told to stop.
const auditLimit = 5 * time.Second

func purge(ctx context.Context, store *pgstore.Store, p Policy, k kept) (int64, error) {
	if k.kind == KindReportFiles {
		return purgeFiles(ctx, p.ReportDir, k.keep)
	}
	var total int64
	for position := ""; ; {
		deleted, next, err := store.PurgePage(ctx, k.kind, k.keep, p.Batch, position)
		total += deleted
		if err != nil || next == "" {
			return total, err
		}
		position = next
	}
}

func purgeFiles(ctx context.Context, dir string, keep time.Duration) (int64, error) {
	files, err := reportfile.Older(dir, time.Now().Add(-keep))
	var total int64
	for _, f := range files {
		if ctx.Err() != nil {
			return total, fmt.Errorf("remove old reports from %s: %w", dir, context.Cause(ctx))
		}
		if err := f.Remove(); err != nil {
			return total, err
		}
		total++
	}
	return total, err
}
