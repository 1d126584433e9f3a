package redisstore

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/probe"
	"github.com/seckill/reconciler/reservation"
)

// KeySizes measures the keys of the scopes that can grow big: the shards of
// request results and the indexes. It costs about 260 commands of constant time
// for each scope, so ask for a few at a time.
func (s *Store) KeySizes(ctx context.Context, scopes []reservation.Scope) []probe.KeySizes {
	sizes := make([]probe.KeySizes, len(scopes))
	if len(scopes) == 0 {
		return sizes
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	snapshots := s.Snapshots(bound, scopes)
	pipe := s.reading.Pipeline()
	counts := make([][]*redis.IntCmd, len(scopes))
	for i, scope := range scopes {
		for shard := range reservation.RequestShards {
			counts[i] = append(counts[i], pipe.HLen(bound, scope.RequestShardKey(shard)))
		}
	}
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, scope := range scopes {
		k := probe.KeySizes{
			Scope: scope, Err: snapshots[i].Err, AtMS: snapshots[i].TimeMS,
			Pending: max(snapshots[i].Pending, 0), Expiry: max(snapshots[i].Expiry, 0),
		}
		for _, cmd := range counts[i] {
			k.Fields = append(k.Fields, cmd.Val())
			if k.Err == nil && cmd.Err() != nil {
				k.Err = fmt.Errorf("measure the request shards of %s: %w", scope, cmd.Err())
			}
		}
		sizes[i] = k
	}
	s.measureMemory(bound, sizes)
	return sizes
}

// memorySamples is how many of a key's fields MEMORY USAGE weighs; it takes the
// others to be as big.
const memorySamples = 5

// measureMemory asks for the bytes of the biggest shard and of the indexes.
func (s *Store) measureMemory(ctx context.Context, sizes []probe.KeySizes) {
	pipe := s.reading.Pipeline()
	cmds := make([][3]*redis.IntCmd, len(sizes))
	for i, k := range sizes {
		biggest := 0
		for shard, n := range k.Fields {
			if n > k.Fields[biggest] {
				biggest = shard
			}
		}
		for j, key := range []string{
			k.Scope.RequestShardKey(biggest), k.Scope.IndexKey(reservation.SendPending), k.Scope.IndexKey(reservation.ReservationExpiry),
		} {
			cmds[i][j] = pipe.MemoryUsage(ctx, key, memorySamples)
		}
	}
	_, _ = pipe.Exec(ctx) // each command has its own error
	for i := range sizes {
		for j, into := range []*int64{&sizes[i].ShardBytes, &sizes[i].PendingBytes, &sizes[i].ExpiryBytes} {
			err := cmds[i][j].Err()
			*into = cmds[i][j].Val()                                   // 0 for a key that is not there
			if err != nil && err != redis.Nil && sizes[i].Err == nil { //nolint:errorlint // the library returns it as it is
				sizes[i].Err = fmt.Errorf("measure the memory of %s: %w", sizes[i].Scope, err)
			}
		}
	}
}
