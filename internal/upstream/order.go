package upstream

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/reservation"
)

// orderResult is what came of a try to create an order.
type orderResult int

const (
	orderCreated  orderResult = iota
	orderExists               // there is one for the reservation already
	orderRejected             // none can be created, for the business's reasons
	orderFenced               // none can be created: the claim is FENCED or REJECTED
	orderAborted              // the consumer died with its transaction open
)

// tables is the order side's database, as its login shop_consumer sees it.
type tables struct {
	db     *pgxpool.Pool
	client *client.Consumer
}

// Reasons for which an order is refused for good.
const (
	reasonNoStock  = "out_of_stock"
	reasonHasOrder = "user_has_order"
	reasonBusiness = "refused_by_business"
)

var errNoStock = errors.New(reasonNoStock)

// createClaiming creates an order the way of protocol §1: claim, then deduct,
// in one transaction; a refusal is claimed too, after the rollback. abort ends
// it before the commit.
func (t tables) createClaiming(ctx context.Context, m client.Message, abort bool) (orderResult, string, error) {
	orderID := newOrderID()
	result := orderCreated
	err := t.transaction(ctx, abort, func(tx pgx.Tx) error {
		claim, err := t.client.Claim(ctx, tx, m, orderID)
		switch {
		case err != nil:
			return err
		case claim.Excluded():
			result = orderFenced
			return errRollback
		case claim.Ordered():
			result, orderID = orderExists, claim.OrderID
			return errRollback
		}
		return insertAndDeduct(ctx, tx, orderID, m)
	})
	reason := refusal(err)
	switch {
	case errors.Is(err, errAborted):
		return orderAborted, "", nil
	case reason != "":
		return t.reject(ctx, m, reason)
	case err != nil && !errors.Is(err, errRollback):
		return 0, "", fmt.Errorf("create the order of reservation %s: %w", m.ReservationID, err)
	}
	return result, orderID, nil
}

// createUnmodified creates an order as a consumer does that has never heard of
// claims: it knows its own unique constraints and the stock, and every other
// error is one to try again.
func (t tables) createUnmodified(ctx context.Context, m client.Message, abort bool) (orderResult, string, error) {
	orderID := newOrderID()
	err := t.transaction(ctx, abort, func(tx pgx.Tx) error { return insertAndDeduct(ctx, tx, orderID, m) })
	switch {
	case err == nil:
		return orderCreated, orderID, nil
	case errors.Is(err, errAborted):
		return orderAborted, "", nil
	case errors.Is(err, errNoStock):
		return orderRejected, "", nil
	case sqlState(err) == uniqueViolation:
		existing, found, findErr := t.find(ctx, m.ReservationID)
		switch {
		case findErr != nil:
			return 0, "", findErr
		case found:
			return orderExists, existing, nil
		default:
			return orderRejected, "", nil
		}
	default:
		return 0, "", fmt.Errorf("create the order of reservation %s: %w", m.ReservationID, err)
	}
}

var (
	errRollback = errors.New("rolled back on purpose")
	errAborted  = errors.New("the consumer dies here")
)

// transaction runs do and commits, unless do fails or the consumer is to die.
func (t tables) transaction(ctx context.Context, abort bool, do func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, t.db, func(tx pgx.Tx) error {
		if err := do(tx); err != nil {
			return err
		}
		if abort {
			return errAborted
		}
		return nil
	})
}

// insertAndDeduct creates the order and takes its unit. The order comes first,
// so that the row of the stock, which all consumers share, is locked for as
// short a time as can be.
func insertAndDeduct(ctx context.Context, tx pgx.Tx, orderID string, m client.Message) error {
	_, err := tx.Exec(ctx, `
		INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`,
		orderID, m.ReservationID, m.RequestID, m.ActivityID, m.SKUID, m.ActivityVersion, m.BucketID, m.UserID)
	if err != nil {
		return fmt.Errorf("insert: %w", client.ClaimError(err))
	}
	tag, err := tx.Exec(ctx, `
		UPDATE shop.stock SET sold = sold + 1
		WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3 AND sold < total`,
		m.ActivityID, m.SKUID, m.ActivityVersion)
	if err != nil {
		return fmt.Errorf("deduct: %w", err)
	}
	if tag.RowsAffected() == 0 {
		return errNoStock
	}
	return nil
}

// reject claims the refusal. Another claim that was first stays.
func (t tables) reject(ctx context.Context, m client.Message, reason string) (orderResult, string, error) {
	outcome, err := t.client.Reject(ctx, t.db, m, reason)
	if err != nil {
		return 0, "", err
	}
	switch outcome {
	case reservation.OutcomeOrder:
		orderID, _, err := t.find(ctx, m.ReservationID)
		return orderExists, orderID, err
	case reservation.OutcomeFenced:
		return orderFenced, "", nil
	default:
		return orderRejected, "", nil
	}
}

func (t tables) find(ctx context.Context, reservationID string) (orderID string, found bool, err error) {
	err = t.db.QueryRow(ctx, `SELECT order_id FROM shop.orders WHERE reservation_id = $1`, reservationID).Scan(&orderID)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("find the order of reservation %s: %w", reservationID, err)
	}
	return orderID, true, nil
}

const uniqueViolation = "23505" // SQLSTATE

// refusal is the reason for which a claiming consumer refuses for good; "" when
// there is none.
func refusal(err error) string {
	switch {
	case errors.Is(err, errNoStock):
		return reasonNoStock
	case sqlState(err) == uniqueViolation:
		return reasonHasOrder
	default:
		return ""
	}
}

func sqlState(err error) string {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pg.Code
	}
	return ""
}

func newOrderID() string { return "o-" + strings.ToLower(rand.Text()) }
