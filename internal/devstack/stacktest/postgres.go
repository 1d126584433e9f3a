package stacktest

import (
	"context"
	"net/url"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/internal/devstack"
)

const superuser = "postgres"

// adminLock is the advisory lock, on the database postgres, under which tests
// create what they share: login roles and the template database.
const adminLock = 7410

// Database creates a database that only this test has and returns its URL for
// the superuser. It is dropped with the test, connections or not.
func Database(tb testing.TB, stack *devstack.Stack) string {
	tb.Helper()
	name := "t_" + unique()
	admin(tb, stack, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "CREATE DATABASE "+name)
		return err
	})
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(tb.Context()), setupLimit)
		defer cancel()
		conn, err := pgx.Connect(ctx, stack.PostgresURL(superuser, superuser))
		if err != nil {
			tb.Logf("database %s stays: %v", name, err) // the test may have killed its server
			return
		}
		defer func() { _ = conn.Close(ctx) }()
		if _, err := conn.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			tb.Errorf("drop the test's database: %v", err)
		}
	})
	return stack.PostgresURL(name, superuser)
}

// LoginURL is the URL of the same database for a login role that is a member
// of the group role, such as seckill_consumer, and has no other rights. Both
// roles are created if they are absent, and shared by all tests of the stack.
func LoginURL(tb testing.TB, stack *devstack.Stack, databaseURL, group string) string {
	tb.Helper()
	login := "test_" + group
	admin(tb, stack, func(ctx context.Context, conn *pgx.Conn) error {
		return inLock(ctx, conn, func() error {
			for role, attribute := range map[string]string{group: "NOLOGIN", login: "LOGIN"} {
				if err := createRole(ctx, conn, role, attribute); err != nil {
					return err
				}
			}
			_, err := conn.Exec(ctx, "GRANT "+quote(group)+" TO "+quote(login))
			return err
		})
	})
	u, err := url.Parse(databaseURL)
	if err != nil {
		tb.Fatalf("database URL: %v", err)
	}
	u.User = url.User(login)
	return u.String()
}

// admin runs do on a connection to the database postgres.
func admin(tb testing.TB, stack *devstack.Stack, do func(context.Context, *pgx.Conn) error) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), setupLimit)
	defer cancel()
	conn, err := pgx.Connect(ctx, stack.PostgresURL(superuser, superuser))
	if err != nil {
		tb.Fatalf("connect to the test stack's PostgreSQL: %v", err)
	}
	defer func() { _ = conn.Close(ctx) }()
	if err := do(ctx, conn); err != nil {
		tb.Fatalf("prepare the test's database: %v", err)
	}
}

// inLock runs do under the advisory lock, which the connection's end frees.
func inLock(ctx context.Context, conn *pgx.Conn, do func() error) error {
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", adminLock); err != nil {
		return err
	}
	if err := do(); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, "SELECT pg_advisory_unlock($1)", adminLock)
	return err
}

func createRole(ctx context.Context, conn *pgx.Conn, name, attribute string) error {
	var exists bool
	err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", name).Scan(&exists)
	if err != nil || exists {
		return err
	}
	_, err = conn.Exec(ctx, "CREATE ROLE "+quote(name)+" "+attribute)
	return err
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }
