package client

import (
	"context"
	"errors"
	"fmt"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Sent is what became of the send of a reservation's message.
type Sent struct {
	Reservation reservation.Reservation
	Outcome     reservation.SendOutcome
	Position    string // mq_position of an acknowledged send: broker,queueId,queueOffset,offsetMsgId; "" if not known
	Cause       string // of an unknown outcome, a stable name
}

// MarkEnqueued notes that the broker acknowledged the message (SendOK, and no
// other status). position may be empty.
func (g *Gateway) MarkEnqueued(ctx context.Context, r reservation.Reservation, position string) error {
	return g.Mark(ctx, []Sent{{Reservation: r, Outcome: reservation.SendStored, Position: position}})
}

// MarkSendUnknown notes that nobody knows whether the broker has the message: a
// time-out, a lost connection, a status other than SendOK. The daemon sends it
// again; the gateway need not.
func (g *Gateway) MarkSendUnknown(ctx context.Context, r reservation.Reservation, cause string) error {
	return g.Mark(ctx, []Sent{{Reservation: r, Outcome: reservation.SendUnknown, Cause: cause}})
}

// Mark notes what became of a page of sends. What was certainly not stored stays
// RESERVED and in send_pending, where the daemon finds it. A note that comes
// late and meets a reservation further on, or none, is benign (spec §3).
//
// An error is no reason to send again or to take anything back: the daemon
// finds out by itself.
func (g *Gateway) Mark(ctx context.Context, sent []Sent) error {
	ctx, cancel := g.bound(ctx)
	defer cancel()
	batch := g.scripts.Batch()
	var marks []mark
	for _, s := range sent {
		args := lua.TransitionArgs{ReservationID: s.Reservation.ID, MessageID: s.Reservation.MessageID}
		switch s.Outcome {
		case reservation.SendStored:
			args.Target, args.Position = reservation.StatusEnqueued, s.Position
		case reservation.SendUnknown:
			args.Target, args.ErrorCode = reservation.StatusSendUnknown, s.Cause
			args.NextRetryMS = s.Reservation.ReservedAtMS + g.o.RetryAfter.Milliseconds()
		default:
			continue
		}
		marks = append(marks, addMark(batch, s.Reservation.Scope(), args))
	}
	return runMarks(ctx, batch, marks)
}

// mark is one transition on its way.
type mark struct {
	args   lua.TransitionArgs
	result *lua.Result[lua.TransitionReply]
}

func addMark(b *lua.Batch, scope reservation.Scope, args lua.TransitionArgs) mark {
	return mark{args, b.Transition(scope, args)}
}

// runMarks runs the batch. ILLEGAL_TRANSITION and NOT_FOUND are benign: others
// have decided, or Redis has lost it (protocol §1).
func runMarks(ctx context.Context, b *lua.Batch, marks []mark) error {
	if len(marks) == 0 {
		return nil
	}
	_ = b.Run(ctx) // each call has its own error
	var errs []error
	for _, m := range marks {
		reply, err := m.result.Get()
		if err == nil && reply.Code == lua.TransitionIDConflict {
			err = errors.New("it has another message or order already")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("mark reservation %s as %s: %w", m.args.ReservationID, m.args.Target, err))
		}
	}
	return errors.Join(errs...)
}

// Position is the mq_position of a message that the broker acknowledged, as
// RocketMQ's producers reply it. With it the daemon finds the message without a
// search.
func Position(broker string, queueID int, queueOffset int64, offsetMessageID string) string {
	return fmt.Sprintf("%s,%d,%d,%s", broker, queueID, queueOffset, offsetMessageID)
}
