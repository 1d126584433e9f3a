package reconcile

import (
	"cmp"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/reservation"
)

// SchemaVersion is the schema number of [Report] as JSON (interface §5).
const SchemaVersion = 1

// The modes of a run.
const (
	ModeQuick = "quick"
	ModeDeep  = "deep"
)

// Verdict is the outcome of a run or of one scope.
type Verdict string

// The verdicts. Incomplete outranks drift: what was not read may hide more.
const (
	VerdictConsistent Verdict = "consistent"
	VerdictDrift      Verdict = "drift"
	VerdictIncomplete Verdict = "incomplete"
)

// Report is the result of a run. As JSON it is the contract of interface §5.
type Report struct {
	Schema     int            `json:"schema"`
	RunID      string         `json:"run_id"`
	Mode       string         `json:"mode"`
	StartedAt  time.Time      `json:"started_at"`
	FinishedAt time.Time      `json:"finished_at"`
	Verdict    Verdict        `json:"verdict"`
	Scopes     []ScopeReport  `json:"scopes"`
	Findings   []Finding      `json:"findings"`
	Incomplete []Incomplete   `json:"incomplete"`
	Summary    map[string]int `json:"summary"` // findings that stand, of each check that was made
	// NotMade says of checks that had nothing to compare why they were not made:
	// they are not in the summary.
	NotMade map[string]string `json:"not_made,omitempty"`
	// Omitted counts, by check, the findings that stand and are in the summary
	// but not in Findings, because a stored report is bounded; OmittedRepaired
	// those that were repaired.
	Omitted         map[string]int `json:"omitted,omitempty"`
	OmittedRepaired map[string]int `json:"omitted_repaired,omitempty"`

	resumable  bool           // it was told to stop, and said how far it had got
	resumed    bool           // it continued another one
	unfiltered bool           // it was of all scopes
	members    map[Scope]bool // scopes whose members were compared
	closed     map[Scope]bool // those of them whose version takes no reservations any more
}

// ScopeReport is one scope's row. What could not be read, or was not asked
// for, is null.
type ScopeReport struct {
	Scope
	Verdict   Verdict      `json:"verdict"`
	InMotion  bool         `json:"in_motion"`
	Redis     *RedisCount  `json:"redis"`
	Postgres  *OrdersCount `json:"postgres"`
	Deviation *int64       `json:"deviation"`
}

// RedisCount is what Redis says of a scope. A number that is missing is null.
type RedisCount struct {
	Initial           *int64 `json:"initial"`
	Available         *int64 `json:"available"`
	Reserved          *int64 `json:"reserved"`
	ReleasedTotal     *int64 `json:"released_total"`
	SendPending       *int64 `json:"send_pending"`
	ReservationExpiry *int64 `json:"reservation_expiry"`
}

// OrdersCount is what PostgreSQL says of a scope: orders in all, whether or not
// a cancelled one still holds a unit.
type OrdersCount struct {
	Active    int64 `json:"active"`
	Cancelled int64 `json:"cancelled"`
}

// Scope names a scope in JSON. What concerns a version as a whole names one of
// its buckets.
type Scope struct {
	ActivityID string `json:"activity_id"`
	SKUID      string `json:"sku_id"`
	Version    int64  `json:"activity_version"`
	Bucket     int64  `json:"bucket_id"`
}

func jsonScope(s reservation.Scope) Scope {
	return Scope{ActivityID: s.ActivityID, SKUID: s.SKUID, Version: s.Version, Bucket: s.Bucket}
}

// Reservation is the scope as the rest of the program names it.
func (s Scope) Reservation() reservation.Scope {
	return reservation.Scope{ActivityID: s.ActivityID, SKUID: s.SKUID, Version: s.Version, Bucket: s.Bucket}
}

// Finding is one contradiction that stood in two rounds.
type Finding struct {
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	Scope    Scope    `json:"scope"`
	Subject  string   `json:"subject"` // the scope's tag
	Message  string   `json:"message"`
	Evidence Evidence `json:"evidence"`
	Rounds   int      `json:"rounds"` // in which it stood
	Repair   Repair   `json:"repair"`

	cause string // tells findings of one check apart, for [Report.Tasks]
}

// Stands says whether the finding still stands, and so counts in the summary
// and for the verdict: one that was repaired does not.
func (f *Finding) Stands() bool { return f.Repair.State != RepairStateDone }

// Evidence is what each side said when the finding was last seen.
type Evidence struct {
	Redis    map[string]any `json:"redis"`
	Postgres map[string]any `json:"postgres"`
	MQ       map[string]any `json:"mq"`
}

