package redisstore

import (
	"context"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// shardPage is how many fields of a request shard one HSCAN asks for.
const shardPage = 500

// EachReleased goes through the reservations of a scope that are RELEASED, by
// the request results of its 256 shards: they outlive the release, until the
// scope's retention. Pages are handed to do as they come. A shard that is being
// written meanwhile may show a field twice, never miss one that stays.
func (s *Store) EachReleased(ctx context.Context, scope reservation.Scope, do func(ctx context.Context, ids []string) error) error {
	for shard := range reservation.RequestShards {
		key := scope.RequestShardKey(shard)
		for cursor, first := uint64(0), true; first || cursor != 0; first = false {
			bound, cancel := s.bound(ctx)
			fields, next, err := s.reading.HScan(bound, key, cursor, "", shardPage).Result()
			cancel()
			if err != nil {
				return fmt.Errorf("read the request results %s: %w", key, err)
			}
			cursor = next
			released, err := s.released(ctx, scope, accepted(fields))
			if err != nil {
				return err
			}
			if len(released) > 0 {
				if err := do(ctx, released); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// accepted are the reservation ids of request results with code 0, which read
// code|reservation_id|remaining|status|user_id (spec §2).
func accepted(fields []string) []string {
	var ids []string
	for i := 1; i < len(fields); i += 2 {
		parts := strings.Split(fields[i], "|")
		if len(parts) == 5 && parts[0] == "0" && reservation.ValidateID(parts[1]) == nil {
			ids = append(ids, parts[1])
		}
	}
	return ids
}

func (s *Store) released(ctx context.Context, scope reservation.Scope, ids []string) ([]string, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	pipe := s.reading.Pipeline()
	statuses := make([]*redis.StringCmd, len(ids))
	for i, id := range ids {
		statuses[i] = pipe.HGet(bound, scope.ReservationKey(id), "status")
	}
	_, _ = pipe.Exec(bound) // each command has its own error
	var released []string
	for i, id := range ids {
		status, err := statuses[i].Result()
		if err != nil && err != redis.Nil && !isWrongType(err) { //nolint:errorlint // a reply, never wrapped
			return nil, fmt.Errorf("read the status of %s of %s: %w", id, scope, err)
		}
		if reservation.Status(status) == reservation.StatusReleased {
			released = append(released, id)
		}
	}
	return released, nil
}
