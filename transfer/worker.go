package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// Names under which a pass counts what it did.
const (
	DoneBegun        = "begun"           // planned legs that took units out
	DoneRaised       = "raised"          // receivers that got units
	DoneToppedUp     = "topped_up"       // donors' legs that were made up for
	DoneLowered      = "lowered"         // receivers that gave units back
	DoneFinished     = "finished"        // pairs noted as equal
	DoneCancelled    = "cancelled"       // rows noted as not to be begun
	DoneInsufficient = "insufficient"    // planned legs that found too few units
	DoneWaiting      = pass.DoneDeferred // pairs for which nothing could be done
	DoneConflict     = pass.DoneHalted   // versions in which nothing is moved
)

// TaskConflict asks a person about a version whose stock somebody else changed
// while units are to be moved (protocol §4).
const TaskConflict = "transfer_conflict"

// Causes of [TaskConflict].
const (
	CauseSum    = "sum"    // Σ initial + in transit is not what was allocated
	CauseMarker = "marker" // a marker is not what a script would have written
)

// Tasks takes what a person is asked for.
type Tasks interface {
	ReportTasks(ctx context.Context, reports []reservation.TaskReport) error
}

// Worker drives the pairs of all live versions to equality. Any number of
// workers may run beside each other: what each does rests on absolute targets.
type Worker struct {
	Journal Journal
	Stocks  Stocks
	Drift   Drift
	Tasks   Tasks
	Observe bool // decide, count and report; change nothing
}

// maxRounds bounds one pass. A transfer takes three rounds: out, in, and seeing
// that it is so.
const maxRounds = 6

// Pass looks at every pair of every version within its retention.
func (w *Worker) Pass(ctx context.Context) (*pass.Tally, error) {
	return w.Drive(ctx, Filter{Journalled: true})
}

// Drive is a pass over the versions that the filter selects. Its error joins
// what could not be read or run; the others were driven all the same.
func (w *Worker) Drive(ctx context.Context, f Filter) (*pass.Tally, error) {
	f.Journalled = true
	tally := pass.NewTally()
	for n := range maxRounds {
		r := &round{worker: w, tally: tally, first: n == 0}
		if err := r.run(ctx, f); err != nil {
			tally.Failed(err)
		}
		if !r.acted || ctx.Err() != nil {
			break
		}
	}
	pass.Finish(ctx, w.Tasks, tally)
	return tally, tally.Err()
}

// round reads everything once, and runs at most one leg of each pair.
type round struct {
	worker *Worker
	tally  *pass.Tally
	first  bool // counts what waits
	acted  bool

	pairs   []Pair
	steps   []Step
	changes []Change
}

func (r *round) run(ctx context.Context, f Filter) error {
	versions, err := r.worker.Journal.Versions(ctx, f)
	if err != nil {
		return fmt.Errorf("read the journal of transfers: %w", err)
	}
	reader := Reader{r.worker.Journal, r.worker.Stocks}
	for _, books := range reader.Books(ctx, versions) {
		r.judge(books)
	}
	r.holdBack(ctx)
	if r.worker.Observe {
		return nil
	}
	r.move(ctx)
	return r.note(ctx)
}

// errSum says that the sums of a version do not hold.
var errSum = errors.New("the initial stocks and what is in transit are not what was allocated")

// judge decides for the pairs of one version, if its sums hold.
func (r *round) judge(b Books) {
	err := b.Check()
	if err == nil && b.Difference() != 0 {
		err = fmt.Errorf("%w: %d units, %+d in transit, %d allocated", errSum, b.Initial(), b.InTransit(), b.Version.Allocated)
	}
	switch {
	case errors.Is(err, ErrMoving):
		r.acted = true // the next round sees it whole
	case errors.Is(err, ErrContradictory):
		r.conflict(b, CauseMarker, err)
	case errors.Is(err, errSum):
		r.conflict(b, CauseSum, err)
	case err != nil:
		if r.first {
			r.tally.Seen += len(b.Version.Transfers)
		}
		r.tally.Failed(fmt.Errorf("transfers of %s: %w", b.Version.first(), err))
	default:
		for _, p := range b.Pairs() {
			r.decide(p, Next(p))
		}
	}
}

// conflict asks a person, if there is anything that is not done for it.
func (r *round) conflict(b Books, cause string, err error) {
	var waiting []string
	for _, p := range b.Pairs() {
		if p.InTransit() != 0 || p.Transfer.Open() || cause == CauseMarker {
			waiting = append(waiting, p.Transfer.ID)
		}
	}
	if !r.first || len(waiting) == 0 {
		return
	}
	r.tally.Seen += len(b.Version.Transfers)
	r.tally.Did(DoneConflict, 1)
	for _, id := range waiting {
		r.tally.Task(b.Version.first(), TaskConflict, cause, id)
	}
	r.tally.Failed(fmt.Errorf("transfers of %s are not driven: %w", b.Version.first(), err))
}

