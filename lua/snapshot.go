package lua

import "github.com/seckill/reconciler/reservation"

var snapshot = loadReadOnly("snapshot")

// SnapshotReply is the reply of snapshot.lua: a scope's numbers at one instant.
// A number that is not there is [Missing].
type SnapshotReply struct {
	TimeMS           int64 // the instant, on the clock of the scope's node
	State            State // "" when meta is gone
	RetentionUntilMS int64

	Initial       int64
	Available     int64
	Reserved      int64
	ReleasedTotal int64 // Missing until the first release, in a scope made elsewhere

	Pending         int64 // members of send_pending
	PendingOldestMS int64 // the lowest score, Missing when there is none
	Expiry          int64 // members of reservation_expiry
	ExpiryOldestMS  int64
}

// Snapshot reads a scope's numbers at one instant. It never writes.
func (b *Batch) Snapshot(scope reservation.Scope) *Result[SnapshotReply] {
	keys := []string{
		scope.MetaKey(), scope.StockKey(),
		scope.IndexKey(reservation.SendPending), scope.IndexKey(reservation.ReservationExpiry),
	}
	return enqueue(b, snapshot, scope, keys, nil, 11, func(v *values) SnapshotReply {
		return SnapshotReply{
			TimeMS: v.integer(0), State: State(v.text(1)), RetentionUntilMS: v.number(2),
			Initial: v.number(3), Available: v.number(4), Reserved: v.number(5), ReleasedTotal: v.number(6),
			Pending: v.integer(7), PendingOldestMS: v.number(8), Expiry: v.integer(9), ExpiryOldestMS: v.number(10),
		}
	})
}
