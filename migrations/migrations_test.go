package migrations_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/migrations"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// applied lists the applied steps as set/version.
func applied(t *testing.T, url string) []string {
	t.Helper()
	known, err := migrations.Status(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range known {
		if m.Applied {
			names = append(names, fmt.Sprintf("%s/%d", m.Set, m.Version))
		}
		if m.Applied == m.AppliedAt.IsZero() {
			t.Errorf("%s/%d: applied %v at %v", m.Set, m.Version, m.Applied, m.AppliedAt)
		}
	}
	return names
}

// known lists all steps as set/version.
func known(t *testing.T, url string) []string {
	t.Helper()
	known, err := migrations.Status(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range known {
		names = append(names, fmt.Sprintf("%s/%d", m.Set, m.Version))
	}
	return names
}

// downTo rolls schema seckill back until the step of that version is the newest.
func downTo(t *testing.T, url string, version int) {
	t.Helper()
	rollBack(t, url, "sql", version, migrations.Options{})
}

// referenceDownTo is downTo for the reference schema.
func referenceDownTo(t *testing.T, url string, version int) {
	t.Helper()
	rollBack(t, url, "reference", version, migrations.Options{WithReference: true})
}

func rollBack(t *testing.T, url, set string, version int, o migrations.Options) {
	t.Helper()
	for slices.ContainsFunc(applied(t, url), func(name string) bool {
		var v int
		n, _ := fmt.Sscanf(name, set+"/%d", &v)
		return n == 1 && v > version
	}) {
		if done, err := migrations.Down(t.Context(), url, o); err != nil || len(done) != 1 {
			t.Fatalf("down rolled back %v, %v", done, err)
		}
	}
}

const (
	orderFence = 3 // the step with the trigger's function, which order tables depend on
	shopTables = 1 // the reference schema's step with its tables
)

func TestUpDownUp(t *testing.T) {
	t.Parallel()
	url := stacktest.EmptyDatabase(t, stacktest.Shared(t))
	conn := connect(t, url)
	reference := migrations.Options{WithReference: true}
	everything := known(t, url)

	if names := applied(t, url); names != nil {
		t.Errorf("an empty database has %v", names)
	}
	if got := get[bool](t, conn, `SELECT to_regnamespace('seckill') IS NULL`); !got {
		t.Error("Status created something")
	}
	if err := migrations.Check(t.Context(), conn); !errors.As(err, new(*migrations.SchemaTooOldError)) {
		t.Errorf("Check of an empty database: %v", err)
	}
	for round := range 2 {
		done, err := migrations.Up(t.Context(), url, reference)
		if err != nil || len(done) != len(everything) {
			t.Fatalf("round %d: up applied %d steps, %v", round, len(done), err)
		}
		if diff := cmp.Diff(everything, applied(t, url)); diff != "" {
			t.Errorf("round %d: applied (-want +got):\n%s", round, diff)
		}
		if err := migrations.Check(t.Context(), conn); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		if problems := all(t, conn, `SELECT seckill.fence_problems()`); len(problems) > 0 {
			t.Errorf("round %d: %s", round, problems)
		}
		if done, err = migrations.Up(t.Context(), url, reference); err != nil || len(done) != 0 {
			t.Errorf("round %d: up again applied %v, %v", round, done, err)
		}
		downTo(t, url, orderFence)
		referenceDownTo(t, url, shopTables)
		if _, err := migrations.Down(t.Context(), url, migrations.Options{}); state(err) != "2BP01" {
			t.Errorf("round %d: down below the reference schema: %v; the trigger depends on it", round, err)
		}
		for _, o := range []migrations.Options{reference, {}, {}, {}} {
			if done, err = migrations.Down(t.Context(), url, o); err != nil || len(done) != 1 {
				t.Fatalf("round %d: down rolled back %v, %v", round, done, err)
			}
		}
		if done, err = migrations.Down(t.Context(), url, migrations.Options{}); err != nil || len(done) != 0 {
			t.Errorf("round %d: down of nothing rolled back %v, %v", round, done, err)
		}
		if left := all(t, conn, `SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'seckill'::regnamespace AND relkind IN ('r', 'v')
			UNION ALL SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'seckill'::regnamespace ORDER BY 1`); !cmp.Equal(left,
			[]string{"seckill.reference_version", "seckill.schema_version"}) {
			t.Errorf("round %d: left behind: %v", round, left)
		}
	}
}

// Without the reference schema nothing is answered about orders, least of all
// that there are none.
func TestEvidenceIsUnknownUntilInstalled(t *testing.T) {
	t.Parallel()
	url := stacktest.EmptyDatabase(t, stacktest.Shared(t))
	if _, err := migrations.Up(t.Context(), url, migrations.Options{}); err != nil {
		t.Fatal(err)
	}
	conn := connect(t, url)
	refused(t, conn, "SK013", `SELECT order_id FROM seckill.order_evidence WHERE reservation_id = ANY ('{r1}')`)
	refused(t, conn, "SK013", `SELECT count(*) FROM unnest('{r1}'::text[]) AS i (id)
		LEFT JOIN (SELECT reservation_id FROM seckill.order_evidence WHERE reservation_id = 'r1') AS o ON o.reservation_id = i.id`)
	refused(t, conn, "SK010", `SELECT seckill.fence_reservations('{r1}', 'test', NULL)`)
	problems := strings.Join(all(t, conn, `SELECT seckill.fence_problems()`), "\n")
	for _, want := range []string{"no order table has the fence", "migrate evidence"} {
		if !strings.Contains(problems, want) {
			t.Errorf("problems %q do not say %q", problems, want)
		}
	}
}

func TestSchemaNewerThanTheBinary(t *testing.T) {
	t.Parallel()
	url := stacktest.EmptyDatabase(t, stacktest.Shared(t))
	if _, err := migrations.Up(t.Context(), url, migrations.Options{}); err != nil {
		t.Fatal(err)
	}
	conn := connect(t, url)
	exec(t, conn, `INSERT INTO seckill.schema_version (version_id, is_applied) VALUES ($1, true)`, migrations.Latest()+1)
	if err := migrations.Check(t.Context(), conn); !errors.As(err, new(*migrations.SchemaTooNewError)) {
		t.Errorf("Check: %v", err)
	}
	for name, operation := range map[string]func() error{
		"up":   func() error { _, err := migrations.Up(t.Context(), url, migrations.Options{}); return err },
		"down": func() error { _, err := migrations.Down(t.Context(), url, migrations.Options{}); return err },
	} {
		if err := operation(); !errors.As(err, new(*migrations.SchemaTooNewError)) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestDownKeepsClaimsAndOrders(t *testing.T) {
	t.Parallel()
	a := newAdopter(t)
	exec(t, a.super, `INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		VALUES ('o1', 'r1', 'q1', 'a', 's', 1, 0, 'u')`)
	referenceDownTo(t, a.url, shopTables)
	if _, err := migrations.Down(t.Context(), a.url, migrations.Options{WithReference: true}); err == nil {
		t.Error("the reference schema was dropped with its orders")
	}
	exec(t, a.super, `DELETE FROM shop.orders`)
	downTo(t, a.url, orderFence)
	for _, o := range []migrations.Options{{WithReference: true}, {}, {}} {
		if _, err := migrations.Down(t.Context(), a.url, o); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := migrations.Down(t.Context(), a.url, migrations.Options{}); err == nil {
		t.Error("claims were dropped")
	}
	if diff := cmp.Diff(map[string]string{"r1": "ORDER:o1"}, a.claims(t)); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
}

func TestTwoUpsAtOnce(t *testing.T) {
	t.Parallel()
	url := stacktest.EmptyDatabase(t, stacktest.Shared(t))
	var group sync.WaitGroup
	steps, failures := make([]int, 3), make([]error, 3)
	for i := range steps {
		group.Go(func() {
			done, err := migrations.Up(t.Context(), url, migrations.Options{WithReference: true})
			steps[i], failures[i] = len(done), err
		})
	}
	group.Wait()
	if err := errors.Join(failures...); err != nil || steps[0]+steps[1]+steps[2] != len(known(t, url)) {
		t.Errorf("steps applied by each: %v, %v; want %d in all", steps, err, len(known(t, url)))
	}
}

// Roles belong to the server: databases that are migrated side by side race
// for them.
func TestRolesAreCreatedByManyDatabasesAtOnce(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Postgres: true})
	const databases = 50
	super := connect(t, stack.PostgresURL("postgres", "postgres"))
	for i := range databases {
		exec(t, super, fmt.Sprintf(`CREATE DATABASE d%d`, i))
	}
	failures := make([]error, databases)
	var group sync.WaitGroup
	for i := range databases {
		group.Go(func() {
			_, failures[i] = migrations.Up(t.Context(), stack.PostgresURL(fmt.Sprintf("d%d", i), "postgres"), migrations.Options{WithReference: true})
		})
	}
	group.Wait()
	if err := errors.Join(failures...); err != nil {
		t.Error(err)
	}
	if got := get[int](t, super, `SELECT count(*)::int FROM pg_roles WHERE rolname LIKE 'seckill\_%'`); got != 4 {
		t.Errorf("%d roles, want 4", got)
	}
}

// Nothing needs a superuser: an ordinary owner of the schema migrates, installs
// the view and gives the daemon what it needs.
func TestOrdinaryOwner(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	url := stacktest.EmptyDatabase(t, stack)
	ownerURL := stacktest.LoginURL(t, stack, url, "adopter_migrator")
	daemonURL := stacktest.LoginURL(t, stack, url, "seckill_daemon")
	super := connect(t, url)
	exec(t, super, fmt.Sprintf(`GRANT CREATE ON DATABASE %s TO adopter_migrator`, get[string](t, super, `SELECT current_database()`)))
	if _, err := migrations.Up(t.Context(), ownerURL, migrations.Options{WithReference: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := migrations.InstallEvidence(t.Context(), ownerURL, `SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, status <> 'CANCELLED' AS active, created_at FROM shop.orders`); err != nil {
		t.Fatal(err)
	}
	// A view is read with its owner's rights: who installs it may have more.
	exec(t, super, `CREATE SCHEMA private; CREATE TABLE private.orders AS TABLE shop.orders`)
	_, err := migrations.InstallEvidence(t.Context(), url, `SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id,
		true AS active, created_at FROM private.orders`)
	if refusal, ok := errors.AsType[*migrations.EvidenceError](err); !ok || !strings.Contains(refusal.Error(), "owner's rights") {
		t.Errorf("a table that the owner may not read: %v", err)
	}
	if _, err := migrations.InstallEvidence(t.Context(), url, get[string](t, super, `SELECT pg_get_viewdef('seckill.order_evidence'::regclass)`)); err != nil {
		t.Errorf("installed by a superuser: %v", err)
	}
	if got := get[string](t, super, `SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'seckill.order_evidence'::regclass`); got != "test_adopter_migrator" {
		t.Errorf("the view belongs to %s", got)
	}
	daemon := connect(t, daemonURL)
	if got := get[bool](t, daemon, `SELECT won FROM seckill.fence_reservations('{r1}', 'test', '{a:1:s:2:v:3:b:4}')`); !got {
		t.Error("the daemon cannot fence")
	}
	consumerURL := stacktest.LoginURL(t, stack, url, "seckill_consumer")
	refused(t, connect(t, consumerURL), "SK001", `INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		VALUES ('o1', 'r1', 'q1', 'a', 's', 1, 0, 'u')`)
}

// Each role may do its part and nothing more.
func TestRights(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	url := stacktest.Database(t, stack)
	tests := []struct {
		role    string
		allowed []string
		denied  []string
	}{
		{
			"seckill_consumer",
			[]string{`SELECT seckill.claim_reservation('r1')`, `SELECT seckill.reject_reservation('r2', 'no_stock')`, `SELECT FROM shop.orders`},
			[]string{
				`SELECT FROM seckill.reservation_claim`, `SELECT FROM seckill.order_evidence`, `SELECT seckill.fence_reservations('{r}', 'x', NULL)`,
				`SELECT seckill.purge_claims('2000-01-01')`, `INSERT INTO seckill.reservation_claim (reservation_id, outcome) VALUES ('r', 'ORDER')`,
				`SELECT seckill.claim_once(NULL)`, `SELECT seckill.install_order_fence('shop.orders', 'reservation_id', 'order_id')`,
				`SELECT FROM seckill.manual_task`,
			},
		},
		{
			"seckill_daemon",
			[]string{
				`SELECT FROM seckill.reservation_claim`, `SELECT FROM seckill.order_evidence`, `SELECT seckill.fence_reservations('{r}', 'x', NULL)`,
				`SELECT seckill.fence_problems()`, `SELECT FROM seckill.audit_log`, `SELECT FROM seckill.schema_version`,
			},
			[]string{
				`INSERT INTO seckill.reservation_claim (reservation_id, outcome) VALUES ('r', 'FENCED')`, `DELETE FROM seckill.reservation_claim`,
				`SELECT seckill.claim_reservation('r1')`, `SELECT seckill.claim_once(NULL)`, `SELECT FROM shop.orders`,
				`UPDATE seckill.audit_log SET actor = 'x'`, `DELETE FROM seckill.audit_log`, `DELETE FROM seckill.expected_queue`,
				`INSERT INTO seckill.lookup_table (relation, reason) VALUES ('shop.orders', 'x')`, `UPDATE seckill.order_table SET backfilled_at = now()`,
				`SELECT seckill.register_order_table(NULL)`,
			},
		},
		{
			"seckill_operator",
			[]string{`DELETE FROM seckill.expected_queue`, `SELECT FROM seckill.lookup_table`, `SELECT seckill.purge_claims('2000-01-01')`, `SELECT FROM shop.stock`},
			[]string{`DELETE FROM seckill.reservation_claim`, `DELETE FROM seckill.audit_log`, `UPDATE seckill.order_table SET backfilled_at = now()`},
		},
		{
			adopterConsumer, nil,
			[]string{`SELECT seckill.claim_reservation('r1')`, `SELECT FROM seckill.scope`},
		},
	}
	for _, tt := range tests {
		t.Run(tt.role, func(t *testing.T) {
			conn := connect(t, stacktest.LoginURL(t, stack, url, tt.role))
			for _, sql := range tt.allowed {
				exec(t, conn, sql)
			}
			for _, sql := range tt.denied {
				refused(t, conn, "42501", sql)
			}
		})
	}
}

// The view that says where the counter of sold units is: over the reference
// schema's stock, unless an adopter has made one, and read by the daemon alone.
func TestStockEvidence(t *testing.T) {
	t.Parallel()
	url := stacktest.EmptyDatabase(t, stacktest.Shared(t))
	conn := connect(t, url)
	if _, err := migrations.Up(t.Context(), url, migrations.Options{}); err != nil {
		t.Fatal(err)
	}
	exists := `SELECT to_regclass('seckill.stock_evidence') IS NOT NULL`
	if get[bool](t, conn, exists) {
		t.Error("there is a view without a stock table")
	}
	exec(t, conn, `CREATE VIEW seckill.stock_evidence AS SELECT 'own' AS activity_id, 's' AS sku_id, 1::bigint AS activity_version, 5 AS total, 2 AS sold`)
	reference := migrations.Options{WithReference: true}
	if _, err := migrations.Up(t.Context(), url, reference); err != nil {
		t.Fatal(err)
	}
	referenceDownTo(t, url, shopTables)
	if got := get[string](t, conn, `SELECT activity_id FROM seckill.stock_evidence`); got != "own" {
		t.Errorf("an adopter's view was replaced: %q", got)
	}
	exec(t, conn, `DROP VIEW seckill.stock_evidence`)
	if _, err := migrations.Up(t.Context(), url, reference); err != nil {
		t.Fatal(err)
	}
	exec(t, conn, `INSERT INTO shop.stock (activity_id, sku_id, activity_version, total, sold) VALUES ('a', 's', 1, 9, 4)`)
	daemon := connect(t, stacktest.LoginURL(t, stacktest.Shared(t), url, "seckill_daemon"))
	if got := get[int64](t, daemon, `SELECT sold FROM seckill.stock_evidence WHERE activity_id = 'a'`); got != 4 {
		t.Errorf("the daemon reads %d", got)
	}
	referenceDownTo(t, url, shopTables)
	if get[bool](t, conn, exists) {
		t.Error("the view outlives its step")
	}
}
