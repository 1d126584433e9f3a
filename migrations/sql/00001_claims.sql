-- The claim: one row per decided reservation, and the functions with which a
-- consumer makes one (protocol §1).

-- +goose Up

-- Roles belong to the cluster, not to the database: another database of the
-- same server may be creating them at this moment.
-- +goose StatementBegin
DO $$
DECLARE
    wanted text;
BEGIN
    FOREACH wanted IN ARRAY ARRAY['seckill_consumer', 'seckill_daemon', 'seckill_operator', 'seckill_installer'] LOOP
        IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = wanted) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', wanted);
            EXCEPTION WHEN duplicate_object OR unique_violation THEN
                NULL; -- the other database was faster
            END;
        END IF;
    END LOOP;
END $$;
-- +goose StatementEnd

GRANT USAGE ON SCHEMA seckill TO seckill_consumer, seckill_daemon, seckill_operator, seckill_installer;
GRANT SELECT ON seckill.schema_version TO seckill_daemon, seckill_operator;

CREATE TABLE seckill.reservation_claim (
    reservation_id   text COLLATE "C" PRIMARY KEY CHECK (reservation_id <> ''),
    outcome          text NOT NULL CHECK (outcome IN ('ORDER', 'REJECTED', 'FENCED')),
    activity_id      text,
    sku_id           text,
    activity_version bigint,
    bucket_id        bigint,
    user_id          text,
    order_id         text CHECK (order_id IS NULL OR outcome = 'ORDER'),
    reason           text,
    claimed_by       text NOT NULL DEFAULT session_user,
    claimed_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
COMMENT ON TABLE seckill.reservation_claim IS
    'One row per decided reservation: whoever inserts first wins and the outcome never changes. Only purge_claims() deletes.';
-- max_release counts the releases of a scope in a window of time.
CREATE INDEX reservation_claim_fenced ON seckill.reservation_claim
    (activity_id, sku_id, activity_version, bucket_id, claimed_at) WHERE outcome = 'FENCED';

-- A claim says that something was decided: what it says is never changed, only
-- completed (an order_id that was not known when the claim was made).
-- +goose StatementBegin
CREATE FUNCTION seckill.guard_claim() RETURNS trigger
LANGUAGE plpgsql SET search_path = seckill, pg_temp AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF current_setting('seckill.purging', true) IS DISTINCT FROM 'on' THEN
            RAISE EXCEPTION 'the claim of reservation % may be deleted by seckill.purge_claims() alone', OLD.reservation_id
                USING ERRCODE = 'restrict_violation';
        END IF;
        RETURN OLD;
    END IF;
    IF TG_OP = 'TRUNCATE' THEN
        RAISE EXCEPTION 'seckill.reservation_claim may not be truncated: use seckill.purge_claims()'
            USING ERRCODE = 'restrict_violation';
    END IF;
    IF (NEW.reservation_id, NEW.outcome, NEW.claimed_by, NEW.claimed_at) IS DISTINCT FROM
       (OLD.reservation_id, OLD.outcome, OLD.claimed_by, OLD.claimed_at)
       OR NEW.reason IS DISTINCT FROM OLD.reason
       OR NEW.order_id IS DISTINCT FROM coalesce(OLD.order_id, NEW.order_id)
       OR NEW.activity_id IS DISTINCT FROM coalesce(OLD.activity_id, NEW.activity_id)
       OR NEW.sku_id IS DISTINCT FROM coalesce(OLD.sku_id, NEW.sku_id)
       OR NEW.activity_version IS DISTINCT FROM coalesce(OLD.activity_version, NEW.activity_version)
       OR NEW.bucket_id IS DISTINCT FROM coalesce(OLD.bucket_id, NEW.bucket_id)
       OR NEW.user_id IS DISTINCT FROM coalesce(OLD.user_id, NEW.user_id) THEN
        RAISE EXCEPTION 'the claim of reservation % is final', OLD.reservation_id
            USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;
-- +goose StatementEnd

CREATE TRIGGER guard_row BEFORE UPDATE OR DELETE ON seckill.reservation_claim
    FOR EACH ROW EXECUTE FUNCTION seckill.guard_claim();
CREATE TRIGGER guard_truncate BEFORE TRUNCATE ON seckill.reservation_claim
    FOR EACH STATEMENT EXECUTE FUNCTION seckill.guard_claim();
ALTER TABLE seckill.reservation_claim ENABLE ALWAYS TRIGGER guard_row;
ALTER TABLE seckill.reservation_claim ENABLE ALWAYS TRIGGER guard_truncate;

-- A commit that a crash may undo would undo what Redis already shows. A SET
-- clause of a function ends before the commit, so each body calls this; a
-- stronger setting is left alone.
-- +goose StatementBegin
CREATE FUNCTION seckill.commit_durably() RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_catalog.current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        PERFORM pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION seckill.parse_scope(
    tag text, OUT activity_id text, OUT sku_id text, OUT activity_version bigint, OUT bucket_id bigint)
LANGUAGE plpgsql IMMUTABLE SET search_path = seckill, pg_temp AS $$
DECLARE
    part text[];
BEGIN
    IF tag IS NULL OR tag = '' THEN
        RETURN;
    END IF;
    -- A pattern with bounds such as {1,128} takes half a millisecond a row; this is run for every fence.
    part := regexp_match(tag, '^a:([A-Za-z0-9_-]+):s:([A-Za-z0-9_-]+):v:(0|[1-9][0-9]*):b:(0|[1-9][0-9]*)$');
    IF part IS NULL OR length(part[1]) > 128 OR length(part[2]) > 128 OR length(part[3]) > 16 OR length(part[4]) > 16 THEN
        RAISE EXCEPTION '% is not a scope: want a:<activity>:s:<sku>:v:<version>:b:<bucket>', quote_literal(left(tag, 80))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    activity_id := part[1];
    sku_id := part[2];
    activity_version := part[3]::bigint;
    bucket_id := part[4]::bigint;
END $$;
-- +goose StatementEnd

-- claim_once inserts a claim or returns the one in force. The second statement
-- matters: one statement would not see a claim that is committed while its
-- insert waits for it. enable_seqscan: a plan that a session makes while the
-- table is small would read it whole until the next ANALYZE; jit: what has to
-- be scanned all the same would look dear enough to be compiled.
-- +goose StatementBegin
CREATE FUNCTION seckill.claim_once(
    claim seckill.reservation_claim, OUT outcome text, OUT order_id text, OUT won boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = seckill, pg_temp SET row_security = off SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM commit_durably();
    INSERT INTO reservation_claim AS c (reservation_id, outcome, activity_id, sku_id, activity_version, bucket_id, user_id, order_id, reason)
    VALUES (claim.reservation_id, claim.outcome, claim.activity_id, claim.sku_id, claim.activity_version, claim.bucket_id,
            claim.user_id, claim.order_id, claim.reason)
    ON CONFLICT (reservation_id) DO NOTHING;
    IF FOUND THEN
        outcome := claim.outcome;
        order_id := claim.order_id;
        won := true;
        RETURN;
    END IF;
    SELECT c.outcome, c.order_id, false INTO outcome, order_id, won
    FROM reservation_claim AS c WHERE c.reservation_id = claim.reservation_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the claim of reservation % was purged meanwhile', claim.reservation_id
            USING ERRCODE = 'serialization_failure', HINT = 'Retry the transaction.';
    END IF;
END $$;
-- +goose StatementEnd

-- The three below are what programs call. claim_reservation is written in SQL
-- because PL/pgSQL refuses an argument and a result column of one name.
-- +goose StatementBegin
CREATE FUNCTION seckill.claim_reservation(
    reservation_id text, order_id text DEFAULT NULL, scope text DEFAULT NULL, user_id text DEFAULT NULL)
RETURNS TABLE (outcome text, order_id text, won boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = seckill, pg_temp SET row_security = off AS $$
    SELECT c.outcome, c.order_id, c.won
    FROM seckill.parse_scope($3) AS s,
         LATERAL seckill.claim_once(ROW($1, 'ORDER', s.activity_id, s.sku_id, s.activity_version, s.bucket_id,
                                        $4, $2, NULL, NULL, NULL)::seckill.reservation_claim) AS c
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION seckill.claim_reservation(text, text, text, text) IS
    'A consumer''s early claim, in the transaction that creates the order. Replies the claim in force; never raises SK001.';

-- +goose StatementBegin
CREATE FUNCTION seckill.reject_reservation(reservation_id text, reason text, scope text DEFAULT NULL)
RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER SET search_path = seckill, pg_temp SET row_security = off AS $$
    SELECT c.outcome
    FROM seckill.parse_scope($3) AS s,
         LATERAL seckill.claim_once(ROW($1, 'REJECTED', s.activity_id, s.sku_id, s.activity_version, s.bucket_id,
                                        NULL, NULL, $2, NULL, NULL)::seckill.reservation_claim) AS c
$$;
-- +goose StatementEnd
COMMENT ON FUNCTION seckill.reject_reservation(text, text, text) IS
    'A consumer''s refusal to create the order, for good. Replies the outcome in force.';

REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA seckill FROM PUBLIC;
GRANT SELECT ON seckill.reservation_claim TO seckill_daemon, seckill_operator;
GRANT EXECUTE ON FUNCTION seckill.claim_reservation(text, text, text, text) TO seckill_consumer;
GRANT EXECUTE ON FUNCTION seckill.reject_reservation(text, text, text) TO seckill_consumer;

-- +goose Down

-- The claims are the only record of which reservations may never become an
-- order: they are not dropped while there are any.
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM seckill.reservation_claim) THEN
        RAISE EXCEPTION 'seckill.reservation_claim still holds claims: rolling back would forget which reservations were released'
            USING HINT = 'Drop the database, or purge the claims first.';
    END IF;
END $$;
-- +goose StatementEnd
DROP FUNCTION seckill.reject_reservation(text, text, text);
DROP FUNCTION seckill.claim_reservation(text, text, text, text);
DROP FUNCTION seckill.claim_once(seckill.reservation_claim);
DROP FUNCTION seckill.parse_scope(text);
DROP FUNCTION seckill.commit_durably();
DROP TABLE seckill.reservation_claim;
DROP FUNCTION seckill.guard_claim();
-- The roles stay: other databases of the server may use them.
