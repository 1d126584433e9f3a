package pgstore

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// FoundOrder is a line of order_evidence that was looked for by its request or
// user.
type FoundOrder struct {
	ReservationID string
	OrderID       string
	Active        *bool // nil: the view does not say
	CreatedAt     time.Time
}

// OrderQuery names the orders of a request or of a user.
type OrderQuery struct {
	RequestID  string   // or
	UserID     string   //
	Activities []string // nil: of all activities
	Limit      int
}

// FindOrders lists the orders of a request or a user, the latest first. An
// adopter's view may have no index for it: the statement's time limit bounds it.
func (s *Store) FindOrders(ctx context.Context, q OrderQuery) ([]FoundOrder, error) {
	column, value := "request_id", q.RequestID
	if q.UserID != "" {
		column, value = "user_id", q.UserID
	}
	return collect(ctx, s, "look for orders by "+column, func(row pgx.CollectableRow) (FoundOrder, error) {
		var o FoundOrder
		var order *string
		var created *time.Time
		err := row.Scan(&o.ReservationID, &order, &o.Active, &created)
		o.OrderID, o.CreatedAt = text(order), moment(created)
		return o, err
	}, `SELECT reservation_id, order_id, active, created_at FROM seckill.order_evidence
		WHERE `+column+` = $1 AND ($2::text[] IS NULL OR activity_id = ANY ($2)) AND reservation_id IS NOT NULL
		ORDER BY created_at DESC NULLS LAST, reservation_id LIMIT $3`, value, q.Activities, q.Limit)
}
