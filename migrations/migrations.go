// Package migrations holds the numbered SQL of schema seckill and of the
// reference order schema shop, and applies it.
//
// Versions are kept in seckill.schema_version (and seckill.reference_version
// for shop). Changes expand first and contract in a later version, so that two
// neighbouring versions of the daemon run on one schema; a binary refuses a
// schema newer than it knows. Applying is serialised by an advisory lock per
// database.
//
// The view order_evidence is special (protocol §2): ours is replaced only
// while it is still exactly what was shipped, an adopter's never; see
// [InstallEvidence].
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

//go:embed sql/*.sql reference/*.sql
var files embed.FS

// set is one sequence of migrations with its own version table and lock.
type set struct {
	dir    string
	table  string
	lockID int64
}

var (
	schemaSet    = set{"sql", "seckill.schema_version", 0x5ec_c111_0001}
	referenceSet = set{"reference", "seckill.reference_version", 0x5ec_c111_0002}
)

// Options selects what is migrated.
type Options struct {
	// WithReference adds the reference order schema shop: Up applies it too,
	// Down rolls it back and leaves schema seckill alone.
	WithReference bool
}

// Migration is one numbered step.
type Migration struct {
	Set       string    `json:"set"` // "sql" for schema seckill, "reference" for shop
	Version   int64     `json:"version"`
	Name      string    `json:"name"`
	Applied   bool      `json:"applied"`
	AppliedAt time.Time `json:"applied_at,omitzero"`
}

// SchemaTooOldError says that migrations are missing: run "reconciler migrate up".
type SchemaTooOldError struct{ Have, Want int64 }

func (e *SchemaTooOldError) Error() string {
	return fmt.Sprintf("schema seckill is at version %d, this binary needs %d: run \"reconciler migrate up\"", e.Have, e.Want)
}

// SchemaTooNewError says that a newer binary has migrated the database.
type SchemaTooNewError struct{ Have, Want int64 }

func (e *SchemaTooNewError) Error() string {
	return fmt.Sprintf("schema seckill is at version %d, newer than the %d this binary knows: use the newer binary", e.Have, e.Want)
}

// Querier is what [Check] needs; pgx connections and pools satisfy it.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Latest is the version of schema seckill that this binary needs.
func Latest() int64 {
	latest, err := schemaSet.latest()
	if err != nil {
		panic(err) // the embedded names are wrong: every test of this package fails
	}
	return latest
}

// Check compares the schema with what this binary needs. It returns a
// [*SchemaTooOldError] or a [*SchemaTooNewError] when they differ. Roles
// seckill_daemon and seckill_operator may call it.
func Check(ctx context.Context, db Querier) error {
	var have int64
	err := db.QueryRow(ctx, `SELECT coalesce(max(version_id), 0) FROM seckill.schema_version WHERE is_applied`).Scan(&have)
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok && (refused.Code == "42P01" || refused.Code == "3F000") { // no such table, no such schema
		return &SchemaTooOldError{Want: Latest()}
	}
	if err != nil {
		return fmt.Errorf("read the version of schema seckill: %w", err)
	}
	return compare(have, Latest())
}

func compare(have, want int64) error {
	switch {
	case have < want:
		return &SchemaTooOldError{have, want}
	case have > want:
		return &SchemaTooNewError{have, want}
	}
	return nil
}

// Up applies what is missing and returns it, oldest first. The role of url
// owns, or may create, schema seckill; it needs CREATEROLE the first time that
// the server sees the seckill roles. Several Ups at once wait for each other.
func Up(ctx context.Context, url string, o Options) ([]Migration, error) {
	var applied []Migration
	err := withDB(url, func(db *sql.DB) error {
		if err := createSchema(ctx, db); err != nil {
			return err
		}
		for _, s := range o.sets() {
			results, err := s.run(ctx, db, (*goose.Provider).Up)
			applied = append(applied, results...)
			if err != nil {
				return err
			}
		}
		return nil
	})
	return applied, err
}

// Down rolls back the newest step, of shop with Options.WithReference, else of
// schema seckill, and returns it; none when nothing is applied. It refuses to
// drop claims or orders, and the fence while an order table carries it.
func Down(ctx context.Context, url string, o Options) ([]Migration, error) {
	var rolledBack []Migration
	err := withDB(url, func(db *sql.DB) error {
		sets := o.sets()
		s := sets[len(sets)-1]
		results, err := s.run(ctx, db, func(p *goose.Provider, ctx context.Context) ([]*goose.MigrationResult, error) {
			result, err := p.Down(ctx)
			if errors.Is(err, goose.ErrNoNextVersion) {
				return nil, nil
			}
			return []*goose.MigrationResult{result}, err
		})
		rolledBack = results
		return err
	})
	return rolledBack, err
}

// Status lists every step that this binary knows, and whether it is applied.
// It changes nothing.
func Status(ctx context.Context, url string) ([]Migration, error) {
	var all []Migration
	err := withDB(url, func(db *sql.DB) error {
		for _, s := range []set{schemaSet, referenceSet} {
			known, err := s.status(ctx, db)
			if err != nil {
				return err
			}
			all = append(all, known...)
		}
		return nil
	})
	return all, err
}

