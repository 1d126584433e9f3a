-- Orders that came into a fenced table by another way than an insert, such as
-- in a partition that was attached with its rows, have no claim yet.

-- +goose Up

-- Lets backfill_order_fence go through the table once more. Releases wait until
-- it has.
-- +goose StatementBegin
CREATE FUNCTION seckill.restart_backfill("table" regclass) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = seckill, pg_temp AS $$
BEGIN
    PERFORM commit_durably();
    UPDATE order_table SET backfill_position = '', backfilled_rows = 0, backfilled_at = NULL WHERE relation = "table";
    IF NOT FOUND THEN
        RAISE EXCEPTION 'table % has no order fence: run seckill.install_order_fence() first', "table"
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
END $$;
-- +goose StatementEnd
COMMENT ON FUNCTION seckill.restart_backfill(regclass) IS
    'For orders that were there before their partition was attached. Then CALL seckill.backfill_order_fence().';

REVOKE EXECUTE ON FUNCTION seckill.restart_backfill(regclass) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION seckill.restart_backfill(regclass) TO seckill_installer;

-- +goose Down
DROP FUNCTION seckill.restart_backfill(regclass);
