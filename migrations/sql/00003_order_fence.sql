-- The order side: the evidence view, the fence trigger on the order tables and
-- the daemon's fence (protocol §1 and §2).

-- +goose Up

-- Tables that create orders: each carries our triggers, and releases wait
-- until the orders that were there before are back-filled.
CREATE TABLE seckill.order_table (
    relation            regclass PRIMARY KEY,
    reservation_column  name NOT NULL,
    order_column        name NOT NULL,
    columns             jsonb NOT NULL DEFAULT '{}',
    trigger_arguments   bytea NOT NULL, -- pg_trigger.tgargs of our triggers
    installed_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    installed_by        text NOT NULL DEFAULT session_user,
    backfill_position   text NOT NULL DEFAULT '', -- the last reservation_id that was done
    backfilled_rows     bigint NOT NULL DEFAULT 0,
    backfilled_at       timestamptz               -- NULL until done
);

-- Tables behind order_evidence that create no orders, such as those joined for
-- a name. A person says so.
CREATE TABLE seckill.lookup_table (
    relation regclass PRIMARY KEY,
    reason   text NOT NULL,
    added_by text NOT NULL DEFAULT session_user,
    added_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- --- the evidence view ---------------------------------------------------

-- Stands in for the orders until a view over them is installed: an empty view
-- would answer "no order", and that would release what was sold.
-- +goose StatementBegin
CREATE FUNCTION seckill.no_evidence()
RETURNS TABLE (reservation_id text, order_id text, request_id text, activity_id text, sku_id text,
               activity_version bigint, bucket_id bigint, user_id text, active boolean, created_at timestamptz)
LANGUAGE plpgsql VOLATILE SET search_path = seckill, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'no view over the orders is installed as seckill.order_evidence'
        USING ERRCODE = 'SK013', HINT = 'Run "reconciler migrate evidence FILE" with a SELECT over your order tables.';
END $$;
-- +goose StatementEnd

-- The hash of the view in force; the empty search_path makes every name in it qualified.
-- +goose StatementBegin
CREATE FUNCTION seckill.evidence_hash() RETURNS text
LANGUAGE plpgsql STABLE SET search_path = '' AS $$
BEGIN
    RETURN pg_catalog.md5(pg_catalog.pg_get_viewdef(pg_catalog.to_regclass('seckill.order_evidence')::oid));
END $$;
-- +goose StatementEnd

-- Ours is a view that bears our mark together with the hash of what it was
-- when it was marked: a comment survives CREATE OR REPLACE VIEW and copying.
-- +goose StatementBegin
CREATE FUNCTION seckill.evidence_is_shipped() RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = seckill, pg_temp AS $$
BEGIN
    RETURN coalesce(obj_description(to_regclass('seckill.order_evidence'), 'pg_class')
                    = 'seckill-reconciler shipped view ' || evidence_hash(), false);
END $$;
-- +goose StatementEnd

-- Installs a view of ours, unless the one in force is an adopter's. Replies
-- whether it did.
-- +goose StatementBegin
CREATE FUNCTION seckill.ship_evidence(definition text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = seckill, pg_temp AS $$
BEGIN
    IF to_regclass('seckill.order_evidence') IS NOT NULL THEN
        IF NOT evidence_is_shipped() THEN
            RAISE NOTICE 'seckill.order_evidence is not the shipped view and is left as it is';
            RETURN false;
        END IF;
        DROP VIEW seckill.order_evidence;
    END IF;
    EXECUTE 'CREATE VIEW seckill.order_evidence AS ' || definition;
    EXECUTE format('COMMENT ON VIEW seckill.order_evidence IS %L', 'seckill-reconciler shipped view ' || evidence_hash());
    GRANT SELECT ON seckill.order_evidence TO seckill_daemon, seckill_operator;
    RETURN true;
END $$;
-- +goose StatementEnd

SELECT seckill.ship_evidence('SELECT * FROM seckill.no_evidence()');

-- --- the trigger ---------------------------------------------------------

-- Runs on every order table, as its owner's trigger but with our rights: a
-- consumer needs none on schema seckill. TG_ARGV: the reservation and the
-- order column, then the columns of activity, SKU, version, bucket and user,
-- '' where there is none.
-- +goose StatementBegin
CREATE FUNCTION seckill.order_fence() RETURNS trigger
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = seckill, pg_temp SET row_security = off SET enable_seqscan = off SET jit = off AS $$
DECLARE
    row_now      jsonb := to_jsonb(NEW);
    reservation  text;
    order_now    text;
    before       text;
    claim        reservation_claim;
    in_force     record;
BEGIN
    IF NOT row_now ?& TG_ARGV[0:1] THEN
        -- Renamed: an order that cannot be read must not slip through unfenced.
        RAISE EXCEPTION 'table %.% no longer has the columns % of its order fence', TG_TABLE_SCHEMA, TG_TABLE_NAME, TG_ARGV[0:1]
            USING ERRCODE = 'undefined_column', HINT = 'Run seckill.install_order_fence() again with the new names.';
    END IF;
    reservation := nullif(row_now ->> TG_ARGV[0], '');
    IF TG_OP = 'UPDATE' THEN
        before := nullif(to_jsonb(OLD) ->> TG_ARGV[0], '');
        IF before IS NOT NULL AND before IS DISTINCT FROM reservation THEN
            RAISE EXCEPTION 'reservation_id may not change: the order belongs to reservation %', before
                USING ERRCODE = 'SK003';
        END IF;
        IF TG_WHEN = 'BEFORE' OR before IS NOT NULL THEN
            RETURN NEW;
        END IF;
    END IF;
    IF reservation IS NULL THEN
        RETURN NULL; -- an order of something else than a flash sale
    END IF;
    order_now := row_now ->> TG_ARGV[1];
    IF order_now IS NULL THEN
        RAISE EXCEPTION 'the order of reservation % has no %', reservation, TG_ARGV[1]
            USING ERRCODE = 'not_null_violation';
    END IF;

    claim.reservation_id := reservation;
    claim.outcome := 'ORDER';
    claim.order_id := order_now;
    claim.activity_id := row_now ->> TG_ARGV[2];
    claim.sku_id := row_now ->> TG_ARGV[3];
    -- What is no number is left out: an order does not fail for it.
    claim.activity_version := substring(row_now ->> TG_ARGV[4] FROM '^[0-9]{1,18}$')::bigint;
    claim.bucket_id := substring(row_now ->> TG_ARGV[5] FROM '^[0-9]{1,18}$')::bigint;
    claim.user_id := row_now ->> TG_ARGV[6];
    in_force := claim_once(claim);
    IF in_force.outcome <> 'ORDER' THEN
        RAISE EXCEPTION 'reservation % is %: no order can be created for it', reservation, in_force.outcome
            USING ERRCODE = 'SK001', HINT = 'Create nothing, mark the reservation REJECTED and acknowledge the message.';
    END IF;
    IF in_force.order_id IS NULL THEN
        -- A claim that was made before the order had an id.
        UPDATE reservation_claim AS c
        SET order_id = order_now,
            activity_id = coalesce(c.activity_id, claim.activity_id),
            sku_id = coalesce(c.sku_id, claim.sku_id),
            activity_version = coalesce(c.activity_version, claim.activity_version),
            bucket_id = coalesce(c.bucket_id, claim.bucket_id),
            user_id = coalesce(c.user_id, claim.user_id)
        WHERE c.reservation_id = reservation AND c.order_id IS NULL;
        SELECT c.order_id INTO in_force.order_id FROM reservation_claim AS c WHERE c.reservation_id = reservation;
    END IF;
    IF in_force.order_id IS DISTINCT FROM order_now THEN
        RAISE EXCEPTION 'reservation % is claimed by another order', reservation
            USING ERRCODE = 'SK002', DETAIL = format('It belongs to order %s, not to %s.', in_force.order_id, order_now);
    END IF;
    RETURN NULL;
END $$;
-- +goose StatementEnd

-- The relations below a table, itself among them.
-- +goose StatementBegin
CREATE FUNCTION seckill.relation_tree(root oid) RETURNS SETOF oid
LANGUAGE sql STABLE SET search_path = seckill, pg_temp AS $$
    WITH RECURSIVE tree (relation) AS (
        SELECT root
        UNION
        SELECT i.inhrelid FROM tree JOIN pg_inherits AS i ON i.inhparent = tree.relation
    )
    SELECT relation FROM tree
$$;
-- +goose StatementEnd

-- What is wrong with the fence of one order table. tgtype: row 1, before 2,
-- insert 4, update 16. The relations are an array, and not a function's rows:
-- the catalogs are then read by their indexes.
-- +goose StatementBegin
CREATE FUNCTION seckill.order_table_problems(entry seckill.order_table) RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = seckill, pg_temp AS $$
DECLARE
    relations oid[];
BEGIN
    IF NOT EXISTS (SELECT FROM pg_class WHERE oid = entry.relation) THEN
        RETURN NEXT format('order table with oid %s was dropped: if no orders are created there any more, run '
                           'SELECT seckill.remove_order_fence(%L)', entry.relation::oid, entry.relation::oid);
        RETURN;
    END IF;
    relations := ARRAY(SELECT relation_tree(entry.relation));
    RETURN QUERY
    SELECT format('%s is a foreign table or no table: triggers of another server cannot be checked', c.oid::regclass)
    FROM pg_class AS c WHERE c.oid = ANY (relations) AND c.relkind NOT IN ('r', 'p');
    RETURN QUERY
    SELECT format('%s has no enabled %s trigger of the order fence: run seckill.install_order_fence(%L, %L, %L, %L)',
                  c.oid::regclass, needed.label, entry.relation, entry.reservation_column, entry.order_column, entry.columns)
    FROM pg_class AS c
    CROSS JOIN (VALUES (5, 'AFTER INSERT'), (17, 'AFTER UPDATE'), (19, 'BEFORE UPDATE')) AS needed (tgtype, label)
    WHERE c.oid = ANY (relations) AND c.relkind IN ('r', 'p')
      AND NOT EXISTS (
        SELECT FROM pg_trigger AS g
        WHERE g.tgrelid = c.oid
          AND g.tgfoid = 'seckill.order_fence()'::regprocedure
          AND g.tgtype = needed.tgtype
          AND g.tgenabled = 'A'
          AND NOT g.tgdeferrable
          AND (needed.tgtype <> 5 OR g.tgqual IS NULL)
          AND g.tgattr = ''::int2vector
          AND g.tgargs = entry.trigger_arguments);
    RETURN QUERY
    SELECT format('%s has no column %s: run seckill.install_order_fence() again with the new name', c.oid::regclass, needed.column_name)
    FROM pg_class AS c
    CROSS JOIN (VALUES (entry.reservation_column), (entry.order_column)) AS needed (column_name)
    WHERE c.oid = ANY (relations)
      AND NOT EXISTS (SELECT FROM pg_attribute AS a
                      WHERE a.attrelid = c.oid AND a.attname = needed.column_name AND NOT a.attisdropped);
END $$;
-- +goose StatementEnd

-- What order_evidence reads, views followed to their tables.
-- +goose StatementBegin
CREATE FUNCTION seckill.evidence_sources()
RETURNS TABLE (classid oid, objid oid)
LANGUAGE sql STABLE SET search_path = seckill, pg_temp AS $$
    WITH RECURSIVE source (classid, objid) AS (
        SELECT 'pg_class'::regclass::oid, to_regclass('seckill.order_evidence')::oid
        UNION
        SELECT d.refclassid, d.refobjid
        FROM source
        JOIN pg_rewrite AS r ON source.classid = 'pg_class'::regclass AND r.ev_class = source.objid
        JOIN pg_depend AS d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
        WHERE d.refclassid IN ('pg_class'::regclass, 'pg_proc'::regclass)
    )
    SELECT classid, objid FROM source WHERE objid IS NOT NULL
$$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION seckill.evidence_problems() RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = seckill, pg_temp AS $$
DECLARE
    relations oid[];
    functions oid[];
    known     oid[];
BEGIN
    IF to_regclass('seckill.order_evidence') IS NULL THEN
        RETURN NEXT 'the view seckill.order_evidence is missing: run "reconciler migrate evidence FILE"';
        RETURN;
    END IF;
    SELECT coalesce(array_agg(s.objid) FILTER (WHERE s.classid = 'pg_class'::regclass), '{}'),
           coalesce(array_agg(s.objid) FILTER (WHERE s.classid = 'pg_proc'::regclass), '{}')
    INTO relations, functions FROM evidence_sources() AS s;
    IF 'seckill.no_evidence()'::regprocedure = ANY (functions) THEN
        RETURN NEXT 'no view over the orders is installed: run "reconciler migrate evidence FILE"';
        RETURN;
    END IF;
    SELECT array_agg(t.relation) INTO known
    FROM (SELECT relation FROM order_table UNION ALL SELECT relation FROM lookup_table) AS k (root)
    CROSS JOIN LATERAL relation_tree(k.root) AS t (relation);
    RETURN QUERY
    SELECT format('%s is read by order_evidence but is neither an order table (seckill.install_order_fence) nor listed in seckill.lookup_table',
                  c.oid::regclass)
    FROM pg_class AS c
    WHERE c.oid = ANY (relations) AND c.relkind IN ('r', 'p', 'f', 'm') AND c.oid <> ALL (coalesce(known, '{}'));
    RETURN QUERY
    SELECT format('%s is read by order_evidence with security_invoker, which makes what it shows depend on who asks', c.oid::regclass)
    FROM pg_class AS c
    CROSS JOIN LATERAL pg_options_to_table(c.reloptions) AS o
    WHERE c.oid = ANY (relations) AND c.relkind = 'v' AND o.option_name = 'security_invoker' AND o.option_value::boolean;
    RETURN QUERY
    SELECT format('order_evidence reads the function %s, behind which tables cannot be seen', p.oid::regprocedure)
    FROM pg_proc AS p
    WHERE p.oid = ANY (functions) AND p.proretset AND p.pronamespace <> 'pg_catalog'::regnamespace;
END $$;
-- +goose StatementEnd

-- Why nothing may be released now; no row when the fence is in place.
-- +goose StatementBegin
CREATE FUNCTION seckill.fence_problems() RETURNS SETOF text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = seckill, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM order_table) THEN
        RETURN NEXT 'no order table has the fence: run seckill.install_order_fence() on each table that creates orders';
    END IF;
    RETURN QUERY SELECT p.problem FROM order_table AS t CROSS JOIN LATERAL order_table_problems(t) AS p (problem);
    RETURN QUERY SELECT format('the back-fill of %s is not done: run CALL seckill.backfill_order_fence(%L)', relation, relation)
                 FROM order_table WHERE backfilled_at IS NULL;
    RETURN QUERY SELECT evidence_problems();
END $$;
-- +goose StatementEnd

-- --- installation --------------------------------------------------------

-- The registration of a table whose triggers are in place. SECURITY DEFINER,
-- so that an installer needs no rights on the registry itself.
-- +goose StatementBegin
CREATE FUNCTION seckill.register_order_table(entry seckill.order_table) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = seckill, pg_temp AS $$
DECLARE
    problem text;
BEGIN
    PERFORM commit_durably();
    SELECT p.text INTO problem FROM order_table_problems(entry) AS p (text) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '%', problem USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    INSERT INTO order_table (relation, reservation_column, order_column, columns, trigger_arguments, backfilled_at)
    VALUES (entry.relation, entry.reservation_column, entry.order_column, entry.columns, entry.trigger_arguments, entry.backfilled_at)
    ON CONFLICT (relation) DO UPDATE SET
        reservation_column = excluded.reservation_column, order_column = excluded.order_column, columns = excluded.columns,
        trigger_arguments = excluded.trigger_arguments, installed_at = excluded.installed_at, installed_by = excluded.installed_by,
        backfill_position = '', backfilled_rows = 0, backfilled_at = excluded.backfilled_at;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION seckill.check_fence_columns("table" regclass, reservation_column name, order_column name, columns jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = seckill, pg_temp AS $$
DECLARE
    wrong text;
BEGIN
    SELECT string_agg(key, ', ') INTO wrong FROM jsonb_object_keys(columns) AS key
    WHERE key NOT IN ('activity_id', 'sku_id', 'activity_version', 'bucket_id', 'user_id');
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'columns may name activity_id, sku_id, activity_version, bucket_id and user_id, not %', wrong
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT string_agg(format('%I', wanted), ', ') INTO wrong
    FROM (SELECT reservation_column UNION SELECT order_column UNION SELECT value FROM jsonb_each_text(columns)) AS w (wanted)
    WHERE NOT EXISTS (SELECT FROM pg_attribute AS a
                      WHERE a.attrelid = "table" AND a.attname = wanted AND a.attnum > 0 AND NOT a.attisdropped);
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'table % has no column %', "table", wrong USING ERRCODE = 'undefined_column';
    END IF;
    -- The trigger reads rows as JSON, where character(n) keeps its padding.
    SELECT string_agg(format('%I %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ') INTO wrong
    FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
    WHERE a.attrelid = "table"
      AND (a.attname = reservation_column AND (t.typcategory <> 'S' OR a.atttypid = 'bpchar'::regtype)
           OR a.attname = order_column AND a.atttypid NOT IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype, 'uuid'::regtype)
              AND (t.typcategory <> 'S' OR a.atttypid = 'bpchar'::regtype));
    IF wrong IS NOT NULL THEN
        RAISE EXCEPTION 'table % has columns of a type that cannot be fenced: %', "table", wrong
            USING ERRCODE = 'datatype_mismatch',
                  HINT = 'A reservation id is text or varchar, an order id text, varchar, an integer or a uuid.';
    END IF;
END $$;
-- +goose StatementEnd

-- Creates the triggers on the table and on those that inherit from it; those
-- of partitions come with their parent's. AFTER INSERT: a BEFORE trigger would
-- claim rows that an upsert or a later trigger then drops. The names sort
-- last, so that no other BEFORE trigger changes the row after ours.
-- +goose StatementBegin
CREATE FUNCTION seckill.create_fence_triggers("table" regclass, reservation_column name, arguments text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = seckill, pg_temp SET lock_timeout = 0 AS $$
DECLARE
    one record;
BEGIN
    -- Short: whoever wants to write orders queues behind us meanwhile.
    PERFORM set_config('lock_timeout', '400ms', true);
    FOR one IN
        SELECT c.oid::regclass AS relation, c.relispartition
        FROM relation_tree("table") AS t (oid) JOIN pg_class AS c ON c.oid = t.oid
        ORDER BY c.oid <> "table", c.oid
    LOOP
        IF one.relation = "table" OR NOT one.relispartition THEN
            EXECUTE format('DROP TRIGGER IF EXISTS zzz_seckill_order_insert ON %s', one.relation);
            EXECUTE format('DROP TRIGGER IF EXISTS zzz_seckill_order_update ON %s', one.relation);
            EXECUTE format('DROP TRIGGER IF EXISTS zzz_seckill_order_change ON %s', one.relation);
            EXECUTE format('CREATE TRIGGER zzz_seckill_order_insert AFTER INSERT ON %s FOR EACH ROW EXECUTE FUNCTION seckill.order_fence(%s)',
                           one.relation, arguments);
            EXECUTE format('CREATE TRIGGER zzz_seckill_order_update AFTER UPDATE ON %1$s FOR EACH ROW '
                           'WHEN (OLD.%2$I IS DISTINCT FROM NEW.%2$I) EXECUTE FUNCTION seckill.order_fence(%3$s)',
                           one.relation, reservation_column, arguments);
            EXECUTE format('CREATE TRIGGER zzz_seckill_order_change BEFORE UPDATE ON %1$s FOR EACH ROW '
                           'WHEN (OLD.%2$I IS DISTINCT FROM NEW.%2$I) EXECUTE FUNCTION seckill.order_fence(%3$s)',
                           one.relation, reservation_column, arguments);
        END IF;
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER zzz_seckill_order_insert, ENABLE ALWAYS TRIGGER zzz_seckill_order_update, '
                       'ENABLE ALWAYS TRIGGER zzz_seckill_order_change', one.relation);
    END LOOP;
END $$;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE FUNCTION seckill.install_order_fence(
    "table" regclass, reservation_column name, order_column name, columns jsonb DEFAULT '{}')
RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = seckill, pg_temp SET row_security = off AS $$
DECLARE
    arguments   text;
    entry       order_table;
    has_orders  boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'install_order_fence needs isolation level read committed' USING ERRCODE = 'SK012';
    END IF;
    columns := coalesce(columns, '{}');
    PERFORM check_fence_columns("table", reservation_column, order_column, columns);
    arguments := format('%L, %L, %L, %L, %L, %L, %L', reservation_column, order_column,
                        coalesce(columns ->> 'activity_id', ''), coalesce(columns ->> 'sku_id', ''),
                        coalesce(columns ->> 'activity_version', ''), coalesce(columns ->> 'bucket_id', ''),
                        coalesce(columns ->> 'user_id', ''));

    -- Installed already, with the same columns and whole: nothing slipped by.
    SELECT t.* INTO entry FROM order_table AS t
    WHERE t.relation = "table" AND t.reservation_column = install_order_fence.reservation_column
      AND t.order_column = install_order_fence.order_column AND t.columns = install_order_fence.columns;
    IF FOUND AND NOT EXISTS (SELECT FROM order_table_problems(entry)) THEN
        RETURN CASE WHEN entry.backfilled_at IS NULL THEN format('installed; run CALL seckill.backfill_order_fence(%L)', "table")
                    ELSE 'installed' END;
    END IF;

    -- A short wait for the lock, again and again: a long one would stop the sale.
    FOR attempt IN 1..20 LOOP
        BEGIN
            PERFORM create_fence_triggers("table", reservation_column, arguments);
            EXIT;
        EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
            IF attempt = 20 THEN
                RAISE;
            END IF;
            PERFORM pg_sleep(0.05 * attempt * (0.5 + random()));
        END;
    END LOOP;

    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', "table") INTO has_orders;
    entry := NULL;
    entry.relation := "table";
    entry.reservation_column := reservation_column;
    entry.order_column := order_column;
    entry.columns := columns;
    SELECT g.tgargs INTO entry.trigger_arguments FROM pg_trigger AS g
    WHERE g.tgrelid = "table" AND g.tgname = 'zzz_seckill_order_insert';
    IF NOT has_orders THEN
        entry.backfilled_at := clock_timestamp();
    END IF;
    PERFORM register_order_table(entry);
    RETURN CASE WHEN has_orders THEN format('installed; run CALL seckill.backfill_order_fence(%L)', "table") ELSE 'installed' END;
END $$;
-- +goose StatementEnd
COMMENT ON FUNCTION seckill.install_order_fence(regclass, name, name, jsonb) IS
    'Puts the order fence on a table that creates orders. Run by the table''s owner, a member of seckill_installer.';

-- +goose StatementBegin
CREATE FUNCTION seckill.remove_order_fence("table" regclass) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY INVOKER SET search_path = seckill, pg_temp AS $$
DECLARE
    one record;
BEGIN
    FOR one IN
        SELECT g.tgrelid::regclass AS relation, g.tgname AS name
        FROM relation_tree("table") AS t (relation) JOIN pg_trigger AS g ON g.tgrelid = t.relation
        WHERE g.tgfoid = 'seckill.order_fence()'::regprocedure AND g.tgparentid = 0
    LOOP
        EXECUTE format('DROP TRIGGER %I ON %s', one.name, one.relation);
    END LOOP;
    PERFORM unregister_order_table("table");
END $$;
-- +goose StatementEnd
COMMENT ON FUNCTION seckill.remove_order_fence(regclass) IS
    'Takes the order fence off a table that creates no orders any more. While order_evidence reads it, releases stop.';

-- +goose StatementBegin
CREATE FUNCTION seckill.unregister_order_table("table" regclass) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = seckill, pg_temp AS $$
BEGIN
    PERFORM commit_durably();
    IF EXISTS (SELECT FROM pg_trigger AS g WHERE g.tgrelid = "table" AND g.tgfoid = 'seckill.order_fence()'::regprocedure) THEN
        RAISE EXCEPTION 'table % still has the order fence: run seckill.remove_order_fence()', "table"
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
    DELETE FROM order_table WHERE relation = "table";
END $$;
-- +goose StatementEnd

-- One page of the back-fill: a claim for each existing order, but for those of
-- versions that are closed and past their retention.
-- +goose StatementBegin
CREATE FUNCTION seckill.claim_existing_orders("table" regclass, orders jsonb, last_position text, done boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = seckill, pg_temp SET row_security = off AS $$
#variable_conflict use_column
BEGIN
    PERFORM commit_durably();
    INSERT INTO reservation_claim AS c (reservation_id, outcome, activity_id, sku_id, activity_version, bucket_id, user_id, order_id, reason)
    SELECT o.reservation_id, 'ORDER', o.activity_id, o.sku_id, v.version, substring(o.bucket_id FROM '^[0-9]{1,18}$')::bigint,
           o.user_id, o.order_id, 'existing_order'
    FROM jsonb_to_recordset(orders) AS o (reservation_id text, order_id text, activity_id text, sku_id text,
                                          activity_version text, bucket_id text, user_id text)
    CROSS JOIN LATERAL (SELECT substring(o.activity_version FROM '^[0-9]{1,18}$')::bigint) AS v (version)
    WHERE NOT EXISTS (SELECT FROM scope AS s
                      WHERE s.activity_id = o.activity_id AND s.sku_id = o.sku_id AND s.activity_version = v.version
                      HAVING bool_and(s.state = 'CLOSED' AND s.retention_until < clock_timestamp()))
    ORDER BY o.reservation_id COLLATE "C", o.order_id
    ON CONFLICT (reservation_id) DO NOTHING;
    UPDATE order_table SET
        backfill_position = coalesce(last_position, backfill_position),
        backfilled_rows = backfilled_rows + jsonb_array_length(orders),
        backfilled_at = CASE WHEN done THEN clock_timestamp() END
    WHERE relation = "table";
END $$;
-- +goose StatementEnd

-- Claims the orders that were there before the fence, page by page along the
-- reservation column, each page a transaction of its own; an interrupted one
-- goes on where it stopped. It may not have SET clauses, since it commits.
-- +goose StatementBegin
CREATE PROCEDURE seckill.backfill_order_fence("table" regclass, page_size integer DEFAULT 2000)
LANGUAGE plpgsql SECURITY INVOKER AS $$
DECLARE
    entry   seckill.order_table;
    mapped  text[];
    orders  jsonb;
    rows    bigint;
    place   text;
BEGIN
    LOOP
        PERFORM pg_catalog.set_config('row_security', 'off', true);
        PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
        SELECT t.* INTO entry FROM seckill.order_table AS t WHERE t.relation = "table";
        IF NOT FOUND THEN
            RAISE EXCEPTION 'table % has no order fence: run seckill.install_order_fence() first', "table"
                USING ERRCODE = 'object_not_in_prerequisite_state';
        END IF;
        EXIT WHEN entry.backfilled_at IS NOT NULL;
        SELECT array_agg(CASE WHEN entry.columns ? c.name THEN format('%I::text', entry.columns ->> c.name) ELSE 'NULL' END ORDER BY c.place)
        INTO mapped
        FROM unnest(ARRAY['activity_id', 'sku_id', 'activity_version', 'bucket_id', 'user_id']) WITH ORDINALITY AS c (name, place);
        EXECUTE format(
            'SELECT coalesce(jsonb_agg(jsonb_build_object(''reservation_id'', %1$I::text, ''order_id'', %2$I::text, '
            '''activity_id'', %3$s, ''sku_id'', %4$s, ''activity_version'', %5$s, ''bucket_id'', %6$s, ''user_id'', %7$s)), ''[]''), '
            'count(*), max(%1$I)::text '
            'FROM (SELECT * FROM %8$s WHERE %1$I > $1 ORDER BY %1$I FETCH FIRST $2 ROWS WITH TIES) AS page',
            entry.reservation_column, entry.order_column, mapped[1], mapped[2], mapped[3], mapped[4], mapped[5],
            entry.relation)
        INTO orders, rows, place USING entry.backfill_position, greatest(page_size, 1);
        PERFORM seckill.claim_existing_orders("table", orders, place, rows < greatest(page_size, 1));
        COMMIT;
    END LOOP;
END $$;
-- +goose StatementEnd

-- --- the daemon's fence --------------------------------------------------

-- Makes sure that no order can be created for these reservations, or says who
-- was faster. lock_timeout: half of deadlock_timeout, so that the fence yields
-- and never a consumer; the SET clause keeps it from leaking into the caller.
-- enable_seqscan: else the plan that a session makes while the tables are small
-- reads them whole for as long as no ANALYZE comes, and a sale is over by then.
-- jit: what still has to be scanned counts as so dear that it would be compiled.
-- +goose StatementBegin
CREATE FUNCTION seckill.fence_reservations(reservation_ids text[], reason text, scopes text[])
RETURNS TABLE (reservation_id text, outcome text, order_id text, won boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = seckill, pg_temp SET row_security = off SET lock_timeout = 0 SET enable_seqscan = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    problems     text[];
    ordered_ids  text[];
    ordered_by   text[];
    fenced_ids   text[];
BEGIN
    IF pg_is_in_recovery() THEN
        RAISE EXCEPTION 'this server is in recovery: nothing can be fenced on it' USING ERRCODE = 'SK011';
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'fence_reservations needs isolation level read committed, not %', current_setting('transaction_isolation')
            USING ERRCODE = 'SK012';
    END IF;
    IF array_position(reservation_ids, NULL) IS NOT NULL OR '' = ANY (reservation_ids)
       OR scopes IS NOT NULL AND cardinality(scopes) <> cardinality(reservation_ids) THEN
        RAISE EXCEPTION 'fence_reservations needs a reservation id in every place, and as many scopes'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    problems := ARRAY(SELECT fence_problems());
    IF cardinality(problems) > 0 THEN
        RAISE EXCEPTION 'the order fence is not in place: %', problems[1]
            USING ERRCODE = 'SK010', DETAIL = to_jsonb(problems)::text;
    END IF;
    PERFORM commit_durably();
    PERFORM set_config('lock_timeout',
        greatest(1, extract(epoch FROM current_setting('deadlock_timeout')::interval) * 500)::bigint::text, true);

    SELECT array_agg(o.reservation_id), array_agg(o.order_id) INTO ordered_ids, ordered_by
    FROM (SELECT e.reservation_id, min(e.order_id) AS order_id FROM order_evidence AS e
          WHERE e.reservation_id = ANY (reservation_ids) GROUP BY e.reservation_id) AS o;

    WITH wanted AS (
        SELECT DISTINCT ON (u.id COLLATE "C") u.id, u.scope
        FROM unnest(reservation_ids, scopes) AS u (id, scope)
        WHERE NOT EXISTS (SELECT FROM unnest(ordered_ids) AS o (id) WHERE o.id = u.id)
        ORDER BY u.id COLLATE "C"
    ), named AS MATERIALIZED ( -- each scope is parsed once
        SELECT d.scope, s.activity_id, s.sku_id, s.activity_version, s.bucket_id
        FROM (SELECT DISTINCT w.scope FROM wanted AS w) AS d CROSS JOIN LATERAL parse_scope(d.scope) AS s
    ), inserted AS (
        INSERT INTO reservation_claim AS c (reservation_id, outcome, activity_id, sku_id, activity_version, bucket_id, reason)
        SELECT w.id, 'FENCED', s.activity_id, s.sku_id, s.activity_version, s.bucket_id, fence_reservations.reason
        FROM wanted AS w LEFT JOIN named AS s USING (scope)
        ORDER BY w.id COLLATE "C"
        ON CONFLICT (reservation_id) DO NOTHING
        RETURNING c.reservation_id
    )
    SELECT array_agg(i.reservation_id) INTO fenced_ids FROM inserted AS i;

    -- A second statement: the first does not see who committed while it waited.
    -- An order beside a claim that excludes it is a contradiction: no outcome.
    RETURN QUERY
    SELECT w.id,
           CASE WHEN o.id IS NULL THEN c.outcome WHEN coalesce(c.outcome, 'ORDER') = 'ORDER' THEN 'ORDER' END,
           coalesce(c.order_id, o.order_id),
           f.id IS NOT NULL
    FROM (SELECT DISTINCT u.id FROM unnest(reservation_ids) AS u (id)) AS w
    LEFT JOIN (SELECT c.* FROM reservation_claim AS c WHERE c.reservation_id = ANY (reservation_ids)) AS c
           ON c.reservation_id = w.id COLLATE "C"
    LEFT JOIN unnest(fenced_ids) AS f (id) ON f.id = w.id
    LEFT JOIN unnest(ordered_ids, ordered_by) AS o (id, order_id) ON o.id = w.id;
END $$;
-- +goose StatementEnd

-- --- purge ---------------------------------------------------------------

-- Deletes old claims in pages along reservation_id: pass the reply's position
-- until it is NULL. A claim stays while its order exists, while a scope that
-- it may belong to lives (not CLOSED, or within its retention), and when it
-- names a scope that nobody registered. claimed_before is the caller's policy:
-- message retention, retries and dead-letter replay must have passed.
-- +goose StatementBegin
CREATE FUNCTION seckill.purge_claims(claimed_before timestamptz, after_id text DEFAULT '', max_rows integer DEFAULT 5000)
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

REVOKE EXECUTE ON ALL ROUTINES IN SCHEMA seckill FROM PUBLIC;
GRANT SELECT ON seckill.order_table, seckill.lookup_table TO seckill_daemon, seckill_operator, seckill_installer;
GRANT INSERT, UPDATE, DELETE ON seckill.lookup_table TO seckill_operator;
GRANT EXECUTE ON FUNCTION seckill.no_evidence(), seckill.fence_problems(), seckill.fence_reservations(text[], text, text[])
    TO seckill_daemon, seckill_operator;
GRANT EXECUTE ON FUNCTION seckill.purge_claims(timestamptz, text, integer) TO seckill_daemon, seckill_operator;
GRANT EXECUTE ON FUNCTION seckill.install_order_fence(regclass, name, name, jsonb), seckill.remove_order_fence(regclass),
    seckill.check_fence_columns(regclass, name, name, jsonb), seckill.create_fence_triggers(regclass, name, text),
    seckill.register_order_table(seckill.order_table), seckill.unregister_order_table(regclass),
    seckill.order_table_problems(seckill.order_table), seckill.relation_tree(oid), seckill.order_fence(),
    seckill.claim_existing_orders(regclass, jsonb, text, boolean), seckill.fence_problems()
    TO seckill_installer;
GRANT EXECUTE ON PROCEDURE seckill.backfill_order_fence(regclass, integer) TO seckill_installer;

-- +goose Down

-- Fails while an order table still has the trigger: seckill.remove_order_fence().
DROP FUNCTION seckill.purge_claims(timestamptz, text, integer);
DROP FUNCTION seckill.fence_reservations(text[], text, text[]);
DROP PROCEDURE seckill.backfill_order_fence(regclass, integer);
DROP FUNCTION seckill.claim_existing_orders(regclass, jsonb, text, boolean);
DROP FUNCTION seckill.unregister_order_table(regclass);
DROP FUNCTION seckill.remove_order_fence(regclass);
DROP FUNCTION seckill.install_order_fence(regclass, name, name, jsonb);
DROP FUNCTION seckill.create_fence_triggers(regclass, name, text);
DROP FUNCTION seckill.check_fence_columns(regclass, name, name, jsonb);
DROP FUNCTION seckill.register_order_table(seckill.order_table);
DROP FUNCTION seckill.fence_problems();
DROP FUNCTION seckill.evidence_problems();
DROP FUNCTION seckill.evidence_sources();
DROP FUNCTION seckill.order_table_problems(seckill.order_table);
DROP FUNCTION seckill.relation_tree(oid);
DROP FUNCTION seckill.order_fence();
-- +goose StatementBegin
DO $$
BEGIN
    IF NOT seckill.evidence_is_shipped() THEN
        RAISE EXCEPTION 'seckill.order_evidence is not the shipped view: drop it yourself before rolling back';
    END IF;
    DROP VIEW seckill.order_evidence;
END $$;
-- +goose StatementEnd
DROP FUNCTION seckill.ship_evidence(text);
DROP FUNCTION seckill.evidence_is_shipped();
DROP FUNCTION seckill.evidence_hash();
DROP FUNCTION seckill.no_evidence();
DROP TABLE seckill.lookup_table;
DROP TABLE seckill.order_table;
