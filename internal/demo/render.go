package demo

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/seckill/reconciler/internal/upstream"
)

// rowMeaning tells what each row of the daemon's decision table is about.
var rowMeaning = map[string]string{
	"orphan": "its hash is gone: a person is asked", "-1": "its hash is gone: a person is asked",
	"0":  "its hash makes no sense: a person is asked",
	"1":  "decided: leftover index members go",
	"2":  "PostgreSQL is silent or contradicts itself: wait",
	"3":  "to be released, but it has an order: keep it",
	"4":  "to be released, nothing claimed yet: fence first",
	"5":  "to be released, no order can come: give the unit back",
	"6":  "it has an order: show it as such",
	"7":  "the consumer refused it: give the unit back",
	"8":  "fenced before: give the unit back",
	"9":  "not sent, or nobody knows: send",
	"10": "sent, not expired: wait",
	"11": "expired, message pending, retrying or unknown: wait",
	"12": "expired, message lost: send again",
	"13": "expired, dead letter: hold, then release",
	"14": "expired, acknowledged without an order: release",
}

// section is a titled table of the report.
type section struct {
	title  string
	note   string
	header table.Row
	rows   []table.Row
	footer table.Row
}

func (r *Report) sections() []section {
	return []section{
		r.scopeSection(), r.rollbackSection(), r.faultSection(), r.rowSection(), r.doneSection(), r.deliverySection(), r.phaseSection(),
	}
}

func (r *Report) scopeSection() section {
	s := section{
		title: "Buckets, when the last request was made and at the end",
		note:  "deviation = reserved − orders − those that wait for a person; 0 at rest is the promise L2",
		header: table.Row{
			"bucket", "units", "reserved", "orders", "undecided", "deviation", "→ reserved", "orders", "person", "available", "released", "deviation",
		},
	}
	var sum ScopeReport
	for _, one := range r.Scopes {
		b, a := one.Before, one.After
		s.rows = append(s.rows, table.Row{
			one.Scope, one.Initial, b.Reserved, b.Orders, b.Undecided, b.Deviation,
			a.Reserved, a.Orders, a.Person, a.Available, a.Released, a.Deviation,
		})
		sum.Initial += one.Initial
		sum.Before = sum.Before.plus(b)
		sum.After = sum.After.plus(a)
	}
	b, a := sum.Before, sum.After
	s.footer = table.Row{
		"all", sum.Initial, b.Reserved, b.Orders, b.Undecided, b.Deviation,
		a.Reserved, a.Orders, a.Person, a.Available, a.Released, a.Deviation,
	}
	return s
}

func (c ScopeCounts) plus(o ScopeCounts) ScopeCounts {
	return ScopeCounts{
		Available: c.Available + o.Available, Reserved: c.Reserved + o.Reserved, Released: c.Released + o.Released,
		Orders: c.Orders + o.Orders, Undecided: c.Undecided + o.Undecided, Person: c.Person + o.Person,
		Deviation: c.Deviation + o.Deviation,
	}
}

// rollbackSection is the bucket that lost its writes, from the failover to the end.
func (r *Report) rollbackSection() section {
	b := r.Rollback
	s := section{
		title: "The bucket whose failover undid its last writes",
		note: fmt.Sprintf("%s: %d reservations vanished from Redis, of which %d have an order in PostgreSQL; "+
			"one without an order holds no unit, and its user was never told more than \"queued\"", b.Scope, b.Reservations, b.Orders),
		header: table.Row{"when", "reserved", "orders", "deviation", "repaired", "standing"},
	}
	if b.Scope == "" {
		return s
	}
	s.rows = append(s.rows,
		table.Row{"before the failover", b.Reserved, "", "", "", ""},
		table.Row{"after it", b.Left, "", "", "", ""},
		table.Row{"when all else was at rest", b.Before.Reserved, b.Before.Orders, b.Before.Deviation, "", ""})
	for i, pass := range b.Passes {
		s.rows = append(s.rows, table.Row{fmt.Sprintf("reconcile --repair, pass %d", i+1), "", "", "", counted(pass.Repaired), counted(pass.Standing)})
	}
	s.rows = append(s.rows, table.Row{"at the end", b.After.Reserved, b.After.Orders, b.After.Deviation, "", ""})
	return s
}

