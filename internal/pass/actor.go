package pass

import (
	"context"
	"fmt"
	"slices"

	"github.com/seckill/reconciler/reservation"
)

// Effects runs script calls. Each chain belongs to one reservation and is run
// in its order; chains are independent of each other, and every effect has a
// result.
type Effects interface {
	Apply(ctx context.Context, chains [][]reservation.Effect) [][]reservation.Applied
}

// Actor carries decisions out.
type Actor struct {
	Effects Effects
	// Observe decides, counts and reports, and changes nothing (protocol §3).
	Observe bool
}

// Carry runs the effects of the cases and defers those that a script refused
// or that could not be run. It returns the cases whose effects are in force.
func (a *Actor) Carry(ctx context.Context, cases []Case, tally *Tally) []Case {
	if a.Observe || len(cases) == 0 {
		return nil
	}
	chains := make([][]reservation.Effect, len(cases))
	for i, c := range cases {
		chains[i] = c.Effects()
	}
	var done, failed []Case
	for i, applied := range a.Effects.Apply(ctx, chains) {
		if note(cases[i], applied, tally) {
			done = append(done, cases[i])
		} else if cases[i].Action.Verb != reservation.VerbWait {
			failed = append(failed, cases[i])
		}
	}
	a.Defer(ctx, failed, tally)
	return done
}

// Defer moves the cases' scores forward, to where their decisions say, so that
// a member that cannot be helped now never blocks those behind it. The hash
// counts the wait, and the next one is longer. A member whose status is no
// longer what was read is left as it is: the next pass decides it anew.
func (a *Actor) Defer(ctx context.Context, cases []Case, tally *Tally) {
	if a.Observe || len(cases) == 0 {
		return
	}
	chains := make([][]reservation.Effect, len(cases))
	for i, c := range cases {
		chains[i] = []reservation.Effect{c.Member().Defer(c.Index, c.Action.DeferMS)}
	}
	var unreadable [][]reservation.Effect
	for i, applied := range a.Effects.Apply(ctx, chains) {
		note(cases[i], applied, tally)
		if e := applied[0].Effect; applied[0].Result == reservation.Refused && cases[i].Member().Missing {
			// The hash is there and has no field of a reservation.
			e.Expected = reservation.ExpectAny
			unreadable = append(unreadable, []reservation.Effect{e})
		}
	}
	if len(unreadable) > 0 {
		a.Effects.Apply(ctx, unreadable)
	}
}

// Writable returns the cases of those scopes in which Redis takes writes now: it
// moves the score of one member of each forward, as a wait would. A fence that
// cannot be shown in Redis would forbid an order and give nothing back.
func (a *Actor) Writable(ctx context.Context, cases []Case, tally *Tally) []Case {
	asked := map[reservation.Scope]bool{}
	var chains [][]reservation.Effect
	for _, c := range cases {
		m := c.Member()
		if !asked[m.Scope] {
			asked[m.Scope] = true
			e := m.Defer(c.Index, c.Action.DeferMS)
			e.Expected = reservation.ExpectAny
			chains = append(chains, []reservation.Effect{e})
		}
	}
	refuses := map[reservation.Scope]bool{}
	for _, applied := range a.Effects.Apply(ctx, chains) {
		if probe := applied[0]; probe.Result == reservation.Failed {
			refuses[probe.Effect.Scope] = true
			tally.Failed(fmt.Errorf("nothing is fenced in %s: %w", probe.Effect.Scope, probe.Err))
		}
	}
	return slices.DeleteFunc(slices.Clone(cases), func(c Case) bool { return refuses[c.Member().Scope] })
}

// Reindex puts members back into the indexes that their status calls for, so
// that the worker whose business they are can find them.
func (a *Actor) Reindex(ctx context.Context, cases []Case, tally *Tally) {
	if a.Observe || len(cases) == 0 {
		return
	}
	chains := make([][]reservation.Effect, len(cases))
	for i, c := range cases {
		chains[i] = []reservation.Effect{{Op: reservation.OpReindex, Scope: c.Member().Scope, ID: c.Member().ID}}
	}
	for i, applied := range a.Effects.Apply(ctx, chains) {
		note(cases[i], applied, tally)
	}
}

// note counts the results of one case's effects; true when all are in force.
// A chain is judged by its last effect: a step before it that was refused
// because the reservation is further already does no harm.
func note(c Case, applied []reservation.Applied, tally *Tally) bool {
	if len(applied) == 0 {
		return true
	}
	for _, a := range applied {
		if a.Result == reservation.Failed {
			tally.Did(DoneFailed, 1)
			tally.Failed(fmt.Errorf("%s reservation %s of %s: %w", a.Effect.Op, a.Effect.ID, a.Effect.Scope, a.Err))
			return false
		}
	}
	last := applied[len(applied)-1]
	switch {
	case last.Result == reservation.Changed:
		tally.Did(doneName(last.Effect), 1)
	case last.Result == reservation.Refused && last.Err != nil:
		// The data under a key is not the contract's: no retry will help.
		tally.Did(DoneRefused, 1)
		tally.Task(c.Member().Scope, reservation.TaskMalformed, "wrong_data", c.Member().ID)
	case last.Result == reservation.Refused && last.Effect.Op == reservation.OpDefer:
		// The member moved on meanwhile, or is gone: nothing to wait for.
	case last.Result == reservation.Refused:
		tally.Did(DoneRefused, 1)
		noteRefusal(c.Member(), applied, tally)
	}
	return last.Done()
}

// noteRefusal asks a person about refusals that no retry ends: stock that does
// not add up, and ids that contradict those of PostgreSQL.
func noteRefusal(m reservation.Member, applied []reservation.Applied, tally *Tally) {
	for _, a := range applied {
		switch a.Code {
		case "INVARIANT_VIOLATION":
			tally.Task(m.Scope, "invariant_broken", string(a.Effect.Op), m.ID)
		case "ID_CONFLICT", "RESERVATION_ID_CONFLICT":
			tally.Task(m.Scope, reservation.TaskMalformed, "id_conflict", m.ID)
		}
	}
}

func doneName(e reservation.Effect) string {
	switch e.Op {
	case reservation.OpCompensate:
		return DoneReleased
	case reservation.OpConfirm:
		return DoneConfirmed
	case reservation.OpUnindex:
		return DoneUnindexed
	case reservation.OpReindex:
		return DoneReindexed
	case reservation.OpDefer:
		return DoneDeferred
	case reservation.OpTransition:
		if e.To == reservation.StatusOrderCreated {
			return DoneOrderCreated
		}
		return "to_" + string(e.To)
	default:
		return string(e.Op)
	}
}
