package daemon

import (
	"context"
	"log/slog"
	"time"

	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/reservation"
)

// effects are the scripts' effects with a line in the log for each that moves
// stock or is final against what Redis said before: one line per change. What
// only walks the ordinary path is counted, and told at level debug.
type effects struct {
	*redisstore.Store
	log   *slog.Logger
	users observe.UserHasher
}

// Apply is part of [pass.Effects].
func (e effects) Apply(ctx context.Context, chains [][]reservation.Effect) [][]reservation.Applied {
	began := time.Now()
	applied := e.Store.Apply(ctx, chains)
	took := time.Since(began)
	for _, chain := range applied {
		for _, one := range chain {
			e.tell(ctx, one, took)
		}
	}
	return applied
}

// tell logs one effect that changed something. took is the time of the whole
// batch that it was part of.
func (e effects) tell(ctx context.Context, a reservation.Applied, took time.Duration) {
	var message string
	level := slog.LevelDebug
	switch {
	case a.Result == reservation.Refused && a.Code == "INVARIANT_VIOLATION":
		level, message = slog.LevelError, "stock does not add up: the unit was not given back"
	case a.Result != reservation.Changed:
		return
	case a.Effect.Op == reservation.OpCompensate:
		level, message = slog.LevelInfo, "unit given back"
	case a.Effect.Op == reservation.OpConfirm:
		level, message = slog.LevelInfo, "order confirmed against a planned release"
	case a.Effect.Op == reservation.OpTransition:
		message = "reservation advanced"
	default:
		return
	}
	if !e.log.Enabled(ctx, level) {
		return
	}
	attrs := []slog.Attr{
		slog.String(observe.FieldReservationID, a.Effect.ID), slog.String(observe.FieldMessageID, reservation.MessageID(a.Effect.ID)),
		observe.Scope(a.Effect.Scope), slog.Int(observe.FieldRedisSlot, observe.Slot(a.Effect.Scope)),
		slog.String(observe.FieldRedisNode, e.NodeOf(ctx, a.Effect.Scope)),
		slog.String(observe.FieldLuaCode, a.Code), slog.String(observe.FieldReservationStatus, string(a.Status)),
		slog.Float64(observe.FieldLatencyMS, float64(took.Microseconds())/1000),
	}
	if a.Effect.UserID != "" {
		attrs = append(attrs, e.users.User(a.Effect.UserID))
	}
	if a.Effect.Reason != "" {
		attrs = append(attrs, slog.String("reason", a.Effect.Reason))
	}
	if id := observe.TraceID(ctx); id != "" {
		attrs = append(attrs, slog.String(observe.FieldTraceID, id))
	}
	e.log.LogAttrs(ctx, level, message, attrs...)
}
