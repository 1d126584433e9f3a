package reconcile

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// Mender changes Redis, each time by a script that is keyed, idempotent and
// checks its reason again. Each reply has its own error.
type Mender interface {
	// Apply runs the effects, each chain in its order.
	Apply(ctx context.Context, chains [][]reservation.Effect) [][]reservation.Applied
	// RestoreOrders rebuilds reservations from their orders.
	RestoreOrders(ctx context.Context, requests []RestoreRequest) []RestoreReply
	// MarkUsers points the users' markers at reservations, if they are still
	// those that were seen.
	MarkUsers(ctx context.Context, requests []MarkRequest) []MarkReply
	// PublishAvailable tells gateways that units came free.
	PublishAvailable(ctx context.Context, scopes []reservation.Scope) error
}

// RestoreRequest is a reservation as its order proves it.
type RestoreRequest struct {
	Ref
	Order reservation.Order
}

// RestoreReply is what became of a restore.
type RestoreReply struct {
	Done      bool
	Deficit   bool   // it takes a unit, and none is left
	Code      string // the script's, by name
	Available int64  // afterwards
	Err       error
}

// MarkRequest is the marker of a reservation's user.
type MarkRequest struct {
	Ref
	UserID string
	Seen   string // "" for none
}

// MarkReply is what became of a marker.
type MarkReply struct {
	Done bool
	Code string
	Err  error
}

// Guard says what may be changed now.
type Guard interface {
	// MayMoveStock is an error while nothing may be released: the order trigger
	// is not in place, or PostgreSQL is not the one it was (protocol §1).
	MayMoveStock(ctx context.Context) error
	// HeldScopes are those that a person holds: nothing changes them.
	HeldScopes(ctx context.Context) ([]reservation.Scope, error)
	// Refence claims RELEASED reservations as FENCED again.
	Refence(ctx context.Context, requests []reservation.FenceRequest) ([]reservation.FenceResult, error)
	// AfterRelease says whether a task order_after_release stands, or may
	// stand, for a reservation: then its request result proves nothing.
	AfterRelease(ctx context.Context, ref Ref) (bool, error)
}

// Trail keeps what repairs did.
type Trail interface {
	// NoteRepairs adds an entry for each repair to the audit trail: all, or none.
	NoteRepairs(ctx context.Context, notes []RepairNote) error
}

// RepairStage tells the two entries of a repair apart.
type RepairStage string

// Without the first entry nothing is changed; a first one without a second is a
// repair that was cut off.
const (
	RepairStarted RepairStage = "repair_started"
	RepairEnded   RepairStage = "repair_ended"
)

// RepairNote is one entry of the audit trail.
type RepairNote struct {
	Stage   RepairStage
	Actor   string // RepairOptions.Actor
	RunID   string
	Check   string
	Scope   reservation.Scope
	Subject string
	Why     string // the finding
	Outcome string // of an ended one: done, failed or none, and what of it
	Before  map[string]any
	After   map[string]any // of an ended one
}

// RepairOptions say what a run may put right.
type RepairOptions struct {
	Actor string // who repairs, for the audit trail
	// Lock takes the repairs of an activity, and an error says who has them:
	// nothing is repaired in it then. nil: the caller has taken them.
	Lock func(ctx context.Context, activityID string) (unlock func(), err error)
	// Approve is asked once how many repairs are planned. nil, or false, plans
	// and changes nothing.
	Approve func(planned int) bool
	Max     int // repairs of one run; 0: no limit
	Policy  reservation.Policy
	// FillDeficit gives a bucket that has no unit left for its orders the units of
	// other buckets, by a transfer.
	FillDeficit bool
}

// steps are the automatic repairs in the order of protocol §5: finish what is
// decided and give units back first, so that a restore finds them.
var steps = [][]string{
	{CheckReleaseWithoutClaim},
	{CheckStatusBehind, CheckOrderAfterReleasePending},
	{CheckLostReservation, CheckDeficit},
	{CheckStuckTransfer},
	{CheckUserMarkerMismatch, CheckUnindexedReservation, CheckLeftoverMember},
}

// findingKey tells findings of a report apart.
type findingKey struct {
	check   string
	scope   reservation.Scope
	subject string
}

