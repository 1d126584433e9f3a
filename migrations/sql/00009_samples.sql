-- The numbers of each live version over time, for the charts of the console.

-- +goose Up

CREATE TABLE seckill.version_sample (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at               timestamptz NOT NULL DEFAULT clock_timestamp(),
    activity_id      text NOT NULL,
    sku_id           text NOT NULL,
    activity_version bigint NOT NULL,
    buckets_read     integer NOT NULL CHECK (buckets_read > 0), -- of how many the numbers are the sum
    available        bigint NOT NULL,
    reserved         bigint NOT NULL,
    released_total   bigint NOT NULL,
    send_pending     bigint NOT NULL,
    undecided        bigint NOT NULL
);
CREATE INDEX version_sample_version ON seckill.version_sample (activity_id, sku_id, activity_version, at);
CREATE INDEX version_sample_at ON seckill.version_sample (at); -- purge

GRANT SELECT ON seckill.version_sample TO seckill_daemon, seckill_operator;
GRANT INSERT ON seckill.version_sample TO seckill_daemon;
GRANT DELETE ON seckill.version_sample TO seckill_daemon, seckill_operator; -- purge, by policy

-- +goose Down
DROP TABLE seckill.version_sample;
