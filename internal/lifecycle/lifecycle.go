// Package lifecycle creates the scopes of an activity version and moves them
// between their states (protocol §4, "Scope lifecycle").
//
// Order makes it safe to run again after a crash: the registry first, then
// every bucket in Redis as PREPARED, then the registry's confirmation, then
// every bucket ACTIVE, and at last current_version. A bucket is provisioned
// only while the registry has never confirmed it: once confirmed, missing keys
// are a loss to be looked at, and never filled again.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

const (
	schemaVersion = 1
	// DefaultRetention is how long keys outlive the activity's end (spec §2).
	DefaultRetention = 7 * 24 * time.Hour
	// currentVersionKept is how long current_version outlives it.
	currentVersionKept = 30 * 24 * time.Hour
	// MinPerBucket is how few units a bucket of several may begin with: below,
	// buckets sell out one by one while others still have units.
	MinPerBucket = 10
)

// Manager creates and changes scopes.
type Manager struct {
	Redis    *redisstore.Store
	Registry *pgstore.Store
}

// Spec describes an activity version of one SKU.
type Spec struct {
	ActivityID string
	SKUID      string
	Version    int64
	Total      int64
	Buckets    int64
	StartsAt   time.Time
	EndsAt     time.Time
	Retention  time.Duration // after EndsAt
	AllowSmall bool          // permit fewer than MinPerBucket units in a bucket
}

// Scopes are the version's buckets.
func (s Spec) Scopes() []reservation.Scope {
	scopes := make([]reservation.Scope, s.Buckets)
	for i := range scopes {
		scopes[i] = reservation.Scope{ActivityID: s.ActivityID, SKUID: s.SKUID, Version: s.Version, Bucket: int64(i)}
	}
	return scopes
}

// Validate reports everything that is wrong with the description.
func (s Spec) Validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if err := (reservation.Scope{ActivityID: s.ActivityID, SKUID: s.SKUID, Version: s.Version}).Validate(); err != nil {
		errs = append(errs, err)
	}
	if s.Total < 0 || s.Total >= reservation.MaxNumber {
		wrong("total: %d is not in [0, 2^53)", s.Total)
	}
	if s.Buckets < 1 || s.Buckets > maxBuckets {
		wrong("buckets: %d is not in [1, %d]", s.Buckets, maxBuckets)
	} else if s.Buckets > 1 && s.Total/s.Buckets < MinPerBucket && !s.AllowSmall {
		wrong("buckets: %d units in %d buckets leave fewer than %d each, and users of an empty bucket are turned away while others have units: use fewer buckets, or --allow-small",
			s.Total, s.Buckets, MinPerBucket)
	}
	if !s.EndsAt.After(s.StartsAt) {
		wrong("ends: %s is not after the start %s", s.EndsAt.Format(time.RFC3339), s.StartsAt.Format(time.RFC3339))
	}
	if s.Retention <= 0 {
		wrong("retention: %s is not positive", s.Retention)
	}
	return errors.Join(errs...)
}

// maxBuckets is far beyond what a measured slot limit ever asks for.
const maxBuckets = 1024

// Create makes the version, or completes one that was begun with the same
// values. Values that differ are a [*pgstore.VersionDiffersError]; keys of a
// confirmed bucket that are missing, a [*ConfigMissingError].
func (m *Manager) Create(ctx context.Context, spec Spec, actor string) error {
	if err := spec.Validate(); err != nil {
		return err
	}
	version := pgstore.Version{
		ActivityID: spec.ActivityID, SKUID: spec.SKUID, Version: spec.Version, Total: spec.Total, Buckets: spec.Buckets,
		StartsAt: spec.StartsAt.Truncate(time.Millisecond), EndsAt: spec.EndsAt.Truncate(time.Millisecond),
		RetentionUntil: spec.EndsAt.Add(spec.Retention).Truncate(time.Millisecond),
	}
	var buckets []pgstore.Bucket
	for i, units := range reservation.Allocation(spec.Total, spec.Buckets) {
		buckets = append(buckets, pgstore.Bucket{ID: int64(i), Initial: units, State: pgstore.ScopePrepared})
	}
	if err := m.Registry.RegisterVersion(ctx, version, buckets, actor); err != nil {
		return err
	}
	if err := m.Registry.CreateReferenceStock(ctx, version); err != nil {
		return err
	}
	if err := m.provision(ctx, version); err != nil {
		return err
	}
	scopes := spec.Scopes()
	if err := m.activate(ctx, scopes, actor); err != nil {
		return err
	}
	return m.setCurrent(ctx, version)
}

// ConfigMissingError says that Redis lost what it once held of scopes.
type ConfigMissingError struct{ Scopes []reservation.Scope }

func (e *ConfigMissingError) Error() string {
	return fmt.Sprintf("config_missing: Redis has lost meta or stock of %v, which were confirmed before; they are never refilled: see `reconciler reconcile`", e.Scopes)
}

