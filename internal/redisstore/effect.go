package redisstore

import (
	"context"
	"fmt"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// codeWrongData names a script's refusal of data that is not the contract's.
const codeWrongData = "WRONGDATA"

// Apply runs the effects, every chain in its order and all of them in one
// batch. Each effect is executed at most once; one that failed, or whose
// outcome is unknown, carries its error, and the others are not held up.
func (s *Store) Apply(ctx context.Context, chains [][]reservation.Effect) [][]reservation.Applied {
	batch := s.writer.Batch()
	collect := make([][]func() reservation.Applied, len(chains))
	for i, chain := range chains {
		for _, e := range chain {
			collect[i] = append(collect[i], enqueue(batch, e))
		}
	}
	if batch.Len() > 0 {
		bound, cancel := s.bound(ctx)
		_ = batch.Run(bound) // each result has its own error
		cancel()
	}
	applied := make([][]reservation.Applied, len(chains))
	for i := range chains {
		for _, get := range collect[i] {
			applied[i] = append(applied[i], get())
		}
	}
	return applied
}

// enqueue adds the effect's script call to the batch; the function returned
// reads its result once the batch has run.
func enqueue(b *lua.Batch, e reservation.Effect) func() reservation.Applied {
	switch e.Op {
	case reservation.OpTransition:
		r := b.Transition(e.Scope, lua.TransitionArgs{
			ReservationID: e.ID, Target: e.To, NextRetryMS: e.AtMS,
			MessageID: e.MessageID, OrderID: e.OrderID, ErrorCode: e.ErrorCode, Position: e.Position,
		})
		return result(e, r, func(reply lua.TransitionReply) (lua.TransitionCode, reservation.Status) {
			if reply.Code == lua.TransitionUpdated {
				return reply.Code, reply.Target
			}
			return reply.Code, reply.Current
		})
	case reservation.OpCompensate:
		r := b.Compensate(e.Scope, lua.CompensateArgs{ReservationID: e.ID, UserID: e.UserID, Reason: e.Reason})
		return result(e, r, func(reply lua.CompensateReply) (lua.CompensateCode, reservation.Status) {
			return reply.Code, reply.Status
		})
	case reservation.OpConfirm:
		r := b.Confirm(e.Scope, lua.ConfirmArgs{ReservationID: e.ID, OrderID: e.OrderID})
		return result(e, r, func(reply lua.ConfirmReply) (lua.ConfirmCode, reservation.Status) {
			return reply.Code, reply.Status
		})
	case reservation.OpReindex:
		r := b.Reindex(e.Scope, lua.ReindexArgs{ReservationID: e.ID})
		return result(e, r, func(reply lua.ReindexReply) (lua.ReindexCode, reservation.Status) {
			return reply.Code, reply.Status
		})
	case reservation.OpUnindex:
		r := b.Unindex(e.Scope, lua.UnindexArgs{ReservationID: e.ID})
		return result(e, r, func(reply lua.UnindexReply) (lua.UnindexCode, reservation.Status) {
			return reply.Code, reply.Status
		})
	case reservation.OpDefer:
		r := b.Defer(e.Scope, lua.DeferArgs{
			ReservationID: e.ID, Index: e.Index, Expected: reservation.Status(e.Expected), NextMS: e.AtMS,
		})
		return result(e, r, func(reply lua.DeferReply) (lua.DeferCode, reservation.Status) {
			return reply.Code, reply.Status
		})
	case reservation.OpRecordSend:
		r := b.RecordSend(e.Scope, lua.RecordSendArgs{
			ReservationID: e.ID, Expected: reservation.Status(e.Expected), Kind: lua.SendKind(e.Record), Position: e.Position,
		})
		return result(e, r, func(reply lua.RecordSendReply) (lua.RecordSendCode, reservation.Status) {
			return reply.Code, ""
		})
	default:
		return func() reservation.Applied {
			return reservation.Applied{Effect: e, Err: fmt.Errorf("effect %q is no script", e.Op)}
		}
	}
}

// code is a reply code of any script: 0 is "done now", 1 "done before" in each
// of them (spec §4).
type code interface {
	~int64
	fmt.Stringer
}

func result[T any, C code](e reservation.Effect, r *lua.Result[T], read func(T) (C, reservation.Status)) func() reservation.Applied {
	return func() reservation.Applied {
		reply, err := r.Get()
		applied := reservation.Applied{Effect: e}
		if err != nil {
			applied.Err = err
			if lua.Classify(err) == lua.ClassData {
				applied.Result, applied.Code = reservation.Refused, codeWrongData
			}
			return applied
		}
		c, status := read(reply)
		applied.Code, applied.Status = c.String(), status
		switch c {
		case 0:
			applied.Result = reservation.Changed
		case 1:
			applied.Result = reservation.Already
		default:
			applied.Result = reservation.Refused
		}
		return applied
	}
}
