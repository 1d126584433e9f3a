package lua

import "github.com/seckill/reconciler/reservation"

var reindex = load("reindex")

// ReindexCode is the code of a reply of reindex.lua.
type ReindexCode int64

// The codes of reindex.lua (spec §4).
const (
	ReindexReindexed      ReindexCode = 0
	ReindexAlreadyIndexed ReindexCode = 1
	ReindexNotFound       ReindexCode = 2
	ReindexTerminal       ReindexCode = 3
	ReindexIDConflict     ReindexCode = 4
)

var reindexCodes = map[ReindexCode]string{
	ReindexReindexed: "REINDEXED", ReindexAlreadyIndexed: "ALREADY_INDEXED", ReindexNotFound: "NOT_FOUND",
	ReindexTerminal: "TERMINAL", ReindexIDConflict: "ID_CONFLICT",
}

func (c ReindexCode) String() string { return codeText(reindexCodes, c) }

// ReindexArgs are the arguments of reindex.lua.
type ReindexArgs struct {
	ReservationID string
	NowMS         int64
}

// ReindexReply is the reply of reindex.lua.
type ReindexReply struct {
	Code   ReindexCode
	Status reservation.Status // "" when the hash is gone
	Added  int64              // members added: 0 to 2
}

// Reindex puts an undecided reservation back into the indexes that lost it.
func (b *Batch) Reindex(scope reservation.Scope, a ReindexArgs) *Result[ReindexReply] {
	argv := []any{a.ReservationID, decimal(a.NowMS)}
	return enqueue(b, reindex, scope, indexedKeys(scope, a.ReservationID), argv, 3, func(v *values) ReindexReply {
		return ReindexReply{Code: code(v, reindexCodes), Status: v.status(1), Added: v.integer(2)}
	})
}
