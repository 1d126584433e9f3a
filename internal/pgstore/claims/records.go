package claims

import (
	"context"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reservation"
)

// RecordsSQL is one statement, so that a claim and its order are seen together; the filter
// stands inside each side, else a grouped view would be read whole. The
// explicit collation lets a view's column have any.
const RecordsSQL = `
SELECT coalesce(c.reservation_id, o.reservation_id),
       c.outcome, c.activity_id, c.sku_id, c.activity_version, c.bucket_id, c.user_id, c.order_id, c.reason, c.claimed_by, c.claimed_at,
       o.order_id, o.request_id, o.activity_id, o.sku_id, o.activity_version, o.bucket_id, o.user_id, o.active, o.created_at,
       o.reservation_id IS NOT NULL
FROM (SELECT reservation_id, outcome, activity_id, sku_id, activity_version, bucket_id, user_id, order_id, reason, claimed_by, claimed_at
      FROM seckill.reservation_claim WHERE reservation_id = ANY ($1::text[])) AS c
FULL JOIN (SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, active, created_at
           FROM seckill.order_evidence WHERE reservation_id = ANY ($1::text[])) AS o
       ON o.reservation_id COLLATE "C" = c.reservation_id`

// Read reads claim and orders of each reservation (P of protocol §2) in one
// statement. Ids with neither are absent from the map: their zero Record means
// NONE. An error says nothing about any id of the page.
//
// Several lines of one order count once, active if any line is. Lines that
// disagree about scope or user give a value that no scope has, so that the
// order is a mismatch and never a match.
func Read(ctx context.Context, db Querier, ids []string) (map[string]reservation.Record, error) {
	if len(ids) == 0 {
		return map[string]reservation.Record{}, nil
	}
	rows, err := db.Query(ctx, RecordsSQL, ids)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	records := make(map[string]reservation.Record, len(ids))
	for rows.Next() {
		if err := addLine(rows, records); err != nil {
			return nil, err
		}
	}
	return records, rows.Err()
}

// recordLine is one row of recordsSQL, NULLs as nil.
type recordLine struct {
	id string

	outcome, claimActivity, claimSKU *string
	claimVersion, claimBucket        *int64
	claimUser, claimOrder, reason    *string
	claimedBy                        *string
	claimedAt                        *time.Time

	orderID, requestID, activity, sku *string
	version, bucket                   *int64
	user                              *string
	active                            *bool
	createdAt                         *time.Time
	hasOrder                          bool
}

func addLine(rows pgx.Rows, records map[string]reservation.Record) error {
	var l recordLine
	if err := rows.Scan(&l.id,
		&l.outcome, &l.claimActivity, &l.claimSKU, &l.claimVersion, &l.claimBucket, &l.claimUser, &l.claimOrder,
		&l.reason, &l.claimedBy, &l.claimedAt,
		&l.orderID, &l.requestID, &l.activity, &l.sku, &l.version, &l.bucket, &l.user, &l.active, &l.createdAt,
		&l.hasOrder); err != nil {
		return err
	}
	record := records[l.id]
	if l.outcome != nil && record.Claim == nil {
		record.Claim = &reservation.Claim{
			Outcome: reservation.Outcome(*l.outcome), ActivityID: or(l.claimActivity, ""), SKUID: or(l.claimSKU, ""),
			Version: or(l.claimVersion, -1), Bucket: or(l.claimBucket, -1), UserID: or(l.claimUser, ""),
			OrderID: or(l.claimOrder, ""), Reason: or(l.reason, ""), ClaimedBy: or(l.claimedBy, ""), ClaimedAt: or(l.claimedAt, time.Time{}).UTC(),
		}
	}
	if l.hasOrder {
		record.Orders = mergeLine(record.Orders, reservation.Order{
			OrderID: or(l.orderID, ""), RequestID: or(l.requestID, ""), ActivityID: or(l.activity, ""), SKUID: or(l.sku, ""),
			Version: or(l.version, -1), Bucket: or(l.bucket, -1), UserID: or(l.user, ""),
			Active: l.active != nil && *l.active, StatusKnown: l.active != nil, CreatedAt: or(l.createdAt, time.Time{}).UTC(),
		})
	}
	records[l.id] = record
	return nil
}

// mergeLine adds one line to the orders of a reservation. An order is active
// if any line is; its status is known if it is active, or every line's is.
func mergeLine(orders []reservation.Order, line reservation.Order) []reservation.Order {
	for i := range orders {
		o := &orders[i]
		if o.OrderID != line.OrderID {
			continue
		}
		o.RequestID = mergeText(o.RequestID, line.RequestID)
		o.ActivityID = mergeText(o.ActivityID, line.ActivityID)
		o.SKUID = mergeText(o.SKUID, line.SKUID)
		o.UserID = mergeText(o.UserID, line.UserID)
		o.Version = mergeNumber(o.Version, line.Version)
		o.Bucket = mergeNumber(o.Bucket, line.Bucket)
		o.Active = o.Active || line.Active
		o.StatusKnown = o.Active || (o.StatusKnown && line.StatusKnown)
		if !line.CreatedAt.IsZero() && (o.CreatedAt.IsZero() || line.CreatedAt.Before(o.CreatedAt)) {
			o.CreatedAt = line.CreatedAt
		}
		return orders
	}
	return append(orders, line)
}

// mergeText joins two different values with a character that no identifier has.
func mergeText(a, b string) string {
	switch {
	case a == b, b == "":
		return a
	case a == "":
		return b
	default:
		return a + "|" + b
	}
}

// mergeNumber makes two different values one that is no version and no bucket.
func mergeNumber(a, b int64) int64 {
	switch {
	case a == b, b < 0:
		return a
	case a < 0:
		return b
	default:
		return math.MaxInt64
	}
}

// or reads a column that may be NULL.
func or[T any](p *T, null T) T {
	if p == nil {
		return null
	}
	return *p
}
