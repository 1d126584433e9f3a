package approval

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// Recounting is what a recount rests on: the stock that was seen, the evidence
// that was counted, and the numbers that follow from it.
type Recounting struct {
	State string        `json:"state"` // of meta
	Seen  lua.StockText `json:"seen"`  // the stock as it stands

	Undecided int64 `json:"undecided"`   // members of reservation_expiry
	Held      int64 `json:"held"`        // |E ∪ O|: units that reservations and orders hold
	ToBeTaken int64 `json:"to_be_taken"` // those of them that no unit was ever taken for, or whose unit was given back

	Becomes Stock `json:"becomes"`
}

// moved says what differs; empty for nothing.
func (r *Recounting) moved(is *Recounting) string {
	switch {
	case (r == nil) != (is == nil):
		return "what the recount rests on is there in one of the two only"
	case r == nil || *r == *is:
		return ""
	case r.State != is.State:
		return fmt.Sprintf("the state was %s, is %s", orNone(r.State), orNone(is.State))
	case r.Seen != is.Seen:
		return fmt.Sprintf("the stock was %s, is %s", textOf(r.Seen), textOf(is.Seen))
	default:
		return fmt.Sprintf("the evidence called for %s, calls for %s", textOf(r.Becomes.text()), textOf(is.Becomes.text()))
	}
}

func textOf(s lua.StockText) string {
	return fmt.Sprintf("initial %s, available %s, reserved %s, released_total %s",
		orNone(s.Initial), orNone(s.Available), orNone(s.Reserved), orNone(s.ReleasedTotal))
}

func (s Stock) text() lua.StockText {
	n := func(n int64) string { return strconv.FormatInt(n, 10) }
	return lua.StockText{Initial: n(s.Initial), Available: n(s.Available), Reserved: n(s.Reserved), ReleasedTotal: n(s.ReleasedTotal)}
}

// does says exactly what the recount does.
func (r *Recounting) does() string {
	text := fmt.Sprintf("replace [%s] by [%s]: %d units are held by reservations and orders", textOf(r.Seen), textOf(r.Becomes.text()), r.Held)
	if r.ToBeTaken > 0 {
		text += fmt.Sprintf(", of which %d are taken afterwards, by the repair or the approval of their findings", r.ToBeTaken)
	}
	return text + "; refused unless the scope is still stopped and the stock still this one"
}

// harmless are the findings beside which a scope may be recounted: they do not
// bear on how many units are held, or are counted for what they are. Every other
// one has to be put right before, most of them by --repair.
var harmless = []string{
	reconcile.CheckCountDrift, reconcile.CheckLostReservation, reconcile.CheckOrderAfterRelease, reconcile.CheckStatusBehind,
	reconcile.CheckOrderAfterReleasePending, reconcile.CheckOrphanMember, reconcile.CheckLeakedReservation,
	reconcile.CheckReleaseWithoutClaim, reconcile.CheckUserMarkerMismatch, reconcile.CheckRequestResultMismatch,
	reconcile.CheckMissingTTL, reconcile.CheckCancelledHoldsStock,
}

// anyStock lets a scope be compared whose stock holds no numbers: nothing but
// reserved itself rests on them.
type anyStock struct{ *redisstore.Store }

func (s anyStock) Stocks(ctx context.Context, scopes []reservation.Scope) []reconcile.StockReply {
	replies := s.Store.Stocks(ctx, scopes)
	for i := range replies {
		if r := &replies[i]; strings.HasPrefix(r.Malformed, "stock.") {
			*r = reconcile.StockReply{Stock: reconcile.Stock{SendPending: r.SendPending, Expiry: r.Expiry}}
		}
	}
	return replies
}

