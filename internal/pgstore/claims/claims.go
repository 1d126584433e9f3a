// Package claims holds the statements that the order side and readers share with
// the daemon: the claim of a reservation, its refusal, and the evidence of both
// (protocol §1 and §2). It decides nothing, and knows no pool of its own.
package claims

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reservation"
)

// Querier runs one statement; pgx pools, connections and transactions do.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// InForce is the claim that is in force after an order consumer's call.
type InForce struct {
	Outcome reservation.Outcome
	OrderID string // of the order; "" for other outcomes, and for an early claim without one
	Won     bool   // this call made it
}

// Claim claims the reservation of the message for an order, in the
// consumer's own transaction (protocol §1). A claim that was first stays.
func Claim(ctx context.Context, tx Querier, m reservation.OrderMessage, orderID string) (InForce, error) {
	var c InForce
	var outcome string
	var order *string
	err := tx.QueryRow(ctx, `SELECT outcome, order_id, won FROM seckill.claim_reservation($1, nullif($2, ''), $3, $4)`,
		m.ReservationID, orderID, m.Scope().Tag(), m.UserID).Scan(&outcome, &order, &c.Won)
	if err != nil {
		return InForce{}, fmt.Errorf("claim reservation %s: %w", m.ReservationID, err)
	}
	c.Outcome, c.OrderID = reservation.Outcome(outcome), or(order, "")
	return c, nil
}

// Reject claims that no order will be created for the reservation of
// the message, and returns the outcome in force (protocol §1).
func Reject(ctx context.Context, tx Querier, m reservation.OrderMessage, reason string) (reservation.Outcome, error) {
	var outcome string
	err := tx.QueryRow(ctx, `SELECT seckill.reject_reservation($1, $2, $3)`, m.ReservationID, reason, m.Scope().Tag()).Scan(&outcome)
	if err != nil {
		return "", fmt.Errorf("reject reservation %s: %w", m.ReservationID, err)
	}
	return reservation.Outcome(outcome), nil
}
