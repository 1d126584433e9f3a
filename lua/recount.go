package lua

import "github.com/seckill/reconciler/reservation"

var recount = load("recount")

// RecountCode is the code of a reply of recount.lua.
type RecountCode int64

// The codes of recount.lua (spec §4).
const (
	RecountDone       RecountCode = 0
	RecountAlready    RecountCode = 1
	RecountNotStopped RecountCode = 3
	RecountChanged    RecountCode = 5
	RecountBadSum     RecountCode = 6
	RecountRefused    RecountCode = 7
)

var recountCodes = map[RecountCode]string{
	RecountDone: "RECOUNTED", RecountAlready: "ALREADY_SO", RecountNotStopped: "NOT_STOPPED",
	RecountChanged: "CHANGED", RecountBadSum: "BAD_SUM", RecountRefused: "REFUSED",
}

func (c RecountCode) String() string { return codeText(recountCodes, c) }

// StockText is a stock as it stands in Redis: what is to be recounted may be
// no number. A field that is not there is "".
type StockText struct {
	Initial       string `json:"initial"`
	Available     string `json:"available"`
	Reserved      string `json:"reserved"`
	ReleasedTotal string `json:"released_total"`
}

// RecountArgs are the arguments of recount.lua beside the scope.
type RecountArgs struct {
	Seen          StockText // the stock that is to be replaced
	Initial       int64
	Available     int64
	Reserved      int64
	ReleasedTotal int64
	NowMS         int64
}

// RecountReply is the reply of recount.lua. Its numbers are those after the
// call; one that is no number of the contract is [Missing].
type RecountReply struct {
	Code      RecountCode
	Initial   int64
	Available int64
	Reserved  int64
}

// Recount replaces the numbers of a scope that is PAUSED or CLOSED, if they are
// still those that were seen, and sets or deletes soldout to match. The caller
// publishes the scope's event.
func (b *Batch) Recount(scope reservation.Scope, a RecountArgs) *Result[RecountReply] {
	keys := []string{scope.MetaKey(), scope.StockKey(), scope.SoldOutKey()}
	argv := []any{
		a.Seen.Initial, a.Seen.Available, a.Seen.Reserved, a.Seen.ReleasedTotal,
		decimal(a.Initial), decimal(a.Available), decimal(a.Reserved), decimal(a.ReleasedTotal), decimal(a.NowMS),
	}
	return enqueue(b, recount, scope, keys, argv, 4, func(v *values) RecountReply {
		return RecountReply{Code: code(v, recountCodes), Initial: v.number(1), Available: v.number(2), Reserved: v.number(3)}
	})
}
