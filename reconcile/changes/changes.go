// Package changes tells what changed from one report of a reconciliation to a
// later one: findings that are new, gone or persist, and scopes whose numbers
// or verdict differ. A finding is gone only if the later run looked again.
package changes

import (
	"cmp"
	"slices"
	"time"

	"github.com/seckill/reconciler/reconcile"
)

// SchemaVersion is the schema number of [Diff] as JSON.
const SchemaVersion = 1

// Diff is what changed from one report to a later one. Findings are the same
// if check, scope and subject are.
type Diff struct {
	Schema int `json:"schema"`
	Old    Run `json:"old"`
	New    Run `json:"new"`

	Appeared []reconcile.Finding `json:"new_findings"` // stand now and did not before
	Gone     []reconcile.Finding `json:"gone"`         // do not stand any more: looked at again, or repaired
	Persist  []reconcile.Finding `json:"persisting"`
	// Unclear stood before, and the later run did not look: the check was not
	// made there, or its scope could not be read.
	Unclear []reconcile.Finding `json:"unclear"`
	// Truncated names the checks of which one of the stored reports holds only a
	// part, so that the lists are not complete.
	Truncated []string `json:"truncated"`

	Scopes []ScopeDiff `json:"scopes"` // those that differ
}

// Run is one of the two runs.
type Run struct {
	RunID      string            `json:"run_id"`
	Mode       string            `json:"mode"`
	FinishedAt time.Time         `json:"finished_at"`
	Verdict    reconcile.Verdict `json:"verdict"`
	Findings   int               `json:"findings"` // that stand
}

// The ways in which a scope differs.
const (
	ScopeAdded   = "added"
	ScopeRemoved = "removed"
	ScopeChanged = "changed"
)

// ScopeDiff is a scope whose numbers or verdict differ.
type ScopeDiff struct {
	reconcile.Scope
	Change  string       `json:"change"`
	Verdict Changed      `json:"verdict"`
	Numbers []NumberDiff `json:"numbers"` // those that differ
}

// Changed is a verdict before and after; "" where the scope was not there.
type Changed struct {
	Old reconcile.Verdict `json:"old"`
	New reconcile.Verdict `json:"new"`
}

// NumberDiff is one number before and after; null is unknown.
type NumberDiff struct {
	Name string `json:"name"`
	Old  *int64 `json:"old"`
	New  *int64 `json:"new"`
}

// Between tells what changed from before to after.
func Between(before, after *reconcile.Report) Diff {
	d := Diff{
		Schema: SchemaVersion, Old: runOf(before), New: runOf(after),
		Appeared: []reconcile.Finding{}, Gone: []reconcile.Finding{}, Persist: []reconcile.Finding{}, Unclear: []reconcile.Finding{}, Truncated: []string{}, Scopes: []ScopeDiff{},
	}
	stood := standing(before)
	stands := standing(after)
	for _, f := range after.Findings {
		switch {
		case !f.Stands():
		case stood[keyOf(f)]:
			d.Persist = append(d.Persist, f)
		default:
			d.Appeared = append(d.Appeared, f)
		}
	}
	saw := newSight(after)
	for _, f := range before.Findings {
		switch {
		case !f.Stands() || stands[keyOf(f)]:
		case saw.again(f):
			d.Gone = append(d.Gone, f)
		default:
			d.Unclear = append(d.Unclear, f)
		}
	}
	for _, omitted := range []map[string]int{before.Omitted, after.Omitted} {
		for check := range omitted {
			d.Truncated = append(d.Truncated, check)
		}
	}
	slices.Sort(d.Truncated)
	d.Truncated = slices.Compact(d.Truncated)
	d.Scopes = append(d.Scopes, scopesBetween(before.Scopes, after.Scopes)...)
	return d
}

func runOf(r *reconcile.Report) Run {
	return Run{RunID: r.RunID, Mode: r.Mode, FinishedAt: r.FinishedAt, Verdict: r.Verdict, Findings: r.Standing()}
}

