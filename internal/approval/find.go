package approval

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// Messages finds messages in RocketMQ (M of protocol §2).
type Messages interface {
	Gather(ctx context.Context, nowMS int64, queries []reservation.MessageQuery) map[string]reservation.MessageEvidence
}

// Gate is the way to a fence (package fencer).
type Gate interface {
	Ready(ctx context.Context) error
	Fence(ctx context.Context, cases []pass.Case, tally *pass.Tally) fencer.Fenced
}

// Approver proposes and applies. It is safe beside the daemon and beside other
// approvers: every effect is keyed and checked again where it happens.
type Approver struct {
	Redis    *redisstore.Store
	Postgres *pgstore.Store
	Messages Messages
	Gate     Gate
	Policy   reservation.Policy
	// Settle is the time between two looks at what contradicts.
	Settle time.Duration
	// Observe proposes and changes nothing (interface §7).
	Observe bool
}

// NoActionError says that tasks of a kind are not approved.
type NoActionError struct{ Kind, Advice string }

func (e *NoActionError) Error() string {
	return fmt.Sprintf("there is nothing to approve in a task %s: %s", e.Kind, e.Advice)
}

// ErrNoReservation says that a task can only be approved for one reservation.
var ErrNoReservation = errors.New("name the reservation: --reservation ID; the evidence of each has to be judged by itself")

// Check says whether a task can be approved: nil, a [*NoActionError],
// [ErrNoReservation], or a [*pgstore.TaskDecidedError].
func Check(t pgstore.Task, sel Selection) error {
	if !slices.Contains(pgstore.Unresolved, t.State) {
		return &pgstore.TaskDecidedError{ID: t.ID, State: t.State, By: t.DecidedBy}
	}
	switch t.Kind {
	case reservation.TaskOrphanMember, reservation.TaskConfirmPending, reservation.TaskDeadLetter, fencer.TaskOrderAfterRelease,
		reconcile.CheckInvariantBroken, reconcile.CheckCountDrift, reconcile.CheckLeakedReservation:
		return nil
	case reservation.TaskEvidenceStuck:
		if sel.Reservation == "" {
			return ErrNoReservation
		}
		return nil
	case pgstore.TaskReleaseStorm:
		return &NoActionError{t.Kind, "resolve it, and the scope's releases go on with another budget"}
	case pgstore.TaskPostgresChanged:
		return &NoActionError{t.Kind, "the daemon ends it once every released reservation is fenced again"}
	default:
		if slices.Contains(explained, t.Kind) {
			return nil
		}
		return &NoActionError{t.Kind, advice(t)}
	}
}

// advice says what a person does about a task without an action.
func advice(t pgstore.Task) string {
	if scope, err := reservation.ParseTag(t.Scope); err == nil {
		if steps := scopeSteps(t.Kind, scope); steps != "" {
			return steps
		}
	}
	if kind, known := reconcile.Kind(t.Kind); known {
		return kind.Advice
	}
	return "put its cause right and resolve it"
}

// Propose finds the reservations behind the task and proposes an action for
// each. It changes nothing. An error says nothing about any of them.
func (a *Approver) Propose(ctx context.Context, t pgstore.Task, sel Selection) (Plan, error) {
	if sel.Max <= 0 {
		sel.Max = DefaultMax
	}
	plan := Plan{Task: t, Selection: sel}
	if err := Check(t, sel); err != nil {
		return plan, err
	}
	var err error
	if plan.Scope, err = reservation.ParseTag(t.Scope); err != nil {
		return plan, fmt.Errorf("task %d: %w", t.ID, err)
	}
	if sel.Reservation != "" {
		if err := reservation.ValidateID(sel.Reservation); err != nil {
			return plan, fmt.Errorf("the reservation: %w", err)
		}
		plan.Proposals, err = a.proposeFor(ctx, t, plan.Scope, []string{sel.Reservation})
		return plan, err
	}
	f := finding{approver: a, plan: &plan, seen: map[string]bool{}}
	switch {
	case t.Kind == reconcile.CheckInvariantBroken, t.Kind == reconcile.CheckCountDrift:
		var p *Proposal
		if p, err = a.proposeRecount(ctx, plan.Scope); p != nil {
			plan.Proposals = []Proposal{*p}
		}
	case t.Kind == reconcile.CheckLeakedReservation:
		plan.Proposals, plan.Truncated, err = a.proposeLeaked(ctx, t, plan.Scope, sel)
	case slices.Contains(explained, t.Kind):
		ids := slices.DeleteFunc(slices.Clone(t.Sample), func(id string) bool { return reservation.ValidateID(id) != nil })
		plan.Truncated = int(t.Count) > min(len(ids), sel.Max)
		plan.Proposals, err = a.proposeFor(ctx, t, plan.Scope, ids[:min(len(ids), sel.Max)])
	case t.Kind == fencer.TaskOrderAfterRelease:
		err = a.Redis.EachReleased(ctx, plan.Scope, f.released)
	default:
		err = f.walk(ctx)
	}
	if err != nil && !errors.Is(err, errEnough) {
		return plan, fmt.Errorf("find the reservations behind task %d: %w", t.ID, err)
	}
	return plan, nil
}

