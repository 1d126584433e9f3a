package reconcile_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

func (s *sale) repairing(most int) reconcile.Options {
	o := s.deep()
	o.Repair = approved()
	o.Repair.Max = most
	return o
}

// states counts the findings by check and state of their repair.
func states(r *reconcile.Report) map[string]int {
	out := map[string]int{}
	for _, f := range r.Findings {
		if f.Check != reconcile.CheckCountDrift {
			out[f.Check+" "+string(f.Repair.State)]++
		}
	}
	return out
}

func wantStates(t *testing.T, r *reconcile.Report, verdict reconcile.Verdict, want map[string]int) {
	t.Helper()
	if diff := cmp.Diff(want, states(r)); diff != "" || r.Verdict != verdict {
		t.Errorf("%s, want %s; repairs (-want +got):\n%s\n%+v\n%+v", r.Verdict, verdict, diff, r.Findings, r.Incomplete)
	}
}

// After a failover that undid the last writes of a slot, one run with repairs
// leaves reserved equal to the orders (L2): units are given back before others
// are taken, so that there is one to take.
func TestRepairsAfterAFailover(t *testing.T) {
	every(t, 2, func(t *testing.T, s *sale) {
		t.Helper()
		all := settled(t, s)
		s.reserve(2*initial - 50 - 300) // none of the users below finds a bucket sold out
		for _, b := range all[:8] {     // reserves and all that followed were undone
			s.lose(b, true)
		}
		for _, b := range all[8:12] { // the hash alone was lost
			s.lose(b, false)
		}
		s.order(all[30:34]...) // the consumer's last step was undone
		s.fence(all[34:36]...) // a release was begun
		s.order(all[44:46]...)
		s.advance(all[44:46], reservation.StatusReleasePending)
		s.do("zrem", all[36].scope.IndexKey(reservation.ReservationExpiry), all[36].id)
		s.do("del", all[12].scope.UserKey(all[12].user))
		s.unguarded(`DELETE FROM seckill.reservation_claim WHERE reservation_id = $1`, all[55].id)
		wantStates(t, s.run(s.repairing(0)), reconcile.VerdictConsistent, map[string]int{
			"lost_reservation done": 12, "status_behind done": 6, "order_after_release_pending done": 2,
			"unindexed_reservation done": 1, "user_marker_mismatch done": 1, "release_without_claim done": 1,
		})
		clean(t, s, "afterwards")
	})
}

// Sold out, a lost order takes the unit that a begun release gives back, in the
// same run.
func TestReleasesComeBeforeRestores(t *testing.T) {
	s := one(t, 1)
	all := settled(t, s)
	s.reserve(initial - 50)
	s.lose(all[0], true)
	s.reserve(1)
	s.fence(all[40])
	wantStates(t, s.run(s.repairing(0)), reconcile.VerdictConsistent, map[string]int{"lost_reservation done": 1, "status_behind done": 1})
	clean(t, s, "afterwards")
}

// A run of few checks repairs what they find, and nothing else.
func TestRepairsOfChosenChecks(t *testing.T) {
	for _, checks := range [][]string{{reconcile.CheckLostReservation}, {reconcile.CheckDeficit}} {
		t.Run(checks[0], func(t *testing.T) {
			s := one(t, 1)
			all := settled(t, s)
			s.reserve(initial - 50)
			s.lose(all[0], true)
			s.reserve(1)
			s.order(all[30])
			o := s.repairing(0)
			o.Deep, o.Checks = false, checks
			r := s.run(o)
			wantStates(t, r, reconcile.VerdictDrift, map[string]int{"deficit failed": 1})
			if r.Summary[reconcile.CheckDeficit] != 1 || r.Findings[0].Severity != reconcile.SeverityCritical {
				t.Errorf("%+v %v", r.Findings, r.Summary)
			}
			s.fence(all[40])
			s.release(all[40])
			wantStates(t, s.run(o), reconcile.VerdictConsistent, map[string]int{"lost_reservation done": 1})
			wantStates(t, s.run(s.deep()), reconcile.VerdictDrift, map[string]int{"status_behind none": 1})
		})
	}
}

func TestMostRepairs(t *testing.T) {
	s := one(t, 1)
	all := settled(t, s)
	s.order(all[30:35]...)
	wantStates(t, s.run(s.repairing(2)), reconcile.VerdictDrift, map[string]int{"status_behind done": 2, "status_behind none": 3})
	wantStates(t, s.run(s.repairing(0)), reconcile.VerdictConsistent, map[string]int{"status_behind done": 3})
}

