package migrations_test

import (
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
)

// Every statement that can create or change an order (protocol §1): what is
// claimed is exactly what was really inserted.
func TestOrderFenceByStatement(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		sql  []string // the last one is the statement
		want string   // its SQLSTATE; empty: it succeeds
		then map[string]string
	}{
		{
			"single row",
			[]string{`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`},
			"",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"single row, fenced",
			[]string{`INSERT INTO adopter.orders VALUES ('o1', 'fenced', 1)`},
			"SK001", nil,
		},
		{
			"single row, rejected",
			[]string{`INSERT INTO adopter.orders VALUES ('o1', 'rejected', 1)`},
			"SK001", nil,
		},
		{
			"multi-row",
			[]string{`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1), ('o2', 'r2', 2)`},
			"",
			map[string]string{"r1": "ORDER:o1", "r2": "ORDER:o2"},
		},
		{
			"multi-row with a fenced one",
			[]string{`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1), ('o2', 'fenced', 2)`},
			"SK001", nil,
		},
		{
			"two orders of one reservation",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`, `INSERT INTO adopter.orders VALUES ('o2', 'r1', 2)`,
			},
			"SK002",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"DO NOTHING that drops the row",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`, `INSERT INTO adopter.orders VALUES ('o2', 'r2', 1) ON CONFLICT DO NOTHING`,
			},
			"",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"DO NOTHING that inserts a fenced one",
			[]string{`INSERT INTO adopter.orders VALUES ('o1', 'fenced', 1) ON CONFLICT DO NOTHING`},
			"SK001", nil,
		},
		{
			"DO UPDATE that keeps the reservation",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`,
				`INSERT INTO adopter.orders VALUES ('o1', 'r3', 1) ON CONFLICT (order_id) DO UPDATE SET qty = adopter.orders.qty + 1`,
			},
			"",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"DO UPDATE that changes the reservation",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`,
				`INSERT INTO adopter.orders VALUES ('o1', 'r4', 1) ON CONFLICT (order_id) DO UPDATE SET reservation_id = excluded.reservation_id`,
			},
			"SK003",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"MERGE that inserts a fenced one",
			[]string{
				`MERGE INTO adopter.orders t USING (VALUES ('o1', 'r1', 1), ('o2', 'fenced', 2)) s (o, r, u) ON t.order_id = s.o
				 WHEN NOT MATCHED THEN INSERT (order_id, reservation_id, user_id) VALUES (s.o, s.r, s.u)`,
			},
			"SK001", nil,
		},
		{
			"MERGE",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`,
				`MERGE INTO adopter.orders t USING (VALUES ('o1', 'rx', 1), ('o2', 'r2', 2)) s (o, r, u) ON t.order_id = s.o
				 WHEN MATCHED THEN UPDATE SET qty = 2
				 WHEN NOT MATCHED THEN INSERT (order_id, reservation_id, user_id) VALUES (s.o, s.r, s.u)`,
			},
			"",
			map[string]string{"r1": "ORDER:o1", "r2": "ORDER:o2"},
		},
		{
			"savepoint rolled back",
			[]string{
				`BEGIN; SAVEPOINT s; INSERT INTO adopter.orders VALUES ('o1', 'r1', 1); ROLLBACK TO s;
				 INSERT INTO adopter.orders VALUES ('o2', 'r2', 2); COMMIT`,
			},
			"",
			map[string]string{"r2": "ORDER:o2"},
		},
		{
			"exception block",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`,
				`DO $$ BEGIN INSERT INTO adopter.orders VALUES ('o2', 'r2', 1); EXCEPTION WHEN unique_violation THEN NULL; END $$`,
			},
			"",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"no reservation",
			[]string{`INSERT INTO adopter.orders VALUES ('o1', NULL, 1), ('o2', '', 2)`},
			"", nil,
		},
		{
			"NULL becomes a reservation",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', NULL, 1)`, `UPDATE adopter.orders SET reservation_id = 'r1'`,
			},
			"",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"NULL becomes a fenced reservation",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', NULL, 1)`, `UPDATE adopter.orders SET reservation_id = 'fenced'`,
			},
			"SK001", nil,
		},
		{
			"reservation changes",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`, `UPDATE adopter.orders SET reservation_id = 'r2'`,
			},
			"SK003",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"reservation is taken away",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`, `UPDATE adopter.orders SET reservation_id = NULL`,
			},
			"SK003",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"anything else changes",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`, `UPDATE adopter.orders SET active = false, qty = 9`,
			},
			"",
			map[string]string{"r1": "ORDER:o1"},
		},
		{
			"cancelled and deleted, then again",
			[]string{
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`, `DELETE FROM adopter.orders`,
				`INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`,
			},
			"",
			map[string]string{"r1": "ORDER:o1"},
		},
	}
	a := newOrders(t)
	exec(t, a.super, `SELECT seckill.reject_reservation('rejected', 'no_stock')`)
	if outcome, won := a.fence(t, "fenced"); outcome != "FENCED" || !won {
		t.Fatalf("fence: %s, won %v", outcome, won)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			exec(t, a.super, `TRUNCATE adopter.orders`)
			exec(t, a.super, `BEGIN; SET LOCAL seckill.purging = 'on';
				DELETE FROM seckill.reservation_claim WHERE outcome = 'ORDER'; COMMIT`)
			for _, sql := range tt.sql[:len(tt.sql)-1] {
				exec(t, a.consumer, sql)
			}
			_, err := a.consumer.Exec(t.Context(), tt.sql[len(tt.sql)-1])
			if state(err) != tt.want || (tt.want == "") != (err == nil) {
				t.Errorf("statement: %v; want SQLSTATE %q", err, tt.want)
			}
			want := map[string]string{"fenced": "FENCED", "rejected": "REJECTED"}
			maps.Copy(want, tt.then)
			if diff := cmp.Diff(want, a.claims(t)); diff != "" {
				t.Errorf("claims (-want +got):\n%s", diff)
			}
		})
	}
}

