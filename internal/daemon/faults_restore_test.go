//go:build slow

package daemon_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

// history is a way in which PostgreSQL loses its newest commits.
type history struct {
	keep func()        // what is committed until now is kept
	lose func()        // and becomes the server, without what came since
	host func() string // where that server is
}

// A base backup is restored, and a standby that lacks the newest commits is
// promoted, with the daemon running. Releases stop at once; every reservation
// that was released is fenced again; the one whose late message was faster is
// named; what contradicts is found; and then releases go on.
func TestSlowPostgresLosesItsNewestCommits(t *testing.T) {
	for name, prepare := range map[string]func(*testing.T, *devstack.Stack) history{
		"restored from a base backup": restored, "promoted standby": promoted,
	} {
		t.Run(name, func(t *testing.T) {
			stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
			loseNewestCommits(t, stack, prepare(t, stack))
		})
	}
}

func restored(t *testing.T, stack *devstack.Stack) history {
	t.Helper()
	var backup *devstack.PostgresBackup
	return history{
		keep: func() {
			t.Helper()
			var err error
			if backup, err = stack.BackupPostgres(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
		lose: func() {
			t.Helper()
			if err := backup.Restore(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
		host: func() string { return stack.Postgres().Addr() },
	}
}

// promoted: the standby is away while the newest commits are made, as one is
// that lags. Clients know both addresses and take the one that takes writes.
func promoted(t *testing.T, stack *devstack.Stack) history {
	t.Helper()
	standby, err := stack.StartStandby(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return history{
		keep: func() {
			t.Helper()
			awaitReplay(t, stack)
			if err := standby.Kill(); err != nil {
				t.Fatal(err)
			}
		},
		lose: func() {
			t.Helper()
			if err := stack.Postgres().Kill(); err != nil {
				t.Fatal(err)
			}
			if err := standby.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := stack.PromoteStandby(t.Context()); err != nil {
				t.Fatal(err)
			}
		},
		host: func() string { return standby.Addr() },
	}
}

// awaitReplay waits until the standby shows everything that is committed.
func awaitReplay(t *testing.T, stack *devstack.Stack) {
	t.Helper()
	primary, err := pgxpool.New(t.Context(), stack.PostgresURL("postgres", "postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer primary.Close()
	var now string
	if err := primary.QueryRow(t.Context(), `SELECT pg_current_wal_lsn()`).Scan(&now); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		var done bool
		err := primary.QueryRow(t.Context(), `SELECT coalesce(bool_or(replay_lsn >= $1::pg_lsn), false) FROM pg_stat_replication`, now).Scan(&done)
		if err == nil && done {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the standby has not replayed %s: %v", now, err)
		}
	}
}

func loseNewestCommits(t *testing.T, stack *devstack.Stack, h history) {
	t.Helper()
	s := newSale(t, stack, hurried, func(c *config.Config) {
		if stack.Standby() == nil {
			return
		}
		u, err := url.Parse(c.Postgres.URL)
		if err != nil {
			t.Fatal(err)
		}
		u.Host += "," + stack.Standby().Addr()
		c.Postgres.URL = u.String() + "&target_session_attrs=read-write"
	})
	kept := []string{s.lost(), s.lost(), s.lost()}
	other := s.beside() // held by a person: it keeps the halt in force for as long as we look
	running := s.serve()
	s.eventually(time.Minute, func() error { return s.is(reservation.StatusReleased, kept...) })
	if err := s.operator().HoldScopes(t.Context(), []reservation.Scope{other.scope}, "test", "keeps the halt"); err != nil {
		t.Fatal(err)
	}
	// Of the older state, the daemon cannot connect to it: what is to be there
	// first can be made in peace.
	const login = `test_seckill_daemon`
	s.exec(`ALTER ROLE ` + login + ` CONNECTION LIMIT 0`)
	h.keep()
	s.exec(`ALTER ROLE ` + login + ` CONNECTION LIMIT -1`)

	var gone []string // released since
	for range 10 {
		gone = append(gone, s.lost())
	}
	ordered := []string{s.expired("ENQUEUED"), s.expired("ENQUEUED")}
	for _, id := range ordered {
		s.mustOrder(id)
	}
	s.eventually(time.Minute, func() error {
		return errors.Join(s.is(reservation.StatusReleased, gone...), s.is(reservation.StatusOrderCreated, ordered...))
	})

	h.lose()
	s.follow(h.host())
	for _, id := range append(slices.Clone(gone), ordered...) {
		if got := s.claim(id); got != "" {
			t.Fatalf("the claim of %s is %s: nothing was lost", id, got)
		}
	}
	loser := gone[0]
	s.mustOrder(loser) // its message was on its way all the time
	late := []string{s.lost(), s.expired("RELEASE_PENDING")}
	s.exec(`ALTER ROLE ` + login + ` CONNECTION LIMIT -1`)

	s.eventually(time.Minute, func() error {
		if causes := s.taskCauses("postgres_changed"); causes["timeline_changed"] != 1 || len(causes) != 1 {
			return fmt.Errorf("tasks postgres_changed by cause: %v, want timeline_changed", causes)
		}
		return nil
	})
	s.eventually(time.Minute, func() error {
		for _, id := range gone[1:] {
			if got := s.claim(id); got != reservation.OutcomeFenced {
				return fmt.Errorf("the released %s has claim %q, want it FENCED again", id, got)
			}
		}
		return nil
	})
	s.eventually(time.Minute, func() error { return s.named("order_after_release", loser) })
	s.throughout(3*time.Second, func() error { // several passes of every worker
		for _, id := range late {
			if s.claim(id) != "" || s.status(id) == reservation.StatusReleased {
				return fmt.Errorf("%s was released while PostgreSQL had changed", id)
			}
		}
		return nil
	})
	if err := s.order(gone[1]); !fencedOff(err) {
		t.Errorf("an order of a reservation that is fenced again: %v, want SK001", err)
	}
	s.exec(`UPDATE shop.stock AS s SET sold = (SELECT count(*) FROM shop.orders AS o WHERE o.activity_id = s.activity_id)`)
	s.foundAfterTheLoss(loser, ordered)

	if err := s.sameLogin("test_seckill_operator").UnholdScopes(t.Context(), []reservation.Scope{other.scope}, "test", "looked at"); err != nil {
		t.Fatal(err)
	}
	s.eventually(time.Minute, func() error { return s.is(reservation.StatusReleased, late...) })
	if tasks := s.tasks(); tasks["postgres_changed"] != 0 {
		t.Errorf("tasks %v: the halt is over", tasks)
	}
	running.end()
}

// follow makes the test's own connections go to the server that is in force.
func (s *sale) follow(host string) {
	s.t.Helper()
	u, err := url.Parse(s.db.Config().ConnString())
	if err != nil {
		s.t.Fatal(err)
	}
	u.Host = host
	s.db.Close()
	if s.db, err = pgxpool.New(s.t.Context(), u.String()); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(s.db.Close)
}

// sameLogin is the store of a login that was made before, on the server in force.
func (s *sale) sameLogin(login string) *pgstore.Store {
	s.t.Helper()
	u, err := url.Parse(s.db.Config().ConnString())
	if err != nil {
		s.t.Fatal(err)
	}
	u.User = url.User(login)
	store, err := pgstore.Open(s.t.Context(), pgstore.Config{URL: u.String()})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(store.Close)
	return store
}

// named says whether an open task has the reservation among its subjects.
func (s *sale) named(kind, id string) error {
	var n int
	err := s.db.QueryRow(s.t.Context(), `SELECT count(*) FROM seckill.manual_task WHERE state = 'open' AND kind = $1 AND $2 = ANY (sample)`, kind, id).Scan(&n)
	if err == nil && n != 1 {
		err = fmt.Errorf("%d open tasks %s name %s, want one", n, kind, id)
	}
	return err
}

// foundAfterTheLoss: a deep reconciliation by hand names what the daemon does
// not touch, and nothing else that is wrong.
func (s *sale) foundAfterTheLoss(loser string, ordered []string) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, binary(s.t), "reconcile", "--deep", "--activity", s.scope.ActivityID, "--output", "json")
	cmd.Dir, cmd.Env = s.t.TempDir(), s.environment()
	out, err := cmd.Output()
	var status *exec.ExitError
	if !errors.As(err, &status) || status.ExitCode() != 2 {
		s.t.Fatalf("reconcile: %v, want exit status 2\n%s", err, out)
	}
	var report struct {
		Findings []struct {
			Check    string `json:"check"`
			Severity string `json:"severity"`
			Subject  string `json:"subject"`
		} `json:"findings"`
	}
	if err := json.Unmarshal(out, &report); err != nil {
		s.t.Fatal(err)
	}
	var got []string
	for _, f := range report.Findings {
		if (f.Severity == "critical" || f.Severity == "error") && f.Check != "count_drift" {
			got = append(got, f.Check+" "+f.Subject)
		}
	}
	want := []string{"order_after_release " + loser}
	for _, id := range ordered {
		want = append(want, "order_created_without_order "+id)
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" {
		s.t.Errorf("findings (-want +got):\n%s", diff)
	}
}
