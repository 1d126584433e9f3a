package main

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

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
	env   []string
}

func newReconciled(t *testing.T, stack *devstack.Stack) *reconciled {
	t.Helper()
	target := stacktest.RedisTarget{Addrs: []string{stack.Redis().Addr()}}
	r := &reconciled{t: t, scope: stacktest.Scope(t), redis: target.Client(t)}
	url := stacktest.LoginURL(t, stack, stacktest.Database(t, stack), "seckill_daemon")
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
		StartsAt: now, EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(2 * time.Hour),
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

// exec runs the program as a process of its own.
func (r *reconciled) exec(args ...string) (status int, stdout, stderr string) {
	r.t.Helper()
	cmd := exec.CommandContext(r.t.Context(), "reconciler", append([]string{"reconcile"}, args...)...)
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
		"unknown check":  {[]string{"--checks", "nonsense"}, `unknown check "nonsense": there are config_missing, invariant_broken`},
		"no such scope":  {[]string{"--activity", "nobody"}, "no registered scope within its retention matches the filter"},
		"unknown flag":   {[]string{"--repair-all"}, "unknown flag"},
		"no such format": {[]string{"--output", "xml"}, "want table, json"},
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
	for _, c := range reconcile.Checks() {
		if !strings.Contains(stdout, c.ID) || !strings.Contains(stdout, c.Compares) {
			t.Errorf("%s is not in the list:\n%s", c.ID, stdout)
		}
	}
	_, stdout, _ = run(t, "reconcile", "--list-checks", "--output", "json")
	var list struct {
		Schema int
		Checks []reconcile.Check
	}
	wantJSON(t, stdout, &list)
	if list.Schema != 1 || len(list.Checks) != len(reconcile.Checks()) || list.Checks[0].Cost == "" {
		t.Errorf("got %s", stdout)
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
		if err := service.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// Redis came back without its data: that is one finding, not a flood.
	r.want(exitIncomplete, "config_missing", "meta, stock missing", "incomplete: 1 scope, 1 finding, 1 incomplete")
}
