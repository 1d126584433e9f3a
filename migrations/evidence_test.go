package migrations_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/migrations"
)

// adopterQuery is a view over order lines with other names, types and
// statuses, and without a bucket.
const adopterQuery = `-- our orders
	SELECT l.reservation AS reservation_id, l.order_no AS order_id, max(l.request) AS request_id, 'act'::varchar AS activity_id, max(l.sku) AS sku_id,
	       7::smallint AS activity_version, NULL AS bucket_id, max(l.customer) AS user_id, bool_or(l.status = 3) AS active, min(l.at)::date AS created_at
	FROM adopter.lines AS l GROUP BY l.reservation, l.order_no;  -- one row per order
`

func newLines(t *testing.T) adopter {
	t.Helper()
	a := newAdopter(t)
	exec(t, a.owner, `CREATE TABLE adopter.lines (order_no bigint NOT NULL, reservation varchar(64), request uuid DEFAULT gen_random_uuid(),
		sku text DEFAULT 'sku', customer bigint DEFAULT 1, status int DEFAULT 3, at timestamp DEFAULT now());
		CREATE INDEX ON adopter.lines (reservation)`)
	return a
}

func TestInstallEvidence(t *testing.T) {
	t.Parallel()
	a := newLines(t)
	exec(t, a.owner, `ALTER TABLE adopter.lines ALTER request TYPE text`)
	result, err := migrations.InstallEvidence(t.Context(), a.url, adopterQuery)
	if err != nil {
		t.Fatal(err)
	}
	if len(result.Problems) != 1 || !strings.Contains(result.Problems[0], "adopter.lines is read by order_evidence") {
		t.Errorf("problems %q, want the table without a fence", result.Problems)
	}
	exec(t, a.owner, `SELECT seckill.install_order_fence('adopter.lines', 'reservation', 'order_no')`)
	exec(t, a.consumer, `INSERT INTO adopter.lines (order_no, reservation) VALUES (1, 'r1'), (1, 'r1'), (2, NULL)`)
	if result, err = migrations.InstallEvidence(t.Context(), a.url, adopterQuery); err != nil || len(result.Problems) != 0 {
		t.Errorf("with the fence: %q, %v", result.Problems, err)
	}
	daemon := connect(t, stacktest.LoginURL(t, stacktest.Shared(t), a.url, "seckill_daemon"))
	if got := get[string](t, daemon, `SELECT concat_ws(' ', order_id, activity_id, sku_id, activity_version, coalesce(bucket_id, -1), user_id, active)
		FROM seckill.order_evidence WHERE reservation_id = ANY ('{r1}')`); got != "1 act sku 7 -1 1 t" {
		t.Errorf("order: %s", got)
	}
	want := []string{
		"reservation_id text", "order_id text", "request_id text", "activity_id text", "sku_id text", "activity_version bigint",
		"bucket_id bigint", "user_id text", "active boolean", "created_at timestamp with time zone",
	}
	columns := all(t, a.super, `SELECT attname || ' ' || format_type(atttypid, atttypmod) FROM pg_attribute
		WHERE attrelid = 'seckill.order_evidence'::regclass AND attnum > 0 ORDER BY attnum`)
	if diff := cmp.Diff(want, columns); diff != "" {
		t.Errorf("columns (-want +got):\n%s", diff)
	}
	if got := get[int](t, a.super, `SELECT count(*)::int FROM seckill.audit_log WHERE action = 'evidence_installed'`); got != 2 {
		t.Errorf("%d audit entries, want 2", got)
	}
}

