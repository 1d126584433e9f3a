package lua

import "github.com/seckill/reconciler/reservation"

var unindex = load("unindex")

// UnindexCode is the code of a reply of unindex.lua.
type UnindexCode int64

// The codes of unindex.lua.
const (
	UnindexRemoved     UnindexCode = 0
	UnindexNotIndexed  UnindexCode = 1
	UnindexNotFound    UnindexCode = 2
	UnindexNotTerminal UnindexCode = 3
	UnindexIDConflict  UnindexCode = 4
)

var unindexCodes = map[UnindexCode]string{
	UnindexRemoved: "REMOVED", UnindexNotIndexed: "NOT_INDEXED", UnindexNotFound: "NOT_FOUND",
	UnindexNotTerminal: "NOT_TERMINAL", UnindexIDConflict: "ID_CONFLICT",
}

func (c UnindexCode) String() string { return codeText(unindexCodes, c) }

// UnindexArgs are the arguments of unindex.lua.
type UnindexArgs struct {
	ReservationID string
}

// UnindexReply is the reply of unindex.lua.
type UnindexReply struct {
	Code    UnindexCode
	Status  reservation.Status // "" when the hash is gone
	Removed int64              // members removed: 0 to 2
}

// Unindex drops the leftover index members of a decided reservation
// (protocol §3 row 1).
func (b *Batch) Unindex(scope reservation.Scope, a UnindexArgs) *Result[UnindexReply] {
	argv := []any{a.ReservationID}
	return enqueue(b, unindex, scope, indexedKeys(scope, a.ReservationID), argv, 3, func(v *values) UnindexReply {
		return UnindexReply{Code: code(v, unindexCodes), Status: v.status(1), Removed: v.integer(2)}
	})
}
