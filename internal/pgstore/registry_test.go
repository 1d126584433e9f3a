package pgstore_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

// audited lists the actions in the audit trail, oldest first, as
// actor/action/scope/subject/reason.
func audited(t *testing.T, db database) []string {
	t.Helper()
	rows, err := connect(t, db.url).Query(t.Context(), `SELECT concat_ws('/', actor, action, scope, subject, reason) FROM seckill.audit_log ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	actions, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return actions
}

func TestScopes(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx, now := t.Context(), time.Now().UTC().Truncate(time.Millisecond)
	version := pgstore.Version{
		ActivityID: db.scope.ActivityID, SKUID: db.scope.SKUID, Version: db.scope.Version, Total: 11, Buckets: 2,
		StartsAt: now, EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(8 * 24 * time.Hour),
	}
	buckets := []pgstore.Bucket{{ID: 0, Initial: 6}, {ID: 1, Initial: 5, Confirmed: true}}
	for range 2 { // repeating it is no error
		if err := db.store.RegisterVersion(ctx, version, buckets, "ann"); err != nil {
			t.Fatal(err)
		}
	}
	first := db.scope
	first.Bucket = 0
	second := first
	second.Bucket = 1
	want := pgstore.RegisteredScope{
		Scope: first, Initial: 6, State: pgstore.ScopePrepared, StartsAt: version.StartsAt, EndsAt: version.EndsAt,
		RetentionUntil: version.RetentionUntil, Total: 11, Buckets: 2,
	}
	got, err := db.store.Scope(ctx, first)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(want, "CreatedAt", "UpdatedAt")); diff != "" {
		t.Errorf("scope (-want +got):\n%s", diff)
	}
	if got, err = db.store.Scope(ctx, second); err != nil || got.ConfirmedAt.IsZero() {
		t.Errorf("the confirmed bucket: %+v, %v", got, err)
	}

	// A version is never changed in place.
	for name, change := range map[string]func(v *pgstore.Version, b []pgstore.Bucket){
		"total":     func(v *pgstore.Version, _ []pgstore.Bucket) { v.Total++ },
		"buckets":   func(v *pgstore.Version, _ []pgstore.Bucket) { v.Buckets++ },
		"retention": func(v *pgstore.Version, _ []pgstore.Bucket) { v.RetentionUntil = v.RetentionUntil.Add(time.Second) },
		"initial":   func(_ *pgstore.Version, b []pgstore.Bucket) { b[1].Initial++ },
	} {
		v, b := version, append([]pgstore.Bucket{}, buckets...)
		change(&v, b)
		if err := db.store.RegisterVersion(ctx, v, b, "ann"); !errors.As(err, new(*pgstore.VersionDiffersError)) {
			t.Errorf("another %s: %v", name, err)
		}
	}

	unknown := reservation.Scope{ActivityID: "none", SKUID: "s"}
	if err := db.store.ConfirmScopes(ctx, []reservation.Scope{first, unknown}); !errors.Is(err, pgstore.ErrNotFound) || !strings.Contains(err.Error(), unknown.Tag()) {
		t.Errorf("confirm an unknown one: %v", err)
	}
	if got, _ = db.store.Scope(ctx, first); !got.ConfirmedAt.IsZero() {
		t.Error("confirmed beside one that is not registered")
	}
	if err := db.store.ConfirmScopes(ctx, []reservation.Scope{first, second}); err != nil {
		t.Fatal(err)
	}
	if err := db.store.SetScopeState(ctx, []reservation.Scope{first, second}, pgstore.ScopeActive, "ann", "the sale begins"); err != nil {
		t.Fatal(err)
	}
	if err := db.store.HoldScopes(ctx, []reservation.Scope{second}, "bob", "looks odd"); err != nil {
		t.Fatal(err)
	}
	if got, err = db.store.Scope(ctx, second); err != nil || got.Hold == nil || got.Hold.By != "bob" || got.Hold.Reason != "looks odd" || got.Hold.At.IsZero() ||
		got.State != pgstore.ScopeActive || got.ConfirmedAt.IsZero() {
		t.Errorf("held: %+v, %v", got, err)
	}
	workable := func(want ...reservation.Scope) {
		t.Helper()
		registered, err := db.store.Scopes(ctx, pgstore.ScopeFilter{Live: true, NotHeld: true})
		if err != nil {
			t.Fatal(err)
		}
		var scopes []reservation.Scope
		for _, r := range registered {
			scopes = append(scopes, r.Scope)
		}
		if diff := cmp.Diff(want, scopes, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("workable (-want +got):\n%s", diff)
		}
	}
	workable(first)
	if err := db.store.UnholdScopes(ctx, []reservation.Scope{second}, "bob", "it was fine"); err != nil {
		t.Fatal(err)
	}
	workable(first, second)
	if err := db.store.SetScopeState(ctx, []reservation.Scope{second}, pgstore.ScopeClosed, "ann", "over"); err != nil {
		t.Fatal(err)
	}
	workable(first, second) // CLOSED versions are processed until their retention
	exec(t, connect(t, db.url), `UPDATE seckill.scope SET starts_at = now() - interval '3 d', ends_at = now() - interval '2 d',
		retention_until = now() - interval '1 d' WHERE bucket_id = 0`)
	workable(second)

	for name, tt := range map[string]struct {
		filter pgstore.ScopeFilter
		want   int
	}{
		"all":      {pgstore.ScopeFilter{}, 2},
		"activity": {pgstore.ScopeFilter{ActivityID: first.ActivityID}, 2},
		"another":  {pgstore.ScopeFilter{ActivityID: first.ActivityID, SKUID: "none"}, 0},
		"bucket":   {pgstore.ScopeFilter{Version: &first.Version, Bucket: &first.Bucket}, 1},
		"state":    {pgstore.ScopeFilter{States: []pgstore.ScopeState{pgstore.ScopeClosed, pgstore.ScopePaused}}, 1},
		"live":     {pgstore.ScopeFilter{Live: true}, 1},
	} {
		if found, err := db.store.Scopes(ctx, tt.filter); err != nil || len(found) != tt.want {
			t.Errorf("filter by %s: %d scopes, %v; want %d", name, len(found), err, tt.want)
		}
	}
	tag, tag2 := first.Tag(), second.Tag()
	wantAudit := []string{
		"ann/version_registered//" + strings.TrimSuffix(tag, ":b:0") + "/",
		"ann/scope_state/" + tag + "//the sale begins", "ann/scope_state/" + tag2 + "//the sale begins",
		"bob/scope_hold/" + tag2 + "//looks odd", "bob/scope_unhold/" + tag2 + "//it was fine", "ann/scope_state/" + tag2 + "//over",
	}
	if diff := cmp.Diff(wantAudit, audited(t, db)); diff != "" {
		t.Errorf("audit trail (-want +got):\n%s", diff)
	}
}

func TestTasksAreOnePerCause(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx := t.Context()
	report := func(reports ...reservation.TaskReport) {
		t.Helper()
		if err := db.store.ReportTasks(ctx, reports); err != nil {
			t.Fatal(err)
		}
	}
	tag := db.scope.Tag()
	report(
		reservation.TaskReport{Kind: "evidence_stuck", Scope: tag, Cause: "no_route", Count: 3, Sample: []string{"r1", "r2", "r3"}},
		reservation.TaskReport{Kind: "evidence_stuck", Scope: tag, Cause: "no_route", Count: 2, Sample: []string{"r3", "r4"}},
		reservation.TaskReport{Kind: "evidence_stuck", Scope: tag, Cause: "broker_missing", Count: 1, Sample: []string{"r9"}},
		reservation.TaskReport{Kind: "send_blocked", Cause: "busy", Count: 7},
	)
	report(reservation.TaskReport{Kind: "evidence_stuck", Scope: tag, Cause: "no_route", Count: 1, Sample: []string{"r5"}})

	stuck, err := db.store.Tasks(ctx, pgstore.TaskFilter{Kinds: []string{"evidence_stuck"}, Scope: &tag})
	if err != nil || len(stuck) != 2 {
		t.Fatalf("tasks: %+v, %v", stuck, err)
	}
	want := pgstore.Task{
		Kind: "evidence_stuck", Scope: tag, Cause: "no_route", Count: 5, Occurrences: 2, Sample: []string{"r5", "r1", "r2", "r3", "r4"}, State: pgstore.TaskOpen,
	}
	ignore := cmpopts.IgnoreFields(want, "ID", "FirstSeenAt", "LastSeenAt")
	if diff := cmp.Diff(want, stuck[0], ignore); diff != "" {
		t.Errorf("task (-want +got):\n%s", diff)
	}
	if !stuck[0].LastSeenAt.After(stuck[0].FirstSeenAt) {
		t.Errorf("seen first %v, last %v", stuck[0].FirstSeenAt, stuck[0].LastSeenAt)
	}

	// A new subject in each pass: the sample stays bounded, the count keeps up with it.
	for i := range 30 {
		report(reservation.TaskReport{Kind: "orphan_member", Scope: tag, Cause: "hash_missing", Count: 1, Sample: []string{fmt.Sprint("m", i)}})
	}
	orphans, err := db.store.Tasks(ctx, pgstore.TaskFilter{Kinds: []string{"orphan_member"}})
	if err != nil || len(orphans) != 1 || orphans[0].Count != 20 || len(orphans[0].Sample) != 20 || orphans[0].Sample[0] != "m29" || orphans[0].Occurrences != 30 {
		t.Errorf("orphans: %+v, %v", orphans, err)
	}

	open, err := db.store.OpenTasks(ctx)
	if diff := cmp.Diff(map[string]int64{"evidence_stuck": 2, "send_blocked": 1, "orphan_member": 1}, open); diff != "" || err != nil {
		t.Errorf("open tasks: %v (-want +got):\n%s", err, diff)
	}

	if err := db.store.ResolveTask(ctx, stuck[0].ID, "ann", "the route is back"); err != nil {
		t.Fatal(err)
	}
	err = db.store.ResolveTask(ctx, stuck[0].ID, "bob", "me too")
	if decided, ok := errors.AsType[*pgstore.TaskDecidedError](err); !ok || decided.By != "ann" {
		t.Errorf("resolved twice: %v", err)
	}
	if err := db.store.ResolveTask(ctx, 1<<40, "bob", "none"); !errors.Is(err, pgstore.ErrNotFound) {
		t.Errorf("resolve none: %v", err)
	}
	task, err := db.store.Task(ctx, stuck[0].ID)
	if err != nil || task.State != pgstore.TaskResolved || task.DecidedBy != "ann" || task.Decision != "the route is back" || task.DecidedAt.IsZero() {
		t.Errorf("resolved: %+v, %v", task, err)
	}
	if _, err := db.store.Task(ctx, 1<<40); !errors.Is(err, pgstore.ErrNotFound) {
		t.Errorf("read none: %v", err)
	}
	report(reservation.TaskReport{Kind: "evidence_stuck", Scope: tag, Cause: "no_route", Count: 1})
	again, err := db.store.Tasks(ctx, pgstore.TaskFilter{Kinds: []string{"evidence_stuck"}, States: pgstore.Unresolved, Limit: 1})
	if err != nil || len(again) != 1 || again[0].ID == stuck[0].ID || again[0].Cause != "no_route" {
		t.Errorf("seen again: %+v, %v; want another task", again, err)
	}
	if diff := cmp.Diff([]string{fmt.Sprintf("ann/task_resolved/%s/%d/the route is back", tag, stuck[0].ID)}, audited(t, db)); diff != "" {
		t.Errorf("audit trail (-want +got):\n%s", diff)
	}
}

// Workers report the same tasks at once, in different orders.
func TestTasksReportedAtOnce(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	var group sync.WaitGroup
	for worker := range 6 {
		group.Go(func() {
			for range 10 {
				var reports []reservation.TaskReport
				for i := range 8 {
					kind := fmt.Sprint("kind", (i*(2*worker+1))%8)
					reports = append(reports, reservation.TaskReport{Kind: kind, Cause: "c", Count: 1, Sample: []string{strconv.Itoa(worker)}})
				}
				if err := db.store.ReportTasks(t.Context(), reports); err != nil {
					t.Errorf("worker %d: %v", worker, err)
				}
			}
		})
	}
	group.Wait()
	tasks, err := db.store.Tasks(t.Context(), pgstore.TaskFilter{})
	if err != nil || len(tasks) != 8 {
		t.Fatalf("%d tasks, %v; want 8", len(tasks), err)
	}
	for _, task := range tasks {
		if task.Occurrences != 60 || task.Count != 6 {
			t.Errorf("%s: %d occurrences, count %d; want 60 and 6", task.Kind, task.Occurrences, task.Count)
		}
	}
}

func TestExpectedQueues(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx := t.Context()
	for _, seen := range [][]pgstore.ExpectedQueue{
		{{Broker: "b0", Topic: "t", Queues: 8}, {Broker: "b1", Topic: "t", Queues: 4}},
		{{Broker: "b0", Topic: "t", Queues: 4}, {Broker: "b0", Topic: "t", Queues: 2}}, // shrunk: what is missing may hold messages
		{{Broker: "b0", Topic: "u", Queues: 16}},
		nil,
	} {
		if err := db.store.RecordQueues(ctx, seen); err != nil {
			t.Fatal(err)
		}
	}
	list := func() []pgstore.ExpectedQueue {
		t.Helper()
		queues, err := db.store.ExpectedQueues(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return queues
	}
	want := []pgstore.ExpectedQueue{{Broker: "b0", Topic: "t", Queues: 8}, {Broker: "b0", Topic: "u", Queues: 16}, {Broker: "b1", Topic: "t", Queues: 4}}
	if diff := cmp.Diff(want, list()); diff != "" {
		t.Errorf("queues (-want +got):\n%s", diff)
	}
	if err := db.store.ForgetBroker(ctx, "b0", "daemon", "its own idea"); state(err) != "42501" {
		t.Errorf("the daemon forgets a broker by itself: %v", err)
	}
	operator := db.open(t, "seckill_operator")
	if err := operator.ForgetBroker(ctx, "b0", "ann", "disk is gone"); err != nil {
		t.Fatal(err)
	}
	if err := operator.ForgetBroker(ctx, "b0", "ann", "again"); !errors.Is(err, pgstore.ErrNotFound) {
		t.Errorf("forget an unknown broker: %v", err)
	}
	if diff := cmp.Diff(want[2:], list()); diff != "" {
		t.Errorf("queues left (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"ann/broker_forgotten//b0/disk is gone"}, audited(t, db)); diff != "" {
		t.Errorf("audit trail (-want +got):\n%s", diff)
	}
}

func TestJobs(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx, now := t.Context(), time.Now().UTC().Truncate(time.Microsecond)
	steps := []error{
		db.store.RecordJob(ctx, pgstore.JobRun{Name: "fencer", StartedAt: now, FinishedAt: now.Add(time.Second), Result: map[string]int{"done": 3}}),
		db.store.RecordJob(ctx, pgstore.JobRun{Name: "fencer", StartedAt: now.Add(time.Minute), FinishedAt: now.Add(2 * time.Minute), Error: "redis is away"}),
		db.store.PauseJob(ctx, "fencer", "ann", "maintenance"),
		db.store.PauseJob(ctx, "scanner", "ann", "maintenance"),
		db.store.ResumeJob(ctx, "scanner", "ann", "done"),
		db.store.RequestRun(ctx, "purge", "bob"),
		db.store.RequestRun(ctx, "purge", "bob"),
	}
	if err := errors.Join(steps...); err != nil {
		t.Fatal(err)
	}
	got, err := db.store.Jobs(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want := []pgstore.Job{
		{
			Name: "fencer", Paused: true, PausedBy: "ann", LastStartedAt: now.Add(time.Minute), LastFinishedAt: now.Add(2 * time.Minute),
			LastSuccessAt: now.Add(time.Second), LastResult: []byte("null"), LastError: "redis is away",
		},
		{Name: "purge", RunRequestedBy: "bob"},
		{Name: "scanner"},
	}
	if got[1].RunRequestedAt.IsZero() {
		t.Error("the request has no time")
	}
	got[1].RunRequestedAt = time.Time{}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("jobs (-want +got):\n%s", diff)
	}
	var group sync.WaitGroup
	var mu sync.Mutex
	var taken []string
	for range 5 {
		group.Go(func() {
			names, err := db.store.TakeRunRequests(ctx)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			taken = append(taken, names...)
		})
	}
	group.Wait()
	if diff := cmp.Diff([]string{"purge"}, taken); diff != "" {
		t.Errorf("taken by five at once (-want +got):\n%s", diff)
	}
}

func TestAudit(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	entry := pgstore.AuditEntry{Actor: "ann", Action: "looked", Scope: db.scope.Tag(), Subject: "r1", Reason: "curious", Detail: map[string]any{"rows": 2}}
	if err := db.store.Audit(t.Context(), entry); err != nil {
		t.Fatal(err)
	}
	var got string
	if err := connect(t, db.url).QueryRow(t.Context(), `SELECT concat_ws(' ', actor, login, action, scope, subject, reason, detail->>'rows') FROM seckill.audit_log`).Scan(&got); err != nil {
		t.Fatal(err)
	}
	if want := "ann test_seckill_daemon looked " + db.scope.Tag() + " r1 curious 2"; got != want {
		t.Errorf("entry %q, want %q", got, want)
	}
}
