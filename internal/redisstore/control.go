package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// sightingKept is how long a sighting of PostgreSQL outlives its last renewal.
const sightingKept = 30 * 24 * time.Hour

func sightingKey(server string) string { return "seckill:reconciler:postgres:" + server }

// Sighting is what was last kept of the PostgreSQL server of that name; empty
// if nothing was.
func (s *Store) Sighting(ctx context.Context, server string) (string, error) {
	bound, cancel := s.bound(ctx)
	defer cancel()
	text, err := s.reading.Get(bound, sightingKey(server)).Result()
	if errors.Is(err, redis.Nil) {
		return "", nil
	}
	return text, err
}

// SetSighting keeps what was seen of PostgreSQL outside of it.
func (s *Store) SetSighting(ctx context.Context, server, sighting string) error {
	bound, cancel := s.bound(ctx)
	defer cancel()
	return s.reading.Set(bound, sightingKey(server), sighting, sightingKept).Err()
}

// raiseVersion sets the key unless it holds a higher number already. The key
// has no hash tag, so that it is in no scope's slot: it has its own script.
var raiseVersion = redis.NewScript(`
local current = redis.call('GET', KEYS[1])
if current and (tonumber(current) or 0) > tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PXAT', ARGV[2])
return 1
`)

// CurrentVersion is the version in force of an activity, if one is.
func (s *Store) CurrentVersion(ctx context.Context, activityID string) (version int64, known bool, err error) {
	bound, cancel := s.bound(ctx)
	defer cancel()
	key := reservation.CurrentVersionKey(activityID)
	text, err := s.reading.Get(bound, key).Result()
	if errors.Is(err, redis.Nil) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("read the current version of activity %s: %w", activityID, err)
	}
	if version, err = reservation.ParseNumber(text); err != nil {
		return 0, false, fmt.Errorf("read %s: %w", key, err)
	}
	return version, true, nil
}

// RaiseVersion makes version the value of key, unless a higher one is there.
// Running it twice does no harm. The key expires at until.
func (s *Store) RaiseVersion(ctx context.Context, key string, version int64, until time.Time) error {
	bound, cancel := s.bound(ctx)
	defer cancel()
	return raiseVersion.Run(bound, s.reading, []string{key}, strconv.FormatInt(version, 10), until.UnixMilli()).Err()
}
