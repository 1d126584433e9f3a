package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/seckill/reconciler/docs"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reconcile/render"
)

// storeRuns stores what the scripts show: two runs of one selection that
// finished, a failed and an interrupted one.
func storeRuns(ctx context.Context, url string) error {
	store, err := pgstore.Open(ctx, pgstore.Config{URL: url})
	if err != nil {
		return err
	}
	defer store.Close()
	here := pgstore.RunSelection{ActivityID: "10001"}
	begin := func(id, mode string, selection pgstore.RunSelection) error {
		at, err := time.Parse("20060102T150405Z", strings.Split(id, "-")[0])
		return errors.Join(err, store.BeginRun(ctx, pgstore.NewRun{ID: id, Mode: mode, Selection: selection, StartedBy: "ann@host", StartedAt: at}))
	}
	const first, second, failed, interrupted = "20260102T010000Z-thefirst", "20260102T020000Z-theirsec", "20260101T000000Z-failedxx", "20260103T000000Z-interrup"
	err = errors.Join(
		begin(failed, reconcile.ModeDeep, pgstore.RunSelection{}), store.FailRun(ctx, failed, "no space left\non the disk"),
		begin(first, reconcile.ModeQuick, here), store.FinishRun(ctx, storedReport(first, 3, "rid1", "rid2")),
		begin(second, reconcile.ModeQuick, here), store.FinishRun(ctx, storedReport(second, 4, "rid1", "rid3")),
		begin(interrupted, reconcile.ModeDeep, pgstore.RunSelection{}),
	)
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, `UPDATE seckill.reconcile_run SET seen_at = started_at WHERE verdict IS NULL`)
	return err
}

// storedReport is a report of lost reservations; rid2 is one that is behind, and
// was repaired where it is not named.
func storedReport(id string, reserved int64, subjects ...string) *reconcile.Report {
	scope := reconcile.Scope{ActivityID: "10001", SKUID: "88001", Version: 7}
	r := &reconcile.Report{
		Schema: reconcile.SchemaVersion, RunID: id, Mode: reconcile.ModeQuick, Verdict: reconcile.VerdictDrift,
		StartedAt: time.Now().UTC(), FinishedAt: time.Now().UTC(), Incomplete: []reconcile.Incomplete{},
		Scopes: []reconcile.ScopeReport{{
			Scope: scope, Verdict: reconcile.VerdictDrift, Redis: &reconcile.RedisCount{Initial: new(int64(10)), Reserved: &reserved},
			Postgres: &reconcile.OrdersCount{Active: 5}, Deviation: new(2 - reserved),
		}},
		Summary: map[string]int{reconcile.CheckLostReservation: 0, reconcile.CheckStatusBehind: 0},
	}
	add := func(check string, severity reconcile.Severity, subject string, state reconcile.RepairState) {
		r.Findings = append(r.Findings, reconcile.Finding{
			Check: check, Severity: severity, Scope: scope, Subject: subject, Message: "it is so", Rounds: 2,
			Repair: reconcile.Repair{Kind: reconcile.RepairAutomatic, State: state, Detail: "put right"},
		})
		if state != reconcile.RepairStateDone {
			r.Summary[check]++
		}
	}
	behind := reconcile.RepairStateDone
	for _, subject := range subjects {
		if subject == "rid2" {
			behind = reconcile.RepairStateNone
			continue
		}
		add(reconcile.CheckLostReservation, reconcile.SeverityCritical, subject, reconcile.RepairStateNone)
	}
	add(reconcile.CheckStatusBehind, reconcile.SeverityError, "rid2", behind)
	return r
}

// reports runs `reconciler report` beside the reconciliation.
func (r *reconciled) report(args ...string) (status int, stdout, stderr string) {
	r.t.Helper()
	return r.program(append([]string{"report"}, args...)...)
}

func reportSchema(t *testing.T) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(string(docs.ReportSchema)))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("report.schema.json", doc); err != nil {
		t.Fatal(err)
	}
	return c.MustCompile("report.schema.json")
}

