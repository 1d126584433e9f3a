package main

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// reconciled is a scope of 100 units on real services, and the environment in
// which the program finds them.
type reconciled struct {
	t     *testing.T
	scope reservation.Scope
	redis redis.UniversalClient
	db    *pgxpool.Pool // as the superuser
	url   string        // as the daemon's login
	env   []string
}

func newReconciled(t *testing.T, stack *devstack.Stack) *reconciled {
	t.Helper()
	target := stacktest.RedisTarget{Addrs: []string{stack.Redis().Addr()}}
	r := &reconciled{t: t, scope: stacktest.Scope(t), redis: target.Client(t)}
	owner := stacktest.Database(t, stack)
	url := stacktest.LoginURL(t, stack, owner, "seckill_daemon")
	r.url = url
	db, err := pgxpool.New(t.Context(), owner)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	r.db = db
	r.env = append(os.Environ(),
		"RECONCILER_REDIS_ADDRS="+stack.Redis().Addr(), "RECONCILER_POSTGRES_URL="+url, "RECONCILER_RECONCILE_SETTLE=20ms")

	store, err := pgstore.Open(t.Context(), pgstore.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	now := time.Now().Truncate(time.Second)
	v := pgstore.Version{
		ActivityID: r.scope.ActivityID, SKUID: r.scope.SKUID, Version: 1, Total: 100, Buckets: 1,
		StartsAt: now, EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(24 * time.Hour),
	}
	if err := store.RegisterVersion(t.Context(), v, []pgstore.Bucket{{Initial: 100, Confirmed: true}}, "test"); err != nil {
		t.Fatal(err)
	}
	runner, err := lua.NewRunner(r.redis)
	if err != nil {
		t.Fatal(err)
	}
	batch := runner.Batch()
	provisioned := batch.Provision(r.scope, lua.ProvisionArgs{
		State: lua.StateActive, StartsAtMS: v.StartsAt.UnixMilli(), EndsAtMS: v.EndsAt.UnixMilli(),
		RetentionUntilMS: v.RetentionUntil.UnixMilli(), SchemaVersion: 1, Initial: 100,
	})
	if err := batch.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if reply, err := provisioned.Get(); err != nil || reply.Code != lua.ProvisionCreated {
		t.Fatalf("provision: %+v, %v", reply, err)
	}
	return r
}

// exec runs a reconciliation.
func (r *reconciled) exec(args ...string) (status int, stdout, stderr string) {
	r.t.Helper()
	return r.program(append([]string{"reconcile"}, args...)...)
}

// program runs the program as a process of its own.
func (r *reconciled) program(args ...string) (status int, stdout, stderr string) {
	r.t.Helper()
	cmd := exec.CommandContext(r.t.Context(), "reconciler", args...)
	cmd.Env, cmd.Dir = r.env, r.t.TempDir()
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	exit, failed := errors.AsType[*exec.ExitError](err)
	if err != nil && !failed {
		r.t.Fatal(err)
	}
	if failed {
		status = exit.ExitCode()
	}
	return status, out.String(), errs.String()
}

// want runs the program both ways, and compares exit status, verdict and table.
func (r *reconciled) want(status int, inTable ...string) reconcile.Report {
	r.t.Helper()
	got, table, stderr := r.exec()
	if got != status {
		r.t.Errorf("status %d, want %d\n%s%s", got, status, table, stderr)
	}
	if stderr != "" {
		r.t.Errorf("standard error: %s", stderr)
	}
	for _, text := range inTable {
		if !strings.Contains(table, text) {
			r.t.Errorf("the table does not say %q:\n%s", text, table)
		}
	}
	got, stdout, stderr := r.exec("--output", "json")
	if got != status || stderr != "" {
		r.t.Errorf("as JSON: status %d, want %d\n%s", got, status, stderr)
	}
	var report reconcile.Report
	wantJSON(r.t, stdout, &report)
	verdicts := map[reconcile.Verdict]int{
		reconcile.VerdictConsistent: exitDone, reconcile.VerdictDrift: exitDrift, reconcile.VerdictIncomplete: exitIncomplete,
	}
	if verdicts[report.Verdict] != status {
		r.t.Errorf("verdict %s with status %d", report.Verdict, status)
	}
	return report
}

func TestReconcileExitStatus(t *testing.T) {
	t.Parallel()
	r := newReconciled(t, stacktest.Shared(t))
	r.want(exitDone, r.scope.Tag(), "consistent: 1 scope, 0 findings, 0 incomplete")

	if err := r.redis.HIncrBy(t.Context(), r.scope.StockKey(), "available", 1).Err(); err != nil {
		t.Fatal(err)
	}
	report := r.want(exitDrift, "invariant_broken", "initial 100 is not available 101 + reserved 0", "drift: 1 scope, 1 finding, 0 incomplete")
	if report.Summary[reconcile.CheckInvariantBroken] != 1 {
		t.Errorf("summary %v", report.Summary)
	}
	if status, stdout, _ := r.exec("--checks", "count_drift,allocation_mismatch"); status != exitDone {
		t.Errorf("checks that find nothing: status %d\n%s", status, stdout)
	}
	if status, stdout, _ := r.exec("--activity", r.scope.ActivityID, "--sku", "sku", "--version", "1", "--bucket", "0"); status != exitDrift {
		t.Errorf("a filter that selects the scope: status %d\n%s", status, stdout)
	}

	if err := r.redis.Del(t.Context(), r.scope.StockKey()).Err(); err != nil {
		t.Fatal(err)
	}
	r.want(exitIncomplete, "config_missing", "stock missing", "incomplete: 1 scope, 1 finding, 1 incomplete")
}

func TestReconcileMistakes(t *testing.T) {
	t.Parallel()
	r := newReconciled(t, stacktest.Shared(t))
	for name, tt := range map[string]struct {
		args []string
		says string
	}{
		"unknown check":    {[]string{"--checks", "nonsense"}, `unknown check "nonsense": there are config_missing, invariant_broken`},
		"no such scope":    {[]string{"--activity", "nobody"}, "no registered scope within its retention matches the filter"},
		"unknown flag":     {[]string{"--repair-all"}, "unknown flag"},
		"yes to nothing":   {[]string{"--yes"}, "--yes and --max-repairs are for --repair"},
		"wait for no lock": {[]string{"--wait", "1s"}, "--wait is for --deep and --repair"},
		"negative rate":    {[]string{"--rate", "-1"}, "--rate -1 is negative"},
		"no such format":   {[]string{"--output", "xml"}, "want table, json, jsonl, csv, markdown, html"},
	} {
		t.Run(name, func(t *testing.T) {
			status, stdout, stderr := r.exec(tt.args...)
			if status != exitFailed || stdout != "" || !strings.Contains(stderr, tt.says) {
				t.Errorf("status %d, output %q, error %q", status, stdout, stderr)
			}
		})
	}
}

// The list needs no service and no settings.
func TestReconcileListChecks(t *testing.T) {
	t.Setenv("RECONCILER_POSTGRES_URL", "postgres://127.0.0.1:1/none")
	status, stdout, stderr := run(t, "reconcile", "--list-checks")
	if status != exitDone || stderr != "" {
		t.Fatalf("status %d: %s", status, stderr)
	}
	for _, c := range reconcile.Kinds() {
		if !strings.Contains(stdout, c.ID) || !strings.Contains(stdout, c.Compares) || !strings.Contains(stdout, c.Advice) {
			t.Errorf("%s is not in the list:\n%s", c.ID, stdout)
		}
	}
	_, stdout, _ = run(t, "reconcile", "--list-checks", "--output", "json")
	var list struct {
		Schema int
		Checks []reconcile.Check
	}
	wantJSON(t, stdout, &list)
	if list.Schema != 1 || len(list.Checks) != len(reconcile.Kinds()) || list.Checks[0].Cost == "" {
		t.Errorf("got %s", stdout)
	}
	// What workers raise is listed, and no check of a run.
	status, _, stderr = run(t, "reconcile", "--checks", "send_blocked")
	if status != exitFailed || !strings.Contains(stderr, "workers raise it") || !strings.Contains(stderr, "task list --kind send_blocked") {
		t.Errorf("status %d: %s", status, stderr)
	}
}

func TestReconcileWithoutItsServices(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true})
	r := newReconciled(t, stack)
	r.want(exitDone)
	for _, service := range []*devstack.Service{stack.Postgres(), stack.Redis()} {
		if err := service.Kill(); err != nil {
			t.Fatal(err)
		}
		report := r.want(exitIncomplete, service.Name(), "incomplete: 0 scopes, 0 findings, 1 incomplete")
		if len(report.Incomplete) != 1 || report.Incomplete[0].Source != service.Name() || report.Incomplete[0].Scope != nil {
			t.Errorf("without %s: %+v", service.Name(), report.Incomplete)
		}
		if service == stack.Redis() { // that nothing could be compared is stored too
			status, stdout, stderr := r.program("report", "show", "latest", "--output", "json")
			var stored reconcile.Report
			wantJSON(t, stdout, &stored)
			if status != exitDone || stored.RunID != report.RunID || stored.Verdict != reconcile.VerdictIncomplete {
				t.Errorf("status %d, stored is %+v\n%s", status, stored, stderr)
			}
		}
		if err := service.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// Redis came back without its data: that is one finding, not a flood.
	r.want(exitIncomplete, "config_missing", "meta, stock missing", "incomplete: 1 scope, 1 finding, 1 incomplete")
}

