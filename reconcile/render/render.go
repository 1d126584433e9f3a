// Package render writes the report of a reconciliation: as a table for a
// terminal, as the JSON of interface §5, as JSON Lines, CSV, Markdown or a
// self-contained page. The formats are described in docs/reports.md.
//
// All formats show one [tally], which is derived from the report once: none of
// them counts by itself, so they cannot disagree. What is shown to people is
// bounded and says how much is left out; JSON, JSON Lines and CSV have every
// row of the report. Values come from Redis and PostgreSQL, where anything may
// stand: each format escapes them.
package render

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seckill/reconciler/reconcile"
)

// The formats of a report.
const (
	FormatTable    = "table"
	FormatJSON     = "json"
	FormatJSONL    = "jsonl"
	FormatCSV      = "csv"
	FormatMarkdown = "markdown"
	FormatHTML     = "html"
)

var writers = map[string]func(io.Writer, *reconcile.Report, tally) error{
	FormatTable:    writeTable,
	FormatJSON:     writeJSON,
	FormatJSONL:    writeJSONL,
	FormatCSV:      writeCSV,
	FormatMarkdown: writeMarkdown,
	FormatHTML:     writeHTML,
}

// Formats lists the formats.
func Formats() []string {
	return []string{FormatTable, FormatJSON, FormatJSONL, FormatCSV, FormatMarkdown, FormatHTML}
}

// Write writes the report in one of the [Formats]. A report whose parts
// contradict each other is written all the same, and is an error: nobody may
// take it for consistent.
func Write(w io.Writer, format string, r *reconcile.Report) error {
	write, known := writers[format]
	if !known {
		return fmt.Errorf("there is no report format %q", format)
	}
	buffered := bufio.NewWriter(w)
	if err := write(buffered, r, tallyOf(r)); err != nil {
		return fmt.Errorf("write the report as %s: %w", format, err)
	}
	if err := buffered.Flush(); err != nil {
		return fmt.Errorf("write the report as %s: %w", format, err)
	}
	return Verify(r)
}

// Verify proves that summary, findings and verdict of a report agree.
func Verify(r *reconcile.Report) error {
	rows := map[string]int{}
	drift := false
	for _, f := range r.Findings {
		if f.Stands() {
			rows[f.Check]++
			drift = drift || f.Severity.Drift()
		}
	}
	for check, n := range r.Omitted {
		rows[check] += n
		drift = drift || n > 0 && severityOf(check).Drift()
	}
	for check, n := range r.Summary {
		if rows[check] != n {
			return fmt.Errorf("report %s contradicts itself: the summary counts %d of %s, the findings %d", r.RunID, n, check, rows[check])
		}
	}
	for check, n := range rows {
		if _, counted := r.Summary[check]; !counted {
			return fmt.Errorf("report %s contradicts itself: %d findings of %s are not in the summary", r.RunID, n, check)
		}
	}
	verdict := reconcile.VerdictConsistent
	switch {
	case len(r.Incomplete) > 0:
		verdict = reconcile.VerdictIncomplete
	case drift:
		verdict = reconcile.VerdictDrift
	}
	if verdict != r.Verdict {
		return fmt.Errorf("report %s contradicts itself: its verdict is %s, its rows say %s", r.RunID, r.Verdict, verdict)
	}
	return nil
}

// tally is what the formats for people say of a report in numbers.
type tally struct {
	standing   int
	repaired   int
	incomplete int
	omitted    int // findings that the report does not contain
	scopes     map[reconcile.Verdict]int
	inMotion   int
	checks     []checkTally // with findings, the gravest first
}

// checkTally is one check with its findings.
type checkTally struct {
	reconcile.Check
	standing int
	repaired int
	findings []reconcile.Finding // those that stand first
}

func tallyOf(r *reconcile.Report) tally {
	t := tally{incomplete: len(r.Incomplete), scopes: map[reconcile.Verdict]int{}}
	byCheck := map[string]*checkTally{}
	of := func(id string) *checkTally {
		if byCheck[id] == nil {
			byCheck[id] = &checkTally{Check: checkOf(id)}
		}
		return byCheck[id]
	}
	for check, n := range r.Summary {
		if n > 0 {
			of(check).standing = n
			t.standing += n
		}
	}
	for _, n := range r.Omitted {
		t.omitted += n
	}
	for check, n := range r.OmittedRepaired {
		of(check).repaired += n
		t.repaired, t.omitted = t.repaired+n, t.omitted+n
	}
	for _, f := range r.Findings {
		c := of(f.Check)
		c.Severity = cmp.Or(c.Severity, f.Severity)
		c.findings = append(c.findings, f)
		if !f.Stands() {
			c.repaired++
			t.repaired++
		}
	}
	for _, s := range r.Scopes {
		t.scopes[s.Verdict]++
		if s.InMotion {
			t.inMotion++
		}
	}
	for _, c := range byCheck {
		slices.SortStableFunc(c.findings, func(a, b reconcile.Finding) int { return cmp.Compare(rank(a.Stands()), rank(b.Stands())) })
		t.checks = append(t.checks, *c)
	}
	slices.SortFunc(t.checks, func(a, b checkTally) int {
		return cmp.Or(cmp.Compare(gravity(a.Severity), gravity(b.Severity)), cmp.Compare(a.ID, b.ID))
	})
	return t
}

