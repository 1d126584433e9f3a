package pgstore

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reconcile"
)

// trailRow is a note as the statement below reads it.
type trailRow struct {
	Actor   string         `json:"actor"`
	Action  string         `json:"action"`
	Scope   string         `json:"scope"`
	Subject string         `json:"subject"`
	Reason  string         `json:"reason"`
	Detail  map[string]any `json:"detail"`
}

// NoteRepairs adds an entry for each note to the audit trail, in one statement.
func (s *Store) NoteRepairs(ctx context.Context, notes []reconcile.RepairNote) error {
	if len(notes) == 0 {
		return nil
	}
	rows := make([]trailRow, len(notes))
	for i, n := range notes {
		detail := map[string]any{"check": n.Check, "run_id": n.RunID, "before": n.Before}
		if n.Stage == reconcile.RepairEnded {
			detail["after"], detail["outcome"] = n.After, n.Outcome
		}
		rows[i] = trailRow{n.Actor, string(n.Stage), n.Scope.Tag(), n.Subject, n.Why, detail}
	}
	encoded, err := encodeJSON(rows)
	if err != nil {
		return fmt.Errorf("encode %d entries of the audit trail: %w", len(notes), err)
	}
	return s.write(ctx, "write the audit trail", func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO seckill.audit_log (actor, action, scope, subject, reason, detail)
			SELECT r.actor, r.action, r.scope, r.subject, r.reason, r.detail
			FROM jsonb_to_recordset($1::jsonb) AS r (actor text, action text, scope text, subject text, reason text, detail jsonb)`, encoded)
		return err
	})
}

// Now is the server's time, which the times of tasks are of.
func (s *Store) Now(ctx context.Context) (time.Time, error) {
	var now time.Time
	err := s.pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now)
	return now, failed("ask for the time", err)
}

// FirstFound says since when stored runs have found the check in each subject.
// Runs that started before since do not count; what none found is absent.
func (s *Store) FirstFound(ctx context.Context, check string, subjects []string, since time.Time) (map[string]time.Time, error) {
	const action = "look for earlier findings"
	rows, err := s.pool.Query(ctx, `
		SELECT f.subject, min(r.started_at) FROM seckill.finding AS f JOIN seckill.reconcile_run AS r USING (run_id)
		WHERE f.subject = ANY ($1) AND f.check_id = $2 AND r.started_at >= $3 GROUP BY f.subject`, subjects, check, since)
	if err != nil {
		return nil, failed(action, err)
	}
	first := map[string]time.Time{}
	var subject string
	var at time.Time
	_, err = pgx.ForEachRow(rows, []any{&subject, &at}, func() error {
		first[subject] = at.UTC()
		return nil
	})
	return first, failed(action, err)
}

// ResolveOver resolves those of the tasks that are open and were not seen at or
// after notSince, the server's time, with one entry each in the audit trail. It
// returns how many.
func (s *Store) ResolveOver(ctx context.Context, ids []int64, notSince time.Time, actor, reason string) (resolved int, err error) {
	if len(ids) == 0 {
		return 0, nil
	}
	err = s.write(ctx, "resolve tasks that are over", func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, `
			WITH over AS (
				UPDATE seckill.manual_task SET state = 'resolved', decided_at = clock_timestamp(), decided_by = $3, decision = $4
				WHERE id = ANY ($1) AND state = 'open' AND last_seen_at < $2 RETURNING id, kind, scope, cause),
			noted AS (
				INSERT INTO seckill.audit_log (actor, action, scope, subject, reason, detail)
				SELECT $3, 'task_resolved', scope, id::text, $4, jsonb_build_object('kind', kind, 'cause', cause) FROM over RETURNING id)
			SELECT count(*) FROM noted`, ids, notSince, actor, reason).Scan(&resolved)
	})
	return resolved, err
}

// decodeProgress reads what a run recorded of its progress.
func decodeProgress(encoded json.RawMessage) (p reconcile.Progress, err error) {
	if err := json.Unmarshal(encoded, &p); err != nil {
		return p, fmt.Errorf("read the progress of the interrupted run: %w", err)
	}
	return p, nil
}

// Interrupted is the newest deep run of the selection that did not finish and
// recorded how far it got, or [ErrNotFound]. Call it while holding the run's
// locks: then nobody else is at work on it, however recent its last sign of life.
func (s *Store) Interrupted(ctx context.Context, selection RunSelection, since time.Time) (reconcile.Resume, error) {
	const few = 20
	runs, err := s.Runs(ctx, RunFilter{
		Mode: reconcile.ModeDeep, Selection: &selection, Since: since, Limit: few,
		States: []RunState{RunRunning, RunFailed, RunInterrupted},
	})
	if err != nil {
		return reconcile.Resume{}, err
	}
	for _, run := range runs {
		if run.Progress == nil {
			continue
		}
		progress, err := decodeProgress(run.Progress)
		return reconcile.Resume{RunID: run.ID, StartedAt: run.StartedAt, Progress: progress}, err
	}
	return reconcile.Resume{}, fmt.Errorf("an interrupted deep run of this selection: %w", ErrNotFound)
}

// UnresolvedIDs are the tasks that still stand, the oldest first, at most limit.
func (s *Store) UnresolvedIDs(ctx context.Context, limit int) ([]int64, error) {
	return collect(ctx, s, "list unresolved tasks", pgx.RowTo[int64],
		`SELECT id FROM seckill.manual_task WHERE state IN ('open', 'approved') ORDER BY id LIMIT $1`, limit)
}

// TasksOf are the tasks of those ids that still stand, in their order.
func (s *Store) TasksOf(ctx context.Context, ids []int64) ([]Task, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	return collect(ctx, s, "read tasks", scanTask,
		`SELECT `+taskColumns+` FROM seckill.manual_task WHERE id = ANY ($1) AND state IN ('open', 'approved') ORDER BY id`, ids)
}
