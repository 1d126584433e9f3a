package fencer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// Kinds of the tasks that halt releases. The open task is the halt: a person
// who resolves it lets releases go on.
const (
	TaskReleaseStorm    = "release_storm"    // a scope released more than max_release
	TaskPostgresChanged = "postgres_changed" // another PostgreSQL, or one that went back in time
	TaskFenceNotReady   = "fence_not_ready"  // the order trigger is not in place everywhere
)

// MaxRelease bounds the releases of one scope in a window: a wrong consumer
// group or topic must not cancel a sale (protocol §3).
type MaxRelease struct {
	Percent float64       // of what the scope had reserved when the window began
	Min     int64         // always allowed
	Window  time.Duration // its length, on PostgreSQL's clock
}

// allows is the number of fences that a scope may have in one window.
// Reserved units at the window's start are those reserved now and those
// released since.
func (m MaxRelease) allows(reserved, fenced int64) int64 {
	return max(m.Min, int64(float64(reserved+fenced)*m.Percent/100))
}

// NotReadyError says that nothing may be released now, in any scope.
type NotReadyError struct {
	Kind string // of the task that says so
	Err  error
}

func (e *NotReadyError) Error() string { return e.Kind + ": " + e.Err.Error() }

// Unwrap is the reason.
func (e *NotReadyError) Unwrap() error { return e.Err }

// ClaimStore is what the gate asks PostgreSQL.
type ClaimStore interface {
	pass.Claims
	// ReadyToRelease reports a *[NotReadyError] unless the fence trigger is in
	// place and enabled on every order table, and this is the PostgreSQL of the
	// passes before, with nothing undone.
	ReadyToRelease(ctx context.Context) error
	// Fence claims reservations as FENCED; whoever claimed first wins.
	Fence(ctx context.Context, reason string, requests []reservation.FenceRequest) ([]reservation.FenceResult, error)
	// ReleaseUse says, for each scope, how many claims the daemon fenced in the
	// window, and whether its releases are halted by an open task.
	ReleaseUse(ctx context.Context, scopes []reservation.Scope, window time.Duration) (map[reservation.Scope]ReleaseUse, error)
}

// ReleaseUse is how much of its budget a scope has used.
type ReleaseUse struct {
	Fenced int64 // in the window, and since the last halt was lifted
	Halted bool  // a release_storm task is open
}

// Stock reads how many units scopes have reserved, one reading for each.
type Stock interface {
	Reserved(ctx context.Context, scopes []reservation.Scope) []Reserved
}

// Reserved is how many units a scope has reserved, or why that is not known.
type Reserved struct {
	Units int64
	Err   error
	// Broken: Redis answered, and what it holds is no stock. No retry helps.
	Broken bool
}

// TaskInvariantBroken asks a person about a scope whose stock is not one.
const TaskInvariantBroken = "invariant_broken"

// Gate is the only way to a fence: it holds back what max_release or a halt
// forbids, and fences the rest.
type Gate struct {
	Claims ClaimStore
	Stock  Stock
	Tasks  pass.Tasks
	Max    MaxRelease // once it is in use, changed by [Gate.SetMax]

	// One call counts and fences at a time: fencer and compensator share the
	// budget. Instances beside each other, which the lease keeps from working,
	// could each count before the other fences.
	mu sync.Mutex
}

// Ready says whether anything may be released now, fenced before or not.
func (g *Gate) Ready(ctx context.Context) error { return g.Claims.ReadyToRelease(ctx) }

// Fenced sorts the cases of one Fence call by what became of them.
type Fenced struct {
	Won     []pass.Case // the fence stands: release them
	Lost    []pass.Case // another claim was first: decide again
	Unknown []pass.Case // not decided: ask again later
	Halted  []pass.Case // held back
}

// SetMax changes the bound from the next call of Fence on.
func (g *Gate) SetMax(m MaxRelease) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.Max = m
}

// Fence fences the cases, as far as each scope's budget goes. The budget is
// counted from PostgreSQL right before, so a restart gives no new one.
func (g *Gate) Fence(ctx context.Context, cases []pass.Case, tally *pass.Tally) Fenced {
	g.mu.Lock()
	defer g.mu.Unlock()
	var fenced Fenced
	admitted, err := g.admit(ctx, cases, &fenced, tally)
	if err != nil {
		tally.Failed(err)
		fenced.Unknown = append(fenced.Unknown, cases...)
		return fenced
	}
	// One call for each reason: it is written into the claim.
	byReason := map[string][]pass.Case{}
	for _, c := range admitted {
		byReason[c.Action.Cause] = append(byReason[c.Action.Cause], c)
	}
	for reason, group := range byReason {
		g.fence(ctx, reason, group, &fenced, tally)
	}
	tally.Did(pass.DoneFenced, len(fenced.Won))
	tally.Did(pass.DoneFenceLost, len(fenced.Lost))
	tally.Did(pass.DoneHalted, len(fenced.Halted))
	return fenced
}

