package pgstore

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// runLockClass is the first half of the keys of run locks.
const runLockClass = 0x5ec_c112

// RunLockOptions say which locks are wanted.
type RunLockOptions struct {
	URL            string
	Names          []string      // one for each mode and activity
	Holder         string        // shown to others
	Wait           time.Duration // for all of them together; 0: not at all
	ConnectTimeout time.Duration // 0 means 3 s
}

// RunLockedError names the lock that another run holds. It is an
// [ErrLeaseHeld].
type RunLockedError struct{ Name, Holder string }

func (e *RunLockedError) Error() string {
	return fmt.Sprintf("another run holds the lock %s: %s. Try again later, or wait for it with --wait", e.Name, e.Holder)
}

// Is makes errors.Is(err, [ErrLeaseHeld]) true.
func (e *RunLockedError) Is(target error) bool { return target == ErrLeaseHeld }

// RunLocks are locks of one run, held by a session of their own: whatever ends
// the run ends them. They only prevent double work, as a lease does.
type RunLocks struct{ conn *pgx.Conn }

// LockRuns takes all the locks or none. Another run that holds one for longer
// than the wait is a [*RunLockedError]; [ErrTransactionPooler]: the URL cannot
// hold a lock.
func LockRuns(ctx context.Context, o RunLockOptions) (*RunLocks, error) {
	const action = "lock the run"
	config, err := pgx.ParseConfig(o.URL)
	if err != nil {
		return nil, fmt.Errorf("parse the PostgreSQL URL: %w", err)
	}
	config.ConnectTimeout = max(o.ConnectTimeout, 0)
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = LeaseOptions{}.withDefaults().ConnectTimeout
	}
	config.RuntimeParams["application_name"] = "reconciler-lock " + o.Holder
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, failed(action, err)
	}
	l := &RunLocks{conn}
	if err := l.take(ctx, config, o); err != nil {
		return nil, errors.Join(failed(action, err), l.Release())
	}
	return l, nil
}

func (l *RunLocks) take(ctx context.Context, config *pgx.ConnConfig, o RunLockOptions) error {
	if _, err := l.conn.Exec(ctx, `SELECT set_config('statement_timeout', '0', false), set_config('idle_session_timeout', '0', false)`); err != nil {
		return err
	}
	if err := refuseTransactionPooler(ctx, l.conn, config); err != nil {
		return err
	}
	until := time.Now().Add(o.Wait)
	for _, name := range slices.Sorted(slices.Values(o.Names)) { // in one order: two runs do not wait for each other
		if err := l.takeOne(ctx, name, time.Until(until)); err != nil {
			return err
		}
	}
	return nil
}

func (l *RunLocks) takeOne(ctx context.Context, name string, wait time.Duration) error {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))           // hash.Hash never returns an error
	key := int32(h.Sum32() &^ 0x8000_0000) //nolint:gosec // the top bit is off
	var got bool
	if err := l.conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1, $2)`, runLockClass, key).Scan(&got); err != nil || got {
		return err
	}
	if wait >= time.Millisecond {
		if _, err := l.conn.Exec(ctx, `SELECT set_config('lock_timeout', $1, false)`, strconv.FormatInt(wait.Milliseconds(), 10)); err != nil {
			return err
		}
		_, err := l.conn.Exec(ctx, `SELECT pg_advisory_lock($1, $2)`, runLockClass, key)
		if sqlState(err) != "55P03" { // lock_not_available
			return err
		}
	}
	var holder string
	err := l.conn.QueryRow(ctx, `
		SELECT coalesce(max(coalesce(nullif(a.application_name, ''), 'server process ' || k.pid)), 'it has just ended')
		FROM pg_locks AS k LEFT JOIN pg_stat_activity AS a USING (pid)
		WHERE k.locktype = 'advisory' AND k.granted AND k.objsubid = 2
		  AND k.classid = $1::bigint::oid AND k.objid = $2::bigint::oid`, int64(runLockClass), int64(key)).Scan(&holder)
	if err != nil {
		return err
	}
	return &RunLockedError{name, holder}
}

// Release ends the session, and the locks with it.
func (l *RunLocks) Release() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	return failed("release the locks of the run", l.conn.Close(ctx))
}
