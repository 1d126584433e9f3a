package approval_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// compare is `reconcile --deep` of the scope, with the tasks that it opens.
func (s *shop) compare() *reconcile.Report {
	s.t.Helper()
	d := s.daemon
	r := reconcile.Reconciler{Registry: d.Postgres, Stocks: d.Redis, Orders: d.Postgres, Members: d.Redis, Claims: d.Postgres}
	var checks []string
	for _, c := range reconcile.Checks() {
		// The orders of these tests deduct nothing, and their scopes end soon.
		if c.ID != reconcile.CheckSoldMismatch && c.ID != reconcile.CheckRetentionRisk {
			checks = append(checks, c.ID)
		}
	}
	report, err := r.Run(s.t.Context(), reconcile.Options{Settle: time.Millisecond, Deep: true, Checks: checks})
	if err != nil {
		s.t.Fatal(err)
	}
	if err := d.Postgres.ReportTasks(s.t.Context(), report.Tasks(nil)); err != nil {
		s.t.Fatal(err)
	}
	return report
}

func (s *shop) wantFindings(want ...string) {
	s.t.Helper()
	r := s.compare()
	var got []string
	for _, f := range r.Findings {
		got = append(got, f.Check)
	}
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" || len(r.Incomplete) > 0 {
		s.t.Errorf("findings (-want +got):\n%s\n%+v\n%+v", diff, r.Findings, r.Incomplete)
	}
	if len(want) == 0 && r.Verdict != reconcile.VerdictConsistent {
		s.t.Errorf("%s", r.Verdict)
	}
}

// opened is the task that the comparison opened.
func (s *shop) opened(kind string) pgstore.Task {
	s.t.Helper()
	tag := s.scope.Tag()
	tasks, err := s.daemon.Postgres.Tasks(s.t.Context(), pgstore.TaskFilter{Kinds: []string{kind}, Scope: &tag, States: pgstore.Unresolved})
	if err != nil || len(tasks) != 1 {
		s.t.Fatalf("tasks %s: %v, %v", kind, tasks, err)
	}
	return tasks[0]
}

// setState is `scope pause` or `scope resume`.
func (s *shop) setState(from, to lua.State) {
	s.t.Helper()
	b := s.runner.Batch()
	r := b.SetState(s.scope, lua.SetStateArgs{Expected: from, Target: to})
	s.run(b)
	if reply, err := r.Get(); err != nil || reply.State != to {
		s.t.Fatalf("set_state: %+v, %v", reply, err)
	}
	s.exec(`UPDATE seckill.scope SET state = $2 WHERE activity_id = $1`, s.scope.ActivityID, string(to))
}

func (s *shop) pause() { s.t.Helper(); s.setState(lua.StateActive, lua.StatePaused) }

