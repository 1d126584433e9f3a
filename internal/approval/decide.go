package approval

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// subject is one reservation with what both sides show of it.
type subject struct {
	reservation.Member
	record   reservation.Record
	orders   reservation.OrderEvidence
	messages reservation.MessageEvidence
	nowMS    int64
	// undecided: a task order_after_release stands in its scope, so that its
	// request field proves nothing (spec §4, restore).
	undecided bool
	newer     string // see World
}

// read reads reservations by name, after the time of their node.
func (a *Approver) read(ctx context.Context, scope reservation.Scope, ids []string) (reservation.Page, error) {
	page := reservation.Page{Scope: scope}
	now, err := a.Redis.Now(ctx, scope)
	if err != nil {
		return page, err
	}
	page.NowMS = now
	refs := make([]redisstore.Ref, len(ids))
	for i, id := range ids {
		refs[i] = redisstore.Ref{Scope: scope, ID: id}
	}
	for _, reply := range a.Redis.Members(ctx, refs) {
		if reply.Err != nil {
			return page, reply.Err
		}
		page.Members = append(page.Members, reply.Member)
	}
	return page, nil
}

// gather reads the evidence for the members of a page: M where the kind of the
// task rests on it, and P behind it.
func (a *Approver) gather(ctx context.Context, t pgstore.Task, page reservation.Page) ([]subject, error) {
	if len(page.Members) == 0 {
		return nil, nil
	}
	var messages map[string]reservation.MessageEvidence
	if t.Kind == reservation.TaskDeadLetter {
		var queries []reservation.MessageQuery
		for _, m := range page.Members {
			if !m.Missing && m.Malformed == nil {
				queries = append(queries, m.Reservation.MessageQuery())
			}
		}
		messages = a.Messages.Gather(ctx, page.NowMS, queries)
	}
	ids := make([]string, len(page.Members))
	for i, m := range page.Members {
		ids[i] = m.ID
	}
	records, err := a.Postgres.Records(ctx, ids)
	if err != nil {
		return nil, err
	}
	undecided := false
	if t.Kind == reservation.TaskOrphanMember {
		tag := page.Scope.Tag()
		open, err := a.Postgres.Tasks(ctx, pgstore.TaskFilter{
			States: pgstore.Unresolved, Kinds: []string{fencer.TaskOrderAfterRelease}, Scope: &tag, Limit: 1,
		})
		if err != nil {
			return nil, err
		}
		undecided = len(open) > 0
	}
	subjects := make([]subject, len(page.Members))
	for i, m := range page.Members {
		subjects[i] = subject{
			Member: m, record: records[m.ID], nowMS: page.NowMS, undecided: undecided,
			orders:   reservation.ClassifyOrders(m.Scope, m.Reservation.UserID, records[m.ID]),
			messages: messages[m.Reservation.MessageID],
		}
	}
	if t.Kind == fencer.TaskOrderAfterRelease {
		return subjects, a.findNewer(ctx, page.Scope, subjects)
	}
	return subjects, nil
}

// findNewer finds the reservations that the users' markers name instead: to
// take a unit for an old order would take the marker from one that counts.
func (a *Approver) findNewer(ctx context.Context, scope reservation.Scope, subjects []subject) error {
	queries := make([]reconcile.MemberQuery, len(subjects))
	for i, s := range subjects {
		queries[i] = reconcile.MemberQuery{Ref: reconcile.Ref{Scope: scope, ID: s.ID}, UserID: s.Reservation.UserID}
	}
	others := map[string]bool{}
	for i, state := range a.Redis.MemberStates(ctx, queries) {
		if state.Err != nil {
			return state.Err
		}
		if state.Marker != "" && state.Marker != subjects[i].ID {
			subjects[i].newer = state.Marker
			others[state.Marker] = true
		}
	}
	if len(others) == 0 {
		return nil
	}
	over, err := a.over(ctx, scope, slices.Sorted(maps.Keys(others)))
	if err != nil {
		return err
	}
	for i := range subjects {
		if over[subjects[i].newer] {
			subjects[i].newer = ""
		}
	}
	return nil
}