// evidence compares every member of the scope on both sides, as reconcile
// --deep does.
func (a *Approver) evidence(ctx context.Context, scope reservation.Scope) (*reconcile.Report, error) {
	checks := []string{reconcile.CheckCountDrift}
	for _, c := range reconcile.Checks() {
		if c.Level == reconcile.LevelSet && c.ID != reconcile.CheckDeficit {
			checks = append(checks, c.ID)
		}
	}
	r := reconcile.Reconciler{Registry: a.Postgres, Stocks: anyStock{a.Redis}, Orders: a.Postgres, Members: a.Redis, Claims: a.Postgres}
	report, err := r.Run(ctx, reconcile.Options{
		Filter: reconcile.Filter{ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: &scope.Version, Bucket: &scope.Bucket},
		Checks: checks, Deep: true, Settle: a.Settle,
	})
	if err != nil {
		return nil, fmt.Errorf("compare Redis and PostgreSQL in %s: %w", scope, err)
	}
	if len(report.Incomplete) > 0 {
		i := report.Incomplete[0]
		return nil, fmt.Errorf("%s could not be read completely, so nothing is proposed: %s: %s", scope, i.Source, i.Reason)
	}
	return report, nil
}

// notRecountableError says why a scope cannot be recounted now.
type notRecountableError struct{ why string }

func (e *notRecountableError) Error() string { return e.why }

func notNow(format string, args ...any) error {
	return &notRecountableError{fmt.Sprintf(format, args...)}
}

// proposeRecount proposes new numbers for the scope, or says why there are none;
// nil where its stock is as the evidence says. It changes nothing.
func (a *Approver) proposeRecount(ctx context.Context, scope reservation.Scope) (*Proposal, error) {
	p := &Proposal{Scope: scope, ID: scope.Tag(), Action: None}
	counted, err := a.count(ctx, scope)
	if why, not := errors.AsType[*notRecountableError](err); not {
		p.Why = why.why
		p.Expected.Recount = &counted
		return p, nil
	}
	if err != nil {
		return nil, err
	}
	if counted.Seen == counted.Becomes.text() {
		return nil, nil //nolint:nilnil // nothing to propose is no error
	}
	p.Action, p.Does, p.Expected.Recount = Recount, counted.does(), &counted
	return p, nil
}

// count finds the numbers that the evidence calls for.
func (a *Approver) count(ctx context.Context, scope reservation.Scope) (Recounting, error) {
	var r Recounting
	var err error
	if r.State, r.Seen, err = a.Redis.StockText(ctx, scope); err != nil {
		return r, err
	}
	if err := r.stopped(scope); err != nil {
		return r, err
	}
	initial, err := a.initial(ctx, scope)
	if err != nil {
		return r, err
	}
	report, err := a.evidence(ctx, scope)
	if err != nil {
		return r, err
	}
	if err := r.take(report); err != nil {
		return r, err
	}
	state, stock, err := a.Redis.StockText(ctx, scope)
	if err != nil {
		return r, err
	}
	if state != r.State || stock != r.Seen {
		return r, notNow("its stock moves while it is read: look again")
	}
	r.Becomes = Stock{Initial: initial, Reserved: r.Held - r.ToBeTaken}
	r.Becomes.Available = initial - r.Becomes.Reserved
	if err := a.fits(ctx, scope, initial); err != nil {
		return r, err
	}
	if r.Becomes.Available < 0 {
		return r, notNow("%d units are held, and the bucket was given %d: more was sold than there is, cancel orders first", r.Becomes.Reserved, initial)
	}
	// It is for audit only; what is no number cannot be kept.
	if n, err := reservation.ParseNumber(r.Seen.ReleasedTotal); err == nil {
		r.Becomes.ReleasedTotal = n
	}
	return r, nil
}

// stopped says why a scope may not be recounted, whatever the evidence is.
func (r *Recounting) stopped(scope reservation.Scope) error {
	switch {
	case r.Seen.Initial == "" || r.Seen.Available == "" || r.Seen.Reserved == "":
		return notNow("config_missing: the stock is not there, or incomplete, and is never filled again")
	case r.State == "CLOSED":
		return notNow("the scope is CLOSED: orders of a closed version may be archived, so that what it holds cannot be counted any more, and nothing is sold from it")
	case r.State != "PAUSED":
		return notNow("the scope is %s: pause it first with `reconciler scope pause %s`, then look again", orNone(r.State), scopeFlags(scope))
	default:
		return nil
	}
}

