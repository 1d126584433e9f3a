package upstream

import (
	"context"
	"fmt"
	"maps"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Kind is how much a consumer knows of the daemon.
type Kind string

// The kinds of consumers.
const (
	// Claiming calls claim_reservation and reject_reservation (protocol §1).
	Claiming Kind = "claiming"
	// Unmodified knows nothing of claims: the trigger on shop.orders alone
	// protects it. SK001 is to it an error like any other, so it tries again
	// until the message is a dead letter.
	Unmodified Kind = "unmodified"
)

// Event is what a consumer made of one delivery.
type Event string

// The events of deliveries.
const (
	EventOrdered   Event = "ordered"   // an order was created
	EventDuplicate Event = "duplicate" // the order was there
	EventRejected  Event = "rejected"  // refused for good
	EventFenced    Event = "fenced"    // the claim forbade it: nothing was created
	EventDropped   Event = "dropped"   // acknowledged without doing anything
	EventCrashed   Event = "crashed"   // died half way: delivered again
	EventFailed    Event = "failed"    // an error: delivered again
	EventMalformed Event = "malformed" // no order message: delivered again, then a dead letter
)

// Delivery is one message as it reached the consumer.
type Delivery struct {
	Body     []byte
	Attempt  int32 // earlier deliveries of this copy
	Replayed bool
}

// Consumer creates orders from order messages.
type Consumer struct {
	Kind    Kind
	DB      *pgxpool.Pool // as login shop_consumer
	Scripts *lua.Runner
	FaultOf func(reservationID string) Fault // nil: none
	Timeout time.Duration                    // of one delivery; default 10s

	mu     sync.Mutex
	events map[Event]int
}

// Events counts what became of the deliveries so far.
func (c *Consumer) Events() map[Event]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.events)
}

func (c *Consumer) count(e Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.events == nil {
		c.events = map[Event]int{}
	}
	c.events[e]++
}

// Consume handles one delivery, under the fault of its reservation. acknowledge
// says whether the message is done with; otherwise it is to be delivered again.
// The error tells why it failed.
func (c *Consumer) Consume(ctx context.Context, d Delivery) (event Event, acknowledge bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, orDefault(c.Timeout, 10*time.Second))
	defer cancel()
	defer func() {
		// The client library would swallow it, and the queue would stand still.
		if p := recover(); p != nil {
			event, acknowledge, err = EventFailed, false, fmt.Errorf("consumer panicked: %v\n%s", p, debug.Stack())
		}
		c.count(event)
	}()
	m, err := reservation.ParseOrderMessage(d.Body)
	if err != nil {
		return EventMalformed, false, err
	}
	fault := None
	if c.FaultOf != nil {
		fault = c.FaultOf(m.ReservationID)
	}
	return c.handle(ctx, m, fault, d)
}

func (c *Consumer) handle(ctx context.Context, m reservation.OrderMessage, fault Fault, d Delivery) (Event, bool, error) {
	shop := tables{c.DB}
	switch fault {
	case DeadLetter:
		return EventFailed, false, fmt.Errorf("reservation %s: this message always fails", m.ReservationID)
	case Dropped:
		return EventDropped, true, nil
	case Replayed:
		if !d.Replayed {
			return EventDropped, true, nil
		}
	case RejectClaimed, RejectUnclaimed:
		if fault == RejectUnclaimed || c.Kind == Unmodified {
			return c.settle(ctx, m, orderRejected, "")
		}
		result, orderID, err := shop.reject(ctx, m, reasonBusiness)
		if err != nil {
			return EventFailed, false, err
		}
		return c.settle(ctx, m, result, orderID)
	default:
	}
	return c.order(ctx, m, fault, d)
}

// order creates the order and shows it in Redis, unless the consumer dies.
func (c *Consumer) order(ctx context.Context, m reservation.OrderMessage, fault Fault, d Delivery) (Event, bool, error) {
	create := tables{c.DB}.createClaiming
	if c.Kind == Unmodified {
		create = tables{c.DB}.createUnmodified
	}
	result, orderID, err := create(ctx, m, fault == CrashBeforeCommit && d.Attempt == 0)
	switch {
	case sqlState(err) == fencedState:
		// To an unmodified consumer an error like any other: it tries again.
		return EventFenced, false, err
	case err != nil:
		return EventFailed, false, err
	case fault == CrashAfterCommit && result == orderCreated:
		return EventCrashed, false, nil
	case fault == CrashAfterCommit && result == orderExists:
		return EventDuplicate, true, nil
	}
	return c.settle(ctx, m, result, orderID)
}

// settle shows the result in Redis and acknowledges.
func (c *Consumer) settle(ctx context.Context, m reservation.OrderMessage, result orderResult, orderID string) (Event, bool, error) {
	event := EventRejected
	args := lua.TransitionArgs{ReservationID: m.ReservationID, Target: reservation.StatusRejected, MessageID: m.MessageID}
	switch result {
	case orderAborted:
		return EventCrashed, false, nil
	case orderCreated, orderExists:
		event = EventOrdered
		if result == orderExists {
			event = EventDuplicate
		}
		args.Target, args.OrderID = reservation.StatusOrderCreated, orderID
	case orderFenced:
		event, args.ErrorCode = EventFenced, "fenced"
	case orderRejected:
		args.ErrorCode = "rejected"
	}
	if err := c.advance(ctx, m, args); err != nil {
		return event, false, err
	}
	return event, true, nil
}

// advance moves the reservation on. One that is gone, or on another path, is
// none of the consumer's business (protocol §1): PostgreSQL has decided.
func (c *Consumer) advance(ctx context.Context, m reservation.OrderMessage, args lua.TransitionArgs) error {
	scope := reservation.Scope{ActivityID: m.ActivityID, SKUID: m.SKUID, Version: m.ActivityVersion, Bucket: m.BucketID}
	batch := c.Scripts.Batch()
	result := batch.Transition(scope, args)
	if err := batch.Run(ctx); err != nil {
		return fmt.Errorf("show reservation %s as %s: %w", m.ReservationID, args.Target, err)
	}
	if _, err := result.Get(); err != nil {
		return fmt.Errorf("show reservation %s as %s: %w", m.ReservationID, args.Target, err)
	}
	return nil
}
