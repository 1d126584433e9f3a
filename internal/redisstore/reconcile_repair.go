package redisstore

import (
	"context"
	"time"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// What a restored reservation says that its order does not: the contract's
// schema, and the reservation's default time to live.
const (
	restoredSchema = 1
	restoredTTL    = 15 * time.Minute
)

// RestoreOrders rebuilds reservations from their orders, in one batch.
func (s *Store) RestoreOrders(ctx context.Context, requests []reconcile.RestoreRequest) []reconcile.RestoreReply {
	replies := make([]reconcile.RestoreReply, len(requests))
	if len(requests) == 0 {
		return replies
	}
	batch := s.writer.Batch()
	results := make([]*lua.Result[lua.RestoreReply], len(requests))
	for i, r := range requests {
		mode := lua.RestoreCancelled
		if r.Order.Active {
			mode = lua.RestoreActive
		}
		reserved := r.Order.CreatedAt
		if reserved.IsZero() { // the adopter's view has no such column
			reserved = time.Now()
		}
		results[i] = batch.Restore(r.Scope, lua.RestoreArgs{
			ReservationID: r.ID, RequestID: r.Order.RequestID, UserID: r.Order.UserID, OrderID: r.Order.OrderID,
			MessageID:    reservation.MessageID(r.ID),
			ReservedAtMS: reserved.UnixMilli(), ExpiresAtMS: reserved.Add(restoredTTL).UnixMilli(),
			SchemaVersion: restoredSchema, Mode: mode,
		})
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_ = batch.Run(bound) // each result has its own error
	for i, result := range results {
		reply, err := result.Get()
		if err != nil {
			replies[i].Err = err
			continue
		}
		replies[i] = reconcile.RestoreReply{
			Done:    reply.Code == lua.RestoreWithUnit || reply.Code == lua.RestoreHashOnly || reply.Code == lua.RestoreExists,
			Deficit: reply.Code == lua.RestoreDeficit, Code: reply.Code.String(), Available: reply.Available,
		}
	}
	return replies
}

// MarkUsers points users' markers at reservations, in one batch.
func (s *Store) MarkUsers(ctx context.Context, requests []reconcile.MarkRequest) []reconcile.MarkReply {
	replies := make([]reconcile.MarkReply, len(requests))
	if len(requests) == 0 {
		return replies
	}
	batch := s.writer.Batch()
	results := make([]*lua.Result[lua.MarkUserReply], len(requests))
	for i, r := range requests {
		results[i] = batch.MarkUser(r.Scope, lua.MarkUserArgs{ReservationID: r.ID, UserID: r.UserID, Seen: r.Seen})
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_ = batch.Run(bound) // each result has its own error
	for i, result := range results {
		reply, err := result.Get()
		if err != nil {
			replies[i].Err = err
			continue
		}
		replies[i] = reconcile.MarkReply{
			Done: reply.Code == lua.MarkUserMarked || reply.Code == lua.MarkUserAlreadyMarked, Code: reply.Code.String(),
		}
	}
	return replies
}
