package lua

import "github.com/seckill/reconciler/reservation"

var deferScript = load("defer")

// DeferCode is the code of a reply of defer.lua.
type DeferCode int64

// The codes of defer.lua (spec §4).
const (
	DeferMoved              DeferCode = 0
	DeferNoMemberOrNotLater DeferCode = 1
	DeferStatusChanged      DeferCode = 3
)

var deferCodes = map[DeferCode]string{
	DeferMoved: "MOVED", DeferNoMemberOrNotLater: "NO_MEMBER_OR_NOT_LATER", DeferStatusChanged: "STATUS_CHANGED",
}

func (c DeferCode) String() string { return codeText(deferCodes, c) }

// What DeferArgs.Expected may be beside a status.
const (
	DeferHashMissing reservation.Status = ""  // the hash must be gone
	DeferHashUnread  reservation.Status = "*" // the hash is not looked at: malformed, or of a wrong type
)

// DeferArgs are the arguments of defer.lua.
type DeferArgs struct {
	ReservationID string
	Index         reservation.Index
	Expected      reservation.Status // a status, or DeferHashMissing, or DeferHashUnread
	NextMS        int64              // absolute
}

// DeferReply is the reply of defer.lua.
type DeferReply struct {
	Code       DeferCode
	RetryCount int64              // waits so far; 0 where the hash was not read
	Status     reservation.Status // as found; "" where the hash is gone or was not read
}

// Defer makes a member of an index wait: its score moves forward and the hash
// counts the wait.
func (b *Batch) Defer(scope reservation.Scope, a DeferArgs) *Result[DeferReply] {
	keys := []string{scope.ReservationKey(a.ReservationID), scope.IndexKey(a.Index)}
	argv := []any{a.ReservationID, string(a.Expected), decimal(a.NextMS)}
	return enqueue(b, deferScript, scope, keys, argv, 3, func(v *values) DeferReply {
		return DeferReply{Code: code(v, deferCodes), RetryCount: v.count(1), Status: v.status(2)}
	})
}