func keyOf(f Finding) findingKey { return findingKey{f.Check, f.Scope.Reservation(), f.Subject} }

// repairer carries out the repairs of a run.
type repairer struct {
	sets    *sets
	mender  Mender
	mover   Mover
	books   *transfer.Reader
	batch   int
	guard   Guard
	trail   Trail
	options RepairOptions
	report  *Report
	deficit map[Ref]bool
	gaps    []Incomplete // of the audit trail
	tried   bool
}

// item is a finding on its way to repair.
type item struct {
	finding *Finding
	query   MemberQuery
	before  *view
}

// repair plans, asks, and repairs. It notes whether anything was tried. A run
// that is told to stop ends after the page that is under way.
func (p *repairer) repair(ctx context.Context) {
	planned := p.plan(ctx)
	n := 0
	for _, step := range planned {
		n += len(step)
	}
	if n == 0 || p.options.Approve == nil || !p.options.Approve(n) {
		return
	}
	planned, unlock := p.lock(ctx, planned)
	defer unlock()
	for i, step := range planned {
		for page := range slices.Chunk(step, p.batch) {
			if ctx.Err() != nil {
				return
			}
			p.tried = true
			if slices.Contains(steps[i], CheckStuckTransfer) {
				p.finishTransfers(ctx, page)
			} else {
				p.page(ctx, page)
			}
		}
	}
}

// lock takes the activities in which something is to be repaired. Where another
// run repairs already this one steps aside.
func (p *repairer) lock(ctx context.Context, planned [][]*item) (ours [][]*item, unlock func()) {
	var held []func()
	unlock = func() {
		for _, f := range held {
			f()
		}
	}
	if p.options.Lock == nil {
		return planned, unlock
	}
	tried := map[string]error{}
	for i := range planned {
		planned[i] = slices.DeleteFunc(planned[i], func(it *item) bool {
			activity := it.finding.Scope.ActivityID
			if _, known := tried[activity]; !known {
				release, err := p.options.Lock(ctx, activity)
				if tried[activity] = err; err == nil {
					held = append(held, release)
				}
			}
			if err := tried[activity]; err != nil {
				it.finding.skip(oneLine(err.Error()))
				return true
			}
			return false
		})
	}
	return planned, unlock
}

// plan finds what is to be repaired, in its order and up to the limit.
func (p *repairer) plan(ctx context.Context) [][]*item {
	held, err := p.held(ctx)
	planned := make([][]*item, len(steps))
	n := 0
	for i, checks := range steps {
		for j := range p.report.Findings {
			f := &p.report.Findings[j]
			query, known := p.repairable(*f)
			if !known || f.Repair.Kind != RepairAutomatic || !slices.Contains(checks, f.Check) {
				continue
			}
			s := f.Scope.Reservation()
			switch {
			case err != nil:
				f.skip("which scopes are held is not known: " + oneLine(err.Error()))
			case held[s]:
				f.skip("a person holds the scope")
			case p.incomplete(*f):
				f.skip("the evidence of the scope is incomplete")
			case p.options.Max > 0 && n >= p.options.Max:
				f.skip("beyond the most repairs of one run")
			default:
				n++
				f.Repair.State = RepairStatePlanned
				planned[i] = append(planned[i], &item{finding: f, query: query})
			}
		}
	}
	return planned
}

func (f *Finding) skip(why string) {
	f.Repair.State, f.Repair.Detail = RepairStateNone, "skipped: "+why
}

func (f *Finding) failed(why string) {
	f.Repair.State, f.Repair.Detail = RepairStateFailed, oneLine(why)
}

func (p *repairer) held(ctx context.Context) (map[reservation.Scope]bool, error) {
	scopes, err := p.guard.HeldScopes(ctx)
	held := map[reservation.Scope]bool{}
	for _, s := range scopes {
		held[s] = true
	}
	return held, err
}