// key is what makes two findings the same one.
type key struct {
	check   string
	scope   reconcile.Scope
	subject string
}

func keyOf(f reconcile.Finding) key { return key{f.Check, f.Scope, f.Subject} }

func standing(r *reconcile.Report) map[key]bool {
	keys := map[key]bool{}
	for _, f := range r.Findings {
		if f.Stands() {
			keys[keyOf(f)] = true
		}
	}
	return keys
}

// sight is what a run looked at.
type sight struct {
	report     *reconcile.Report
	scopes     map[reconcile.Scope]reconcile.Verdict
	incomplete map[reconcile.Scope]bool
	whole      bool // something that concerns every scope could not be read
	repaired   map[key]bool
	members    map[string]bool // the checks that look at members
}

func newSight(r *reconcile.Report) sight {
	s := sight{report: r, scopes: map[reconcile.Scope]reconcile.Verdict{}, incomplete: map[reconcile.Scope]bool{}, repaired: map[key]bool{}, members: map[string]bool{}}
	for _, row := range r.Scopes {
		s.scopes[row.Scope] = row.Verdict
	}
	for _, i := range r.Incomplete {
		if i.Scope == nil {
			s.whole = true
		} else {
			s.incomplete[*i.Scope] = true
		}
	}
	for _, f := range r.Findings {
		if !f.Stands() {
			s.repaired[keyOf(f)] = true
		}
	}
	for _, c := range reconcile.Checks() {
		if c.Level == reconcile.LevelSet {
			s.members[c.ID] = true
		}
	}
	return s
}

// again says whether the run would name the finding if it still stood. A quick
// run looks at the members of scopes with drift alone.
func (s sight) again(f reconcile.Finding) bool {
	if s.repaired[keyOf(f)] {
		return true
	}
	if _, made := s.report.Summary[f.Check]; !made || s.whole || s.incomplete[f.Scope] || s.report.Omitted[f.Check] > 0 {
		return false
	}
	verdict, there := s.scopes[f.Scope]
	if f.Check == reconcile.CheckUnregisteredScope { // of scopes that are in no report
		return true
	}
	return there && (!s.members[f.Check] || s.report.Mode == reconcile.ModeDeep || verdict == reconcile.VerdictDrift)
}

func scopesBetween(before, after []reconcile.ScopeReport) []ScopeDiff {
	was, is := byScope(before), byScope(after)
	var all []reconcile.Scope
	for s := range was {
		all = append(all, s)
	}
	for s := range is {
		if _, both := was[s]; !both {
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b reconcile.Scope) int {
		return cmp.Or(cmp.Compare(a.ActivityID, b.ActivityID), cmp.Compare(a.SKUID, b.SKUID), cmp.Compare(a.Version, b.Version), cmp.Compare(a.Bucket, b.Bucket))
	})
	var diffs []ScopeDiff
	for _, s := range all {
		old, had := was[s]
		now, has := is[s]
		d := ScopeDiff{Scope: s, Change: ScopeChanged, Verdict: Changed{old.Verdict, now.Verdict}, Numbers: []NumberDiff{}}
		switch {
		case !had:
			d.Change = ScopeAdded
		case !has:
			d.Change = ScopeRemoved
		}
		then, later := old.Numbers(), now.Numbers()
		for i, n := range later {
			if !sameNumber(then[i].Value, n.Value) {
				d.Numbers = append(d.Numbers, NumberDiff{n.Name, then[i].Value, n.Value})
			}
		}
		if d.Change != ScopeChanged || old.Verdict != now.Verdict || len(d.Numbers) > 0 {
			diffs = append(diffs, d)
		}
	}
	return diffs
}

func byScope(rows []reconcile.ScopeReport) map[reconcile.Scope]reconcile.ScopeReport {
	m := make(map[reconcile.Scope]reconcile.ScopeReport, len(rows))
	for _, row := range rows {
		m[row.Scope] = row
	}
	return m
}

func sameNumber(a, b *int64) bool {
	return (a == nil) == (b == nil) && (a == nil || *a == *b)
}
