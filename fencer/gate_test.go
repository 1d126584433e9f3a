package fencer

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

func TestMaxReleaseAllows(t *testing.T) {
	m := MaxRelease{Percent: 5, Min: 20}
	for _, c := range []struct{ reserved, fenced, want int64 }{
		{0, 0, 20},
		{399, 0, 20},
		{1000, 0, 50},
		{950, 50, 50}, // the window began with 1,000: releasing must not shrink the budget
		{10_000, 0, 500},
		{0, 10_000, 500},
	} {
		if got := m.allows(c.reserved, c.fenced); got != c.want {
			t.Errorf("%d reserved, %d fenced: %d, want %d", c.reserved, c.fenced, got, c.want)
		}
	}
}

// ledger is PostgreSQL and Redis as the gate asks them. The budget's
// arithmetic is tested here; the fence itself against real servers elsewhere.
type ledger struct {
	use      map[reservation.Scope]ReleaseUse
	reserved map[reservation.Scope]int64 // absent: not readable
	reports  []reservation.TaskReport
	records  map[string]reservation.Record
	results  map[string]reservation.FenceResult
	asked    map[string][]string // ids by reason
	err      error
}

func (l *ledger) ReadyToRelease(context.Context) error { return nil }

func (l *ledger) Records(context.Context, []string) (map[string]reservation.Record, error) {
	return l.records, nil
}

func (l *ledger) Fence(_ context.Context, reason string, requests []reservation.FenceRequest) ([]reservation.FenceResult, error) {
	var results []reservation.FenceResult
	for _, r := range requests {
		l.asked[reason] = append(l.asked[reason], r.ID)
		if result, ok := l.results[r.ID]; ok {
			results = append(results, result)
		}
	}
	return results, l.err
}

func (l *ledger) ReleaseUse(context.Context, []reservation.Scope, time.Duration) (map[reservation.Scope]ReleaseUse, error) {
	if l.use == nil {
		return nil, errors.New("unreachable")
	}
	return l.use, nil
}

func (l *ledger) Reserved(_ context.Context, scopes []reservation.Scope) []Reserved {
	readings := make([]Reserved, len(scopes))
	for i, s := range scopes {
		units, ok := l.reserved[s]
		readings[i] = Reserved{Units: units}
		if !ok {
			readings[i] = Reserved{Err: errors.New("not a stock"), Broken: true}
		}
	}
	return readings
}

func (l *ledger) ReportTasks(_ context.Context, reports []reservation.TaskReport) error {
	l.reports = append(l.reports, reports...)
	return nil
}

func (l *ledger) gate() *Gate {
	return &Gate{Claims: l, Stock: l, Tasks: l, Max: MaxRelease{Percent: 5, Min: 20}}
}

var (
	scopeA = reservation.Scope{ActivityID: "a", SKUID: "s", Version: 1}
	scopeB = reservation.Scope{ActivityID: "a", SKUID: "s", Version: 1, Bucket: 1}
)

func cases(s reservation.Scope, reason string, n int) []pass.Case {
	all := make([]pass.Case, n)
	for i := range all {
		all[i].Input.Member = reservation.Member{Scope: s, ID: fmt.Sprintf("%d-%s-%d", s.Bucket, reason, i)}
		all[i].Action = reservation.Action{Verb: reservation.VerbRelease, Cause: reason}
	}
	return all
}

func won(cs ...pass.Case) map[string]reservation.FenceResult {
	results := map[string]reservation.FenceResult{}
	for _, c := range cs {
		results[c.Member().ID] = reservation.FenceResult{ID: c.Member().ID, Known: true, Won: true, Outcome: reservation.OutcomeFenced}
	}
	return results
}