// page repairs some findings of one step. Everything is read again first: what
// is not there any more, or is held by now, is left alone.
func (p *repairer) page(ctx context.Context, items []*item) {
	held, err := p.held(ctx)
	items = slices.DeleteFunc(items, func(i *item) bool {
		switch {
		case err != nil:
			i.finding.skip("which scopes are held is not known: " + oneLine(err.Error()))
		case held[i.finding.Scope.Reservation()]:
			i.finding.skip("a person holds the scope")
		default:
			return false
		}
		return true
	})
	items = p.readAgain(ctx, items)
	if len(items) == 0 {
		return
	}
	p.noted(ctx, items, func(ctx context.Context) {
		for i, v := range p.sets.views(ctx, queriesOf(p.carry(ctx, items))) {
			if v != nil {
				items[i].finding.Repair.After = v.values()
			}
		}
	})
}

// pageLimit bounds a page of repairs once it is begun: it is ended also when
// the run is told to stop or its time is over.
const pageLimit = 30 * time.Second

// noted carries repairs out between their two entries in the audit trail.
// Without the first nothing is changed.
func (p *repairer) noted(ctx context.Context, items []*item, carryOut func(context.Context)) {
	if err := p.trail.NoteRepairs(ctx, p.notes(RepairStarted, items)); err != nil {
		for _, i := range items {
			i.finding.skip("the audit trail takes no entry: " + oneLine(err.Error()))
		}
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), pageLimit)
	defer cancel()
	carryOut(ctx)
	if err := p.trail.NoteRepairs(ctx, p.notes(RepairEnded, items)); err != nil {
		p.gaps = append(p.gaps, Incomplete{
			Source: SourcePostgres, Reason: fmt.Sprintf("how %d repairs ended is not in the audit trail: %s", len(items), oneLine(err.Error())),
		})
	}
}

// notes are the entries of the items.
func (p *repairer) notes(stage RepairStage, items []*item) []RepairNote {
	notes := make([]RepairNote, len(items))
	for k, i := range items {
		f := i.finding
		notes[k] = RepairNote{
			Stage: stage, Actor: p.options.Actor, RunID: p.report.RunID, Check: f.Check, Scope: f.Scope.Reservation(),
			Subject: f.Subject, Why: f.Message, Before: f.Repair.Before,
		}
		if stage == RepairEnded {
			notes[k].After = f.Repair.After
			notes[k].Outcome = string(f.Repair.State) + ": " + f.Repair.Detail
		}
	}
	return notes
}

func queriesOf(items []*item) []MemberQuery {
	queries := make([]MemberQuery, len(items))
	for i, it := range items {
		queries[i] = it.query
	}
	return queries
}

// readAgain keeps the items that still show their contradiction.
func (p *repairer) readAgain(ctx context.Context, items []*item) []*item {
	var standing []*item
	for i, v := range p.sets.views(ctx, queriesOf(items)) {
		f := items[i].finding
		switch {
		case v == nil:
			f.skip("it could not be read again")
		case !slices.ContainsFunc(judge(*v), func(c contradiction) bool { return c.check == f.Check && c.subject == f.Subject && !c.manual }):
			f.skip("it is another contradiction by now, or none")
		default:
			items[i].before = v
			f.Repair.Before = v.values()
			standing = append(standing, items[i])
		}
	}
	return standing
}

// carry runs the scripts of items of one step, and returns them all.
func (p *repairer) carry(ctx context.Context, items []*item) []*item {
	var released, effects, lost, marks []*item
	for _, i := range items {
		switch i.finding.Check {
		case CheckReleaseWithoutClaim:
			released = append(released, i)
		case CheckLostReservation:
			lost = append(lost, i)
		case CheckUserMarkerMismatch:
			marks = append(marks, i)
		default:
			effects = append(effects, i)
		}
	}
	p.refence(ctx, released)
	p.apply(ctx, effects)
	p.restore(ctx, lost)
	p.mark(ctx, marks)
	return items
}

func (p *repairer) refence(ctx context.Context, items []*item) {
	if len(items) == 0 {
		return
	}
	requests := make([]reservation.FenceRequest, len(items))
	for k, i := range items {
		requests[k] = reservation.FenceRequest{ID: i.query.ID, Scope: i.query.Scope}
	}
	results, err := p.guard.Refence(ctx, requests)
	byID := map[string]reservation.FenceResult{}
	for _, r := range results {
		byID[r.ID] = r
	}
	for _, i := range items {
		switch r := byID[i.query.ID]; {
		case r.Known && (r.Outcome == reservation.OutcomeFenced || r.Outcome == reservation.OutcomeRejected):
			i.finding.done("fenced again")
		case r.Known:
			i.finding.failed("an order was faster: it is order_after_release now")
		case err != nil:
			i.finding.failed(err.Error())
		default:
			i.finding.failed("a transaction of the consumer holds it: try again")
		}
	}
}

