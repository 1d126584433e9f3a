package pgstore_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reconcile"
)

const month = 30 * 24 * time.Hour

// rows reads one text column.
func rows(t *testing.T, url, sql string) []string {
	t.Helper()
	found, err := connect(t, url).Query(t.Context(), sql)
	if err != nil {
		t.Fatal(err)
	}
	values, err := pgx.CollectRows(found, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return values
}

// purged makes a plan, deletes in batches of the given size, and requires that
// the plan said what went.
func purged(t *testing.T, db database, kind pgstore.PurgeKind, keep time.Duration, batch int) pgstore.Purgeable {
	t.Helper()
	plan, err := db.store.PlanPurge(t.Context(), kind, keep, batch)
	if err != nil {
		t.Fatal(err)
	}
	var total int64
	for position, calls := "", 0; ; calls++ {
		deleted, next, err := db.store.PurgePage(t.Context(), kind, keep, batch, position)
		if err != nil || deleted > int64(batch) || calls > 1000 {
			t.Fatalf("call %d deleted %d: %v", calls, deleted, err)
		}
		total += deleted
		if next == "" {
			break
		}
		position = next
	}
	if total != plan.Count {
		t.Errorf("%s: %d went, the plan said %d", kind, total, plan.Count)
	}
	again, err := db.store.PlanPurge(t.Context(), kind, keep, batch)
	if err != nil || again != (pgstore.Purgeable{}) {
		t.Errorf("%s: afterwards the plan is %+v, %v", kind, again, err)
	}
	return plan
}

// versions registers versions 1 to 4 of activity a: live, closed within its
// retention, closed and past it by a day, and past it by three months.
func versions(t *testing.T, db database) {
	t.Helper()
	exec(t, connect(t, db.url), `
		INSERT INTO seckill.scope_allocation (activity_id, sku_id, activity_version, total, buckets, created_by)
		SELECT 'a', 's', v, 10, 2, 'test' FROM generate_series(1, 4) AS v;
		INSERT INTO seckill.scope (activity_id, sku_id, activity_version, bucket_id, initial, state, starts_at, ends_at, retention_until)
		SELECT 'a', 's', v, b, 5, state, now() - interval '1 year', now() - interval '200 days', until
		FROM (VALUES (1, 'ACTIVE', now() - interval '100 days'), (2, 'CLOSED', now() + interval '1 day'),
		             (3, 'CLOSED', now() - interval '1 day'), (4, 'CLOSED', now() - interval '90 days')) AS t (v, state, until)
		CROSS JOIN generate_series(0, 1) AS b`)
}

// A claim goes only if it is old, its version is registered, closed and past
// its retention, and it has no order: the plan counts exactly those.
func TestPurgeClaims(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	versions(t, db)
	super := connect(t, db.url)
	exec(t, super, `
		INSERT INTO seckill.reservation_claim (reservation_id, outcome, activity_id, sku_id, activity_version, bucket_id, claimed_at)
		SELECT format('v%s-%s-%s', v, age, n), 'FENCED', 'a', 's', v, 0, now() - age * interval '1 day' - n * interval '1 minute'
		FROM generate_series(1, 5) AS v, unnest('{1,40}'::int[]) AS age, generate_series(1, 3) AS n`)
	exec(t, super, `
		INSERT INTO seckill.reservation_claim (reservation_id, outcome, order_id, activity_id, sku_id, activity_version, bucket_id, claimed_at)
		VALUES ('ordered', 'ORDER', 'o1', 'a', 's', 3, 0, now() - interval '50 days');
		INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		VALUES ('o1', 'ordered', 'q', 'a', 's', 3, 0, 'u')`)

	plan := purged(t, db, pgstore.PurgeClaims, month, 4)
	if age := time.Since(plan.Oldest).Round(24 * time.Hour); plan.Count != 6 || age != 40*24*time.Hour || !plan.Newest.After(plan.Oldest) {
		t.Errorf("plan %+v, want 6 of 40 days", plan)
	}
	var want []string
	for _, v := range []int{1, 2, 3, 4, 5} { // 5 is registered nowhere
		for _, age := range []int{1, 40} {
			for n := 1; n <= 3 && (v < 3 || v > 4 || age == 1); n++ {
				want = append(want, fmt.Sprintf("v%d-%d-%d", v, age, n))
			}
		}
	}
	want = append(want, "ordered")
	slices.Sort(want)
	if diff := cmp.Diff(want, rows(t, db.url, `SELECT reservation_id FROM seckill.reservation_claim ORDER BY reservation_id`)); diff != "" {
		t.Errorf("left are (-want +got):\n%s", diff)
	}
	if _, _, err := db.store.PurgePage(t.Context(), pgstore.PurgeClaims, time.Minute, 10, ""); err == nil {
		t.Error("claims of the last hour may be purged")
	}
}

// The journal stays until the version's retention has passed, and what is not
// finished stays for ever.
func TestPurgeTransfers(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	versions(t, db)
	exec(t, connect(t, db.url), `
		INSERT INTO seckill.bucket_transfer (transfer_id, activity_id, sku_id, activity_version, donor_bucket, receiver_bucket, amount, state, created_by, updated_at)
		SELECT format('v%s-%s', v, state), 'a', 's', v, 0, 1, 1, state, 'test', now() - interval '300 days'
		FROM generate_series(1, 4) AS v, unnest('{PLANNED,OUT,DONE,CANCELLED}'::text[]) AS state`)
	if plan := purged(t, db, pgstore.PurgeTransfers, month, 1); plan.Count != 2 {
		t.Errorf("plan %+v", plan)
	}
	left := rows(t, db.url, `SELECT transfer_id FROM seckill.bucket_transfer ORDER BY 1`)
	if len(left) != 14 || slices.Contains(left, "v4-DONE") || slices.Contains(left, "v4-CANCELLED") {
		t.Errorf("left are %v", left)
	}
}

// Open and approved tasks stay, however old.
func TestPurgeTasks(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	exec(t, connect(t, db.url), `
		INSERT INTO seckill.manual_task (kind, cause, count, state, first_seen_at, decided_at)
		SELECT 'k', state || age, 1, state, now() - interval '300 days', CASE WHEN state IN ('rejected', 'resolved') THEN now() - age * interval '1 day' END
		FROM unnest('{open,approved,rejected,resolved}'::text[]) AS state, unnest('{1,40}'::int[]) AS age;
		INSERT INTO seckill.task_proposal (task_id, reservation_id, action, expected) SELECT id, 'r', 'x', '{}' FROM seckill.manual_task`)
	if plan := purged(t, db, pgstore.PurgeTasks, month, 1); plan.Count != 2 {
		t.Errorf("plan %+v", plan)
	}
	want := []string{"approved1", "approved40", "open1", "open40", "rejected1", "resolved1"}
	if diff := cmp.Diff(want, rows(t, db.url, `SELECT cause FROM seckill.manual_task JOIN seckill.task_proposal ON task_id = id ORDER BY 1`)); diff != "" {
		t.Errorf("left are (-want +got):\n%s", diff)
	}
}

// Old reports go with their findings, but for the newest finished one of each
// mode and selection; a run that is still under way stays.
func TestPurgeReports(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx := t.Context()
	name := map[string]string{}
	begin := func(label, mode string, selection pgstore.RunSelection, days int) string {
		t.Helper()
		id := reconcile.NewRunID()
		name[id] = label
		err := db.store.BeginRun(ctx, pgstore.NewRun{ID: id, Mode: mode, Selection: selection, StartedBy: "x", StartedAt: time.Now().Add(-time.Duration(days) * 24 * time.Hour)})
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	finish := func(id string) {
		t.Helper()
		if err := db.store.FinishRun(ctx, reported(id, 2)); err != nil {
			t.Fatal(err)
		}
	}
	here := pgstore.RunSelection{ActivityID: "a"}
	finish(begin("old", reconcile.ModeQuick, pgstore.RunSelection{}, 50))
	finish(begin("old too", reconcile.ModeQuick, pgstore.RunSelection{}, 40))
	finish(begin("new", reconcile.ModeQuick, pgstore.RunSelection{}, 1))
	finish(begin("old and deep", reconcile.ModeDeep, pgstore.RunSelection{}, 50))
	finish(begin("old and the last deep one", reconcile.ModeDeep, pgstore.RunSelection{}, 45))
	finish(begin("old and alone there", reconcile.ModeQuick, here, 60))
	begin("old and under way", reconcile.ModeDeep, here, 60)
	interrupted := begin("old and interrupted", reconcile.ModeDeep, here, 60)
	exec(t, connect(t, db.url), `UPDATE seckill.reconcile_run SET seen_at = now() - interval '60 days' WHERE run_id = '`+interrupted+`'`)

	if plan := purged(t, db, pgstore.PurgeReports, month, 100); plan.Count != 4 {
		t.Errorf("plan %+v", plan)
	}
	var left []string
	for _, id := range rows(t, db.url, `SELECT run_id FROM seckill.reconcile_run`) {
		left = append(left, name[id])
	}
	slices.Sort(left)
	if diff := cmp.Diff([]string{"new", "old and alone there", "old and the last deep one", "old and under way"}, left); diff != "" {
		t.Errorf("left are (-want +got):\n%s", diff)
	}
	if findings := rows(t, db.url, `SELECT DISTINCT run_id FROM seckill.finding`); len(findings) != 3 {
		t.Errorf("findings of %d runs are left", len(findings))
	}
}

func TestPurgeJobs(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	exec(t, connect(t, db.url), `
		INSERT INTO seckill.job (name, paused, run_requested_at, last_finished_at) VALUES
			('gone', false, NULL, now() - interval '40 days'), ('new', false, NULL, now()), ('never', false, NULL, NULL),
			('paused', true, NULL, now() - interval '40 days'), ('asked for', false, now(), now() - interval '40 days')`)
	if plan := purged(t, db, pgstore.PurgeJobs, month, 10); plan.Count != 1 {
		t.Errorf("plan %+v", plan)
	}
	if diff := cmp.Diff([]string{"asked for", "never", "new", "paused"}, rows(t, db.url, `SELECT name FROM seckill.job ORDER BY 1`)); diff != "" {
		t.Errorf("left are (-want +got):\n%s", diff)
	}
	if _, err := db.store.PlanPurge(t.Context(), "audit", month, 10); err == nil {
		t.Error("there is a plan for the audit trail")
	}
}