// What a repair may not touch, it leaves alone, and says so.
func TestRefusedRepairs(t *testing.T) {
	for name, c := range map[string]struct {
		fault  func(s *sale, all []booking)
		state  string
		detail string
	}{
		"held scope": {
			func(s *sale, all []booking) {
				s.order(all[30])
				s.exec(`UPDATE seckill.scope SET held_at = now(), held_by = 'test', held_reason = 'test' WHERE activity_id = $1`, s.scopes[0].ActivityID)
			}, "status_behind none", "holds the scope",
		},
		"the order trigger is not in place": {
			func(s *sale, all []booking) {
				s.fence(all[30])
				s.exec(`ALTER TABLE shop.orders DISABLE TRIGGER ALL`)
			}, "status_behind none", "no stock is moved",
		},
		"PostgreSQL has changed": {
			func(s *sale, all []booking) {
				s.fence(all[30])
				s.exec(`INSERT INTO seckill.manual_task (kind, scope, cause, count, sample) VALUES ('postgres_changed', '', 'test', 1, '{}')`)
			}, "status_behind none", "no stock is moved",
		},
		"Redis has seen PostgreSQL further on": {
			func(s *sale, all []booking) {
				s.fence(all[30])
				name, err := s.orders.ServerName(s.t.Context())
				if err != nil {
					s.t.Fatal(err)
				}
				check, err := s.orders.CheckIdentity(s.t.Context())
				if err != nil {
					s.t.Fatal(err)
				}
				seen := check.Identity
				seen.WALPosition += 1 << 40
				if err := s.stocks.SetSighting(s.t.Context(), name, seen.Encode()); err != nil {
					s.t.Fatal(err)
				}
			}, "status_behind none", "no stock is moved",
		},
		"released once": {
			func(s *sale, all []booking) {
				s.lose(all[0], false)
				s.exec(`INSERT INTO seckill.manual_task (kind, scope, cause, count, sample) VALUES ('order_after_release', $1, 'test', 1, $2)`,
					all[0].scope.Tag(), []string{all[0].id})
			}, "lost_reservation none", "order_after_release",
		},
		"an order that names no request": {
			func(s *sale, all []booking) {
				s.lose(all[0], false)
				s.unguarded(`UPDATE shop.orders SET request_id = '' WHERE reservation_id = $1`, all[0].id)
			}, "lost_reservation none", "restore it from the order",
		},
		"a marker that names another live order": {
			func(s *sale, all []booking) {
				s.do("set", all[0].scope.UserKey(all[0].user), all[1].id, "KEEPTTL")
			}, "user_marker_mismatch none", "a person decides",
		},
		"a marker of a released one": {
			func(s *sale, all []booking) {
				s.do("set", all[55].scope.UserKey(all[55].user), all[55].id, "PX", 100_000)
			}, "user_marker_mismatch none", "set it",
		},
		"confirm is manual": {
			func(s *sale, all []booking) {
				s.order(all[40])
				s.advance(all[40:41], reservation.StatusReleasePending)
			}, "order_after_release_pending none", "the policy leaves it to a person",
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := one(t, 1)
			all := settled(t, s)
			c.fault(s, all)
			before := s.dump()
			o := s.repairing(0)
			if strings.HasPrefix(name, "confirm") {
				o.Repair.Policy.Confirm = reservation.ConfirmManual
			}
			r := s.run(o)
			wantStates(t, r, reconcile.VerdictDrift, map[string]int{c.state: 1})
			if f := r.Findings[len(r.Findings)-1]; !strings.Contains(f.Repair.Detail, c.detail) {
				t.Errorf("repair %+v, want %q", f.Repair, c.detail)
			}
			if diff := cmp.Diff(before, s.dump()); diff != "" {
				t.Errorf("Redis was changed:\n%s", diff)
			}
		})
	}
}

// A marker moves from a reservation without an order to the order's own.
func TestMarkerOfAnOrder(t *testing.T) {
	s := one(t, 1)
	all := settled(t, s)
	s.do("set", all[0].scope.UserKey(all[0].user), all[55].id, "KEEPTTL")
	wantStates(t, s.run(s.repairing(0)), reconcile.VerdictConsistent, map[string]int{"user_marker_mismatch done": 1})
}

// dump is every key of the sale.
func (s *sale) dump() map[string]string {
	s.t.Helper()
	out := map[string]string{}
	keys := s.redis.Keys(s.t.Context(), "seckill:{"+s.scopes[0].Tag()+"}*").Val()
	for _, key := range keys {
		out[key] = s.redis.Dump(s.t.Context(), key).Val()
	}
	if len(out) == 0 {
		s.t.Fatal("nothing there")
	}
	return out
}

// One corrupt hash among many is one finding, and no repair.
func TestOneCorruptHashAmongMany(t *testing.T) {
	s := one(t, 1)
	s.do("hset", s.scopes[0].StockKey(), "initial", 20_000, "available", 20_000)
	s.exec(`UPDATE seckill.scope_allocation SET total = 20000 WHERE activity_id = $1`, s.scopes[0].ActivityID)
	all := s.reserve(10_000)
	s.do("hset", all[5000].scope.ReservationKey(all[5000].id), "expires_at_ms", "soon")
	o := s.repairing(0)
	o.Batch = 1000
	r := s.run(o)
	wantStates(t, r, reconcile.VerdictDrift, map[string]int{"malformed_reservation none": 1})
	if f := r.Findings[0]; f.Subject != all[5000].id || r.Summary[reconcile.CheckMalformedReservation] != 1 {
		t.Errorf("%+v", f)
	}
}

// lapsing is a PostgreSQL that answers the set checks for a while.
type lapsing struct {
	reconcile.Claims
	answers int
}

func (l *lapsing) Records(ctx context.Context, ids []string) (map[string]reservation.Record, error) {
	if l.answers--; l.answers < 0 {
		return nil, fmt.Errorf("read claims and orders: %w", context.DeadlineExceeded)
	}
	return l.Claims.Records(ctx, ids)
}

// PostgreSQL that goes away half way: incomplete, whatever was found until
// then, and nothing is repaired.
func TestClaimsGoAway(t *testing.T) {
	s := one(t, 1)
	all := settled(t, s)
	s.order(all[30:35]...)
	s.lose(all[0], true)
	before := s.dump()
	for answers := range 12 {
		r := s.reconciler()
		r.Claims = &lapsing{s.orders, answers}
		o := s.repairing(0)
		o.Batch = 20
		report, err := r.Run(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if report.Verdict != reconcile.VerdictIncomplete || slices.ContainsFunc(report.Findings, func(f reconcile.Finding) bool {
			return f.Repair.State == reconcile.RepairStateDone
		}) {
			t.Errorf("after %d answers: %s %+v", answers, report.Verdict, states(report))
		}
	}
	if diff := cmp.Diff(before, s.dump()); diff != "" {
		t.Errorf("Redis was changed:\n%s", diff)
	}
}
