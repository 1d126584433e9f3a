package lua

import "github.com/seckill/reconciler/reservation"

var transferOut = load("transfer_out")

// TransferOutCode is the code of a reply of transfer_out.lua.
type TransferOutCode int64

// The codes of transfer_out.lua (spec §4).
const (
	TransferOutTaken        TransferOutCode = 0
	TransferOutAlready      TransferOutCode = 1
	TransferOutInsufficient TransferOutCode = 2
	TransferOutLimited      TransferOutCode = 3
	TransferOutWrongLeg     TransferOutCode = 4
	TransferOutInvariant    TransferOutCode = 5
	TransferOutRefused      TransferOutCode = 7
)

var transferOutCodes = map[TransferOutCode]string{
	TransferOutTaken: "TAKEN", TransferOutAlready: "ALREADY", TransferOutInsufficient: "INSUFFICIENT",
	TransferOutLimited: "LIMITED", TransferOutWrongLeg: "WRONG_LEG", TransferOutInvariant: "INVARIANT",
	TransferOutRefused: "REFUSED",
}

func (c TransferOutCode) String() string { return codeText(transferOutCodes, c) }

// OutMode says what an OUT leg is about.
type OutMode string

// The modes of transfer_out.lua.
const (
	OutWhole   OutMode = "whole"   // the planned leg: all or nothing
	OutPartial OutMode = "partial" // the leg that makes a pair equal: as much as there is
)

// TransferOutArgs are the arguments of transfer_out.lua beside the scope.
type TransferOutArgs struct {
	TransferID string
	Target     int64 // absolute: the units that are to be out after the call
	Mode       OutMode
	NowMS      int64
}

// TransferReply is the reply of a leg of a transfer.
type TransferReply[C ~int64] struct {
	Code      C
	InForce   int64 // the leg's amount after the call; 0 without a marker
	Available int64 // of the bucket, after the call, or [Missing]
	Initial   int64 // of the bucket, after the call, or [Missing]
}

// TransferOut takes units out of the donor's bucket until target of them are
// out (protocol §4). Its journal row was committed before.
func (b *Batch) TransferOut(scope reservation.Scope, a TransferOutArgs) *Result[TransferReply[TransferOutCode]] {
	argv := []any{a.TransferID, decimal(a.Target), string(a.Mode), decimal(a.NowMS)}
	return enqueue(b, transferOut, scope, transferKeys(scope, a.TransferID), argv, 4, transferReply(transferOutCodes))
}

func transferKeys(scope reservation.Scope, id string) []string {
	return []string{scope.MetaKey(), scope.StockKey(), scope.TransferKey(id), scope.SoldOutKey()}
}

func transferReply[C ~int64](codes map[C]string) func(*values) TransferReply[C] {
	return func(v *values) TransferReply[C] {
		return TransferReply[C]{Code: code(v, codes), InForce: v.count(1), Available: v.number(2), Initial: v.number(3)}
	}
}