func (s *shop) setStock(pairs ...any) {
	s.t.Helper()
	if err := s.redis.HSet(s.t.Context(), s.scope.StockKey(), pairs...).Err(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *shop) rawStock() string {
	s.t.Helper()
	h, err := s.redis.HMGet(s.t.Context(), s.scope.StockKey(), "initial", "available", "reserved", "released_total").Result()
	if err != nil {
		s.t.Fatal(err)
	}
	return fmt.Sprint(h)
}

// sold is a scope with an order, two undecided reservations, a released one
// and one cancelled order.
func (s *shop) sold() (ordered string) {
	s.t.Helper()
	ordered = s.reserve("ENQUEUED")
	cancelled := s.reserve("ENQUEUED")
	for _, id := range []string{ordered, cancelled} {
		s.mustOrder(id)
		b := s.runner.Batch()
		b.Transition(s.scope, lua.TransitionArgs{ReservationID: id, Target: reservation.StatusOrderCreated, OrderID: "o-" + id})
		s.run(b)
	}
	s.exec(`UPDATE shop.orders SET status = 'CANCELLED' WHERE reservation_id = $1`, cancelled)
	s.reserve()
	s.reserve("ENQUEUED")
	released := s.reserve("ENQUEUED", "RELEASE_PENDING")
	s.exec(`SELECT outcome FROM seckill.fence_reservations(ARRAY[$1], 'test', ARRAY[$2])`, released, s.scope.Tag())
	s.release(released)
	s.wantStock(units-4, 4, 1)
	return ordered
}

// A broken invariant, whatever broke it: found, paused, recounted from the
// evidence, and consistent again.
func TestRecountOfABrokenInvariant(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string][]any{
		"too many available": {"available", units},
		"too few reserved":   {"reserved", 1},
		"initial":            {"initial", 7},
		"negative":           {"available", -3},
		"all of it":          {"initial", 5, "available", 90, "reserved", 33},
		"no number":          {"reserved", "many"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			s.sold()
			s.setStock(fault...)
			broken := s.rawStock()
			s.compare()
			task := s.opened(reconcile.CheckInvariantBroken)

			plan := s.show(task, all)
			if len(plan.Proposals) != 1 || plan.Proposals[0].Action != approval.None || !strings.Contains(plan.Proposals[0].Why, "scope pause --activity "+s.scope.ActivityID) {
				t.Fatalf("while it sells: %+v", plan.Proposals)
			}
			wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Nothing: 1})
			s.pause()
			plan = s.show(task, all)
			if p := plan.Proposals[0]; p.Action != approval.Recount || !strings.Contains(p.Does, "by [initial 20, available 16, reserved 4, released_total 1]") {
				t.Fatalf("proposed: %+v", p)
			}
			if got := s.rawStock(); got != broken {
				t.Fatalf("a proposal changed the stock: %s", got)
			}
			report := s.mustApprove(task, all)
			wantOutcomes(t, report, map[approval.Outcome]int{approval.Applied: 1})
			s.wantStock(units-4, 4, 1)
			if !report.Resolved || s.state(task) != pgstore.TaskResolved {
				t.Error("nothing is left behind the task, and it is not resolved")
			}
			s.setState(lua.StatePaused, lua.StateActive)
			s.wantFindings(reconcile.CheckCancelledHoldsStock)
			s.keepsPromises()
			s.wantRecountAudited(broken)
		})
	}
}

// wantRecountAudited wants who, what, before, after and why.
func (s *shop) wantRecountAudited(before string) {
	s.t.Helper()
	var actor, reason, was, is string
	err := s.db.QueryRow(s.t.Context(), `
		SELECT actor, reason, concat_ws(' ', detail#>>'{before,recount,seen,initial}', detail#>>'{before,recount,seen,available}',
		         detail#>>'{before,recount,seen,reserved}', detail#>>'{before,recount,seen,released_total}'),
		       concat_ws(' ', detail#>>'{after,stock,initial}', detail#>>'{after,stock,available}', detail#>>'{after,stock,reserved}')
		FROM seckill.audit_log WHERE subject = $1 AND action = 'repair_ended'`, s.scope.Tag()).Scan(&actor, &reason, &was, &is)
	if err != nil || actor != "alice" || reason != "looked at it" || "["+was+"]" != before || is != "20 16 4" {
		s.t.Errorf("audit trail: %s %q, before [%s], after %s: %v", actor, reason, was, is, err)
	}
}

// Whatever moves between what was shown and its approval: nothing is done.
func TestRecountThatMoved(t *testing.T) {
	t.Parallel()
	for name, move := range map[string]func(s *shop){
		"the stock":        func(s *shop) { s.setStock("available", 1) },
		"resumed":          func(s *shop) { s.setState(lua.StatePaused, lua.StateActive) },
		"an order is gone": func(s *shop) { s.exec(`DELETE FROM shop.orders WHERE status = 'CREATED'`) },
		"a reservation that nothing finds": func(s *shop) {
			s.redis.ZRem(s.t.Context(), s.scope.IndexKey(reservation.ReservationExpiry), s.ids[2])
		},
		"units that a transfer brought": func(s *shop) { s.brought(5) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			s.sold()
			s.setStock("available", 5)
			task := s.task(reconcile.CheckInvariantBroken)
			s.pause()
			plan := s.show(task, all)
			if plan.Proposals[0].Action != approval.Recount {
				t.Fatalf("%+v", plan.Proposals)
			}
			move(s)
			before := s.rawStock()
			report, err := s.approver.Apply(t.Context(), plan, alice)
			if err != nil {
				t.Fatal(err)
			}
			wantOutcomes(t, report, map[approval.Outcome]int{approval.Moved: 1})
			if got := s.rawStock(); got != before {
				t.Errorf("stock %s, was %s", got, before)
			}
		})
	}
}

