package daemon_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// compares makes the daemon reconcile: quick passes often, deep ones by hand.
func compares(c *config.Config) {
	c.Reconcile.Quick, c.Reconcile.Deep, c.Reconcile.Repair = "@every 300ms", "0 0 0 1 1 *", config.RepairAuto
	hurried(c)
}

// ordered is a reservation with its order, as Redis and PostgreSQL have it when
// everything went well.
func (s *sale) ordered() string {
	s.t.Helper()
	id := s.reserve(time.Hour)
	s.walk(id, reservation.StatusEnqueued)
	s.mustOrder(id)
	s.walk(id, reservation.StatusOrderCreated)
	return id
}

// undo loses a reservation as a failover does that lost its reserve: nothing is
// left of it, and its unit is available again.
func (s *sale) undo(id string) {
	s.t.Helper()
	h := s.hash(id)
	pipe := s.redis.TxPipeline()
	pipe.Del(s.t.Context(), s.scope.ReservationKey(id), s.scope.UserKey(h["user_id"]))
	pipe.HDel(s.t.Context(), s.scope.RequestShardKey(reservation.RequestShard(h["request_id"])), h["request_id"])
	pipe.ZRem(s.t.Context(), s.scope.IndexKey(reservation.ReservationExpiry), id)
	pipe.ZRem(s.t.Context(), s.scope.IndexKey(reservation.SendPending), id)
	pipe.HIncrBy(s.t.Context(), s.scope.StockKey(), "available", 1)
	pipe.HIncrBy(s.t.Context(), s.scope.StockKey(), "reserved", -1)
	if _, err := pipe.Exec(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

// verdicts counts the stored runs of a mode by verdict.
func (s *sale) verdicts(mode string) map[string]int {
	s.t.Helper()
	rows, err := s.db.Query(s.t.Context(), `SELECT coalesce(verdict, 'none'), count(*) FROM seckill.reconcile_run WHERE mode = $1 GROUP BY 1`, mode)
	if err != nil {
		s.t.Fatal(err)
	}
	verdicts := map[string]int{}
	var verdict string
	var n int
	if _, err := pgx.ForEachRow(rows, []any{&verdict, &n}, func() error { verdicts[verdict] = n; return nil }); err != nil {
		s.t.Fatal(err)
	}
	return verdicts
}

// trail counts the entries of the audit trail about a subject, by action.
func (s *sale) trail(subject string) map[string]int {
	s.t.Helper()
	rows, err := s.db.Query(s.t.Context(), `SELECT actor || ' ' || action, count(*) FROM seckill.audit_log WHERE subject = $1 GROUP BY 1`, subject)
	if err != nil {
		s.t.Fatal(err)
	}
	entries := map[string]int{}
	var action string
	var n int
	if _, err := pgx.ForEachRow(rows, []any{&action, &n}, func() error { entries[action] = n; return nil }); err != nil {
		s.t.Fatal(err)
	}
	return entries
}

// job is what is known of a job.
func (s *sale) job(name string) pgstore.Job {
	s.t.Helper()
	jobs, err := s.operator().Jobs(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	for _, j := range jobs {
		if j.Name == name {
			return j
		}
	}
	return pgstore.Job{}
}

// compareDeep asks the running daemon for a deep pass and waits for its end.
func (s *sale) compareDeep() pgstore.Job {
	s.t.Helper()
	store := s.operator()
	before := s.job(daemon.JobReconcileDeep).LastFinishedAt
	if err := store.RequestRun(s.t.Context(), daemon.JobReconcileDeep, "alice"); err != nil {
		s.t.Fatal(err)
	}
	var j pgstore.Job
	s.eventually(2*time.Minute, func() error {
		if j = s.job(daemon.JobReconcileDeep); !j.LastFinishedAt.After(before) {
			return errors.New("the deep pass has not ended")
		}
		return nil
	})
	return j
}

// The daemon finds by itself that a failover undid a reservation whose order
// stands, takes its unit again, and leaves run, findings and audit trail.
func TestDaemonRestoresWhatAFailoverUndid(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), compares)
	id := s.ordered()
	s.serve()
	s.eventually(time.Minute, func() error {
		if v := s.verdicts(reconcile.ModeQuick); v["consistent"] == 0 || len(v) > 2 {
			return fmt.Errorf("runs %v", v)
		}
		return nil
	})
	s.undo(id)
	s.eventually(time.Minute, func() error {
		if err := s.is(reservation.StatusOrderCreated, id); err != nil {
			return err
		}
		return s.settled()
	})
	if got := s.stock(); got != [4]int64{units, units - 1, 1, 0} {
		t.Errorf("stock %v", got)
	}
	s.eventually(time.Minute, func() error {
		trail := s.trail(id)
		if trail["reconciler repair_started"] == 0 || trail["reconciler repair_ended"] == 0 {
			return fmt.Errorf("audit trail %v", trail)
		}
		return nil
	})
	var outcome, before, after string
	if err := s.db.QueryRow(t.Context(), `SELECT detail ->> 'outcome', detail -> 'before' ->> 'hash', detail -> 'after' ->> 'hash'
		FROM seckill.audit_log WHERE subject = $1 AND action = 'repair_ended' ORDER BY id LIMIT 1`, id).Scan(&outcome, &before, &after); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(outcome, "done: restore") || before != "false" || after != "true" {
		t.Errorf("outcome %q, hash before %s and after %s", outcome, before, after)
	}
	var state string
	s.eventually(time.Minute, func() error {
		return s.db.QueryRow(t.Context(), `SELECT repair_state FROM seckill.finding WHERE subject = $1 AND check_id = 'lost_reservation'`, id).Scan(&state)
	})
	if state != "done" {
		t.Errorf("the stored finding is %s", state)
	}
}

// In mode observe, and with repair off, it finds and tells, and changes nothing.
func TestDaemonOnlyTellsWhereItMayNotRepair(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*config.Config){
		"observe": func(c *config.Config) { c.Mode = config.ModeObserve },
		"off":     func(c *config.Config) { c.Reconcile.Repair = config.RepairOff },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSale(t, stacktest.Shared(t), compares, change)
			id := s.ordered()
			s.undo(id)
			s.serve()
			s.eventually(time.Minute, func() error {
				if v := s.verdicts(reconcile.ModeQuick); v["drift"] < 2 {
					return fmt.Errorf("runs %v", v)
				}
				return nil
			})
			if h := s.hash(id); len(h) != 0 {
				t.Errorf("it was restored: %v", h)
			}
		})
	}
}

