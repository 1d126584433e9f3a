package approval

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

// ErrHeld says that a person holds the scope: nothing in it is changed.
var ErrHeld = errors.New("the scope is held: see `reconciler scope list`")

// ErrObserve says that mode observe and --dry-run change nothing.
var ErrObserve = errors.New("mode is observe: nothing is changed")

// applyPage is how many reservations are read again and carried out at once:
// little time passes between the two.
const applyPage = 50

// Apply carries out the plan's proposals as far as the world is still what
// they rest on, and resolves the task if nothing is left behind it. The error
// says why nothing, or nothing more, was carried out; the report holds what was.
// Running it again does no harm.
func (a *Approver) Apply(ctx context.Context, plan Plan, by Act) (Report, error) {
	report := Report{Plan: plan}
	if a.Observe {
		return report, ErrObserve
	}
	if by.Actor == "" || by.Reason == "" {
		return report, errors.New("an approval needs a named person and a reason")
	}
	err := a.applyAll(ctx, &report, by)
	if err == nil {
		report.Resolved, err = a.resolve(ctx, report, by)
	}
	return report, err
}

// applyAll carries out the proposals page by page, and those about the scope
// as a whole one by one.
func (a *Approver) applyAll(ctx context.Context, report *Report, by Act) error {
	isRecount := func(p Proposal) bool { return p.Expected.Recount != nil }
	for _, p := range report.Plan.Proposals {
		if !isRecount(p) {
			continue
		}
		results := []Result{{Proposal: p, Outcome: Nothing, Detail: p.Why}}
		var err error
		if p.Action == Recount {
			results, err = a.recount(ctx, report.Plan, p, by)
		}
		report.Results = append(report.Results, results...)
		if err != nil {
			return err
		}
	}
	members := slices.DeleteFunc(slices.Clone(report.Plan.Proposals), isRecount)
	for page := range slices.Chunk(members, applyPage) {
		results, err := a.applyPage(ctx, report.Plan, page, by)
		report.Results = append(report.Results, results...)
		if err != nil {
			return err
		}
	}
	return nil
}

// work is the results of a page, with what was read for them.
type work struct {
	plan    Plan
	by      Act
	results []Result
	is      map[string]subject
}

// applyPage checks a page's proposals against the world and carries out what
// still holds.
func (a *Approver) applyPage(ctx context.Context, plan Plan, proposals []Proposal, by Act) ([]Result, error) {
	w := &work{plan: plan, by: by}
	for _, p := range proposals {
		w.results = append(w.results, Result{Proposal: p, Outcome: Nothing, Detail: p.Why})
	}
	// Asked right before every page: an approval may take long, and the task may
	// be decided or the scope held meanwhile.
	if err := a.admitted(ctx, plan, proposals); err != nil {
		return nil, err
	}
	if err := a.compare(ctx, w); err != nil {
		return nil, err
	}
	due := w.due()
	if len(due) == 0 {
		return w.results, a.finish(ctx, w)
	}
	// Nothing is changed that nobody could find in the audit trail.
	if err := a.Postgres.AuditEach(ctx, w.entries(due, "repair_started")); err != nil {
		return nil, fmt.Errorf("nothing is done without its entry in the audit trail: %w", err)
	}
	a.carryOut(ctx, w, due)
	// What was done is said even if there is no time left to do more.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), afterLimit)
	defer cancel()
	a.readAfter(ctx, w, due)
	err := a.Postgres.AuditEach(ctx, w.entries(due, "repair_ended"))
	if err != nil {
		err = fmt.Errorf("what was done is not in the audit trail, only that it was begun: %w", err)
	}
	return w.results, errors.Join(err, a.finish(ctx, w))
}

const afterLimit = 15 * time.Second

// admitted says whether anything may be done for the task now.
func (a *Approver) admitted(ctx context.Context, plan Plan, proposals []Proposal) error {
	t, err := a.Postgres.Task(ctx, plan.Task.ID)
	if err != nil {
		return err
	}
	if err := Check(t, plan.Selection); err != nil {
		return err
	}
	held, err := a.Postgres.HeldScopes(ctx)
	if err != nil {
		return fmt.Errorf("which scopes are held: %w", err)
	}
	if slices.Contains(held, plan.Scope) {
		return fmt.Errorf("%s: %w", plan.Scope, ErrHeld)
	}
	if !slices.ContainsFunc(proposals, func(p Proposal) bool { return p.Action.movesStock() }) {
		return nil
	}
	if err := a.Gate.Ready(ctx); err != nil {
		return fmt.Errorf("no unit may be moved now: %w", err)
	}
	return nil
}

// compare reads the world again and sorts out what is no longer as proposed.
func (a *Approver) compare(ctx context.Context, w *work) error {
	ids := make([]string, len(w.results))
	for i, r := range w.results {
		ids[i] = r.ID
	}
	subjects, err := a.look(ctx, w.plan.Task, w.plan.Scope, ids)
	if err != nil {
		return err
	}
	before := a.stock(ctx, w.plan.Scope)
	w.is = map[string]subject{}
	for _, s := range subjects {
		w.is[s.ID] = s
	}
	for i := range w.results {
		r := &w.results[i]
		s := w.is[r.ID]
		r.Before = Values{World: s.world(), Stock: before}
		r.After = r.Before
		if r.Action == None {
			continue
		}
		now := a.propose(w.plan.Task, s)
		switch moved := r.Expected.moved(r.Before.World); {
		case r.Action.endsAs(r.Before.Status), r.Action == Fence && r.Before.Claim == reservation.OutcomeFenced:
			r.Outcome, r.Detail = Already, "it is "+cmp.Or(string(r.Before.Status), string(r.Before.Claim))
		case moved != "":
			r.Outcome, r.Detail = Moved, moved
		case now.Action != r.Action:
			r.Outcome, r.Detail = Moved, fmt.Sprintf("%s was proposed, and now it is %s: %s", r.Action, now.Action, now.Why)
		default:
			r.Outcome = ""
		}
	}
	return nil
}

// due are the results that nothing speaks against so far.
func (w *work) due() []*Result {
	var due []*Result
	for i := range w.results {
		if w.results[i].Outcome == "" {
			due = append(due, &w.results[i])
		}
	}
	return due
}

// carryOut runs the actions; each result has an outcome afterwards.
func (a *Approver) carryOut(ctx context.Context, w *work, due []*Result) {
	byAction := map[Action][]*Result{}
	for _, r := range due {
		byAction[r.Action] = append(byAction[r.Action], r)
	}
	a.confirm(ctx, w, byAction[Confirm])
	a.restore(ctx, w, byAction[Restore])
	a.restore(ctx, w, byAction[TakeUnit])
	a.release(ctx, w, byAction[Release])
	a.adopt(ctx, w, byAction[Adopt])
	for _, r := range a.fence(ctx, w, byAction[Fence], reasonLeaked) {
		r.is(Applied, "no order can come for it any more; no stock moved")
	}
}

// readAfter reads the world as it is behind the actions. What another approver
// or the daemon did meanwhile is done, and no move against the proposal.
func (a *Approver) readAfter(ctx context.Context, w *work, due []*Result) {
	ids := make([]string, len(due))
	for i, r := range due {
		ids[i] = r.ID
	}
	subjects, err := a.look(ctx, w.plan.Task, w.plan.Scope, ids)
	stock := a.stock(ctx, w.plan.Scope)
	for i, r := range due {
		r.After = Values{Stock: stock}
		if err != nil {
			r.Detail = joinText(r.Detail, "what it is afterwards could not be read: "+err.Error())
			continue
		}
		r.After.World = subjects[i].world()
		if r.Outcome != Applied && r.Outcome != Failed && r.Action.endsAs(r.After.Status) {
			r.Outcome, r.Detail = Already, fmt.Sprintf("somebody else was faster: it is %s", r.After.Status)
		}
	}
}

// finish forgets the proposals that are carried out, and keeps in the place of
// those from which the world moved what would be proposed now.
func (a *Approver) finish(ctx context.Context, w *work) error {
	var done, moved []string
	for _, r := range w.results {
		switch r.Outcome {
		case Applied, Already:
			done = append(done, r.ID)
		case Moved:
			moved = append(moved, r.ID)
		default: // still proposed
		}
	}
	if err := a.Postgres.DropProposals(ctx, w.plan.Task.ID, append(done, moved...)); err != nil {
		return fmt.Errorf("what is carried out is still proposed: %w", err)
	}
	if len(moved) == 0 {
		return nil
	}
	proposals, err := a.proposeFor(ctx, w.plan.Task, w.plan.Scope, moved)
	if err != nil {
		return fmt.Errorf("propose anew what moved: %w", err)
	}
	return a.Keep(ctx, Plan{Task: w.plan.Task, Proposals: proposals})
}

// resolve ends the task if all that was selected is done and a new search finds
// nothing behind it any more.
func (a *Approver) resolve(ctx context.Context, report Report, by Act) (bool, error) {
	counts := report.Counts()
	done := counts[Applied] + counts[Already]
	if done == 0 || done < len(report.Results) || report.Plan.Truncated {
		return false, nil
	}
	if report.Plan.Task.Kind == reservation.TaskEvidenceStuck { // what else stands behind it is not known
		return false, nil
	}
	left, err := a.Propose(ctx, report.Plan.Task, Selection{Max: 1})
	if err != nil || len(left.Proposals) > 0 || left.Unclear > 0 {
		return false, err
	}
	err = a.Postgres.ResolveTask(ctx, report.Plan.Task.ID, by.Actor, by.Reason)
	if _, decided := errors.AsType[*pgstore.TaskDecidedError](err); decided {
		return false, nil // by another one, for whom nothing was left either
	}
	return err == nil, err
}

// stock reads the scope's numbers for the audit trail; nil if they are not to
// be had. No decision rests on them.
func (a *Approver) stock(ctx context.Context, scope reservation.Scope) *Stock {
	snapshot := a.Redis.Snapshots(ctx, []reservation.Scope{scope})[0]
	if snapshot.Err != nil || !snapshot.Configured() {
		return nil
	}
	return &Stock{snapshot.Initial, snapshot.Available, snapshot.Reserved, max(snapshot.ReleasedTotal, 0)}
}

// entries are the audit rows of the results: who, what, before, after, why.
func (w *work) entries(results []*Result, action string) []pgstore.AuditEntry {
	entries := make([]pgstore.AuditEntry, len(results))
	for i, r := range results {
		detail := map[string]any{
			"task": strconv.FormatInt(w.plan.Task.ID, 10), "kind": w.plan.Task.Kind, "action": r.Action, "before": r.Before,
		}
		if r.Outcome != "" {
			detail["outcome"], detail["detail"], detail["after"] = r.Outcome, r.Detail, r.After
		}
		entries[i] = pgstore.AuditEntry{
			Actor: w.by.Actor, Action: action, Scope: w.plan.Scope.Tag(), Subject: r.ID, Reason: w.by.Reason, Detail: detail,
		}
	}
	return entries
}

func joinText(a, b string) string {
	if a == "" {
		return b
	}
	return a + "; " + b
}
