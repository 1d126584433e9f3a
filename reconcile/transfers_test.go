package reconcile_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// filler moves units for repairs.
func (s *sale) filler(drift transfer.Drift) *transfer.Filler {
	return &transfer.Filler{
		Planner: &transfer.Planner{Journal: s.orders, Stocks: s.stocks, Drift: drift},
		Worker:  &transfer.Worker{Journal: s.orders, Stocks: s.stocks, Drift: drift, Tasks: s.orders},
		Actor:   "test",
	}
}

// plan journals a transfer.
func (s *sale) plan(donor, receiver, amount int64) transfer.Transfer {
	s.t.Helper()
	row := transfer.Transfer{
		ID: transfer.NewID(), Key: transfer.KeyOf(s.scopes[0]), Donor: donor, Receiver: receiver, Amount: amount,
		State: transfer.Planned, Reason: "test", CreatedBy: "test",
	}
	if err := s.orders.CreateTransfers(s.t.Context(), []transfer.Transfer{row}); err != nil {
		s.t.Fatal(err)
	}
	return row
}

// out runs the first leg, and no other.
func (s *sale) out(row transfer.Transfer) {
	s.t.Helper()
	o := s.stocks.MoveUnits(s.t.Context(), []transfer.Move{{Scope: row.DonorScope(), TransferID: row.ID, Leg: transfer.LegOut, Target: row.Amount}})[0]
	if o.Err != nil || !o.Changed {
		s.t.Fatalf("OUT: %+v", o)
	}
}

// aged makes row and marker as old as if nobody had driven the transfer.
func (s *sale) aged(row transfer.Transfer) {
	s.t.Helper()
	s.exec(`UPDATE seckill.bucket_transfer SET updated_at = updated_at - interval '1 hour' WHERE transfer_id = $1`, row.ID)
	s.do("hincrby", row.DonorScope().TransferKey(row.ID), "updated_at_ms", -time.Hour.Milliseconds())
}

// A transfer on its way is no difference, whether it has begun, is half done or
// done, and the initial stocks that it leaves are those that are expected.
func TestTransferOnItsWayIsNoFinding(t *testing.T) {
	every(t, 3, func(t *testing.T, s *sale) {
		t.Helper()
		sold(t, s)
		consistent := []string{"consistent", "b0 +0", "b1 +0", "b2 +0"}
		row := s.plan(0, 1, 300)
		s.want(s.run(s.options()), consistent...)
		s.out(row)
		s.want(s.run(s.options()), consistent...)
		if err := s.filler(s.reconciler()).FinishTransfers(t.Context(), s.scopes, false); err != nil {
			t.Fatal(err)
		}
		s.want(s.run(s.options()), consistent...)

		// The bucket that a finding names is the one whose stock is not what it should be.
		s.do("hincrby", s.scopes[2].StockKey(), "initial", 7)
		s.do("hincrby", s.scopes[2].StockKey(), "available", 7)
		r := s.run(s.options())
		s.want(r, "drift", "allocation_mismatch 2", "b0 +0", "b1 +0", "b2 +0")
		if f := r.Findings[0]; f.Evidence.Redis["in_transit"] != int64(0) || f.Evidence.Redis["initial"] != int64(1007) || f.Evidence.Postgres["initial"] != int64(1000) {
			t.Errorf("evidence %+v", f.Evidence)
		}
		s.do("hincrby", s.scopes[2].StockKey(), "initial", -7)
		s.do("hincrby", s.scopes[2].StockKey(), "available", -7)
	})
}