// A deficit is tried again in every pass, is a task only once that went on for
// long, and both end by themselves when a unit comes free.
func TestDeficitHealsWhenAUnitComesFree(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), compares, func(c *config.Config) { c.Fencer.EscalateAfter = 2 * time.Second })
	lost := s.ordered()
	s.undo(lost)
	taker := s.reserve(time.Hour) // the unit is sold again
	s.redis.HSet(t.Context(), s.scope.StockKey(), "initial", 1, "available", 0, "reserved", 1)
	s.exec(`UPDATE seckill.scope_allocation SET total = 1 WHERE activity_id = $1`, s.scope.ActivityID)
	s.exec(`UPDATE seckill.scope SET initial = 1 WHERE activity_id = $1`, s.scope.ActivityID)
	s.walk(taker, reservation.StatusEnqueued)
	s.serve()
	began := time.Now()
	s.eventually(time.Minute, func() error {
		if tasks := s.tasks(); tasks["deficit"] != 1 {
			return fmt.Errorf("tasks %v", tasks)
		}
		return nil
	})
	if passed := time.Since(began); passed < 2*time.Second {
		t.Errorf("the task came after %v", passed)
	}
	if s.status(lost) != "" {
		t.Error("it was restored without a unit")
	}
	s.walk(taker, reservation.StatusReleasePending) // the compensator fences it and gives its unit back
	s.eventually(time.Minute, func() error {
		if tasks := s.tasks(); tasks["deficit"] != 0 {
			return fmt.Errorf("tasks %v", tasks)
		}
		return s.is(reservation.StatusOrderCreated, lost)
	})
	var by, why string
	if err := s.db.QueryRow(t.Context(), `SELECT decided_by, decision FROM seckill.manual_task WHERE kind = 'deficit' AND state = 'resolved'`).Scan(&by, &why); err != nil {
		t.Fatal(err)
	}
	if by != "reconciler" || !strings.Contains(why, "found it no more") {
		t.Errorf("resolved by %s: %s", by, why)
	}
}

