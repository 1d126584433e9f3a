package retention_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/retention"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// filled is a database with one old claim, transfer, task, report, job and sample that
// may go, and a directory with one old file.
func filled(t *testing.T) (store *pgstore.Store, super *pgx.Conn, policy retention.Policy) {
	t.Helper()
	stack := stacktest.Shared(t)
	url := stacktest.Database(t, stack)
	super, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = super.Close(t.Context()) })
	if _, err := super.Exec(t.Context(), `
		INSERT INTO seckill.scope_allocation (activity_id, sku_id, activity_version, total, buckets, created_by) VALUES ('a', 's', 1, 10, 2, 'test');
		INSERT INTO seckill.scope (activity_id, sku_id, activity_version, bucket_id, initial, state, starts_at, ends_at, retention_until)
		SELECT 'a', 's', 1, b, 5, 'CLOSED', now() - interval '1 year', now() - interval '200 days', now() - interval '190 days' FROM generate_series(0, 1) AS b;
		INSERT INTO seckill.reservation_claim (reservation_id, outcome, activity_id, sku_id, activity_version, bucket_id, claimed_at)
		VALUES ('r', 'FENCED', 'a', 's', 1, 0, now() - interval '199 days');
		INSERT INTO seckill.bucket_transfer (transfer_id, activity_id, sku_id, activity_version, donor_bucket, receiver_bucket, amount, state, created_by)
		VALUES ('t', 'a', 's', 1, 0, 1, 1, 'DONE', 'test');
		INSERT INTO seckill.manual_task (kind, cause, count, state, decided_at) VALUES ('k', 'c', 1, 'resolved', now() - interval '199 days');
		INSERT INTO seckill.reconcile_run (run_id, mode, started_at, started_by, failure, seen_at)
		VALUES ('old', 'quick', now() - interval '199 days', 'x', 'broken', now() - interval '199 days');
		INSERT INTO seckill.version_sample (at, activity_id, sku_id, activity_version, buckets_read, available, reserved, released_total, send_pending, undecided)
		VALUES (now() - interval '199 days', 'a', 's', 1, 2, 0, 10, 0, 0, 0);
		INSERT INTO seckill.job (name, last_finished_at) VALUES ('gone', now() - interval '199 days')`); err != nil {
		t.Fatal(err)
	}
	if store, err = pgstore.Open(t.Context(), pgstore.Config{URL: stacktest.LoginURL(t, stack, url, "seckill_daemon")}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	settings := config.Default()
	settings.Mode, settings.Reconcile.ReportDir = config.ModeAct, t.TempDir()
	for _, name := range []string{"reconcile-20200101T000000Z-abcdefgh.json", "notes.txt"} {
		if err := os.WriteFile(filepath.Join(settings.Reconcile.ReportDir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return store, super, retention.PolicyOf(settings)
}

// counts is kind=count, or kind: why not.
func counts(amounts []retention.Amount) []string {
	var all []string
	for _, a := range amounts {
		text := string(a.Kind) + "=" + string(rune('0'+a.Count))
		if a.Skipped != "" {
			text += ": " + a.Skipped
		}
		all = append(all, text)
	}
	return all
}

func TestPlanAndApply(t *testing.T) {
	t.Parallel()
	store, super, policy := filled(t)
	ctx := t.Context()
	everything := []string{"claims=1", "transfers=1", "tasks=1", "reports=1", "jobs=1", "samples=1", "report_files=1"}
	for range 2 { // a plan changes nothing
		plan, err := retention.Plan(ctx, store, policy)
		if diff := cmp.Diff(everything, counts(plan)); err != nil || diff != "" {
			t.Errorf("plan (-want +got): %v\n%s", err, diff)
		}
		if plan[0].Oldest.IsZero() || plan[6].Newest != time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC) {
			t.Errorf("times in the plan: %+v", plan)
		}
	}

	// Observing deletes no claim and no journal; 0 keeps for ever.
	observed := policy
	observed.Act, observed.Jobs = false, 0
	done, err := retention.Apply(ctx, store, observed, retention.By{Actor: "ann", Reason: "test"})
	want := []string{"claims=0: mode is observe", "transfers=0: mode is observe", "tasks=1", "reports=1", "jobs=0: kept for ever", "samples=1", "report_files=1"}
	if diff := cmp.Diff(want, counts(done)); err != nil || diff != "" {
		t.Errorf("in observe (-want +got): %v\n%s", err, diff)
	}
	if done, err = retention.Apply(ctx, store, policy, retention.By{Actor: "ann"}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"claims=1", "transfers=1", "tasks=0", "reports=0", "jobs=1", "samples=0", "report_files=0"}, counts(done)); diff != "" {
		t.Errorf("in act (-want +got):\n%s", diff)
	}
	var trail []string
	found, err := super.Query(ctx, `SELECT concat_ws(' ', actor, action, reason, detail -> 'deleted' ->> 'claims', detail ->> 'complete') FROM seckill.audit_log ORDER BY id`)
	if err == nil {
		trail, err = pgx.CollectRows(found, pgx.RowTo[string])
	}
	if diff := cmp.Diff([]string{"ann purge_started test", "ann purge_ended test true", "ann purge_started ", "ann purge_ended  1 true"}, trail); err != nil || diff != "" {
		t.Errorf("audit trail (-want +got): %v\n%s", err, diff)
	}
	if _, err := os.Stat(filepath.Join(policy.ReportDir, "notes.txt")); err != nil {
		t.Errorf("a file that is no report: %v", err)
	}
}

// One kind that cannot be deleted keeps no other from going, and the audit
// trail says that it is not all.
func TestOneKindFails(t *testing.T) {
	t.Parallel()
	store, super, policy := filled(t)
	ctx := t.Context()
	if _, err := super.Exec(ctx, `REVOKE DELETE ON seckill.bucket_transfer FROM seckill_daemon; DROP VIEW seckill.order_evidence`); err != nil {
		t.Fatal(err)
	}
	policy.ReportDir += "/gone"
	if plan, err := retention.Plan(ctx, store, policy); err == nil || plan[0].Skipped != "could not be counted" || plan[2].Count != 1 {
		t.Errorf("plan %v, %v", counts(plan), err)
	}
	done, err := retention.Apply(ctx, store, policy, retention.By{Actor: "ann"})
	if diff := cmp.Diff([]string{"claims=0", "transfers=0", "tasks=1", "reports=1", "jobs=1", "samples=1", "report_files=0"}, counts(done)); err == nil || diff != "" {
		t.Errorf("(-want +got): %v\n%s", err, diff)
	}
	for _, says := range []string{"purge claims", "purge transfers", "list the reports"} {
		if !strings.Contains(err.Error(), says) {
			t.Errorf("the error does not say %q: %v", says, err)
		}
	}
	var complete string
	if err := super.QueryRow(ctx, `SELECT detail ->> 'complete' FROM seckill.audit_log WHERE action = 'purge_ended'`).Scan(&complete); err != nil || complete != "false" {
		t.Errorf("complete %s, %v", complete, err)
	}
}
