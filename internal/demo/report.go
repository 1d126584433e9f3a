package demo

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// Verdict is the demo's answer.
type Verdict string

// The verdicts.
const (
	Kept       Verdict = "kept"       // every promise, at every look and at the end
	Broken     Verdict = "broken"     // at least one was not
	Incomplete Verdict = "incomplete" // the demo itself failed before it could say
)

// Report is what the demo leaves behind.
type Report struct {
	Schema      int                    `json:"schema"`
	Verdict     Verdict                `json:"verdict"`
	StartedAt   time.Time              `json:"started_at"`
	FinishedAt  time.Time              `json:"finished_at"`
	Seed        uint64                 `json:"seed"`
	Users       int                    `json:"users"`
	Units       int64                  `json:"units"`
	Phases      []Phase                `json:"phases"`
	Sale        upstream.Tally         `json:"sale"`
	Consumers   map[upstream.Event]int `json:"deliveries"`
	DaemonKills int                    `json:"daemon_kills"`
	Approved    int                    `json:"approved"` // deleted hashes whose units the person had given back
	Looks       int                    `json:"looks"`    // at which everything was checked that holds at any moment
	TimedOut    bool                   `json:"timed_out"`
	Scopes      []ScopeReport          `json:"scopes"`
	Rollback    RollbackReport         `json:"rollback"`
	Faults      []FaultReport          `json:"faults"`
	Rows        []RowCount             `json:"decisions"`
	Done        []DoneCount            `json:"done"`
	Violations  []Violation            `json:"violations"`
	Notes       []string               `json:"notes"`
	Error       string                 `json:"error,omitempty"`
}

// Phase is a part of the demo with the time that it took.
type Phase struct {
	Title   string  `json:"title"`
	Seconds float64 `json:"seconds"`
}

// ScopeReport is one bucket, when the last request was made and at the end.
type ScopeReport struct {
	Scope   string      `json:"scope"`
	Initial int64       `json:"initial"`
	Before  ScopeCounts `json:"before"`
	After   ScopeCounts `json:"after"`
}

// ScopeCounts are a bucket's numbers on both sides.
type ScopeCounts struct {
	Available int64 `json:"available"`
	Reserved  int64 `json:"reserved"`
	Released  int64 `json:"released_total"`
	Orders    int   `json:"orders"`
	Undecided int   `json:"undecided"`
	Person    int   `json:"waiting_for_a_person"`
	Deviation int64 `json:"deviation"` // reserved, less orders and those that wait for a person
}

// RollbackReport is the bucket that lost its last writes in the middle of the sale.
type RollbackReport struct {
	Scope        string       `json:"scope"`
	Reserved     int64        `json:"reserved_before"` // the failover
	Left         int64        `json:"reserved_after"`  // it
	Reservations int          `json:"lost_reservations"`
	Orders       int          `json:"lost_with_an_order"` // when everything else was at rest
	Before       ScopeCounts  `json:"before_repair"`
	After        ScopeCounts  `json:"after_repair"`
	Passes       []RepairPass `json:"passes"`
}

// RepairPass is what one `reconcile --repair` did.
type RepairPass struct {
	Verdict  string         `json:"verdict"`  // of the state after it
	Repaired map[string]int `json:"repaired"` // by check
	Standing map[string]int `json:"standing"` // by check; warnings are not counted
	Deficits int            `json:"deficits"` // orders for which no unit was left
}

func (p RepairPass) String() string {
	return fmt.Sprintf("%s; repaired: %s; standing: %s", p.Verdict, counted(p.Repaired), counted(p.Standing))
}

// counted is a list such as "deficit 3, lost_reservation 20".
func counted(counts map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, counts[name]))
	}
	if len(parts) == 0 {
		return "nothing"
	}
	return strings.Join(parts, ", ")
}

// FaultReport is what became of the reservations of one fault.
type FaultReport struct {
	Fault        upstream.Fault `json:"fault"`
	Reservations int            `json:"reservations"`
	Before       Ends           `json:"before"`
	After        Ends           `json:"after"`
}

// Ends counts reservations by where they are.
type Ends struct {
	Undecided int `json:"undecided"`
	Ordered   int `json:"ordered"`
	Released  int `json:"released"`
	Person    int `json:"waiting_for_a_person"`
	Gone      int `json:"gone"` // lost by the failover, without an order
}

// RowCount is how often the daemon decided by one row of the table of protocol §3.
type RowCount struct {
	Row   string         `json:"row"`
	Count int            `json:"count"`
	Verbs map[string]int `json:"verbs"`
}

// DoneCount is how often one of the daemon's workers did something.
type DoneCount struct {
	Worker string `json:"worker"`
	Result string `json:"result"`
	Count  int    `json:"count"`
}

func newReport(o Options) Report {
	return Report{
		Schema: 1, Verdict: Incomplete, StartedAt: time.Now().UTC(), Seed: o.Seed, Users: o.Users, Units: o.Units,
		Violations: []Violation{}, Notes: []string{},
	}
}

func (r *Report) before(s *State, ledger *upstream.Ledger) {
	for i := range s.Scopes {
		scope := &s.Scopes[i]
		r.Scopes = append(r.Scopes, ScopeReport{Scope: scope.Scope.Tag(), Initial: scope.Initial, Before: scope.counts()})
	}
	for fault, ends := range s.ends(ledger) {
		r.faultReport(fault).Before = ends
	}
}