func (f *Finding) done(what string) {
	f.Repair.State, f.Repair.Detail = RepairStateDone, what
}

// apply runs what the decision table says: advance, confirm, finish a release,
// drop and add index members.
func (p *repairer) apply(ctx context.Context, items []*item) {
	if len(items) == 0 {
		return
	}
	var chosen []*item
	var chains [][]reservation.Effect
	ready, asked := error(nil), false
	for _, i := range items {
		chain := p.effects(i)
		if len(chain) == 0 {
			i.finding.skip("the policy leaves it to a person")
			continue
		}
		if movesStock(chain) {
			if !asked {
				asked, ready = true, p.guard.MayMoveStock(ctx)
			}
			if ready != nil {
				i.finding.skip("no stock is moved: " + oneLine(ready.Error()))
				continue
			}
		}
		chosen, chains = append(chosen, i), append(chains, chain)
	}
	if len(chains) == 0 {
		return
	}
	freed := map[reservation.Scope]bool{}
	for k, applied := range p.mender.Apply(ctx, chains) {
		last := applied[len(applied)-1]
		switch {
		case last.Done():
			chosen[k].finding.done(fmt.Sprintf("%s: %s", last.Effect.Op, last.Code))
			freed[last.Effect.Scope] = freed[last.Effect.Scope] || last.Effect.Op == reservation.OpCompensate
		case last.Err != nil:
			chosen[k].finding.failed(last.Err.Error())
		default:
			chosen[k].finding.failed(fmt.Sprintf("%s was refused: %s", last.Effect.Op, last.Code))
		}
	}
	maps.DeleteFunc(freed, func(_ reservation.Scope, freed bool) bool { return !freed })
	if len(freed) > 0 {
		_ = p.mender.PublishAvailable(ctx, slices.Collect(maps.Keys(freed))) // best effort, protocol §4
	}
}

func movesStock(chain []reservation.Effect) bool {
	return slices.ContainsFunc(chain, func(e reservation.Effect) bool { return e.Op == reservation.OpCompensate })
}

// effects are the script calls of a repair; none where the decision is to wait.
func (p *repairer) effects(i *item) []reservation.Effect {
	m := i.before.state.Member
	if i.finding.Check == CheckUnindexedReservation {
		return []reservation.Effect{{Op: reservation.OpReindex, Scope: m.Scope, ID: m.ID}}
	}
	a := reservation.Decide(reservation.Input{Member: m, Orders: i.before.evidence, Policy: p.options.Policy})
	switch a.Verb {
	case reservation.VerbAdvance, reservation.VerbConfirm, reservation.VerbCompensate, reservation.VerbUnindex:
		return a.Effects(m, reservation.ReservationExpiry, i.before.evidence)
	default:
		return nil
	}
}

// restore rebuilds reservations. One that a person is to decide upon, because
// it was released once, is not (spec §4).
func (p *repairer) restore(ctx context.Context, items []*item) {
	var chosen []*item
	var requests []RestoreRequest
	for _, i := range items {
		waits, err := p.guard.AfterRelease(ctx, i.query.Ref)
		switch {
		case err != nil:
			i.finding.skip("whether it was released once is not known: " + oneLine(err.Error()))
		case waits:
			i.finding.skip("an order_after_release task stands for it")
		default:
			chosen, requests = append(chosen, i), append(requests, RestoreRequest{i.query.Ref, i.before.record.Orders[0]})
		}
	}
	if len(requests) == 0 {
		return
	}
	for k, reply := range p.restoreOrders(ctx, requests) {
		f := chosen[k].finding
		switch {
		case reply.Err != nil:
			f.failed(reply.Err.Error())
		case reply.Deficit:
			p.deficit[chosen[k].query.Ref] = true
			f.failed("no unit is left for it: it is tried again in every pass")
		case reply.Done:
			f.done(fmt.Sprintf("restore: %s, %d available", reply.Code, reply.Available))
		default:
			f.failed("restore was refused: " + reply.Code)
		}
	}
}

