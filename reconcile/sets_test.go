package reconcile_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// settled is a sale at rest: the first 30 have orders, the next 20 wait, the
// last 10 are released.
func settled(t *testing.T, s *sale) []booking {
	t.Helper()
	all := s.reserve(60)
	s.order(all[:30]...)
	s.finish(all[:30]...)
	s.advance(all[40:50], reservation.StatusEnqueued)
	s.fence(all[50:]...)
	s.release(all[50:]...)
	return all
}

func (s *sale) advance(bookings []booking, path ...reservation.Status) {
	s.t.Helper()
	if err := advance(s.t.Context(), s.stocks.Writer(), bookings, path...); err != nil {
		s.t.Fatal(err)
	}
}

// fence claims reservations as FENCED.
func (s *sale) fence(bookings ...booking) {
	s.t.Helper()
	requests := make([]reservation.FenceRequest, len(bookings))
	for i, b := range bookings {
		requests[i] = reservation.FenceRequest{ID: b.id, Scope: b.scope}
	}
	results, err := s.orders.Fence(s.t.Context(), "test", requests)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, r := range results {
		if !r.Won {
			s.t.Fatalf("fence: %+v", r)
		}
	}
}

// unguarded does something in PostgreSQL past every trigger.
func (s *sale) unguarded(sql string, args ...any) {
	s.t.Helper()
	tx, err := s.db.Begin(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	for _, table := range []string{"shop.orders", "seckill.reservation_claim"} {
		if _, err := tx.Exec(s.t.Context(), `ALTER TABLE `+table+` DISABLE TRIGGER ALL`); err != nil {
			s.t.Fatal(err)
		}
	}
	if _, err := tx.Exec(s.t.Context(), sql, args...); err != nil {
		s.t.Fatal(err)
	}
	for _, sql := range []string{
		`ALTER TABLE shop.orders ENABLE TRIGGER ALL`, `ALTER TABLE seckill.reservation_claim ENABLE TRIGGER ALL`,
		// "ENABLE TRIGGER" is not ENABLE ALWAYS, as they were installed.
		`DO $$ DECLARE t record; BEGIN
			FOR t IN SELECT tgrelid::regclass AS r, tgname FROM pg_trigger
			         WHERE NOT tgisinternal AND tgrelid IN ('shop.orders'::regclass, 'seckill.reservation_claim'::regclass)
			LOOP EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', t.r, t.tgname); END LOOP; END $$`,
	} {
		if _, err := tx.Exec(s.t.Context(), sql); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := tx.Commit(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

// lose removes a reservation's hash, and its unit with everything that names
// it if all of its reserve is to be lost.
func (s *sale) lose(b booking, all bool) {
	s.t.Helper()
	s.do("del", b.scope.ReservationKey(b.id))
	if !all {
		return
	}
	s.do("del", b.scope.UserKey(b.user))
	s.do("hdel", b.scope.RequestKey(b.user), b.user)
	s.do("zrem", b.scope.IndexKey(reservation.SendPending), b.id)
	s.do("zrem", b.scope.IndexKey(reservation.ReservationExpiry), b.id)
	s.leak(b.scope, -1)
}

func (s *sale) deep() reconcile.Options {
	return reconcile.Options{Settle: 20 * time.Millisecond, Batch: 100, Deep: true}
}

// faultCase injects one fault into a settled sale.
type faultCase struct {
	fault   func(s *sale, all []booking) (subject string)
	buckets int64    // of the sale; 0 means 1
	also    []string // findings that the fault brings about besides, as "check"
	// incomplete says that what is left cannot be compared.
	incomplete bool
	// byRepair says that only a repair finds it.
	byRepair bool
	// heal is what a person does; repaired says that a repair does the rest.
	heal     func(s *sale, all []booking)
	repaired bool
}

// approved repairs whatever is planned.
func approved() *reconcile.RepairOptions {
	return &reconcile.RepairOptions{Approve: func(int) bool { return true }, Policy: reservation.DefaultPolicy()}
}

// repaired wants that a plan changes nothing, that the repair heals, and that
// the report says what it did.
func (s *sale) repaired(check reconcile.Check, subject string) {
	s.t.Helper()
	o := s.deep()
	o.Repair = &reconcile.RepairOptions{Policy: reservation.DefaultPolicy()}
	for range 2 {
		if f := only(s.t, s.run(o), subject); f.Repair.State != reconcile.RepairStatePlanned {
			s.t.Errorf("planned: %+v", f.Repair)
		}
	}
	o.Repair = approved()
	r := s.run(o)
	if r.Verdict != reconcile.VerdictConsistent || len(r.Incomplete) != 0 {
		s.t.Errorf("after the repair: %s\n%+v\n%+v", r.Verdict, r.Findings, r.Incomplete)
	}
	f := only(s.t, r, subject)
	if f.Repair.State != reconcile.RepairStateDone || f.Repair.Before == nil || cmp.Equal(f.Repair.Before, f.Repair.After) {
		s.t.Errorf("repair: %+v", f.Repair)
	}
	if n := r.Summary[check.ID]; n != 0 {
		s.t.Errorf("summary: %d stand", n)
	}
}

// only is the one finding about a subject.
func only(tb testing.TB, r *reconcile.Report, subject string) reconcile.Finding {
	tb.Helper()
	var found []reconcile.Finding
	for _, f := range r.Findings {
		if f.Subject == subject {
			found = append(found, f)
		}
	}
	if len(found) != 1 {
		tb.Fatalf("%d findings about %s\n%+v\n%+v", len(found), subject, r.Findings, r.Incomplete)
	}
	return found[0]
}

const insertOrderSQL = `INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
	VALUES ($1, $2, $3, $4, $5, $6, $7, $3)`

func (s *sale) insert(order string, b booking) {
	s.t.Helper()
	s.unguarded(insertOrderSQL, order, b.id, b.user, b.scope.ActivityID, b.scope.SKUID, b.scope.Version, b.scope.Bucket)
}

// faults has a case for every check.
var faults = map[string]faultCase{
	reconcile.CheckConfigMissing: {
		fault:      func(s *sale, _ []booking) string { s.do("del", s.scopes[0].StockKey()); return s.scopes[0].Tag() },
		incomplete: true,
	},
	reconcile.CheckInvariantBroken: {
		fault: func(s *sale, _ []booking) string {
			s.do("hincrby", s.scopes[0].StockKey(), "available", 3)
			return s.scopes[0].Tag()
		},
		heal: func(s *sale, _ []booking) { s.do("hincrby", s.scopes[0].StockKey(), "available", -3) },
	},
	reconcile.CheckAllocationMismatch: {
		fault: func(s *sale, _ []booking) string { s.allocate(7); return s.scopes[0].Tag() },
		heal:  func(s *sale, _ []booking) { s.allocate(-7) },
	},
	reconcile.CheckStuckTransfer: {
		buckets: 2,
		fault: func(s *sale, _ []booking) string {
			row := s.plan(0, 1, 5)
			s.out(row)
			s.aged(row)
			return s.scopes[0].Tag()
		},
		repaired: true,
	},
	reconcile.CheckTransferConflict: {
		buckets: 2,
		fault: func(s *sale, _ []booking) string {
			s.out(s.plan(0, 1, 5))
			s.allocate(7)
			return s.scopes[0].Tag()
		},
		heal: func(s *sale, _ []booking) { s.allocate(-7) },
	},
	reconcile.CheckCountDrift: {
		fault: func(s *sale, _ []booking) string { s.leak(s.scopes[0], 2); return s.scopes[0].Tag() },
		heal:  func(s *sale, _ []booking) { s.leak(s.scopes[0], -2) },
	},
	reconcile.CheckUnregisteredScope: {
		fault: func(s *sale, _ []booking) string {
			stray := s.newBooking()
			stray.scope.Bucket = 9
			s.order(stray)
			return stray.scope.Tag()
		},
		heal: func(s *sale, _ []booking) { s.unguarded(`DELETE FROM shop.orders WHERE bucket_id = 9`) },
	},
	reconcile.CheckOversold: {
		fault: func(s *sale, _ []booking) string { s.shrink(20, 0, 20); return s.scopes[0].Tag() },
		also:  []string{"count_drift"},
		heal:  func(s *sale, _ []booking) { s.shrink(initial, initial-50, 50) },
	},
	reconcile.CheckStateRegressed: {
		fault: func(s *sale, _ []booking) string { s.state("PAUSED"); return s.scopes[0].Tag() },
		heal:  func(s *sale, _ []booking) { s.state("ACTIVE") },
	},
	reconcile.CheckRetentionRisk: {
		fault: func(s *sale, _ []booking) string {
			s.do("hset", s.scopes[0].MetaKey(), "retention_until_ms", time.Now().Add(time.Hour).UnixMilli())
			return s.scopes[0].Tag()
		},
		heal: func(s *sale, _ []booking) {
			s.do("hset", s.scopes[0].MetaKey(), "retention_until_ms", time.Now().Add(24*time.Hour).UnixMilli())
		},
	},
	reconcile.CheckSoldMismatch: {
		fault: func(s *sale, _ []booking) string { s.counter(29); return s.scopes[0].Tag() },
		heal:  func(s *sale, _ []booking) { s.counter(30) },
	},
	reconcile.CheckEnvironment: {
		fault: func(s *sale, _ []booking) string {
			s.nodes = setUp(func(n *reconcile.RedisNode) { n.EvictionPolicy = "allkeys-lru" })
			return "redis 10.0.0.1:6379 maxmemory-policy"
		},
		heal: func(s *sale, _ []booking) { s.nodes = setUp(func(*reconcile.RedisNode) {}) },
	},
	reconcile.CheckMalformedReservation: {
		fault: func(s *sale, all []booking) string {
			s.do("hset", all[0].scope.ReservationKey(all[0].id), "status", "BROKEN")
			return all[0].id
		},
		heal: func(s *sale, all []booking) {
			s.do("hset", all[0].scope.ReservationKey(all[0].id), "status", "ORDER_CREATED")
		},
	},
	reconcile.CheckLostReservation: {
		fault:    func(s *sale, all []booking) string { s.lose(all[0], true); return all[0].id },
		also:     []string{"count_drift"},
		repaired: true,
	},
	reconcile.CheckDeficit: {
		fault: func(s *sale, all []booking) string {
			s.reserve(initial - 50) // sold out
			s.lose(all[0], true)
			s.reserve(1) // and its unit sold again
			return all[0].id
		},
		also:     []string{"count_drift"},
		byRepair: true,
		heal: func(s *sale, all []booking) { // a unit comes free
			s.fence(all[40])
			s.release(all[40])
		},
		repaired: true,
	},
	reconcile.CheckStatusBehind: {
		fault:    func(s *sale, all []booking) string { s.order(all[30]); return all[30].id },
		repaired: true,
	},
	reconcile.CheckOrderAfterReleasePending: {
		fault: func(s *sale, all []booking) string {
			s.order(all[40])
			s.advance(all[40:41], reservation.StatusReleasePending)
			return all[40].id
		},
		repaired: true,
	},
	reconcile.CheckOrderAfterRelease: {
		fault: func(s *sale, all []booking) string {
			s.order(all[40])
			s.release(all[40])
			return all[40].id
		},
		also: []string{"count_drift"},
		heal: func(s *sale, all []booking) {
			s.exec(`UPDATE shop.orders SET status = 'CANCELLED' WHERE reservation_id = $1`, all[40].id)
		},
	},
	reconcile.CheckReleaseWithoutClaim: {
		fault: func(s *sale, all []booking) string {
			s.unguarded(`DELETE FROM seckill.reservation_claim WHERE reservation_id = $1`, all[50].id)
			return all[50].id
		},
		repaired: true,
	},
	reconcile.CheckOrderCreatedWithoutOrder: {
		fault: func(s *sale, all []booking) string { s.finish(all[30]); return all[30].id },
		also:  []string{"count_drift"},
		heal:  func(s *sale, all []booking) { s.order(all[30]) },
	},
	reconcile.CheckOrderAfterFence: {
		fault: func(s *sale, all []booking) string { s.insert("late", all[50]); return all[50].id },
		also:  []string{"count_drift"},
		heal: func(s *sale, _ []booking) {
			s.unguarded(`DELETE FROM shop.orders WHERE order_id = 'late'`)
		},
	},
	reconcile.CheckOrderMissing: {
		fault: func(s *sale, all []booking) string {
			s.unguarded(`DELETE FROM shop.orders WHERE reservation_id = $1`, all[0].id)
			return all[0].id
		},
		also: []string{"count_drift"},
		heal: func(s *sale, all []booking) { s.insert("o-"+all[0].id, all[0]) },
	},
	reconcile.CheckOrderWithoutClaim: {
		fault: func(s *sale, all []booking) string {
			s.unguarded(`DELETE FROM seckill.reservation_claim WHERE reservation_id = $1`, all[0].id)
			return all[0].id
		},
		heal: func(s *sale, all []booking) {
			s.exec(`SELECT seckill.claim_reservation($1, $2, $3)`, all[0].id, "o-"+all[0].id, all[0].scope.Tag())
		},
	},
	reconcile.CheckDuplicateOrder: {
		fault: func(s *sale, all []booking) string {
			s.unguarded(`UPDATE shop.orders SET order_id = 'another' WHERE reservation_id = $1`, all[0].id)
			return all[0].id
		},
		heal: func(s *sale, all []booking) {
			s.unguarded(`UPDATE shop.orders SET order_id = 'o-' || reservation_id WHERE reservation_id = $1`, all[0].id)
		},
	},
	reconcile.CheckOrderScopeMismatch: {
		fault: func(s *sale, all []booking) string {
			s.unguarded(`UPDATE shop.orders SET user_id = 'somebody' WHERE reservation_id = $1`, all[0].id)
			return all[0].id
		},
		heal: func(s *sale, all []booking) {
			s.unguarded(`UPDATE shop.orders SET user_id = $2 WHERE reservation_id = $1`, all[0].id, all[0].user)
		},
	},
	reconcile.CheckUnknownOrderStatus: {
		fault: func(s *sale, all []booking) string {
			s.exec(`ALTER TABLE shop.orders DROP CONSTRAINT orders_status_check`)
			s.exec(`UPDATE shop.orders SET status = 'ODD' WHERE reservation_id = $1`, all[0].id)
			return all[0].id
		},
		heal: func(s *sale, all []booking) {
			s.exec(`UPDATE shop.orders SET status = 'PAID' WHERE reservation_id = $1`, all[0].id)
		},
	},
	reconcile.CheckOrphanMember: {
		fault: func(s *sale, all []booking) string { s.lose(all[40], false); return all[40].id },
		heal: func(s *sale, all []booking) {
			s.do("hdel", all[40].scope.RequestKey(all[40].user), all[40].user)
			s.do("zrem", all[40].scope.IndexKey(reservation.ReservationExpiry), all[40].id)
			s.leak(all[40].scope, -1)
		},
	},
	reconcile.CheckLeakedReservation: {
		fault: func(s *sale, all []booking) string {
			s.lose(all[40], false)
			s.do("zrem", all[40].scope.IndexKey(reservation.ReservationExpiry), all[40].id)
			return all[40].id
		},
		also: []string{"count_drift"},
		heal: func(s *sale, all []booking) {
			s.do("hdel", all[40].scope.RequestKey(all[40].user), all[40].user)
			s.leak(all[40].scope, -1)
		},
	},
	reconcile.CheckUnindexedReservation: {
		fault: func(s *sale, all []booking) string {
			s.do("zrem", all[30].scope.IndexKey(reservation.SendPending), all[30].id)
			return all[30].id
		},
		repaired: true,
	},
	reconcile.CheckLeftoverMember: {
		fault: func(s *sale, all []booking) string {
			s.do("zadd", all[0].scope.IndexKey(reservation.ReservationExpiry), 1, all[0].id)
			return all[0].id
		},
		repaired: true,
	},
	reconcile.CheckUserMarkerMismatch: {
		fault:    func(s *sale, all []booking) string { s.do("del", all[0].scope.UserKey(all[0].user)); return all[0].id },
		repaired: true,
	},
	reconcile.CheckRequestResultMismatch: {
		fault: func(s *sale, all []booking) string {
			s.do("hset", all[0].scope.RequestKey(all[0].user), all[0].user, "nonsense")
			return all[0].user
		},
		heal: func(s *sale, all []booking) {
			s.do("hset", all[0].scope.RequestKey(all[0].user), all[0].user, "0|"+all[0].id+"|-1|QUEUED|"+all[0].user)
		},
	},
	reconcile.CheckMissingTTL: {
		fault: func(s *sale, all []booking) string {
			s.do("persist", all[0].scope.ReservationKey(all[0].id))
			return all[0].id
		},
		heal: func(s *sale, all []booking) {
			s.do("pexpire", all[0].scope.ReservationKey(all[0].id), 1_000_000)
		},
	},
	reconcile.CheckCancelledHoldsStock: {
		fault: func(s *sale, all []booking) string {
			s.exec(`UPDATE shop.orders SET status = 'CANCELLED' WHERE reservation_id = $1`, all[0].id)
			return all[0].id
		},
		heal: func(s *sale, all []booking) {
			s.exec(`UPDATE shop.orders SET status = 'PAID' WHERE reservation_id = $1`, all[0].id)
		},
	},
}

// allocate adds units to a bucket that the registry does not know of.
func (s *sale) allocate(units int) {
	s.t.Helper()
	s.do("hincrby", s.scopes[0].StockKey(), "initial", units)
	s.do("hincrby", s.scopes[0].StockKey(), "available", units)
}

// shrink makes a version one of fewer units, on both sides.
func (s *sale) shrink(units, available, reserved int) {
	s.t.Helper()
	s.exec(`UPDATE seckill.scope_allocation SET total = $2 WHERE activity_id = $1`, s.scopes[0].ActivityID, units)
	s.do("hset", s.scopes[0].StockKey(), "initial", units, "available", available, "reserved", reserved)
}

// state changes the registered state and not that in Redis.
func (s *sale) state(state string) {
	s.t.Helper()
	s.exec(`UPDATE seckill.scope SET state = $2 WHERE activity_id = $1`, s.scopes[0].ActivityID, state)
}

// Every check has a case, and every case's fault is that finding.
func TestChecks(t *testing.T) {
	for _, check := range reconcile.Checks() {
		t.Run(check.ID, func(t *testing.T) {
			c, there := faults[check.ID]
			if !there {
				t.Fatal("no fault is injected for this check")
			}
			s := one(t, max(c.buckets, 1))
			all := settled(t, s)
			clean(t, s, "before the fault")
			subject := c.fault(s, all)
			o := s.deep()
			if c.byRepair {
				o.Repair = approved()
			}
			wantFindings(t, s.run(o), check, subject, c)
			if c.heal != nil {
				c.heal(s, all)
			}
			if c.repaired {
				s.repaired(check, subject)
			}
			if c.repaired || c.heal != nil {
				clean(t, s, "after it was healed")
			}
		})
	}
}

func clean(t *testing.T, s *sale, when string) {
	t.Helper()
	if r := s.run(s.deep()); r.Verdict != reconcile.VerdictConsistent || len(r.Findings) != 0 {
		t.Fatalf("%s: %s\n%+v\n%+v", when, r.Verdict, r.Findings, r.Incomplete)
	}
}

// oneRound are the checks of which one round is enough (interface §7).
var oneRound = []string{reconcile.CheckMissingTTL, reconcile.CheckEnvironment}

// wantFindings wants the one finding of the check, and besides it only those
// that it brings about.
func wantFindings(t *testing.T, r *reconcile.Report, check reconcile.Check, subject string, c faultCase) {
	t.Helper()
	var got []string
	for _, f := range r.Findings {
		if f.Check == check.ID {
			got = append(got, f.Check+" "+f.Subject)
			if f.Severity != check.Severity || f.Repair.Kind != check.Repair || f.Message == "" || (f.Rounds < 2 && !slices.Contains(oneRound, check.ID)) {
				t.Errorf("finding %+v", f)
			}
		} else {
			got = append(got, f.Check)
		}
	}
	want := append([]string{check.ID + " " + subject}, c.also...)
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("findings (-want +got):\n%s\n%s", diff, fmt.Sprintf("%+v\n%+v", r.Findings, r.Incomplete))
	}
	verdict := reconcile.VerdictConsistent
	if check.Severity.Drift() {
		verdict = reconcile.VerdictDrift
	}
	if c.incomplete {
		verdict = reconcile.VerdictIncomplete
	}
	if r.Verdict != verdict || (len(r.Incomplete) != 0) != c.incomplete {
		t.Errorf("verdict %s, want %s; incomplete %+v", r.Verdict, verdict, r.Incomplete)
	}
}
