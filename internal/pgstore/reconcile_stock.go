package pgstore

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reconcile"
)

// Sold reads the counters of a SKU's sold units from the view
// seckill.stock_evidence, by version, in the snapshot of the orders. There is
// such a view only where the reference schema is installed or an adopter made
// one: otherwise applies is false. Several rows of a version are added up.
func (f *frozenOrders) Sold(ctx context.Context, activityID, skuID string) (counters []reconcile.SoldCounter, applies bool, err error) {
	const action = "read the counters of sold units in seckill.stock_evidence"
	if err := f.tx.QueryRow(ctx, `SELECT to_regclass('seckill.stock_evidence') IS NOT NULL`).Scan(&applies); err != nil || !applies {
		return nil, false, failed(action, err)
	}
	rows, err := f.tx.Query(ctx, `
		SELECT activity_version, sum(total)::bigint, sum(sold)::bigint FROM seckill.stock_evidence
		WHERE activity_id = $1 AND sku_id = $2 GROUP BY activity_version ORDER BY activity_version`, activityID, skuID)
	if err != nil {
		return nil, false, failed(action, err)
	}
	counters, err = pgx.CollectRows(rows, pgx.RowToStructByPos[reconcile.SoldCounter])
	return counters, err == nil, failed(action, err)
}

// Server says what of the server's settings the promises rest on. Our own
// sessions set synchronous_commit themselves: what others begin with counts.
func (s *Store) Server(ctx context.Context) (reconcile.PostgresServer, error) {
	var p reconcile.PostgresServer
	err := s.pool.QueryRow(ctx, `
		SELECT pg_is_in_recovery(), (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes')`).
		Scan(&p.InRecovery, &p.SynchronousCommit, &p.Fsync, &p.FullPageWrites)
	return p, failed("read the settings of PostgreSQL", err)
}
