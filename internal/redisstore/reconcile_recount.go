package redisstore

import (
	"context"
	"fmt"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// StockText reads a scope's state, "" for none, and its stock as it stands: what
// is to be recounted may hold no numbers.
func (s *Store) StockText(ctx context.Context, scope reservation.Scope) (state string, stock lua.StockText, err error) {
	bound, cancel := s.bound(ctx)
	defer cancel()
	pipe := s.reading.Pipeline()
	meta := pipe.HMGet(bound, scope.MetaKey(), "state")
	fields := pipe.HMGet(bound, scope.StockKey(), stockFields...)
	if _, err := pipe.Exec(bound); err != nil {
		return "", stock, fmt.Errorf("read state and stock of %s: %w", scope, err)
	}
	state, _ = meta.Val()[0].(string)
	for i, into := range []*string{&stock.Initial, &stock.Available, &stock.Reserved, &stock.ReleasedTotal} {
		*into, _ = fields.Val()[i].(string) // one that is not there is ""
	}
	return state, stock, nil
}

// Recount runs recount.lua for the scope.
func (s *Store) Recount(ctx context.Context, scope reservation.Scope, args lua.RecountArgs) (lua.RecountReply, error) {
	batch := s.writer.Batch()
	result := batch.Recount(scope, args)
	s.runBatch(ctx, batch)
	return result.Get()
}