func (r *Report) faultSection() section {
	s := section{
		title:  "Reservations by what went wrong with them, when the last request was made and at the end",
		header: table.Row{"fault", "reservations", "undecided", "ordered", "released", "→ undecided", "ordered", "released", "person", "gone"},
	}
	var n int
	var b, a Ends
	for _, f := range r.Faults {
		s.rows = append(s.rows, table.Row{
			f.Fault, f.Reservations, f.Before.Undecided, f.Before.Ordered, f.Before.Released,
			f.After.Undecided, f.After.Ordered, f.After.Released, f.After.Person, f.After.Gone,
		})
		n += f.Reservations
		b, a = b.plus(f.Before), a.plus(f.After)
	}
	s.footer = table.Row{"all", n, b.Undecided, b.Ordered, b.Released, a.Undecided, a.Ordered, a.Released, a.Person, a.Gone}
	return s
}

func (e Ends) plus(o Ends) Ends {
	return Ends{e.Undecided + o.Undecided, e.Ordered + o.Ordered, e.Released + o.Released, e.Person + o.Person, e.Gone + o.Gone}
}

func (r *Report) rowSection() section {
	s := section{
		title:  "What the daemon decided, by row of its table",
		note:   "a reservation that waits is decided again at each look",
		header: table.Row{"row", "means", "decisions", "of them"},
	}
	for _, row := range r.Rows {
		var verbs []string
		for _, verb := range slices.Sorted(maps.Keys(row.Verbs)) {
			verbs = append(verbs, fmt.Sprintf("%s %d", verb, row.Verbs[verb]))
		}
		s.rows = append(s.rows, table.Row{row.Row, rowMeaning[row.Row], row.Count, strings.Join(verbs, ", ")})
	}
	return s
}

func (r *Report) doneSection() section {
	s := section{title: "What its workers did", header: table.Row{"worker", "did", "times"}}
	for _, d := range r.Done {
		s.rows = append(s.rows, table.Row{d.Worker, d.Result, d.Count})
	}
	return s
}

func (r *Report) deliverySection() section {
	s := section{
		title:  "What became of the deliveries to the order consumers",
		header: table.Row{"delivery", "means", "times"},
	}
	for _, e := range slices.Sorted(maps.Keys(r.Consumers)) {
		s.rows = append(s.rows, table.Row{e, eventMeaning[e], r.Consumers[e]})
	}
	return s
}

// eventMeaning tells what each event of a delivery is.
var eventMeaning = map[upstream.Event]string{
	upstream.EventOrdered:   "an order was created",
	upstream.EventDuplicate: "the order was there before",
	upstream.EventRejected:  "refused for good",
	upstream.EventFenced:    "the claim forbade an order: the reservation was released, or is about to be",
	upstream.EventDropped:   "acknowledged without doing anything",
	upstream.EventCrashed:   "the consumer died half way; delivered again",
	upstream.EventFailed:    "an error; delivered again, at last to the dead letters",
	upstream.EventMalformed: "no order message",
}

func (r *Report) phaseSection() section {
	s := section{title: "Phases", header: table.Row{"phase", "seconds"}}
	sum := 0.0
	for _, p := range r.Phases {
		s.rows = append(s.rows, table.Row{p.Title, fmt.Sprintf("%.1f", p.Seconds)})
		sum += p.Seconds
	}
	s.footer = table.Row{"all", fmt.Sprintf("%.1f", sum)}
	return s
}

func (s section) writer() table.Writer {
	t := table.NewWriter()
	style := table.StyleRounded
	style.Format.Header, style.Format.Footer = text.FormatDefault, text.FormatDefault
	t.SetStyle(style)
	t.AppendHeader(s.header)
	t.AppendRows(s.rows)
	if s.footer != nil {
		t.AppendFooter(s.footer)
	}
	return t
}

// Text is the report for a terminal, or for a file.
func (r *Report) Text(colour bool) string {
	var b strings.Builder
	for _, s := range r.sections() {
		if len(s.rows) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n%s\n", s.title)
		if s.note != "" {
			fmt.Fprintf(&b, "(%s)\n", s.note)
		}
		fmt.Fprintf(&b, "%s\n", s.writer().Render())
	}
	fmt.Fprintf(&b, "\n%s\n%s\n", r.story(), r.VerdictLine(colour))
	for _, v := range r.shownViolations() {
		fmt.Fprintf(&b, "  %s\n", v)
	}
	return b.String()
}

// Markdown is the report as a page.
func (r *Report) Markdown() string {
	var b strings.Builder
	fmt.Fprintf(&b, "# A flash sale, broken and repaired\n\n%s\n\n%s\n\n", r.VerdictLine(false), r.story())
	for _, v := range r.shownViolations() {
		fmt.Fprintf(&b, "- %s\n", v)
	}
	for _, s := range r.sections() {
		if len(s.rows) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\n## %s\n\n", s.title)
		if s.note != "" {
			fmt.Fprintf(&b, "%s.\n\n", s.note)
		}
		fmt.Fprintf(&b, "%s\n", s.writer().RenderMarkdown())
	}
	if len(r.Notes) > 0 {
		b.WriteString("\n## Notes\n\n")
		for _, note := range r.Notes {
			fmt.Fprintf(&b, "- %s\n", strings.ReplaceAll(note, "\n", "\n  "))
		}
	}
	return b.String()
}

// maxShown bounds the violations in the text; the JSON has them all.
const maxShown = 20

func (r *Report) shownViolations() []string {
	var shown []string
	for _, v := range r.Violations[:min(len(r.Violations), maxShown)] {
		shown = append(shown, v.String())
	}
	if more := len(r.Violations) - len(shown); more > 0 {
		shown = append(shown, fmt.Sprintf("and %d more, in %s", more, jsonFile))
	}
	return shown
}

// story says in one sentence what happened.
func (r *Report) story() string {
	failover := ""
	if b := r.Rollback; b.Scope != "" {
		failover = fmt.Sprintf("a failover undid %d reservations of one bucket, and the %d of them with an order were put back; ", b.Reservations, b.Orders)
	}
	return fmt.Sprintf("%d users, %d units; %d requests accepted, %d with an unknown outcome; %d deliveries made an order; "+
		"%sthe broker was stopped for a while, the daemon killed (kills: %d); %d reservations whose hash was deleted were given back "+
		"when a person approved it; %d looks at both sides on the way. Seed %d.",
		r.Users, r.Units, r.Sale.Accepted, r.Sale.Unknown, r.Consumers[upstream.EventOrdered], failover, r.DaemonKills, r.Approved, r.Looks, r.Seed)
}

// VerdictLine is the last word.
func (r *Report) VerdictLine(colour bool) string {
	var line string
	var colours text.Colors
	switch r.Verdict {
	case Kept:
		person := 0
		for _, s := range r.Scopes {
			person += s.After.Person
		}
		line = "KEPT: every promise held. Nothing was sold twice, nothing was lost, and the books agree"
		if person > 0 {
			line += fmt.Sprintf("; %d reservations whose hash was deleted wait for a person, and make up all of the difference", person)
		}
		line, colours = line+".", text.Colors{text.FgGreen, text.Bold}
	case Broken:
		line = fmt.Sprintf("BROKEN: %d violations of the promises.", len(r.Violations))
		colours = text.Colors{text.FgRed, text.Bold}
	default:
		line = "INCOMPLETE: the demo failed before it could say: " + r.Error
		colours = text.Colors{text.FgYellow, text.Bold}
	}
	if colour {
		return colours.Sprint(line)
	}
	return line
}