func TestOrderFenceOnCopy(t *testing.T) {
	t.Parallel()
	a := newOrders(t)
	a.fence(t, "fenced")
	columns := []string{"order_id", "reservation_id", "user_id"}
	into := pgx.Identifier{"adopter", "orders"}
	_, err := a.consumer.CopyFrom(t.Context(), into, columns, pgx.CopyFromRows([][]any{{"o1", "r1", 1}, {"o2", "fenced", 2}}))
	if state(err) != "SK001" {
		t.Errorf("COPY with a fenced reservation: %v, want SK001", err)
	}
	if _, err := a.consumer.CopyFrom(t.Context(), into, columns, pgx.CopyFromRows([][]any{{"o1", "r1", 1}, {"o2", "r2", 2}})); err != nil {
		t.Errorf("COPY: %v", err)
	}
	want := map[string]string{"fenced": "FENCED", "r1": "ORDER:o1", "r2": "ORDER:o2"}
	if diff := cmp.Diff(want, a.claims(t)); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
}

// A BEFORE trigger of the adopter's that drops or changes the row comes before
// our claim, whatever its name.
func TestOrderFenceBesideOtherTriggers(t *testing.T) {
	t.Parallel()
	a := newOrders(t)
	exec(t, a.owner, `CREATE FUNCTION adopter.filter() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		IF NEW.user_id = 9 THEN RETURN NULL; END IF;
		IF NEW.user_id = 8 THEN NEW.reservation_id := 'fenced'; END IF;
		RETURN NEW; END $$`)
	exec(t, a.owner, `CREATE TRIGGER zz BEFORE INSERT OR UPDATE ON adopter.orders FOR EACH ROW EXECUTE FUNCTION adopter.filter()`)
	a.fence(t, "fenced")
	exec(t, a.consumer, `INSERT INTO adopter.orders VALUES ('o9', 'r9', 9)`)
	refused(t, a.consumer, "SK001", `INSERT INTO adopter.orders VALUES ('o8', 'r8', 8)`)
	exec(t, a.consumer, `INSERT INTO adopter.orders VALUES ('o7', 'r7', 7)`)
	// UPDATE SET user_id does not name reservation_id: the trigger changes it.
	refused(t, a.consumer, "SK003", `UPDATE adopter.orders SET user_id = 8`)
	want := map[string]string{"fenced": "FENCED", "r7": "ORDER:o7"}
	if diff := cmp.Diff(want, a.claims(t)); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
}

