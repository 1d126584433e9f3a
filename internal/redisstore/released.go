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
	return s.eachResultPage(ctx, scope, func(_ int, fields []string) error {
		var ids []string
		for i := 1; i < len(fields); i += 2 {
			if id, _ := acceptedResult(fields[i]); reservation.ValidateID(id) == nil {
				ids = append(ids, id)
			}
		}
		released, err := s.released(ctx, scope, ids)
		if err != nil || len(released) == 0 {
			return err
		}
		return do(ctx, released)
	})
}

// eachResultPage goes through the request results of a scope's 256 shards, in
// bounded pages of field, value, field, value and so on.
func (s *Store) eachResultPage(ctx context.Context, scope reservation.Scope, do func(shard int, fields []string) error) error {
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
			if err := do(shard, fields); err != nil {
				return err
			}
		}
	}
	return nil
}

// acceptedResult reads the request result 0|reservation_id|remaining|status|user_id
// (spec §2); empty for any other one.
func acceptedResult(value string) (id, user string) {
	parts := strings.Split(value, "|")
	if len(parts) != 5 || parts[0] != "0" {
		return "", ""
	}
	return parts[1], parts[4]
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
