package upstream

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// Dump is what a scope's keys held at one time.
type Dump struct {
	Scope    reservation.Scope
	values   map[string]string // by key, as DUMP gives them; without those that were missing
	expireAt map[string]int64  // milliseconds since 1970
	restored bool
}

// scopeKeys are the keys of a scope, those of the given reservations among
// them. Nobody else's reservations are known: nothing here scans.
func scopeKeys(s reservation.Scope, sold []Sold) []string {
	keys := []string{
		s.MetaKey(), s.StockKey(), s.SoldOutKey(),
		s.IndexKey(reservation.SendPending), s.IndexKey(reservation.ReservationExpiry),
	}
	for shard := range reservation.RequestShards {
		keys = append(keys, s.RequestShardKey(shard))
	}
	for _, one := range sold {
		keys = append(keys, s.ReservationKey(one.Reservation.ID), s.UserKey(one.Reservation.UserID))
	}
	return keys
}

// DumpScope keeps what the scope's keys hold now.
func (g *Gateway) DumpScope(ctx context.Context, s reservation.Scope, sold []Sold) (*Dump, error) {
	keys := scopeKeys(s, sold)
	dumps := make([]*redis.StringCmd, len(keys))
	times := make([]*redis.DurationCmd, len(keys))
	_, err := g.Redis.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		for i, key := range keys {
			dumps[i], times[i] = pipe.Dump(ctx, key), pipe.PExpireTime(ctx, key)
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) { // Nil is a key that is not there
		return nil, fmt.Errorf("dump %s: %w", s, err)
	}
	d := &Dump{Scope: s, values: map[string]string{}, expireAt: map[string]int64{}}
	for i, key := range keys {
		if value, err := dumps[i].Result(); err == nil {
			d.values[key] = value
			d.expireAt[key] = times[i].Val().Milliseconds()
		}
	}
	return d, nil
}

// RestoreScope puts the scope back to the dump, as a failover does that lost
// every write since. sold are all reservations made until now: the keys of
// those that the dump does not know vanish.
func (g *Gateway) RestoreScope(ctx context.Context, d *Dump, sold []Sold) error {
	_, err := g.Redis.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		for _, key := range scopeKeys(d.Scope, sold) {
			value, known := d.values[key]
			if !known {
				pipe.Del(ctx, key)
				continue
			}
			pipe.Do(ctx, "restore", key, max(d.expireAt[key], 0), value, "replace", "absttl")
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("take %s back: %w", d.Scope, err)
	}
	d.restored = true
	return nil
}