// sibling gives the version a second bucket, which has so many of its units.
func (s *shop) sibling(has int64) {
	s.t.Helper()
	s.exec(`UPDATE seckill.scope_allocation SET total = 2 * total, buckets = 2`)
	s.exec(`INSERT INTO seckill.scope SELECT (jsonb_populate_record(s, '{"bucket_id": 1}')).* FROM seckill.scope AS s`)
	scope, now := s.scope, time.Now()
	scope.Bucket = 1
	b := s.runner.Batch()
	r := b.Provision(scope, lua.ProvisionArgs{
		State: lua.StateActive, StartsAtMS: now.Add(-time.Minute).UnixMilli(), EndsAtMS: now.Add(time.Hour).UnixMilli(),
		RetentionUntilMS: now.Add(2 * time.Hour).UnixMilli(), SchemaVersion: 1, Initial: has,
	})
	s.run(b)
	if reply, err := r.Get(); err != nil || reply.Code != lua.ProvisionCreated {
		s.t.Fatalf("provision: %+v, %v", reply, err)
	}
}

// A transfer that took units away and whose row the journal lost must not give
// them back: they are in the other bucket.
func TestRecountOfALostTransfer(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.sold()
	s.sibling(units + 5)
	s.setStock("initial", units-5)
	task := s.task(reconcile.CheckInvariantBroken)
	s.pause()
	plan := s.show(task, all)
	if p := plan.Proposals[0]; p.Action != approval.None || !strings.Contains(p.Why, "the buckets would have 45 of the 40") {
		t.Errorf("proposed %s: %s %s", p.Action, p.Does, p.Why)
	}
}

// brought makes the bucket one that a transfer brought units, with its marker.
func (s *shop) brought(amount int64) {
	s.t.Helper()
	s.sibling(units - amount)
	s.exec(`INSERT INTO seckill.bucket_transfer (transfer_id, activity_id, sku_id, activity_version, donor_bucket, receiver_bucket, amount, created_by)
		VALUES ('t', $1, $2, $3, 1, 0, $4, 'test')`, s.scope.ActivityID, s.scope.SKUID, s.scope.Version, amount)
	s.redis.HSet(s.t.Context(), s.scope.TransferKey("t"), "leg", "in", "amount", amount, "updated_at_ms", 1)
}

// A bucket to which a transfer brought units is recounted with them.
func TestRecountCountsTransfers(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.sold()
	s.brought(5)
	s.setStock("available", 5)
	task := s.task(reconcile.CheckInvariantBroken)
	s.pause()
	report := s.mustApprove(task, all)
	wantOutcomes(t, report, map[approval.Outcome]int{approval.Applied: 1})
	s.wantStock(units+5-4, 4, 1)
}

// What cannot be read completely is not recounted.
func TestRecountWithoutEvidence(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.sold()
	s.setStock("available", 5)
	task := s.task(reconcile.CheckInvariantBroken)
	s.pause()
	plan := s.show(task, all)
	s.exec(`ALTER VIEW seckill.order_evidence RENAME TO gone`)
	before := s.rawStock()
	if report, err := s.approver.Apply(t.Context(), plan, alice); err == nil || report.Counts()[approval.Applied] > 0 {
		t.Errorf("%+v, %v", report, err)
	}
	if _, err := s.approver.Propose(t.Context(), task, all); err == nil {
		t.Error("it was proposed without evidence")
	}
	s.exec(`ALTER VIEW seckill.gone RENAME TO order_evidence`)
	s.exec(`ALTER TABLE shop.orders DISABLE TRIGGER ALL`)
	if report, err := s.approver.Apply(t.Context(), plan, alice); err == nil || report.Counts()[approval.Applied] > 0 {
		t.Errorf("without the order trigger: %+v, %v", report, err)
	}
	if got := s.rawStock(); got != before {
		t.Errorf("stock %s, was %s", got, before)
	}
}

