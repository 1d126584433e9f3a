package pgstore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reservation"
)

// Identity tells one PostgreSQL server, and one history of it, from another.
type Identity struct {
	SystemIdentifier int64
	Timeline         int64  // of the WAL being written: it changes with a promotion at once
	WALPosition      uint64 // flushed up to here; only ever grows on one history
}

func (i Identity) String() string {
	return fmt.Sprintf("system %d, timeline %d, WAL %X/%X", i.SystemIdentifier, i.Timeline, i.WALPosition>>32, uint32(i.WALPosition)) //nolint:gosec // the low half
}

// Encode is the identity as [ParseIdentity] reads it.
func (i Identity) Encode() string {
	return fmt.Sprintf("%d,%d,%d", i.SystemIdentifier, i.Timeline, i.WALPosition)
}

// ParseIdentity is the inverse of [Identity.Encode].
func ParseIdentity(text string) (Identity, error) {
	var i Identity
	if n, err := fmt.Sscanf(text, "%d,%d,%d", &i.SystemIdentifier, &i.Timeline, &i.WALPosition); err != nil || n != 3 || i.Encode() != text {
		return Identity{}, fmt.Errorf("%.80q is not an identity of PostgreSQL", text)
	}
	return i, nil
}

// ServerName names the server and the database: under it a sighting of the
// server's identity can be kept elsewhere.
func (s *Store) ServerName(ctx context.Context) (string, error) {
	var name string
	err := s.pool.QueryRow(ctx, `SELECT system_identifier || '/' || current_database() FROM pg_control_system()`).Scan(&name)
	return name, failed("name the server", err)
}

// succeeds says why i is not the same server later on than before; "" if it is.
func (i Identity) succeeds(before Identity) string {
	switch {
	case i.SystemIdentifier != before.SystemIdentifier:
		return "system_identifier_changed"
	case i.Timeline != before.Timeline:
		return "timeline_changed"
	case i.WALPosition < before.WALPosition:
		return "wal_position_went_back"
	}
	return ""
}

// The position is the flushed one: what a crash of the host takes back was
// never acknowledged. Everything comes in one row.
const identitySQL = `
SELECT (SELECT system_identifier FROM pg_control_system()),
       ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint,
       (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint`

// IdentityCheck is what [Store.CheckIdentity] found.
type IdentityCheck struct {
	Identity Identity
	Changed  string // why, when this check found a change; else empty
	Halted   bool   // a postgres_changed task is open: nothing may be released
}

// CheckIdentity compares the server with what the last pass met: the row of
// server_identity, what this process saw last, and further sightings that the
// caller kept elsewhere. The row alone would go back in time with a restored
// volume. Another system or timeline, or a smaller WAL position, opens the task
// postgres_changed, in the transaction that stores the new identity; it halts
// all releases until a person lifts it (protocol §1). On a standby it returns
// [ErrInRecovery] and changes nothing.
func (s *Store) CheckIdentity(ctx context.Context, seenElsewhere ...Identity) (IdentityCheck, error) {
	const action = "check PostgreSQL's identity"
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seen != nil {
		seenElsewhere = append(seenElsewhere, *s.seen)
	}
	var check IdentityCheck
	err := s.write(ctx, action, func(tx pgx.Tx) error {
		var recovering bool
		if err := tx.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&recovering); err != nil {
			return err
		}
		if recovering {
			return ErrInRecovery
		}
		var err error
		check, err = checkIdentity(ctx, tx, seenElsewhere)
		return err
	})
	if err != nil {
		return IdentityCheck{}, err
	}
	s.seen = &check.Identity
	return check, nil
}

func checkIdentity(ctx context.Context, tx pgx.Tx, seen []Identity) (IdentityCheck, error) {
	// One checker at a time, also before there is a row to lock: a position
	// read before another's must not be compared with it.
	if _, err := tx.Exec(ctx, `LOCK TABLE seckill.server_identity IN SHARE ROW EXCLUSIVE MODE`); err != nil {
		return IdentityCheck{}, err
	}
	var stored Identity
	err := tx.QueryRow(ctx, `SELECT system_identifier, timeline, (wal_position - '0/0'::pg_lsn)::bigint FROM seckill.server_identity`).
		Scan(&stored.SystemIdentifier, &stored.Timeline, &stored.WALPosition)
	switch {
	case err == nil:
		seen = append([]Identity{stored}, seen...)
	case !errors.Is(err, pgx.ErrNoRows):
		return IdentityCheck{}, err
	}
	var check IdentityCheck
	now := &check.Identity
	if err := tx.QueryRow(ctx, identitySQL).Scan(&now.SystemIdentifier, &now.Timeline, &now.WALPosition); err != nil {
		return IdentityCheck{}, err
	}
	for _, before := range seen {
		if check.Changed = now.succeeds(before); check.Changed != "" {
			report := reservation.TaskReport{
				Kind: TaskPostgresChanged, Cause: check.Changed, Count: 1,
				Sample: []string{"before: " + before.String(), "now: " + now.String()},
			}
			if err := reportTasks(ctx, tx, []reservation.TaskReport{report}); err != nil {
				return IdentityCheck{}, err
			}
			break
		}
	}
	if _, err := tx.Exec(ctx, `
		INSERT INTO seckill.server_identity (system_identifier, timeline, wal_position)
		VALUES ($1, $2, '0/0'::pg_lsn + $3::numeric)
		ON CONFLICT (only_row) DO UPDATE SET system_identifier = excluded.system_identifier, timeline = excluded.timeline,
			wal_position = excluded.wal_position, checked_at = clock_timestamp()`,
		now.SystemIdentifier, now.Timeline, strconv.FormatUint(now.WALPosition, 10)); err != nil {
		return IdentityCheck{}, err
	}
	err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM seckill.manual_task WHERE kind = $1 AND state IN ('open', 'approved'))`,
		TaskPostgresChanged).Scan(&check.Halted)
	return check, err
}

// ServerTime is the server's clock, which windows and retention are measured by.
func (s *Store) ServerTime(ctx context.Context) (time.Time, error) {
	var now time.Time
	err := s.pool.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now)
	return now.UTC(), failed("read PostgreSQL's clock", err)
}
