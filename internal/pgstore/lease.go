package pgstore

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// LeaseDaemon is the lease of the one daemon that works on a database.
const LeaseDaemon = "daemon"

// leaseClass is the first half of the advisory locks' key; the second is the
// hash of the lease's name.
const leaseClass = 0x5ec_c111

// DefaultLeaseTTL is how long a holder that is not heard of keeps its lease.
const DefaultLeaseTTL = 5 * time.Second

// ErrLeaseHeld says that another session holds the lease. The error is a
// [*LeaseHeldError].
var ErrLeaseHeld = errors.New("the lease is held")

// LeaseHeldError names the holder.
type LeaseHeldError struct{ Holder LeaseHolder }

func (e *LeaseHeldError) Error() string {
	return fmt.Sprintf("lease %s is held by %s since %s", e.Holder.Name, e.Holder.Holder, e.Holder.AcquiredAt.Format(time.RFC3339))
}

// Is makes errors.Is(err, [ErrLeaseHeld]) true.
func (e *LeaseHeldError) Is(target error) bool { return target == ErrLeaseHeld }

// ErrTransactionPooler says that the URL leads to a pooler that gives each
// transaction another server session: an advisory lock would not stay ours.
var ErrTransactionPooler = errors.New("the URL leads to a transaction-mode pooler: a lease needs a server session of its own. Use the server's address, or a pooler in session mode")

// LeaseOptions says which lease is wanted.
type LeaseOptions struct {
	URL            string
	Name           string            // empty means [LeaseDaemon]
	Holder         string            // shown to others: host and process id, say
	Wait           bool              // for as long as it takes; else [ErrLeaseHeld]
	Standby        func(LeaseHolder) // told once, before the wait for another holder; nil: nobody
	TTL            time.Duration     // 0 means [DefaultLeaseTTL]
	ConnectTimeout time.Duration     // 0 means 3 s
}

func (o LeaseOptions) withDefaults() LeaseOptions {
	if o.Name == "" {
		o.Name = LeaseDaemon
	}
	if o.Holder == "" {
		o.Holder = "reconciler"
	}
	if o.TTL <= 0 {
		o.TTL = DefaultLeaseTTL
	}
	if o.ConnectTimeout <= 0 {
		o.ConnectTimeout = 3 * time.Second
	}
	return o
}

// interval is the time between heartbeats.
func (o LeaseOptions) interval() time.Duration { return max(o.TTL/5, 10*time.Millisecond) }

// grace is how long the holder believes in a lease after its last heartbeat: a
// third of the TTL less than a successor waits.
func (o LeaseOptions) grace() time.Duration { return o.TTL * 2 / 3 }

func (o LeaseOptions) key() int32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(o.Name))         // hash.Hash never returns an error
	return int32(h.Sum32() &^ 0x8000_0000) //nolint:gosec // the top bit is off
}

// Lease is an advisory lock on a connection of its own, with a heartbeat. It
// only prevents double work: effects are idempotent and keyed (protocol §4).
//
// A holder that loses its connection learns it at once, and one that hears
// nothing from the server after two thirds of the TTL; [Lease.Lost] fires
// then. A successor that gets the lock waits until the TTL after the last
// heartbeat, by the server's clock, unless the lease was given back: the one
// before has stopped by then.
type Lease struct {
	options LeaseOptions
	conn    *pgx.Conn
	started time.Time    // what confirmed counts from
	confirm atomic.Int64 // when the last successful heartbeat was sent, in nanoseconds since started
	stop    context.CancelFunc
	lost    chan struct{}
	done    chan struct{}
	once    sync.Once
	err     error // of the release
}

// AcquireLease gets the lease. Without Wait another holder is a
// [*LeaseHeldError]. In both cases it waits, for at most the TTL, when a
// predecessor ended without giving it back. [ErrTransactionPooler]: the URL
// cannot hold a lease. The login is a member of seckill_daemon or
// seckill_operator.
func AcquireLease(ctx context.Context, o LeaseOptions) (*Lease, error) {
	o = o.withDefaults()
	action := "acquire lease " + o.Name
	config, err := pgx.ParseConfig(o.URL)
	if err != nil {
		return nil, fmt.Errorf("parse the PostgreSQL URL: %w", err)
	}
	config.ConnectTimeout = o.ConnectTimeout
	config.RuntimeParams["application_name"] = "reconciler-lease " + o.Holder
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, failed(action, err)
	}
	l := &Lease{options: o, conn: conn, started: time.Now(), lost: make(chan struct{}), done: make(chan struct{})}
	if err := l.acquire(ctx, config); err != nil {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		return nil, errors.Join(failed(action, err), conn.Close(closing))
	}
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	l.stop = stop
	go l.keep(run)
	return l, nil
}