// A lost reservation whose unit was never deducted takes it when it is restored:
// the recount leaves it to that.
func TestRecountLeavesRoomForRestores(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	lost := s.sold()
	h := s.orphan(lost)
	s.redis.Del(t.Context(), s.scope.UserKey(h["user_id"]))
	s.redis.HDel(t.Context(), s.scope.RequestKey(h["request_id"]), h["request_id"])
	s.setStock("available", 99)
	task := s.task(reconcile.CheckInvariantBroken)
	s.pause()
	wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Applied: 1})
	s.wantStock(units-3, 3, 1)
	d := s.daemon
	r := reconcile.Reconciler{
		Registry: d.Postgres, Stocks: d.Redis, Orders: d.Postgres, Members: d.Redis, Claims: d.Postgres, Mender: d.Redis,
		Guard: pgstore.RepairGuard{Store: d.Postgres, Sighted: d.Redis.Sighting}, Trail: d.Postgres,
	}
	o := reconcile.Options{
		Settle: time.Millisecond, Checks: []string{reconcile.CheckLostReservation},
		Repair: &reconcile.RepairOptions{Approve: func(int) bool { return true }, Policy: reservation.DefaultPolicy()},
	}
	if report, err := r.Run(t.Context(), o); err != nil || report.Verdict != reconcile.VerdictConsistent {
		t.Fatalf("%+v, %v", report, err)
	}
	s.wantStock(units-4, 4, 1)
	s.wantFindings(reconcile.CheckCancelledHoldsStock)
}

// A reservation that leaked is fenced, and its unit comes back with the recount
// of the paused scope: never before an order for it is ruled out.
func TestLeakedReservations(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.sold()
	leaked := []string{s.reserve("ENQUEUED"), s.reserve("ENQUEUED")}
	for _, id := range leaked {
		s.orphan(id)
		s.redis.ZRem(t.Context(), s.scope.IndexKey(reservation.ReservationExpiry), id)
	}
	s.wantFindings(reconcile.CheckCancelledHoldsStock, reconcile.CheckCountDrift, reconcile.CheckLeakedReservation, reconcile.CheckLeakedReservation)
	task := s.opened(reconcile.CheckLeakedReservation)
	drift := s.task(reconcile.CheckCountDrift)
	s.pause()
	if p := s.show(drift, all).Proposals; len(p) != 1 || p[0].Action != approval.None || !strings.Contains(p[0].Why, "approve its fence") {
		t.Fatalf("a recount before the fences: %+v", p)
	}
	s.wantStock(units-6, 6, 1)

	plan := s.show(task, approval.Selection{Max: 1})
	if len(plan.Proposals) != 1 || !plan.Truncated {
		t.Fatalf("at most one: %+v", plan)
	}
	report := s.mustApprove(task, all)
	wantOutcomes(t, report, map[approval.Outcome]int{approval.Applied: 2})
	if report.Resolved {
		t.Error("it is resolved before the unit is back")
	}
	for _, id := range leaked {
		if s.claim(id) != reservation.OutcomeFenced || s.order(id) == nil {
			t.Errorf("an order can still come for %s", id)
		}
	}
	s.wantStock(units-6, 6, 1)
	if p := s.show(task, all).Proposals; len(p) != 1 || p[0].Action != approval.Recount {
		t.Fatalf("after the fences: %+v", p)
	}
	report = s.mustApprove(task, all)
	wantOutcomes(t, report, map[approval.Outcome]int{approval.Applied: 1})
	if !report.Resolved {
		t.Error("it is not resolved")
	}
	s.wantStock(units-4, 4, 1)
	s.setState(lua.StatePaused, lua.StateActive)
	s.wantFindings(reconcile.CheckCancelledHoldsStock)
	if p := s.show(drift, all).Proposals; len(p) != 1 || p[0].Action != approval.None {
		t.Errorf("nothing to recount: %+v", p)
	}
}

