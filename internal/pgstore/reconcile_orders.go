package pgstore

import (
	"context"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reconcile"
)

// retentionMargin is how long before its retention ends a scope is no longer
// compared: Redis removes its keys by a clock of its own.
const retentionMargin = time.Minute

// SKUs lists the registered SKUs for reconciliation, with every version and
// bucket of each; ” selects all.
func (s *Store) SKUs(ctx context.Context, activityID, skuID string) ([]reconcile.SKU, error) {
	const action = "read the scope registry"
	rows, err := s.pool.Query(ctx, `
		SELECT a.activity_id, a.sku_id, a.activity_version, a.total, a.buckets,
		       s.bucket_id, s.initial, s.confirmed_at IS NOT NULL, s.retention_until <= clock_timestamp() + $3,
		       s.state, s.held_at IS NOT NULL
		FROM seckill.scope_allocation AS a JOIN seckill.scope AS s USING (activity_id, sku_id, activity_version)
		WHERE ($1 = '' OR a.activity_id = $1) AND ($2 = '' OR a.sku_id = $2)
		ORDER BY a.activity_id, a.sku_id, a.activity_version, s.bucket_id`,
		activityID, skuID, retentionMargin)
	if err != nil {
		return nil, failed(action, err)
	}
	var skus []reconcile.SKU
	var activity, sku string
	var v reconcile.Version
	var b reconcile.Bucket
	_, err = pgx.ForEachRow(rows, []any{
		&activity, &sku, &v.Number, &v.Allocated, &v.Count, &b.ID, &b.Initial, &b.Confirmed, &b.Expired, &b.State, &b.Held,
	}, func() error {
		if n := len(skus); n == 0 || skus[n-1].ActivityID != activity || skus[n-1].SKUID != sku {
			skus = append(skus, reconcile.SKU{ActivityID: activity, SKUID: sku})
		}
		k := &skus[len(skus)-1]
		if n := len(k.Versions); n == 0 || k.Versions[n-1].Number != v.Number {
			k.Versions = append(k.Versions, reconcile.Version{Number: v.Number, Allocated: v.Allocated, Count: v.Count})
		}
		last := &k.Versions[len(k.Versions)-1]
		last.Buckets = append(last.Buckets, b)
		return nil
	})
	return skus, failed(action, err)
}

// Freeze prepares a view of the orders at one instant: a transaction whose
// snapshot the first statement takes. It holds a connection until it is closed.
func (s *Store) Freeze(ctx context.Context) (reconcile.Frozen, error) {
	const action = "begin to read the orders"
	tx, err := s.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return nil, failed(action, err)
	}
	f := &frozenOrders{tx: tx}
	// SET takes no snapshot. Counting groups by reservation: with the usual
	// 4 MB the server would do that on disk from 20,000 orders on.
	if _, err := tx.Exec(ctx, `SET LOCAL work_mem = '64MB'`); err != nil {
		f.Close()
		return nil, failed(action, err)
	}
	return f, nil
}

// closeTimeout bounds the end of a view whose context has ended already.
const closeTimeout = time.Second

// frozenOrders reads order_evidence in one snapshot.
type frozenOrders struct{ tx pgx.Tx }

// Close gives the connection back.
func (f *frozenOrders) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = f.tx.Rollback(ctx) // nothing was written, and a connection that is broken is dropped
}

// Fix takes the snapshot. A standby may show an old state, so it is refused.
func (f *frozenOrders) Fix(ctx context.Context) error {
	const action = "take a snapshot of the orders"
	var standby bool
	if err := f.tx.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&standby); err != nil {
		return failed(action, err)
	}
	if standby {
		return failed(action, ErrInRecovery)
	}
	return nil
}

// orderStatus is the status of an order over all its rows: active if any is,
// and known only if it is active or every row's is known.
const orderStatus = `CASE WHEN bool_or(active) THEN 'active' WHEN bool_or(active IS NULL) THEN 'unknown' ELSE 'cancelled' END`

// ofSKU selects a SKU's orders of some versions, and those that name none.
const ofSKU = `activity_id = $1 AND sku_id = $2 AND reservation_id IS NOT NULL
	AND ($3::bigint[] IS NULL OR activity_version = ANY ($3) OR activity_version IS NULL)`

