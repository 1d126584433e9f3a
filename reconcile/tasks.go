package reconcile

import (
	"cmp"
	"slices"
	"strings"

	"github.com/seckill/reconciler/reservation"
)

// taskRestoreImpossible is the kind of task of a lost reservation that nothing
// can rebuild: its order does not say whose it is (protocol §2).
const taskRestoreImpossible = "restore_impossible"

// taskSample bounds the subjects named in one task.
const taskSample = 20

// onlyReported are the checks whose findings no person is asked about, although
// no script puts them right (protocol §5: also reported).
var onlyReported = []string{CheckMissingTTL, CheckRetentionRisk, CheckCancelledHoldsStock}

// Tasks asks a person about each finding that only a person can put right, and
// about those deficits that are overdue, by their reservation's id; nil: none is.
// There is one task for each kind, scope and cause (protocol §5); kinds and causes
// are those under which workers report the same.
func (r *Report) Tasks(overdue func(id string) bool) []reservation.TaskReport {
	type key struct{ kind, scope, cause string }
	tasks := map[key]*reservation.TaskReport{}
	for _, f := range r.Findings {
		kind, cause, asks := f.task()
		if f.Check == CheckCountDrift && r.unexplained(f.Scope) {
			kind, cause, asks = f.Check, "units_held_by_nobody", true
		}
		if !asks || (kind == CheckDeficit && (overdue == nil || !overdue(f.Subject))) {
			continue
		}
		at := key{kind, f.Scope.Reservation().Tag(), cause}
		if tasks[at] == nil {
			tasks[at] = &reservation.TaskReport{Kind: at.kind, Scope: at.scope, Cause: at.cause}
		}
		t := tasks[at]
		if t.Count++; len(t.Sample) < taskSample && f.Subject != at.scope {
			t.Sample = append(t.Sample, f.Subject)
		}
	}
	out := make([]reservation.TaskReport, 0, len(tasks))
	for _, t := range tasks {
		out = append(out, *t)
	}
	slices.SortFunc(out, func(a, b reservation.TaskReport) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Scope, b.Scope), cmp.Compare(a.Cause, b.Cause))
	})
	return out
}

// unexplained says that units of a scope are held by nobody, and that its members
// were compared and none of them says why: a recount is all that is left, which a
// person approves.
func (r *Report) unexplained(at Scope) bool {
	leaks := slices.ContainsFunc(r.Scopes, func(s ScopeReport) bool { return s.Scope == at && s.Deviation != nil && *s.Deviation > 0 })
	return leaks && r.members[at] && !slices.ContainsFunc(r.Findings, func(f Finding) bool {
		return f.Scope == at && f.Check != CheckCountDrift && f.Severity.Drift() && f.Stands()
	})
}

// ReportKinds are the kinds of task that a report may name or disprove.
func ReportKinds() []string {
	kinds := []string{taskRestoreImpossible}
	for _, c := range registry {
		kinds = append(kinds, c.ID)
	}
	return kinds
}

// Deficits are the reservations for which no unit is left.
func (r *Report) Deficits() []string {
	var ids []string
	for _, f := range r.Findings {
		if f.Check == CheckDeficit {
			ids = append(ids, f.Subject)
		}
	}
	return ids
}

// Drift says whether a finding stands that is drift, also beside what could not
// be read.
func (r *Report) Drift() bool {
	return slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Severity.Drift() && f.Stands() })
}

// Complete says whether the run compared all scopes, in one go, and could read
// everything.
func (r *Report) Complete() bool {
	return r.Verdict != VerdictIncomplete && r.unfiltered && !r.resumed
}

// task is the kind and cause of the task that a finding makes.
func (f *Finding) task() (kind, cause string, asks bool) {
	manual := f.Repair.Kind == RepairManual && f.Severity.Drift() && !slices.Contains(onlyReported, f.Check)
	if f.Repair.State == RepairStateDone || (!manual && f.Check != CheckDeficit) {
		return "", "", false
	}
	switch f.Check {
	case CheckLostReservation:
		return taskRestoreImpossible, "order_names_nobody", true
	case CheckConfigMissing: // as the workers call it
		return f.Check, "redis_lost_it", true
	case CheckOrderWithoutClaim:
		return f.Check, f.Check, true
	case CheckMalformedReservation:
		return f.Check, f.cause, true
	default: // what follows a colon names a single member
		cause, _, _ := strings.Cut(f.cause, ":")
		return f.Check, cause, true
	}
}

// Disproves says whether the run looked for what a task of the kind is about,
// in the whole of its scope, and could read everything. A task that the run
// does not name again is over then. An incomplete run disproves nothing.
func (r *Report) Disproves(kind string, s reservation.Scope) bool {
	at := jsonScope(s)
	check := kind
	if kind == taskRestoreImpossible {
		check = CheckLostReservation
	}
	_, made := r.Summary[check]
	if !made || !r.Complete() {
		return false
	}
	compared := slices.ContainsFunc(r.Scopes, func(row ScopeReport) bool { return row.Scope == at })
	i := slices.IndexFunc(registry, func(c Check) bool { return c.ID == check })
	switch {
	case kind == CheckDeficit && r.found(CheckLostReservation, at): // nobody tried to restore it
		return false
	case kind == CheckOrderAfterRelease && r.found(CheckLostReservation, at):
		// Its hash may be the one that was lost. The task stays, and with it the
		// rule that nothing is restored from a request's result (spec §4).
		return false
	case kind == CheckUnregisteredScope:
		return true // it is no row: everything was looked through
	case check == CheckOrderMissing && r.closed[at]: // not looked for: old orders may be archived
		return false
	case registry[i].Level == LevelSet:
		return compared && r.members[at]
	default:
		return compared
	}
}

// found says whether the check stands in a scope.
func (r *Report) found(check string, at Scope) bool {
	return slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Check == check && f.Scope == at && f.Stands() })
}