// MarshalJSON writes an absent side as an empty object.
func (e Evidence) MarshalJSON() ([]byte, error) {
	side := func(m map[string]any) map[string]any {
		if m == nil {
			return map[string]any{}
		}
		return m
	}
	type plain Evidence
	return json.Marshal(plain{side(e.Redis), side(e.Postgres), side(e.MQ)})
}

// Repair is what is, was or can be done about a finding.
type Repair struct {
	Kind   RepairKind  `json:"kind"`
	State  RepairState `json:"state"`
	Detail string      `json:"detail"`
	// Before and After are the values that a repair changed, as they were read
	// right before and right after it.
	Before map[string]any `json:"before,omitempty"`
	After  map[string]any `json:"after,omitempty"`
}

// The sources of [Incomplete].
const (
	SourceRedis    = "redis"
	SourcePostgres = "postgres"
	SourceRounds   = "rounds" // both sides were read, and contradicted each other in another way each time
	SourceTime     = "time"   // the run was told to stop, or other scopes, which could not be read, took the time
)

// Incomplete is something that could not be compared. Scope is null when it is
// the whole run.
type Incomplete struct {
	Source string `json:"source"`
	Scope  *Scope `json:"scope"`
	Reason string `json:"reason"`
}

// Unreachable is the report of a run that could not begin, because a source
// cannot be reached.
func Unreachable(source string, err error) *Report {
	now := time.Now().UTC()
	r := newReport(nil, now)
	r.Incomplete = append(r.Incomplete, Incomplete{Source: source, Reason: oneLine(err.Error())})
	r.finish(now)
	return r
}

// stop marks the report of a run that did not get through.
func (r *Report) stop(why string) {
	r.Incomplete = append(r.Incomplete, Incomplete{Source: SourceTime, Reason: why})
}

// oneLine makes a reason fit into a row: causes of several lines are joined.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

func newReport(checks []Check, startedAt time.Time) *Report {
	r := &Report{
		Schema: SchemaVersion, RunID: NewRunID(), Mode: ModeQuick, StartedAt: startedAt.UTC(),
		Scopes: []ScopeReport{}, Findings: []Finding{}, Incomplete: []Incomplete{}, Summary: map[string]int{},
		members: map[Scope]bool{}, closed: map[Scope]bool{},
	}
	for _, c := range checks {
		r.Summary[c.ID] = 0
	}
	return r
}

// finish orders the parts and derives summary and verdicts from them, so that
// they cannot disagree.
func (r *Report) finish(at time.Time) {
	r.FinishedAt = at.UTC()
	slices.SortFunc(r.Scopes, func(a, b ScopeReport) int { return compareScopes(a.Scope, b.Scope) })
	slices.SortFunc(r.Findings, func(a, b Finding) int {
		return cmp.Or(compareScopes(a.Scope, b.Scope), cmp.Compare(a.Check, b.Check), cmp.Compare(a.Subject, b.Subject))
	})
	slices.SortFunc(r.Incomplete, func(a, b Incomplete) int {
		return cmp.Or(compareOptionalScopes(a.Scope, b.Scope), cmp.Compare(a.Source, b.Source), cmp.Compare(a.Reason, b.Reason))
	})
	drift := map[Scope]bool{}
	for id := range r.Summary {
		r.Summary[id] = 0
	}
	for _, f := range r.Findings {
		if !f.Stands() {
			continue
		}
		r.Summary[f.Check]++
		if f.Severity.Drift() {
			drift[f.Scope] = true
		}
	}
	incomplete := map[Scope]bool{}
	whole := false // something that concerns every scope could not be read
	for _, i := range r.Incomplete {
		if i.Scope == nil {
			whole = true
		} else {
			incomplete[*i.Scope] = true
		}
	}
	for i := range r.Scopes {
		s := &r.Scopes[i]
		s.Verdict = verdict(whole || incomplete[s.Scope], drift[s.Scope])
		if s.Verdict == VerdictIncomplete {
			s.Deviation = nil
		}
	}
	r.Verdict = verdict(len(r.Incomplete) > 0, len(drift) > 0)
}

func verdict(incomplete, drift bool) Verdict {
	switch {
	case incomplete:
		return VerdictIncomplete
	case drift:
		return VerdictDrift
	default:
		return VerdictConsistent
	}
}

func compareScopes(a, b Scope) int {
	return cmp.Or(
		cmp.Compare(a.ActivityID, b.ActivityID), cmp.Compare(a.SKUID, b.SKUID),
		cmp.Compare(a.Version, b.Version), cmp.Compare(a.Bucket, b.Bucket),
	)
}

// compareOptionalScopes puts the whole run first.
func compareOptionalScopes(a, b *Scope) int {
	switch {
	case a == nil && b == nil:
		return 0
	case a == nil:
		return -1
	case b == nil:
		return 1
	default:
		return compareScopes(*a, *b)
	}
}
