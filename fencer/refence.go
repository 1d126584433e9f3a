package fencer

import (
	"context"
	"fmt"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// TaskOrderAfterRelease asks a person about a released unit whose order exists
// all the same: its fence was lost with PostgreSQL's newest commits, and a late
// message was faster than the new one.
const TaskOrderAfterRelease = "order_after_release"

// Released finds the reservations of a scope that are RELEASED in Redis.
type Released interface {
	EachReleased(ctx context.Context, scope reservation.Scope, do func(ctx context.Context, ids []string) error) error
}

// Refencing sets fences again that a changed PostgreSQL may have lost. They are
// no releases and need no budget of max_release.
type Refencing interface {
	pass.Claims
	Refence(ctx context.Context, requests []reservation.FenceRequest) ([]reservation.FenceResult, error)
}

// ChangedPostgres is the halt that a changed PostgreSQL sets.
type ChangedPostgres interface {
	// ChangedTasks are the open tasks postgres_changed.
	ChangedTasks(ctx context.Context) ([]int64, error)
	// LiftChanged ends those tasks: what they asked for is done.
	LiftChanged(ctx context.Context, tasks []int64, refenced int) error
}

// Refencer lifts the halt of a changed PostgreSQL (protocol §1). Claims may have
// been lost whose effects Redis already shows, so it fences every RELEASED
// reservation of the live versions again. Where an order was faster, a person
// is asked; then releases go on.
type Refencer struct {
	Observe  bool
	Claims   Refencing
	Changed  ChangedPostgres
	Released Released
	Scopes   pass.Scopes
	Tasks    pass.Tasks
}

// DoneRefenced counts reservations whose fence is in force again.
const DoneRefenced = "refenced"

// Pass does nothing unless a task postgres_changed is open. The tasks that were
// open at its start end only if every scope was gone through whole: a change
// that comes meanwhile has a task of its own.
func (r *Refencer) Pass(ctx context.Context) (*pass.Tally, error) {
	tally := pass.NewTally()
	tasks, err := r.Changed.ChangedTasks(ctx)
	if err != nil || len(tasks) == 0 || r.Observe {
		return tally, err
	}
	scopes, err := pass.ListScopes(ctx, r.Scopes, tally)
	if err != nil {
		return tally, err
	}
	held, err := r.Scopes.Held(ctx)
	if err != nil {
		return tally, fmt.Errorf("which scopes are held: %w", err)
	}
	for scope := range held {
		tally.Failed(fmt.Errorf("scope %s is held: its released reservations cannot be fenced again, and releases stay halted everywhere", scope))
	}
	for _, scope := range scopes {
		tally.Failed(r.refence(ctx, scope, tally))
	}
	pass.Finish(ctx, r.Tasks, tally)
	if err := tally.Err(); err != nil {
		return tally, err
	}
	if err := r.Changed.LiftChanged(ctx, tasks, tally.Done[DoneRefenced]); err != nil {
		return tally, fmt.Errorf("lift the halt of the changed PostgreSQL: %w", err)
	}
	return tally, nil
}

func (r *Refencer) refence(ctx context.Context, scope reservation.Scope, tally *pass.Tally) error {
	return r.Released.EachReleased(ctx, scope, func(ctx context.Context, ids []string) error {
		requests := make([]reservation.FenceRequest, len(ids))
		for i, id := range ids {
			requests[i] = reservation.FenceRequest{ID: id, Scope: scope}
		}
		results, err := r.Claims.Refence(ctx, requests)
		if err != nil {
			return fmt.Errorf("fence the released reservations of %s again: %w", scope, err)
		}
		var unknown []string
		for _, result := range results {
			tally.Seen++
			switch {
			case !result.Known:
				unknown = append(unknown, result.ID)
			case result.Outcome == reservation.OutcomeOrder:
				tally.Task(scope, TaskOrderAfterRelease, TaskPostgresChanged, result.ID)
			case result.Won:
				tally.Did(DoneRefenced, 1)
			}
		}
		return r.explain(ctx, scope, unknown, tally)
	})
}

// explain asks a person about those that are not fenced because their order
// stands beside a claim that excludes it. Any other one is held by somebody's
// open transaction, and the halt stays for another pass.
func (r *Refencer) explain(ctx context.Context, scope reservation.Scope, unknown []string, tally *pass.Tally) error {
	orders := pass.ReadOrders(ctx, r.Claims, unknown, tally)
	for _, id := range unknown {
		p := orders.Of(reservation.Member{Scope: scope, ID: id})
		if p.State != reservation.OrderContradictory {
			return fmt.Errorf("whether %s of %s is fenced is not known yet", id, scope)
		}
		tally.Task(scope, p.Cause, p.Cause, id)
	}
	return nil
}
