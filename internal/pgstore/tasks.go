package pgstore

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reservation"
)

// Kinds of the tasks that halt releases: the open task is the halt.
const (
	TaskReleaseStorm    = "release_storm"    // of one scope: it released more than max_release
	TaskPostgresChanged = "postgres_changed" // of everything: see [Store.CheckIdentity]
)

// TaskState is how far a person has got with a task.
type TaskState string

// The states of a task.
const (
	TaskOpen     TaskState = "open"
	TaskApproved TaskState = "approved" // decided, still to be carried out
	TaskRejected TaskState = "rejected"
	TaskResolved TaskState = "resolved"
)

// Unresolved are the states of a task that still stands.
var Unresolved = []TaskState{TaskOpen, TaskApproved}

// maxSample bounds the subjects kept with a task.
const maxSample = 20

// Task asks for a person: one per (kind, scope, cause) while it is unresolved.
type Task struct {
	ID          int64
	Kind        string
	Scope       string // a tag, or empty for the whole installation
	Cause       string
	Count       int64 // the most subjects that one report named, or that the sample holds
	Occurrences int64 // reports since it was opened
	Sample      []string
	State       TaskState
	FirstSeenAt time.Time
	LastSeenAt  time.Time
	DecidedAt   time.Time
	DecidedBy   string
	Decision    string
}

// TaskDecidedError says that somebody was faster.
type TaskDecidedError struct {
	ID    int64
	State TaskState
	By    string
}

func (e *TaskDecidedError) Error() string {
	return fmt.Sprintf("task %d was %s by %s already", e.ID, e.State, e.By)
}

// ReportTasks opens a task for each report or adds the report to the one that
// is unresolved: the count is the largest reported at once, and the newest
// subjects come first in a bounded sample. A task that was resolved is opened
// anew, as another task. All reports are written, or none.
func (s *Store) ReportTasks(ctx context.Context, reports []reservation.TaskReport) error {
	if len(reports) == 0 {
		return nil
	}
	return s.write(ctx, "report tasks", func(tx pgx.Tx) error { return reportTasks(ctx, tx, reports) })
}

// taskRow is a report as the statement below reads it.
type taskRow struct {
	Kind   string   `json:"kind"`
	Scope  string   `json:"scope"`
	Cause  string   `json:"cause"`
	Count  int      `json:"count"`
	Sample []string `json:"sample"`
}