// over says which reservations count no more, and never will: released, and no
// order of theirs is active or can come.
func (a *Approver) over(ctx context.Context, scope reservation.Scope, ids []string) (map[string]bool, error) {
	valid := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return reservation.ValidateID(id) != nil })
	page, err := a.read(ctx, scope, valid)
	if err != nil {
		return nil, err
	}
	records, err := a.Postgres.Records(ctx, valid)
	if err != nil {
		return nil, err
	}
	over := map[string]bool{}
	for _, m := range page.Members {
		orders := reservation.ClassifyOrders(scope, m.Reservation.UserID, records[m.ID])
		decided := orders.State == reservation.OrderFenced || orders.State == reservation.OrderRejected ||
			(orders.State == reservation.OrderExists && !orders.Active)
		over[m.ID] = decided && !m.Missing && m.Malformed == nil && m.Reservation.Status == reservation.StatusReleased
	}
	return over, nil
}

// proposeFor proposes for reservations by name.
func (a *Approver) proposeFor(ctx context.Context, t pgstore.Task, scope reservation.Scope, ids []string) ([]Proposal, error) {
	subjects, err := a.look(ctx, t, scope, ids)
	if err != nil {
		return nil, err
	}
	proposals := make([]Proposal, len(subjects))
	for i, s := range subjects {
		proposals[i] = a.propose(t, s)
	}
	return proposals, nil
}

// look reads both sides of reservations by name.
func (a *Approver) look(ctx context.Context, t pgstore.Task, scope reservation.Scope, ids []string) ([]subject, error) {
	page, err := a.read(ctx, scope, ids)
	if err != nil {
		return nil, err
	}
	return a.gather(ctx, t, page)
}

// world is what a proposal for the subject rests on.
func (s subject) world() World {
	w := World{
		Status: s.Reservation.Status, Indexed: s.Missing && (s.InPending || s.InExpiry),
		Orders: s.orders.State, OrderID: s.orders.OrderID, Active: s.orders.Active,
		Message: s.messages.State, Detail: s.messages.Cause, Newer: s.newer,
	}
	if s.orders.State == reservation.OrderContradictory {
		w.Cause = s.orders.Cause
	}
	if s.record.Claim != nil {
		w.Claim = s.record.Claim.Outcome
	}
	return w
}

// propose chooses the action for the subject. What it may not be is as
// important: nothing is proposed against an order, and nothing where the two
// sides contradict each other.
func (a *Approver) propose(t pgstore.Task, s subject) Proposal {
	p := Proposal{Scope: s.Scope, ID: s.ID, Expected: s.world()}
	switch {
	case t.Kind == reservation.TaskOrphanMember:
		p.Action, p.Why = s.orphan()
	case t.Kind == fencer.TaskOrderAfterRelease:
		p.Action, p.Why = s.afterRelease()
	case t.Kind == reconcile.CheckLeakedReservation:
		p.Action, p.Why = s.leaked()
	case slices.Contains(explained, t.Kind):
		p.Action, p.Why = None, s.steps(t.Kind)
	default:
		p.Action, p.Why = a.decide(t.Kind, s)
	}
	p.Does = p.text()
	return p
}

// leaked: nothing but a request result is left. Whether its unit is still
// reserved cannot be told of one reservation, only of the scope; that no order
// comes can be made sure of.
func (s subject) leaked() (Action, string) {
	switch {
	case !s.Missing:
		return None, fmt.Sprintf("its hash is there, as %s", s.Reservation.Status)
	case s.InPending || s.InExpiry:
		return None, "an index names it: see the task orphan_member"
	}
	switch s.orders.State {
	case reservation.OrderNone:
		return Fence, ""
	case reservation.OrderFenced, reservation.OrderRejected:
		return None, "no order can come for it any more: its unit comes back with the recount of the scope"
	case reservation.OrderExists:
		return None, fmt.Sprintf("its order is there: `reconciler reconcile %s --repair` restores it", scopeFlags(s.Scope))
	default:
		return None, "its claim and its order contradict each other: " + s.orders.Cause
	}
}