// The claim is part of the consumer's commit, which must not be undone by a
// crash, and a stronger setting is not lowered.
func TestClaimsCommitDurably(t *testing.T) {
	t.Parallel()
	a := newOrders(t)
	for _, statement := range []string{
		`INSERT INTO adopter.orders VALUES ('o' || clock_timestamp(), 'r' || clock_timestamp(), (random() * 1e9)::int)`,
		`SELECT seckill.claim_reservation('c' || clock_timestamp())`,
		`SELECT seckill.reject_reservation('j' || clock_timestamp(), 'no_stock')`,
		`SELECT seckill.fence_reservations(ARRAY['f' || clock_timestamp()], 'test', NULL)`,
		`SELECT seckill.purge_claims(now() - interval '1 day')`,
	} {
		for session, want := range map[string]string{"off": "on", "local": "on", "remote_write": "on", "on": "on", "remote_apply": "remote_apply"} {
			exec(t, a.super, `BEGIN`)
			exec(t, a.super, `SELECT set_config('synchronous_commit', $1, true)`, session)
			exec(t, a.super, statement)
			if got := get[string](t, a.super, `SHOW synchronous_commit`); got != want {
				t.Errorf("%s with synchronous_commit %s commits with %s, want %s", statement, session, got, want)
			}
			exec(t, a.super, `ROLLBACK`)
		}
	}
}

func TestOrderFenceUnderReplicationRole(t *testing.T) {
	t.Parallel()
	a := newOrders(t)
	a.fence(t, "fenced")
	exec(t, a.super, `SET session_replication_role = replica`)
	refused(t, a.super, "SK001", `INSERT INTO adopter.orders VALUES ('o1', 'fenced', 1)`)
	refused(t, a.super, "23001", `DELETE FROM seckill.reservation_claim`)
	exec(t, a.super, `INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`)
	refused(t, a.super, "SK003", `UPDATE adopter.orders SET reservation_id = 'r2'`)
}

func TestOrderFenceOnPartitions(t *testing.T) {
	t.Parallel()
	a := newAdopter(t)
	exec(t, a.owner, `CREATE TABLE adopter.orders (order_id bigint, reservation_id text, month int, PRIMARY KEY (order_id, month)) PARTITION BY LIST (month);
		CREATE TABLE adopter.m1 PARTITION OF adopter.orders FOR VALUES IN (1);
		CREATE TABLE adopter.m2 PARTITION OF adopter.orders FOR VALUES IN (2) PARTITION BY RANGE (order_id);
		CREATE TABLE adopter.m2a PARTITION OF adopter.m2 FOR VALUES FROM (0) TO (1000000)`)
	exec(t, a.owner, `SELECT seckill.install_order_fence('adopter.orders', 'reservation_id', 'order_id')`)
	ready := func(step string) {
		t.Helper()
		if problems := all(t, a.super, `SELECT seckill.fence_problems()`); len(problems) > 0 {
			t.Errorf("%s: %s", step, problems)
		}
	}
	notReady := func(step, part string) {
		t.Helper()
		problems := strings.Join(all(t, a.super, `SELECT seckill.fence_problems()`), "\n")
		if !strings.Contains(problems, part) {
			t.Errorf("%s: %q does not name %s", step, problems, part)
		}
		refused(t, a.super, "SK010", `SELECT seckill.fence_reservations('{x}', 'test', NULL)`)
	}
	ready("installed")
	a.fence(t, "fenced")
	for _, table := range []string{"orders", "m1"} {
		refused(t, a.consumer, "SK001", `INSERT INTO adopter.`+table+` VALUES (1, 'fenced', 1)`)
	}
	for _, table := range []string{"orders", "m2", "m2a"} {
		refused(t, a.consumer, "SK001", `INSERT INTO adopter.`+table+` VALUES (1, 'fenced', 2)`)
	}

	exec(t, a.consumer, `INSERT INTO adopter.orders VALUES (1, 'r1', 1)`)
	exec(t, a.consumer, `UPDATE adopter.orders SET month = 2 WHERE order_id = 1`)
	refused(t, a.consumer, "SK003", `UPDATE adopter.orders SET month = 1, reservation_id = 'r2' WHERE order_id = 1`)

	exec(t, a.owner, `CREATE TABLE adopter.m3 (LIKE adopter.orders); ALTER TABLE adopter.orders ATTACH PARTITION adopter.m3 FOR VALUES IN (3)`)
	ready("attached: the clone comes with it")
	refused(t, a.consumer, "SK001", `INSERT INTO adopter.m3 VALUES (3, 'fenced', 3)`)
	exec(t, a.owner, `CREATE TABLE adopter.m4 PARTITION OF adopter.orders FOR VALUES IN (4)`)
	ready("a new partition")
	refused(t, a.consumer, "SK001", `INSERT INTO adopter.orders VALUES (4, 'fenced', 4)`)

	exec(t, a.owner, `ALTER TABLE adopter.m3 DISABLE TRIGGER zzz_seckill_order_insert`)
	notReady("disabled in one partition", "adopter.m3")
	exec(t, a.owner, `ALTER TABLE adopter.m3 ENABLE TRIGGER zzz_seckill_order_insert`)
	notReady("enabled for origin only", "adopter.m3")
	exec(t, a.owner, `ALTER TABLE adopter.m3 ENABLE ALWAYS TRIGGER zzz_seckill_order_insert`)
	ready("enabled always again")

	exec(t, a.owner, `ALTER TABLE adopter.orders DETACH PARTITION adopter.m3`)
	ready("detached")
	exec(t, a.consumer, `INSERT INTO adopter.m3 VALUES (3, 'fenced', 3)`) // DETACH drops the trigger
	exec(t, a.owner, `DELETE FROM adopter.m3; ALTER TABLE adopter.orders ATTACH PARTITION adopter.m3 FOR VALUES IN (3)`)
	ready("attached again")

	// A foreign table as a partition, which triggers cannot be checked on, is
	// refused by PostgreSQL itself while the parent has row triggers of ours;
	// as an inheritance child it is not.
	exec(t, a.super, `CREATE FOREIGN DATA WRAPPER none; CREATE SERVER elsewhere FOREIGN DATA WRAPPER none`)
	exec(t, a.super, `CREATE TABLE adopter.plain (order_id bigint, reservation_id text); ALTER TABLE adopter.plain OWNER TO test_seckill_installer`)
	exec(t, a.owner, `SELECT seckill.install_order_fence('adopter.plain', 'reservation_id', 'order_id')`)
	ready("a second table")
	exec(t, a.super, `CREATE FOREIGN TABLE adopter.far () INHERITS (adopter.plain) SERVER elsewhere`)
	notReady("foreign child", "adopter.far is a foreign table")
	exec(t, a.super, `DROP FOREIGN TABLE adopter.far`)
	exec(t, a.owner, `CREATE TABLE adopter.child () INHERITS (adopter.plain)`)
	notReady("inheritance child without a trigger", "adopter.child")
	exec(t, a.owner, `SELECT seckill.install_order_fence('adopter.plain', 'reservation_id', 'order_id')`)
	ready("installed on the child too")
	refused(t, a.owner, "SK001", `INSERT INTO adopter.child VALUES (7, 'fenced')`)
}

