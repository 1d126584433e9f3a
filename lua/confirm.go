package lua

import "github.com/seckill/reconciler/reservation"

var confirm = load("confirm")

// ConfirmCode is the code of a reply of confirm.lua.
type ConfirmCode int64

// The codes of confirm.lua (spec §4).
const (
	ConfirmConfirmed        ConfirmCode = 0
	ConfirmAlreadyConfirmed ConfirmCode = 1
	ConfirmNotFound         ConfirmCode = 2
	ConfirmNotConfirmable   ConfirmCode = 3
	ConfirmIDConflict       ConfirmCode = 4
)

var confirmCodes = map[ConfirmCode]string{
	ConfirmConfirmed: "CONFIRMED", ConfirmAlreadyConfirmed: "ALREADY_CONFIRMED", ConfirmNotFound: "NOT_FOUND",
	ConfirmNotConfirmable: "NOT_CONFIRMABLE", ConfirmIDConflict: "ID_CONFLICT",
}

func (c ConfirmCode) String() string { return codeText(confirmCodes, c) }

// ConfirmArgs are the arguments of confirm.lua.
type ConfirmArgs struct {
	ReservationID string
	OrderID       string // "" when it is not known
	NowMS         int64
}

// ConfirmReply is the reply of confirm.lua.
type ConfirmReply struct {
	Code   ConfirmCode
	Status reservation.Status // after the call; "" when the hash is gone
}

// Confirm makes a REJECTED or RELEASE_PENDING reservation ORDER_CREATED: its
// order exists (protocol §3 row 3). No stock moves.
func (b *Batch) Confirm(scope reservation.Scope, a ConfirmArgs) *Result[ConfirmReply] {
	argv := []any{a.ReservationID, a.OrderID, decimal(a.NowMS)}
	return enqueue(b, confirm, scope, indexedKeys(scope, a.ReservationID), argv, 2, func(v *values) ConfirmReply {
		return ConfirmReply{Code: code(v, confirmCodes), Status: v.status(1)}
	})
}