// A pair that nobody drives is found after a while, and a repair drives it.
func TestStuckTransfer(t *testing.T) {
	every(t, 2, func(t *testing.T, s *sale) {
		t.Helper()
		row := s.plan(0, 1, 300)
		s.out(row)
		s.want(s.run(s.options()), "consistent", "b0 +0", "b1 +0")
		o := s.options()
		o.StuckAfter = time.Nanosecond
		s.want(s.run(o), "drift", "stuck_transfer 0", "b0 +0", "b1 +0")
		s.aged(row)
		o = s.options()
		r := s.run(o)
		s.want(r, "drift", "stuck_transfer 0", "b0 +0", "b1 +0")
		f := r.Findings[0]
		if f.Rounds < 2 || f.Repair.Kind != reconcile.RepairAutomatic || !strings.Contains(f.Message, row.ID) {
			t.Errorf("finding %+v", f)
		}
		o.Repair = approved()
		r = s.run(o)
		s.want(r, "consistent", "stuck_transfer 0", "b0 +0", "b1 +0")
		after := fmt.Sprint(r.Findings[0].Repair.Before, r.Findings[0].Repair.After)
		if r.Findings[0].Repair.State != reconcile.RepairStateDone || !strings.Contains(after, "out:300") || !strings.Contains(after, "in:300") {
			t.Errorf("repair %+v", r.Findings[0].Repair)
		}
		s.want(s.run(s.options()), "consistent", "b0 +0", "b1 +0")
	})
}

// Of a held bucket nothing is moved, and a repair that could not do it says so.
func TestStuckTransferOfAHeldBucket(t *testing.T) {
	s := one(t, 2)
	row := s.plan(0, 1, 300)
	s.out(row)
	s.aged(row)
	if err := s.orders.HoldScopes(t.Context(), s.scopes[1:], "test", "test"); err != nil {
		t.Fatal(err)
	}
	o := s.options()
	o.Repair = approved()
	r := s.run(o)
	s.want(r, "drift", "stuck_transfer 0", "b0 +0", "b1 +0")
	if r.Findings[0].Repair.State != reconcile.RepairStateFailed {
		t.Errorf("repair %+v", r.Findings[0].Repair)
	}
}

func TestTransferConflict(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(s *sale, row transfer.Transfer)
		want  []string
	}{
		"a sum that is not right": {
			func(s *sale, _ transfer.Transfer) {
				s.do("hincrby", s.scopes[1].StockKey(), "initial", 7)
				s.do("hincrby", s.scopes[1].StockKey(), "available", 7)
			},
			[]string{"drift", "transfer_conflict 0", "b0 +0", "b1 +0"},
		},
		"the marker of the other leg": {
			func(s *sale, row transfer.Transfer) { s.do("hset", row.DonorScope().TransferKey(row.ID), "leg", "in") },
			[]string{"drift", "transfer_conflict 0", "b0 +0", "b1 +0"},
		},
		"a marker that is none": {
			func(s *sale, row transfer.Transfer) {
				s.do("hset", row.DonorScope().TransferKey(row.ID), "amount", "x")
			},
			[]string{"drift", "transfer_conflict 0", "b0 +0", "b1 +0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := one(t, 2)
			row := s.plan(0, 1, 300)
			s.out(row)
			c.spoil(s, row)
			o := s.options()
			o.Repair = approved()
			r := s.run(o)
			s.want(r, c.want...)
			if name != "a sum that is not right" {
				return
			}
			if text := fmt.Sprint(r.Findings[0].Evidence.Redis["unexpected_initial"]); text != "map[1:map[expected:1000 is:1007]]" {
				t.Errorf("the bucket that differs: %s", text)
			}
			// The worker's task and the report's are one: the report neither doubles nor ends it.
			worker := s.filler(s.reconciler()).Worker
			if _, err := worker.Pass(t.Context()); err == nil {
				t.Error("the worker moved units")
			}
			tasks, err := s.orders.Tasks(t.Context(), pgstore.TaskFilter{Kinds: []string{reconcile.CheckTransferConflict}})
			if err != nil || len(tasks) != 1 || tasks[0].Scope != r.Findings[0].Scope.Reservation().Tag() {
				t.Errorf("%+v, %v", tasks, err)
			}
		})
	}
}

