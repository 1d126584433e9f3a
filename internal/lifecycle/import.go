package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// ErrNotThere says that Redis holds nothing of a scope that is to be imported.
var ErrNotThere = errors.New("no complete meta and stock for this scope in Redis")

// Import registers a version that the shop's own tool made: its times, state
// and stock are read from Redis, and every bucket counts as confirmed.
func (m *Manager) Import(ctx context.Context, activityID, skuID string, number, buckets int64, actor string) error {
	if err := (reservation.Scope{ActivityID: activityID, SKUID: skuID, Version: number}).Validate(); err != nil {
		return err
	}
	if buckets < 1 || buckets > maxBuckets {
		return fmt.Errorf("buckets: %d is not in [1, %d]", buckets, maxBuckets)
	}
	spec := Spec{ActivityID: activityID, SKUID: skuID, Version: number, Buckets: buckets + 1}
	scopes := spec.Scopes()
	scopes, beyond := scopes[:buckets], scopes[buckets]
	switch s := m.Redis.Snapshots(ctx, []reservation.Scope{beyond})[0]; {
	case s.Err != nil:
		return s.Err
	case s.State != "":
		return fmt.Errorf("import: there is a bucket %d too: say by --buckets how many there are", buckets)
	}
	version := pgstore.Version{ActivityID: activityID, SKUID: skuID, Version: number, Buckets: buckets}
	var found []pgstore.Bucket
	for i, s := range m.Redis.Snapshots(ctx, scopes) {
		if s.Err != nil {
			return s.Err
		}
		if s.State == "" || slices.Contains([]int64{s.Initial, s.Available, s.Reserved}, lua.Missing) {
			return fmt.Errorf("import %s: %w", scopes[i], ErrNotThere)
		}
		if err := m.importTimes(ctx, scopes[i], &version); err != nil {
			return fmt.Errorf("import %s: %w", scopes[i], err)
		}
		version.Total += s.Initial
		found = append(found, pgstore.Bucket{ID: int64(i), Initial: s.Initial, State: pgstore.ScopeState(s.State), Confirmed: true})
	}
	return m.Registry.RegisterVersion(ctx, version, found, actor)
}

// importTimes takes the scope's times over into the version, whose buckets
// share them.
func (m *Manager) importTimes(ctx context.Context, scope reservation.Scope, version *pgstore.Version) error {
	times, err := m.Redis.ScopeTimes(ctx, scope)
	if errors.Is(err, redis.Nil) {
		return ErrNotThere
	}
	if err != nil {
		return err
	}
	starts, ends, retention := time.UnixMilli(times.StartsAtMS), time.UnixMilli(times.EndsAtMS), time.UnixMilli(times.RetentionUntilMS)
	same := starts.Equal(version.StartsAt) && ends.Equal(version.EndsAt) && retention.Equal(version.RetentionUntil)
	if first := version.StartsAt.IsZero(); !first && !same {
		return errors.New("its times differ from those of bucket 0: buckets of one version share them")
	}
	version.StartsAt, version.EndsAt, version.RetentionUntil = starts, ends, retention
	return nil
}
