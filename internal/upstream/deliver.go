package upstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/reservation"
)

// Delays say how much later than usual things happen under the faults that are
// about time. They count from the moment of the send.
type Delays struct {
	Mark   time.Duration // LateEnqueued: the note; default 10s
	Send   time.Duration // Delayed: the message; default 10s
	Replay time.Duration // Replayed: the message again; default 30s
}

// Later is work that a fault puts off.
type Later struct {
	After time.Duration
	Do    func(context.Context) error
}

// Deliver takes accepted reservations of one fault from the reservation to
// where the gateway is done with them: as the fault would have it, it sends or
// does not, notes or does not, and returns what is to happen later. A
// consumer's fault is no concern of the gateway's: it does its work.
//
// Its error tells that Redis could not be written; the reservations are then
// where a gateway's crash would have left them.
func (g *Gateway) Deliver(ctx context.Context, fault Fault, faults Faults, delays Delays, rs []reservation.Reservation) ([]Later, error) {
	if len(rs) == 0 {
		return nil, nil
	}
	switch fault {
	case CrashAfterReserve:
		return nil, nil
	case DeletedHash:
		return nil, g.deleteHashes(ctx, rs)
	case TimeoutStored:
		return nil, g.Mark(ctx, rs, timedOut(g.Send(ctx, rs)))
	case TimeoutLost:
		return nil, g.Mark(ctx, rs, timedOut(make([]rocketmq.SendResult, len(rs))))
	case LostAfterAck:
		return nil, g.Mark(ctx, rs, g.acknowledged(rs))
	case LateEnqueued:
		results := g.Send(ctx, rs)
		return []Later{{orDefault(delays.Mark, 10*time.Second), func(ctx context.Context) error {
			return g.Mark(ctx, rs, results)
		}}}, nil
	case Delayed:
		err := g.Mark(ctx, rs, timedOut(make([]rocketmq.SendResult, len(rs))))
		return []Later{g.sendLater(orDefault(delays.Send, 10*time.Second), rs, nil)}, err
	case Duplicate:
		return nil, g.duplicate(ctx, faults, rs)
	case Replayed:
		err := g.Mark(ctx, rs, g.Send(ctx, rs))
		return []Later{g.sendLater(orDefault(delays.Replay, 30*time.Second), rs, map[string]string{propertyReplay: "1"})}, err
	default:
		return nil, g.Mark(ctx, rs, g.Send(ctx, rs))
	}
}

// DeliverAll sorts the reservations by their faults and delivers each group.
func (g *Gateway) DeliverAll(ctx context.Context, faults Faults, delays Delays, rs []reservation.Reservation) ([]Later, error) {
	groups := map[Fault][]reservation.Reservation{}
	for _, r := range rs {
		fault := faults.Of(r.ID)
		groups[fault] = append(groups[fault], r)
	}
	var later []Later
	var errs []error
	for _, fault := range slices.Sorted(maps.Keys(groups)) {
		more, err := g.Deliver(ctx, fault, faults, delays, groups[fault])
		later = append(later, more...)
		errs = append(errs, err)
	}
	return later, errors.Join(errs...)
}

// timedOut is how a gateway sees sends whose answer it did not get.
func timedOut(results []rocketmq.SendResult) []rocketmq.SendResult {
	for i := range results {
		results[i].Outcome, results[i].Position, results[i].Cause = rocketmq.Unknown, "", rocketmq.CauseSendTimeout
	}
	return results
}

// acknowledged plays the broker's answer for messages that it has lost since:
// the position is real, and another message is there.
func (g *Gateway) acknowledged(rs []reservation.Reservation) []rocketmq.SendResult {
	results := make([]rocketmq.SendResult, len(rs))
	for i, r := range rs {
		results[i] = rocketmq.SendResult{MessageID: r.MessageID, Outcome: rocketmq.Stored}
		if position := g.position.Load(); position != nil {
			results[i].Position = *position
		}
	}
	return results
}

// sendLater sends behind the gateway's back: nothing is noted. What RocketMQ
// does not take is sent again until it does: these messages do turn up.
func (g *Gateway) sendLater(after time.Duration, rs []reservation.Reservation, properties map[string]string) Later {
	return Later{after, func(ctx context.Context) error {
		left := rs
		for {
			var unavailable []reservation.Reservation
			for i, result := range g.send(ctx, left, properties) {
				if result.Outcome == rocketmq.Unavailable {
					unavailable = append(unavailable, left[i])
				}
			}
			if left = unavailable; len(left) == 0 {
				return nil
			}
			select {
			case <-time.After(lateRetry):
			case <-ctx.Done():
				return fmt.Errorf("send %d late messages: %w", len(left), context.Cause(ctx))
			}
		}
	}}
}

// lateRetry is the pause before late messages are sent again.
const lateRetry = time.Second

func (g *Gateway) duplicate(ctx context.Context, faults Faults, rs []reservation.Reservation) error {
	results := g.Send(ctx, rs)
	var twice, thrice []reservation.Reservation
	for _, r := range rs {
		twice = append(twice, r)
		if faults.copies(r.ID) > 2 {
			thrice = append(thrice, r)
		}
	}
	// Whether the copies arrive is no matter: the first one counts.
	_, _ = g.Send(ctx, twice), g.Send(ctx, thrice)
	return g.Mark(ctx, rs, results)
}

func (g *Gateway) deleteHashes(ctx context.Context, rs []reservation.Reservation) error {
	ctx, cancel := context.WithTimeout(ctx, g.timeout())
	defer cancel()
	pipe := g.Redis.Pipeline()
	for _, r := range rs {
		pipe.Del(ctx, r.Scope().ReservationKey(r.ID))
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("delete the hashes of %d reservations: %w", len(rs), err)
	}
	return nil
}