// fits makes sure that the bucket's initial stock and those of its siblings are
// no more than was allocated. They are when the journal lost a transfer, whose
// units are in another bucket.
func (a *Approver) fits(ctx context.Context, scope reservation.Scope, initial int64) error {
	registered, err := a.Postgres.Scopes(ctx, pgstore.ScopeFilter{ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: &scope.Version})
	if err != nil {
		return err
	}
	var siblings []reservation.Scope
	var allocated int64
	for _, r := range registered {
		if allocated = r.Total; r.Scope != scope {
			siblings = append(siblings, r.Scope)
		}
	}
	sum := initial
	for i, s := range a.Redis.Snapshots(ctx, siblings) {
		if s.Err != nil || s.Initial == lua.Missing {
			return notNow("the stock of its sibling %s could not be read: look again", siblings[i])
		}
		sum += s.Initial
	}
	if sum > allocated {
		return notNow("with %d units in it the buckets would have %d of the %d that were allocated: a transfer may have lost its row in the journal, see docs/transfers.md", initial, sum, allocated)
	}
	return nil
}

// initial is what the bucket was given: as registered, and what transfers brought
// and took by its own markers, which change together with its stock.
func (a *Approver) initial(ctx context.Context, scope reservation.Scope) (int64, error) {
	key := transfer.KeyOf(scope)
	versions, err := a.Postgres.Versions(ctx, transfer.FilterOf(key))
	if err != nil {
		return 0, err
	}
	if len(versions) != 1 || !slices.ContainsFunc(versions[0].Buckets, func(b transfer.Bucket) bool { return b.ID == scope.Bucket }) {
		return 0, notNow("the scope is not registered, or past its retention")
	}
	var ids []string
	for _, t := range versions[0].Transfers {
		if t.Donor == scope.Bucket || t.Receiver == scope.Bucket {
			ids = append(ids, t.ID)
		}
	}
	markers, err := a.Redis.TransferMarkers(ctx, scope, ids)
	if err != nil {
		return 0, notNow("%v", err)
	}
	books := transfer.Books{Version: versions[0], Buckets: map[int64]transfer.Reading{scope.Bucket: {Markers: markers}}}
	return books.Expected(scope.Bucket), nil
}

// take counts what the report says is held. The report is complete.
func (r *Recounting) take(report *reconcile.Report) error {
	if len(report.Scopes) != 1 || report.Scopes[0].Deviation == nil || report.Scopes[0].Redis == nil {
		return notNow("its numbers could not be compared: look again")
	}
	row := report.Scopes[0]
	if row.InMotion {
		return notNow("it moves while it is read: look again")
	}
	r.Undecided = *row.Redis.ReservationExpiry
	r.Held = *row.Redis.Reserved - *row.Deviation
	for _, f := range report.Findings {
		switch {
		case !slices.Contains(harmless, f.Check):
			return notNow("%s of %s stands in the way: %s", f.Check, f.Subject, f.Repair.Detail)
		case f.Check == reconcile.CheckLeakedReservation && f.Evidence.Postgres["claim"] == nil:
			return notNow("an order could still come for reservation %s, which leaked: approve its fence in the task %s first", f.Subject, f.Check)
		case f.Check == reconcile.CheckLostReservation && f.Evidence.Redis["unit_deducted"] == nil:
			return notNow("reservation %s of a cancelled order was lost, and its unit is still deducted: run `reconciler reconcile --repair` first", f.Subject)
		case f.Check == reconcile.CheckOrderAfterRelease, f.Check == reconcile.CheckLostReservation && f.Evidence.Redis["unit_deducted"] == false:
			r.ToBeTaken++
		}
	}
	return nil
}

// proposeLeaked proposes for a scope from which reservations leaked: first the
// fence of each for which an order could still come, then the recount.
func (a *Approver) proposeLeaked(ctx context.Context, t pgstore.Task, scope reservation.Scope, sel Selection) ([]Proposal, bool, error) {
	report, err := a.evidence(ctx, scope)
	if err != nil {
		return nil, false, err
	}
	var ids []string
	for _, f := range report.Findings {
		if f.Check == reconcile.CheckLeakedReservation && f.Evidence.Postgres["claim"] == nil {
			ids = append(ids, f.Subject)
		}
	}
	if len(ids) > 0 {
		truncated := len(ids) > sel.Max
		proposals, err := a.proposeFor(ctx, t, scope, ids[:min(len(ids), sel.Max)])
		return proposals, truncated, err
	}
	if *report.Scopes[0].Deviation <= 0 {
		return nil, false, nil
	}
	p, err := a.proposeRecount(ctx, scope)
	if p == nil || err != nil {
		return nil, false, err
	}
	return []Proposal{*p}, false, nil
}

