-- Where the counter of sold units is, for the check sold_mismatch; and the index
-- that a deep reconciliation walks the orders by.

-- +goose Up
-- +goose StatementBegin
DO $$
BEGIN
    IF to_regclass('seckill.stock_evidence') IS NULL THEN -- an adopter's own stays
        CREATE VIEW seckill.stock_evidence AS
            SELECT activity_id, sku_id, activity_version, total, sold FROM shop.stock;
        COMMENT ON VIEW seckill.stock_evidence IS 'shipped with the reference schema';
        GRANT SELECT ON seckill.stock_evidence TO seckill_daemon, seckill_operator;
    END IF;
END $$;
-- +goose StatementEnd

-- Pages of a SKU's orders in the order of their reservations.
CREATE INDEX orders_of_sku ON shop.orders (activity_id, sku_id, reservation_id);

-- +goose Down
DROP INDEX shop.orders_of_sku;
-- +goose StatementBegin
DO $$
BEGIN
    IF obj_description(to_regclass('seckill.stock_evidence'), 'pg_class') = 'shipped with the reference schema' THEN
        DROP VIEW seckill.stock_evidence;
    END IF;
END $$;
-- +goose StatementEnd