// What stops every release, one change at a time.
func TestFenceProblems(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, sql, want string }{
		{"trigger disabled", `ALTER TABLE shop.orders DISABLE TRIGGER zzz_seckill_order_insert`, "shop.orders has no enabled AFTER INSERT"},
		{"all triggers disabled", `ALTER TABLE shop.orders DISABLE TRIGGER ALL`, "shop.orders has no enabled BEFORE UPDATE"},
		{"enabled for replicas only", `ALTER TABLE shop.orders ENABLE REPLICA TRIGGER zzz_seckill_order_insert`, "AFTER INSERT"},
		{"enabled for origin only", `ALTER TABLE shop.orders ENABLE TRIGGER zzz_seckill_order_update`, "AFTER UPDATE"},
		{"trigger dropped", `DROP TRIGGER zzz_seckill_order_insert ON shop.orders`, "AFTER INSERT"},
		{
			"trigger with a condition", `DROP TRIGGER zzz_seckill_order_insert ON shop.orders;
			CREATE TRIGGER zzz_seckill_order_insert AFTER INSERT ON shop.orders FOR EACH ROW WHEN (NEW.status = 'PAID')
			EXECUTE FUNCTION seckill.order_fence('reservation_id', 'order_id', 'activity_id', 'sku_id', 'activity_version', 'bucket_id', 'user_id');
			ALTER TABLE shop.orders ENABLE ALWAYS TRIGGER zzz_seckill_order_insert`, "AFTER INSERT",
		},
		{
			"trigger on other columns", `DROP TRIGGER zzz_seckill_order_insert ON shop.orders;
			CREATE TRIGGER zzz_seckill_order_insert AFTER INSERT ON shop.orders FOR EACH ROW
			EXECUTE FUNCTION seckill.order_fence('request_id', 'order_id', '', '', '', '', '');
			ALTER TABLE shop.orders ENABLE ALWAYS TRIGGER zzz_seckill_order_insert`, "AFTER INSERT",
		},
		{
			"trigger before insert", `DROP TRIGGER zzz_seckill_order_insert ON shop.orders;
			CREATE TRIGGER zzz_seckill_order_insert BEFORE INSERT ON shop.orders FOR EACH ROW
			EXECUTE FUNCTION seckill.order_fence('reservation_id', 'order_id', 'activity_id', 'sku_id', 'activity_version', 'bucket_id', 'user_id');
			ALTER TABLE shop.orders ENABLE ALWAYS TRIGGER zzz_seckill_order_insert`, "AFTER INSERT",
		},
		{"reservation column renamed", `ALTER TABLE shop.orders RENAME reservation_id TO rid`, "shop.orders has no column reservation_id"},
		{"no order table at all", `SELECT seckill.remove_order_fence('shop.orders')`, "no order table has the fence"},
		{"order table dropped", `DROP TABLE shop.orders CASCADE`, "was dropped"},
		{"view dropped", `DROP VIEW seckill.order_evidence`, "order_evidence is missing"},
		{"view with the caller's rights", `ALTER VIEW seckill.order_evidence SET (security_invoker = true)`, "security_invoker"},
		{"back-fill not done", `UPDATE seckill.order_table SET backfilled_at = NULL`, "back-fill of shop.orders is not done"},
		{
			"a table behind the view that nobody vouches for", `CREATE TABLE shop.names (user_id text, name text);
			CREATE VIEW shop.named AS SELECT o.* FROM shop.orders o LEFT JOIN shop.names USING (user_id);
			CREATE OR REPLACE VIEW seckill.order_evidence AS
			SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, true AS active, created_at FROM shop.named`,
			"shop.names is read by order_evidence",
		},
		{
			"a function behind the view", `CREATE FUNCTION shop.hidden() RETURNS SETOF shop.orders LANGUAGE sql AS 'SELECT * FROM shop.orders';
			CREATE OR REPLACE VIEW seckill.order_evidence AS
			SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, true AS active, created_at FROM shop.hidden()`,
			"shop.hidden()",
		},
		{
			"a materialized view behind the view", `CREATE MATERIALIZED VIEW shop.old AS SELECT * FROM shop.orders;
			CREATE OR REPLACE VIEW seckill.order_evidence AS
			SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, true AS active, created_at FROM shop.old`,
			"shop.old is read by order_evidence",
		},
	}
	a := newAdopter(t)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			exec(t, a.super, `BEGIN`)
			defer exec(t, a.super, `ROLLBACK`)
			if problems := all(t, a.super, `SELECT seckill.fence_problems()`); len(problems) > 0 {
				t.Fatalf("before: %s", problems)
			}
			exec(t, a.super, tt.sql)
			problems := strings.Join(all(t, a.super, `SELECT seckill.fence_problems()`), "\n")
			if !strings.Contains(problems, tt.want) {
				t.Errorf("problems %q do not say %q", problems, tt.want)
			}
			refused(t, a.super, "SK010", `SELECT seckill.fence_reservations('{r1}', 'test', NULL)`)
		})
	}

	t.Run("a lookup table is vouched for", func(t *testing.T) {
		exec(t, a.super, `CREATE TABLE shop.names (user_id text, name text);
			CREATE OR REPLACE VIEW seckill.order_evidence AS
			SELECT o.reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, o.user_id, true AS active, created_at
			FROM shop.orders o LEFT JOIN shop.names USING (user_id);
			INSERT INTO seckill.lookup_table (relation, reason) VALUES ('shop.names', 'names only')`)
		if problems := all(t, a.super, `SELECT seckill.fence_problems()`); len(problems) > 0 {
			t.Errorf("%s", problems)
		}
	})
}

