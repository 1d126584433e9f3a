package transfer

import (
	"context"
	"crypto/rand"
	"strings"
	"time"

	"github.com/seckill/reconciler/reservation"
)

// State is what a journal row says of a transfer: what was seen last, and not
// what holds. That say the markers.
type State string

// The states of a journal row.
const (
	Planned   State = "PLANNED"   // nothing has moved yet
	Out       State = "OUT"       // units are on their way, or were moved in one bucket only
	Done      State = "DONE"      // as many came in as went out
	Cancelled State = "CANCELLED" // nothing has moved, and nothing will be begun
)

// Key names an activity version of a SKU: donor and receiver share it.
type Key struct {
	ActivityID string
	SKUID      string
	Version    int64
}

// Scope is a bucket of the version.
func (k Key) Scope(bucket int64) reservation.Scope {
	return reservation.Scope{ActivityID: k.ActivityID, SKUID: k.SKUID, Version: k.Version, Bucket: bucket}
}

// KeyOf is the version that a scope is a bucket of.
func KeyOf(s reservation.Scope) Key { return Key{s.ActivityID, s.SKUID, s.Version} }

// Transfer is a row of the journal.
type Transfer struct {
	ID        string
	Key       Key
	Donor     int64 // bucket
	Receiver  int64 // bucket
	Amount    int64 // units; of which fewer may be left after a failover
	State     State
	Reason    string
	CreatedBy string
	CreatedAt time.Time
	UpdatedAt time.Time
}

// DonorScope is the bucket that gives.
func (t Transfer) DonorScope() reservation.Scope { return t.Key.Scope(t.Donor) }

// ReceiverScope is the bucket that gets.
func (t Transfer) ReceiverScope() reservation.Scope { return t.Key.Scope(t.Receiver) }

// Open says whether the row promises that something is still to be done.
func (t Transfer) Open() bool { return t.State == Planned || t.State == Out }

// NewID is unique, sorts by time and is an identifier of the contract.
func NewID() string {
	return time.Now().UTC().Format("20060102T150405Z-") + strings.ToLower(rand.Text()[:10])
}

// Version is an activity version as registry and journal have it.
type Version struct {
	Key       Key
	Allocated int64 // units over all buckets
	Count     int64 // buckets that it has; some may not be registered
	StartsAt  time.Time
	EndsAt    time.Time
	ReadAt    time.Time  // when it was read, by the journal's clock
	Buckets   []Bucket   // by number
	Transfers []Transfer // all of them, the oldest first
}

// Bucket is a registered bucket.
type Bucket struct {
	ID      int64
	Initial int64  // as registered: transfers move it in Redis alone
	State   string // as registered
	Held    bool   // a person holds it: nothing changes it
}

// Filter selects versions; what is not set selects all. Versions past their
// retention are never among them: their markers expire with everything else.
type Filter struct {
	ActivityID string
	SKUID      string
	Version    *int64
	Journalled bool // only versions that have transfers
	Several    bool // only versions of several buckets
}

// FilterOf selects one version.
func FilterOf(k Key) Filter {
	return Filter{ActivityID: k.ActivityID, SKUID: k.SKUID, Version: &k.Version}
}

// Change is what a journal row is to say from now on. It is made only while the
// row still says From.
type Change struct {
	ID       string
	From, To State
	Note     string // why, added to the row's reason; empty for nothing
}

// Journal is registry and journal, in PostgreSQL.
type Journal interface {
	Versions(ctx context.Context, f Filter) ([]Version, error)
	// CreateTransfers commits the rows, all or none, with an entry in the audit
	// trail: only then may their OUT be run.
	CreateTransfers(ctx context.Context, transfers []Transfer) error
	// NoteTransfers makes the changes whose rows are still what they were.
	NoteTransfers(ctx context.Context, changes []Change) error
}

// Marker is what a bucket has of a transfer.
type Marker struct {
	Leg         Leg   // "" when there is none
	Amount      int64 // units moved so far
	UpdatedAtMS int64 // of the last move; 0 without a marker
}

// Leg is the side of a transfer.
type Leg string

// The legs of a transfer.
const (
	LegOut Leg = "out"
	LegIn  Leg = "in"
)

// Missing stands for a number that Redis does not have.
const Missing int64 = -1

// Query asks for a bucket and its markers of some transfers.
type Query struct {
	Scope     reservation.Scope
	Transfers []string
}

// Reading is a bucket at one instant: stock and markers together.
type Reading struct {
	TimeMS           int64 // on the clock of the scope's node
	State            string
	RetentionUntilMS int64
	Initial          int64 // numbers may be [Missing]
	Available        int64
	Reserved         int64
	Markers          map[string]Marker // by transfer, every one that was asked for
	// WrongData says what of the bucket is not the contract's: no retry helps.
	WrongData string
	Err       error // why it could not be read
}

// complete says whether meta and stock are there.
func (r Reading) complete() bool {
	return r.Err == nil && r.State != "" && min(r.Initial, r.Available, r.Reserved) >= 0
}

// Move is one call of a leg's script.
type Move struct {
	Scope      reservation.Scope
	TransferID string
	Leg        Leg
	Target     int64 // absolute
	// Second chooses the leg's second mode: partial for OUT, lower for IN;
	// otherwise whole and raise.
	Second bool
}

// Outcome is what became of a move.
type Outcome struct {
	Code    string // the script's, by name
	Changed bool   // units may have moved now
	// Insufficient: a whole OUT found too few units.
	Insufficient bool
	// Contradicts: the marker is the other leg's, or the stock does not add up:
	// no retry helps.
	Contradicts bool
	Err         error
}

// Stocks is the Redis side. Replies are in the order of what was asked, each
// with its own error.
type Stocks interface {
	ReadTransfers(ctx context.Context, queries []Query) []Reading
	MoveUnits(ctx context.Context, moves []Move) []Outcome
	// PublishAvailable tells gateways that units came into the buckets; best
	// effort (spec §5).
	PublishAvailable(ctx context.Context, scopes []reservation.Scope) error
}

// Deviation is how many units a bucket has reserved beyond what reservations
// and orders account for; below zero they are lost, and its units are needed.
type Deviation struct {
	Units int64
	Err   error // it could not be told
}

// Drift compares buckets with their orders (protocol §5, level 2).
type Drift interface {
	Deviations(ctx context.Context, scopes []reservation.Scope) []Deviation
}