// Count counts a SKU's orders by the version and bucket that they name. The
// database reads them by activity, SKU and version; nothing but the counts is
// sent.
func (f *frozenOrders) Count(ctx context.Context, activityID, skuID string, versions []int64) ([]reconcile.OrderCount, error) {
	const action = "count the orders"
	rows, err := f.tx.Query(ctx, `
		SELECT activity_version, bucket_id, count(*) FILTER (WHERE status = 'active'),
		       count(*) FILTER (WHERE status = 'cancelled'), count(*) FILTER (WHERE status = 'unknown')
		FROM (SELECT activity_version, bucket_id, `+orderStatus+` AS status
		      FROM seckill.order_evidence WHERE `+ofSKU+`
		      GROUP BY reservation_id, activity_version, bucket_id) AS o
		GROUP BY activity_version, bucket_id ORDER BY activity_version, bucket_id`,
		activityID, skuID, versions)
	if err != nil {
		return nil, failed(action, err)
	}
	counts, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (reconcile.OrderCount, error) {
		var c reconcile.OrderCount
		var version, bucket *int64
		err := row.Scan(&version, &bucket, &c.Active, &c.Cancelled, &c.Unknown)
		c.Version, c.Bucket = number(version), number(bucket)
		return c, err
	})
	return counts, failed(action, err)
}

// oneOrder are the columns of a reconcile.Order, for a query that groups by
// orderKey.
const (
	oneOrder = `reservation_id, activity_id, sku_id, activity_version, bucket_id, user_id, ` + orderStatus
	orderKey = `reservation_id, activity_id, sku_id, activity_version, bucket_id, user_id`
)

// Match finds the orders of the reservations.
func (f *frozenOrders) Match(ctx context.Context, reservationIDs []string) ([]reconcile.Order, error) {
	const action = "find the orders of reservations"
	rows, err := f.tx.Query(ctx, `SELECT `+oneOrder+` FROM seckill.order_evidence
		WHERE reservation_id = ANY ($1::text[]) GROUP BY `+orderKey, reservationIDs)
	if err != nil {
		return nil, failed(action, err)
	}
	orders, err := pgx.CollectRows(rows, scanOrder)
	return orders, failed(action, err)
}

// Walk gives pages of orders that are not active and, if asked, of those
// without a bucket. A cursor of the server holds the rest, so that memory does
// not grow with their number.
func (f *frozenOrders) Walk(ctx context.Context, w reconcile.OrderWalk, page func([]reconcile.Order) error) error {
	const action = "read the orders one by one"
	_, err := f.tx.Exec(ctx, `DECLARE orders NO SCROLL CURSOR FOR
		SELECT `+oneOrder+` FROM seckill.order_evidence WHERE `+ofSKU+`
		GROUP BY `+orderKey+` HAVING bool_or(active) IS NOT TRUE OR ($4 AND bucket_id IS NULL)`,
		w.ActivityID, w.SKUID, w.Versions, w.Bucketless)
	if err != nil {
		return failed(action, err)
	}
	for {
		rows, err := f.tx.Query(ctx, `FETCH `+strconv.Itoa(w.Limit)+` FROM orders`)
		if err != nil {
			return failed(action, err)
		}
		orders, err := pgx.CollectRows(rows, scanOrder)
		if err != nil {
			return failed(action, err)
		}
		if len(orders) > 0 {
			if err := page(orders); err != nil {
				return err
			}
		}
		if len(orders) < w.Limit {
			_, err := f.tx.Exec(ctx, `CLOSE orders`)
			return failed(action, err)
		}
	}
}

// statuses maps what orderStatus yields.
var statuses = map[string]reconcile.OrderStatus{
	"active": reconcile.OrderActive, "cancelled": reconcile.OrderCancelled, "unknown": reconcile.OrderUnknown,
}

func scanOrder(row pgx.CollectableRow) (reconcile.Order, error) {
	var o reconcile.Order
	var activity, sku, user *string
	var version, bucket *int64
	var status string
	err := row.Scan(&o.ReservationID, &activity, &sku, &version, &bucket, &user, &status)
	o.ActivityID, o.SKUID, o.UserID = text(activity), text(sku), text(user)
	o.Version, o.Bucket, o.Status = number(version), number(bucket), statuses[status]
	return o, err
}
