package render

import (
	"cmp"
	"crypto/sha256"
	_ "embed" // the page's template and style
	"encoding/base64"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/seckill/reconciler/internal/chart"
	"github.com/seckill/reconciler/reconcile"
)

var (
	//go:embed page.tmpl
	pageTemplate string
	//go:embed page.css
	pageCSS string
)

// What is shown on the page at most; it says what is left out.
const (
	pageFindings = 200 // of each check
	pageRows     = 500 // of each other list
	chartScopes  = 16
)

// style is all of the page's style; the policy allows exactly it.
var style = pageCSS + chart.CSS

var page = template.Must(template.New("page").Parse(pageTemplate))

// pageData is what the template shows. Values are escaped by it; the charts and
// the style are this program's own.
type pageData struct {
	Report   *reconcile.Report
	Policy   string
	Style    template.CSS
	Verdict  string
	Meaning  string
	Facts    [][2]string
	Steps    [][]span
	Charts   []pageChart
	Checks   []pageCheck
	Columns  []string
	Scopes   []pageScope
	MoreRows int // scopes
	Unread   []pageUnread
	MoreRead int // incomplete entries
	NotMade  []notMadeRow
	Omitted  int
}

type pageChart struct {
	Heading, Note string
	SVG           template.HTML
}

type pageCheck struct {
	ID, Severity, Compares   string
	Advice                   []span
	Standing, Repaired, More int
	Findings                 []pageFinding
}

type pageFinding struct {
	Scope, Subject, Message, Repair, Detail string
	Rounds                                  int
	Evidence, Changes                       string
}

type pageScope struct {
	Tag, Verdict, Label string
	Numbers             []string
}

type pageUnread struct{ Source, Scope, Reason string }

func writeHTML(w io.Writer, r *reconcile.Report, t tally) error {
	hash := sha256.Sum256([]byte(style))
	data := pageData{
		Report: r,
		Policy: fmt.Sprintf("default-src 'none'; style-src 'sha256-%s'; base-uri 'none'; form-action 'none'",
			base64.StdEncoding.EncodeToString(hash[:])),
		Style:   template.CSS(style), //nolint:gosec // embedded in the program
		Verdict: string(r.Verdict), Meaning: verdictText(r.Verdict),
		Facts: [][2]string{
			{"Run", r.RunID},
			{"Mode", r.Mode},
			{"Finished", stamp(r.FinishedAt) + " after " + duration(r).String()},
			{"Scopes", t.scopesText()},
			{"Findings", t.findingsText()},
			{"Incomplete", strconv.Itoa(t.incomplete)},
		},
		Charts: charts(r, t), Columns: numberHeads, Omitted: t.omitted, NotMade: notMadeRows(r),
		MoreRows: max(len(r.Scopes)-pageRows, 0), MoreRead: max(len(r.Incomplete)-pageRows, 0),
	}
	for _, step := range nextSteps(r, t) {
		data.Steps = append(data.Steps, spans(step))
	}
	for _, c := range t.checks {
		shown, err := pageCheckOf(c)
		if err != nil {
			return err
		}
		data.Checks = append(data.Checks, shown)
	}
	for _, s := range worstFirst(r.Scopes)[:min(len(r.Scopes), pageRows)] {
		row := pageScope{Tag: s.Reservation().Tag(), Verdict: string(s.Verdict), Label: scopeVerdict(s)}
		for _, n := range s.Numbers() {
			row.Numbers = append(row.Numbers, numberText(n))
		}
		data.Scopes = append(data.Scopes, row)
	}
	for _, i := range r.Incomplete[:min(len(r.Incomplete), pageRows)] {
		data.Unread = append(data.Unread, pageUnread{i.Source, scopeText(i.Scope), i.Reason})
	}
	return page.Execute(w, data)
}

// numberHeads are the headers of [reconcile.ScopeReport.Numbers].
var numberHeads = []string{"Initial", "Available", "Reserved", "Released", "Pending", "Expiry", "Active", "Cancelled", "Deviation"}

