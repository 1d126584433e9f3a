package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/pgstore/claims"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Message is the body of an order message (interface §3).
type Message = reservation.OrderMessage

// ParseMessage reads a body. What is no order message is never acknowledged: it
// becomes a dead letter, which a person sees.
func ParseMessage(body []byte) (Message, error) { return reservation.ParseOrderMessage(body) }

// Querier runs one statement; pgx transactions, connections and pools do.
type Querier = claims.Querier

// ConsumerOptions are a consumer's settings. The zero value will do.
type ConsumerOptions struct {
	Timeout time.Duration // of one mark in Redis; 0: 2 s
}

// Consumer is the order side of the contract. It is safe for concurrent use and
// needs no closing.
type Consumer struct {
	scripts *lua.Runner
	timeout time.Duration
}

// NewConsumer makes a consumer on a client with [RedisOptions]; another is
// refused with [lua.ErrUnsafeClient]. Redis need not answer yet.
func NewConsumer(rdb redis.UniversalClient, o ConsumerOptions) (*Consumer, error) {
	scripts, err := lua.NewRunner(rdb, lua.WithInFlight(maxInFlight))
	if err != nil {
		return nil, fmt.Errorf("order consumer: %w", err)
	}
	if o.Timeout == 0 {
		o.Timeout = 2 * time.Second
	}
	return &Consumer{scripts: scripts, timeout: o.Timeout}, nil
}

// Claim is the claim in force after [Consumer.Claim]: won, ordered or excluded.
type Claim struct {
	Outcome reservation.Outcome
	// OrderID is the order's, when Outcome is ORDER.
	OrderID string
	// Won: this transaction holds the claim. Create the order under the order id
	// that was given, deduct the stock, commit.
	Won bool
}

// Ordered says that the order is there already, as after a second delivery.
// Create and deduct nothing; mark ORDER_CREATED with OrderID and acknowledge.
func (c Claim) Ordered() bool { return c.Outcome == reservation.OutcomeOrder && !c.Won }

// Excluded says that the reservation was fenced by the daemon or rejected: no
// order may be created for it any more. Mark REJECTED and acknowledge.
func (c Claim) Excluded() bool { return c.Outcome != reservation.OutcomeOrder }

// Claim claims the message's reservation for an order in the caller's
// transaction, before the stock is deducted. Until that transaction ends, another
// delivery of the message waits here, and the daemon does not release.
//
// Without the order row in the same transaction the claim would name an order
// that does not exist: roll back unless the order was created.
func (c *Consumer) Claim(ctx context.Context, tx Querier, m Message, orderID string) (Claim, error) {
	claim, err := claims.Claim(ctx, tx, m, orderID)
	return Claim(claim), ClaimError(err)
}

// Reject claims that no order will ever be created for the message's
// reservation: no stock in PostgreSQL, a second order of the user, a refusal of
// the business. Call it after the rollback of what was tried, and commit, before
// [Consumer.MarkRejected]. The outcome in force may be another one: an order
// stands, whatever the reason was.
func (c *Consumer) Reject(ctx context.Context, tx Querier, m Message, reason string) (reservation.Outcome, error) {
	outcome, err := claims.Reject(ctx, tx, m, reason)
	return outcome, ClaimError(err)
}

// MarkOrderCreated shows the order in Redis, after the commit. A reservation that
// is gone or on another path is benign: PostgreSQL has decided, the daemon follows.
func (c *Consumer) MarkOrderCreated(ctx context.Context, m Message, orderID string) error {
	return c.mark(ctx, m, lua.TransitionArgs{Target: reservation.StatusOrderCreated, OrderID: orderID})
}

// MarkRejected shows in Redis that there will be no order; cause is kept as its
// error_code. The daemon gives the unit back.
func (c *Consumer) MarkRejected(ctx context.Context, m Message, cause string) error {
	return c.mark(ctx, m, lua.TransitionArgs{Target: reservation.StatusRejected, ErrorCode: cause})
}

func (c *Consumer) mark(ctx context.Context, m Message, args lua.TransitionArgs) error {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	args.ReservationID, args.MessageID = m.ReservationID, m.MessageID
	batch := c.scripts.Batch()
	return runMarks(ctx, batch, []mark{addMark(batch, m.Scope(), args)})
}

// What the order tables' trigger and the claim functions refuse (interface §4).
var (
	// ErrExcluded (SK001): the reservation is fenced or rejected. Roll back,
	// create nothing, mark REJECTED, acknowledge. In a batch of orders, try the
	// rows one by one.
	ErrExcluded = errors.New("the reservation is fenced or rejected: no order may be created")
	// ErrOtherOrder (SK002): the claim names another order. Roll back; Claim says
	// which.
	ErrOtherOrder = errors.New("the reservation is claimed by another order")
	// ErrReservationFixed (SK003): an order's reservation_id may not change.
	ErrReservationFixed = errors.New("the reservation_id of an order may not change")
)

// ClaimError adds to an error of PostgreSQL which of [ErrExcluded],
// [ErrOtherOrder] and [ErrReservationFixed] it is; any other is returned as it
// is. Use it on the error of your own INSERT.
func ClaimError(err error) error {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return err
	}
	switch refused.Code {
	case "SK001":
		return fmt.Errorf("%w: %w", ErrExcluded, err)
	case "SK002":
		return fmt.Errorf("%w: %w", ErrOtherOrder, err)
	case "SK003":
		return fmt.Errorf("%w: %w", ErrReservationFixed, err)
	default:
		return err
	}
}
