package pgstore

import (
	"context"

	"github.com/seckill/reconciler/reservation"
)

// TransfersOf counts the cross-bucket transfers that a bucket ever had a part
// in: with one, its initial stock is no longer the registered one.
func (s *Store) TransfersOf(ctx context.Context, scope reservation.Scope) (n int64, err error) {
	err = s.pool.QueryRow(ctx, `
		SELECT count(*) FROM seckill.bucket_transfer
		WHERE (activity_id, sku_id, activity_version) = ($1, $2, $3) AND $4 IN (donor_bucket, receiver_bucket)`,
		scope.ActivityID, scope.SKUID, scope.Version, scope.Bucket).Scan(&n)
	return n, failed("look for transfers of the bucket", err)
}
