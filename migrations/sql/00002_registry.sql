-- What the daemon remembers: scopes, queues, the server's identity, tasks,
-- jobs, runs, the journal of transfers, the audit trail and the lease.

-- +goose Up

-- One activity version of one SKU: what was allocated to it and over how many
-- buckets. Neither changes while the version lives (protocol §4).
CREATE TABLE seckill.scope_allocation (
    activity_id      text NOT NULL,
    sku_id           text NOT NULL,
    activity_version bigint NOT NULL CHECK (activity_version BETWEEN 0 AND 9007199254740991),
    total            bigint NOT NULL CHECK (total BETWEEN 0 AND 9007199254740991),
    buckets          bigint NOT NULL CHECK (buckets BETWEEN 1 AND 9007199254740991),
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by       text NOT NULL,
    PRIMARY KEY (activity_id, sku_id, activity_version)
);

CREATE TABLE seckill.scope (
    activity_id      text NOT NULL,
    sku_id           text NOT NULL,
    activity_version bigint NOT NULL,
    bucket_id        bigint NOT NULL CHECK (bucket_id BETWEEN 0 AND 9007199254740991),
    initial          bigint NOT NULL CHECK (initial >= 0),
    -- Set once Redis was seen to hold the bucket: from then on missing keys
    -- are config_missing and are never filled again.
    confirmed_at     timestamptz,
    state            text NOT NULL DEFAULT 'PREPARED' CHECK (state IN ('PREPARED', 'ACTIVE', 'PAUSED', 'CLOSED')),
    starts_at        timestamptz NOT NULL,
    ends_at          timestamptz NOT NULL CHECK (ends_at > starts_at),
    retention_until  timestamptz NOT NULL CHECK (retention_until >= ends_at),
    held_at          timestamptz,
    held_by          text,
    held_reason      text,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (activity_id, sku_id, activity_version, bucket_id),
    FOREIGN KEY (activity_id, sku_id, activity_version) REFERENCES seckill.scope_allocation,
    CHECK ((held_at IS NULL) = (held_by IS NULL) AND (held_at IS NULL) = (held_reason IS NULL))
);

-- Every (broker, topic) ever seen, with the most queues seen: a sweep that
-- lacks one is UNKNOWN until a person says that the broker may be forgotten.
CREATE TABLE seckill.expected_queue (
    broker        text NOT NULL,
    topic         text NOT NULL,
    queues        integer NOT NULL CHECK (queues > 0),
    first_seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (broker, topic)
);

-- Brokers that a person said will not come back. A position that names one of
-- them, in a reservation's hash, no longer stands for a broker that is missing.
CREATE TABLE seckill.forgotten_broker (
    broker       text PRIMARY KEY,
    forgotten_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    forgotten_by text NOT NULL
);

-- The server as the last pass met it (protocol §1). One row.
CREATE TABLE seckill.server_identity (
    only_row          boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    system_identifier bigint NOT NULL,
    timeline          bigint NOT NULL,
    wal_position      pg_lsn NOT NULL,
    checked_at        timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The journal of cross-bucket transfers (protocol §4).
CREATE TABLE seckill.bucket_transfer (
    transfer_id      text PRIMARY KEY,
    activity_id      text NOT NULL,
    sku_id           text NOT NULL,
    activity_version bigint NOT NULL,
    donor_bucket     bigint NOT NULL,
    receiver_bucket  bigint NOT NULL CHECK (receiver_bucket <> donor_bucket),
    amount           bigint NOT NULL CHECK (amount > 0),
    state            text NOT NULL DEFAULT 'PLANNED' CHECK (state IN ('PLANNED', 'OUT', 'DONE', 'CANCELLED')),
    reason           text NOT NULL DEFAULT '',
    created_by       text NOT NULL,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    FOREIGN KEY (activity_id, sku_id, activity_version, donor_bucket) REFERENCES seckill.scope,
    FOREIGN KEY (activity_id, sku_id, activity_version, receiver_bucket) REFERENCES seckill.scope
);

-- Tasks are one per (kind, scope, cause), not one per reservation: an hour
-- without a broker is one task.
CREATE TABLE seckill.manual_task (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind          text NOT NULL CHECK (kind <> ''),
    scope         text NOT NULL DEFAULT '', -- the tag, or '' for the whole system
    cause         text NOT NULL,
    count         bigint NOT NULL CHECK (count >= 0), -- the most subjects met at once
    occurrences   bigint NOT NULL DEFAULT 1,          -- how often it was reported
    sample        text[] NOT NULL DEFAULT '{}',       -- some subjects, the newest first
    state         text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'approved', 'rejected', 'resolved')),
    first_seen_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    decided_at    timestamptz,
    decided_by    text,
    decision      text
);
-- An approved task is still to be carried out, so it is not opened again beside.
CREATE UNIQUE INDEX manual_task_unresolved ON seckill.manual_task (kind, scope, cause) WHERE state IN ('open', 'approved');

