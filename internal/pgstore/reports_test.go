package pgstore_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reconcile"
)

// began begins a run at the given minute and returns its id.
func began(t *testing.T, store *pgstore.Store, mode string, selection pgstore.RunSelection, minute int) string {
	t.Helper()
	id := reconcile.NewRunID()
	err := store.BeginRun(t.Context(), pgstore.NewRun{
		ID: id, Mode: mode, Selection: selection, StartedBy: "ann@host", StartedAt: time.Date(2026, 1, 2, 3, minute, 0, 0, time.UTC),
	})
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// reported is a report with n findings of one check, and one that was repaired.
func reported(id string, n int) *reconcile.Report {
	scope := reconcile.Scope{ActivityID: "10001", SKUID: "88001", Version: 7, Bucket: 1}
	deviation, initial := int64(-2), int64(9_007_199_254_740_991)
	r := &reconcile.Report{
		Schema: reconcile.SchemaVersion, RunID: id, Mode: reconcile.ModeQuick, Verdict: reconcile.VerdictDrift,
		StartedAt: time.Date(2026, 1, 2, 3, 4, 5, 678_000_000, time.UTC), FinishedAt: time.Date(2026, 1, 2, 3, 4, 9, 0, time.UTC),
		Scopes: []reconcile.ScopeReport{{
			Scope: scope, Verdict: reconcile.VerdictDrift, InMotion: true, Redis: &reconcile.RedisCount{Initial: &initial},
			Postgres: &reconcile.OrdersCount{Active: 3}, Deviation: &deviation,
		}},
		Findings:   []reconcile.Finding{},
		Incomplete: []reconcile.Incomplete{{Source: "redis", Scope: &scope, Reason: "no answer"}},
		Summary:    map[string]int{reconcile.CheckLostReservation: n, reconcile.CheckDeficit: 0},
	}
	for i := range n {
		r.Findings = append(r.Findings, reconcile.Finding{
			Check: reconcile.CheckLostReservation, Severity: reconcile.SeverityCritical, Scope: scope, Subject: fmt.Sprintf("rid%d", i),
			Message:  "the order has no reservation",
			Evidence: reconcile.Evidence{Redis: map[string]any{"available": 9_007_199_254_740_993}, Postgres: map[string]any{"order_id": "o1"}},
			Rounds:   2, Repair: reconcile.Repair{Kind: reconcile.RepairAutomatic, State: reconcile.RepairStateNone, Detail: "restore it"},
		})
	}
	r.Findings = append(r.Findings, reconcile.Finding{
		Check: reconcile.CheckStatusBehind, Severity: reconcile.SeverityError, Scope: scope, Subject: "rid", Message: "behind", Rounds: 3,
		Repair: reconcile.Repair{
			Kind: reconcile.RepairAutomatic, State: reconcile.RepairStateDone, Detail: "confirmed",
			Before: map[string]any{"status": "ENQUEUED"}, After: map[string]any{"status": "ORDER_CREATED"},
		},
	})
	return r
}

func asJSON(t *testing.T, value any) string {
	t.Helper()
	encoded, err := json.MarshalIndent(value, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(encoded)
}

// What was stored is what is read, to the last digit, by the daemon's login.
func TestReportsAreReadAsTheyWereStored(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx, version := t.Context(), int64(7)
	id := began(t, db.store, reconcile.ModeQuick, pgstore.RunSelection{ActivityID: "10001", Version: &version, Checks: []string{"b", "a", "b"}}, 1)
	if _, err := db.store.Report(ctx, id); !errors.Is(err, pgstore.ErrNoReport) {
		t.Errorf("the report of a run under way: %v", err)
	}
	if err := db.store.BeginRun(ctx, pgstore.NewRun{ID: id, Mode: reconcile.ModeQuick}); !errors.Is(err, pgstore.ErrRunExists) {
		t.Errorf("begun twice: %v", err)
	}
	report := reported(id, 2_345) // more than one batch
	for range 2 {                 // the reply to the commit may be lost
		if err := db.store.FinishRun(ctx, report); err != nil {
			t.Fatal(err)
		}
	}
	got, err := db.store.Report(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(asJSON(t, report), asJSON(t, got)); diff != "" {
		t.Errorf("report (-stored +read):\n%s", diff)
	}
	run, err := db.store.Run(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	want := pgstore.StoredRun{
		ID: id, Mode: reconcile.ModeQuick, Selection: pgstore.RunSelection{ActivityID: "10001", Version: &version, Checks: []string{"a", "b"}},
		StartedBy: "ann@host", StartedAt: time.Date(2026, 1, 2, 3, 1, 0, 0, time.UTC), SeenAt: run.SeenAt, FinishedAt: report.FinishedAt,
		State: pgstore.RunFinished, Verdict: reconcile.VerdictDrift, Scopes: 1, Findings: 2_345, Incomplete: 1,
	}
	if diff := cmp.Diff(want, run); diff != "" {
		t.Errorf("run (-want +got):\n%s", diff)
	}
	other := reported(id, 1)
	if err := db.store.FinishRun(ctx, other); !errors.Is(err, pgstore.ErrRunEnded) {
		t.Errorf("another report for the run: %v", err)
	}
	if err := db.store.FailRun(ctx, id, "x"); !errors.Is(err, pgstore.ErrRunEnded) {
		t.Errorf("a finished run that fails: %v", err)
	}
	for name, err := range map[string]error{
		"finish":   db.store.FinishRun(ctx, reported("nobody", 1)),
		"fail":     db.store.FailRun(ctx, "nobody", "x"),
		"progress": db.store.RecordRunProgress(ctx, "nobody", nil),
		"run":      second(db.store.Run(ctx, "nobody")),
		"report":   second(db.store.Report(ctx, "nobody")),
	} {
		if !errors.Is(err, pgstore.ErrNotFound) {
			t.Errorf("%s of a run that was never begun: %v", name, err)
		}
	}
}

func second[T any](_ T, err error) error { return err }

// Redis may hold anything, and a report of it must be storable all the same.
func TestReportOfHostileValues(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	id := began(t, db.store, reconcile.ModeQuick, pgstore.RunSelection{}, 1)
	hostile := "a\x00b\\u0000\xff<script>\"'\u5e93\u5b58\u2028"
	stored := "a\uFFFDb\\u0000\uFFFD<script>\"'\u5e93\u5b58\u2028"
	report := reported(id, 1)
	f := &report.Findings[0]
	f.Subject, f.Message, f.Scope.ActivityID = hostile, hostile, hostile
	f.Evidence.Redis = map[string]any{hostile: []any{hostile}}
	f.Repair.Before = map[string]any{"status": hostile}
	report.Incomplete[0].Reason = hostile
	if err := db.store.FinishRun(t.Context(), report); err != nil {
		t.Fatal(err)
	}
	got, err := db.store.Report(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	read := got.Findings[0]
	values := []string{
		read.Subject, read.Message, read.Scope.ActivityID, fmt.Sprint(read.Evidence.Redis[stored]), fmt.Sprint(read.Repair.Before["status"]),
		got.Incomplete[0].Reason,
	}
	if diff := cmp.Diff([]string{stored, stored, stored, "[" + stored + "]", stored, stored}, values); diff != "" {
		t.Errorf("values (-want +got):\n%s", diff)
	}
}

// A flood of findings is bounded, and the report says so.
func TestStoredFindingsAreBounded(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	id := began(t, db.store, reconcile.ModeDeep, pgstore.RunSelection{}, 1)
	if err := db.store.FinishRun(t.Context(), reported(id, 20_500)); err != nil {
		t.Fatal(err)
	}
	got, err := db.store.Report(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Findings) != 20_000 || got.Omitted[reconcile.CheckLostReservation] != 501 || got.Summary[reconcile.CheckLostReservation] != 20_500 {
		t.Errorf("%d findings, %v omitted of %v", len(got.Findings), got.Omitted, got.Summary)
	}
	if last := got.Findings[len(got.Findings)-1]; last.Check != reconcile.CheckStatusBehind {
		t.Errorf("the check with one finding lost it: the last is %s", last.Check)
	}
}

// What did not finish has no verdict: it is under way, failed or interrupted.
func TestRunStates(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx, super := t.Context(), connect(t, db.url)
	id := began(t, db.store, reconcile.ModeDeep, pgstore.RunSelection{SKUID: "s"}, 1)
	check := func(state pgstore.RunState, progress, failure string) {
		t.Helper()
		run, err := db.store.Run(ctx, id)
		if err != nil || run.State != state || run.Verdict != "" || string(run.Progress) != progress || run.Failure != failure {
			t.Errorf("got %+v (progress %s), %v; want %s", run, run.Progress, err, state)
		}
	}
	resumable := func() string {
		t.Helper()
		run, err := db.store.ResumableRun(ctx, reconcile.ModeDeep, pgstore.RunSelection{SKUID: "s"})
		if err != nil && !errors.Is(err, pgstore.ErrNotFound) {
			t.Fatal(err)
		}
		return run.ID
	}
	silence := func() { exec(t, super, `UPDATE seckill.reconcile_run SET seen_at = seen_at - interval '3 minutes'`) }

	check(pgstore.RunRunning, "", "")
	silence()
	check(pgstore.RunInterrupted, "", "")
	if got := resumable(); got != "" {
		t.Errorf("%s is to be resumed, and recorded nothing", got)
	}
	if err := db.store.RecordRunProgress(ctx, id, map[string]int{"done": 1}); err != nil {
		t.Fatal(err)
	}
	check(pgstore.RunRunning, `{"done": 1}`, "")
	if got := resumable(); got != "" {
		t.Errorf("%s is to be resumed, and is under way", got)
	}
	if err := db.store.FailRun(ctx, id, "no space\x00 left"); err != nil {
		t.Fatal(err)
	}
	check(pgstore.RunFailed, `{"done": 1}`, "no space\uFFFD left")
	if got := resumable(); got != id {
		t.Errorf("the failed run is not to be resumed but %q", got)
	}
	if err := db.store.RecordRunProgress(ctx, id, nil); err != nil {
		t.Fatal(err)
	}
	check(pgstore.RunRunning, `{"done": 1}`, "")
	silence()
	check(pgstore.RunInterrupted, `{"done": 1}`, "")
	if got := resumable(); got != id {
		t.Errorf("the interrupted run is not to be resumed but %q", got)
	}
	if err := db.store.FinishRun(ctx, reported(id, 1)); err != nil {
		t.Fatal(err)
	}
	if run, err := db.store.Run(ctx, id); err != nil || run.State != pgstore.RunFinished || run.Progress != nil {
		t.Errorf("a run that was resumed and has finished: %+v, %v", run, err)
	}
	if got := resumable(); got != "" {
		t.Errorf("%s is to be resumed, and is finished", got)
	}
}

// Runs are compared with the newest finished one of the same mode and
// selection before them, however the checks were ordered.
func TestPreviousRun(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx := t.Context()
	here := pgstore.RunSelection{ActivityID: "a", Checks: []string{"x", "y"}}
	finish := func(id string) string {
		t.Helper()
		if err := db.store.FinishRun(ctx, reported(id, 1)); err != nil {
			t.Fatal(err)
		}
		return id
	}
	oldest := finish(began(t, db.store, reconcile.ModeQuick, here, 1))
	older := finish(began(t, db.store, reconcile.ModeQuick, pgstore.RunSelection{ActivityID: "a", Checks: []string{"y", "x"}}, 2))
	finish(began(t, db.store, reconcile.ModeDeep, here, 3))
	finish(began(t, db.store, reconcile.ModeQuick, pgstore.RunSelection{ActivityID: "a"}, 4))
	began(t, db.store, reconcile.ModeQuick, here, 5) // not finished
	newest := finish(began(t, db.store, reconcile.ModeQuick, here, 6))

	for id, want := range map[string]string{newest: older, older: oldest, oldest: ""} {
		run, err := db.store.Run(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		previous, err := db.store.PreviousRun(ctx, run)
		if previous.ID != want || (want == "") != errors.Is(err, pgstore.ErrNotFound) {
			t.Errorf("before %s: %s, %v; want %s", id, previous.ID, err, want)
		}
	}
	for name, tt := range map[string]struct {
		filter pgstore.RunFilter
		want   int
	}{
		"all":         {pgstore.RunFilter{}, 6},
		"mode":        {pgstore.RunFilter{Mode: reconcile.ModeDeep}, 1},
		"state":       {pgstore.RunFilter{States: []pgstore.RunState{pgstore.RunRunning, pgstore.RunFailed}}, 1},
		"verdict":     {pgstore.RunFilter{Verdicts: []reconcile.Verdict{reconcile.VerdictConsistent}}, 0},
		"selection":   {pgstore.RunFilter{Selection: &pgstore.RunSelection{ActivityID: "a"}}, 1},
		"activity":    {pgstore.RunFilter{ActivityID: "a"}, 6},
		"no activity": {pgstore.RunFilter{ActivityID: "b"}, 0},
		"since":       {pgstore.RunFilter{Since: time.Date(2026, 1, 2, 3, 4, 0, 0, time.UTC)}, 3},
		"limit":       {pgstore.RunFilter{Limit: 2}, 2},
	} {
		runs, err := db.store.Runs(ctx, tt.filter)
		if err != nil || len(runs) != tt.want {
			t.Errorf("%s: %d runs, %v; want %d", name, len(runs), err, tt.want)
		}
		for i := 1; i < len(runs); i++ {
			if runs[i].StartedAt.After(runs[i-1].StartedAt) {
				t.Errorf("%s: the older one comes first", name)
			}
		}
	}
	if !strings.Contains(asJSON(t, here), `"checks"`) {
		t.Error("the selection does not name its checks")
	}
}
