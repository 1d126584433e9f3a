package pgstore

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reconcile"
)

const (
	// maxStoredFindings bounds the findings kept with one run; what is beyond
	// is counted, see [reconcile.Report.Bounded].
	maxStoredFindings = 20_000
	// findingBatch bounds the rows of one COPY, so that each ends within the
	// statement time-out.
	findingBatch = 2_000
	// silentAfter is how long a run that gives no sign of life counts as under
	// way; then it was interrupted.
	silentAfter = 2 * time.Minute
)

// RunState is how far a reconciliation has come.
type RunState string

// The states of a run. Only a finished one has a verdict: what was cut off is
// never consistent.
const (
	RunRunning     RunState = "running"     // gave a sign of life within two minutes
	RunFinished    RunState = "finished"    // has a report
	RunFailed      RunState = "failed"      // ended by an error, without a report
	RunInterrupted RunState = "interrupted" // was not heard of since: killed, or cut off from PostgreSQL
)

// RunStates lists the states.
var RunStates = []RunState{RunRunning, RunFinished, RunFailed, RunInterrupted}

// Errors of stored runs.
var (
	// ErrRunExists: a run of that id was begun already.
	ErrRunExists = errors.New("a run of that id exists already")
	// ErrRunEnded: the run has finished; its report does not change.
	ErrRunEnded = errors.New("the run has finished already")
	// ErrNoReport: the run has not finished, and so has no report.
	ErrNoReport = errors.New("the run has no report")
)

// RunSelection is what a run looked at. Two runs can be compared if mode and
// selection are equal.
type RunSelection struct {
	ActivityID string   `json:"activity_id,omitempty"`
	SKUID      string   `json:"sku_id,omitempty"`
	Version    *int64   `json:"activity_version,omitempty"`
	Bucket     *int64   `json:"bucket_id,omitempty"`
	Checks     []string `json:"checks,omitempty"` // none: all
}

// Selection is what a reconciliation's options select.
func Selection(o reconcile.Options) RunSelection {
	return RunSelection{
		ActivityID: o.Filter.ActivityID, SKUID: o.Filter.SKUID, Version: o.Filter.Version, Bucket: o.Filter.Bucket, Checks: o.Checks,
	}
}

// encode is the selection with its checks in one order.
func (s RunSelection) encode() ([]byte, error) {
	checks := slices.Clone(s.Checks)
	slices.Sort(checks)
	s.Checks = slices.Compact(checks)
	encoded, err := json.Marshal(s)
	if err != nil {
		return nil, fmt.Errorf("encode the selection: %w", err)
	}
	return encoded, nil
}

// NewRun is a run that begins.
type NewRun struct {
	ID        string // of [reconcile.NewRunID], and the report's
	Mode      string // [reconcile.ModeQuick] or [reconcile.ModeDeep]
	Selection RunSelection
	StartedBy string
	StartedAt time.Time
}

// StoredRun is a reconciliation as PostgreSQL knows it. Numbers and verdict
// are of its report, and set only when it is finished.
type StoredRun struct {
	ID         string
	Mode       string
	Selection  RunSelection
	StartedBy  string
	StartedAt  time.Time
	SeenAt     time.Time // the last sign of life
	FinishedAt time.Time
	State      RunState
	Failure    string          // why it failed
	Progress   json.RawMessage // of the last [Store.RecordRunProgress]; nil once it is finished
	Verdict    reconcile.Verdict
	Scopes     int
	Findings   int // that stand
	Incomplete int
}

