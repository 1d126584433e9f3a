package stacktest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/migrations"
)

const superuser = "postgres"

// adminLock is the advisory lock, on the database postgres, under which tests
// create what they share: login roles and the template database.
const adminLock = 7410

// Database creates a database that only this test has, with schema seckill and
// the reference schema shop, and returns its URL for the superuser. It is
// dropped with the test, connections or not.
func Database(tb testing.TB, stack *devstack.Stack) string {
	tb.Helper()
	return createDatabase(tb, stack, func(ctx context.Context, conn *pgx.Conn, name string) error {
		template, err := ensureTemplate(ctx, conn, stack)
		if err != nil {
			return err
		}
		_, err = conn.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE "+template)
		return err
	})
}

// EmptyDatabase is [Database] without any schema, for tests of the migrations.
func EmptyDatabase(tb testing.TB, stack *devstack.Stack) string {
	tb.Helper()
	return createDatabase(tb, stack, func(ctx context.Context, conn *pgx.Conn, name string) error {
		_, err := conn.Exec(ctx, "CREATE DATABASE "+name)
		return err
	})
}

func createDatabase(tb testing.TB, stack *devstack.Stack, create func(context.Context, *pgx.Conn, string) error) string {
	tb.Helper()
	name := "t_" + unique()
	admin(tb, stack, func(ctx context.Context, conn *pgx.Conn) error { return create(ctx, conn, name) })
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

// ensureTemplate returns the migrated database that others are copied from. The
// first test that needs it makes it, under another name until it is complete.
// Its name has the hash of the migrations, so that a changed file gives a new one.
func ensureTemplate(ctx context.Context, conn *pgx.Conn, stack *devstack.Stack) (string, error) {
	hash, err := migrationsHash()
	if err != nil {
		return "", err
	}
	name := "template_" + hash
	return name, inLock(ctx, conn, func() error {
		var exists bool
		err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name).Scan(&exists)
		if err != nil || exists {
			return err
		}
		fresh := name + "_new"
		for _, sql := range []string{"DROP DATABASE IF EXISTS " + fresh + " WITH (FORCE)", "CREATE DATABASE " + fresh} {
			if _, err := conn.Exec(ctx, sql); err != nil {
				return err
			}
		}
		if _, err := migrations.Up(ctx, stack.PostgresURL(fresh, superuser), migrations.Options{WithReference: true}); err != nil {
			return err
		}
		_, err = conn.Exec(ctx, "ALTER DATABASE "+fresh+" RENAME TO "+name)
		return err
	})
}

// migrationsHash is over the sources, SQL and Go: both decide what is created.
var migrationsHash = sync.OnceValues(func() (string, error) {
	root, err := devstack.ModuleRoot()
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	dir := os.DirFS(filepath.Join(root, "migrations"))
	err = fs.WalkDir(dir, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || strings.HasSuffix(path, "_test.go") {
			return err
		}
		content, err := fs.ReadFile(dir, path)
		_, _ = fmt.Fprintf(sum, "%s %d\n%s", path, len(content), content) // a hash takes everything
		return err
	})
	if err != nil {
		return "", fmt.Errorf("read the migrations: %w", err)
	}
	return hex.EncodeToString(sum.Sum(nil)[:8]), nil
})

// LoginURL is the URL of the same database for a login role that is a member
// of the group roles, such as seckill_consumer, and has no other rights. Roles
// that are absent are created; all tests of the stack share them.
func LoginURL(tb testing.TB, stack *devstack.Stack, databaseURL string, groups ...string) string {
	tb.Helper()
	login := "test_" + strings.Join(groups, "_")
	admin(tb, stack, func(ctx context.Context, conn *pgx.Conn) error {
		return inLock(ctx, conn, func() error { return devstack.EnsureLogin(ctx, conn, login, groups...) })
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