func (o Options) sets() []set {
	if o.WithReference {
		return []set{schemaSet, referenceSet}
	}
	return []set{schemaSet}
}

func withDB(url string, do func(*sql.DB) error) (err error) {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return fmt.Errorf("parse the PostgreSQL URL: %w", err)
	}
	db := stdlib.OpenDB(*config)
	defer func() { err = errors.Join(err, db.Close()) }()
	return do(db)
}

// createSchema makes the schema that the version tables live in. Two callers
// at once are one too many for IF NOT EXISTS.
func createSchema(ctx context.Context, db *sql.DB) error {
	_, err := db.ExecContext(ctx, `DO $$ BEGIN
		IF to_regnamespace('seckill') IS NULL THEN CREATE SCHEMA seckill; END IF;
	EXCEPTION WHEN duplicate_schema OR unique_violation THEN NULL;
	END $$`)
	if err != nil {
		return fmt.Errorf("create schema seckill: %w", err)
	}
	return nil
}

func (s set) provider(db *sql.DB, from fs.FS) (*goose.Provider, error) {
	// goose asks once a second for the lock, for at most five minutes.
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockID(s.lockID), lock.WithLockTimeout(1, 300))
	if err != nil {
		return nil, fmt.Errorf("prepare the migration lock: %w", err)
	}
	p, err := goose.NewProvider(goose.DialectPostgres, db, from, goose.WithTableName(s.table),
		goose.WithSessionLocker(locker), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return nil, fmt.Errorf("read the embedded migrations %s: %w", s.dir, err)
	}
	return p, nil
}

func (s set) sources() (fs.FS, error) {
	from, err := fs.Sub(files, s.dir)
	if err != nil {
		return nil, fmt.Errorf("read the embedded migrations %s: %w", s.dir, err)
	}
	return from, nil
}

// run applies one operation of goose to the set, unless the database is newer
// than it.
func (s set) run(ctx context.Context, db *sql.DB,
	operation func(*goose.Provider, context.Context) ([]*goose.MigrationResult, error),
) ([]Migration, error) {
	from, err := s.sources()
	if err != nil {
		return nil, err
	}
	p, err := s.provider(db, from)
	if err != nil {
		return nil, err
	}
	have, want, err := p.GetVersions(ctx)
	if err != nil {
		return nil, fmt.Errorf("read version table %s: %w", s.table, err)
	}
	if have > want {
		return nil, &SchemaTooNewError{have, want}
	}
	results, err := operation(p, ctx)
	if partial, ok := errors.AsType[*goose.PartialError](err); ok {
		results = partial.Applied
	}
	done := make([]Migration, 0, len(results))
	for _, r := range results {
		if r == nil || r.Error != nil {
			continue
		}
		up := r.Direction == "up"
		done = append(done, Migration{Set: s.dir, Version: r.Source.Version, Name: r.Source.Path, Applied: up})
	}
	if err != nil {
		return done, fmt.Errorf("migrate %s: %w", s.dir, err)
	}
	return done, nil
}

func (s set) status(ctx context.Context, db *sql.DB) ([]Migration, error) {
	from, err := s.sources()
	if err != nil {
		return nil, err
	}
	p, err := s.provider(db, from)
	if err != nil {
		return nil, err
	}
	appliedAt := map[int64]time.Time{}
	// Without goose, which would create a version table that is missing.
	var there bool
	if err := db.QueryRowContext(ctx, `SELECT to_regclass($1) IS NOT NULL`, s.table).Scan(&there); err != nil {
		return nil, fmt.Errorf("look for version table %s: %w", s.table, err)
	}
	if there {
		rows, err := db.QueryContext(ctx, `SELECT version_id, tstamp FROM `+s.table+` WHERE is_applied`) // #nosec G202 -- one of two constants
		if err != nil {
			return nil, fmt.Errorf("read version table %s: %w", s.table, err)
		}
		defer rows.Close()
		for rows.Next() {
			var version int64
			var at time.Time
			if err := rows.Scan(&version, &at); err != nil {
				return nil, fmt.Errorf("read version table %s: %w", s.table, err)
			}
			appliedAt[version] = at
		}
		if err := rows.Err(); err != nil {
			return nil, fmt.Errorf("read version table %s: %w", s.table, err)
		}
	}
	var all []Migration
	for _, source := range p.ListSources() {
		at, applied := appliedAt[source.Version]
		all = append(all, Migration{Set: s.dir, Version: source.Version, Name: source.Path, Applied: applied, AppliedAt: at})
	}
	return all, nil
}

func (s set) latest() (int64, error) {
	entries, err := files.ReadDir(s.dir)
	if err != nil {
		return 0, fmt.Errorf("read the embedded migrations %s: %w", s.dir, err)
	}
	var latest int64
	for _, entry := range entries {
		version, err := goose.NumericComponent(entry.Name())
		if err != nil {
			return 0, fmt.Errorf("migration %s: %w", entry.Name(), err)
		}
		latest = max(latest, version)
	}
	return latest, nil
}
