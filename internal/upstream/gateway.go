package upstream

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Sender sends order messages; *[rocketmq.Sender] is one.
type Sender interface {
	Send(ctx context.Context, messages []rocketmq.Outgoing) []rocketmq.SendResult
}

// Gateway takes requests, reserves and sends. It works on pages: one round trip
// for many requests. It is safe for concurrent use.
type Gateway struct {
	Activity Activity
	Secret   []byte        // of the reservation ids; pinned per activity version
	TTL      time.Duration // of a reservation
	Timeout  time.Duration // of one round trip to Redis; default 2s
	// RetryAfter is when the daemon is to look at a send of unknown outcome,
	// counted from the reservation; default 1s.
	RetryAfter time.Duration

	Redis   redis.UniversalClient // for reads
	Scripts *lua.Runner
	Sender  Sender

	position atomic.Pointer[string] // of the last acknowledged send, for LostAfterAck
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
	// Err: [*UnknownOutcomeError], or a failure that took no unit for certain.
	Err error
}

// Accepted says whether the user has a reservation whose message is to be sent.
func (a Answer) Accepted() bool { return a.Err == nil && a.Reply.Code == lua.ReserveAccepted }

// UnknownOutcomeError says that reserve.lua may have taken a unit, but that two
// attempts with the same ids brought no answer. The gateway then fails closed:
// it tells the user to ask again with the same request, sends nothing and takes
// nothing back (spec §5). If there is a reservation, the daemon finds it.
type UnknownOutcomeError struct {
	Scope         reservation.Scope
	ReservationID string
	Err           error
}

func (e *UnknownOutcomeError) Error() string {
	return fmt.Sprintf("whether reservation %s of %s was made is unknown: %v", e.ReservationID, e.Scope, e.Err)
}

// Unwrap is the failure of the attempt that may have run.
func (e *UnknownOutcomeError) Unwrap() error { return e.Err }

const reserveAttempts = 2 // the first, and one with the same ids

// Reserve runs reserve.lua for the requests, one answer for each in their
// order. What got no answer is asked once more, with the same ids.
func (g *Gateway) Reserve(ctx context.Context, requests []Request) []Answer {
	answers := make([]Answer, len(requests))
	open := make([]int, len(requests))
	for i, request := range requests {
		answers[i] = Answer{Request: request, Scope: g.Activity.ScopeOf(request.UserID)}
		open[i] = i
	}
	unknown := make([]error, len(requests)) // an attempt that may have run, whatever the next one says
	for range reserveAttempts {
		if len(open) == 0 {
			break
		}
		open = g.reserveOnce(ctx, answers, open, unknown)
	}
	for i := range answers {
		if a := &answers[i]; a.Err != nil && unknown[i] != nil {
			a.Err = &UnknownOutcomeError{Scope: a.Scope, ReservationID: g.id(a.Request), Err: unknown[i]}
		}
	}
	g.complete(ctx, answers)
	return answers
}

func (g *Gateway) id(r Request) string {
	return reservation.NewID(g.Secret, g.Activity.ActivityID, g.Activity.SKUID, r.UserID, r.RequestID)
}

// reserveOnce asks for the open answers and returns those still open.
func (g *Gateway) reserveOnce(ctx context.Context, answers []Answer, open []int, unknown []error) []int {
	ctx, cancel := context.WithTimeout(ctx, g.timeout())
	defer cancel()
	batch := g.Scripts.Batch()
	results := make([]*lua.Result[lua.ReserveReply], len(open))
	for k, i := range open {
		id := g.id(answers[i].Request)
		results[k] = batch.Reserve(answers[i].Scope, lua.ReserveArgs{
			RequestID: answers[i].Request.RequestID, ReservationID: id, UserID: answers[i].Request.UserID,
			MessageID: reservation.MessageID(id), TTLMS: g.TTL.Milliseconds(), SchemaVersion: schemaVersion,
		})
	}
	_ = batch.Run(ctx) // each call has its own error
	var again []int
	for k, i := range open {
		reply, err := results[k].Get()
		answers[i].Reply, answers[i].Err = reply, err
		switch lua.Classify(err) {
		case lua.ClassUnknown:
			unknown[i] = err
			again = append(again, i)
		case lua.ClassNotExecuted:
			again = append(again, i)
		default:
		}
	}
	return again
}

