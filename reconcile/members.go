package reconcile

import (
	"context"

	"github.com/seckill/reconciler/reservation"
)

// Members is the Redis side of the set checks. Each reply has its own error;
// one that failed says nothing.
type Members interface {
	// MemberStates reads reservations with all that belongs to them.
	MemberStates(ctx context.Context, queries []MemberQuery) []MemberState
	// ResultPages reads one page of a request shard for each request, with the
	// promise of ExpiryPages.
	ResultPages(ctx context.Context, requests []ShardRequest) []ShardReply
	// OwnResults reads the result of each reservation's own request: the one
	// that the query names, or else its hash. It is "" where there is none, and
	// where it could not be read: whoever looks closer learns why.
	OwnResults(ctx context.Context, queries []MemberQuery) []string
	// Results reads single request results again; one that is gone has no value.
	Results(ctx context.Context, results []RequestResult) []ResultReply
	// IndexPages reads one page of an index for each request, with the promise
	// of ExpiryPages.
	IndexPages(ctx context.Context, index reservation.Index, requests []PageRequest) []PageReply
	// Immortal names the keys of each scope, beside its reservations', that
	// exist and never expire.
	Immortal(ctx context.Context, scopes []reservation.Scope) []FieldsReply
}

// MemberQuery names a reservation. User and request are those of its order or
// of the request result that names it: with the hash gone, nothing else says
// where marker and result are.
type MemberQuery struct {
	Ref
	UserID    string
	RequestID string
}

// MemberState is what Redis holds of a reservation.
type MemberState struct {
	reservation.Member
	NoExpiry bool   // the hash exists and never expires
	Marker   string // its user's marker; "" for none
	// MarkerNoExpiry: the marker exists and never expires.
	MarkerNoExpiry bool
	Request        string // the result of its request; "" for none
	Err            error
}

// ShardRequest asks for a page of a request shard.
type ShardRequest struct {
	Scope  reservation.Scope
	Shard  int
	Cursor uint64
	Limit  int // about so many results
}

// ShardReply is a page of a request shard. Cursor 0 is its end.
type ShardReply struct {
	Results []RequestResult
	Cursor  uint64
	Err     error
}

// RequestResult is one field of a request shard.
type RequestResult struct {
	Scope     reservation.Scope
	Shard     int
	RequestID string
	Value     string
}

// ResultReply is a request result that was read again.
type ResultReply struct {
	RequestResult
	Err error
}

// Claims is the PostgreSQL side of the set checks.
type Claims interface {
	// OrderPage gives the reservation ids of a SKU's orders that follow after
	// in the order of the database, at most limit of them; fewer are the last.
	OrderPage(ctx context.Context, activityID, skuID, after string, limit int) ([]string, error)
	// Records reads claim and orders of each reservation in one statement. Ids
	// with neither are absent from the map.
	Records(ctx context.Context, ids []string) (map[string]reservation.Record, error)
}