// An order for which its bucket has no unit left gets one of another bucket.
func TestDeficitIsFilledByATransfer(t *testing.T) {
	every(t, 2, func(t *testing.T, s *sale) {
		t.Helper()
		all := settled(t, s)
		lost := []booking{}
		for _, b := range all[:30] { // with orders
			if b.scope.Bucket == 0 && len(lost) < 3 {
				lost = append(lost, b)
			}
		}
		for _, b := range lost {
			s.lose(b, true)
		}
		left := s.available(0)
		s.leaveNothing(0, left)
		o := s.deep()
		o.Repair = approved()
		r := s.run(o)
		if n := r.Summary[reconcile.CheckDeficit]; n != 3 {
			t.Fatalf("%d deficits without filling: %+v", n, r.Findings)
		}
		o.Repair.FillDeficit = true
		r = s.run(o)
		if r.Summary[reconcile.CheckDeficit] != 0 || r.Summary[reconcile.CheckLostReservation] != 0 || r.Summary[reconcile.CheckAllocationMismatch] != 0 {
			t.Fatalf("after filling: %+v", r.Findings)
		}
		rows, err := s.orders.Transfers(t.Context(), pgstore.TransferFilter{ActivityID: s.scopes[0].ActivityID})
		if err != nil || len(rows) != 1 || rows[0].Amount != 3 || rows[0].State != transfer.Done || rows[0].Reason != transfer.ReasonDeficit {
			t.Errorf("%+v, %v", rows, err)
		}
		if s.available(0) != 0 {
			t.Errorf("%d units are left in the bucket that had a deficit", s.available(0))
		}
	})
}

func (s *sale) available(bucket int) int64 {
	s.t.Helper()
	n, err := s.redis.HGet(s.t.Context(), s.scopes[bucket].StockKey(), "available").Int64()
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

// leaveNothing sells a bucket's units: as orders of users that keep them.
func (s *sale) leaveNothing(bucket int, units int64) {
	s.t.Helper()
	bookings := make([]booking, units)
	for i := range bookings {
		user := fmt.Sprintf("x%d", i)
		scope := s.scopes[bucket]
		bookings[i] = booking{scope, reservation.NewID([]byte("secret"), scope.ActivityID, scope.SKUID, user, user), user}
	}
	if err := reserveAll(s.t.Context(), s.stocks.Writer(), bookings); err != nil {
		s.t.Fatal(err)
	}
}

// Transfers run all the time while the version is reconciled: no run ever says
// anything, and at the end everything is where it should be.
func TestTransfersUnderReconciliation(t *testing.T) {
	s := one(t, 4)
	settled(t, s)
	filler := s.filler(s.reconciler())
	stop := make(chan struct{})
	var working sync.WaitGroup
	var failure error
	working.Go(func() {
		for n := int64(0); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			row := transfer.Transfer{
				ID: fmt.Sprint("t", n), Key: transfer.KeyOf(s.scopes[0]), Donor: n % 4, Receiver: (n + 1) % 4, Amount: 10,
				State: transfer.Planned, CreatedBy: "test",
			}
			if failure = s.orders.CreateTransfers(t.Context(), []transfer.Transfer{row}); failure != nil {
				return
			}
			if _, failure = filler.Worker.Pass(t.Context()); failure != nil {
				return
			}
			if n > 150 {
				return
			}
		}
	})
	for range 15 {
		r := s.run(s.options())
		if len(r.Findings) != 0 || slices.ContainsFunc(r.Incomplete, func(i reconcile.Incomplete) bool { return i.Source != reconcile.SourceRedis }) {
			t.Errorf("%s: %+v %+v", r.Verdict, r.Findings, r.Incomplete)
		}
	}
	close(stop)
	working.Wait()
	if failure != nil {
		t.Fatal(failure)
	}
	s.want(s.run(s.options()), "consistent", "b0 +0", "b1 +0", "b2 +0", "b3 +0")
}

// Deviations are those of the full run, and a bucket that cannot be counted is no
// zero.
func TestDeviations(t *testing.T) {
	s := one(t, 2)
	sold(t, s)
	s.leak(s.scopes[0], -2)
	got := s.reconciler().Deviations(t.Context(), s.scopes)
	if got[0].Units != -2 || got[0].Err != nil || got[1].Units != 0 || got[1].Err != nil {
		t.Errorf("%+v", got)
	}
	s.do("hset", s.scopes[1].StockKey(), "reserved", "many")
	unregistered := s.scopes[0]
	unregistered.Bucket = 9
	for _, d := range s.reconciler().Deviations(t.Context(), []reservation.Scope{s.scopes[1], unregistered}) {
		if d.Err == nil {
			t.Errorf("%+v", d)
		}
	}
}