func (s subject) orphan() (Action, string) {
	switch {
	case !s.Missing:
		return None, fmt.Sprintf("its hash is there, as %s", s.Reservation.Status)
	case !s.InPending && !s.InExpiry:
		return None, "no index names it any more"
	}
	switch s.orders.State {
	case reservation.OrderExists:
		order := s.record.Orders[0]
		switch {
		case s.undecided:
			return None, "a task order_after_release is open in its scope: decide that one first"
		case order.RequestID == "" || order.UserID == "":
			return None, "restore_impossible: its order names no request or no user"
		}
		return Restore, ""
	case reservation.OrderFenced, reservation.OrderRejected, reservation.OrderNone:
		return Adopt, ""
	default:
		return None, "its claim and its order contradict each other: " + s.orders.Cause
	}
}

func (s subject) afterRelease() (Action, string) {
	switch {
	case s.Missing:
		return None, "its hash is gone"
	case s.Malformed != nil:
		return None, "its hash is malformed: " + s.Malformed.Error()
	case s.Reservation.Status != reservation.StatusReleased:
		return None, fmt.Sprintf("it is %s, not RELEASED", s.Reservation.Status)
	case s.orders.State == reservation.OrderContradictory:
		return None, "its claim and its order contradict each other: " + s.orders.Cause
	case s.orders.State != reservation.OrderExists:
		return None, "it has no order"
	case !s.orders.Active:
		return None, "its order is cancelled: it needs no unit"
	case s.newer != "":
		return None, fmt.Sprintf("its user has reserved again: the marker names reservation %s, which counts or may count. "+
			"Cancel order %s in the shop, or approve this once %s is decided and released", s.newer, s.orders.OrderID, s.newer)
	default:
		return TakeUnit, ""
	}
}

// decide asks the decision table, with the person's word in the place of the
// policy that made the task, or of the evidence that is not to be had.
func (a *Approver) decide(kind string, s subject) (Action, string) {
	action := reservation.Decide(a.input(kind, s))
	switch {
	case kind == reservation.TaskConfirmPending && action.Verb == reservation.VerbConfirm:
		return Confirm, ""
	case kind == reservation.TaskDeadLetter && action.Verb == reservation.VerbRelease && action.Row == 13,
		kind == reservation.TaskEvidenceStuck && action.Verb == reservation.VerbRelease && action.Row == 14:
		return Release, ""
	case s.Missing:
		return None, "its hash is gone: see the task orphan_member"
	default:
		return None, fmt.Sprintf("it is %s; what the daemon does with it needs no approval: %s, %s", s.Reservation.Status, action.Verb, action.Cause)
	}
}

func (a *Approver) input(kind string, s subject) reservation.Input {
	in := reservation.Input{Member: s.Member, Orders: s.orders, Messages: s.messages, NowMS: s.nowMS, Policy: a.Policy}
	switch kind {
	case reservation.TaskConfirmPending:
		in.Policy.Confirm = reservation.ConfirmAuto
	case reservation.TaskDeadLetter:
		in.Policy.DeadLetter = reservation.DeadLetterRelease
	case reservation.TaskEvidenceStuck:
		// The person says that no consumer will make an order of the message any
		// more. Only the fence makes it true.
		in.Messages = reservation.MessageEvidence{State: reservation.MessageConsumed}
	}
	return in
}

// behind says whether the subject stands behind a task of the kind; known is
// false if that cannot be told.
func (s subject) behind(kind string, p Proposal) (behind, known bool) {
	switch kind {
	case reservation.TaskOrphanMember:
		return true, true
	case fencer.TaskOrderAfterRelease:
		// The fence of the others holds, or the daemon sets it again.
		return s.orders.State == reservation.OrderExists, true
	case reservation.TaskDeadLetter:
		unknown := s.messages.State == reservation.MessageUnknown || s.messages.State == ""
		return p.Action != None, !unknown || s.orders.State != reservation.OrderNone
	default:
		return p.Action != None, true
	}
}
