package pass

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/seckill/reconciler/reservation"
)

// Decision counts decisions alike: the row of the table of protocol §3, what
// it asks for, and why.
type Decision struct {
	Row   int              `json:"row"`
	Verb  reservation.Verb `json:"verb"`
	Cause string           `json:"cause"`
}

// Names under which [Tally.Done] counts what a pass did.
const (
	DoneDeferred     = "deferred"
	DoneUnindexed    = "unindexed"
	DoneReindexed    = "reindexed"
	DoneOrderCreated = "order_created"
	DoneConfirmed    = "confirmed"
	DoneReleased     = "released"
	DoneFenced       = "fenced"
	DoneFenceLost    = "fence_lost"
	DoneSent         = "sent"
	DoneResent       = "resent"
	DoneSendUnknown  = "send_unknown"
	DoneSendBlocked  = "send_blocked"
	DoneSendRefused  = "send_refused"
	DoneRefused      = "refused"     // a script found another state than the decision rested on
	DoneFailed       = "failed"      // a script that could not be run, or of unknown outcome
	DoneHalted       = "halted"      // a release that max_release or another halt holds back
	DoneNoticeLost   = "notice_lost" // a restock notice that no gateway got
)

// Tally is the counted result of a pass. It is not safe for concurrent use.
type Tally struct {
	Seen      int              // members looked at
	Decisions map[Decision]int // of those decided
	Done      map[string]int   // effects by name
	Unknown   int              // decisions that rested on UNKNOWN evidence
	Complete  bool             // every due range was walked to its end

	tasks    map[taskKey]*reservation.TaskReport
	errs     []error
	moreErrs int // beyond maxErrors
}

type taskKey struct{ kind, scope, cause string }

// sampleSize bounds the reservation ids that a task report names.
const sampleSize = 10

// NewTally is an empty tally.
func NewTally() *Tally {
	return &Tally{Decisions: map[Decision]int{}, Done: map[string]int{}, tasks: map[taskKey]*reservation.TaskReport{}}
}

// Decided counts one decision and notes its task.
func (t *Tally) Decided(m reservation.Member, a reservation.Action, unknown bool) {
	t.Seen++
	t.Decisions[Decision{a.Row, a.Verb, a.Cause}]++
	if unknown {
		t.Unknown++
	}
	if a.Task != nil {
		t.Task(m.Scope, a.Task.Kind, a.Task.Cause, m.ID)
	}
}

// Did counts n effects of a name.
func (t *Tally) Did(name string, n int) {
	if n != 0 {
		t.Done[name] += n
	}
}

// Task notes that a person is asked, once per (kind, scope, cause) however
// many members ask for it (protocol §3). The zero scope is the whole
// installation.
func (t *Tally) Task(s reservation.Scope, kind, cause, subject string) {
	tag := ""
	if s != (reservation.Scope{}) {
		tag = s.Tag()
	}
	key := taskKey{kind, tag, cause}
	report := t.tasks[key]
	if report == nil {
		report = &reservation.TaskReport{Kind: kind, Scope: tag, Cause: cause}
		t.tasks[key] = report
	}
	report.Count++
	if len(report.Sample) < sampleSize && subject != "" {
		report.Sample = append(report.Sample, subject)
	}
}

// Tasks are the reports noted, in a fixed order.
func (t *Tally) Tasks() []reservation.TaskReport {
	reports := make([]reservation.TaskReport, 0, len(t.tasks))
	for _, r := range t.tasks {
		reports = append(reports, *r)
	}
	slices.SortFunc(reports, func(a, b reservation.TaskReport) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Scope, b.Scope), cmp.Compare(a.Cause, b.Cause))
	})
	return reports
}

// Counted is a decision with how often it was made.
type Counted struct {
	Decision
	Count int `json:"count"`
}

// Sorted lists the decisions by row, verb and cause.
func (t *Tally) Sorted() []Counted {
	all := make([]Counted, 0, len(t.Decisions))
	for d, n := range t.Decisions {
		all = append(all, Counted{d, n})
	}
	slices.SortFunc(all, func(a, b Counted) int {
		return cmp.Or(cmp.Compare(a.Row, b.Row), cmp.Compare(a.Verb, b.Verb), cmp.Compare(a.Cause, b.Cause))
	})
	return all
}

// maxErrors bounds the errors that are kept: a Redis that refuses writes fails
// every member of a pass alike.
const maxErrors = 10

// Failed notes an error that did not end the pass: one bad scope, page or item
// never stops the others.
func (t *Tally) Failed(err error) {
	switch {
	case err == nil:
	case len(t.errs) < maxErrors:
		t.errs = append(t.errs, err)
	default:
		t.moreErrs++
	}
}

// Err joins the errors noted, as many as are kept, and counts the others.
func (t *Tally) Err() error {
	err := errors.Join(t.errs...)
	if t.moreErrs > 0 {
		err = fmt.Errorf("%w\nand %d more errors", err, t.moreErrs)
	}
	return err
}

// ByRow sums the decisions per row, keyed as the rows are shown.
func (t *Tally) ByRow() map[string]int {
	rows := map[string]int{}
	for d, n := range t.Decisions {
		rows[RowName(d.Row)] += n
	}
	return rows
}

// QuietCounts are the names in [Tally.Counts] of what was looked at and still
// waits: with a broker away that is every pass.
func QuietCounts() []string {
	return []string{"seen", "unknown", DoneDeferred, DoneHalted, DoneSendBlocked}
}

// RowName is how a row of the table is shown: its number, or "orphan".
func RowName(row int) string {
	if row == reservation.RowOrphan {
		return "orphan"
	}
	return strconv.Itoa(row)
}

// Counts flattens the tally for logs, metrics and the job table: what was
// done, and how many members were seen.
func (t *Tally) Counts() map[string]int {
	counts := maps.Clone(t.Done)
	counts["seen"] = t.Seen
	if t.Unknown > 0 {
		counts["unknown"] = t.Unknown
	}
	return counts
}

// RestsOnUnknown says whether a decision was a wait for evidence that could
// not be read: such a pass is incomplete, not clean (interface §7).
func RestsOnUnknown(in reservation.Input, a reservation.Action) bool {
	if a.Verb != reservation.VerbWait || a.Row == reservation.RowOrphan || a.Row == 0 {
		return false
	}
	if a.Row == 2 {
		return in.Orders.State != reservation.OrderContradictory
	}
	if !reservation.NeedsMessages(in) {
		return false
	}
	known := []reservation.MessageState{reservation.MessagePending, reservation.MessageRetrying, reservation.MessageDead}
	return !slices.Contains(known, in.Messages.State) && a.Cause != "send_refused"
}