// A renamed column must not turn orders into ones without a reservation.
func TestOrderFenceAfterARename(t *testing.T) {
	t.Parallel()
	a := newOrders(t)
	exec(t, a.owner, `ALTER TABLE adopter.orders RENAME reservation_id TO rid`)
	refused(t, a.consumer, "42703", `INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`)
	exec(t, a.owner, `SELECT seckill.install_order_fence('adopter.orders', 'rid', 'order_id')`)
	exec(t, a.consumer, `INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`)
}

func TestEarlyClaims(t *testing.T) {
	t.Parallel()
	a := newOrders(t)
	const claim = `SELECT concat_ws(' ', outcome, coalesce(order_id, '-'), won) FROM seckill.claim_reservation($1, $2, $3, $4)`
	scope := "a:1:s:2:v:3:b:4"
	if got := get[string](t, a.super, claim, "r1", nil, scope, "u1"); got != "ORDER - t" {
		t.Errorf("first claim: %s", got)
	}
	if got := get[string](t, a.super, claim, "r1", "o9", scope, "u1"); got != "ORDER - f" {
		t.Errorf("second claim: %s; it changes nothing", got)
	}
	exec(t, a.consumer, `INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`)
	if got := get[string](t, a.super, claim, "r1", nil, nil, nil); got != "ORDER o1 f" {
		t.Errorf("after the order: %s; its id is filled in", got)
	}
	refused(t, a.consumer, "SK002", `INSERT INTO adopter.orders VALUES ('o2', 'r1', 2)`)
	a.fence(t, "f1")
	if got := get[string](t, a.super, claim, "f1", "o3", scope, "u1"); got != "FENCED - f" {
		t.Errorf("claim of a fenced one: %s; want an answer, not an error", got)
	}
	if got := get[string](t, a.super, `SELECT seckill.reject_reservation('r1', 'no_stock')`); got != "ORDER" {
		t.Errorf("reject an ordered one: %s", got)
	}
	if got := get[string](t, a.super, `SELECT seckill.reject_reservation('j1', 'no_stock', $1)`, scope); got != "REJECTED" {
		t.Errorf("reject: %s", got)
	}
	if outcome, won := a.fence(t, "j1"); outcome != "REJECTED" || won {
		t.Errorf("fence a rejected one: %s, won %v", outcome, won)
	}
	if got := get[string](t, a.super, `SELECT concat_ws(' ', activity_id, sku_id, activity_version, bucket_id, user_id)
		FROM seckill.reservation_claim WHERE reservation_id = 'r1'`); got != "1 2 3 4 u1" {
		t.Errorf("claim's scope: %s", got)
	}
	refused(t, a.super, "22023", `SELECT seckill.claim_reservation('r2', NULL, 'a:{1}:s:2:v:3:b:4')`)
	refused(t, a.super, "22023", `SELECT seckill.fence_reservations('{a,b}', 'test', '{a:1:s:2:v:3:b:4}')`)
	refused(t, a.super, "22023", `SELECT seckill.fence_reservations('{a,NULL}', 'test', NULL)`)
}

