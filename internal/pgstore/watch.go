package pgstore

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reconcile"
)

// TaskAge is how many tasks of a kind are open, and how long the oldest has been.
type TaskAge struct {
	Kind   string
	Count  int
	Oldest time.Duration
}

// TaskAges counts the unresolved tasks by kind, with the oldest one's age by
// the server's clock.
func (s *Store) TaskAges(ctx context.Context) ([]TaskAge, error) {
	return collect(ctx, s, "count open tasks", func(row pgx.CollectableRow) (TaskAge, error) {
		var t TaskAge
		var seconds float64
		err := row.Scan(&t.Kind, &t.Count, &seconds)
		t.Oldest = time.Duration(seconds * float64(time.Second))
		return t, err
	}, `SELECT kind, count(*), extract(epoch FROM clock_timestamp() - min(first_seen_at))::float8
		FROM seckill.manual_task WHERE state IN ('open', 'approved') GROUP BY kind ORDER BY kind`)
}

// OpenTransfers is how many transfers the journal has that are not finished,
// and how long ago the oldest was planned.
func (s *Store) OpenTransfers(ctx context.Context) (pending int, oldest time.Duration, err error) {
	var seconds float64
	err = s.pool.QueryRow(ctx, `
		SELECT count(*), coalesce(extract(epoch FROM clock_timestamp() - min(created_at)), 0)::float8
		FROM seckill.bucket_transfer WHERE state IN ('PLANNED', 'OUT')`).Scan(&pending, &seconds)
	return pending, time.Duration(seconds * float64(time.Second)), failed("count open transfers", err)
}

// RunSummary is a finished run without its scopes and findings.
type RunSummary struct {
	ID         string
	Mode       string
	Verdict    reconcile.Verdict
	FinishedAt time.Time
	Incomplete int // what could not be read
}

// LastRuns is the newest finished run of each mode that looked at every scope
// with every check.
func (s *Store) LastRuns(ctx context.Context) ([]RunSummary, error) {
	return collect(ctx, s, "read the last reconciliations", func(row pgx.CollectableRow) (RunSummary, error) {
		var r RunSummary
		err := row.Scan(&r.ID, &r.Mode, &r.Verdict, &r.FinishedAt, &r.Incomplete)
		r.FinishedAt = r.FinishedAt.UTC()
		return r, err
	}, `SELECT DISTINCT ON (mode) run_id, mode, verdict, finished_at, coalesce(incomplete, 0)
		FROM seckill.reconcile_run WHERE verdict IS NOT NULL AND selection = '{}'
		ORDER BY mode, started_at DESC, run_id DESC`)
}
