package daemon

import (
	"context"
	"log/slog"
	"sync"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
)

// identity compares PostgreSQL with what passes before met (protocol §1). What
// PostgreSQL itself remembers goes back with a restored volume, and this
// process's memory with a restart, so Redis keeps a sighting too.
type identity struct {
	postgres *pgstore.Store
	redis    *redisstore.Store
	observes bool // then nothing is written to Redis
	log      *slog.Logger

	mu   sync.Mutex
	name string // of the server and database as first met: what the sighting is kept under
}

// check compares, and reports whether releases are halted: PostgreSQL is
// another one or went back in time, and what was lost with it has not been
// fenced again. A Redis that cannot be asked for its sighting is one witness less.
func (i *identity) check(ctx context.Context) (halted bool, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.name == "" {
		if i.name, err = i.postgres.ServerName(ctx); err != nil {
			return false, err
		}
	}
	var before []pgstore.Identity
	sighting, err := i.redis.Sighting(ctx, i.name)
	if err == nil && sighting != "" {
		var seen pgstore.Identity
		if seen, err = pgstore.ParseIdentity(sighting); err == nil {
			before = append(before, seen)
		}
	}
	if err != nil {
		i.log.Debug("the sighting of PostgreSQL in Redis is not to be had", "error", err)
	}
	check, err := i.postgres.CheckIdentity(ctx, before...)
	if err != nil {
		return false, err
	}
	if !i.observes {
		if err := i.redis.SetSighting(ctx, i.name, check.Identity.Encode()); err != nil {
			i.log.Debug("the sighting of PostgreSQL was not kept in Redis", "error", err)
		}
	}
	return check.Halted, nil
}
