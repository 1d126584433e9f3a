package redisstore

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// ScopeKeys are a scope's meta and stock as they stand in Redis, whoever wrote
// them: nothing is checked.
type ScopeKeys struct {
	Meta, Stock map[string]string // empty: there is no such key
	// When each expires, in milliseconds since 1970; 0: never, or no such key.
	MetaExpiresAtMS, StockExpiresAtMS int64
}

// ScopeKeys reads the keys of each scope, in the order of the scopes. A key of
// another type is an error that names the scope.
func (s *Store) ScopeKeys(ctx context.Context, scopes []reservation.Scope) ([]ScopeKeys, error) {
	bound, cancel := s.bound(ctx)
	defer cancel()
	type reads struct {
		meta, stock             *redis.MapStringStringCmd
		metaExpiry, stockExpiry *redis.DurationCmd
	}
	pipe := s.reading.Pipeline()
	all := make([]reads, len(scopes))
	for i, scope := range scopes {
		all[i] = reads{
			pipe.HGetAll(bound, scope.MetaKey()), pipe.HGetAll(bound, scope.StockKey()),
			pipe.PExpireTime(bound, scope.MetaKey()), pipe.PExpireTime(bound, scope.StockKey()),
		}
	}
	_, _ = pipe.Exec(bound) // each command has its own error
	keys := make([]ScopeKeys, len(scopes))
	for i, r := range all {
		for _, cmd := range []redis.Cmder{r.meta, r.stock, r.metaExpiry, r.stockExpiry} {
			if err := cmd.Err(); err != nil {
				return nil, fmt.Errorf("read meta and stock of %s: %w", scopes[i], err)
			}
		}
		keys[i] = ScopeKeys{r.meta.Val(), r.stock.Val(), r.metaExpiry.Val().Milliseconds(), r.stockExpiry.Val().Milliseconds()}
	}
	return keys, nil
}