func rank(stands bool) int {
	if stands {
		return 0
	}
	return 1
}

var severities = []reconcile.Severity{
	reconcile.SeverityCritical, reconcile.SeverityError, reconcile.SeverityWarning, reconcile.SeverityInfo,
}

// gravity orders severities, the gravest first.
func gravity(s reconcile.Severity) int {
	if i := slices.Index(severities, s); i >= 0 {
		return i
	}
	return len(severities)
}

// checkOf is a check by its id. A stored report may name one that this version
// does not have.
func checkOf(id string) reconcile.Check {
	checks := reconcile.Checks()
	if i := slices.IndexFunc(checks, func(c reconcile.Check) bool { return c.ID == id }); i >= 0 {
		return checks[i]
	}
	return reconcile.Check{ID: id}
}

func severityOf(check string) reconcile.Severity { return checkOf(check).Severity }

// findingsText is how many findings there are, in words.
func (t tally) findingsText() string {
	text := count(t.standing, "finding")
	if t.repaired > 0 {
		text += fmt.Sprintf(", %d repaired", t.repaired)
	}
	return text
}

// scopesText is how many scopes have which verdict, in words.
func (t tally) scopesText() string {
	total := 0
	var parts []string
	for _, v := range []reconcile.Verdict{reconcile.VerdictConsistent, reconcile.VerdictDrift, reconcile.VerdictIncomplete} {
		if n := t.scopes[v]; n > 0 {
			total += n
			parts = append(parts, fmt.Sprintf("%d %s", n, v))
		}
	}
	if t.inMotion > 0 {
		parts = append(parts, fmt.Sprintf("%d in motion", t.inMotion))
	}
	if total == 0 {
		return "none"
	}
	return fmt.Sprintf("%d: %s", total, strings.Join(parts, ", "))
}

// nextSteps are what a person does about the report, the most urgent first.
func nextSteps(r *reconcile.Report, t tally) []string {
	var steps []string
	if t.incomplete > 0 {
		steps = append(steps, "Part of the evidence could not be read or settled: see what is incomplete, put its source right and run again. "+
			"Until then nothing here is proven to be all.")
	}
	automatic, failed, pending := 0, 0, 0
	for _, f := range r.Findings {
		switch {
		case f.Repair.State == reconcile.RepairStateFailed:
			failed++
		case f.Repair.State == reconcile.RepairStatePendingApproval:
			pending++
		case f.Stands() && f.Repair.Kind == reconcile.RepairAutomatic:
			automatic++
		}
	}
	if failed > 0 {
		steps = append(steps, count(failed, "repair")+" failed: the findings say why.")
	}
	if automatic > 0 {
		steps = append(steps, count(automatic, "finding")+" can be put right automatically: `reconciler reconcile --deep --repair`")
	}
	if pending > 0 {
		steps = append(steps, "Waiting for approval: "+count(pending, "repair")+": `reconciler task list`")
	}
	for _, c := range t.checks {
		if c.standing > 0 && c.Advice != "" {
			steps = append(steps, fmt.Sprintf("%s (%d): %s.", c.ID, c.standing, c.Advice))
		}
	}
	if t.repaired > 0 {
		steps = append(steps, count(t.repaired, "finding")+" repaired: the values before and after are below and in the audit trail.")
	}
	if len(steps) == 0 {
		steps = append(steps, "Nothing.")
	}
	return steps
}

// span is a part of a text; Code was within backquotes.
type span struct {
	Text string
	Code bool
}

// spans splits a text of this program at its backquotes.
func spans(text string) []span {
	var all []span
	for i, part := range strings.Split(text, "`") {
		if part != "" {
			all = append(all, span{part, i%2 == 1})
		}
	}
	return all
}

// verdictText says what a verdict means.
func verdictText(v reconcile.Verdict) string {
	switch v {
	case reconcile.VerdictConsistent:
		return "Redis and PostgreSQL agree in everything that was compared."
	case reconcile.VerdictDrift:
		return "Redis and PostgreSQL contradict each other, and did so again in a later round."
	default:
		return "Not everything could be read or settled. There may be more than is shown."
	}
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}

// scopeText names a scope, or all of them.
func scopeText(s *reconcile.Scope) string {
	if s == nil {
		return "all"
	}
	return s.Reservation().Tag()
}

// numberText is a number, or "-" for one that is not known.
func numberText(n reconcile.NamedNumber) string {
	switch {
	case n.Value == nil:
		return "-"
	case n.Name == "deviation":
		return fmt.Sprintf("%+d", *n.Value)
	default:
		return strconv.FormatInt(*n.Value, 10)
	}
}

func scopeVerdict(s reconcile.ScopeReport) string {
	if s.InMotion {
		return string(s.Verdict) + ", in motion"
	}
	return string(s.Verdict)
}

// repairText is what became of a repair, or "-" where none was asked for.
func repairText(r reconcile.Repair) string {
	if r.State == reconcile.RepairStateNone || r.State == "" {
		return "-"
	}
	return string(r.State)
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func duration(r *reconcile.Report) time.Duration {
	return r.FinishedAt.Sub(r.StartedAt).Round(time.Millisecond)
}

func encoder(w io.Writer) *json.Encoder {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc
}
