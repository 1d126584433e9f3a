package view

import (
	"time"

	"github.com/seckill/reconciler/transfer"
)

// Transfer is a row of the journal in JSON.
type Transfer struct {
	TransferID      string    `json:"transfer_id"`
	ActivityID      string    `json:"activity_id"`
	SKUID           string    `json:"sku_id"`
	ActivityVersion int64     `json:"activity_version"`
	DonorBucket     int64     `json:"donor_bucket"`
	ReceiverBucket  int64     `json:"receiver_bucket"`
	Amount          int64     `json:"amount"`
	State           string    `json:"state"` // what was seen last
	Reason          string    `json:"reason"`
	CreatedBy       string    `json:"created_by"`
	CreatedAt       time.Time `json:"created_at"`
	UpdatedAt       time.Time `json:"updated_at"`
}

// OfTransfer is a row of the journal.
func OfTransfer(t transfer.Transfer) Transfer {
	return Transfer{
		TransferID: t.ID, ActivityID: t.Key.ActivityID, SKUID: t.Key.SKUID, ActivityVersion: t.Key.Version,
		DonorBucket: t.Donor, ReceiverBucket: t.Receiver, Amount: t.Amount, State: string(t.State), Reason: t.Reason,
		CreatedBy: t.CreatedBy, CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt,
	}
}

// LiveTransfer is a transfer with both of its markers.
type LiveTransfer struct {
	Transfer
	Donor     *TransferSide `json:"donor"`      // null: see error
	Receiver  *TransferSide `json:"receiver"`   // null: see error
	InTransit *int64        `json:"in_transit"` // units that are out and not in; below zero they are in both buckets
	Next      string        `json:"next"`       // what the worker does about it
	Why       string        `json:"why"`
	Error     string        `json:"error,omitempty"`
}

// TransferSide is a bucket's side of a transfer.
type TransferSide struct {
	Moved     int64      `json:"moved"` // by the bucket's marker
	MovedAt   *time.Time `json:"moved_at"`
	State     string     `json:"state"`
	Initial   int64      `json:"initial"`
	Expected  int64      `json:"expected_initial"` // as registered, and what transfers brought and took
	Available int64      `json:"available"`
	Reserved  int64      `json:"reserved"`
}

// OfLiveTransfer is a pair as the books of its version have it.
func OfLiveTransfer(b transfer.Books, p transfer.Pair) LiveTransfer {
	v := LiveTransfer{Transfer: OfTransfer(p.Transfer)}
	if err := b.Check(); err != nil {
		v.Next, v.Why, v.Error = string(transfer.Wait), "nothing is moved in the version while this stands", err.Error()
		return v
	}
	step, transit := transfer.Next(p), p.InTransit()
	v.Next, v.Why, v.InTransit = string(step.Verb), step.Why, &transit
	if b.Difference() != 0 && step.Verb != transfer.Rest {
		v.Next, v.Why = string(transfer.Wait), "the sums of the version do not hold, see `reconciler reconcile`; then: "+step.Why
	}
	v.Donor, v.Receiver = side(b, p.Transfer.Donor, p.Out()), side(b, p.Transfer.Receiver, p.In())
	return v
}

func side(b transfer.Books, bucket int64, m transfer.Marker) *TransferSide {
	r := b.Buckets[bucket]
	s := &TransferSide{
		Moved: m.Amount, State: r.State, Initial: r.Initial, Expected: b.Expected(bucket), Available: r.Available, Reserved: r.Reserved,
	}
	if m.UpdatedAtMS > 0 {
		at := time.UnixMilli(m.UpdatedAtMS).UTC()
		s.MovedAt = &at
	}
	return s
}

// Rebalance is a plan for one version in JSON.
type Rebalance struct {
	ActivityID      string          `json:"activity_id"`
	SKUID           string          `json:"sku_id"`
	ActivityVersion int64           `json:"activity_version"`
	Buckets         []RebalanceRole `json:"buckets"`
	Transfers       []PlannedMove   `json:"transfers"`
}

// RebalanceRole is a bucket's part in a plan.
type RebalanceRole struct {
	BucketID  int64  `json:"bucket_id"`
	Available int64  `json:"available"`
	Asked     int64  `json:"asked"` // requests between the two looks
	Gives     int64  `json:"gives"`
	Gets      int64  `json:"gets"`
	Why       string `json:"why"`
}

// PlannedMove is a transfer of a plan.
type PlannedMove struct {
	DonorBucket    int64  `json:"donor_bucket"`
	ReceiverBucket int64  `json:"receiver_bucket"`
	Amount         int64  `json:"amount"`
	TransferID     string `json:"transfer_id,omitempty"` // once it is journalled
}

// OfRebalance is a plan.
func OfRebalance(p transfer.Plan) Rebalance {
	v := Rebalance{ActivityID: p.Key.ActivityID, SKUID: p.Key.SKUID, ActivityVersion: p.Key.Version, Buckets: []RebalanceRole{}, Transfers: []PlannedMove{}}
	for _, r := range p.Roles {
		v.Buckets = append(v.Buckets, RebalanceRole{r.Bucket, r.Available, r.Asked, r.Gives, r.Gets, r.Why})
	}
	for _, m := range p.Moves {
		v.Transfers = append(v.Transfers, PlannedMove{DonorBucket: m.Donor, ReceiverBucket: m.Receiver, Amount: m.Amount})
	}
	return v
}
