package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/docs"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/reportfile"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reconcile/render"
)

func newReport(a *app) *cobra.Command {
	cmd := group("report", "See, export and compare the reports of reconciliations",
		`Every reconciliation is stored with its report, those of the daemon too. Reports are
kept for reconcile.retention; the newest one of each mode and selection stays. A run
that did not finish has no report and no verdict: it is shown as running, failed or
interrupted.

A run is named by its id, or is the latest one.`,
		newReportList(a), newReportShow(a), newReportExport(a), newReportDiff(a), newReportSchema(a))
	cmd.Example = "  reconciler report list"
	return cmd
}

// latest names the newest run that is not under way.
const latest = "latest"

// runFilterFlags select among stored runs.
type runFilterFlags struct {
	mode     choice
	activity string
	verdicts []string
	states   []string
	since    time.Duration
	limit    int
}

func listFlags(cmd *cobra.Command) *runFilterFlags {
	f := &runFilterFlags{mode: choice{accepts: []string{reconcile.ModeQuick, reconcile.ModeDeep}}}
	flags := cmd.Flags()
	flags.Var(&f.mode, "mode", "only runs of this mode")
	flags.StringVar(&f.activity, "activity", "", "only runs that selected this `activity`")
	flags.StringSliceVar(&f.verdicts, "verdict", nil, "only runs with these `verdicts`: consistent, drift, incomplete")
	flags.StringSliceVar(&f.states, "state", nil, "only runs in these `states`: running, finished, failed, interrupted")
	flags.DurationVar(&f.since, "since", 0, "only runs of the last `duration`, such as 24h")
	flags.IntVar(&f.limit, "limit", 50, "at most so many (0: no limit)")
	return f
}

func (f *runFilterFlags) filter() (pgstore.RunFilter, error) {
	out := pgstore.RunFilter{Mode: f.mode.value, ActivityID: f.activity, Limit: f.limit}
	if f.since < 0 || f.limit < 0 {
		return out, errors.New("--since and --limit cannot be negative")
	}
	if f.since > 0 {
		out.Since = time.Now().Add(-f.since)
	}
	var err error
	if out.Verdicts, err = knownWords("--verdict", f.verdicts, reconcile.VerdictConsistent, reconcile.VerdictDrift, reconcile.VerdictIncomplete); err != nil {
		return out, err
	}
	out.States, err = knownWords("--state", f.states, pgstore.RunStates...)
	return out, err
}

// knownWords checks that each of given is one of a few words.
func knownWords[W ~string](flag string, given []string, known ...W) ([]W, error) {
	var out []W
	for _, g := range given {
		c := choice{}
		for _, k := range known {
			c.accepts = append(c.accepts, string(k))
		}
		if err := c.Set(g); err != nil {
			return nil, fmt.Errorf("%s %q: %w", flag, g, err)
		}
		out = append(out, W(g))
	}
	return out, nil
}

func newReportList(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the stored runs, the newest first",
		Example: `  reconciler report list
  reconciler report list --mode deep --verdict drift,incomplete --since 168h
  reconciler report list --state interrupted,failed --output json`,
		Args: args(),
	}
	given := listFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		filter, err := given.filter()
		if err != nil {
			return usageError(cmd, err)
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			runs, err := store.Runs(ctx, filter)
			if err != nil {
				return err
			}
			return printRuns(out, runs)
		})
	}
	return cmd
}

// runView is a stored run in JSON. Numbers and verdict are null until it has
// finished.
type runView struct {
	RunID      string               `json:"run_id"`
	Mode       string               `json:"mode"`
	Selection  pgstore.RunSelection `json:"selection"`
	State      pgstore.RunState     `json:"state"`
	Verdict    *reconcile.Verdict   `json:"verdict"`
	StartedBy  string               `json:"started_by"`
	StartedAt  time.Time            `json:"started_at"`
	SeenAt     time.Time            `json:"seen_at"`
	FinishedAt *time.Time           `json:"finished_at"`
	Failure    string               `json:"failure"`
	Scopes     *int                 `json:"scopes"`
	Findings   *int                 `json:"findings"`
	Incomplete *int                 `json:"incomplete"`
}

func viewRun(r pgstore.StoredRun) runView {
	v := runView{
		RunID: r.ID, Mode: r.Mode, Selection: r.Selection, State: r.State, StartedBy: r.StartedBy,
		StartedAt: r.StartedAt, SeenAt: r.SeenAt, FinishedAt: view.OrNull(r.FinishedAt), Failure: r.Failure,
	}
	if r.State == pgstore.RunFinished {
		v.Verdict, v.Scopes, v.Findings, v.Incomplete = &r.Verdict, &r.Scopes, &r.Findings, &r.Incomplete
	}
	return v
}

func printRuns(out *result, runs []pgstore.StoredRun) error {
	views := make([]runView, 0, len(runs))
	rows := make([]table.Row, 0, len(runs))
	for _, r := range runs {
		views = append(views, viewRun(r))
		row := table.Row{r.ID, r.Mode, selectionText(r.Selection), runOutcome(r)}
		if r.State == pgstore.RunFinished {
			row = append(row, r.Scopes, r.Findings, r.Incomplete, stamp(r.StartedAt), r.FinishedAt.Sub(r.StartedAt).Round(time.Millisecond))
		} else {
			row = append(row, "-", "-", "-", stamp(r.StartedAt), "-")
		}
		rows = append(rows, append(row, r.StartedBy))
	}
	return out.print(struct {
		Schema int       `json:"schema"`
		Runs   []runView `json:"runs"`
	}{1, views}, func() error {
		return out.table("no runs", table.Row{"RUN", "MODE", "SELECTION", "VERDICT", "SCOPES", "FINDINGS", "INCOMPLETE", "STARTED", "TOOK", "BY"}, rows)
	})
}