func reportTasks(ctx context.Context, tx pgx.Tx, reports []reservation.TaskReport) error {
	rows, err := json.Marshal(mergeReports(reports))
	if err != nil {
		return fmt.Errorf("encode the reports: %w", err)
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO seckill.manual_task AS t (kind, scope, cause, count, sample)
		SELECT r.kind, r.scope, r.cause, r.count, r.sample
		FROM jsonb_to_recordset($1::jsonb) AS r (kind text, scope text, cause text, count bigint, sample text[])
		ORDER BY r.kind, r.scope, r.cause
		ON CONFLICT (kind, scope, cause) WHERE state IN ('open', 'approved') DO UPDATE SET
			(count, sample) = (
				SELECT greatest(t.count, excluded.count, count(*)), coalesce(array_agg(m.subject ORDER BY m.place), '{}')
				FROM (SELECT u.subject, min(u.place) AS place
				      FROM unnest(excluded.sample || t.sample) WITH ORDINALITY AS u (subject, place)
				      GROUP BY u.subject ORDER BY place LIMIT $2) AS m),
			occurrences = t.occurrences + 1,
			last_seen_at = clock_timestamp()`, rows, maxSample)
	return err
}

// mergeReports makes one row of the reports of one kind, scope and cause, in a
// fixed order: two workers that report at once do not deadlock.
func mergeReports(reports []reservation.TaskReport) []taskRow {
	var rows []taskRow
	for _, r := range reports {
		i := slices.IndexFunc(rows, func(t taskRow) bool { return t.Kind == r.Kind && t.Scope == r.Scope && t.Cause == r.Cause })
		if i < 0 {
			rows = append(rows, taskRow{Kind: r.Kind, Scope: r.Scope, Cause: r.Cause, Sample: []string{}})
			i = len(rows) - 1
		}
		rows[i].Count += r.Count
		for _, subject := range r.Sample {
			if subject != "" && len(rows[i].Sample) < maxSample && !slices.Contains(rows[i].Sample, subject) {
				rows[i].Sample = append(rows[i].Sample, subject)
			}
		}
	}
	slices.SortFunc(rows, func(a, b taskRow) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Scope, b.Scope), cmp.Compare(a.Cause, b.Cause))
	})
	return rows
}

// TaskFilter selects tasks; what is not set selects all.
type TaskFilter struct {
	States []TaskState
	Kinds  []string
	Scope  *string // a tag, or "" for those of the whole installation
	Limit  int     // 0: no limit
}

const taskColumns = `id, kind, scope, cause, count, occurrences, sample, state, first_seen_at, last_seen_at, decided_at, decided_by, decision`

// Tasks lists tasks, the one seen last first.
func (s *Store) Tasks(ctx context.Context, f TaskFilter) ([]Task, error) {
	return collect(ctx, s, "list tasks", scanTask, `
		SELECT `+taskColumns+` FROM seckill.manual_task
		WHERE (cardinality($1::text[]) = 0 OR state = ANY ($1)) AND (cardinality($2::text[]) = 0 OR kind = ANY ($2))
		  AND ($3::text IS NULL OR scope = $3)
		ORDER BY last_seen_at DESC, id DESC LIMIT nullif($4, 0)`,
		append([]TaskState{}, f.States...), append([]string{}, f.Kinds...), f.Scope, f.Limit)
}

// Task is one task, or [ErrNotFound].
func (s *Store) Task(ctx context.Context, id int64) (Task, error) {
	tasks, err := collect(ctx, s, "read a task", scanTask, `SELECT `+taskColumns+` FROM seckill.manual_task WHERE id = $1`, id)
	if err != nil {
		return Task{}, err
	}
	if len(tasks) == 0 {
		return Task{}, fmt.Errorf("task %d: %w", id, ErrNotFound)
	}
	return tasks[0], nil
}

func scanTask(row pgx.CollectableRow) (Task, error) {
	var t Task
	var decidedAt *time.Time
	var decidedBy, decision *string
	err := row.Scan(&t.ID, &t.Kind, &t.Scope, &t.Cause, &t.Count, &t.Occurrences, &t.Sample, &t.State,
		&t.FirstSeenAt, &t.LastSeenAt, &decidedAt, &decidedBy, &decision)
	t.FirstSeenAt, t.LastSeenAt, t.DecidedAt = t.FirstSeenAt.UTC(), t.LastSeenAt.UTC(), moment(decidedAt)
	t.DecidedBy, t.Decision = text(decidedBy), text(decision)
	return t, err
}

// LiftChanged ends the given postgres_changed tasks, once every RELEASED
// reservation of the live versions has been fenced again (protocol §1). It is
// noted in the audit trail with how many fences had been lost.
func (s *Store) LiftChanged(ctx context.Context, tasks []int64, refenced int) error {
	const actor = "reconciler"
	return s.write(ctx, "lift the halt of the changed PostgreSQL", func(tx pgx.Tx) error {
		decision := fmt.Sprintf("every released reservation was fenced again; %d fences had been lost", refenced)
		tag, err := tx.Exec(ctx, `
			UPDATE seckill.manual_task SET state = 'resolved', decided_at = clock_timestamp(), decided_by = $2, decision = $3
			WHERE id = ANY ($1) AND kind = $4 AND state IN ('open', 'approved')`, tasks, actor, decision, TaskPostgresChanged)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		return addAudit(ctx, tx, AuditEntry{
			Actor: actor, Action: "postgres_changed_lifted", Reason: decision, Detail: map[string]any{"tasks": tasks, "refenced": refenced},
		})
	})
}

// ErrNotLiftedByHand says that a postgres_changed task does not end by a
// person's word: claims were lost, and with them the reason why units of
// RELEASED reservations may be sold again. Releases go on once those have been
// fenced again (protocol §1).
var ErrNotLiftedByHand = errors.New("a changed PostgreSQL is not lifted by hand: the daemon lifts it once every RELEASED reservation of the live versions is fenced again; see the errors of its job refence")

// ErrHaltNotRejected says that a release_storm task cannot be rejected: the
// open task is the halt, and no other end of it means that releases stay
// halted.
var ErrHaltNotRejected = errors.New("rejecting the task would lift the halt that it is: resolve it to let releases go on, or leave it open")

// ResolveTask ends a task, with actor and reason in it and in the audit trail.
// It lifts the halt that the task is, but for [ErrNotLiftedByHand].
// [ErrNotFound]: no such task; a
// [*TaskDecidedError]: it is rejected or resolved already. Needs
// seckill_operator by custom; the daemon's rights suffice.
func (s *Store) ResolveTask(ctx context.Context, id int64, actor, reason string) error {
	return s.decideTask(ctx, id, TaskResolved, actor, reason)
}

// RejectTask ends a task without doing what it proposes, with actor and reason
// in it and in the audit trail. A cause that stays is reported as another task.
// Errors are those of ResolveTask, and [ErrHaltNotRejected].
func (s *Store) RejectTask(ctx context.Context, id int64, actor, reason string) error {
	return s.decideTask(ctx, id, TaskRejected, actor, reason)
}

func (s *Store) decideTask(ctx context.Context, id int64, as TaskState, actor, reason string) error {
	return s.write(ctx, "end a task", func(tx pgx.Tx) error {
		var t Task
		err := tx.QueryRow(ctx, `
			UPDATE seckill.manual_task SET state = $4, decided_at = clock_timestamp(), decided_by = $2, decision = $3
			WHERE id = $1 AND state IN ('open', 'approved') RETURNING kind, scope, cause`,
			id, actor, reason, as).Scan(&t.Kind, &t.Scope, &t.Cause)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return notDecided(ctx, tx, id)
		case err != nil:
			return err
		case t.Kind == TaskPostgresChanged:
			return ErrNotLiftedByHand // and the transaction takes the change back
		case t.Kind == TaskReleaseStorm && as == TaskRejected:
			return ErrHaltNotRejected
		}
		return addAudit(ctx, tx, AuditEntry{
			Actor: actor, Action: "task_" + string(as), Scope: t.Scope, Subject: strconv.FormatInt(id, 10), Reason: reason,
			Detail: map[string]any{"kind": t.Kind, "cause": t.Cause},
		})
	})
}

func notDecided(ctx context.Context, tx pgx.Tx, id int64) error {
	decided := TaskDecidedError{ID: id}
	err := tx.QueryRow(ctx, `SELECT state, coalesce(decided_by, '') FROM seckill.manual_task WHERE id = $1`, id).
		Scan(&decided.State, &decided.By)
	if errors.Is(err, pgx.ErrNoRows) {
		return fmt.Errorf("task %d: %w", id, ErrNotFound)
	}
	if err != nil {
		return err
	}
	return &decided
}

// OpenTasks counts the unresolved tasks by kind.
func (s *Store) OpenTasks(ctx context.Context) (map[string]int64, error) {
	const action = "count open tasks"
	rows, err := s.pool.Query(ctx, `SELECT kind, count(*) FROM seckill.manual_task WHERE state IN ('open', 'approved') GROUP BY kind`)
	if err != nil {
		return nil, failed(action, err)
	}
	counts := map[string]int64{}
	var kind string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&kind, &n}, func() error {
		counts[kind] = n
		return nil
	})
	return counts, failed(action, err)
}

// Halts lists the open tasks that stop releases: release_storm for a scope,
// postgres_changed for all.
func (s *Store) Halts(ctx context.Context) ([]Task, error) {
	return s.Tasks(ctx, TaskFilter{States: Unresolved, Kinds: []string{TaskReleaseStorm, TaskPostgresChanged}})
}