// provision writes meta and stock of the buckets that were never confirmed,
// and confirms them.
func (m *Manager) provision(ctx context.Context, version pgstore.Version) error {
	registered, err := m.registered(ctx, version)
	if err != nil {
		return err
	}
	batch := m.Redis.Writer().Batch()
	results := map[reservation.Scope]*lua.Result[lua.ProvisionReply]{}
	var confirmed, fresh []reservation.Scope
	for _, r := range registered {
		if !r.ConfirmedAt.IsZero() {
			confirmed = append(confirmed, r.Scope)
			continue
		}
		fresh = append(fresh, r.Scope)
		results[r.Scope] = batch.Provision(r.Scope, lua.ProvisionArgs{
			State: lua.StatePrepared, StartsAtMS: r.StartsAt.UnixMilli(), EndsAtMS: r.EndsAt.UnixMilli(),
			RetentionUntilMS: r.RetentionUntil.UnixMilli(), SchemaVersion: schemaVersion, Initial: r.Initial,
		})
	}
	if err := m.stillThere(ctx, confirmed); err != nil || len(fresh) == 0 {
		return err
	}
	if err := batch.Run(ctx); err != nil {
		return err
	}
	var errs []error
	for _, scope := range fresh {
		reply, err := results[scope].Get()
		if err == nil && reply.Code != lua.ProvisionCreated && reply.Code != lua.ProvisionSame {
			err = fmt.Errorf("provision %s: Redis says %s: keys of this scope that somebody else made; use a new version, or `reconciler scope import`", scope, reply.Code)
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return m.Registry.ConfirmScopes(ctx, fresh)
}

func (m *Manager) registered(ctx context.Context, v pgstore.Version) ([]pgstore.RegisteredScope, error) {
	return m.Registry.Scopes(ctx, pgstore.ScopeFilter{ActivityID: v.ActivityID, SKUID: v.SKUID, Version: &v.Version})
}

// stillThere checks that Redis holds scopes that were confirmed.
func (m *Manager) stillThere(ctx context.Context, scopes []reservation.Scope) error {
	var lost []reservation.Scope
	for i, s := range m.Redis.Snapshots(ctx, scopes) {
		switch {
		case s.Err != nil:
			return s.Err
		case s.State == "" || s.Initial == lua.Missing:
			lost = append(lost, scopes[i])
		}
	}
	if len(lost) > 0 {
		return &ConfigMissingError{lost}
	}
	return nil
}

// activate opens the buckets. One that is past PREPARED is left as it is:
// running a creation again must not resume what a person paused.
func (m *Manager) activate(ctx context.Context, scopes []reservation.Scope, actor string) error {
	var prepared []reservation.Scope
	for i, s := range m.Redis.Snapshots(ctx, scopes) {
		if s.Err != nil {
			return s.Err
		}
		if s.State == lua.StatePrepared {
			prepared = append(prepared, scopes[i])
		}
	}
	if err := m.setState(ctx, prepared, lua.StatePrepared, lua.StateActive); err != nil {
		return err
	}
	return m.noteStates(ctx, scopes, actor, "created")
}

// noteStates copies the states that Redis has into the registry.
func (m *Manager) noteStates(ctx context.Context, scopes []reservation.Scope, actor, reason string) error {
	byState := map[lua.State][]reservation.Scope{}
	for i, s := range m.Redis.Snapshots(ctx, scopes) {
		if s.Err != nil {
			return s.Err
		}
		byState[s.State] = append(byState[s.State], scopes[i])
	}
	for state, group := range byState {
		if err := m.Registry.SetScopeState(ctx, group, pgstore.ScopeState(state), actor, reason); err != nil {
			return err
		}
	}
	return nil
}

func (m *Manager) setState(ctx context.Context, scopes []reservation.Scope, expected, target lua.State) error {
	if len(scopes) == 0 {
		return nil
	}
	batch := m.Redis.Writer().Batch()
	results := make([]*lua.Result[lua.SetStateReply], len(scopes))
	for i, scope := range scopes {
		results[i] = batch.SetState(scope, lua.SetStateArgs{Expected: expected, Target: target})
	}
	if err := batch.Run(ctx); err != nil {
		return err
	}
	var errs []error
	for i, r := range results {
		reply, err := r.Get()
		if err == nil && reply.Code != lua.SetStateDone && reply.Code != lua.SetStateAlready {
			err = fmt.Errorf("set %s from %s to %s: Redis says %s, its state is %q", scopes[i], expected, target, reply.Code, reply.State)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// setCurrent makes the version the one in force for its activity, unless a
// newer one is.
func (m *Manager) setCurrent(ctx context.Context, v pgstore.Version) error {
	key := reservation.CurrentVersionKey(v.ActivityID)
	if err := m.Redis.RaiseVersion(ctx, key, v.Version, v.EndsAt.Add(currentVersionKept)); err != nil {
		return fmt.Errorf("set the current version of activity %s: %w", v.ActivityID, err)
	}
	return nil
}

// allowed are the states from which a person may move scopes to another
// (spec §2).
var allowed = map[lua.State][]lua.State{
	lua.StateActive: {lua.StatePaused, lua.StatePrepared},
	lua.StatePaused: {lua.StateActive},
	lua.StateClosed: {lua.StatePrepared, lua.StateActive, lua.StatePaused},
}

// Change moves the scopes to a state: in Redis first, then in the registry, so
// that a registry that is ahead always means that Redis went back
// (state_regressed). Scopes that are there already are left alone; when one
// may not go there, none is moved.
func (m *Manager) Change(ctx context.Context, scopes []reservation.Scope, target lua.State, actor, reason string) error {
	byState := map[lua.State][]reservation.Scope{}
	var errs []error
	for i, s := range m.Redis.Snapshots(ctx, scopes) {
		switch {
		case s.Err != nil:
			errs = append(errs, s.Err)
		case s.State == "":
			errs = append(errs, &ConfigMissingError{[]reservation.Scope{scopes[i]}})
		case s.State == target:
		case !slices.Contains(allowed[target], s.State):
			errs = append(errs, fmt.Errorf("scope %s is %s and cannot become %s", scopes[i], s.State, target))
		default:
			byState[s.State] = append(byState[s.State], scopes[i])
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for state, group := range byState {
		if err := m.setState(ctx, group, state, target); err != nil {
			return err
		}
	}
	return m.Registry.SetScopeState(ctx, scopes, pgstore.ScopeState(target), actor, reason)
}

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