func pageCheckOf(c checkTally) (pageCheck, error) {
	shown := pageCheck{
		ID: c.ID, Severity: string(c.Severity), Compares: c.Compares, Advice: spans(c.Advice), Standing: c.standing, Repaired: c.repaired,
		More: max(c.standing+c.repaired-min(len(c.findings), pageFindings), 0),
	}
	for _, f := range c.findings[:min(len(c.findings), pageFindings)] {
		row := pageFinding{
			Scope: f.Scope.Reservation().Tag(), Subject: f.Subject, Message: f.Message, Rounds: f.Rounds,
			Repair: repairText(f.Repair), Detail: f.Repair.Detail,
		}
		var err error
		if row.Evidence, err = pretty(f.Evidence); err != nil {
			return shown, err
		}
		if f.Repair.Before != nil || f.Repair.After != nil {
			if row.Changes, err = pretty(map[string]any{"before": f.Repair.Before, "after": f.Repair.After}); err != nil {
				return shown, err
			}
		}
		shown.Findings = append(shown.Findings, row)
	}
	return shown, nil
}

// worstFirst orders scopes by what a person looks for; the rest as it is.
func worstFirst(scopes []reconcile.ScopeReport) []reconcile.ScopeReport {
	order := []reconcile.Verdict{reconcile.VerdictDrift, reconcile.VerdictIncomplete, reconcile.VerdictConsistent}
	sorted := slices.Clone(scopes)
	slices.SortStableFunc(sorted, func(a, b reconcile.ScopeReport) int {
		return cmp.Compare(slices.Index(order, a.Verdict), slices.Index(order, b.Verdict))
	})
	return sorted
}

// charts are those that have something to show.
func charts(r *reconcile.Report, t tally) []pageChart {
	var all []pageChart
	add := func(heading, note string, b chart.Bars) {
		if len(b.Groups) > 0 {
			b.Title = heading
			all = append(all, pageChart{heading, note, template.HTML(b.SVG())}) //nolint:gosec // the chart escapes its texts
		}
	}
	add("Findings by check", "Red is critical, amber an error; blue is only reported.", findingsChart(t))
	scopes := worstFirst(r.Scopes)
	note := ""
	if len(scopes) > chartScopes {
		note = fmt.Sprintf("The %d scopes that need a look first; the table has %d.", chartScopes, len(scopes))
		scopes = scopes[:chartScopes]
	}
	add("Stock of each bucket", strings.TrimSpace("Reserved should be the orders and what is still undecided. "+note), stockChart(scopes))
	add("Deviation", "Above zero units are reserved by nobody, below zero reservations are lost. "+note, deviationChart(scopes))
	return all
}

// chartClass is a severity's place in the palette.
var chartClass = map[reconcile.Severity]int{
	reconcile.SeverityCritical: 3, reconcile.SeverityError: 2, reconcile.SeverityWarning: 0, reconcile.SeverityInfo: 0,
}

func findingsChart(t tally) chart.Bars {
	b := chart.Bars{ID: "chart-findings", Description: t.findingsText(), Series: []string{"findings"}}
	for _, c := range t.checks {
		if c.standing > 0 {
			b.Groups = append(b.Groups, chart.Group{
				Label: fmt.Sprintf("%s (%s)", c.ID, c.Severity), Values: []float64{float64(c.standing)}, Class: chartClass[c.Severity],
			})
		}
	}
	return b
}

func stockChart(scopes []reconcile.ScopeReport) chart.Bars {
	b := chart.Bars{
		ID: "chart-stock", Description: "Units available and reserved in Redis, and active orders in PostgreSQL, of each bucket. The table of scopes has the numbers.",
		Series: []string{"available", "reserved", "active orders"},
	}
	for _, s := range scopes {
		numbers := map[string]*int64{}
		for _, n := range s.Numbers() {
			numbers[n.Name] = n.Value
		}
		b.Groups = append(b.Groups, chart.Group{
			Label:  s.Reservation().Tag(),
			Values: []float64{value(numbers["available"]), value(numbers["reserved"]), value(numbers["active"])},
		})
	}
	return b
}

// deviationChart has the scopes that deviate, or of which that is not known.
func deviationChart(scopes []reconcile.ScopeReport) chart.Bars {
	b := chart.Bars{
		ID: "chart-deviation", Description: "Reserved units less those that reservations and orders account for, of each bucket that deviates.",
		Series: []string{"deviation"}, Signed: true,
	}
	for _, s := range scopes {
		if s.Verdict == reconcile.VerdictIncomplete || s.Deviation != nil && *s.Deviation != 0 {
			b.Groups = append(b.Groups, chart.Group{Label: s.Reservation().Tag(), Values: []float64{value(s.Deviation)}, Class: 3})
		}
	}
	return b
}

func value(n *int64) float64 {
	if n == nil {
		return chart.Unknown
	}
	return float64(*n)
}
