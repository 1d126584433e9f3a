package lua

import "github.com/seckill/reconciler/reservation"

var transition = load("transition")

// TransitionCode is the code of a reply of transition.lua.
type TransitionCode int64

// The codes of transition.lua (spec §4).
const (
	TransitionUpdated    TransitionCode = 0
	TransitionIdempotent TransitionCode = 1
	TransitionNotFound   TransitionCode = 2
	TransitionIllegal    TransitionCode = 3
	TransitionIDConflict TransitionCode = 4
)

var transitionCodes = map[TransitionCode]string{
	TransitionUpdated: "UPDATED", TransitionIdempotent: "IDEMPOTENT", TransitionNotFound: "NOT_FOUND",
	TransitionIllegal: "ILLEGAL_TRANSITION", TransitionIDConflict: "ID_CONFLICT",
}

func (c TransitionCode) String() string { return codeText(transitionCodes, c) }

// TransitionArgs are the arguments of transition.lua.
type TransitionArgs struct {
	ReservationID string
	Target        reservation.Status
	NextRetryMS   int64  // for SEND_UNKNOWN: when to send again
	MessageID     string // compared with what is stored, unless ""
	OrderID       string // compared with what is stored, unless ""
	ErrorCode     string
	Position      string // mq_position of an acknowledged send
	NowMS         int64
}

// TransitionReply is the reply of transition.lua.
type TransitionReply struct {
	Code    TransitionCode
	Current reservation.Status // before the call; "" when the hash is gone
	Target  reservation.Status
}

// Transition moves a reservation along the legal path. It never changes stock.
func (b *Batch) Transition(scope reservation.Scope, a TransitionArgs) *Result[TransitionReply] {
	argv := []any{
		a.ReservationID, string(a.Target), decimal(a.NowMS), decimal(a.NextRetryMS),
		a.MessageID, a.OrderID, a.ErrorCode, a.Position,
	}
	return enqueue(b, transition, scope, indexedKeys(scope, a.ReservationID), argv, 3, func(v *values) TransitionReply {
		return TransitionReply{Code: code(v, transitionCodes), Current: v.status(1), Target: v.status(2)}
	})
}

// indexedKeys are a reservation and the two indexes that may hold it.
func indexedKeys(scope reservation.Scope, reservationID string) []string {
	return []string{
		scope.ReservationKey(reservationID),
		scope.IndexKey(reservation.SendPending), scope.IndexKey(reservation.ReservationExpiry),
	}
}
