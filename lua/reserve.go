package lua

import (
	"github.com/seckill/reconciler/reservation"
)

var reserve = load("reserve")

// ReserveCode is the code of a reply of reserve.lua.
type ReserveCode int64

// The codes of reserve.lua (spec §4). ReserveReply.Status says more where one
// code has several reasons.
const (
	ReserveAccepted              ReserveCode = 0
	ReserveUserAlreadyReserved   ReserveCode = 10
	ReserveActivityNotStarted    ReserveCode = 11
	ReserveActivityEnded         ReserveCode = 12
	ReserveActivityNotActive     ReserveCode = 13
	ReserveVersionMismatch       ReserveCode = 14
	ReserveSoldOut               ReserveCode = 15
	ReserveRequestIDConflict     ReserveCode = 16
	ReserveConfigMissing         ReserveCode = 17
	ReserveReservationIDConflict ReserveCode = 18
	ReserveInvariantViolation    ReserveCode = 19
	ReserveBadArgument           ReserveCode = 20
)

var reserveCodes = map[ReserveCode]string{
	ReserveAccepted: "ACCEPTED", ReserveUserAlreadyReserved: "USER_ALREADY_RESERVED",
	ReserveActivityNotStarted: "ACTIVITY_NOT_STARTED", ReserveActivityEnded: "ACTIVITY_ENDED",
	ReserveActivityNotActive: "ACTIVITY_NOT_ACTIVE", ReserveVersionMismatch: "VERSION_MISMATCH",
	ReserveSoldOut: "SOLD_OUT", ReserveRequestIDConflict: "REQUEST_ID_CONFLICT",
	ReserveConfigMissing: "CONFIG_MISSING", ReserveReservationIDConflict: "RESERVATION_ID_CONFLICT",
	ReserveInvariantViolation: "INVARIANT_VIOLATION", ReserveBadArgument: "BAD_ARGUMENT",
}

func (c ReserveCode) String() string { return codeText(reserveCodes, c) }

// ReserveArgs are the arguments of reserve.lua beside the scope.
type ReserveArgs struct {
	RequestID     string
	ReservationID string
	UserID        string
	MessageID     string
	TTLMS         int64 // milliseconds until the reservation is due for a check
	SchemaVersion int64
	NowMS         int64
}

// ReserveReply is the reply of reserve.lua.
type ReserveReply struct {
	Code          ReserveCode
	ReservationID string // of the user's live reservation for codes 0 and 10, else ""
	Remaining     int64  // available after the call, or [Missing]
	Status        string // QUEUED, the current status of a rebuilt result, or the reason
	Replay        bool   // the kept result of an earlier call, not a new one
}

// Reserve takes one unit of the scope's stock for a user.
func (b *Batch) Reserve(scope reservation.Scope, a ReserveArgs) *Result[ReserveReply] {
	keys := []string{
		scope.MetaKey(), scope.StockKey(), scope.RequestKey(a.RequestID), scope.UserKey(a.UserID),
		scope.ReservationKey(a.ReservationID), scope.IndexKey(reservation.SendPending),
		scope.IndexKey(reservation.ReservationExpiry), scope.SoldOutKey(),
	}
	argv := []any{
		a.RequestID, a.ReservationID, scope.ActivityID, scope.SKUID, a.UserID, decimal(scope.Version),
		decimal(a.TTLMS), decimal(a.SchemaVersion), decimal(scope.Bucket), a.MessageID, decimal(a.NowMS),
	}
	return enqueue(b, reserve, scope, keys, argv, 5, func(v *values) ReserveReply {
		r := ReserveReply{
			Code: code(v, reserveCodes), ReservationID: v.text(1), Remaining: v.integer(2),
			Status: v.text(3), Replay: v.flag(4),
		}
		if v.err == nil && r.Remaining < Missing {
			v.fail(2, "a number or -1")
		}
		return r
	})
}