func TestInstallEvidenceRefusals(t *testing.T) {
	t.Parallel()
	a := newLines(t)
	exec(t, a.super, `CREATE VIEW adopter.invoker WITH (security_invoker) AS TABLE shop.orders;
		CREATE VIEW adopter.nested AS TABLE adopter.invoker`)
	exec(t, a.super, `CREATE FUNCTION adopter.hidden() RETURNS SETOF shop.orders LANGUAGE sql AS 'TABLE shop.orders'`)
	const columns = `order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, true AS active, created_at`
	shipped := get[string](t, a.super, `SELECT seckill.evidence_hash()`)
	for name, tt := range map[string]struct{ query, want string }{
		"two statements":      {`SELECT 1; DROP TABLE shop.orders`, "multiple commands"},
		"two harmless ones":   {adopterQuery + `SELECT 1`, "multiple commands"},
		"no SELECT":           {`DELETE FROM shop.orders RETURNING *`, "one SELECT"},
		"a writing WITH":      {`WITH x AS (DELETE FROM shop.orders RETURNING *) SELECT * FROM x`, "one SELECT"},
		"a whole CREATE VIEW": {`CREATE VIEW v WITH (security_invoker) AS SELECT ` + columns + ` FROM shop.orders`, "one SELECT"},
		"parameters":          {`SELECT ` + columns + ` FROM shop.orders WHERE user_id = $1`, "one SELECT"},
		"nothing":             {``, "one SELECT"},
		"syntax":              {`SELECT FROM WHERE`, "syntax error"},
		"missing columns":     {`SELECT order_id, reservation_id FROM shop.orders`, "request_id, activity_id, sku_id, activity_version, bucket_id, user_id, active, created_at"},
		"a cast that fails":   {`SELECT ` + strings.Replace(columns, "true AS active", "now() AS active", 1) + ` FROM shop.orders`, "cannot cast"},
		"security_invoker":    {`SELECT ` + columns + ` FROM adopter.nested`, "security_invoker"},
		"a function":          {`SELECT ` + columns + ` FROM adopter.hidden()`, "adopter.hidden()"},
	} {
		_, err := migrations.InstallEvidence(t.Context(), a.url, tt.query)
		if refusal, ok := errors.AsType[*migrations.EvidenceError](err); !ok || !strings.Contains(refusal.Error(), tt.want) {
			t.Errorf("%s: %v; want an EvidenceError with %q", name, err, tt.want)
		}
	}
	if got := get[string](t, a.super, `SELECT seckill.evidence_hash()`); got != shipped {
		t.Error("a refused query changed the view")
	}
	exec(t, a.super, `SELECT FROM shop.orders`) // and nothing was dropped
}

// The view is ours only while it is exactly what was shipped.
func TestAdoptersViewIsNeverReplaced(t *testing.T) {
	t.Parallel()
	const own = `SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, true AS active, created_at FROM shop.orders`
	reference := migrations.Options{WithReference: true}
	for name, change := range map[string]string{
		"replaced, the mark is left": `CREATE OR REPLACE VIEW seckill.order_evidence AS ` + own,
		"dropped and created":        `DROP VIEW seckill.order_evidence; CREATE VIEW seckill.order_evidence AS ` + own,
		"created with a copied mark": `DO $$ DECLARE mark text := obj_description('seckill.order_evidence'::regclass, 'pg_class'); BEGIN
			DROP VIEW seckill.order_evidence; CREATE VIEW seckill.order_evidence AS ` + own + `;
			EXECUTE format('COMMENT ON VIEW seckill.order_evidence IS %L', mark); END $$`,
		"mark removed": `COMMENT ON VIEW seckill.order_evidence IS NULL`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAdopter(t)
			exec(t, a.super, change)
			if get[bool](t, a.super, `SELECT seckill.evidence_is_shipped()`) {
				t.Error("taken for the shipped view")
			}
			before := get[string](t, a.super, `SELECT seckill.evidence_hash()`)
			if get[bool](t, a.super, `SELECT seckill.ship_evidence('SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, active, created_at FROM seckill.no_evidence()')`) {
				t.Error("replaced by ship_evidence")
			}
			// The reference schema cannot go while the adopter's view reads it,
			// and coming back it leaves the view alone.
			referenceDownTo(t, a.url, shopTables)
			if _, err := migrations.Down(t.Context(), a.url, reference); err == nil {
				t.Error("shop was dropped below the adopter's view")
			}
			exec(t, a.super, `DELETE FROM seckill.reference_version WHERE version_id = 1; ALTER SCHEMA shop RENAME TO kept`)
			renamed := get[string](t, a.super, `SELECT seckill.evidence_hash()`)
			if _, err := migrations.Up(t.Context(), a.url, reference); err != nil {
				t.Fatal(err)
			}
			if got := get[string](t, a.super, `SELECT seckill.evidence_hash()`); got != renamed {
				t.Errorf("the view was replaced (it was %s before)", before)
			}
		})
	}
	t.Run("the shipped one follows", func(t *testing.T) {
		t.Parallel()
		a := newAdopter(t)
		if !get[bool](t, a.super, `SELECT seckill.evidence_is_shipped()`) {
			t.Error("the shipped view is not taken for it")
		}
		referenceDownTo(t, a.url, shopTables)
		if _, err := migrations.Down(t.Context(), a.url, reference); err != nil {
			t.Fatal(err)
		}
		refused(t, a.super, "SK013", `TABLE seckill.order_evidence`)
	})
	t.Run("another search_path does not matter", func(t *testing.T) {
		t.Parallel()
		a := newAdopter(t)
		exec(t, a.super, `SET search_path = shop, seckill, public`)
		if !get[bool](t, a.super, `SELECT seckill.evidence_is_shipped()`) {
			t.Error("the shipped view is not taken for it")
		}
	})
}
