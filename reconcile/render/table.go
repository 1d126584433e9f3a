package render

import (
	"fmt"
	"io"
	"strings"
	"unicode"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/seckill/reconciler/internal/tabular"
	"github.com/seckill/reconciler/reconcile"
)

// tableRows bounds each list that is printed on a terminal.
const tableRows = 50

func writeTable(w io.Writer, r *reconcile.Report, t tally) error {
	var parts []string
	if rows := scopeRows(r); len(rows) > 0 {
		parts = append(parts, tabular.Render(table.Row{
			"SCOPE", "INITIAL", "AVAILABLE", "RESERVED", "RELEASED", "PENDING", "EXPIRY", "ACTIVE", "CANCELLED", "DEVIATION", "VERDICT",
		}, rows))
	} else if r.Verdict == reconcile.VerdictConsistent {
		parts = append(parts, "no scope is registered")
	} else {
		parts = append(parts, "no scope could be read")
	}
	if len(r.Findings) > 0 {
		parts = append(parts, findingTable(r))
	}
	if len(r.Incomplete) > 0 {
		parts = append(parts, incompleteTable(r))
	}
	if rows := notMadeRows(r); len(rows) > 0 {
		var lines []table.Row
		for _, n := range rows {
			lines = append(lines, table.Row{n.Check, printable(n.Reason)})
		}
		parts = append(parts, tabular.Render(table.Row{"NOT MADE", "WHY"}, lines))
	}
	if t.omitted > 0 {
		parts = append(parts, fmt.Sprintf("The stored report does not contain %s more.", count(t.omitted, "finding")))
	}
	parts = append(parts, fmt.Sprintf("%s: %s, %s, %d incomplete (%s)", r.Verdict, count(len(r.Scopes), "scope"), t.findingsText(), t.incomplete, duration(r)))
	_, err := io.WriteString(w, strings.Join(parts, "\n\n")+"\n")
	return err
}

func scopeRows(r *reconcile.Report) []table.Row {
	rows := make([]table.Row, 0, len(r.Scopes))
	for _, s := range r.Scopes {
		row := table.Row{printable(s.Reservation().Tag())}
		for _, n := range s.Numbers() {
			row = append(row, numberText(n))
		}
		rows = append(rows, append(row, scopeVerdict(s)))
	}
	return rows
}

func findingTable(r *reconcile.Report) string {
	var rows []table.Row
	for _, f := range r.Findings[:min(len(r.Findings), tableRows)] {
		rows = append(rows, table.Row{
			f.Severity, f.Check, printable(f.Subject), f.Rounds, printable(f.Message + "; " + f.Repair.Detail), repairText(f.Repair),
		})
	}
	return tabular.Render(table.Row{"SEVERITY", "CHECK", "SUBJECT", "ROUNDS", "FINDING", "REPAIR"}, rows) + more(len(r.Findings))
}

func incompleteTable(r *reconcile.Report) string {
	var rows []table.Row
	for _, i := range r.Incomplete[:min(len(r.Incomplete), tableRows)] {
		rows = append(rows, table.Row{printable(i.Source), printable(scopeText(i.Scope)), printable(i.Reason)})
	}
	return tabular.Render(table.Row{"INCOMPLETE", "SCOPE", "WHY"}, rows) + more(len(r.Incomplete))
}

func more(n int) string {
	if n <= tableRows {
		return ""
	}
	return fmt.Sprintf("\nand %d more: see --output json", n-tableRows)
}

// printable keeps a value from moving the terminal's cursor or ending its row.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsGraphic(r) && r != '\u2028' && r != '\u2029' {
			return r
		}
		return '\uFFFD'
	}, text)
}