// Kinds without a safe action show the evidence of each reservation and the
// step that a person takes; approving them does nothing, and says so.
func TestKindsThatAreExplained(t *testing.T) {
	t.Parallel()
	for kind, c := range map[string]struct {
		fault func(s *shop) string
		says  []string
	}{
		reconcile.CheckOrderCreatedWithoutOrder: {func(s *shop) string {
			id := s.reserve("ENQUEUED")
			b := s.runner.Batch()
			b.Transition(s.scope, lua.TransitionArgs{ReservationID: id, Target: reservation.StatusOrderCreated, OrderID: "o-lost"})
			s.run(b)
			return id
		}, []string{"Redis has order o-lost", "restore the row"}},
		reconcile.CheckOrderAfterFence: {func(s *shop) string {
			id := s.reserve("ENQUEUED")
			s.exec(`SELECT outcome FROM seckill.fence_reservations(ARRAY[$1], 'test', ARRAY[$2])`, id, s.scope.Tag())
			s.exec(`ALTER TABLE shop.orders DISABLE TRIGGER ALL`)
			s.exec(`INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
				VALUES ('late', $1, 'q0', $2, $3, $4, 0, 'u0')`, id, s.scope.ActivityID, s.scope.SKUID, s.scope.Version)
			return id
		}, []string{"order late", "cancel or delete it"}},
		reconcile.CheckMalformedReservation: {func(s *shop) string {
			id := s.reserve()
			s.redis.HSet(s.t.Context(), s.scope.ReservationKey(id), "status", "ODD")
			return id
		}, []string{"reconciler show reservation ", "status"}},
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			id := c.fault(s)
			s.compare()
			task := s.opened(kind)
			before := s.rawStock()
			plan := s.show(task, all)
			if len(plan.Proposals) != 1 || plan.Proposals[0].ID != id || plan.Proposals[0].Action != approval.None {
				t.Fatalf("%+v", plan.Proposals)
			}
			for _, text := range c.says {
				if !strings.Contains(plan.Proposals[0].Why, text) {
					t.Errorf("%q does not say %q", plan.Proposals[0].Why, text)
				}
			}
			wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Nothing: 1})
			if got := s.rawStock(); got != before || s.state(task) != pgstore.TaskOpen {
				t.Errorf("stock %s, was %s; task %s", got, before, s.state(task))
			}
			if err := s.daemon.Postgres.ResolveTask(t.Context(), task.ID, "alice", "settled with the shop"); err != nil {
				t.Error(err)
			}
		})
	}
}

// A user who reserved again: taking a unit for the old order would take the
// marker from the new reservation, so nothing is proposed while that one counts.
func TestOrderAfterReleaseBesideANewerReservation(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id := s.reserve("ENQUEUED", "RELEASE_PENDING")
	s.release(id)
	s.mustOrder(id)
	newer := s.reserve("ENQUEUED", "RELEASE_PENDING")
	old, marker := s.hash(newer), s.scope.UserKey(s.hash(id)["user_id"])
	s.redis.Rename(t.Context(), s.scope.UserKey(old["user_id"]), marker)
	s.redis.HSet(t.Context(), s.scope.ReservationKey(newer), "user_id", s.hash(id)["user_id"])
	task := s.task(fencer.TaskOrderAfterRelease)
	plan := s.show(task, all)
	if p := plan.Proposals[0]; p.Action != approval.None || p.Expected.Newer != newer || !strings.Contains(p.Why, "names reservation "+newer) {
		t.Fatalf("%+v", p)
	}
	wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Nothing: 1})
	s.wantStatus(id, reservation.StatusReleased)
	if got := s.redis.Get(t.Context(), marker).Val(); got != newer {
		t.Errorf("the marker names %q", got)
	}
	// Once the newer one is released and no order can come for it, it is in nobody's way.
	s.exec(`SELECT outcome FROM seckill.fence_reservations(ARRAY[$1], 'test', ARRAY[$2])`, newer, s.scope.Tag())
	s.release(newer)
	s.redis.Set(t.Context(), marker, newer, time.Hour) // as a failover may leave it
	wantOutcomes(t, s.mustApprove(task, all), map[approval.Outcome]int{approval.Applied: 1})
	s.wantStatus(id, reservation.StatusOrderCreated)
}
