-- Creating and rolling versions needs to know whose stock table counts: that of
-- the reference schema only where its orders are the evidence.

-- +goose Up
GRANT EXECUTE ON FUNCTION seckill.evidence_is_shipped(), seckill.evidence_hash() TO seckill_daemon, seckill_operator;

-- +goose Down
REVOKE EXECUTE ON FUNCTION seckill.evidence_is_shipped(), seckill.evidence_hash() FROM seckill_daemon, seckill_operator;