// runOutcome is the verdict, or the state of a run that has none.
func runOutcome(r pgstore.StoredRun) string {
	switch r.State {
	case pgstore.RunFinished:
		return string(r.Verdict)
	case pgstore.RunFailed:
		return string(r.State) + ": " + firstLine(r.Failure)
	default:
		return string(r.State)
	}
}

// selectionText is what a run looked at.
func selectionText(s pgstore.RunSelection) string {
	var parts []string
	add := func(name, value string) {
		if value != "" {
			parts = append(parts, name+"="+value)
		}
	}
	add("activity", s.ActivityID)
	add("sku", s.SKUID)
	if s.Version != nil {
		add("version", strconv.FormatInt(*s.Version, 10))
	}
	if s.Bucket != nil {
		add("bucket", strconv.FormatInt(*s.Bucket, 10))
	}
	add("checks", strings.Join(s.Checks, ","))
	if len(parts) == 0 {
		return "all"
	}
	return strings.Join(parts, " ")
}

func newReportShow(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show ID|latest",
		Short: "Print a stored report",
		Long: `Prints a stored report in any of the formats of reconcile. latest is the newest run that
is not under way; if that one did not finish, it says so instead of showing an older one.

Exit status: 0 whatever the verdict of the report is, 3 if the run has no report.`,
		Example: `  reconciler report show latest
  reconciler report show 20260102T030405Z-abcdefgh --output markdown`,
		Args: args("ID"),
	}
	out := reportFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.withReport(cmd, args[0], func(r *reconcile.Report) error {
			return render.Write(a.stdout, out.format.value, r)
		})
	}
	return cmd
}

func newReportExport(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "export ID|latest --file FILE",
		Short: "Write a stored report to a file",
		Long: `Writes a stored report to a file, which is replaced as a whole: it is never there in part.
The format follows from the ending of FILE (.json, .jsonl, .csv, .md, .html, .txt) unless
--output says otherwise. The file can be read by its owner alone.

Exit status: 0 whatever the verdict of the report is, 3 if the run has no report.`,
		Example: `  reconciler report export latest --file report.html
  reconciler report export 20260102T030405Z-abcdefgh --output csv --file findings.csv`,
		Args: args("ID"),
	}
	var file string
	cmd.Flags().StringVar(&file, "file", "", "`path` of the file")
	if err := cmd.MarkFlagRequired("file"); err != nil {
		panic(err) // the flag was defined in the line above
	}
	out := reportFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		format, err := exportFormat(cmd, file, out.format.value)
		if err != nil {
			return usageError(cmd, err)
		}
		return a.withReport(cmd, args[0], func(r *reconcile.Report) error {
			return reportfile.Atomically(file, func(w io.Writer) error { return render.Write(w, format, r) })
		})
	}
	return cmd
}

// endings are the formats by how a file's name ends.
var endings = map[string]string{
	".json": render.FormatJSON, ".jsonl": render.FormatJSONL, ".csv": render.FormatCSV,
	".md": render.FormatMarkdown, ".html": render.FormatHTML, ".txt": render.FormatTable,
}

func exportFormat(cmd *cobra.Command, file, output string) (string, error) {
	if cmd.Flags().Changed("output") {
		return output, nil
	}
	for ending, format := range endings {
		if strings.HasSuffix(file, ending) {
			return format, nil
		}
	}
	return "", fmt.Errorf("the name %q does not say the format: add --output", file)
}

func newReportSchema(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON Schema of a report",
		Example: "  reconciler report schema",
		Args:    args(),
		RunE: func(*cobra.Command, []string) error {
			if _, err := a.stdout.Write(docs.ReportSchema); err != nil {
				return fmt.Errorf("write the schema: %w", err)
			}
			return nil
		},
	}
}

// withReport runs do with the report of a run. One without a report is
// incomplete, and never consistent.
func (a *app) withReport(cmd *cobra.Command, name string, do func(*reconcile.Report) error) error {
	return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
		run, err := findRun(ctx, store, name)
		if err != nil {
			return err
		}
		r, err := readReport(ctx, store, run)
		if err != nil {
			return err
		}
		return do(r)
	})
}

// findRun is a run by its id, or the latest one.
func findRun(ctx context.Context, store *pgstore.Store, name string) (pgstore.StoredRun, error) {
	if name != latest {
		return store.Run(ctx, name)
	}
	runs, err := store.Runs(ctx, pgstore.RunFilter{
		States: []pgstore.RunState{pgstore.RunFinished, pgstore.RunFailed, pgstore.RunInterrupted}, Limit: 1,
	})
	if err != nil {
		return pgstore.StoredRun{}, err
	}
	if len(runs) == 0 {
		return pgstore.StoredRun{}, fmt.Errorf("no run is stored that has ended: %w", pgstore.ErrNotFound)
	}
	return runs[0], nil
}

// readReport says of a run without a report what became of it.
func readReport(ctx context.Context, store *pgstore.Store, run pgstore.StoredRun) (*reconcile.Report, error) {
	if run.State == pgstore.RunFinished {
		return store.Report(ctx, run.ID)
	}
	what := map[pgstore.RunState]string{
		pgstore.RunRunning:     "is still under way",
		pgstore.RunInterrupted: "was interrupted: it was last heard of at " + stamp(run.SeenAt),
		pgstore.RunFailed:      "failed: " + run.Failure,
	}[run.State]
	return nil, &verdict{exitIncomplete, fmt.Errorf("run %s %s. It has no report and no verdict", run.ID, what)}
}
