-- Stored reports: what tells a run under way from one that was cut off, and
-- what a repair changed; and what purge needs to say beforehand what it would
-- delete.

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

-- Which claims of a page purge_claims may delete: what its comment says. It is
-- a function of its own, so that a plan counts exactly what would go.
-- +goose StatementBegin
CREATE FUNCTION seckill.purgeable_claims(page text[], claimed_before timestamptz) RETURNS SETOF text
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = seckill, pg_temp SET row_security = off AS $$
    SELECT c.reservation_id FROM reservation_claim AS c
    WHERE c.reservation_id = ANY (page)
      AND c.claimed_at < claimed_before
      AND NOT EXISTS (SELECT FROM (SELECT e.reservation_id FROM order_evidence AS e WHERE e.reservation_id = ANY (page)) AS e
                      WHERE e.reservation_id COLLATE "C" = c.reservation_id)
      AND NOT EXISTS (SELECT FROM scope AS s
                      WHERE (s.state <> 'CLOSED' OR s.retention_until >= clock_timestamp())
                        AND s.activity_id = coalesce(c.activity_id, s.activity_id)
                        AND s.sku_id = coalesce(c.sku_id, s.sku_id)
                        AND s.activity_version = coalesce(c.activity_version, s.activity_version)
                        AND (c.activity_version IS NOT NULL OR s.starts_at <= c.claimed_at))
      AND (c.activity_id IS NULL OR c.sku_id IS NULL OR c.activity_version IS NULL
           OR EXISTS (SELECT FROM scope AS s WHERE s.activity_id = c.activity_id AND s.sku_id = c.sku_id
                                               AND s.activity_version = c.activity_version))
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION seckill.purge_claims(claimed_before timestamptz, after_id text DEFAULT '', max_rows integer DEFAULT 5000)
RETURNS TABLE (examined bigint, purged bigint, "position" text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = seckill, pg_temp SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    page text[];
BEGIN
    IF claimed_before IS NULL OR claimed_before >= clock_timestamp() - interval '1 hour' THEN
        RAISE EXCEPTION 'claims of the last hour are never purged' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM commit_durably();
    SELECT array_agg(c.reservation_id ORDER BY c.reservation_id) INTO page
    FROM (SELECT c.reservation_id FROM reservation_claim AS c
          WHERE c.reservation_id > after_id COLLATE "C" ORDER BY c.reservation_id LIMIT greatest(max_rows, 1)) AS c;
    IF page IS NULL THEN
        RETURN QUERY SELECT 0::bigint, 0::bigint, NULL::text;
        RETURN;
    END IF;
    -- Not as a SET clause of the function, which takes a superuser to write.
    PERFORM set_config('seckill.purging', 'on', true);
    WITH gone AS (
        DELETE FROM reservation_claim AS c
        WHERE c.reservation_id = ANY (page) AND c.reservation_id IN (SELECT purgeable_claims(page, claimed_before))
        RETURNING 1
    )
    SELECT count(*) INTO purged FROM gone;
    PERFORM set_config('seckill.purging', 'off', true);
    examined := cardinality(page);
    "position" := CASE WHEN examined = greatest(max_rows, 1) THEN page[cardinality(page)] END;
    RETURN NEXT;
END $$;
-- +goose StatementEnd

-- The plan of purge_claims, page by page like it. It deletes nothing.
-- +goose StatementBegin
CREATE FUNCTION seckill.plan_claims(claimed_before timestamptz, after_id text DEFAULT '', max_rows integer DEFAULT 5000)
RETURNS TABLE (examined bigint, purgeable bigint, oldest timestamptz, newest timestamptz, "position" text)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = seckill, pg_temp SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    page text[];
BEGIN
    SELECT array_agg(c.reservation_id ORDER BY c.reservation_id) INTO page
    FROM (SELECT c.reservation_id FROM reservation_claim AS c
          WHERE c.reservation_id > after_id COLLATE "C" ORDER BY c.reservation_id LIMIT greatest(max_rows, 1)) AS c;
    IF page IS NULL THEN
        RETURN QUERY SELECT 0::bigint, 0::bigint, NULL::timestamptz, NULL::timestamptz, NULL::text;
        RETURN;
    END IF;
    SELECT count(*), min(c.claimed_at), max(c.claimed_at) INTO purgeable, oldest, newest
    FROM reservation_claim AS c
    WHERE c.reservation_id = ANY (page) AND c.reservation_id IN (SELECT purgeable_claims(page, claimed_before));
    examined := cardinality(page);
    "position" := CASE WHEN examined = greatest(max_rows, 1) THEN page[cardinality(page)] END;
    RETURN NEXT;
END $$;
-- +goose StatementEnd

REVOKE EXECUTE ON FUNCTION seckill.purgeable_claims(text[], timestamptz), seckill.plan_claims(timestamptz, text, integer) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION seckill.plan_claims(timestamptz, text, integer) TO seckill_daemon, seckill_operator;

-- +goose Down
-- +goose StatementBegin
CREATE OR REPLACE FUNCTION seckill.purge_claims(claimed_before timestamptz, after_id text DEFAULT '', max_rows integer DEFAULT 5000)
RETURNS TABLE (examined bigint, purged bigint, "position" text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = seckill, pg_temp SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    page text[];
BEGIN
    IF claimed_before IS NULL OR claimed_before >= clock_timestamp() - interval '1 hour' THEN
        RAISE EXCEPTION 'claims of the last hour are never purged' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM commit_durably();
    SELECT array_agg(c.reservation_id ORDER BY c.reservation_id) INTO page
    FROM (SELECT c.reservation_id FROM reservation_claim AS c
          WHERE c.reservation_id > after_id COLLATE "C" ORDER BY c.reservation_id LIMIT greatest(max_rows, 1)) AS c;
    IF page IS NULL THEN
        RETURN QUERY SELECT 0::bigint, 0::bigint, NULL::text;
        RETURN;
    END IF;
    -- Not as a SET clause of the function, which takes a superuser to write.
    PERFORM set_config('seckill.purging', 'on', true);
    WITH gone AS (
        DELETE FROM reservation_claim AS c
        WHERE c.reservation_id = ANY (page)
          AND c.claimed_at < claimed_before
          AND NOT EXISTS (SELECT FROM (SELECT e.reservation_id FROM order_evidence AS e WHERE e.reservation_id = ANY (page)) AS e
                          WHERE e.reservation_id COLLATE "C" = c.reservation_id)
          AND NOT EXISTS (SELECT FROM scope AS s
                          WHERE (s.state <> 'CLOSED' OR s.retention_until >= clock_timestamp())
                            AND s.activity_id = coalesce(c.activity_id, s.activity_id)
                            AND s.sku_id = coalesce(c.sku_id, s.sku_id)
                            AND s.activity_version = coalesce(c.activity_version, s.activity_version)
                            AND (c.activity_version IS NOT NULL OR s.starts_at <= c.claimed_at))
          AND (c.activity_id IS NULL OR c.sku_id IS NULL OR c.activity_version IS NULL
               OR EXISTS (SELECT FROM scope AS s WHERE s.activity_id = c.activity_id AND s.sku_id = c.sku_id
                                                   AND s.activity_version = c.activity_version))
        RETURNING 1
    )
    SELECT count(*) INTO purged FROM gone;
    PERFORM set_config('seckill.purging', 'off', true);
    examined := cardinality(page);
    "position" := CASE WHEN examined = greatest(max_rows, 1) THEN page[cardinality(page)] END;
    RETURN NEXT;
END $$;
-- +goose StatementEnd
DROP FUNCTION seckill.plan_claims(timestamptz, text, integer);
DROP FUNCTION seckill.purgeable_claims(text[], timestamptz);
REVOKE DELETE ON seckill.job FROM seckill_daemon, seckill_operator;
ALTER TABLE seckill.finding DROP COLUMN repair_before, DROP COLUMN repair_after;
DROP INDEX seckill.reconcile_run_started;
ALTER TABLE seckill.reconcile_run
    DROP COLUMN seen_at, DROP COLUMN failure, DROP COLUMN scopes, DROP COLUMN findings, DROP COLUMN incomplete;
