package console

import (
	"bytes"
	"context"
	"html/template"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/chart"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reconcile/changes"
	"github.com/seckill/reconciler/reconcile/render"
)

// runRow is a comparison in a list.
type runRow struct {
	ID         string
	Mode       string
	State      string // running, finished, failed or interrupted
	Verdict    string // of one that finished
	StartedBy  string
	StartedAt  time.Time
	FinishedAt time.Time
	Scopes     int
	Findings   int
	Incomplete int
	Failure    string
}

func rowOfRun(r pgstore.StoredRun) runRow {
	return runRow{
		ID: r.ID, Mode: r.Mode, State: string(r.State), Verdict: string(r.Verdict), StartedBy: r.StartedBy, StartedAt: r.StartedAt,
		FinishedAt: r.FinishedAt, Scopes: r.Scopes, Findings: r.Findings, Incomplete: r.Incomplete, Failure: r.Failure,
	}
}

func (c *Console) runRows(ctx context.Context, f pgstore.RunFilter) ([]runRow, error) {
	runs, err := c.Daemon.Postgres.Runs(ctx, f)
	if err != nil {
		return nil, err
	}
	rows := make([]runRow, len(runs))
	for i, r := range runs {
		rows[i] = rowOfRun(r)
	}
	return rows, nil
}

const listedRuns = 100

func (c *Console) reports(w http.ResponseWriter, r *http.Request) error {
	rows, err := c.runRows(r.Context(), pgstore.RunFilter{Limit: listedRuns})
	if err != nil {
		return err
	}
	c.render(w, r, http.StatusOK, "reports", map[string]any{"Runs": rows, "Limit": listedRuns})
	return nil
}

// reportData is one comparison with its findings, and what changed since the
// one before.
type reportData struct {
	runRow

	Report  *reconcile.Report // nil unless it finished
	Checks  []checkGroup
	Bars    template.HTML
	Since   *changes.Diff // nil: there is none before
	Formats []string
}

// checkGroup is the findings of one check.
type checkGroup struct {
	ID, Severity, Advice string
	Findings             []reconcile.Finding
	More                 int // that are not shown
}

// shownFindings bounds what one check shows; downloads have all.
const shownFindings = 50

func (c *Console) report(w http.ResponseWriter, r *http.Request) error {
	ctx := r.Context()
	run, err := c.Daemon.Postgres.Run(ctx, r.PathValue("id"))
	if err != nil {
		return err
	}
	data := reportData{runRow: rowOfRun(run), Formats: render.Formats()}
	if run.State == pgstore.RunFinished {
		if data.Report, err = c.Daemon.Postgres.Report(ctx, run.ID); err != nil {
			return err
		}
		data.Checks = groups(data.Report)
		data.Bars = findingBars(c.words.in(chosenLanguage(r)), data.Checks)
		if data.Since, err = c.sinceLast(ctx, run, data.Report); err != nil {
			return err
		}
	}
	c.render(w, r, http.StatusOK, "report", data)
	return nil
}

func (c *Console) sinceLast(ctx context.Context, run pgstore.StoredRun, report *reconcile.Report) (*changes.Diff, error) {
	before, err := c.Daemon.Postgres.PreviousRun(ctx, run)
	if err != nil {
		if statusOf(err) == http.StatusNotFound {
			return nil, nil
		}
		return nil, err
	}
	old, err := c.Daemon.Postgres.Report(ctx, before.ID)
	if err != nil {
		return nil, err
	}
	diff := changes.Between(old, report)
	return &diff, nil
}

// groups sorts the findings by check, in the order in which they come.
func groups(r *reconcile.Report) []checkGroup {
	advice := map[string]string{}
	for _, c := range reconcile.Checks() {
		advice[c.ID] = c.Advice
	}
	var all []checkGroup
	for _, f := range r.Findings {
		i := slices.IndexFunc(all, func(g checkGroup) bool { return g.ID == f.Check })
		if i < 0 {
			all = append(all, checkGroup{ID: f.Check, Severity: string(f.Severity), Advice: advice[f.Check]})
			i = len(all) - 1
		}
		if len(all[i].Findings) < shownFindings {
			all[i].Findings = append(all[i].Findings, f)
		} else {
			all[i].More++
		}
	}
	return all
}

func findingBars(s speech, checks []checkGroup) template.HTML {
	if len(checks) == 0 {
		return ""
	}
	class := map[string]int{"critical": 3, "error": 2}
	b := chart.Bars{ID: "findings", Title: s.must("findings_by_check"), Description: s.must("findings_by_check"), Series: []string{s.must("findings")}}
	for _, g := range checks {
		b.Groups = append(b.Groups, chart.Group{Label: g.ID, Values: []float64{float64(len(g.Findings) + g.More)}, Class: class[g.Severity]})
	}
	return template.HTML(b.SVG()) //nolint:gosec // the chart escapes its texts
}

// contentTypes are those of the formats of a report.
var contentTypes = map[string]string{
	"json": "application/json", "jsonl": "application/x-ndjson", "csv": "text/csv; charset=utf-8",
	"markdown": "text/markdown; charset=utf-8", "html": "text/html; charset=utf-8", "table": "text/plain; charset=utf-8",
}

var extensions = map[string]string{"markdown": "md", "table": "txt"}

// download sends a report in one of its formats. It is always saved and never
// shown: it is a page of its own, under another policy than ours.
func (c *Console) download(w http.ResponseWriter, r *http.Request) error {
	format := r.URL.Query().Get("format")
	if !slices.Contains(render.Formats(), format) {
		return failedWith(http.StatusBadRequest, "%q is no format: there are %s", format, strings.Join(render.Formats(), ", "))
	}
	report, err := c.Daemon.Postgres.Report(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	var body bytes.Buffer
	if err := render.Write(&body, format, report); err != nil {
		return err
	}
	extension := format
	if e, ok := extensions[format]; ok {
		extension = e
	}
	h := w.Header()
	h.Set("Content-Type", contentTypes[format])
	h.Set("Content-Disposition", `attachment; filename="reconciliation-`+fileName(report.RunID)+`.`+extension+`"`)
	_, _ = w.Write(body.Bytes()) // the client may be gone
	return nil
}

// fileName keeps what is safe in a file's name.
func fileName(id string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_' {
			return r
		}
		return '_'
	}, id)
}
