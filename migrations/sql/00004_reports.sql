-- Stored reports: what tells a run under way from one that was cut off, and
-- what a repair changed. Deleting by policy needs a few rights more.

-- +goose Up

ALTER TABLE seckill.reconcile_run
    ADD COLUMN seen_at timestamptz NOT NULL DEFAULT clock_timestamp(), -- the last sign of life
    ADD COLUMN failure text,                                           -- why it ended without a report
    ADD COLUMN scopes integer,                                         -- the report in numbers, for lists
    ADD COLUMN findings integer,
    ADD COLUMN incomplete integer;
COMMENT ON COLUMN seckill.reconcile_run.report IS 'The report without its findings, which are rows of seckill.finding.';
-- Lists, and the run before another one.
CREATE INDEX reconcile_run_started ON seckill.reconcile_run (started_at DESC, run_id DESC);

ALTER TABLE seckill.finding
    ADD COLUMN repair_before jsonb,
    ADD COLUMN repair_after jsonb;

-- Purge, by policy: jobs that no version knows any more.
GRANT DELETE ON seckill.job TO seckill_daemon, seckill_operator;

-- +goose Down
REVOKE DELETE ON seckill.job FROM seckill_daemon, seckill_operator;
ALTER TABLE seckill.finding DROP COLUMN repair_before, DROP COLUMN repair_after;
DROP INDEX seckill.reconcile_run_started;
ALTER TABLE seckill.reconcile_run
    DROP COLUMN seen_at, DROP COLUMN failure, DROP COLUMN scopes, DROP COLUMN findings, DROP COLUMN incomplete;