// What only a person can put right is one task for its kind, scope and cause,
// and over once a complete pass that looks for it finds it no more: a pass that
// does not compare members is none, nor is one that could not read everything.
func TestFindingsAreTasksUntilTheyAreGone(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), compares)
	var ids []string
	for range 3 {
		id := s.reserve(time.Hour)
		s.walk(id, reservation.StatusEnqueued, reservation.StatusOrderCreated)
		ids = append(ids, id)
	}
	s.serve()
	const kind = reconcile.CheckOrderCreatedWithoutOrder
	s.eventually(time.Minute, func() error {
		if causes := s.taskCauses(kind); len(causes) != 1 || causes["ORDER_CREATED/NONE"] != 3 {
			return fmt.Errorf("tasks %v", causes)
		}
		return nil
	})
	for _, id := range ids {
		s.mustOrder(id)
	}
	before := s.verdicts(reconcile.ModeQuick)["consistent"]
	s.eventually(time.Minute, func() error {
		if n := s.verdicts(reconcile.ModeQuick)["consistent"]; n < before+2 {
			return fmt.Errorf("%d consistent quick passes", n)
		}
		return nil
	})
	if s.tasks()[kind] == 0 {
		t.Fatal("the task was resolved by a pass that did not look at the members")
	}

	lacking := s.beside() // a scope that cannot be read: the pass is incomplete
	s.redis.Del(t.Context(), lacking.scope.StockKey())
	if j := s.compareDeep(); !strings.Contains(j.LastError, "incomplete") {
		t.Errorf("the deep pass says %q", j.LastError)
	}
	if s.tasks()[kind] == 0 {
		t.Fatal("the task was resolved by an incomplete pass")
	}

	s.exec(`DELETE FROM seckill.scope WHERE activity_id = $1`, lacking.scope.ActivityID)
	s.exec(`DELETE FROM seckill.scope_allocation WHERE activity_id = $1`, lacking.scope.ActivityID)
	if j := s.compareDeep(); j.LastError != "" {
		t.Errorf("the deep pass says %q", j.LastError)
	}
	s.eventually(time.Minute, func() error {
		if tasks := s.tasks(); tasks[kind] != 0 {
			return fmt.Errorf("tasks %v", tasks)
		}
		return nil
	})
}

// While a person's run holds a lock, the job that needs it steps aside and says
// so; the other goes on, and repairs nothing in that activity.
func TestDaemonStepsAsideForAManualRun(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), compares)
	id := s.ordered()
	locks, err := pgstore.LockRuns(t.Context(), pgstore.RunLockOptions{
		URL: s.config.Postgres.URL, Names: []string{"deep:" + s.scope.ActivityID, "repair:" + s.scope.ActivityID}, Holder: "alice's run",
	})
	if err != nil {
		t.Fatal(err)
	}
	s.undo(id)
	service := s.serve()
	if j := s.compareDeep(); j.LastError != "" || !strings.Contains(string(j.LastResult), "stepped_aside") {
		t.Errorf("the deep job: %q, %s", j.LastError, j.LastResult)
	}
	if service.log.mentions("alice's run") == 0 {
		t.Errorf("the log does not say for whom:\n%s", service.log.tail(20))
	}
	s.eventually(time.Minute, func() error {
		var detail string
		err := s.db.QueryRow(t.Context(), `SELECT repair_detail FROM seckill.finding WHERE subject = $1 AND check_id = 'lost_reservation' LIMIT 1`, id).Scan(&detail)
		if err == nil && !strings.Contains(detail, "alice's run") {
			return fmt.Errorf("the finding says %q", detail)
		}
		return err
	})
	if s.status(id) != "" {
		t.Error("it was restored beside the other run")
	}
	if err := locks.Release(); err != nil {
		t.Fatal(err)
	}
	s.eventually(time.Minute, func() error { return s.is(reservation.StatusOrderCreated, id) })
}

// A single pass says whether both sides agree after it.
func TestOnceComparesBothSides(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	d := s.open()
	id := s.ordered()
	if v := d.Once(t.Context()); v.Drift || v.Incomplete || v.Reconciliation == nil || v.Reconciliation.Verdict != reconcile.VerdictConsistent {
		t.Errorf("%+v", v)
	}
	s.undo(id)
	v := d.Once(t.Context())
	if !v.Drift || v.Incomplete || v.Reconciliation.Summary[reconcile.CheckLostReservation] != 1 {
		t.Errorf("%+v", v)
	}
	s.redis.Del(t.Context(), s.scope.MetaKey())
	if v := d.Once(t.Context()); !v.Incomplete || v.Err() == nil {
		t.Errorf("%+v", v)
	}
}