// BeginRun notes that a run begins. [ErrRunExists]: one of that id does.
func (s *Store) BeginRun(ctx context.Context, r NewRun) error {
	selection, err := r.Selection.encode()
	if err != nil {
		return err
	}
	return s.write(ctx, "begin run "+r.ID, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			INSERT INTO seckill.reconcile_run (run_id, mode, started_at, started_by, selection)
			VALUES ($1, $2, $3, $4, $5) ON CONFLICT (run_id) DO NOTHING`,
			r.ID, r.Mode, r.StartedAt, storable(r.StartedBy), selection)
		if err == nil && tag.RowsAffected() == 0 {
			err = ErrRunExists
		}
		return err
	})
}

// RecordRunProgress is a sign of life of a run under way: call it at least once
// a minute. progress is encoded as JSON and read back by a run that resumes;
// nil leaves what was recorded before. A run that had failed is under way again.
// [ErrRunEnded], [ErrNotFound].
func (s *Store) RecordRunProgress(ctx context.Context, id string, progress any) error {
	var encoded []byte
	if progress != nil {
		var err error
		if encoded, err = json.Marshal(progress); err != nil {
			return fmt.Errorf("encode the progress of run %s: %w", id, err)
		}
	}
	return s.updateRun(ctx, "record the progress of run "+id, id, `
		seen_at = clock_timestamp(), failure = NULL, progress = coalesce($2, progress)`, encoded)
}

// FailRun notes why a run ended without a report. What it recorded of its
// progress stays, so that it can be resumed. [ErrRunEnded], [ErrNotFound].
func (s *Store) FailRun(ctx context.Context, id, reason string) error {
	return s.updateRun(ctx, "end run "+id, id, `seen_at = clock_timestamp(), failure = $2`, storable(reason))
}

// updateRun changes a run that is not finished.
func (s *Store) updateRun(ctx context.Context, action, id, set string, args ...any) error {
	return s.write(ctx, action, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `UPDATE seckill.reconcile_run SET `+set+` WHERE run_id = $1 AND verdict IS NULL`, append([]any{id}, args...)...)
		if err != nil || tag.RowsAffected() == 1 {
			return err
		}
		return notUnderWay(ctx, tx, id)
	})
}

func notUnderWay(ctx context.Context, tx pgx.Tx, id string) error {
	var there bool
	if err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM seckill.reconcile_run WHERE run_id = $1)`, id).Scan(&there); err != nil {
		return err
	}
	if !there {
		return fmt.Errorf("run %s: %w", id, ErrNotFound)
	}
	return ErrRunEnded
}