func TestGateHoldsBackWhatExceedsTheBudget(t *testing.T) {
	l := &ledger{
		use:      map[reservation.Scope]ReleaseUse{scopeA: {Fenced: 17}},
		reserved: map[reservation.Scope]int64{scopeA: 10, scopeB: 10},
		asked:    map[string][]string{},
	}
	a, b := cases(scopeA, "lost", 5), cases(scopeB, "lost", 5)
	all := append(append([]pass.Case(nil), a...), b...)
	l.results = won(all...)
	tally := pass.NewTally()
	got := l.gate().Fence(t.Context(), all, tally)
	if len(got.Won) != 8 || len(got.Halted) != 2 || len(got.Unknown)+len(got.Lost) != 0 {
		t.Errorf("won %d, halted %d, unknown %d, lost %d; want 3 of 20 left and 5 of the other scope, 2 halted",
			len(got.Won), len(got.Halted), len(got.Unknown), len(got.Lost))
	}
	want := []reservation.TaskReport{{Kind: TaskReleaseStorm, Scope: scopeA.Tag(), Cause: "max_release", Count: 2, Sample: []string{a[3].Member().ID, a[4].Member().ID}}}
	if diff := cmp.Diff(want, l.reports); diff != "" {
		t.Error(diff)
	}
}

// What somebody else decided since its evidence was read is no storm.
func TestGateNeedsNoBudgetForWhatIsDecided(t *testing.T) {
	all := cases(scopeA, "lost", 3)
	l := &ledger{
		use:      map[reservation.Scope]ReleaseUse{scopeA: {Fenced: 20}},
		reserved: map[reservation.Scope]int64{scopeA: 10},
		asked:    map[string][]string{},
		records: map[string]reservation.Record{
			all[0].Member().ID: {Claim: &reservation.Claim{Outcome: reservation.OutcomeFenced}},
			all[1].Member().ID: {Claim: &reservation.Claim{Outcome: reservation.OutcomeRejected}},
		},
	}
	got := l.gate().Fence(t.Context(), all, pass.NewTally())
	if len(got.Won) != 1 || len(got.Lost) != 1 || len(got.Halted) != 1 || len(l.reports) != 1 || l.reports[0].Count != 1 {
		t.Errorf("won %d, lost %d, halted %d, reports %v; want one each, and one report of one", len(got.Won), len(got.Lost), len(got.Halted), l.reports)
	}
}

// Nor does it use up what is left for the rest of a page.
func TestGateChargesOnlyWhatIsUndecided(t *testing.T) {
	all := cases(scopeA, "lost", 3)
	l := &ledger{
		use:      map[reservation.Scope]ReleaseUse{scopeA: {Fenced: 19}},
		reserved: map[reservation.Scope]int64{scopeA: 10},
		asked:    map[string][]string{},
		records: map[string]reservation.Record{
			all[0].Member().ID: {Claim: &reservation.Claim{Outcome: reservation.OutcomeFenced}},
			all[1].Member().ID: {Claim: &reservation.Claim{Outcome: reservation.OutcomeFenced}},
		},
		results: won(all[2]),
	}
	got := l.gate().Fence(t.Context(), all, pass.NewTally())
	if len(got.Won) != 3 || len(got.Halted) != 0 || len(l.reports) != 0 {
		t.Errorf("won %d, halted %d, reports %v; want all 3: two are decided, and one is left", len(got.Won), len(got.Halted), l.reports)
	}
	if diff := cmp.Diff(map[string][]string{"lost": {all[2].Member().ID}}, l.asked); diff != "" {
		t.Error(diff)
	}
}