// decide notes what is to be done for a pair.
func (r *round) decide(p Pair, s Step) {
	if r.first {
		r.tally.Seen++
		if s.Verb == Wait {
			r.tally.Did(DoneWaiting, 1)
		}
	}
	if s.Verb == Wait && p.Held { // not even its row is touched
		return
	}
	if s.State != p.Transfer.State {
		note := ""
		if s.Verb == Cancel {
			note = s.Why
		}
		r.changes = append(r.changes, Change{p.Transfer.ID, p.Transfer.State, s.State, note})
	}
	if _, moves := s.Move(p.Transfer); moves {
		r.pairs, r.steps = append(r.pairs, p), append(r.steps, s)
	}
}

// holdBack drops planned legs out of buckets whose units are needed there: no
// OUT is begun from a negative deviation (protocol §4).
func (r *round) holdBack(ctx context.Context) {
	var donors []reservation.Scope
	for i, s := range r.steps {
		if d := r.pairs[i].Transfer.DonorScope(); s.Verb == Begin && !slices.Contains(donors, d) {
			donors = append(donors, d)
		}
	}
	if len(donors) == 0 {
		return
	}
	needed := map[reservation.Scope]bool{}
	for i, d := range r.worker.Drift.Deviations(ctx, donors) {
		switch {
		case d.Err != nil:
			needed[donors[i]] = true
			r.tally.Failed(fmt.Errorf("no unit leaves %s: whether its own orders need them is not known: %w", donors[i], d.Err))
		case d.Units < 0:
			needed[donors[i]] = true
			r.tally.Did(DoneWaiting, 1)
		}
	}
	var pairs []Pair
	var steps []Step
	for i, s := range r.steps {
		if s.Verb != Begin || !needed[r.pairs[i].Transfer.DonorScope()] {
			pairs, steps = append(pairs, r.pairs[i]), append(steps, s)
		}
	}
	r.pairs, r.steps = pairs, steps
}

// move runs the legs.
func (r *round) move(ctx context.Context) {
	if len(r.steps) == 0 || ctx.Err() != nil {
		return
	}
	moves := make([]Move, len(r.steps))
	for i, s := range r.steps {
		moves[i], _ = s.Move(r.pairs[i].Transfer)
	}
	var restocked []reservation.Scope
	for i, o := range r.worker.Stocks.MoveUnits(ctx, moves) {
		r.moved(r.pairs[i], r.steps[i], o)
		if o.Changed && r.steps[i].Verb == Raise && r.pairs[i].Transfer.Reason != ReasonDeficit {
			restocked = append(restocked, r.pairs[i].Transfer.ReceiverScope())
		}
	}
	if len(restocked) == 0 {
		return
	}
	if err := r.worker.Stocks.PublishAvailable(ctx, restocked); err != nil {
		// Best effort: a gateway's marker ends by itself a moment later.
		r.tally.Did(pass.DoneNoticeLost, len(restocked))
	}
}

// moved counts what became of one leg.
func (r *round) moved(p Pair, s Step, o Outcome) {
	switch {
	case o.Err != nil:
		r.tally.Did(pass.DoneFailed, 1)
		r.tally.Failed(fmt.Errorf("%s transfer %s: %w", s.Verb, p.Transfer.ID, o.Err))
	case o.Contradicts:
		r.tally.Did(pass.DoneRefused, 1)
		r.tally.Task(p.Transfer.Key.Scope(0), TaskConflict, CauseMarker, p.Transfer.ID)
		r.tally.Failed(fmt.Errorf("%s transfer %s: the script refused with %s", s.Verb, p.Transfer.ID, o.Code))
	case o.Insufficient:
		r.tally.Did(DoneInsufficient, 1)
		r.changes = append(r.changes, Change{p.Transfer.ID, p.Transfer.State, Cancelled, fmt.Sprintf("fewer than %d units were available", p.Transfer.Amount)})
	case o.Changed:
		r.acted = true
		r.tally.Did(map[Verb]string{Begin: DoneBegun, Raise: DoneRaised, TopUp: DoneToppedUp, Lower: DoneLowered}[s.Verb], 1)
	}
}

// note writes what was seen into the journal. The markers hold all that the
// pairs need, so a note that is lost is made in the next pass.
func (r *round) note(ctx context.Context) error {
	if len(r.changes) == 0 {
		return nil
	}
	if err := r.worker.Journal.NoteTransfers(ctx, r.changes); err != nil {
		return fmt.Errorf("note the state of %d transfers: %w", len(r.changes), err)
	}
	for _, c := range r.changes {
		switch c.To {
		case Done:
			r.tally.Did(DoneFinished, 1)
		case Cancelled:
			r.tally.Did(DoneCancelled, 1)
		default:
		}
	}
	return nil
}
