package upstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
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
	DB      *pgxpool.Pool                    // as login shop_consumer
	Redis   redis.UniversalClient            // with [client.RedisOptions]
	FaultOf func(reservationID string) Fault // nil: none
	Timeout time.Duration                    // of one delivery; default 10s

	once sync.Once
	own  *client.Consumer
	err  error // why there is none

	mu     sync.Mutex
	events map[Event]int
}

// client is the consumer's side of the contract.
func (c *Consumer) client() (*client.Consumer, error) {
	c.once.Do(func() {
		c.own, c.err = client.NewConsumer(c.Redis, client.ConsumerOptions{Timeout: c.timeout()})
	})
	return c.own, c.err
}

func (c *Consumer) timeout() time.Duration { return orDefault(c.Timeout, 10*time.Second) }

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
	ctx, cancel := context.WithTimeout(ctx, c.timeout())
	defer cancel()
	defer func() {
		// The client library would swallow it, and the queue would stand still.
		if p := recover(); p != nil {
			event, acknowledge, err = EventFailed, false, fmt.Errorf("consumer panicked: %v\n%s", p, debug.Stack())
		}
		c.count(event)
	}()
	m, err := client.ParseMessage(d.Body)
	if err != nil {
		return EventMalformed, false, err
	}
	fault := None
	if c.FaultOf != nil {
		fault = c.FaultOf(m.ReservationID)
	}
	return c.handle(ctx, m, fault, d)
}

func (c *Consumer) handle(ctx context.Context, m client.Message, fault Fault, d Delivery) (Event, bool, error) {
	own, err := c.client()
	if err != nil {
		return EventFailed, false, err
	}
	shop := tables{c.DB, own}
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
			return c.settle(ctx, own, m, orderRejected, "")
		}
		result, orderID, err := shop.reject(ctx, m, reasonBusiness)
		if err != nil {
			return EventFailed, false, err
		}
		return c.settle(ctx, own, m, result, orderID)
	default:
	}
	return c.order(ctx, shop, m, fault, d)
}

// order creates the order and shows it in Redis, unless the consumer dies.
func (c *Consumer) order(ctx context.Context, shop tables, m client.Message, fault Fault, d Delivery) (Event, bool, error) {
	create := shop.createClaiming
	if c.Kind == Unmodified {
		create = shop.createUnmodified
	}
	result, orderID, err := create(ctx, m, fault == CrashBeforeCommit && d.Attempt == 0)
	switch {
	case errors.Is(err, client.ErrExcluded):
		// To an unmodified consumer an error like any other: it tries again.
		return EventFenced, false, err
	case err != nil:
		return EventFailed, false, err
	case fault == CrashAfterCommit && result == orderCreated:
		return EventCrashed, false, nil
	case fault == CrashAfterCommit && result == orderExists:
		return EventDuplicate, true, nil
	}
	return c.settle(ctx, shop.client, m, result, orderID)
}

// settle shows the result in Redis and acknowledges.
func (c *Consumer) settle(ctx context.Context, own *client.Consumer, m client.Message, result orderResult, orderID string) (Event, bool, error) {
	var event Event
	var err error
	switch result {
	case orderAborted:
		return EventCrashed, false, nil
	case orderCreated:
		event, err = EventOrdered, own.MarkOrderCreated(ctx, m, orderID)
	case orderExists:
		event, err = EventDuplicate, own.MarkOrderCreated(ctx, m, orderID)
	case orderFenced:
		event, err = EventFenced, own.MarkRejected(ctx, m, "fenced")
	case orderRejected:
		event, err = EventRejected, own.MarkRejected(ctx, m, "rejected")
	}
	return event, err == nil, err
}
