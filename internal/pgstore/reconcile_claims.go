package pgstore

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// orderPageSQL is a page of a SKU's orders after a reservation id.
const orderPageSQL = `
	SELECT DISTINCT reservation_id FROM seckill.order_evidence
	WHERE activity_id = $1 AND sku_id = $2 AND reservation_id > $3
	ORDER BY reservation_id LIMIT $4`

// OrderPage gives the reservation ids of a SKU's orders that follow after, each
// once, in the database's order of the column, at most limit of them. A standby
// may show an old state, so it is refused.
func (s *Store) OrderPage(ctx context.Context, activityID, skuID, after string, limit int) ([]string, error) {
	const action = "read a page of the orders"
	var standby bool
	if err := s.pool.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&standby); err != nil {
		return nil, failed(action, err)
	}
	if standby {
		return nil, failed(action, ErrInRecovery)
	}
	return collect(ctx, s, action, pgx.RowTo[string], orderPageSQL, activityID, skuID, after, limit)
}
