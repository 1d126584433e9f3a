package lua

import "github.com/seckill/reconciler/reservation"

var restore = load("restore")

// RestoreCode is the code of a reply of restore.lua.
type RestoreCode int64

// The codes of restore.lua (spec §4).
const (
	RestoreWithUnit   RestoreCode = 0
	RestoreExists     RestoreCode = 1
	RestoreHashOnly   RestoreCode = 2
	RestoreDeficit    RestoreCode = 3
	RestoreNoSibling  RestoreCode = 4
	RestoreInvariant  RestoreCode = 5
	RestoreIDConflict RestoreCode = 6
	RestoreRefused    RestoreCode = 7
)

var restoreCodes = map[RestoreCode]string{
	RestoreWithUnit: "RESTORED_WITH_UNIT", RestoreExists: "EXISTS", RestoreHashOnly: "RESTORED_HASH_ONLY",
	RestoreDeficit: "DEFICIT", RestoreNoSibling: "NO_SIBLING", RestoreInvariant: "INVARIANT",
	RestoreIDConflict: "ID_CONFLICT", RestoreRefused: "REFUSED",
}

func (c RestoreCode) String() string { return codeText(restoreCodes, c) }

// RestoreMode says what PostgreSQL knows of the order.
type RestoreMode string

// The modes of restore.lua.
const (
	RestoreActive    RestoreMode = "active"    // the order counts
	RestoreCancelled RestoreMode = "cancelled" // hash only, and only with a sibling
	RestoreOperator  RestoreMode = "operator"  // approved: RELEASED → ORDER_CREATED, taking a unit
)

// RestoreArgs are the arguments of restore.lua beside the scope.
type RestoreArgs struct {
	ReservationID string
	RequestID     string
	UserID        string
	MessageID     string
	OrderID       string
	ReservedAtMS  int64
	ExpiresAtMS   int64
	SchemaVersion int64
	Mode          RestoreMode
	NowMS         int64
}

// RestoreReply is the reply of restore.lua.
type RestoreReply struct {
	Code           RestoreCode
	PreviousMarker string             // the user's marker before the call; "" for none
	Available      int64              // after the call, or [Missing]
	Status         reservation.Status // after the call; "" when there is none
}

// Restore rebuilds a reservation that PostgreSQL proves and Redis lost. The
// caller makes none for a reservation with an open order_after_release.
func (b *Batch) Restore(scope reservation.Scope, a RestoreArgs) *Result[RestoreReply] {
	keys := []string{
		scope.MetaKey(), scope.StockKey(), scope.RequestKey(a.RequestID), scope.UserKey(a.UserID),
		scope.ReservationKey(a.ReservationID), scope.IndexKey(reservation.SendPending),
		scope.IndexKey(reservation.ReservationExpiry), scope.SoldOutKey(),
	}
	argv := []any{
		a.ReservationID, a.RequestID, a.UserID, scope.ActivityID, scope.SKUID, decimal(scope.Version),
		decimal(scope.Bucket), a.MessageID, a.OrderID, decimal(a.ReservedAtMS), decimal(a.ExpiresAtMS),
		decimal(a.SchemaVersion), string(a.Mode), decimal(a.NowMS),
	}
	return enqueue(b, restore, scope, keys, argv, 4, func(v *values) RestoreReply {
		return RestoreReply{
			Code: code(v, restoreCodes), PreviousMarker: v.text(1), Available: v.number(2), Status: v.status(3),
		}
	})
}
