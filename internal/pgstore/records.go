package pgstore

import (
	"context"

	"github.com/seckill/reconciler/internal/pgstore/claims"
	"github.com/seckill/reconciler/reservation"
)

// Records reads claim and orders of each reservation: see [claims.Read].
func (s *Store) Records(ctx context.Context, ids []string) (map[string]reservation.Record, error) {
	records, err := claims.Read(ctx, s.pool, ids)
	return records, failed("read claims and orders", err)
}
