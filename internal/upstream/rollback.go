package upstream

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// Dump is what a scope's keys held at one time.
type Dump struct {
	Scope    reservation.Scope
	values   map[string]string // by key, as DUMP gives them; without those that were missing
	expireAt map[string]int64  // milliseconds since 1970
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
	return nil
}

// Rollback dumps a scope's keys when one share of the requests has been made
// and puts them back at another, as a failover does that lost the writes between.
type Rollback struct {
	Scope  reservation.Scope
	DumpAt float64 // share of the requests, 0 to 1
	LoseAt float64
	Least  int // reservations that are to be lost: it waits for them

	dump *Dump
	made map[string]bool // the reservations at the time of the dump
	err  error           // what is left of it is not done then

	mu   sync.Mutex
	lost *Lost
}

// Lost is what a rollback took.
type Lost struct {
	Reserved, ReservedAfter int64 // units reserved before and after
	// Reservations were made since the dump: all their keys are gone.
	Reservations map[string]bool
}

// Lost is what the rollback took; nil before it happened.
func (r *Rollback) Lost() *Lost {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lost
}

// During runs do while the rollback does not happen.
func (r *Rollback) During(do func() error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return do()
}

// advance dumps or restores when its time has come.
func (r *Rollback) advance(ctx context.Context, s *Sale, done float64) {
	if r.err != nil || r.Lost() != nil {
		return
	}
	s.paging.Lock()
	defer s.paging.Unlock()
	sold := s.ledger.Of(r.Scope)
	switch {
	case r.dump == nil && done >= r.DumpAt:
		r.dump, r.err = s.Gateway.DumpScope(ctx, r.Scope, sold)
		r.made = map[string]bool{}
		for _, one := range sold {
			r.made[one.Reservation.ID] = true
		}
	case r.dump != nil && done >= r.LoseAt && len(sold)-len(r.made) >= r.Least:
		r.err = r.lose(ctx, s.Gateway, sold)
	}
}

func (r *Rollback) lose(ctx context.Context, g *Gateway, sold []Sold) (err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	lost := &Lost{Reservations: map[string]bool{}}
	for _, one := range sold {
		if id := one.Reservation.ID; !r.made[id] {
			lost.Reservations[id] = true
		}
	}
	if lost.Reserved, err = g.reserved(ctx, r.Scope); err != nil {
		return err
	}
	if err := g.RestoreScope(ctx, r.dump, sold); err != nil {
		return err
	}
	r.lost = lost
	lost.ReservedAfter, err = g.reserved(ctx, r.Scope)
	return err
}

func (g *Gateway) reserved(ctx context.Context, s reservation.Scope) (int64, error) {
	n, err := g.Redis.HGet(ctx, s.StockKey(), "reserved").Int64()
	if err != nil {
		return 0, fmt.Errorf("read the stock of %s: %w", s, err)
	}
	return n, nil
}
