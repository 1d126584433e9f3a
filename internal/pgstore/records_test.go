package pgstore_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/pgstore/claims"
	"github.com/seckill/reconciler/migrations"
	"github.com/seckill/reconciler/reservation"
)

// adopterView is a view over order lines: grouped, without a version, and with
// statuses of which some mean nothing to us.
const adopterView = `SELECT o.reservation AS reservation_id, o.number AS order_id, max(o.request) AS request_id, o.activity AS activity_id,
		l.sku AS sku_id, NULL AS activity_version, NULL AS bucket_id, max(o.customer) AS user_id,
		CASE l.state WHEN 'OPEN' THEN true WHEN 'SHIPPED' THEN true WHEN 'VOID' THEN false END AS active, min(o.at) AS created_at
	FROM adopter.orders AS o JOIN adopter.lines AS l USING (number)
	GROUP BY o.reservation, o.number, o.activity, l.sku, l.state`

func newAdopterView(t *testing.T) (database, *pgx.Conn) {
	t.Helper()
	db := newDatabase(t)
	super := connect(t, db.url)
	exec(t, super, `CREATE SCHEMA adopter;
		CREATE TABLE adopter.orders (number bigint PRIMARY KEY, reservation varchar(64), request text, activity text, customer text, at timestamptz DEFAULT now());
		CREATE INDEX orders_reservation ON adopter.orders (reservation);
		CREATE TABLE adopter.lines (number bigint, line int, sku text, state text, PRIMARY KEY (number, line))`)
	for _, table := range []string{"orders", "lines"} {
		column := map[string]string{"orders": "reservation", "lines": "sku"}[table]
		if table == "lines" {
			exec(t, super, `INSERT INTO seckill.lookup_table (relation, reason) VALUES ('adopter.lines', 'lines of fenced orders')`)
			continue
		}
		exec(t, super, `SELECT seckill.install_order_fence('adopter.orders', '`+column+`', 'number')`)
	}
	result, err := migrations.InstallEvidence(t.Context(), db.url, adopterView)
	if err != nil || len(result.Problems) > 0 {
		t.Fatalf("install the view: %+v, %v", result, err)
	}
	return db, super
}

func TestRecordsOfAnAdoptersView(t *testing.T) {
	t.Parallel()
	db, super := newAdopterView(t)
	scope := reservation.Scope{ActivityID: "act", SKUID: "sku", Version: 7, Bucket: 3}
	n := 0
	insert := func(id, activity, customer string, lines ...string) {
		t.Helper()
		n++
		exec(t, super, `INSERT INTO adopter.orders (number, reservation, request, activity, customer) VALUES ($1, $2, 'q', $3, $4)`, n, id, activity, customer)
		for i, line := range lines {
			sku, state, _ := strings.Cut(line, " ")
			exec(t, super, `INSERT INTO adopter.lines VALUES ($1, $2, $3, $4)`, n, i, sku, state)
		}
	}
	insert("one line", "act", "u", "sku OPEN")
	insert("several lines", "act", "u", "sku OPEN", "sku OPEN", "sku VOID")
	insert("a line of unknown status", "act", "u", "sku OPEN", "sku LIMBO")
	insert("cancelled", "act", "u", "sku VOID", "sku VOID")
	insert("unknown status", "act", "u", "sku LIMBO")
	insert("cancelled or unknown", "act", "u", "sku VOID", "sku LIMBO")
	insert("another activity", "other", "u", "sku OPEN")
	insert("another user", "act", "v", "sku OPEN")
	insert("lines of two SKUs", "act", "u", "sku OPEN", "sku2 OPEN")
	exec(t, super, `INSERT INTO seckill.reservation_claim (reservation_id, outcome) VALUES ('order gone', 'ORDER')`)

	want := map[string]reservation.OrderEvidence{
		"one line":                 {State: reservation.OrderExists, OrderID: "1", Active: true},
		"several lines":            {State: reservation.OrderExists, OrderID: "2", Active: true},
		"a line of unknown status": {State: reservation.OrderExists, OrderID: "3", Active: true},
		"cancelled":                {State: reservation.OrderExists, OrderID: "4"},
		"unknown status":           {State: reservation.OrderContradictory, Cause: reservation.CauseUnknownOrderStatus, OrderID: "5"},
		"cancelled or unknown":     {State: reservation.OrderContradictory, Cause: reservation.CauseUnknownOrderStatus, OrderID: "6"},
		"another activity":         {State: reservation.OrderContradictory, Cause: reservation.CauseOrderScopeMismatch, OrderID: "7", Active: true},
		"another user":             {State: reservation.OrderContradictory, Cause: reservation.CauseOrderScopeMismatch, OrderID: "8", Active: true},
		"lines of two SKUs":        {State: reservation.OrderContradictory, Cause: reservation.CauseOrderScopeMismatch, OrderID: "9", Active: true},
		"order gone":               {State: reservation.OrderContradictory, Cause: reservation.CauseOrderMissing},
		"nothing":                  {State: reservation.OrderNone},
	}
	ids := make([]string, 0, len(want))
	for id := range want {
		ids = append(ids, id)
	}
	records, err := db.store.Records(t.Context(), ids)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]reservation.OrderEvidence{}
	for id := range want {
		got[id] = reservation.ClassifyOrders(scope, "u", records[id])
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("evidence (-want +got):\n%s", diff)
	}
	wantOrder := reservation.Order{OrderID: "2", RequestID: "q", ActivityID: "act", SKUID: "sku", Version: -1, Bucket: -1, UserID: "u", Active: true, StatusKnown: true}
	if diff := cmp.Diff([]reservation.Order{wantOrder}, records["several lines"].Orders, cmpopts.IgnoreFields(wantOrder, "CreatedAt")); diff != "" {
		t.Errorf("order of several lines (-want +got):\n%s", diff)
	}
	if records["several lines"].Orders[0].CreatedAt.IsZero() {
		t.Error("created_at is not read")
	}
}

