package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Create makes the version, or completes one that was begun with the same
// values. Values that differ are a [*pgstore.VersionDiffersError]; keys of a
// confirmed bucket that are missing, a [*ConfigMissingError].
func (m *Manager) Create(ctx context.Context, spec Spec, actor string) error {
	return m.CreateAll(ctx, []Spec{spec}, actor, nil)
}

// CreateAll makes several versions, or completes those that were begun.
// Everything is validated before anything is made. The versions of one activity
// belong together, since it has one current version: that is raised only once
// all of them are open. An activity that fails holds up no other; the error
// names each. done is told each version that is open, and may be nil.
func (m *Manager) CreateAll(ctx context.Context, specs []Spec, actor string, done func(Spec)) error {
	if err := validateAll(specs); err != nil {
		return err
	}
	var errs []error
	for _, group := range byActivity(specs) {
		if err := m.createActivity(ctx, group, actor, done); err != nil {
			errs = append(errs, fmt.Errorf("activity %s: %w", group[0].ActivityID, err))
		}
	}
	return errors.Join(errs...)
}

func validateAll(specs []Spec) error {
	var errs []error
	seen := map[string]bool{}
	for _, s := range specs {
		if err := s.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", s, err))
		}
		if seen[s.String()] {
			errs = append(errs, fmt.Errorf("%s: is described twice", s))
		}
		seen[s.String()] = true
	}
	return errors.Join(errs...)
}

// byActivity groups the descriptions, in the order in which activities appear.
func byActivity(specs []Spec) [][]Spec {
	var groups [][]Spec
	for _, s := range specs {
		i := slices.IndexFunc(groups, func(g []Spec) bool { return g[0].ActivityID == s.ActivityID })
		if i < 0 {
			groups = append(groups, nil)
			i = len(groups) - 1
		}
		groups[i] = append(groups[i], s)
	}
	return groups
}

func (m *Manager) createActivity(ctx context.Context, specs []Spec, actor string, done func(Spec)) error {
	current := pgstore.Version{Version: -1}
	for _, spec := range specs {
		version, buckets, err := m.describe(ctx, spec)
		if err != nil {
			return err
		}
		if err := m.Registry.RegisterVersion(ctx, version, buckets, actor); err != nil {
			return err
		}
		if err := m.Registry.CreateReferenceStock(ctx, version); err != nil {
			return err
		}
		if err := m.open(ctx, version, actor); err != nil {
			return err
		}
		if done != nil {
			done(spec)
		}
		if version.Version > current.Version || version.Version == current.Version && version.EndsAt.After(current.EndsAt) {
			current = version
		}
	}
	return m.setCurrent(ctx, current)
}

// describe is the version as the registry takes it.
func (m *Manager) describe(ctx context.Context, spec Spec) (pgstore.Version, []pgstore.Bucket, error) {
	if spec.StartsRelative || spec.EndsRelative {
		begun, err := m.Registry.Scopes(ctx, pgstore.ScopeFilter{ActivityID: spec.ActivityID, SKUID: spec.SKUID, Version: &spec.Version})
		if err != nil {
			return pgstore.Version{}, nil, err
		}
		if len(begun) > 0 && spec.StartsRelative {
			spec.StartsAt = begun[0].StartsAt
		}
		if len(begun) > 0 && spec.EndsRelative {
			spec.EndsAt = begun[0].EndsAt
		}
	}
	version, buckets := spec.registration()
	return version, buckets, nil
}

// registration is what is registered of the description.
func (s Spec) registration() (pgstore.Version, []pgstore.Bucket) {
	version := pgstore.Version{
		ActivityID: s.ActivityID, SKUID: s.SKUID, Version: s.Version, Total: s.Total, Buckets: s.Buckets,
		StartsAt: s.StartsAt.Truncate(time.Millisecond), EndsAt: s.EndsAt.Truncate(time.Millisecond),
		RetentionUntil: s.EndsAt.Add(s.Retention).Truncate(time.Millisecond),
	}
	var buckets []pgstore.Bucket
	for i, units := range reservation.Allocation(s.Total, s.Buckets) {
		buckets = append(buckets, pgstore.Bucket{ID: int64(i), Initial: units, State: pgstore.ScopePrepared})
	}
	return version, buckets
}

// open writes a registered version to Redis and lets gateways sell it.
func (m *Manager) open(ctx context.Context, version pgstore.Version, actor string) error {
	if err := m.provision(ctx, version); err != nil {
		return err
	}
	return m.activate(ctx, bucketsOf(version), actor)
}

func bucketsOf(v pgstore.Version) []reservation.Scope {
	return Spec{ActivityID: v.ActivityID, SKUID: v.SKUID, Version: v.Version, Buckets: v.Buckets}.Scopes()
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

// setCurrent makes the version the one in force for its activity, unless a
// newer one is.
func (m *Manager) setCurrent(ctx context.Context, v pgstore.Version) error {
	key := reservation.CurrentVersionKey(v.ActivityID)
	if err := m.Redis.RaiseVersion(ctx, key, v.Version, v.EndsAt.Add(currentVersionKept)); err != nil {
		return fmt.Errorf("set the current version of activity %s: %w", v.ActivityID, err)
	}
	return nil
}