func (r *Report) after(s *State, ledger *upstream.Ledger, orphans []string) {
	for i := range s.Scopes {
		r.Scopes[i].After = s.Scopes[i].counts()
	}
	for fault, ends := range s.ends(ledger) {
		r.faultReport(fault).After = ends
	}
	for fault, n := range ledger.ByFault() {
		r.faultReport(fault).Reservations = n
	}
	slices.SortFunc(r.Faults, func(a, b FaultReport) int {
		return slices.Index(upstream.AllFaults, a.Fault) - slices.Index(upstream.AllFaults, b.Fault)
	})
	for _, v := range s.Check(true, orphans) {
		r.violated(v)
	}
	r.Verdict = Kept
	if len(r.Violations) > 0 {
		r.Verdict = Broken
	}
}

// rolledBack notes what the failover took, once everything else is at rest.
func (r *Report) rolledBack(s *State, b *upstream.Rollback) {
	lost := b.Lost()
	r.Rollback = RollbackReport{
		Scope: b.Scope.Tag(), Reserved: lost.Reserved, Left: lost.ReservedAfter, Reservations: len(lost.Reservations),
		Before: s.scopeCounts(b.Scope), Passes: []RepairPass{},
	}
	for id := range lost.Reservations {
		if one := s.find(id, b.Scope.Bucket); one != nil && len(one.Orders) > 0 {
			r.Rollback.Orders++
		}
	}
}

func (s *State) scopeCounts(scope reservation.Scope) ScopeCounts {
	return s.Scopes[scope.Bucket].counts()
}

func (r *Report) faultReport(fault upstream.Fault) *FaultReport {
	for i := range r.Faults {
		if r.Faults[i].Fault == fault {
			return &r.Faults[i]
		}
	}
	r.Faults = append(r.Faults, FaultReport{Fault: fault})
	return &r.Faults[len(r.Faults)-1]
}

// violated notes a broken promise once, however often it was seen.
func (r *Report) violated(v Violation) {
	if !slices.Contains(r.Violations, v) {
		r.Violations = append(r.Violations, v)
	}
}

func (r *Report) counters(counts map[sample]int) {
	r.Rows = rowCounts(counts)
	for s, n := range counts {
		if s.name == metricItems && n > 0 && s.b != itemSeen && s.b != itemUnknown {
			r.Done = append(r.Done, DoneCount{s.a, s.b, n})
		}
	}
	slices.SortFunc(r.Done, func(a, b DoneCount) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Result, b.Result))
	})
}

// Results of the daemon's workers that are not deeds.
const (
	itemSeen    = "seen"
	itemUnknown = "unknown"
)

func (r *Report) finish(err error) {
	r.FinishedAt = time.Now().UTC()
	if err != nil {
		r.Error = err.Error()
		if r.Verdict == Kept {
			r.Verdict = Incomplete
		}
	}
	if len(r.Violations) > 0 {
		r.Verdict = Broken
	}
}

// rowCounts sums decisions by row, in the order of the table.
func rowCounts(counts map[sample]int) []RowCount {
	var rows []RowCount
	for s, n := range counts {
		if s.name != metricDecisions || n == 0 {
			continue
		}
		i := slices.IndexFunc(rows, func(r RowCount) bool { return r.Row == s.a })
		if i < 0 {
			i = len(rows)
			rows = append(rows, RowCount{Row: s.a, Verbs: map[string]int{}})
		}
		rows[i].Count += n
		rows[i].Verbs[s.b] += n
	}
	slices.SortFunc(rows, func(a, b RowCount) int {
		return cmp.Or(cmp.Compare(len(a.Row), len(b.Row)), cmp.Compare(a.Row, b.Row))
	})
	return rows
}

func (s *ScopeState) counts() ScopeCounts {
	return ScopeCounts{
		Available: s.Available, Reserved: s.Reserved, Released: s.ReleasedTotal, Orders: s.Orders(),
		Undecided: s.count((*Reservation).Open), Person: s.count((*Reservation).Orphan), Deviation: s.Deviation(),
	}
}

// of is a reservation of the ledger as the state has it; nil if it has not.
func (s *State) of(sold upstream.Sold) *Reservation {
	bucket := sold.Reservation.Bucket
	if bucket < 0 || bucket >= int64(len(s.Scopes)) {
		return nil
	}
	return s.Scopes[bucket].Reservations[sold.Reservation.ID]
}

func (s *State) ends(ledger *upstream.Ledger) map[upstream.Fault]Ends {
	all := map[upstream.Fault]Ends{}
	for _, sold := range ledger.All() {
		r := s.of(sold)
		e := all[sold.Fault]
		switch {
		case r == nil || r.Gone():
			e.Gone++
		case r.Orphan():
			e.Person++
		case r.Status == reservation.StatusReleased:
			e.Released++
		case r.Status == reservation.StatusOrderCreated:
			e.Ordered++
		default:
			e.Undecided++
		}
		all[sold.Fault] = e
	}
	return all
}

// summary changes whenever anything moves.
func (s *State) summary() []ScopeCounts {
	var all []ScopeCounts
	for i := range s.Scopes {
		all = append(all, s.Scopes[i].counts())
	}
	return all
}

// Names of the report's files.
const (
	jsonFile     = "report.json"
	markdownFile = "report.md"
)

// writeFile replaces a file in one step.
func writeFile(path string, content []byte) error {
	fresh := path + ".new"
	if err := os.WriteFile(fresh, content, 0o644); err != nil { //nolint:gosec // it is for others to read; the umask has the last word
		return err
	}
	return os.Rename(fresh, path)
}

// Save leaves the report in dir, as JSON and as a page to read.
func (r *Report) Save(dir string) error {
	raw, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("encode the report: %w", err)
	}
	for name, content := range map[string][]byte{jsonFile: append(raw, '\n'), markdownFile: []byte(r.Markdown())} {
		if err := writeFile(filepath.Join(dir, name), content); err != nil {
			return fmt.Errorf("write the report: %w", err)
		}
	}
	return nil
}