// Two orders under one reservation, and lines of one order that disagree about
// numbers, which only a view without a fence could show.
func TestRecordsOfOrdersThatContradictEachOther(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	super := connect(t, db.url)
	exec(t, super, `CREATE TABLE shop.raw (LIKE seckill.order_evidence);
		CREATE OR REPLACE VIEW seckill.order_evidence AS TABLE shop.raw;
		INSERT INTO shop.raw (reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, active) VALUES
			('two', 'o1', 'q', 'a', 's', 1, 0, 'u', true), ('two', 'o2', 'q', 'a', 's', 1, 0, 'u', false),
			('versions', 'o3', 'q', 'a', 's', 1, 0, 'u', true), ('versions', 'o3', 'q', 'a', 's', 2, NULL, 'u', true),
			('users', 'o4', 'q', 'a', 's', 1, 0, 'u', true), ('users', 'o4', 'q', 'a', 's', 1, 0, 'v', true)`)
	records, err := db.store.Records(t.Context(), []string{"two", "versions", "users"})
	if err != nil {
		t.Fatal(err)
	}
	scope := reservation.Scope{ActivityID: "a", SKUID: "s", Version: 1}
	for id, want := range map[string]string{
		"two": reservation.CauseDuplicateOrder, "versions": reservation.CauseOrderScopeMismatch, "users": reservation.CauseOrderScopeMismatch,
	} {
		if e := reservation.ClassifyOrders(scope, "u", records[id]); e.Cause != want {
			t.Errorf("%s: %+v, want %s", id, e, want)
		}
	}
	if o := records["versions"].Orders[0]; o.Version != math.MaxInt64 || o.Bucket != 0 {
		t.Errorf("order of two versions: %+v", o)
	}
}