// FinishRun stores the report of the run of its RunID, all of it or nothing. It
// keeps at most 20,000 findings and counts the others. The same report may be
// stored again, which changes nothing. [ErrRunEnded]: the run has another
// report; [ErrNotFound]: it was not begun.
func (s *Store) FinishRun(ctx context.Context, report *reconcile.Report) error {
	report = report.Bounded(maxStoredFindings)
	plain := *report
	plain.Findings = []reconcile.Finding{} // rows of their own
	encoded, err := encodeJSON(plain)
	if err != nil {
		return fmt.Errorf("encode the report of run %s: %w", report.RunID, err)
	}
	standing := 0
	for _, n := range report.Summary {
		standing += n
	}
	return s.write(ctx, "store the report of run "+report.RunID, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			UPDATE seckill.reconcile_run SET finished_at = $2, seen_at = clock_timestamp(), failure = NULL, progress = NULL,
			       verdict = $3, report = $4, scopes = $5, findings = $6, incomplete = $7
			WHERE run_id = $1 AND verdict IS NULL`,
			report.RunID, report.FinishedAt, report.Verdict, encoded, len(report.Scopes), standing, len(report.Incomplete))
		if err != nil {
			return err
		}
		if tag.RowsAffected() == 0 {
			return alreadyFinished(ctx, tx, report.RunID, encoded)
		}
		return insertFindings(ctx, tx, report)
	})
}

// alreadyFinished is nil if the run has exactly this report: the reply to the
// commit was lost.
func alreadyFinished(ctx context.Context, tx pgx.Tx, id string, encoded []byte) error {
	var same bool
	err := tx.QueryRow(ctx, `SELECT report = $2::jsonb FROM seckill.reconcile_run WHERE run_id = $1`, id, encoded).Scan(&same)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("run %s: %w", id, ErrNotFound)
	case err != nil:
		return err
	case !same:
		return ErrRunEnded
	}
	return nil
}

var findingColumns = []string{
	"run_id", "number", "check_id", "severity", "activity_id", "sku_id", "activity_version", "bucket_id", "subject", "message",
	"evidence", "rounds", "repair_kind", "repair_state", "repair_detail", "repair_before", "repair_after",
}

func insertFindings(ctx context.Context, tx pgx.Tx, report *reconcile.Report) error {
	number := 0
	for batch := range slices.Chunk(report.Findings, findingBatch) {
		rows := make([][]any, 0, len(batch))
		for _, f := range batch {
			number++
			row, err := findingRow(report.RunID, number, f)
			if err != nil {
				return fmt.Errorf("encode finding %d: %w", number, err)
			}
			rows = append(rows, row)
		}
		if _, err := tx.CopyFrom(ctx, pgx.Identifier{"seckill", "finding"}, findingColumns, pgx.CopyFromRows(rows)); err != nil {
			return err
		}
	}
	return nil
}

func findingRow(id string, number int, f reconcile.Finding) ([]any, error) {
	evidence, err := encodeJSON(f.Evidence)
	if err != nil {
		return nil, err
	}
	var values [2]any // NULL where nothing was changed
	for i, changed := range []map[string]any{f.Repair.Before, f.Repair.After} {
		if changed == nil {
			continue
		}
		if values[i], err = encodeJSON(changed); err != nil {
			return nil, err
		}
	}
	return []any{
		id, number, f.Check, string(f.Severity), storable(f.Scope.ActivityID), storable(f.Scope.SKUID), f.Scope.Version, f.Scope.Bucket,
		storable(f.Subject), storable(f.Message), evidence, f.Rounds,
		string(f.Repair.Kind), string(f.Repair.State), storable(f.Repair.Detail), values[0], values[1],
	}, nil
}

// storable is text without what PostgreSQL cannot store: NUL and invalid UTF-8.
// Values come from Redis, where anything may stand.
func storable(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}

// encodeJSON is JSON that PostgreSQL can store; see storable. json.Marshal
// itself replaces invalid UTF-8 and writes NUL as an escape.
func encodeJSON(value any) ([]byte, error) {
	encoded, err := json.Marshal(value)
	if err != nil || !bytes.Contains(encoded, []byte(`\u0000`)) {
		return encoded, err
	}
	clean := make([]byte, 0, len(encoded))
	for i := 0; i < len(encoded); i++ {
		if encoded[i] != '\\' {
			clean = append(clean, encoded[i])
			continue
		}
		// An escape is two bytes or, for \u, six: of `\\u0000` the first two
		// are one backslash.
		if bytes.HasPrefix(encoded[i:], []byte(`\u0000`)) {
			clean = append(clean, `\ufffd`...)
			i += len(`\u0000`) - 1
			continue
		}
		clean = append(clean, encoded[i], encoded[i+1])
		i++
	}
	return clean, nil
}

// RunFilter selects runs; what is not set selects all.
type RunFilter struct {
	Mode       string
	States     []RunState
	Verdicts   []reconcile.Verdict
	Selection  *RunSelection
	ActivityID string     // of the selection
	Since      time.Time  // started then or later
	Before     *StoredRun // started before it
	Limit      int        // 0: no limit
}

const runColumns = `run_id, mode, selection, started_by, started_at, seen_at, finished_at, state, coalesce(failure, ''), progress,
	coalesce(verdict, ''), coalesce(scopes, 0), coalesce(findings, 0), coalesce(incomplete, 0)`

// runsSQL is the runs with their states; $1 is silentAfter.
const runsSQL = `seckill.reconcile_run AS r CROSS JOIN LATERAL (
	SELECT CASE WHEN r.verdict IS NOT NULL THEN 'finished' WHEN r.failure IS NOT NULL THEN 'failed'
	            WHEN r.seen_at > clock_timestamp() - $1::interval THEN 'running' ELSE 'interrupted' END AS state) AS s`

// Runs lists runs, the newest first.
func (s *Store) Runs(ctx context.Context, f RunFilter) ([]StoredRun, error) {
	var selection []byte
	if f.Selection != nil {
		var err error
		if selection, err = f.Selection.encode(); err != nil {
			return nil, err
		}
	}
	var beforeAt *time.Time
	var beforeID string
	if f.Before != nil {
		beforeAt, beforeID = &f.Before.StartedAt, f.Before.ID
	}
	return collect(ctx, s, "list runs", scanRun, `
		SELECT `+runColumns+` FROM `+runsSQL+`
		WHERE ($2 = '' OR mode = $2) AND (cardinality($3::text[]) = 0 OR state = ANY ($3))
		  AND (cardinality($4::text[]) = 0 OR verdict = ANY ($4)) AND ($5::jsonb IS NULL OR selection = $5)
		  AND ($6 = '' OR selection ->> 'activity_id' = $6) AND started_at >= $7
		  AND ($8::timestamptz IS NULL OR (started_at, run_id) < ($8, $9))
		ORDER BY started_at DESC, run_id DESC LIMIT nullif($10, 0)`,
		silentAfter, f.Mode, append([]RunState{}, f.States...), append([]reconcile.Verdict{}, f.Verdicts...), selection,
		f.ActivityID, f.Since, beforeAt, beforeID, f.Limit)
}

// Run is one run, or [ErrNotFound].
func (s *Store) Run(ctx context.Context, id string) (StoredRun, error) {
	runs, err := collect(ctx, s, "read a run", scanRun, `SELECT `+runColumns+` FROM `+runsSQL+` WHERE run_id = $2`, silentAfter, id)
	return one(runs, err, "run "+id)
}

// PreviousRun is the newest finished run before the given one with the same
// mode and selection, or [ErrNotFound].
func (s *Store) PreviousRun(ctx context.Context, run StoredRun) (StoredRun, error) {
	runs, err := s.Runs(ctx, RunFilter{
		Mode: run.Mode, Selection: &run.Selection, States: []RunState{RunFinished}, Before: &run, Limit: 1,
	})
	return one(runs, err, "a run of the same mode and selection before "+run.ID)
}

// ResumableRun is the newest run of the mode and selection that ended without a
// report, or is not heard of, and recorded how far it came; or [ErrNotFound].
func (s *Store) ResumableRun(ctx context.Context, mode string, selection RunSelection) (StoredRun, error) {
	encoded, err := selection.encode()
	if err != nil {
		return StoredRun{}, err
	}
	runs, err := collect(ctx, s, "look for a run to resume", scanRun, `
		SELECT `+runColumns+` FROM `+runsSQL+`
		WHERE mode = $2 AND selection = $3 AND state IN ('failed', 'interrupted') AND progress IS NOT NULL
		ORDER BY started_at DESC, run_id DESC LIMIT 1`, silentAfter, mode, encoded)
	return one(runs, err, "an interrupted run of that mode and selection")
}

func one(runs []StoredRun, err error, what string) (StoredRun, error) {
	if err == nil && len(runs) == 0 {
		err = fmt.Errorf("%s: %w", what, ErrNotFound)
	}
	if err != nil {
		return StoredRun{}, err
	}
	return runs[0], nil
}

func scanRun(row pgx.CollectableRow) (StoredRun, error) {
	var r StoredRun
	var finished *time.Time
	err := row.Scan(&r.ID, &r.Mode, &r.Selection, &r.StartedBy, &r.StartedAt, &r.SeenAt, &finished, &r.State, &r.Failure, &r.Progress,
		&r.Verdict, &r.Scopes, &r.Findings, &r.Incomplete)
	r.StartedAt, r.SeenAt, r.FinishedAt = r.StartedAt.UTC(), r.SeenAt.UTC(), moment(finished)
	return r, err
}

// Report is the stored report of a run, at most 20,000 findings of it.
// [ErrNotFound]: no such run; [ErrNoReport]: it has not finished.
func (s *Store) Report(ctx context.Context, id string) (*reconcile.Report, error) {
	action := "read the report of run " + id
	var report *reconcile.Report
	// One snapshot: a purge between the two statements would leave a report
	// without its findings.
	err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		var encoded []byte
		err := tx.QueryRow(ctx, `SELECT report FROM seckill.reconcile_run WHERE run_id = $1`, id).Scan(&encoded)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return fmt.Errorf("run %s: %w", id, ErrNotFound)
		case err != nil:
			return err
		case encoded == nil:
			return ErrNoReport
		}
		if err := decodeJSON(encoded, &report); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `
			SELECT check_id, severity, coalesce(activity_id, ''), coalesce(sku_id, ''), coalesce(activity_version, 0), coalesce(bucket_id, 0),
			       subject, message, evidence, rounds, repair_kind, repair_state, repair_detail, repair_before, repair_after
			FROM seckill.finding WHERE run_id = $1 ORDER BY number`, id)
		if err != nil {
			return err
		}
		report.Findings, err = pgx.CollectRows(rows, scanFinding)
		return err
	})
	if err != nil {
		return nil, failed(action, err)
	}
	return report, nil
}

func scanFinding(row pgx.CollectableRow) (reconcile.Finding, error) {
	var f reconcile.Finding
	var evidence, before, after []byte
	if err := row.Scan(&f.Check, &f.Severity, &f.Scope.ActivityID, &f.Scope.SKUID, &f.Scope.Version, &f.Scope.Bucket,
		&f.Subject, &f.Message, &evidence, &f.Rounds, &f.Repair.Kind, &f.Repair.State, &f.Repair.Detail, &before, &after); err != nil {
		return f, err
	}
	return f, errors.Join(decodeJSON(evidence, &f.Evidence), decodeJSON(before, &f.Repair.Before), decodeJSON(after, &f.Repair.After))
}

// decodeJSON leaves numbers as they were written: as a float64 a large one
// would lose digits. NULL is nothing.
func decodeJSON(encoded []byte, into any) error {
	if encoded == nil {
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(encoded))
	dec.UseNumber()
	return dec.Decode(into)
}
