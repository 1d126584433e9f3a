package devstack

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	postgresName = "postgres"
	superuser    = "postgres"
	// account runs PostgreSQL when we are root, which it refuses to be run by.
	account = "postgres"
)

// postgresSettings: commits are real (synchronous_commit on, the default), but
// nothing is forced to disk: a killed server loses nothing, a power cut may.
var postgresSettings = []string{
	"listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=300",
	"fsync=off", "full_page_writes=off", "synchronous_commit=on",
	"shared_buffers=128MB", "max_wal_size=2GB", "timezone=UTC",
}

// PostgresURL is a connection URL for a database and a role. Passwords are not
// asked for: the server listens on loopback only.
func (s *Stack) PostgresURL(database, role string) string {
	return postgresURL(s.Postgres().Addr(), database, role)
}

func postgresURL(host, database, role string) string {
	u := url.URL{Scheme: "postgres", User: url.User(role), Host: host, Path: "/" + database, RawQuery: "sslmode=disable"}
	return u.String()
}

func (s *Stack) bringUpPostgres(ctx context.Context) error {
	if !s.parts.Postgres {
		return nil
	}
	if err := s.choosePostgresDir(); err != nil {
		return err
	}
	svc, err := s.service(postgresName, 1, 0, s.definePostgres)
	if err != nil {
		return err
	}
	if err := s.initPostgres(ctx, svc); err != nil {
		return err
	}
	return s.run(ctx, svc)
}

func (s *Stack) definePostgres(rec *record) error {
	rec.Kind, rec.Version = kindPostgres, s.install.postgres.version
	rec.Launch.Path = filepath.Join(s.install.postgres.path, "postgres")
	rec.Launch.User = postgresAccount()
	rec.Launch.Args = []string{"-D", filepath.Join(rec.Dir, "data"), "-p", strconv.Itoa(rec.Port)}
	for _, setting := range append(postgresSettings, s.opts.PostgresSettings...) {
		rec.Launch.Args = append(rec.Launch.Args, "-c", setting)
	}
	return nil
}

// postgresAccount is the account to run as; "" is our own.
func postgresAccount() string {
	if os.Geteuid() == 0 {
		return account
	}
	return ""
}

// choosePostgresDir moves the data out of a directory that PostgreSQL's account
// cannot reach, such as a checkout under /root.
func (s *Stack) choosePostgresDir() error {
	if s.postgresDir != "" || postgresAccount() == "" || traversable(s.dir) {
		return nil
	}
	dir, err := os.MkdirTemp("", "devstack-postgres-")
	if err != nil {
		return fmt.Errorf("create a directory for PostgreSQL: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.postgresDir = dir
	return nil
}

// traversable reports whether every account may pass through dir.
func traversable(dir string) bool {
	for {
		info, err := os.Stat(dir)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return false
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return true
		}
		dir = parent
	}
}

// initPostgres makes an empty cluster under another name first: an interrupted
// initdb leaves a directory that looks complete.
func (s *Stack) initPostgres(ctx context.Context, svc *Service) error {
	data := filepath.Join(svc.Dir(), "data")
	if _, err := os.Stat(data); err == nil {
		return nil
	}
	fresh := data + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("clear an interrupted initdb: %w", err)
	}
	if err := giveTo(svc.Dir(), postgresAccount()); err != nil {
		return err
	}
	err := s.postgresTool(ctx, svc.Dir(), "initdb", "-D", fresh,
		"-U", superuser, "-A", "trust", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8")
	if err != nil {
		return fmt.Errorf("create the PostgreSQL data directory: %w", err)
	}
	if err := os.Rename(fresh, data); err != nil {
		return fmt.Errorf("create the PostgreSQL data directory: %w", err)
	}
	return nil
}

// postgresTool runs one of PostgreSQL's programs, as the account that runs the
// server, to its end.
func (s *Stack) postgresTool(ctx context.Context, dir, name string, args ...string) error {
	l, err := launch{Path: filepath.Join(s.install.postgres.path, name), User: postgresAccount()}.command()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, l.Path, args...)
	cmd.Dir, cmd.SysProcAttr = dir, l.SysProcAttr
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", name, err, out)
	}
	return nil
}

// giveTo makes the path the account's; "" is our own.
func giveTo(path, name string) error {
	if name == "" {
		return nil
	}
	cred, err := credential(name)
	if err != nil {
		return err
	}
	if err := os.Chown(path, int(cred.Uid), int(cred.Gid)); err != nil {
		return fmt.Errorf("give %s to %s: %w", path, name, err)
	}
	return nil
}

func pingPostgres(ctx context.Context, dsn string) error {
	return withPostgres(ctx, dsn, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SELECT 1")
		return err
	})
}

func withPostgres(ctx context.Context, dsn string, do func(*pgx.Conn) error) (err error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return do(conn)
}

// Database is the database that the environment file names.
const Database = "seckill"

// The login roles that the environment file names, for the daemon and for the
// simulated order consumer.
const (
	daemonLogin   = "reconciler"
	consumerLogin = "shop_consumer"
)

// PrepareDatabase creates [Database] and the login roles `reconciler` (daemon
// and operator) and `shop_consumer`, each only if it is absent.
func (s *Stack) PrepareDatabase(ctx context.Context) error {
	err := withPostgres(ctx, s.PostgresURL("postgres", superuser), func(conn *pgx.Conn) error {
		if err := EnsureRole(ctx, conn, "seckill_installer", "NOLOGIN"); err != nil {
			return err
		}
		if err := EnsureLogin(ctx, conn, daemonLogin, "seckill_daemon", "seckill_operator"); err != nil {
			return err
		}
		if err := EnsureLogin(ctx, conn, consumerLogin, "seckill_consumer"); err != nil {
			return err
		}
		var exists bool
		if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", Database).Scan(&exists); err != nil || exists {
			return err
		}
		_, err := conn.Exec(ctx, "CREATE DATABASE "+Database)
		return err
	})
	if err != nil {
		return fmt.Errorf("prepare database %s and its roles: %w", Database, err)
	}
	return nil
}

// EnsureLogin makes a login role a member of group roles, creating what is
// absent. The migrations create the group roles too; they are made here so that
// a login is their member whichever comes first.
func EnsureLogin(ctx context.Context, conn *pgx.Conn, login string, groups ...string) error {
	if err := EnsureRole(ctx, conn, login, "LOGIN"); err != nil {
		return err
	}
	for _, group := range groups {
		if err := EnsureRole(ctx, conn, group, "NOLOGIN"); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, "GRANT "+quote(group)+" TO "+quote(login)); err != nil {
			return fmt.Errorf("make role %s a member of %s: %w", login, group, err)
		}
	}
	return nil
}

// EnsureRole creates a role with an attribute, LOGIN or NOLOGIN, if it is
// absent. Roles belong to the whole server: another database's migration may
// be creating the same one.
func EnsureRole(ctx context.Context, conn *pgx.Conn, name, attribute string) error {
	var exists bool
	err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", name).Scan(&exists)
	if err == nil && !exists {
		_, err = conn.Exec(ctx, "CREATE ROLE "+quote(name)+" "+attribute)
	}
	const duplicateObject, uniqueViolation = "42710", "23505"
	refused, ok := errors.AsType[*pgconn.PgError](err)
	if err == nil || ok && (refused.Code == duplicateObject || refused.Code == uniqueViolation) {
		return nil
	}
	return fmt.Errorf("create role %s: %w", name, err)
}

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }
