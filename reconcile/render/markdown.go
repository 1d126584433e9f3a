package render

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/seckill/reconciler/reconcile"
)

// markdownRows bounds the findings of each check, and each other list: what
// is pasted into a ticket is read there.
const markdownRows = 20

func writeMarkdown(w io.Writer, r *reconcile.Report, t tally) error {
	var m markdown
	m.printf("## Reconciliation: %s\n\n%s\n\n", r.Verdict, verdictText(r.Verdict))
	m.table([]string{"", ""}, [][]string{
		{"Run", code(r.RunID) + " (" + r.Mode + ")"},
		{"Time", fmt.Sprintf("%s to %s (%s)", stamp(r.StartedAt), stamp(r.FinishedAt), duration(r))},
		{"Scopes", t.scopesText()},
		{"Findings", t.findingsText()},
		{"Incomplete", strconv.Itoa(t.incomplete)},
	})
	m.printf("### What to do next\n\n")
	for i, step := range nextSteps(r, t) {
		m.printf("%d. ", i+1)
		for _, s := range spans(step) {
			if s.Code {
				m.printf("%s", code(s.Text))
			} else {
				m.printf("%s", plain(s.Text))
			}
		}
		m.printf("\n")
	}
	m.printf("\n")
	m.findings(t)
	m.incomplete(r)
	m.notMade(r)
	m.scopes(r)
	_, err := io.WriteString(w, strings.TrimRight(m.String(), "\n")+"\n")
	return err
}

// markdown is a document that is being written.
type markdown struct{ strings.Builder }

func (m *markdown) printf(format string, args ...any) { fmt.Fprintf(m, format, args...) }

// table writes cells that are Markdown already.
func (m *markdown) table(header []string, rows [][]string) {
	m.printf("| %s |\n|%s\n", strings.Join(header, " | "), strings.Repeat(" --- |", len(header)))
	for _, row := range rows {
		m.printf("| %s |\n", strings.Join(row, " | "))
	}
	m.printf("\n")
}

// rest says how many rows are left out.
func (m *markdown) rest(n int) {
	if n > 0 {
		m.printf("… and %d more: `--output json` has all of them.\n\n", n)
	}
}

func (m *markdown) findings(t tally) {
	if len(t.checks) == 0 {
		return
	}
	var rows [][]string
	for _, c := range t.checks {
		rows = append(rows, []string{code(c.ID), plain(string(c.Severity)), strconv.Itoa(c.standing), strconv.Itoa(c.repaired)})
	}
	m.printf("### Findings\n\n")
	m.table([]string{"Check", "Severity", "Stand", "Repaired"}, rows)
	for _, c := range t.checks {
		m.printf("#### %s (%d)\n\n", code(c.ID), c.standing)
		rows := make([][]string, 0, markdownRows)
		for _, f := range c.findings[:min(len(c.findings), markdownRows)] {
			rows = append(rows, []string{
				code(f.Scope.Reservation().Tag()), code(f.Subject), plain(f.Message), strconv.Itoa(f.Rounds), plain(repairCell(f.Repair)),
			})
		}
		m.table([]string{"Scope", "Subject", "Finding", "Rounds", "Repair"}, rows)
		m.rest(c.standing + c.repaired - len(rows))
	}
}

// repairCell is what became of a repair and what there is to say of it.
func repairCell(r reconcile.Repair) string {
	state := repairText(r)
	switch {
	case r.Detail == "":
		return state
	case state == "-":
		return r.Detail
	default:
		return state + ": " + r.Detail
	}
}

func (m *markdown) incomplete(r *reconcile.Report) {
	if len(r.Incomplete) == 0 {
		return
	}
	var rows [][]string
	for _, i := range r.Incomplete[:min(len(r.Incomplete), markdownRows)] {
		rows = append(rows, []string{plain(i.Source), code(scopeText(i.Scope)), plain(i.Reason)})
	}
	m.printf("### Incomplete\n\n")
	m.table([]string{"Source", "Scope", "Why"}, rows)
	m.rest(len(r.Incomplete) - len(rows))
}

func (m *markdown) notMade(r *reconcile.Report) {
	var rows [][]string
	for _, n := range notMadeRows(r) {
		rows = append(rows, []string{code(n.Check), plain(n.Reason)})
	}
	if len(rows) > 0 {
		m.printf("### Checks that were not made\n\n")
		m.table([]string{"Check", "Why"}, rows)
	}
}

func (m *markdown) scopes(r *reconcile.Report) {
	if len(r.Scopes) == 0 {
		return
	}
	var rows [][]string
	for _, s := range worstFirst(r.Scopes)[:min(len(r.Scopes), markdownRows)] {
		row := []string{code(s.Reservation().Tag())}
		for _, n := range s.Numbers() {
			row = append(row, numberText(n))
		}
		rows = append(rows, append(row, plain(scopeVerdict(s))))
	}
	m.printf("### Scopes\n\n")
	m.table([]string{
		"Scope", "Initial", "Available", "Reserved", "Released", "Pending", "Expiry", "Active", "Cancelled", "Deviation", "Verdict",
	}, rows)
	m.rest(len(r.Scopes) - len(rows))
}

// special are the characters that mean something in Markdown, and the entities
// that mean the same where no backslash helps: a value makes no HTML, no link,
// no mention and no other cell.
var special = strings.NewReplacer(
	`\`, `\\`, "|", `\|`, "`", "\\`", "*", `\*`, "_", `\_`, "[", `\[`, "]", `\]`, "~", `\~`, "#", `\#`, "!", `\!`,
	"&", "&amp;", "<", "&lt;", ">", "&gt;", "@", "&#64;", "://", "&#58;//", "www.", "www&#46;",
)

// plain is a value as text.
func plain(text string) string { return special.Replace(printable(text)) }

// code is a value in a code span, whose fence is longer than any within it.
// There a pipe alone has to be escaped.
func code(text string) string {
	text = strings.ReplaceAll(printable(text), "|", `\|`)
	if text == "" {
		return ""
	}
	fence, run := "`", ""
	for _, r := range text {
		if r != '`' {
			run = ""
			continue
		}
		if run += "`"; len(run) >= len(fence) {
			fence = run + "`"
		}
	}
	if fence != "`" {
		text = " " + text + " "
	}
	return fence + text + fence
}