// recount carries out a recount, if it is still what was proposed.
func (a *Approver) recount(ctx context.Context, plan Plan, p Proposal, by Act) ([]Result, error) {
	if err := a.admitted(ctx, plan, []Proposal{p}); err != nil {
		return nil, err
	}
	w := &work{plan: plan, by: by, results: []Result{{Proposal: p}}}
	r := &w.results[0]
	now, err := a.proposeRecount(ctx, plan.Scope)
	if err != nil {
		return nil, err
	}
	r.Before = Values{World: World{Recount: p.Expected.Recount}}
	switch {
	case now == nil:
		r.is(Already, "its stock is as the evidence says")
	case now.Action == None:
		r.is(Moved, now.Why)
	default:
		r.Before.Recount = now.Expected.Recount
		if moved := p.Expected.Recount.moved(now.Expected.Recount); moved != "" {
			r.is(Moved, moved)
		}
	}
	if r.Outcome != "" {
		return w.results, a.finishRecount(ctx, plan, r, now)
	}
	if err := a.Postgres.AuditEach(ctx, w.entries([]*Result{r}, "repair_started")); err != nil {
		return nil, fmt.Errorf("nothing is done without its entry in the audit trail: %w", err)
	}
	a.runRecount(ctx, r)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), afterLimit)
	defer cancel()
	r.After = a.readRecounted(ctx, plan.Scope)
	err = a.Postgres.AuditEach(ctx, w.entries([]*Result{r}, "repair_ended"))
	if err != nil {
		err = fmt.Errorf("what was done is not in the audit trail, only that it was begun: %w", err)
	}
	return w.results, errors.Join(err, a.finishRecount(ctx, plan, r, nil))
}

// runRecount runs the script, and tells the gateways.
func (a *Approver) runRecount(ctx context.Context, r *Result) {
	e := r.Expected.Recount
	reply, err := a.Redis.Recount(ctx, r.Scope, lua.RecountArgs{
		Seen: e.Seen, Initial: e.Becomes.Initial, Available: e.Becomes.Available, Reserved: e.Becomes.Reserved, ReleasedTotal: e.Becomes.ReleasedTotal,
	})
	switch {
	case err != nil:
		r.failed(err)
	case reply.Code == lua.RecountDone:
		r.is(Applied, "")
	case reply.Code == lua.RecountAlready:
		r.is(Already, "somebody else was faster")
	case reply.Code == lua.RecountChanged, reply.Code == lua.RecountNotStopped:
		r.is(Moved, "recount.lua refused: "+reply.Code.String())
	default:
		r.is(Refused, "recount.lua refused: "+reply.Code.String())
	}
	if r.Outcome != Applied {
		return
	}
	if e.Becomes.Available == 0 {
		_ = a.Redis.PublishSoldOut(ctx, r.Scope) // best effort (spec §5)
	} else {
		_ = a.Redis.PublishAvailable(ctx, []reservation.Scope{r.Scope})
	}
}

// readRecounted reads the stock as it is afterwards, for the audit trail.
func (a *Approver) readRecounted(ctx context.Context, scope reservation.Scope) Values {
	state, seen, err := a.Redis.StockText(ctx, scope)
	if err != nil {
		return Values{}
	}
	return Values{World: World{Recount: &Recounting{State: state, Seen: seen}}, Stock: a.stock(ctx, scope)}
}

// finishRecount forgets a proposal that is carried out, and keeps in the place
// of one from which the world moved what would be proposed now.
func (a *Approver) finishRecount(ctx context.Context, plan Plan, r *Result, now *Proposal) error {
	if r.Outcome == Refused || r.Outcome == Failed { // still proposed
		return nil
	}
	if err := a.Postgres.DropProposals(ctx, plan.Task.ID, []string{r.ID}); err != nil {
		return fmt.Errorf("what is carried out is still proposed: %w", err)
	}
	if now == nil {
		return nil
	}
	return a.Keep(ctx, Plan{Task: plan.Task, Proposals: []Proposal{*now}})
}
