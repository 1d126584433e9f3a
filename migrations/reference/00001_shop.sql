-- The reference order side, for the demo, the tests and newcomers (interface §4).

-- +goose Up
CREATE SCHEMA shop;
GRANT USAGE ON SCHEMA shop TO seckill_consumer, seckill_operator;

-- The last defence against overselling: sold never exceeds total.
CREATE TABLE shop.stock (
    activity_id      text NOT NULL,
    sku_id           text NOT NULL,
    activity_version bigint NOT NULL,
    total            bigint NOT NULL CHECK (total >= 0),
    sold             bigint NOT NULL DEFAULT 0 CHECK (sold BETWEEN 0 AND total),
    PRIMARY KEY (activity_id, sku_id, activity_version)
);

CREATE TABLE shop.orders (
    order_id         text PRIMARY KEY,
    reservation_id   text UNIQUE,
    request_id       text NOT NULL,
    activity_id      text NOT NULL,
    sku_id           text NOT NULL,
    activity_version bigint NOT NULL,
    bucket_id        bigint NOT NULL,
    user_id          text NOT NULL,
    status           text NOT NULL DEFAULT 'CREATED' CHECK (status IN ('CREATED', 'PAID', 'CANCELLED')),
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX orders_scope ON shop.orders (activity_id, sku_id, activity_version, bucket_id); -- reconciliation counts by it
CREATE UNIQUE INDEX orders_one_active ON shop.orders (activity_id, sku_id, user_id) WHERE status <> 'CANCELLED';

GRANT SELECT, INSERT, UPDATE ON shop.stock, shop.orders TO seckill_consumer;
GRANT SELECT, INSERT, UPDATE ON shop.stock TO seckill_operator; -- scope create and scope roll

SELECT seckill.install_order_fence('shop.orders', 'reservation_id', 'order_id',
    '{"activity_id": "activity_id", "sku_id": "sku_id", "activity_version": "activity_version",
      "bucket_id": "bucket_id", "user_id": "user_id"}');

-- Leaves an adopter's own view alone.
SELECT seckill.ship_evidence($$
    SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id,
           CASE WHEN status IN ('CREATED', 'PAID') THEN true WHEN status = 'CANCELLED' THEN false END AS active,
           created_at
    FROM shop.orders
    WHERE reservation_id IS NOT NULL
$$);

-- +goose Down
-- +goose StatementBegin
DO $$
BEGIN
    IF EXISTS (SELECT FROM shop.orders) THEN
        RAISE EXCEPTION 'shop.orders holds orders: rolling back would drop them';
    END IF;
END $$;
-- +goose StatementEnd
-- Back to the view that says that there is none; an adopter's stays.
SELECT seckill.ship_evidence('SELECT * FROM seckill.no_evidence()');
SELECT seckill.remove_order_fence('shop.orders');
DROP TABLE shop.orders;
DROP TABLE shop.stock;
DROP SCHEMA shop;