func TestClaimsAreFinal(t *testing.T) {
	t.Parallel()
	a := newOrders(t)
	exec(t, a.consumer, `INSERT INTO adopter.orders VALUES ('o1', 'r1', 1)`)
	a.fence(t, "f1")
	for _, sql := range []string{
		`UPDATE seckill.reservation_claim SET outcome = 'ORDER' WHERE reservation_id = 'f1'`,
		`UPDATE seckill.reservation_claim SET outcome = 'FENCED', order_id = NULL WHERE reservation_id = 'r1'`,
		`UPDATE seckill.reservation_claim SET order_id = 'o2' WHERE reservation_id = 'r1'`,
		`UPDATE seckill.reservation_claim SET claimed_at = now() - interval '1 year'`,
		`UPDATE seckill.reservation_claim SET reservation_id = 'f2' WHERE reservation_id = 'f1'`,
		`DELETE FROM seckill.reservation_claim`,
		`TRUNCATE seckill.reservation_claim`,
	} {
		refused(t, a.super, "23001", sql)
	}
	want := map[string]string{"r1": "ORDER:o1", "f1": "FENCED"}
	if diff := cmp.Diff(want, a.claims(t)); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
}

func TestInstallRefusals(t *testing.T) {
	t.Parallel()
	a := newAdopter(t)
	exec(t, a.owner, `CREATE TABLE adopter.odd (order_id float, reservation_id char(26), number bigint, id text)`)
	for _, tt := range []struct{ want, sql string }{
		{"42703", `SELECT seckill.install_order_fence('adopter.odd', 'rid', 'id')`},
		{"42804", `SELECT seckill.install_order_fence('adopter.odd', 'reservation_id', 'id')`},
		{"42804", `SELECT seckill.install_order_fence('adopter.odd', 'number', 'id')`},
		{"42804", `SELECT seckill.install_order_fence('adopter.odd', 'id', 'order_id')`},
		{"42703", `SELECT seckill.install_order_fence('adopter.odd', 'id', 'number', '{"sku_id": "sku"}')`},
		{"22023", `SELECT seckill.install_order_fence('adopter.odd', 'id', 'number', '{"shop": "id"}')`},
		{"42501", `SELECT seckill.install_order_fence('shop.orders', 'request_id', 'order_id')`}, // not the owner
		{"SK012", `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT seckill.install_order_fence('adopter.odd', 'id', 'number')`},
	} {
		refused(t, a.owner, tt.want, tt.sql)
	}
	exec(t, a.owner, `ROLLBACK`)
	refused(t, a.consumer, "42501", `SELECT seckill.install_order_fence('adopter.odd', 'id', 'number')`)
}