// In every format the exit status is the verdict's, and standard output is the
// report and nothing else: of real runs that are consistent, have drift, were
// repaired, or could not read everything. JSON is what the schema says, and
// what is stored.
func TestEveryFormatOfEveryVerdict(t *testing.T) {
	t.Parallel()
	r := newReconciled(t, stacktest.Shared(t))
	files := t.TempDir()
	r.env = append(r.env, "RECONCILER_MODE=act", "RECONCILER_RECONCILE_REPORT_DIR="+files)
	schema := reportSchema(t)
	runs := 0
	every := func(name string, status int, verdict reconcile.Verdict, args ...string) {
		t.Helper()
		for _, format := range render.Formats() {
			if name == "repaired" {
				r.order(fmt.Sprint("user", runs))
			}
			got, stdout, stderr := r.exec(append([]string{"--output", format}, args...)...)
			runs++
			if got != status || stderr != "" || stdout == "" {
				t.Errorf("%s as %s: status %d, want %d; %q\n%s", name, format, got, status, stderr, stdout)
			}
			begins := map[string]string{
				render.FormatTable: "SCOPE", render.FormatJSON: "{\n", render.FormatCSV: "run_id,", render.FormatHTML: "<!doctype html>\n",
				render.FormatMarkdown: "## Reconciliation: " + string(verdict) + "\n",
			}[format]
			if !strings.HasPrefix(stdout, begins) {
				t.Errorf("%s as %s begins with %.40q", name, format, stdout)
			}
			if format != render.FormatJSON {
				continue
			}
			doc, err := jsonschema.UnmarshalJSON(strings.NewReader(stdout))
			if err == nil {
				err = schema.Validate(doc)
			}
			if err != nil {
				t.Errorf("%s: %v\n%s", name, err, stdout)
			}
			if got, stored, stderr := r.report("show", "latest", "--output", "json"); got != exitDone || stored != stdout {
				t.Errorf("%s: stored is\n%s\nand was\n%s%s", name, stored, stdout, stderr)
			}
		}
	}
	every("consistent", exitDone, reconcile.VerdictConsistent)
	r.order("u1")
	every("drift", exitDrift, reconcile.VerdictDrift, "--deep")
	every("repaired", exitDone, reconcile.VerdictConsistent, "--deep", "--repair", "--yes")
	if err := r.redis.Del(t.Context(), r.scope.StockKey()).Err(); err != nil {
		t.Fatal(err)
	}
	every("incomplete", exitIncomplete, reconcile.VerdictIncomplete)

	if status, stdout, stderr := r.exec("--no-store"); status != exitIncomplete || stderr != "" {
		t.Errorf("--no-store: %d\n%s%s", status, stdout, stderr)
	}
	_, list, _ := r.report("list", "--output", "json")
	var listed struct{ Runs []runView }
	wantJSON(t, list, &listed)
	entries, err := os.ReadDir(files)
	if err != nil || len(listed.Runs) != runs || len(entries) != 2*runs {
		t.Errorf("%d runs are stored and %d files written of %d runs: %v", len(listed.Runs), len(entries), runs, err)
	}
	for _, run := range listed.Runs {
		if run.State != pgstore.RunFinished || run.Verdict == nil {
			t.Errorf("run %+v", run)
		}
		if _, err := os.Stat(filepath.Join(files, "reconcile-"+run.RunID+".html")); err != nil {
			t.Error(err)
		}
	}
	if status, stdout, stderr := r.exec("--list-checks", "--output", "csv"); status != exitFailed || stdout != "" || !strings.Contains(stderr, "listed as table or json") {
		t.Errorf("--list-checks as CSV: %d, %q, %q", status, stdout, stderr)
	}
}

// A run that cannot be stored prints its report, with its own exit status and
// a warning.
func TestReportThatCannotBeStored(t *testing.T) {
	t.Parallel()
	r := newReconciled(t, stacktest.Shared(t))
	if _, err := r.db.Exec(t.Context(), `REVOKE INSERT ON seckill.reconcile_run FROM seckill_daemon`); err != nil {
		t.Fatal(err)
	}
	files := t.TempDir()
	r.env = append(r.env, "RECONCILER_RECONCILE_REPORT_DIR="+files)
	status, stdout, stderr := r.exec()
	if status != exitDone || !strings.Contains(stdout, "consistent: 1 scope, 0 findings") || !strings.Contains(stderr, "not stored") || !strings.Contains(stderr, "permission denied") {
		t.Errorf("status %d, %q\n%s", status, stderr, stdout)
	}
	if entries, err := os.ReadDir(files); err != nil || len(entries) != 2 {
		t.Errorf("files %v, %v", entries, err)
	}
	if status, stdout, stderr := r.exec("--no-store"); status != exitDone || stderr != "" {
		t.Errorf("--no-store: status %d, %q\n%s", status, stderr, stdout)
	}
	if _, err := r.db.Exec(t.Context(), `GRANT INSERT ON seckill.reconcile_run TO seckill_daemon`); err != nil {
		t.Fatal(err)
	}
	r.env = append(r.env, "RECONCILER_RECONCILE_REPORT_DIR="+filepath.Join(files, "gone"))
	if status, _, stderr := r.exec(); status != exitDone || !strings.Contains(stderr, "gone") {
		t.Errorf("a directory that is gone: status %d, %q", status, stderr)
	}
	if status, stdout, stderr := r.report("list"); status != exitDone || strings.Count(stdout, "consistent") != 1 {
		t.Errorf("list: %d\n%s%s", status, stdout, stderr)
	}
}

// Two runs beside each other in time: what the second has and the first had
// not is new, and gone when it is put right.
func TestReportDiffOfRealRuns(t *testing.T) {
	t.Parallel()
	r := newReconciled(t, stacktest.Shared(t))
	r.env = append(r.env, "RECONCILER_MODE=act")
	run := func(status int, args ...string) {
		t.Helper()
		// What the machine's services are set up like is left out.
		if got, stdout, stderr := r.exec(append([]string{"--deep", "--checks", "config_missing,status_behind"}, args...)...); got != status {
			t.Fatalf("status %d, want %d\n%s%s", got, status, stdout, stderr)
		}
	}
	diff := func(status int, sum string) {
		t.Helper()
		got, stdout, stderr := r.report("diff")
		if got != status || !strings.Contains(stdout, sum) {
			t.Errorf("status %d, want %d and %q\n%s%s", got, status, sum, stdout, stderr)
		}
	}
	run(exitDone)
	if status, _, stderr := r.report("diff"); status != exitFailed || !strings.Contains(stderr, "a run of the same mode and selection before") {
		t.Errorf("of one run: %d, %q", status, stderr)
	}
	r.order("u1")
	run(exitDrift)
	diff(exitDrift, "consistent → drift: 1 new, 0 gone, 0 persist, 0 unclear")
	run(exitDrift)
	diff(exitDone, "drift → drift: 0 new, 0 gone, 1 persist, 0 unclear")
	run(exitDone, "--repair", "--yes")
	diff(exitDone, "drift → consistent: 0 new, 1 gone, 0 persist, 0 unclear")
	if err := r.redis.Del(t.Context(), r.scope.StockKey()).Err(); err != nil {
		t.Fatal(err)
	}
	run(exitIncomplete)
	diff(exitIncomplete, fmt.Sprintf("consistent → incomplete: %d new", 1))
}