// admit holds back what exceeds a scope's budget, and opens the task that is
// the halt.
func (g *Gate) admit(ctx context.Context, cases []pass.Case, fenced *Fenced, tally *pass.Tally) ([]pass.Case, error) {
	var scopes []reservation.Scope
	for _, c := range cases {
		if s := c.Member().Scope; !slices.Contains(scopes, s) {
			scopes = append(scopes, s)
		}
	}
	use, err := g.Claims.ReleaseUse(ctx, scopes, g.Max.Window)
	if err != nil {
		return nil, fmt.Errorf("read how much was released lately: %w", err)
	}
	left := g.budgets(ctx, scopes, use, tally)
	var admitted []pass.Case
	storm := pass.NewTally()
	for _, c := range g.undecided(ctx, cases, left, fenced, tally) {
		s := c.Member().Scope
		switch budget, known := left[s]; {
		case !known:
			fenced.Unknown = append(fenced.Unknown, c)
		case budget > 0:
			left[s]--
			admitted = append(admitted, c)
		default:
			fenced.Halted = append(fenced.Halted, c)
			if !use[s].Halted {
				storm.Task(s, TaskReleaseStorm, "max_release", c.Member().ID)
			}
		}
	}
	// It is written before anything else happens, and not at the pass's end: a
	// person may have lifted it by then.
	pass.Finish(ctx, g.Tasks, storm)
	tally.Failed(storm.Err())
	return admitted, nil
}

// undecided gives the cases that need a fence. Where a scope has more of them
// than budget, those that were decided since their evidence was read go to
// fenced, and take none of it: another worker or instance was faster.
func (g *Gate) undecided(ctx context.Context, cases []pass.Case, left map[reservation.Scope]int64, fenced *Fenced, tally *pass.Tally) []pass.Case {
	wanted := map[reservation.Scope]int64{}
	for _, c := range cases {
		wanted[c.Member().Scope]++
	}
	short := func(c pass.Case) bool {
		budget, known := left[c.Member().Scope]
		return known && wanted[c.Member().Scope] > budget
	}
	var ids []string
	for _, c := range cases {
		if short(c) {
			ids = append(ids, c.Member().ID)
		}
	}
	if len(ids) == 0 {
		return cases
	}
	orders := pass.ReadOrders(ctx, g.Claims, ids, tally)
	return slices.DeleteFunc(slices.Clone(cases), func(c pass.Case) bool {
		if !short(c) {
			return false
		}
		switch state := orders.Of(c.Member()).State; state {
		case reservation.OrderNone:
			return false
		case reservation.OrderUnknown:
			fenced.Unknown = append(fenced.Unknown, c)
		case reservation.OrderFenced:
			fenced.Won = append(fenced.Won, c)
		default:
			fenced.Lost = append(fenced.Lost, c)
		}
		return true
	})
}

// budgets is how many fences each scope has left; a scope whose stock cannot
// be read has none and is not in it, and holds up no other.
func (g *Gate) budgets(ctx context.Context, scopes []reservation.Scope, use map[reservation.Scope]ReleaseUse, tally *pass.Tally) map[reservation.Scope]int64 {
	left := map[reservation.Scope]int64{}
	for i, reserved := range g.Stock.Reserved(ctx, scopes) {
		s := scopes[i]
		switch {
		case use[s].Halted:
			left[s] = 0
		case reserved.Err != nil:
			tally.Failed(fmt.Errorf("how much %s has reserved: %w", s, reserved.Err))
			if reserved.Broken {
				tally.Task(s, TaskInvariantBroken, "stock_unreadable", "")
			}
		default:
			left[s] = g.Max.allows(reserved.Units, use[s].Fenced) - use[s].Fenced
		}
	}
	return left
}

func (g *Gate) fence(ctx context.Context, reason string, cases []pass.Case, fenced *Fenced, tally *pass.Tally) {
	requests := make([]reservation.FenceRequest, len(cases))
	for i, c := range cases {
		requests[i] = reservation.FenceRequest{ID: c.Member().ID, Scope: c.Member().Scope}
	}
	results, err := g.Claims.Fence(ctx, reason, requests)
	if err != nil {
		tally.Failed(fmt.Errorf("fence %d reservations (%s): %w", len(requests), reason, err))
		if notReady, ok := errors.AsType[*NotReadyError](err); ok {
			tally.Task(reservation.Scope{}, notReady.Kind, notReady.Kind, "")
		}
	}
	byID := make(map[string]reservation.FenceResult, len(results))
	for _, r := range results {
		byID[r.ID] = r
	}
	for _, c := range cases {
		switch r := byID[c.Member().ID]; { // the zero result is not known
		case !r.Known:
			fenced.Unknown = append(fenced.Unknown, c)
		case r.Outcome == reservation.OutcomeFenced:
			// Won now, or by an earlier run that died before it compensated.
			fenced.Won = append(fenced.Won, c)
		default:
			fenced.Lost = append(fenced.Lost, c)
		}
	}
}