// order gives a user a reservation and an order, of which Redis does not know.
func (r *reconciled) order(user string) (id string) {
	r.t.Helper()
	id = reservation.NewID([]byte("secret"), r.scope.ActivityID, r.scope.SKUID, user, user)
	runner, err := lua.NewRunner(r.redis)
	if err != nil {
		r.t.Fatal(err)
	}
	batch := runner.Batch()
	reserved := batch.Reserve(r.scope, lua.ReserveArgs{
		RequestID: user, ReservationID: id, UserID: user, TTLMS: 900_000, SchemaVersion: 1, MessageID: reservation.MessageID(id),
	})
	if err := batch.Run(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	if reply, err := reserved.Get(); err != nil || reply.Code != lua.ReserveAccepted {
		r.t.Fatalf("reserve: %+v, %v", reply, err)
	}
	if _, err := r.db.Exec(r.t.Context(), `
		INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		VALUES ('o-' || $1, $1, $2, $3, $4, 1, 0, $2)`, id, user, r.scope.ActivityID, r.scope.SKUID); err != nil {
		r.t.Fatal(err)
	}
	return id
}

// Repairs are planned off a terminal, made with --yes in mode act, and never in
// mode observe. Standard output stays one document.
func TestReconcileRepair(t *testing.T) {
	t.Parallel()
	r := newReconciled(t, stacktest.Shared(t))
	id := r.order("u1")
	r.order("u2")
	if status, stdout, stderr := r.exec(); status != exitDone {
		t.Errorf("a quick run: status %d\n%s%s", status, stdout, stderr)
	}
	step := func(status int, says string, state reconcile.RepairState, args ...string) reconcile.Report {
		t.Helper()
		got, stdout, stderr := r.exec(append([]string{"--deep", "--output", "json"}, args...)...)
		var report reconcile.Report
		wantJSON(t, stdout, &report)
		report.Findings = slices.DeleteFunc(report.Findings, func(f reconcile.Finding) bool { return f.Check == reconcile.CheckEnvironment })
		if got != status || !strings.Contains(stderr, says) || (says == "") != (stderr == "") || len(report.Findings) == 0 ||
			report.Findings[0].Repair.State != state || report.Mode != reconcile.ModeDeep {
			t.Fatalf("%v: status %d, want %d; %q, want %q\n%s", args, got, status, stderr, says, stdout)
		}
		return report
	}
	step(exitDrift, "", reconcile.RepairStateNone)
	step(exitDrift, "2 repairs planned, none made: mode is observe", reconcile.RepairStatePlanned, "--repair", "--yes")
	r.env = append(r.env, "RECONCILER_MODE=act")
	step(exitDrift, "2 repairs planned, none made: add --yes", reconcile.RepairStatePlanned, "--repair")
	if status := r.redis.HGet(t.Context(), r.scope.ReservationKey(id), "status").Val(); status != string(reservation.StatusReserved) {
		t.Fatalf("a plan changed something: %s", status)
	}
	report := step(exitDrift, "", reconcile.RepairStateDone, "--repair", "--yes", "--max-repairs", "1")
	if report.Summary[reconcile.CheckStatusBehind] != 1 {
		t.Errorf("summary %v, want one left", report.Summary)
	}
	step(exitDone, "", reconcile.RepairStateDone, "--repair", "--yes")
	r.order("u3")
	if status, stdout, _ := r.exec("--deep", "--repair", "--yes", "--checks", reconcile.CheckStatusBehind); status != exitDone || !strings.Contains(stdout, "consistent: 1 scope, 0 findings, 1 repaired, 0 incomplete") {
		t.Errorf("as a table: status %d\n%s", status, stdout)
	}
	if status, stdout, _ := r.exec("--deep", "--checks", reconcile.CheckStatusBehind); status != exitDone || !strings.Contains(stdout, "0 findings") {
		t.Errorf("afterwards: status %d\n%s", status, stdout)
	}
}

// Runs of one mode and activity come one after the other; others do not wait.
func TestReconcileLocks(t *testing.T) {
	t.Parallel()
	r := newReconciled(t, stacktest.Shared(t))
	locks, err := pgstore.LockRuns(t.Context(), pgstore.RunLockOptions{
		URL: r.url, Names: []string{"deep:" + r.scope.ActivityID}, Holder: "the test",
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"--deep"}, {"--deep", "--wait", "50ms"}} {
		status, stdout, stderr := r.exec(args...)
		if status != exitLocked || stdout != "" || !strings.Contains(stderr, "deep:"+r.scope.ActivityID) || !strings.Contains(stderr, "the test") {
			t.Errorf("%v: status %d, %q, %q", args, status, stdout, stderr)
		}
	}
	for _, args := range [][]string{{}, {"--repair"}} {
		if status, stdout, stderr := r.exec(args...); status != exitDone {
			t.Errorf("%v: status %d\n%s%s", args, status, stdout, stderr)
		}
	}
	time.AfterFunc(200*time.Millisecond, func() {
		if err := locks.Release(); err != nil {
			t.Error(err)
		}
	})
	if status, stdout, stderr := r.exec("--deep", "--wait", "1m"); status != exitDone {
		t.Errorf("after a wait: status %d\n%s%s", status, stdout, stderr)
	}
}
