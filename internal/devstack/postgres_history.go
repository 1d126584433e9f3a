package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// What is here puts an earlier state of PostgreSQL in the place of the newest,
// on a new timeline, in the two ways that it happens: a base backup is
// restored, or a standby that lacks the newest commits is promoted.

// PostgresBackup is a base backup of a stack's PostgreSQL.
type PostgresBackup struct {
	stack *Stack
	dir   string // has `data`
}

// BackupPostgres takes a base backup of the running server. It goes with the stack.
func (s *Stack) BackupPostgres(ctx context.Context) (*PostgresBackup, error) {
	b := &PostgresBackup{stack: s}
	var err error
	if b.dir, err = s.baseBackup(ctx, "backup"); err != nil {
		return nil, fmt.Errorf("back PostgreSQL up: %w", err)
	}
	return b, nil
}

// baseBackup copies the running server into a directory beside its own.
func (s *Stack) baseBackup(ctx context.Context, name string, args ...string) (string, error) {
	dir := filepath.Join(s.Postgres().Dir(), name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", err
	}
	if err := giveTo(dir, postgresAccount()); err != nil {
		return "", err
	}
	source := fmt.Sprintf("host=127.0.0.1 user=%s port=%d", superuser, s.Postgres().Port())
	return dir, s.postgresTool(ctx, dir, "pg_basebackup", append([]string{
		"-D", filepath.Join(dir, "data"), "-d", source, "-X", "stream", "-c", "fast", "--no-sync",
	}, args...)...)
}

// Restore puts the backup in the place of the server's data, once, as a DBA
// does: by archive recovery up to the backup's end, on a new timeline. It
// returns when the server takes writes again, at its old address.
func (b *PostgresBackup) Restore(ctx context.Context) error {
	svc := b.stack.Postgres()
	if err := svc.Kill(); err != nil {
		return err
	}
	data, restored := filepath.Join(svc.Dir(), "data"), filepath.Join(b.dir, "data")
	settings, err := os.OpenFile(filepath.Join(restored, "postgresql.auto.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("restore PostgreSQL: %w", err)
	}
	_, err = settings.WriteString("restore_command = 'false'\nrecovery_target = 'immediate'\nrecovery_target_action = 'promote'\n")
	signal := filepath.Join(restored, "recovery.signal")
	err = errors.Join(err, settings.Close(), os.WriteFile(signal, nil, 0o600), giveTo(signal, postgresAccount()),
		os.RemoveAll(data), os.Rename(restored, data))
	if err != nil {
		return fmt.Errorf("restore PostgreSQL: %w", err)
	}
	if err := svc.Start(ctx); err != nil {
		return err
	}
	return svc.awaitWrites(ctx)
}

// awaitWrites waits until the server has left recovery.
func (s *Service) awaitWrites(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	err := poll(ctx, func(ctx context.Context) error {
		return withPostgres(ctx, postgresURL(s.Addr(), superuser, superuser), func(conn *pgx.Conn) error {
			var recovering bool
			if err := conn.QueryRow(ctx, "SELECT pg_is_in_recovery()").Scan(&recovering); err != nil || !recovering {
				return err
			}
			return errors.New("it is in recovery")
		})
	})
	if err != nil {
		return fmt.Errorf("wait until %s takes writes: %w", s.Name(), err)
	}
	return nil
}

const standbyName = "postgres-standby"

// StartStandby starts an asynchronous standby of the stack's PostgreSQL, as a
// service of its own with its own address; [Stack.Standby] finds it.
func (s *Stack) StartStandby(ctx context.Context) (*Service, error) {
	if err := s.mayBreak(); err != nil {
		return nil, err
	}
	dir, err := s.baseBackup(ctx, "standby", "-R")
	if err != nil {
		return nil, fmt.Errorf("copy PostgreSQL for a standby: %w", err)
	}
	svc, err := s.service(standbyName, 1, 0, func(rec *record) error {
		rec.Dir, rec.Launch.Dir, rec.Launch.Log = dir, dir, filepath.Join(dir, "log")
		return s.definePostgres(rec)
	})
	if err != nil {
		return nil, err
	}
	return svc, s.run(ctx, svc)
}

// Standby is the standby of PostgreSQL; nil if none was started.
func (s *Stack) Standby() *Service { return s.Service(standbyName) }

// PromoteStandby makes the standby a primary, with what it has, and returns
// when it takes writes. The old primary is not touched: kill it first.
func (s *Stack) PromoteStandby(ctx context.Context) error {
	svc := s.Standby()
	if err := s.postgresTool(ctx, svc.Dir(), "pg_ctl", "promote", "-w", "-t", strconv.Itoa(int(startLimit.Seconds())), "-D", filepath.Join(svc.Dir(), "data")); err != nil {
		return fmt.Errorf("promote the standby: %w", err)
	}
	return svc.awaitWrites(ctx)
}