// The installation waits for a busy table in short turns, and does not stop
// who comes after it meanwhile for longer than one of them.
func TestInstallOnABusyTable(t *testing.T) {
	t.Parallel()
	a := newAdopter(t)
	exec(t, a.owner, `CREATE TABLE adopter.orders (order_id text, reservation_id text)`)
	exec(t, a.consumer, `BEGIN; INSERT INTO adopter.orders VALUES ('o1', 'r1')`)
	installed := make(chan error, 1)
	go func() {
		_, err := a.owner.Exec(t.Context(), `SELECT seckill.install_order_fence('adopter.orders', 'reservation_id', 'order_id')`)
		installed <- err
	}()
	waitFor(t, a.super, `SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'adopter.orders'::regclass AND NOT granted)`)
	exec(t, a.super, `INSERT INTO adopter.orders VALUES ('o2', 'r2')`) // goes through between two turns
	exec(t, a.consumer, `COMMIT`)
	if err := <-installed; err != nil {
		t.Fatalf("install: %v", err)
	}
	if got := get[string](t, a.owner, `SHOW lock_timeout`); got != "0" {
		t.Errorf("lock_timeout leaks: %s", got)
	}
	// Both orders were there before the triggers: they are back-filled first.
	refused(t, a.super, "SK010", `SELECT seckill.fence_reservations('{r9}', 'test', NULL)`)
	exec(t, a.owner, `CALL seckill.backfill_order_fence('adopter.orders')`)
	want := map[string]string{"r1": "ORDER:o1", "r2": "ORDER:o2"}
	if diff := cmp.Diff(want, a.claims(t)); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
}

func TestBackfill(t *testing.T) {
	t.Parallel()
	a := newAdopter(t)
	exec(t, a.super, `INSERT INTO seckill.scope_allocation VALUES ('act', 'sku', 1, 10, 1, DEFAULT, 'test'), ('act', 'sku', 2, 10, 1, DEFAULT, 'test')`)
	exec(t, a.super, `INSERT INTO seckill.scope (activity_id, sku_id, activity_version, bucket_id, initial, state, starts_at, ends_at, retention_until)
		VALUES ('act', 'sku', 1, 0, 10, 'CLOSED', now() - interval '9 d', now() - interval '8 d', now() - interval '1 d'),
		       ('act', 'sku', 2, 0, 10, 'CLOSED', now() - interval '9 d', now() - interval '8 d', now() + interval '1 d')`)
	// Three lines of one order each, orders without a reservation, one order of
	// a version that is over, one reservation that is fenced already.
	exec(t, a.owner, `CREATE TABLE adopter.lines (id bigserial PRIMARY KEY, order_no bigint NOT NULL, reservation varchar(64), ver int);
		CREATE INDEX ON adopter.lines (reservation);
		INSERT INTO adopter.lines (order_no, reservation, ver) SELECT n, 'r' || n, 2 FROM generate_series(1, 5000) n, generate_series(1, 3);
		INSERT INTO adopter.lines (order_no, reservation, ver) VALUES (6001, NULL, 2), (6002, '', 2), (6003, 'over', 1), (6004, 'fenced', 2)`)
	exec(t, a.super, `INSERT INTO seckill.reservation_claim (reservation_id, outcome) VALUES ('fenced', 'FENCED')`)
	exec(t, a.owner, `ALTER TABLE adopter.lines ADD act text NOT NULL DEFAULT 'act', ADD sku text NOT NULL DEFAULT 'sku'`)
	exec(t, a.owner, `SELECT seckill.install_order_fence('adopter.lines', 'reservation', 'order_no', '{"activity_version": "ver", "activity_id": "act", "sku_id": "sku"}')`)
	refused(t, a.super, "SK010", `SELECT seckill.fence_reservations('{r1}', 'test', NULL)`)
	exec(t, a.owner, `CALL seckill.backfill_order_fence('adopter.lines', 700)`)
	if got := get[int64](t, a.super, `SELECT count(*) FROM seckill.reservation_claim AS c
		WHERE outcome = 'ORDER' AND 'r' || order_id = reservation_id AND (activity_id, sku_id, activity_version) = ('act', 'sku', 2)`); got != 5000 {
		t.Errorf("%d orders claimed, want 5000", got)
	}
	claims := a.claims(t)
	if len(claims) != 5001 || claims["fenced"] != "FENCED" {
		t.Errorf("%d claims, fenced is %s; want 5001 and FENCED", len(claims), claims["fenced"])
	}
	if got := get[string](t, a.owner, `SELECT seckill.install_order_fence('adopter.lines', 'reservation', 'order_no', '{"activity_version": "ver", "activity_id": "act", "sku_id": "sku"}')`); got != "installed" {
		t.Errorf("installed again: %s; nothing slipped by, so nothing is to be done again", got)
	}
	// With the trigger away for a while orders may have slipped by: again.
	exec(t, a.owner, `ALTER TABLE adopter.lines DISABLE TRIGGER ALL; INSERT INTO adopter.lines (order_no, reservation, ver) VALUES (7000, 'slipped', 2)`)
	exec(t, a.owner, `SELECT seckill.install_order_fence('adopter.lines', 'reservation', 'order_no', '{"activity_version": "ver", "activity_id": "act", "sku_id": "sku"}')`)
	refused(t, a.super, "SK010", `SELECT seckill.fence_reservations('{r1}', 'test', NULL)`)
	exec(t, a.owner, `CALL seckill.backfill_order_fence('adopter.lines')`)
	if got := a.claims(t)["slipped"]; got != "ORDER:7000" {
		t.Errorf("the order that slipped by: %q", got)
	}
}

