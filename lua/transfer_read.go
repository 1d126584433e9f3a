package lua

import "github.com/seckill/reconciler/reservation"

var transferRead = loadReadOnly("transfer_read")

// TransferLeg names the side of a transfer that a marker stands for.
type TransferLeg string

// The legs of a transfer.
const (
	TransferLegOut TransferLeg = "out"
	TransferLegIn  TransferLeg = "in"
)

// TransferMarker is what a bucket has of one transfer.
type TransferMarker struct {
	Leg         TransferLeg // "" when there is no marker
	Amount      int64       // units moved so far; 0 without a marker
	UpdatedAtMS int64       // of the last move, on the clock of the scope's node; [Missing] without a marker
}

// TransferReadReply is the reply of transfer_read.lua. A number that is not
// there is [Missing].
type TransferReadReply struct {
	TimeMS           int64 // the instant, on the clock of the scope's node
	State            State // "" when meta is gone
	RetentionUntilMS int64

	Initial   int64
	Available int64
	Reserved  int64

	Markers []TransferMarker // in the order asked for
}

// TransferRead reads a bucket's stock and its markers of the transfers at one
// instant. It never writes.
func (b *Batch) TransferRead(scope reservation.Scope, transferIDs []string) *Result[TransferReadReply] {
	keys := make([]string, 0, 2+len(transferIDs))
	keys = append(keys, scope.MetaKey(), scope.StockKey())
	for _, id := range transferIDs {
		keys = append(keys, scope.TransferKey(id))
	}
	return enqueue(b, transferRead, scope, keys, nil, 6+3*len(transferIDs), func(v *values) TransferReadReply {
		r := TransferReadReply{
			TimeMS: v.integer(0), State: State(v.text(1)), RetentionUntilMS: v.number(2),
			Initial: v.number(3), Available: v.number(4), Reserved: v.number(5),
			Markers: make([]TransferMarker, len(transferIDs)),
		}
		for i := range r.Markers {
			at := 6 + 3*i
			r.Markers[i] = TransferMarker{TransferLeg(v.text(at)), v.count(at + 1), v.number(at + 2)}
		}
		return r
	})
}
