package render

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/seckill/reconciler/reconcile"
)

func writeJSON(w io.Writer, r *reconcile.Report, _ tally) error {
	enc := encoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(r)
}

// The kinds of rows in JSON Lines and CSV.
const (
	rowFinding    = "finding"
	rowIncomplete = "incomplete" // what was not read is a row too: no rows must mean no contradiction
	rowNotMade    = "not_made"   // and so is a check that had nothing to compare
	rowOmitted    = "omitted"    // findings that a stored report counts and does not contain
)

// line is what every line of JSON Lines begins with.
type line struct {
	Schema int    `json:"schema"`
	RunID  string `json:"run_id"`
	Kind   string `json:"kind"`
}

func writeJSONL(w io.Writer, r *reconcile.Report, _ tally) error {
	enc := encoder(w)
	head := func(kind string) line { return line{r.Schema, r.RunID, kind} }
	for _, f := range r.Findings {
		if err := enc.Encode(struct {
			line
			reconcile.Finding
		}{head(rowFinding), f}); err != nil {
			return err
		}
	}
	for _, i := range r.Incomplete {
		if err := enc.Encode(struct {
			line
			reconcile.Incomplete
		}{head(rowIncomplete), i}); err != nil {
			return err
		}
	}
	for _, n := range notMadeRows(r) {
		if err := enc.Encode(struct {
			line
			notMadeRow
		}{head(rowNotMade), n}); err != nil {
			return err
		}
	}
	for _, o := range omittedRows(r) {
		if err := enc.Encode(struct {
			line
			omittedRow
		}{head(rowOmitted), o}); err != nil {
			return err
		}
	}
	return nil
}

// notMadeRow is why a check was not made.
type notMadeRow struct {
	Check  string `json:"check"`
	Reason string `json:"reason"`
}

func notMadeRows(r *reconcile.Report) []notMadeRow {
	var rows []notMadeRow
	for _, check := range slices.Sorted(maps.Keys(r.NotMade)) {
		rows = append(rows, notMadeRow{check, r.NotMade[check]})
	}
	return rows
}

// omittedRow is how many findings of a check are left out.
type omittedRow struct {
	Check    string `json:"check"`
	Count    int    `json:"count"`
	Repaired bool   `json:"repaired"`
}

func omittedRows(r *reconcile.Report) []omittedRow {
	var rows []omittedRow
	for _, check := range slices.Sorted(maps.Keys(r.Omitted)) {
		rows = append(rows, omittedRow{check, r.Omitted[check], false})
	}
	for _, check := range slices.Sorted(maps.Keys(r.OmittedRepaired)) {
		rows = append(rows, omittedRow{check, r.OmittedRepaired[check], true})
	}
	return rows
}

// csvColumns are the columns of a report as CSV; docs/reports.md explains them.
var csvColumns = []string{
	"run_id", "kind", "check", "severity", "activity_id", "sku_id", "activity_version", "bucket_id", "subject", "message", "rounds",
	"repair_kind", "repair_state", "repair_detail", "repair_before", "repair_after", "evidence_redis", "evidence_postgres", "evidence_mq",
}

// csvRow is one row; what does not apply is empty.
type csvRow struct {
	kind, check      string
	severity         reconcile.Severity
	scope            *reconcile.Scope
	subject, message string
	rounds           int
	repair           reconcile.Repair
	evidence         reconcile.Evidence
}

func writeCSV(w io.Writer, r *reconcile.Report, _ tally) error {
	out := csv.NewWriter(w)
	out.UseCRLF = true // RFC 4180
	if err := out.Write(csvColumns); err != nil {
		return err
	}
	for row := range csvRows(r) {
		cells, err := row.cells(r.RunID)
		if err != nil {
			return err
		}
		if err := out.Write(cells); err != nil {
			return err
		}
	}
	out.Flush()
	return out.Error()
}

func csvRows(r *reconcile.Report) func(yield func(csvRow) bool) {
	return func(yield func(csvRow) bool) {
		for _, f := range r.Findings {
			if !yield(csvRow{rowFinding, f.Check, f.Severity, &f.Scope, f.Subject, f.Message, f.Rounds, f.Repair, f.Evidence}) {
				return
			}
		}
		for _, i := range r.Incomplete {
			if !yield(csvRow{kind: rowIncomplete, scope: i.Scope, subject: i.Source, message: i.Reason}) {
				return
			}
		}
		for _, n := range notMadeRows(r) {
			if !yield(csvRow{kind: rowNotMade, check: n.Check, message: n.Reason}) {
				return
			}
		}
		for _, o := range omittedRows(r) {
			row := csvRow{kind: rowOmitted, check: o.Check, severity: severityOf(o.Check), message: fmt.Sprintf("%d more are not in the stored report", o.Count)}
			if o.Repaired {
				row.repair.State = reconcile.RepairStateDone
			}
			if !yield(row) {
				return
			}
		}
	}
}

func (c csvRow) cells(runID string) ([]string, error) {
	cells := []string{runID, c.kind, c.check, string(c.severity)}
	if c.scope != nil {
		cells = append(cells, c.scope.ActivityID, c.scope.SKUID, strconv.FormatInt(c.scope.Version, 10), strconv.FormatInt(c.scope.Bucket, 10))
	} else {
		cells = append(cells, "", "", "", "")
	}
	rounds := ""
	if c.rounds > 0 {
		rounds = strconv.Itoa(c.rounds)
	}
	cells = append(cells, c.subject, c.message, rounds, string(c.repair.Kind), string(c.repair.State), c.repair.Detail)
	for _, values := range []map[string]any{c.repair.Before, c.repair.After, c.evidence.Redis, c.evidence.Postgres, c.evidence.MQ} {
		text, err := compact(values)
		if err != nil {
			return nil, err
		}
		cells = append(cells, text)
	}
	for i := range cells {
		cells[i] = inert(cells[i])
	}
	return cells, nil
}

// compact is values as JSON in one line; "" for none.
func compact(values map[string]any) (string, error) {
	if len(values) == 0 {
		return "", nil
	}
	var b strings.Builder
	if err := encoder(&b).Encode(values); err != nil {
		return "", err
	}
	return strings.TrimSuffix(b.String(), "\n"), nil
}

// inert keeps a spreadsheet from taking a cell for a formula: one that begins
// like a formula, in full-width characters too, gets a quote before it.
func inert(cell string) string {
	if cell != "" && strings.ContainsRune("=+-@\t\r\n\uFF1D\uFF0B\uFF0D\uFF20", []rune(cell)[0]) {
		return "'" + cell
	}
	return cell
}

// pretty is evidence as a person reads it.
func pretty(value any) (string, error) {
	text, err := json.MarshalIndent(value, "", "  ")
	return string(text), err
}