func TestPurgeClaims(t *testing.T) {
	t.Parallel()
	a := newAdopter(t)
	exec(t, a.super, `INSERT INTO seckill.scope_allocation (activity_id, sku_id, activity_version, total, buckets, created_by)
		SELECT 'act', 'sku', v, 10, 1, 'test' FROM generate_series(1, 3) v`)
	exec(t, a.super, `INSERT INTO seckill.scope (activity_id, sku_id, activity_version, bucket_id, initial, state, starts_at, ends_at, retention_until)
		SELECT 'act', 'sku', v, 0, 10, state, now() - interval '40 d', now() - interval '39 d', now() + until
		FROM (VALUES (1, 'CLOSED', interval '-1 d'), (2, 'CLOSED', interval '1 d'), (3, 'ACTIVE', interval '-1 d')) s (v, state, until)`)
	claim := func(id, outcome string, version any, age string) {
		t.Helper()
		exec(t, a.super, `INSERT INTO seckill.reservation_claim (reservation_id, outcome, activity_id, sku_id, activity_version, claimed_at)
			VALUES ($1, $2, CASE WHEN $3::bigint IS NOT NULL THEN 'act' END, CASE WHEN $3::bigint IS NOT NULL THEN 'sku' END, $3, now() - $4::text::interval)`,
			id, outcome, version, age)
	}
	claim("over", "FENCED", 1, "30 d")
	claim("over too", "REJECTED", 1, "30 d")
	claim("over but young", "FENCED", 1, "3 d")
	claim("in retention", "FENCED", 2, "30 d")
	claim("not closed", "FENCED", 3, "30 d")
	claim("not registered", "FENCED", 4, "30 d")
	claim("before all scopes", "FENCED", nil, "60 d")
	claim("no scope", "FENCED", nil, "30 d") // may be of version 3, which lives
	claim("ordered", "ORDER", 1, "30 d")
	exec(t, a.super, `INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, status)
		VALUES ('o1', 'ordered', 'q', 'act', 'sku', 1, 0, 'u', 'CANCELLED')`)

	refused(t, a.super, "22023", `SELECT seckill.purge_claims(now())`)
	var purged int64
	position, pages := "", 0
	for more := true; more; pages++ {
		var n int64
		var next *string
		if err := a.super.QueryRow(t.Context(), `SELECT purged, "position" FROM seckill.purge_claims(now() - interval '7 d', $1, 2)`, position).Scan(&n, &next); err != nil {
			t.Fatal(err)
		}
		purged += n
		if more = next != nil; more {
			position = *next
		}
	}
	if purged != 3 || pages != 5 {
		t.Errorf("%d purged in %d pages, want 3 in 5", purged, pages)
	}
	want := map[string]string{
		"over but young": "FENCED", "in retention": "FENCED", "not closed": "FENCED", "not registered": "FENCED",
		"no scope": "FENCED", "ordered": "ORDER:o1",
	}
	if diff := cmp.Diff(want, a.claims(t)); diff != "" {
		t.Errorf("claims left (-want +got):\n%s", diff)
	}
	exec(t, a.super, `BEGIN; SELECT seckill.purge_claims(now() - interval '7 d')`)
	refused(t, a.super, "23001", `DELETE FROM seckill.reservation_claim`) // nor later in the purge's transaction
}