// One scope whose stock is no stock holds up no other one.
func TestGateIsolatesABrokenStock(t *testing.T) {
	l := &ledger{
		use:      map[reservation.Scope]ReleaseUse{},
		reserved: map[reservation.Scope]int64{scopeB: 10},
		asked:    map[string][]string{},
	}
	a, b := cases(scopeA, "lost", 2), cases(scopeB, "lost", 2)
	l.results = won(append(append([]pass.Case(nil), a...), b...)...)
	tally := pass.NewTally()
	got := l.gate().Fence(t.Context(), append(a, b...), tally)
	if len(got.Won) != 2 || len(got.Unknown) != 2 || got.Won[0].Member().Scope != scopeB {
		t.Errorf("won %d, unknown %d; want the 2 of the good scope and the 2 of the broken one", len(got.Won), len(got.Unknown))
	}
	want := []reservation.TaskReport{{Kind: TaskInvariantBroken, Scope: scopeA.Tag(), Cause: "stock_unreadable", Count: 1}}
	if diff := cmp.Diff(want, tally.Tasks()); diff != "" {
		t.Error(diff)
	}
}

func TestGateHalts(t *testing.T) {
	l := &ledger{
		use:      map[reservation.Scope]ReleaseUse{scopeA: {Halted: true}},
		reserved: map[reservation.Scope]int64{scopeA: 1_000_000},
		asked:    map[string][]string{},
	}
	tally := pass.NewTally()
	got := l.gate().Fence(t.Context(), cases(scopeA, "lost", 3), tally)
	if len(got.Halted) != 3 || len(l.asked) != 0 {
		t.Errorf("halted %d, fenced %v; want all 3 halted", len(got.Halted), l.asked)
	}
	// Reporting what is halted already would set the halt again that a person
	// lifts while the pass is under way.
	if len(l.reports)+len(tally.Tasks()) != 0 {
		t.Errorf("reported %v %v", l.reports, tally.Tasks())
	}
}

// What is not known must not look like anything else: not fenced, not lost.
func TestGateKnowsNothingWithoutItsSources(t *testing.T) {
	sources := map[string]*ledger{
		"claims unreachable": {reserved: map[reservation.Scope]int64{scopeA: 100}, asked: map[string][]string{}},
		"stock unreadable":   {use: map[reservation.Scope]ReleaseUse{}, asked: map[string][]string{}},
		"fence failed":       {use: map[reservation.Scope]ReleaseUse{}, reserved: map[reservation.Scope]int64{scopeA: 0}, asked: map[string][]string{}, err: errors.New("connection lost")},
		"fence left one out": {use: map[reservation.Scope]ReleaseUse{}, reserved: map[reservation.Scope]int64{scopeA: 0}, asked: map[string][]string{}},
	}
	for name, l := range sources {
		tally := pass.NewTally()
		got := l.gate().Fence(t.Context(), cases(scopeA, "lost", 2), tally)
		if len(got.Unknown) != 2 || len(got.Won)+len(got.Lost)+len(got.Halted) != 0 {
			t.Errorf("%s: %d unknown of 2", name, len(got.Unknown))
		}
		if name != "fence left one out" && tally.Err() == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestGateSortsByOutcome(t *testing.T) {
	l := &ledger{use: map[reservation.Scope]ReleaseUse{}, reserved: map[reservation.Scope]int64{scopeA: 0}, asked: map[string][]string{}}
	all := append(cases(scopeA, "lost", 3), cases(scopeA, "dead_letter", 1)...)
	l.results = won(all[0], all[3])
	l.results[all[1].Member().ID] = reservation.FenceResult{ID: all[1].Member().ID, Known: true, Outcome: reservation.OutcomeOrder, OrderID: "o"}
	// Fenced by an earlier run that did not get to compensate.
	l.results[all[2].Member().ID] = reservation.FenceResult{ID: all[2].Member().ID, Known: true, Outcome: reservation.OutcomeFenced}
	got := l.gate().Fence(t.Context(), all, pass.NewTally())
	if len(got.Won) != 3 || len(got.Lost) != 1 || got.Lost[0].Member().ID != all[1].Member().ID {
		t.Errorf("won %d, lost %d; want 3 and 1", len(got.Won), len(got.Lost))
	}
	if len(l.asked["lost"]) != 3 || len(l.asked["dead_letter"]) != 1 {
		t.Errorf("fenced by reason %v; the reason is written into the claim", l.asked)
	}
}
