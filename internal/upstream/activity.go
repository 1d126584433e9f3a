package upstream

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// schemaVersion is that of the reservations written here.
const schemaVersion = 1

// Activity is what is sold: one version of one SKU, over some buckets.
type Activity struct {
	ActivityID string
	SKUID      string
	Version    int64
	Buckets    int64 // at least 1
	Total      int64 // units over all buckets
}

// Scope is the bucket of the given number.
func (a Activity) Scope(bucket int64) reservation.Scope {
	return reservation.Scope{ActivityID: a.ActivityID, SKUID: a.SKUID, Version: a.Version, Bucket: bucket}
}

// Scopes are all buckets.
func (a Activity) Scopes() []reservation.Scope {
	scopes := make([]reservation.Scope, max(a.Buckets, 1))
	for i := range scopes {
		scopes[i] = a.Scope(int64(i))
	}
	return scopes
}

// ScopeOf is the bucket that the user keeps (spec §2).
func (a Activity) ScopeOf(userID string) reservation.Scope {
	return a.Scope(reservation.BucketOf(a.ActivityID, a.SKUID, userID, a.Buckets))
}

// Execer runs one statement; pgx connections and pools satisfy it.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Open makes the activity's keys in Redis, ACTIVE from now on for the given
// time and kept for as long again, and its row in shop.stock. It registers
// nothing with the daemon: that is `reconciler scope create`.
func (a Activity) Open(ctx context.Context, scripts *lua.Runner, db Execer, duration time.Duration) error {
	now := time.Now()
	batch := scripts.Batch()
	initial := reservation.Allocation(a.Total, a.Buckets)
	scopes := a.Scopes()
	results := make([]*lua.Result[lua.ProvisionReply], len(scopes))
	for i, s := range scopes {
		results[i] = batch.Provision(s, lua.ProvisionArgs{
			State: lua.StateActive, StartsAtMS: now.Add(-time.Minute).UnixMilli(),
			EndsAtMS: now.Add(duration).UnixMilli(), RetentionUntilMS: now.Add(2 * duration).UnixMilli(),
			SchemaVersion: schemaVersion, Initial: initial[i],
		})
	}
	if err := batch.Run(ctx); err != nil {
		return fmt.Errorf("open activity %s: %w", a.ActivityID, err)
	}
	var errs []error
	for i, result := range results {
		reply, err := result.Get()
		if err == nil && reply.Code != lua.ProvisionCreated {
			err = fmt.Errorf("provision %s: %s", scopes[i], reply.Code)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("open activity %s: %w", a.ActivityID, err)
	}
	return a.Stock(ctx, db)
}

// Stock makes the activity's row in shop.stock.
func (a Activity) Stock(ctx context.Context, db Execer) error {
	_, err := db.Exec(ctx, `INSERT INTO shop.stock (activity_id, sku_id, activity_version, total) VALUES ($1, $2, $3, $4)`,
		a.ActivityID, a.SKUID, a.Version, a.Total)
	if err != nil {
		return fmt.Errorf("put %d units of %s on sale: %w", a.Total, a.ActivityID, err)
	}
	return nil
}
