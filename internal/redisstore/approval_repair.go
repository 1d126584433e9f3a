package redisstore

import (
	"context"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Request is the request that made a reservation, as its result names it.
type Request struct{ RequestID, UserID string }

// FindRequests looks for the requests that made the reservations, in the
// accepted request results of the scope's 256 shards (protocol §3: on approval
// only). A reservation that none names, or more than one, is not in the map: what
// cannot be told is not guessed.
func (s *Store) FindRequests(ctx context.Context, scope reservation.Scope, ids []string) (map[string]Request, error) {
	wanted := make(map[string]bool, len(ids))
	for _, id := range ids {
		wanted[id] = true
	}
	found, ambiguous := map[string]Request{}, map[string]bool{}
	err := s.eachResultPage(ctx, scope, func(shard int, fields []string) error {
		for i := 0; i+1 < len(fields); i += 2 {
			id, user := acceptedResult(fields[i+1])
			if !wanted[id] || reservation.RequestShard(fields[i]) != shard {
				continue
			}
			request := Request{RequestID: fields[i], UserID: user}
			if before, seen := found[id]; seen && before != request {
				ambiguous[id] = true
			}
			found[id] = request
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	for id := range ambiguous {
		delete(found, id)
	}
	return found, nil
}

// RestoreReply is the reply of restore.lua, or why there is none.
type RestoreReply struct {
	lua.RestoreReply
	Err error
}

// Restore runs restore.lua for each reservation of the scope.
func (s *Store) Restore(ctx context.Context, scope reservation.Scope, args []lua.RestoreArgs) []RestoreReply {
	batch := s.writer.Batch()
	results := make([]*lua.Result[lua.RestoreReply], len(args))
	for i, a := range args {
		results[i] = batch.Restore(scope, a)
	}
	s.runBatch(ctx, batch)
	replies := make([]RestoreReply, len(args))
	for i, r := range results {
		replies[i].RestoreReply, replies[i].Err = r.Get()
	}
	return replies
}

// AdoptReply is the reply of adopt_orphan.lua, or why there is none.
type AdoptReply struct {
	lua.AdoptOrphanReply
	Err error
}

// AdoptOrphans runs adopt_orphan.lua for each reservation of the scope. The
// claim of each is FENCED or REJECTED, and a person has approved it.
func (s *Store) AdoptOrphans(ctx context.Context, scope reservation.Scope, args []lua.AdoptOrphanArgs) []AdoptReply {
	batch := s.writer.Batch()
	results := make([]*lua.Result[lua.AdoptOrphanReply], len(args))
	for i, a := range args {
		results[i] = batch.AdoptOrphan(scope, a)
	}
	s.runBatch(ctx, batch)
	replies := make([]AdoptReply, len(args))
	for i, r := range results {
		replies[i].AdoptOrphanReply, replies[i].Err = r.Get()
	}
	return replies
}

func (s *Store) runBatch(ctx context.Context, batch *lua.Batch) {
	if batch.Len() == 0 {
		return
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_ = batch.Run(bound) // each result has its own error
}

// PublishSoldOut tells the gateways of the scope that its last unit is taken
// (spec §5).
func (s *Store) PublishSoldOut(ctx context.Context, scope reservation.Scope) error {
	bound, cancel := s.bound(ctx)
	defer cancel()
	return s.reading.Publish(bound, scope.EventsChannel(), reservation.NoticeSoldOut).Err()
}
