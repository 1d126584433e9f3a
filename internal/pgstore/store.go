package pgstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/exaring/otelpgx"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Config says how to connect.
type Config struct {
	URL              string        // as a URL or keyword=value pairs
	MaxConns         int           // in the pool; 0 means 8. The lease has one of its own
	ApplicationName  string        // shown in pg_stat_activity; empty means "reconciler"
	ConnectTimeout   time.Duration // of one connection; 0 means 3 s
	StatementTimeout time.Duration // the server ends a longer statement; 0 means 10 s
	Trace            bool          // make spans of statements, without their parameters
}

func (c Config) withDefaults() Config {
	if c.MaxConns <= 0 {
		c.MaxConns = 8
	}
	if c.ApplicationName == "" {
		c.ApplicationName = "reconciler"
	}
	if c.ConnectTimeout <= 0 {
		c.ConnectTimeout = 3 * time.Second
	}
	if c.StatementTimeout <= 0 {
		c.StatementTimeout = 10 * time.Second
	}
	return c
}

// Errors that callers act on.
var (
	// ErrUnavailable: the server cannot be reached, refuses connections or did
	// not answer in time. Nothing is known of what was asked.
	ErrUnavailable = errors.New("PostgreSQL is unavailable")
	// ErrInRecovery: the server is a standby. Nothing can be fenced on it, and
	// its evidence may be old.
	ErrInRecovery = errors.New("PostgreSQL is in recovery: a standby, not the primary")
	// ErrNotFound: no such scope, task or broker.
	ErrNotFound = errors.New("not found")
)

// Store is the daemon's PostgreSQL. It is safe for concurrent use.
type Store struct {
	pool *pgxpool.Pool

	mu   sync.Mutex
	seen *Identity // the server as the last check of this process met it
}

// Open prepares a pool; the first connection is made by the first call, so
// that a server that is down is an error of that call.
func Open(ctx context.Context, c Config) (*Store, error) {
	c = c.withDefaults()
	config, err := pgxpool.ParseConfig(c.URL)
	if err != nil {
		return nil, fmt.Errorf("parse the PostgreSQL URL: %w", err)
	}
	config.MaxConns = int32(min(c.MaxConns, 1000)) //nolint:gosec // bounded
	config.MinConns = 0
	config.MaxConnIdleTime = 5 * time.Minute
	config.ConnConfig.ConnectTimeout = c.ConnectTimeout
	config.ConnConfig.DialFunc = impatient(config.ConnConfig.DialFunc, replyLimit(c.StatementTimeout))
	config.ConnConfig.RuntimeParams["application_name"] = c.ApplicationName
	if c.Trace {
		config.ConnConfig.Tracer = otelpgx.NewTracer(otelpgx.WithDisableConnectionDetailsInAttributes())
	}
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		return prepareSession(ctx, conn, c.StatementTimeout)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("prepare the PostgreSQL pool: %w", err)
	}
	return &Store{pool: pool}, nil
}

// prepareSession settles what a role's or a database's defaults could change:
// row_security off makes a policy an error instead of an empty answer, and
// enable_seqscan off keeps a plan that was made while the tables were small
// from reading them whole until the next ANALYZE; jit off, since what has to be
// scanned all the same then looks dear enough to be compiled.
func prepareSession(ctx context.Context, conn *pgx.Conn, statementTimeout time.Duration) error {
	_, err := conn.Exec(ctx, `SELECT set_config('row_security', 'off', false),
		set_config('enable_seqscan', 'off', false), set_config('jit', 'off', false),
		set_config('timezone', 'UTC', false),
		set_config('default_transaction_isolation', 'read committed', false),
		set_config('statement_timeout', $1, false),
		CASE WHEN current_setting('synchronous_commit') NOT IN ('on', 'remote_apply')
		     THEN set_config('synchronous_commit', 'on', false) END`,
		strconv.FormatInt(max(statementTimeout.Milliseconds(), 1), 10))
	if err != nil {
		return fmt.Errorf("prepare the PostgreSQL session: %w", err)
	}
	return nil
}

// Close ends the pool; it waits for calls in flight.
func (s *Store) Close() { s.pool.Close() }

// Pool gives what reads beside this package need: the schema check and the
// health check.
func (s *Store) Pool() *pgxpool.Pool { return s.pool }

// Ping makes one round trip.
func (s *Store) Ping(ctx context.Context) error {
	return failed("ping PostgreSQL", s.pool.Ping(ctx))
}

// write runs do in one transaction; its commit is durable.
func (s *Store) write(ctx context.Context, action string, do func(pgx.Tx) error) error {
	return failed(action, pgx.BeginFunc(ctx, s.pool, do))
}

// collect runs a query and reads each row with scan.
func collect[T any](ctx context.Context, s *Store, action string, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	rows, err := s.pool.Query(ctx, sql, args...)
	if err != nil {
		return nil, failed(action, err)
	}
	all, err := pgx.CollectRows(rows, scan)
	return all, failed(action, err)
}

// failed wraps an error with the action and with what callers ask of it.
func failed(action string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ErrUnavailable), errors.Is(err, ErrInRecovery):
		return fmt.Errorf("%s: %w", action, err)
	case sqlState(err) == stateInRecovery, sqlState(err) == "25006": // read-only transaction
		return fmt.Errorf("%s: %w: %w", action, ErrInRecovery, err)
	case unreachable(err):
		return fmt.Errorf("%s: %w: %w", action, ErrUnavailable, err)
	default:
		return fmt.Errorf("%s: %w", action, err)
	}
}

// SQLSTATEs of the functions in package migrations.
const (
	stateFenceNotReady = "SK010"
	stateInRecovery    = "SK011"
	stateNoEvidence    = "SK013"
)

func sqlState(err error) string {
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok {
		return refused.Code
	}
	return ""
}

// unreachable tells a server that did not answer from one that said no.
func unreachable(err error) bool {
	if code := sqlState(err); code != "" {
		class := code[:2]
		// 08 connection, 53 resources, 57 operator intervention (shutdown, cancel, starting up), 58 system
		return slices.Contains([]string{"08", "53", "57", "58"}, class)
	}
	var connect *pgconn.ConnectError
	var network net.Error
	return errors.As(err, &connect) || errors.As(err, &network) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) ||
		errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) ||
		strings.Contains(err.Error(), "conn closed") // pgconn has no exported error for it
}

// text reads a column that may be NULL; ” stands for NULL.
func text(p *string) string {
	if p == nil {
		return ""
	}
	return *p
}

// number reads a column that may be NULL; −1 stands for NULL.
func number(p *int64) int64 {
	if p == nil {
		return -1
	}
	return *p
}

// moment reads a time that may be NULL; the zero time stands for NULL.
func moment(p *time.Time) time.Time {
	if p == nil {
		return time.Time{}
	}
	return p.UTC()
}