// Keep stores the plan's proposals: [Approver.Recall] gives them back.
func (a *Approver) Keep(ctx context.Context, plan Plan) error {
	var kept []pgstore.Proposal
	for _, p := range plan.Proposals {
		if p.Action == None {
			continue
		}
		expected, err := json.Marshal(p.Expected)
		if err != nil {
			return fmt.Errorf("encode the proposal for %s: %w", p.ID, err)
		}
		kept = append(kept, pgstore.Proposal{ReservationID: p.ID, Action: string(p.Action), Expected: expected})
	}
	return a.Postgres.SaveProposals(ctx, plan.Task.ID, kept)
}

// Recall puts what was proposed to a person before in the place of what would
// be proposed now: it is what the person approves, and [Approver.Apply] finds
// out what moved since. Reservations that were proposed and no longer stand
// behind the task are in the plan again.
func (a *Approver) Recall(ctx context.Context, plan Plan) (Plan, error) {
	ids := []string{plan.Selection.Reservation}
	if plan.Selection.Reservation == "" {
		ids = nil
		for _, p := range plan.Proposals {
			ids = append(ids, p.ID)
		}
		more, err := a.Postgres.ProposedIDs(ctx, plan.Task.ID, max(plan.Selection.Max-len(ids), 0))
		if err != nil {
			return plan, err
		}
		ids = append(ids, more...)
	}
	kept, err := a.Postgres.Proposals(ctx, plan.Task.ID, ids)
	if err != nil {
		return plan, err
	}
	plan.Proposals = slices.Clone(plan.Proposals)
	for _, k := range kept {
		p := Proposal{Scope: plan.Scope, ID: k.ReservationID, Action: Action(k.Action)}
		if err := json.Unmarshal(k.Expected, &p.Expected); err != nil {
			return plan, fmt.Errorf("read the proposal for %s: %w", p.ID, err)
		}
		p.Does = p.text()
		if i := slices.IndexFunc(plan.Proposals, func(q Proposal) bool { return q.ID == p.ID }); i >= 0 {
			plan.Proposals[i] = p
		} else {
			plan.Proposals = append(plan.Proposals, p)
		}
	}
	return plan, nil
}

// errEnough ends a search: the selection is full.
var errEnough = errors.New("more reservations than were asked for")

// finding is one search for the reservations behind a task.
type finding struct {
	approver *Approver
	plan     *Plan
	seen     map[string]bool // the daemon moves scores meanwhile: a member may come twice
}

// findPage is how many index members are read at once.
const findPage = 500

// walk goes through the indexes in which the task's reservations are: both for
// those whose hash is gone, reservation_expiry for the others, since every
// undecided one is in it.
func (f *finding) walk(ctx context.Context) error {
	indexes := []reservation.Index{reservation.ReservationExpiry}
	if f.plan.Task.Kind == reservation.TaskOrphanMember {
		indexes = append(indexes, reservation.SendPending)
	}
	for _, index := range indexes {
		request := pass.PageRequest{Scope: f.plan.Scope, Index: index, Limit: findPage, All: true}
		for end := false; !end; {
			if err := ctx.Err(); err != nil {
				return err
			}
			reply := f.approver.Redis.Pages(ctx, []pass.PageRequest{request})[0]
			if reply.Err != nil {
				return reply.Err
			}
			if err := f.take(ctx, reply.Page); err != nil {
				return err
			}
			request.After, end = reply.Next, reply.End
		}
	}
	return nil
}

// released takes a page of RELEASED reservations.
func (f *finding) released(ctx context.Context, ids []string) error {
	page, err := f.approver.read(ctx, f.plan.Scope, ids)
	if err != nil {
		return err
	}
	return f.take(ctx, page)
}

// take adds the page's reservations that stand behind the task.
func (f *finding) take(ctx context.Context, page reservation.Page) error {
	page.Members = slices.DeleteFunc(page.Members, func(m reservation.Member) bool {
		before := f.seen[m.ID]
		f.seen[m.ID] = true
		return before || !concerns(f.plan.Task.Kind, m, page.NowMS)
	})
	subjects, err := f.approver.gather(ctx, f.plan.Task, page)
	if err != nil {
		return err
	}
	for _, s := range subjects {
		p := f.approver.propose(f.plan.Task, s)
		switch behind, known := s.behind(f.plan.Task.Kind, p); {
		case !known:
			f.plan.Unclear++
		case !behind:
		case len(f.plan.Proposals) == f.plan.Selection.Max:
			f.plan.Truncated = true
			return errEnough
		default:
			f.plan.Proposals = append(f.plan.Proposals, p)
		}
	}
	return nil
}

// concerns says whether a member may stand behind a task of the kind, by what
// Redis alone shows.
func concerns(kind string, m reservation.Member, nowMS int64) bool {
	switch kind {
	case reservation.TaskOrphanMember:
		return m.Missing
	case reservation.TaskConfirmPending:
		return !m.Missing && m.Malformed == nil && m.Reservation.Status.Releasing()
	case reservation.TaskDeadLetter:
		return !m.Missing && m.Malformed == nil && m.Reservation.Status == reservation.StatusEnqueued && nowMS >= m.Reservation.ExpiresAtMS
	default:
		return true
	}
}
