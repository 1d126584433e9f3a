package lua

import "github.com/seckill/reconciler/reservation"

var compensate = load("compensate")

// CompensateCode is the code of a reply of compensate.lua.
type CompensateCode int64

// The codes of compensate.lua (spec §4).
const (
	CompensateReleased           CompensateCode = 0
	CompensateAlreadyReleased    CompensateCode = 1
	CompensateNotFound           CompensateCode = 2
	CompensateNotCompensatable   CompensateCode = 3
	CompensateInvariantViolation CompensateCode = 4
	CompensateIDConflict         CompensateCode = 5
)

var compensateCodes = map[CompensateCode]string{
	CompensateReleased: "RELEASED", CompensateAlreadyReleased: "ALREADY_RELEASED",
	CompensateNotFound: "RESERVATION_NOT_FOUND", CompensateNotCompensatable: "NOT_COMPENSATABLE",
	CompensateInvariantViolation: "INVARIANT_VIOLATION", CompensateIDConflict: "RESERVATION_ID_CONFLICT",
}

func (c CompensateCode) String() string { return codeText(compensateCodes, c) }

// CompensateArgs are the arguments of compensate.lua. UserID is that of the
// reservation's hash: read it first.
type CompensateArgs struct {
	ReservationID string
	UserID        string
	Reason        string
	NowMS         int64
}

// CompensateReply is the reply of compensate.lua.
type CompensateReply struct {
	Code          CompensateCode
	Available     int64 // after the call, or [Missing]
	MarkerDeleted bool
	Status        reservation.Status // after the call; "" when there is none
}

// Compensate gives a reservation's unit back, once. The caller holds a claim
// FENCED or REJECTED for it (protocol S1).
func (b *Batch) Compensate(scope reservation.Scope, a CompensateArgs) *Result[CompensateReply] {
	keys := []string{
		scope.StockKey(), scope.UserKey(a.UserID), scope.ReservationKey(a.ReservationID),
		scope.IndexKey(reservation.SendPending), scope.IndexKey(reservation.ReservationExpiry), scope.SoldOutKey(),
	}
	argv := []any{a.ReservationID, a.Reason, decimal(a.NowMS)}
	return enqueue(b, compensate, scope, keys, argv, 4, func(v *values) CompensateReply {
		return CompensateReply{
			Code: code(v, compensateCodes), Available: v.number(1), MarkerDeleted: v.flag(2), Status: v.status(3),
		}
	})
}
