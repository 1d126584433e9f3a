// Package compensator gives stock back, once: rows 3 to 5 of the table of
// protocol §3.
//
// A release is always the same three steps: fence the reservation in
// PostgreSQL, walk its status to RELEASE_PENDING or REJECTED, and run
// compensate.lua, which moves the unit and is idempotent. Each step leaves
// what the next pass needs to find it again, so a crash between any two of
// them loses nothing: the claim shows the fence, reservation_expiry holds the
// reservation.
//
// The fencer hands what it decides to release to [Compensator.Settle] in the
// same pass; [Compensator.Pass] finds what was left behind by a crash, a halt
// or a consumer that rejected.
package compensator

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// Gate is the way to a fence.
type Gate interface {
	Ready(ctx context.Context) error
	Fence(ctx context.Context, cases []pass.Case, tally *pass.Tally) fencer.Fenced
}

// Events tells gateways that units are available again (spec §5). It is best
// effort: a notice that is lost only leaves a local marker stale for a while.
type Events interface {
	PublishAvailable(ctx context.Context, scopes []reservation.Scope) error
}

// Compensator releases reservations whose claim allows it.
type Compensator struct {
	Actor  *pass.Actor
	Claims pass.Claims
	Gate   Gate
	Events Events
	Pager  pass.Pager
	Scopes pass.Scopes
	Tasks  pass.Tasks
	Policy func() reservation.Policy
	Limits pass.Limits

	walk pass.Walk
}

// maxDecisions bounds how often a pass decides one reservation: once, and
// twice more when its fence was lost (protocol §3). Then it waits.
const maxDecisions = 3

// Settle carries out decisions to release, compensate or confirm. What a lost
// fence turns into another decision is decided and carried out here too.
func (c *Compensator) Settle(ctx context.Context, cases []pass.Case, tally *pass.Tally) {
	if c.Actor.Observe || len(cases) == 0 {
		return
	}
	if movesStock(cases) {
		if err := c.Gate.Ready(ctx); err != nil {
			cases = c.hold(ctx, cases, err, tally)
		}
	}
	for decisions := 1; len(cases) > 0; decisions++ {
		var settled, releases []pass.Case
		for _, k := range cases {
			if k.Action.Verb == reservation.VerbRelease {
				releases = append(releases, k)
			} else {
				settled = append(settled, k)
			}
		}
		var lost []pass.Case
		if releases = c.Actor.Writable(ctx, releases, tally); len(releases) > 0 {
			fenced := c.Gate.Fence(ctx, releases, tally)
			settled = append(settled, fenced.Won...)
			c.Actor.Defer(ctx, append(fenced.Unknown, fenced.Halted...), tally)
			lost = fenced.Lost
		}
		c.publish(ctx, c.Actor.Carry(ctx, settled, tally), tally)
		if decisions == maxDecisions {
			c.Actor.Defer(ctx, lost, tally)
			return
		}
		cases = c.decideAgain(ctx, lost, tally)
	}
}

// hold defers every case that moves stock, since nothing may be released now,
// and returns the others. Releases that the claims in force already allow wait
// too: without the trigger a claim stops no order.
func (c *Compensator) hold(ctx context.Context, cases []pass.Case, err error, tally *pass.Tally) []pass.Case {
	tally.Failed(fmt.Errorf("nothing is released: %w", err))
	// A changed PostgreSQL opened its task where it was noticed. Opening it here
	// would set again what a person has just lifted.
	if notReady, ok := errors.AsType[*fencer.NotReadyError](err); ok && notReady.Kind == fencer.TaskFenceNotReady {
		tally.Task(reservation.Scope{}, notReady.Kind, notReady.Kind, "")
	}
	var held, others []pass.Case
	for _, k := range cases {
		if movesStock([]pass.Case{k}) {
			held = append(held, k)
		} else {
			others = append(others, k)
		}
	}
	tally.Did(pass.DoneHalted, len(held))
	c.Actor.Defer(ctx, held, tally)
	return others
}

func movesStock(cases []pass.Case) bool {
	return slices.ContainsFunc(cases, func(k pass.Case) bool {
		return k.Action.Verb == reservation.VerbRelease || k.Action.Verb == reservation.VerbCompensate
	})
}

// decideAgain reads P anew for reservations whose fence was lost: their order,
// or another claim, was there first.
func (c *Compensator) decideAgain(ctx context.Context, lost []pass.Case, tally *pass.Tally) []pass.Case {
	if len(lost) == 0 {
		return nil
	}
	ids := make([]string, len(lost))
	for i, k := range lost {
		ids[i] = k.Member().ID
	}
	orders := pass.ReadOrders(ctx, c.Claims, ids, tally)
	again := make([]pass.Case, len(lost))
	for i, k := range lost {
		k.Input.Orders = orders.Of(k.Member())
		again[i] = pass.Decide(k.Input, k.Index, tally)
	}
	tally.Seen -= len(lost) // the same members, seen before
	return again
}

// publish announces the scopes in which units became available.
func (c *Compensator) publish(ctx context.Context, done []pass.Case, tally *pass.Tally) {
	var scopes []reservation.Scope
	for _, k := range done {
		if s := k.Member().Scope; movesStock([]pass.Case{k}) && !slices.Contains(scopes, s) {
			scopes = append(scopes, s)
		}
	}
	if len(scopes) == 0 {
		return
	}
	if err := c.Events.PublishAvailable(ctx, scopes); err != nil {
		// Best effort: a gateway's marker ends by itself a moment later.
		tally.Did(pass.DoneNoticeLost, len(scopes))
	}
}

// Pass settles the due reservations in RELEASE_PENDING and REJECTED. It steps
// over the others, which are the fencer's.
func (c *Compensator) Pass(ctx context.Context) (*pass.Tally, error) {
	tally := pass.NewTally()
	scopes, err := pass.ListScopes(ctx, c.Scopes, tally)
	if err != nil {
		return tally, err
	}
	c.walk.Index, c.walk.Held = reservation.ReservationExpiry, c.Scopes.Held
	c.walk.Each(ctx, c.Pager, scopes, c.Limits, tally, func(ctx context.Context, pages []reservation.Page) {
		c.settlePages(ctx, pages, tally)
	})
	pass.Finish(ctx, c.Tasks, tally)
	return tally, tally.Err()
}

func (c *Compensator) settlePages(ctx context.Context, pages []reservation.Page, tally *pass.Tally) {
	var inputs []reservation.Input
	var ids []string
	policy := c.Policy()
	for _, page := range pages {
		for _, m := range page.Members {
			if !m.Missing && m.Malformed == nil && m.Reservation.Status.Releasing() {
				inputs = append(inputs, reservation.Input{Member: m, NowMS: page.NowMS, Policy: policy})
				ids = append(ids, m.ID)
			}
		}
	}
	if len(inputs) == 0 {
		return
	}
	orders := pass.ReadOrders(ctx, c.Claims, ids, tally)
	var waits, cases []pass.Case
	for _, in := range inputs {
		in.Orders = orders.Of(in.Member)
		k := pass.Decide(in, reservation.ReservationExpiry, tally)
		if k.Action.Verb == reservation.VerbWait {
			waits = append(waits, k)
		} else {
			cases = append(cases, k)
		}
	}
	c.Actor.Carry(ctx, waits, tally)
	c.Settle(ctx, cases, tally)
}
