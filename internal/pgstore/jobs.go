package pgstore

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Job is what is known of one of the daemon's jobs. Times are zero until it
// happened.
type Job struct {
	Name           string
	Paused         bool
	PausedBy       string
	RunRequestedAt time.Time // asked for by hand and not yet taken
	RunRequestedBy string
	LastStartedAt  time.Time
	LastFinishedAt time.Time
	LastSuccessAt  time.Time
	LastResult     json.RawMessage // of the last run that finished, success or not
	LastError      string          // empty: the last run succeeded
}

// JobRun is one run that has ended.
type JobRun struct {
	Name       string
	StartedAt  time.Time
	FinishedAt time.Time
	Result     any    // encoded as JSON
	Error      string // empty: success
}

// RecordJob notes the end of a run.
func (s *Store) RecordJob(ctx context.Context, run JobRun) error {
	result, err := json.Marshal(run.Result)
	if err != nil {
		return fmt.Errorf("encode the result of job %s: %w", run.Name, err)
	}
	return s.write(ctx, "record job "+run.Name, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO seckill.job AS j (name, last_started_at, last_finished_at, last_success_at, last_result, last_error)
			VALUES ($1, $2, $3, CASE WHEN $5 = '' THEN $3::timestamptz END, $4, nullif($5, ''))
			ON CONFLICT (name) DO UPDATE SET
				last_started_at = excluded.last_started_at, last_finished_at = excluded.last_finished_at,
				last_success_at = coalesce(excluded.last_success_at, j.last_success_at),
				last_result = excluded.last_result, last_error = excluded.last_error`,
			run.Name, run.StartedAt, run.FinishedAt, result, run.Error)
		return err
	})
}

// Jobs lists the jobs that ran, were paused or were asked for.
func (s *Store) Jobs(ctx context.Context) ([]Job, error) {
	return collect(ctx, s, "list jobs", func(row pgx.CollectableRow) (Job, error) {
		var j Job
		var pausedBy, requestedBy, lastError *string
		var requested, started, finished, success *time.Time
		err := row.Scan(&j.Name, &j.Paused, &pausedBy, &requested, &requestedBy, &started, &finished, &success, &j.LastResult, &lastError)
		j.PausedBy, j.RunRequestedBy, j.LastError = text(pausedBy), text(requestedBy), text(lastError)
		j.RunRequestedAt, j.LastStartedAt = moment(requested), moment(started)
		j.LastFinishedAt, j.LastSuccessAt = moment(finished), moment(success)
		return j, err
	}, `SELECT name, paused, paused_by, run_requested_at, run_requested_by, last_started_at, last_finished_at,
	           last_success_at, last_result, last_error
	    FROM seckill.job ORDER BY name`)
}

// PauseJob keeps a job from running, also after a restart, with actor and
// reason in the audit trail. The caller knows which names are jobs.
func (s *Store) PauseJob(ctx context.Context, name, actor, reason string) error {
	return s.setPaused(ctx, name, true, actor, reason)
}

// ResumeJob is the end of [Store.PauseJob].
func (s *Store) ResumeJob(ctx context.Context, name, actor, reason string) error {
	return s.setPaused(ctx, name, false, actor, reason)
}

func (s *Store) setPaused(ctx context.Context, name string, paused bool, actor, reason string) error {
	action := map[bool]string{true: "job_paused", false: "job_resumed"}[paused]
	return s.write(ctx, action+" "+name, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO seckill.job (name, paused, paused_by) VALUES ($1, $2, CASE WHEN $2 THEN $3 END)
			ON CONFLICT (name) DO UPDATE SET paused = excluded.paused, paused_by = excluded.paused_by`, name, paused, actor)
		if err != nil {
			return err
		}
		return addAudit(ctx, tx, AuditEntry{Actor: actor, Action: action, Subject: name, Reason: reason})
	})
}

// RequestRun asks the daemon that holds the lease to run a job now. Several
// requests before it looks are one.
func (s *Store) RequestRun(ctx context.Context, name, actor string) error {
	return s.write(ctx, "request a run of "+name, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO seckill.job (name, run_requested_at, run_requested_by) VALUES ($1, clock_timestamp(), $2)
			ON CONFLICT (name) DO UPDATE SET run_requested_at = excluded.run_requested_at, run_requested_by = excluded.run_requested_by`,
			name, actor)
		if err != nil {
			return err
		}
		return addAudit(ctx, tx, AuditEntry{Actor: actor, Action: "job_run_requested", Subject: name})
	})
}

// TakeRunRequests returns the jobs that were asked for, each to one taker only.
func (s *Store) TakeRunRequests(ctx context.Context) ([]string, error) {
	return collect(ctx, s, "take run requests", pgx.RowTo[string], `
		UPDATE seckill.job SET run_requested_at = NULL, run_requested_by = NULL WHERE run_requested_at IS NOT NULL RETURNING name`)
}