// mark sets users' markers. One that names another reservation is changed only
// for an order that counts, from one that has none (spec §4).
func (p *repairer) mark(ctx context.Context, items []*item) {
	var chosen []*item
	var requests []MarkRequest
	for _, i := range items {
		s := i.before.state
		if s.Marker != "" && !p.outranks(ctx, i) {
			i.finding.skip("the marker names another reservation that may be the user's own: a person decides")
			continue
		}
		chosen = append(chosen, i)
		requests = append(requests, MarkRequest{i.query.Ref, s.Reservation.UserID, s.Marker})
	}
	if len(requests) == 0 {
		return
	}
	for k, reply := range p.mender.MarkUsers(ctx, requests) {
		f := chosen[k].finding
		switch {
		case reply.Err != nil:
			f.failed(reply.Err.Error())
		case reply.Done:
			f.done("mark_user: " + reply.Code)
		default:
			f.failed("mark_user was refused: " + reply.Code)
		}
	}
}

// outranks says whether a reservation is an active order and the one that the
// marker names is not.
func (p *repairer) outranks(ctx context.Context, i *item) bool {
	own := i.before
	if own.state.Reservation.Status != reservation.StatusOrderCreated || own.evidence.State != reservation.OrderExists || !own.evidence.Active {
		return false
	}
	marker := own.state.Marker
	if reservation.ValidateID(marker) != nil {
		return false
	}
	other := p.sets.views(ctx, []MemberQuery{{Ref: Ref{i.query.Scope, marker}, UserID: own.state.Reservation.UserID}})[0]
	if other == nil {
		return false
	}
	switch other.evidence.State {
	case reservation.OrderExists:
		return !other.evidence.Active
	case reservation.OrderNone, reservation.OrderFenced, reservation.OrderRejected:
		return true
	default:
		return false
	}
}

// values are those that repairs change.
func (v view) values() map[string]any {
	out := v.redis()
	out["claim"] = v.postgres()["claim"]
	return out
}

// merge makes one report of what a run found, what it repaired, and what a run
// after it found: its verdict is that of the state afterwards. A finding that
// was repaired stays in it as done; it counts in no sum.
func (p *repairer) merge(after *Report) *Report {
	stands := map[findingKey]*Finding{}
	for i := range after.Findings {
		f := &after.Findings[i]
		stands[keyOf(*f)] = f
		if f.Check == CheckLostReservation && p.deficit[Ref{f.Scope.Reservation(), f.Subject}] {
			f.isDeficit()
		}
	}
	for _, f := range p.report.Findings {
		now, still := stands[keyOf(f)]
		switch {
		case still && f.Repair.State == RepairStateDone:
			now.Repair = f.Repair
			now.failed(f.Repair.Detail + ", and it stands again")
		case still && f.Repair.Kind == RepairAutomatic:
			now.Repair = f.Repair
		case f.Repair.State == RepairStateDone:
			after.Findings = append(after.Findings, f)
		}
	}
	after.RunID, after.StartedAt = p.report.RunID, p.report.StartedAt
	after.Incomplete = append(after.Incomplete, p.gaps...)
	after.finish(after.FinishedAt)
	return after
}

// cutOff is the report of a run that was told to stop while it repaired: it says
// what was done by then.
func (p *repairer) cutOff() *Report {
	for i := range p.report.Findings {
		if f := &p.report.Findings[i]; f.Repair.State == RepairStatePlanned {
			f.skip("the run was told to stop before")
		}
		if f := &p.report.Findings[i]; f.Check == CheckLostReservation && p.deficit[Ref{f.Scope.Reservation(), f.Subject}] {
			f.isDeficit()
		}
	}
	p.report.Incomplete = append(p.report.Incomplete, p.gaps...)
	p.report.stop("the run was told to stop while it repaired: what stands now was not read again")
	p.report.finish(time.Now())
	return p.report
}

// isDeficit makes a deficit of a lost reservation.
func (f *Finding) isDeficit() {
	f.Check, f.cause = CheckDeficit, "no_unit"
	f.Message += ", and no unit is left for it"
}
