package upstream

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Sender sends order messages; *[rocketmq.Sender] is one.
type Sender interface {
	Send(ctx context.Context, messages []rocketmq.Outgoing) []rocketmq.SendResult
}

// Gateway takes requests, reserves and sends: a [client.Gateway] that works on
// pages, with a producer and faults. It is safe for concurrent use.
type Gateway struct {
	Activity Activity
	Secret   []byte        // of the reservation ids; pinned per activity version
	TTL      time.Duration // of a reservation
	Timeout  time.Duration // of one round trip to Redis; default 2s
	// RetryAfter is when the daemon is to look at a send of unknown outcome,
	// counted from the reservation; default 1s.
	RetryAfter time.Duration

	Redis  redis.UniversalClient // with [client.RedisOptions]
	Sender Sender

	position atomic.Pointer[string] // of the last acknowledged send, for LostAfterAck

	once sync.Once
	own  *client.Gateway
	err  error // why there is none
}

// client is the gateway proper. It believes no local sold-out marker: every
// click here is a run of reserve.lua, so that what happens depends on no clock.
func (g *Gateway) client() (*client.Gateway, error) {
	g.once.Do(func() {
		var catalog *client.Catalog
		catalog, g.err = client.NewCatalog(client.Sale{
			ActivityID: g.Activity.ActivityID, SKUID: g.Activity.SKUID, Version: g.Activity.Version,
			Buckets: g.Activity.Buckets, Secret: g.Secret,
		})
		if g.err != nil {
			return
		}
		g.own, g.err = client.NewGateway(g.Redis, catalog, client.Options{
			ReservationTTL: g.TTL, Budget: g.timeout(), Timeout: g.timeout(), RetryAfter: g.RetryAfter, SoldOutTTL: -1,
		})
	})
	return g.own, g.err
}

// Request is one click of one user. The same click repeated has the same id.
type Request struct {
	UserID    string
	RequestID string
}

// Answer is what the gateway knows after a request. It says "queued", never
// "ordered".
type Answer struct {
	Request Request
	Scope   reservation.Scope
	Reply   lua.ReserveReply
	// Reservation is what there is to send, when Accepted.
	Reservation reservation.Reservation
	Err         error // [*client.BusyError] or [*client.RefusedError]
}

// Accepted says whether the user has a reservation whose message is to be sent.
func (a Answer) Accepted() bool {
	return a.Err == nil && a.Reply.Code == lua.ReserveAccepted && a.Reservation.ID != ""
}

// Reserve makes the requests, one answer for each in their order.
func (g *Gateway) Reserve(ctx context.Context, requests []Request) []Answer {
	answers := make([]Answer, len(requests))
	own, err := g.client()
	if err != nil {
		for i, r := range requests {
			answers[i] = Answer{Request: r, Err: err}
		}
		return answers
	}
	page := make([]client.Request, len(requests))
	for i, r := range requests {
		page[i] = client.Request{
			ActivityID: g.Activity.ActivityID, SKUID: g.Activity.SKUID, UserID: r.UserID, RequestID: r.RequestID,
		}
	}
	for i, a := range own.ReserveAll(ctx, page) {
		answers[i] = Answer{Request: requests[i], Scope: a.Scope, Reply: a.ReserveReply, Reservation: a.Reservation, Err: a.Err}
	}
	return answers
}

// propertyReplay marks a message of a [Replayed] reservation that is there for
// the second time, so that the consumer does not drop it again.
const propertyReplay = "replay"

// Send sends the order messages (interface §3), one result for each.
func (g *Gateway) Send(ctx context.Context, reservations []reservation.Reservation) []rocketmq.SendResult {
	return g.send(ctx, reservations, nil)
}

func (g *Gateway) send(ctx context.Context, reservations []reservation.Reservation, properties map[string]string) []rocketmq.SendResult {
	if len(reservations) == 0 {
		return nil
	}
	messages := make([]rocketmq.Outgoing, 0, len(reservations))
	results := make([]rocketmq.SendResult, len(reservations))
	var sent []int
	for i, r := range reservations {
		body, err := reservation.NewOrderMessage(r).Marshal()
		if err != nil {
			results[i] = rocketmq.SendResult{MessageID: r.MessageID, Outcome: rocketmq.Refused, Err: err}
			continue
		}
		messages = append(messages, rocketmq.Outgoing{MessageID: r.MessageID, Body: body, Properties: properties})
		sent = append(sent, i)
	}
	for k, result := range g.Sender.Send(ctx, messages) {
		results[sent[k]] = result
		if result.Outcome == rocketmq.Stored && result.Position != "" {
			g.position.Store(&result.Position)
		}
	}
	return results
}

// Mark notes in Redis what became of the sends.
func (g *Gateway) Mark(ctx context.Context, reservations []reservation.Reservation, results []rocketmq.SendResult) error {
	own, err := g.client()
	if err != nil {
		return err
	}
	sent := make([]client.Sent, len(reservations))
	for i, r := range reservations {
		sent[i] = client.Sent{Reservation: r, Outcome: results[i].Outcome, Position: results[i].Position, Cause: results[i].Cause}
	}
	return own.Mark(ctx, sent)
}

func (g *Gateway) timeout() time.Duration { return orDefault(g.Timeout, 2*time.Second) }

func orDefault[T comparable](value, fallback T) T {
	var zero T
	if value == zero {
		return fallback
	}
	return value
}
