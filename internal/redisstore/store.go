package redisstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Store reads scopes and reservations, and changes them through the scripts.
// It is safe for concurrent use.
type Store struct {
	reading redis.UniversalClient
	reader  *lua.Runner // read-only scripts, on the reading pool
	writer  *lua.Runner // scripts that change something, on the mutating pool
	timeout time.Duration
}

// New makes a store on both pools. commandTimeout bounds one command; a page
// is a few pipelines, each of at most a few times that.
func New(clients *Clients, commandTimeout time.Duration) (*Store, error) {
	writer, err := lua.NewRunner(clients.Mutating)
	if err != nil {
		return nil, fmt.Errorf("redis client for changes: %w", err)
	}
	reader, err := lua.NewRunner(clients.Reading)
	if err != nil {
		return nil, fmt.Errorf("redis client for reads: %w", err)
	}
	if commandTimeout <= 0 {
		commandTimeout = defaultTimeout
	}
	return &Store{reading: clients.Reading, reader: reader, writer: writer, timeout: commandTimeout}, nil
}

// Writer runs scripts that have no place among the effects of decisions:
// provisioning and state changes of scopes.
func (s *Store) Writer() *lua.Runner { return s.writer }

const (
	defaultTimeout = 2 * time.Second
	// roundTrips is how many command time-outs one page's round trip may take:
	// a page is several pipelines, one after another on each node.
	roundTrips = 4
)

// bound is a context for one round trip of a page.
func (s *Store) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, roundTrips*s.timeout)
}

// Snapshot is a scope's numbers at one instant, or why they could not be read.
type Snapshot struct {
	lua.SnapshotReply
	Err error
}

// Snapshots reads the numbers of the scopes, one reply for each.
func (s *Store) Snapshots(ctx context.Context, scopes []reservation.Scope) []Snapshot {
	snapshots := make([]Snapshot, len(scopes))
	if len(scopes) == 0 {
		return snapshots
	}
	batch := s.reader.Batch()
	results := make([]*lua.Result[lua.SnapshotReply], len(scopes))
	for i, scope := range scopes {
		results[i] = batch.Snapshot(scope)
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_ = batch.Run(bound) // each result has its own error
	for i, r := range results {
		snapshots[i].SnapshotReply, snapshots[i].Err = r.Get()
	}
	return snapshots
}

// Configured says whether the scope's meta and stock are there and complete.
func (s Snapshot) Configured() bool {
	return s.State != "" && min(s.Initial, s.Available, s.Reserved) >= 0
}

// ErrNoStock says that Redis holds no complete stock for a scope.
var ErrNoStock = errors.New("stock is missing or incomplete")

// PublishAvailable tells the gateways of the scopes that units are available
// again (spec §5).
func (s *Store) PublishAvailable(ctx context.Context, scopes []reservation.Scope) error {
	bound, cancel := s.bound(ctx)
	defer cancel()
	pipe := s.reading.Pipeline()
	for _, scope := range scopes {
		pipe.Publish(bound, scope.EventsChannel(), reservation.NoticeAvailable)
	}
	_, err := pipe.Exec(bound)
	return err
}