-- What was proposed to a person for the members behind a task, and the state
-- of the world that the proposal rests on: it is carried out only while both
-- sides still show it (protocol §5).
CREATE TABLE seckill.task_proposal (
    task_id        bigint NOT NULL REFERENCES seckill.manual_task ON DELETE CASCADE,
    reservation_id text NOT NULL,
    action         text NOT NULL,
    expected       jsonb NOT NULL,
    proposed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (task_id, reservation_id)
);

CREATE TABLE seckill.job (
    name             text PRIMARY KEY,
    paused           boolean NOT NULL DEFAULT false,
    paused_by        text,
    run_requested_at timestamptz,
    run_requested_by text,
    last_started_at  timestamptz,
    last_finished_at timestamptz,
    last_success_at  timestamptz,
    last_result      jsonb,
    last_error       text
);

CREATE TABLE seckill.reconcile_run (
    run_id      text PRIMARY KEY,
    mode        text NOT NULL CHECK (mode IN ('quick', 'deep')),
    started_at  timestamptz NOT NULL,
    finished_at timestamptz,
    started_by  text NOT NULL,
    selection   jsonb NOT NULL DEFAULT '{}',
    progress    jsonb,
    verdict     text CHECK (verdict IN ('consistent', 'drift', 'incomplete')),
    report      jsonb
);

CREATE TABLE seckill.finding (
    run_id           text NOT NULL REFERENCES seckill.reconcile_run ON DELETE CASCADE,
    number           integer NOT NULL,
    check_id         text NOT NULL,
    severity         text NOT NULL CHECK (severity IN ('critical', 'error', 'warning', 'info')),
    activity_id      text,
    sku_id           text,
    activity_version bigint,
    bucket_id        bigint,
    subject          text NOT NULL,
    message          text NOT NULL,
    evidence         jsonb NOT NULL DEFAULT '{}',
    rounds           integer NOT NULL CHECK (rounds >= 1),
    repair_kind      text NOT NULL DEFAULT 'none' CHECK (repair_kind IN ('automatic', 'manual', 'none')),
    repair_state     text NOT NULL DEFAULT 'none'
                     CHECK (repair_state IN ('none', 'planned', 'done', 'failed', 'pending_approval')),
    repair_detail    text NOT NULL DEFAULT '',
    PRIMARY KEY (run_id, number)
);
CREATE INDEX finding_subject ON seckill.finding (subject, check_id);

CREATE TABLE seckill.audit_log (
    id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor   text NOT NULL,                      -- the person, as the command was told
    login   text NOT NULL DEFAULT session_user, -- the database role
    action  text NOT NULL,
    scope   text NOT NULL DEFAULT '',
    subject text NOT NULL DEFAULT '',
    reason  text NOT NULL DEFAULT '',
    detail  jsonb NOT NULL DEFAULT '{}'
);

-- The heartbeat of the advisory lock's holder: a successor waits until it has
-- run out, so that the one before has noticed its loss.
CREATE TABLE seckill.lease (
    name         text PRIMARY KEY,
    holder       text NOT NULL,
    backend_pid  integer NOT NULL,
    acquired_at  timestamptz NOT NULL,
    heartbeat_at timestamptz NOT NULL,
    ttl          interval NOT NULL,
    released_at  timestamptz
);

GRANT SELECT ON ALL TABLES IN SCHEMA seckill TO seckill_daemon, seckill_operator;
GRANT INSERT, UPDATE ON seckill.scope_allocation, seckill.scope, seckill.expected_queue, seckill.server_identity,
    seckill.bucket_transfer, seckill.manual_task, seckill.task_proposal, seckill.job, seckill.reconcile_run, seckill.finding, seckill.lease
    TO seckill_daemon, seckill_operator;
GRANT INSERT ON seckill.audit_log TO seckill_daemon, seckill_operator; -- and nobody may change or delete
GRANT DELETE ON seckill.manual_task, seckill.task_proposal, seckill.reconcile_run, seckill.finding, seckill.bucket_transfer
    TO seckill_daemon, seckill_operator; -- purge, by policy
GRANT DELETE ON seckill.expected_queue TO seckill_operator; -- broker forget is a person's decision
GRANT INSERT ON seckill.forgotten_broker TO seckill_operator;
GRANT DELETE ON seckill.forgotten_broker TO seckill_daemon, seckill_operator; -- it is there again

-- +goose Down
DROP TABLE seckill.lease;
DROP TABLE seckill.audit_log;
DROP TABLE seckill.finding;
DROP TABLE seckill.reconcile_run;
DROP TABLE seckill.job;
DROP TABLE seckill.task_proposal;
DROP TABLE seckill.manual_task;
DROP TABLE seckill.bucket_transfer;
DROP TABLE seckill.server_identity;
DROP TABLE seckill.forgotten_broker;
DROP TABLE seckill.expected_queue;
DROP TABLE seckill.scope;
DROP TABLE seckill.scope_allocation;