func (l *Lease) acquire(ctx context.Context, config *pgx.ConnConfig) error {
	// No limit of a role may end a session that waits or is idle. A heartbeat
	// need not survive a crash of the server, since its lock does not.
	if _, err := l.conn.Exec(ctx, `SELECT set_config('statement_timeout', '0', false), set_config('lock_timeout', '0', false),
		set_config('idle_session_timeout', '0', false), set_config('synchronous_commit', 'off', false)`); err != nil {
		return err
	}
	if err := refuseTransactionPooler(ctx, l.conn, config); err != nil {
		return err
	}
	var got bool
	if err := l.conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1, $2)`, leaseClass, l.options.key()).Scan(&got); err != nil {
		return err
	}
	if !got {
		holder, err := leaseHolder(ctx, l.conn, l.options.Name)
		if err != nil {
			return err
		}
		if !l.options.Wait {
			return &LeaseHeldError{holder}
		}
		if l.options.Standby != nil {
			l.options.Standby(holder)
		}
		if _, err := l.conn.Exec(ctx, `SELECT pg_advisory_lock($1, $2)`, leaseClass, l.options.key()); err != nil {
			return err
		}
	}
	if err := l.outwait(ctx); err != nil {
		return err
	}
	sent := time.Since(l.started)
	if _, err := l.conn.Exec(ctx, `
		INSERT INTO seckill.lease (name, holder, backend_pid, acquired_at, heartbeat_at, ttl)
		VALUES ($1, $2, pg_backend_pid(), clock_timestamp(), clock_timestamp(), $3 * interval '1 microsecond')
		ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, backend_pid = excluded.backend_pid,
			acquired_at = excluded.acquired_at, heartbeat_at = excluded.heartbeat_at, ttl = excluded.ttl, released_at = NULL`,
		l.options.Name, l.options.Holder, l.options.TTL.Microseconds()); err != nil {
		return err
	}
	l.confirm.Store(int64(sent))
	return nil
}

// outwait waits until a predecessor that did not give the lease back has
// noticed that it lost it.
func (l *Lease) outwait(ctx context.Context) error {
	for {
		var left float64
		err := l.conn.QueryRow(ctx, `
			SELECT coalesce(max(extract(epoch FROM heartbeat_at + ttl - clock_timestamp())), 0)::float8
			FROM seckill.lease WHERE name = $1 AND released_at IS NULL`, l.options.Name).Scan(&left)
		if err != nil || left <= 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(left*float64(time.Second)) + time.Millisecond):
		}
	}
}

// refuseTransactionPooler occupies another session by an open transaction in
// between: a transaction-mode pooler either gives it ours, or gives us another
// one afterwards.
func refuseTransactionPooler(ctx context.Context, conn *pgx.Conn, config *pgx.ConnConfig) error {
	const pidSQL = `SELECT pg_backend_pid()`
	simple := pgx.QueryExecModeSimpleProtocol // a pooler may not know prepared statements
	var ours, theirs, oursNow int
	if err := conn.QueryRow(ctx, pidSQL, simple).Scan(&ours); err != nil {
		return err
	}
	other, err := pgx.ConnectConfig(ctx, config.Copy())
	if err != nil {
		return err
	}
	defer func() { _ = other.Close(context.WithoutCancel(ctx)) }() // nothing was written
	tx, err := other.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }() // the connection is closed in any case
	if err := tx.QueryRow(ctx, pidSQL, simple).Scan(&theirs); err != nil {
		return err
	}
	if err := conn.QueryRow(ctx, pidSQL, simple).Scan(&oursNow); err != nil {
		return err
	}
	if ours == theirs || ours != oursNow {
		return ErrTransactionPooler
	}
	return nil
}

// keep sends heartbeats until the lease is released or lost. Between them it
// listens, so that the end of the connection is noticed at once.
func (l *Lease) keep(ctx context.Context) {
	defer close(l.done)
	for ctx.Err() == nil {
		if !l.listen(ctx) || !l.heartbeat(ctx) {
			if ctx.Err() == nil {
				close(l.lost)
			}
			return
		}
	}
}

// listen waits for the next heartbeat's time; false means that the connection ended.
func (l *Lease) listen(ctx context.Context) bool {
	wait, cancel := context.WithTimeout(ctx, l.options.interval())
	defer cancel()
	for {
		_, err := l.conn.WaitForNotification(wait)
		if err != nil {
			return wait.Err() != nil && !l.conn.IsClosed()
		}
	}
}

// heartbeat proves that the session lives and still has the lock; false means
// that it does not, or did not answer in time.
func (l *Lease) heartbeat(ctx context.Context) bool {
	sent := time.Since(l.started)
	// A release does not cut it short: that would end the connection before
	// the lease is given back.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.left(sent))
	defer cancel()
	tag, err := l.conn.Exec(ctx, `
		UPDATE seckill.lease SET heartbeat_at = clock_timestamp()
		WHERE name = $1 AND backend_pid = pg_backend_pid()
		  AND EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
		              AND classid = $2::bigint::oid AND objid = $3::bigint::oid AND objsubid = 2)`,
		l.options.Name, int64(leaseClass), int64(l.options.key()))
	if err != nil || tag.RowsAffected() != 1 {
		return false
	}
	l.confirm.Store(int64(sent))
	return true
}

// left is how long the lease is believed in at a time since l.started.
func (l *Lease) left(at time.Duration) time.Duration {
	return time.Duration(l.confirm.Load()) + l.options.grace() - at
}

// Lost is closed when the lease is lost, not when it is released. Whoever
// works under it stops then.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// Valid says whether the lease is still ours by the time of its last
// heartbeat. A process that was suspended asks it before it goes on.
func (l *Lease) Valid() bool {
	select {
	case <-l.lost:
		return false
	default:
		return l.left(time.Since(l.started)) > 0
	}
}

// Release gives the lease back, so that a successor need not wait, and ends
// the connection. It is idempotent; after a loss it only tidies up.
func (l *Lease) Release(ctx context.Context) error {
	l.once.Do(func() {
		l.stop()
		<-l.done
		if l.conn.IsClosed() {
			return
		}
		// First the note, then the lock: a successor that has the lock sees that
		// it need not wait.
		_, noted := l.conn.Exec(ctx, `UPDATE seckill.lease SET released_at = clock_timestamp() WHERE name = $1 AND backend_pid = pg_backend_pid()`,
			l.options.Name)
		_, unlocked := l.conn.Exec(ctx, `SELECT pg_advisory_unlock($1, $2)`, leaseClass, l.options.key())
		l.err = failed("release lease "+l.options.Name, errors.Join(noted, unlocked, l.conn.Close(ctx)))
	})
	return l.err
}

// LeaseHolder is who holds, or held last, a lease.
type LeaseHolder struct {
	Name        string
	Holder      string
	Held        bool // a server session has the lock now
	BackendPID  int  // of that session; 0 when nobody has it
	AcquiredAt  time.Time
	HeartbeatAt time.Time
	ReleasedAt  time.Time // zero: not given back
}

// LeaseHolder reads who holds a lease; a lease that nobody ever had has an
// empty Holder.
func (s *Store) LeaseHolder(ctx context.Context, name string) (LeaseHolder, error) {
	holder, err := leaseHolder(ctx, s.pool, name)
	return holder, failed("read the holder of lease "+name, err)
}

func leaseHolder(ctx context.Context, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, name string,
) (LeaseHolder, error) {
	h := LeaseHolder{Name: name}
	var holder *string
	var acquired, heartbeat, released *time.Time
	err := db.QueryRow(ctx, `
		SELECT k.pid, l.holder, l.acquired_at, l.heartbeat_at, l.released_at
		FROM (SELECT coalesce(max(pid), 0) AS pid FROM pg_locks
		      WHERE locktype = 'advisory' AND granted AND objsubid = 2
		        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		        AND classid = $2::bigint::oid AND objid = $3::bigint::oid) AS k
		LEFT JOIN seckill.lease AS l ON l.name = $1`,
		name, int64(leaseClass), int64(LeaseOptions{Name: name}.key())).Scan(&h.BackendPID, &holder, &acquired, &heartbeat, &released)
	h.Held, h.Holder = h.BackendPID != 0, text(holder)
	h.AcquiredAt, h.HeartbeatAt, h.ReleasedAt = moment(acquired), moment(heartbeat), moment(released)
	return h, err
}