// The order table is never read whole, with a plan for the values or without.
func TestRecordsUseTheIndexOfAGroupedView(t *testing.T) {
	t.Parallel()
	db, super := newAdopterView(t)
	exec(t, super, `ALTER TABLE adopter.orders DISABLE TRIGGER USER;
		INSERT INTO adopter.orders (number, reservation, request, activity, customer) SELECT n, 'r' || n, 'q', 'act', 'u' FROM generate_series(1, 100000) n;
		INSERT INTO adopter.lines SELECT n, l, 'sku', 'OPEN' FROM generate_series(1, 100000) n, generate_series(1, 2) l;
		INSERT INTO seckill.reservation_claim (reservation_id, outcome) SELECT 'r' || n, 'ORDER' FROM generate_series(1, 100000) n;
		ANALYZE adopter.orders, adopter.lines, seckill.reservation_claim`)
	ids := make([]string, 300)
	for i := range ids {
		ids[i] = fmt.Sprintf("r%d", 1+i*331)
	}
	daemon := connect(t, db.as(t, "seckill_operator"))
	array := "'{" + strings.Join(ids, ",") + "}'::text[]"
	for _, mode := range []string{"force_custom_plan", "force_generic_plan"} {
		exec(t, daemon, `SET plan_cache_mode = `+mode)
		exec(t, daemon, `PREPARE `+mode+` (text[]) AS `+claims.RecordsSQL)
		rows, err := daemon.Query(t.Context(), `EXPLAIN EXECUTE `+mode+` (`+array+`)`)
		if err != nil {
			t.Fatal(err)
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		plan := strings.Join(lines, "\n")
		for _, whole := range []string{"Seq Scan on orders", "Seq Scan on lines", "Seq Scan on reservation_claim"} {
			if strings.Contains(plan, whole) {
				t.Errorf("%s reads a table whole:\n%s", mode, plan)
			}
		}
		if !strings.Contains(plan, "orders_reservation") {
			t.Errorf("%s does not use the index:\n%s", mode, plan)
		}
	}
	records, err := db.store.Records(t.Context(), ids)
	if err != nil || len(records) != len(ids) {
		t.Errorf("%d records, %v; want %d", len(records), err, len(ids))
	}
}

// Columns of an adopter's may have any collation.
func TestRecordsOfAnotherCollation(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	super := connect(t, db.url)
	exec(t, super, `CREATE COLLATION shop.other (provider = icu, locale = 'de');
		CREATE TABLE shop.foreign_orders (id text COLLATE shop.other PRIMARY KEY, rid text COLLATE shop.other UNIQUE)`)
	exec(t, super, `SELECT seckill.install_order_fence('shop.foreign_orders', 'rid', 'id')`)
	if _, err := migrations.InstallEvidence(t.Context(), db.url, `SELECT rid AS reservation_id, id AS order_id, 'q' AS request_id, 'a' AS activity_id,
		's' AS sku_id, 1 AS activity_version, 0 AS bucket_id, 'u' AS user_id, true AS active, now() AS created_at FROM shop.foreign_orders`); err != nil {
		t.Fatal(err)
	}
	exec(t, super, `INSERT INTO shop.foreign_orders VALUES ('o1', 'r1')`)
	records, err := db.store.Records(t.Context(), []string{"r1", "r2"})
	if err != nil || len(records["r1"].Orders) != 1 || records["r1"].Claim == nil {
		t.Errorf("records: %+v, %v", records, err)
	}
	results, err := db.store.Fence(t.Context(), "x", requests(db.scope, "r1", "r2"))
	if err != nil || results[0].Outcome != reservation.OutcomeOrder || !results[1].Won {
		t.Errorf("fence: %+v, %v", results, err)
	}
	if _, err := super.Exec(t.Context(), `SELECT seckill.purge_claims(now() - interval '1 day')`); err != nil {
		t.Error(err)
	}
}

// Row-level security that hides rows is an error, not an empty answer.
func TestRowSecurityIsNoEmptyAnswer(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	super := connect(t, db.url)
	exec(t, super, `ALTER TABLE seckill.reservation_claim ENABLE ROW LEVEL SECURITY;
		CREATE POLICY nothing ON seckill.reservation_claim USING (false)`)
	if _, err := db.store.Records(t.Context(), []string{"r1"}); err == nil {
		t.Error("a policy hid the claims without an error")
	}
}

// A session plans while the tables are small, and the sale fills them before
// any ANALYZE: the plans must not read them whole, neither the daemon's nor the
// consumer's.
func TestPlansHoldWhileTablesGrow(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	super := connect(t, db.url)
	exec(t, super, `ALTER TABLE seckill.reservation_claim SET (autovacuum_enabled = off); ALTER TABLE shop.orders SET (autovacuum_enabled = off)`)
	store, err := pgstore.Open(t.Context(), pgstore.Config{URL: db.as(t, "seckill_daemon"), MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	consumer := connect(t, db.as(t, "seckill_consumer"))
	work := func(phase string) {
		t.Helper()
		for i := range 12 {
			var ids []string
			for k := range 20 {
				ids = append(ids, fmt.Sprintf("%s-%d-%d", phase, i, k))
			}
			if _, err := store.Records(t.Context(), ids); err != nil {
				t.Fatal(err)
			}
			if _, err := store.Fence(t.Context(), "x", requests(db.scope, ids...)); err != nil {
				t.Fatal(err)
			}
			exec(t, consumer, `SELECT seckill.claim_reservation($1)`, ids[0])
			exec(t, consumer, `SELECT seckill.claim_reservation($1)`, "o"+ids[0])
			if err := order(t.Context(), consumer, db.scope, "o"+ids[0]); err != nil {
				t.Fatal(err)
			}
		}
	}
	work("small")
	const rows = 20000
	exec(t, super, `INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		SELECT 'b' || n, 'b' || n, 'q', 'bulk', 's', 1, 0, n FROM generate_series(1, $1::int) n`, rows)
	work("large")
	// The end of a session hands in what it counted.
	store.Close()
	_ = consumer.Close(t.Context())
	for counted := false; !counted; {
		if err := super.QueryRow(t.Context(), `SELECT count(*) = 0 FROM pg_stat_activity, pg_sleep(0.01)
			WHERE datname = current_database() AND usename LIKE 'test%' AND application_name <> $1`, t.Name()).Scan(&counted); err != nil {
			t.Fatal(err)
		}
	}
	for _, table := range []string{"seckill.reservation_claim", "shop.orders"} {
		var read, probes int64
		if err := super.QueryRow(t.Context(), `SELECT seq_tup_read, idx_scan FROM pg_stat_user_tables WHERE relid = $1::regclass`, table).Scan(&read, &probes); err != nil {
			t.Fatal(err)
		}
		if read >= rows || probes == 0 {
			t.Errorf("%s: %d rows read by sequential scans, %d index scans", table, read, probes)
		}
	}
}
