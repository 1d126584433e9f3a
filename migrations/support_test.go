package migrations_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
)

// adopter is a database with an order table that is not ours, in a schema of
// its own: owner is a member of seckill_installer, consumer has no right on
// schema seckill at all.
type adopter struct {
	url                    string // of the superuser
	super, owner, consumer *pgx.Conn
}

const adopterConsumer = "adopter_consumer"

func newAdopter(t *testing.T) adopter {
	t.Helper()
	stack := stacktest.Shared(t)
	url := stacktest.Database(t, stack)
	a := adopter{url: url, super: connect(t, url)}
	ownerURL := stacktest.LoginURL(t, stack, url, "seckill_installer")
	consumerURL := stacktest.LoginURL(t, stack, url, adopterConsumer)
	exec(t, a.super, `CREATE SCHEMA adopter AUTHORIZATION test_seckill_installer`)
	a.owner, a.consumer = connect(t, ownerURL), connect(t, consumerURL)
	exec(t, a.owner, `GRANT USAGE ON SCHEMA adopter TO adopter_consumer`)
	exec(t, a.owner, `ALTER DEFAULT PRIVILEGES IN SCHEMA adopter GRANT ALL ON TABLES TO adopter_consumer`)
	return a
}

// newOrders is an adopter with a fenced table adopter.orders.
func newOrders(t *testing.T) adopter {
	t.Helper()
	a := newAdopter(t)
	exec(t, a.owner, `CREATE TABLE adopter.orders (
		order_id text PRIMARY KEY, reservation_id varchar(64), user_id int NOT NULL, active boolean NOT NULL DEFAULT true, qty int NOT NULL DEFAULT 1)`)
	exec(t, a.owner, `CREATE UNIQUE INDEX ON adopter.orders (user_id) WHERE active`)
	exec(t, a.owner, `SELECT seckill.install_order_fence('adopter.orders', 'reservation_id', 'order_id', '{"user_id": "user_id"}')`)
	return a
}

// fence is the daemon's fence, for one id.
func (a adopter) fence(t *testing.T, id string) (outcome string, won bool) {
	t.Helper()
	var got *string
	if err := a.super.QueryRow(t.Context(), `SELECT outcome, won FROM seckill.fence_reservations(ARRAY[$1], 'test', NULL)`, id).Scan(&got, &won); err != nil {
		t.Fatalf("fence %s: %v", id, err)
	}
	if got != nil {
		outcome = *got
	}
	return outcome, won
}

// claims are the claims in force, as outcome or outcome:order_id.
func (a adopter) claims(t *testing.T) map[string]string {
	t.Helper()
	rows, err := a.super.Query(t.Context(), `SELECT reservation_id, outcome || coalesce(':' || order_id, '') FROM seckill.reservation_claim`)
	if err != nil {
		t.Fatal(err)
	}
	claims := map[string]string{}
	var id, claim string
	if _, err := pgx.ForEachRow(rows, []any{&id, &claim}, func() error {
		claims[id] = claim
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return claims
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func exec(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// refused runs sql, which the server must refuse with the SQLSTATE.
func refused(t *testing.T, conn *pgx.Conn, want, sql string, args ...any) {
	t.Helper()
	_, err := conn.Exec(t.Context(), sql, args...)
	if got := state(err); got != want {
		t.Errorf("%s: %v; want SQLSTATE %s", sql, err, want)
	}
}

func state(err error) string {
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok {
		return refused.Code
	}
	return ""
}

func get[T any](t *testing.T, conn *pgx.Conn, sql string, args ...any) T {
	t.Helper()
	var value T
	if err := conn.QueryRow(t.Context(), sql, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

func all(t *testing.T, conn *pgx.Conn, sql string, args ...any) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	values, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return values
}

// waitFor asks until the server says true; the test's own time limit ends it.
func waitFor(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	for !get[bool](t, conn, sql, args...) {
		exec(t, conn, `SELECT pg_sleep(0.01)`)
	}
}