// complete fills in the accepted reservations. When they were made is read
// back: it is part of the message, and only Redis knows it.
func (g *Gateway) complete(ctx context.Context, answers []Answer) {
	ctx, cancel := context.WithTimeout(ctx, g.timeout())
	defer cancel()
	pipe := g.Redis.Pipeline()
	reads := map[int]*redis.StringCmd{}
	for i, a := range answers {
		if a.Accepted() {
			reads[i] = pipe.HGet(ctx, a.Scope.ReservationKey(a.Reply.ReservationID), "reserved_at_ms")
		}
	}
	if len(reads) == 0 {
		return
	}
	_, _ = pipe.Exec(ctx) // each command has its own error
	for i, read := range reads {
		a := &answers[i]
		at, err := read.Int64()
		if err != nil {
			a.Err = fmt.Errorf("read reservation %s of %s: %w", a.Reply.ReservationID, a.Scope, err)
			continue
		}
		a.Reservation = reservation.Reservation{
			ID: a.Reply.ReservationID, RequestID: a.Request.RequestID, MessageID: reservation.MessageID(a.Reply.ReservationID),
			ActivityID: a.Scope.ActivityID, SKUID: a.Scope.SKUID, UserID: a.Request.UserID,
			Version: a.Scope.Version, Bucket: a.Scope.Bucket, Status: reservation.StatusReserved,
			ReservedAtMS: at, ExpiresAtMS: at + g.TTL.Milliseconds(), SchemaVersion: schemaVersion,
		}
	}
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

// Mark notes in Redis what became of the sends: stored is ENQUEUED with its
// position, unknown is SEND_UNKNOWN. What was certainly not stored stays
// RESERVED and in send_pending, where the daemon finds it. A note that meets a
// reservation further on is benign (spec §3) and no error.
func (g *Gateway) Mark(ctx context.Context, reservations []reservation.Reservation, results []rocketmq.SendResult) error {
	ctx, cancel := context.WithTimeout(ctx, g.timeout())
	defer cancel()
	batch := g.Scripts.Batch()
	var replies []*lua.Result[lua.TransitionReply]
	for i, r := range reservations {
		args := lua.TransitionArgs{ReservationID: r.ID, MessageID: r.MessageID}
		switch results[i].Outcome {
		case rocketmq.Stored:
			args.Target, args.Position = reservation.StatusEnqueued, results[i].Position
		case rocketmq.Unknown:
			args.Target, args.ErrorCode = reservation.StatusSendUnknown, results[i].Cause
			args.NextRetryMS = r.ReservedAtMS + orDefault(g.RetryAfter, time.Second).Milliseconds()
		default:
			continue
		}
		replies = append(replies, batch.Transition(scopeOf(r), args))
	}
	if batch.Len() == 0 {
		return nil
	}
	if err := batch.Run(ctx); err != nil {
		return fmt.Errorf("note what became of %d sends: %w", batch.Len(), err)
	}
	var errs []error
	for _, reply := range replies {
		_, err := reply.Get()
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (g *Gateway) timeout() time.Duration { return orDefault(g.Timeout, 2*time.Second) }

func scopeOf(r reservation.Reservation) reservation.Scope {
	return reservation.Scope{ActivityID: r.ActivityID, SKUID: r.SKUID, Version: r.Version, Bucket: r.Bucket}
}

func orDefault[T comparable](value, fallback T) T {
	var zero T
	if value == zero {
		return fallback
	}
	return value
}
