package lua

import "github.com/seckill/reconciler/reservation"

var transferIn = load("transfer_in")

// TransferInCode is the code of a reply of transfer_in.lua.
type TransferInCode int64

// The codes of transfer_in.lua (spec §4).
const (
	TransferInMoved     TransferInCode = 0
	TransferInAlready   TransferInCode = 1
	TransferInLimited   TransferInCode = 3
	TransferInWrongLeg  TransferInCode = 4
	TransferInInvariant TransferInCode = 5
	TransferInRefused   TransferInCode = 7
)

var transferInCodes = map[TransferInCode]string{
	TransferInMoved: "MOVED", TransferInAlready: "ALREADY", TransferInLimited: "LIMITED",
	TransferInWrongLeg: "WRONG_LEG", TransferInInvariant: "INVARIANT", TransferInRefused: "REFUSED",
}

func (c TransferInCode) String() string { return codeText(transferInCodes, c) }

// InMode says which way an IN leg goes.
type InMode string

// The modes of transfer_in.lua.
const (
	InRaise InMode = "raise" // gives units, and never takes any
	InLower InMode = "lower" // takes units back, as many as are available, and never gives any
)

// TransferInArgs are the arguments of transfer_in.lua beside the scope.
type TransferInArgs struct {
	TransferID string
	Target     int64 // absolute: the units that are to be in after the call
	Mode       InMode
	NowMS      int64
}

// TransferIn gives units to the receiver's bucket until target of them are in,
// or takes back those beyond it (protocol §4). A raise is for units that were
// seen to be out of the donor's.
func (b *Batch) TransferIn(scope reservation.Scope, a TransferInArgs) *Result[TransferReply[TransferInCode]] {
	argv := []any{a.TransferID, decimal(a.Target), string(a.Mode), decimal(a.NowMS)}
	return enqueue(b, transferIn, scope, transferKeys(scope, a.TransferID), argv, 4, transferReply(transferInCodes))
}
