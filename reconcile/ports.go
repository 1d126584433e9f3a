package reconcile

import (
	"context"

	"github.com/seckill/reconciler/reservation"
)

// Registry lists what was ever allocated and registered.
type Registry interface {
	// SKUs lists the registered SKUs, with all versions and buckets of each,
	// those past their retention included, in the order of their names. Empty
	// arguments select all.
	SKUs(ctx context.Context, activityID, skuID string) ([]SKU, error)
}

// SKU is a SKU of an activity as the registry has it.
type SKU struct {
	ActivityID string
	SKUID      string
	Versions   []Version // by number
}

// Version is one activity version of a SKU.
type Version struct {
	Number    int64
	Allocated int64 // units over all buckets
	Count     int64 // buckets that the version has; some may not be registered
	Buckets   []Bucket
}

// Bucket is a registered bucket.
type Bucket struct {
	ID        int64
	Initial   int64
	Confirmed bool // Redis was seen to hold it: from then on missing keys are config_missing
	Expired   bool // past its retention: its keys are gone by design
	State     string
	Held      bool // a person holds it: nothing changes it
}

func (k SKU) scope(v Version, b Bucket) reservation.Scope {
	return reservation.Scope{ActivityID: k.ActivityID, SKUID: k.SKUID, Version: v.Number, Bucket: b.ID}
}

// Stocks is the Redis side. Each reply has its own error; one that failed says
// nothing about its scope.
type Stocks interface {
	// Stocks reads the numbers of each scope at one instant of its own.
	Stocks(ctx context.Context, scopes []reservation.Scope) []StockReply
	// MissingFields names what each scope lacks of meta and stock: a key
	// ("stock"), or a field of one ("meta.state").
	MissingFields(ctx context.Context, scopes []reservation.Scope) []FieldsReply
	// ExpiryPages reads one page of reservation_expiry for each request. Over a
	// walk from cursor zero until the cursor is zero again, every member that
	// is there from the start to the end is read at least once; some may be
	// read twice.
	ExpiryPages(ctx context.Context, requests []PageRequest) []PageReply
	// Held says which reservations still hold a unit as far as Redis knows:
	// their hash exists and is not RELEASED.
	Held(ctx context.Context, refs []Ref) []HeldReply
}

// Stock is a scope's numbers at one instant. A missing number is Missing.
type Stock struct {
	Initial       int64
	Available     int64
	Reserved      int64
	ReleasedTotal int64 // 0 while the field does not exist: nothing was released
	SendPending   int64 // members of send_pending
	Expiry        int64 // members of reservation_expiry
}

// Missing stands for a number that is not there.
const Missing int64 = -1 << 62

// StockReply is a scope's stock, or why it could not be read.
type StockReply struct {
	Stock
	// Malformed says what of the stock is not the contract's: a key of another
	// type, a field that is no number. Its numbers mean nothing then.
	Malformed string
	Err       error

	State       string // of meta; "" when it is not there
	RetentionMS int64  // of meta; 0 when it is not there
	NowMS       int64  // the time of the scope's node; 0 when it was not read
}

// FieldsReply names what is missing.
type FieldsReply struct {
	Missing []string
	Err     error
}

// PageRequest asks for a page of a scope's reservation_expiry.
type PageRequest struct {
	Scope  reservation.Scope
	Cursor uint64
	Limit  int // about so many members
}

// PageReply is a page of an index. Cursor 0 is its end.
type PageReply struct {
	IDs    []string
	Cursor uint64
	Err    error
}

// Ref names a reservation.
type Ref struct {
	Scope reservation.Scope
	ID    string
}

// HeldReply says whether a reservation's hash exists and is not RELEASED.
type HeldReply struct {
	Held bool
	Err  error
}

// Orders is the PostgreSQL side.
type Orders interface {
	// Freeze prepares a view of the orders at one instant, which its Fix
	// chooses. Close it.
	Freeze(ctx context.Context) (Frozen, error)
}

// Frozen is the orders at one instant. Its calls come one after another.
// Several rows of one reservation count once, active if any of them is.
type Frozen interface {
	// Fix chooses the instant, and reads nothing else.
	Fix(ctx context.Context) error
	// Count counts a SKU's orders by the version and bucket that they name, -1
	// for none. versions restricts the count to these and to orders that name
	// none; nil is all.
	Count(ctx context.Context, activityID, skuID string, versions []int64) ([]OrderCount, error)
	// Match finds the orders of reservations, of whatever scope.
	Match(ctx context.Context, reservationIDs []string) ([]Order, error)
	// Walk gives pages of a SKU's orders that are not active and, with
	// bucketless, of those that name no bucket too.
	Walk(ctx context.Context, w OrderWalk, page func([]Order) error) error
	// Sold reads the counters of the SKU's sold units; applies is false where
	// nothing says where they are.
	Sold(ctx context.Context, activityID, skuID string) (counters []SoldCounter, applies bool, err error)
	// Close ends the view.
	Close()
}

// OrderWalk says which orders [Frozen].Walk gives.
type OrderWalk struct {
	ActivityID string
	SKUID      string
	Versions   []int64 // as for Count
	Bucketless bool
	Limit      int // orders in one page
}

// OrderCount counts the orders that name a version and a bucket.
type OrderCount struct {
	Version   int64 // -1: none
	Bucket    int64 // -1: none
	Active    int64
	Cancelled int64
	Unknown   int64 // of a status that the view does not map
}

// OrderStatus is what an order's status means.
type OrderStatus int

// The statuses of an order. An unknown one is held and reported, never guessed.
const (
	OrderUnknown OrderStatus = iota
	OrderActive
	OrderCancelled
)

// Order is an order as far as counting it needs.
type Order struct {
	ReservationID string
	ActivityID    string
	SKUID         string
	Version       int64 // -1: none
	Bucket        int64 // -1: none, by the hash rule
	UserID        string
	Status        OrderStatus
}
