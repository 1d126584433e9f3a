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
