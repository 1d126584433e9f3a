package reconcile_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// traffic sells until it is stopped: reservations, orders, cancellations and
// releases, each as the gateway, the consumer and the compensator make them.
type traffic struct {
	sale     *sale
	fences   bool // releases are fenced first, as the daemon does
	group    sync.WaitGroup
	cancel   context.CancelFunc
	mu       sync.Mutex
	finished atomic.Int64
	failed   chan error
}

func (s *sale) startTraffic(sellers int, fences bool) *traffic {
	ctx, cancel := context.WithCancel(s.t.Context())
	tr := &traffic{sale: s, fences: fences, cancel: cancel, failed: make(chan error, sellers)}
	for range sellers {
		tr.group.Go(func() {
			if err := tr.sell(ctx); err != nil && !errors.Is(err, context.Canceled) && ctx.Err() == nil {
				tr.failed <- err
			}
		})
	}
	s.t.Cleanup(tr.stop)
	return tr
}

func (tr *traffic) stop() {
	tr.cancel()
	tr.group.Wait()
	select {
	case err := <-tr.failed:
		tr.sale.t.Errorf("the traffic broke down: %v", err)
	default:
	}
}

func (tr *traffic) next() booking {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.sale.newBooking()
}

// sell goes through one reservation after another. One of eight becomes an
// order and the others are released, so that the stock lasts.
func (tr *traffic) sell(ctx context.Context) error {
	runner := tr.sale.stocks.Writer()
	for i := 0; ctx.Err() == nil; i++ {
		b := tr.next()
		if err := reserveAll(ctx, runner, []booking{b}); err != nil {
			return err
		}
		if i%8 != 0 {
			if tr.fences {
				if _, err := tr.sale.orders.Fence(ctx, "test", []reservation.FenceRequest{{ID: b.id, Scope: b.scope}}); err != nil {
					return err
				}
			}
			if err := compensate(ctx, runner, []booking{b}); err != nil {
				return err
			}
			continue
		}
		if err := orderAndDeduct(ctx, tr.sale.db, b); err != nil {
			return err
		}
		if err := advance(ctx, runner, []booking{b}, reservation.StatusEnqueued, reservation.StatusOrderCreated); err != nil {
			return err
		}
		if i%32 == 0 {
			if _, err := tr.sale.db.Exec(ctx, `UPDATE shop.orders SET status = 'CANCELLED' WHERE reservation_id = $1`, b.id); err != nil {
				return err
			}
		}
		tr.finished.Add(1)
	}
	return nil
}

// orderAndDeduct creates an order and counts its unit, in one transaction.
func orderAndDeduct(ctx context.Context, db *pgxpool.Pool, b booking) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if err := insertOrder(ctx, tx, b); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `UPDATE shop.stock SET sold = sold + 1 WHERE activity_id = $1`, b.scope.ActivityID)
		return err
	})
}

// Under traffic nothing is ever found, and one fault in its midst is: with the
// few reservations of a sale that runs well in reservation_expiry, and with the
// many pages of one whose messages do not get through.
func TestSaleUnderTraffic(t *testing.T) {
	for name, waiting := range map[string]int{"few wait": 0, "many wait": 5000} {
		t.Run(name, func(t *testing.T) {
			s := one(t, 1)
			s.do("hset", s.scopes[0].StockKey(), "initial", 1_000_000, "available", 1_000_000)
			s.exec(`UPDATE seckill.scope_allocation SET total = 1000000 WHERE activity_id = $1`, s.scopes[0].ActivityID)
			s.counter(0)
			s.exec(`UPDATE shop.stock SET total = 1000000`)
			s.reserve(waiting)
			s.underTraffic()
		})
	}
}

func (s *sale) underTraffic() {
	t := s.t
	tr := s.startTraffic(4, false)
	defer tr.stop()
	runs, moving := 0, 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end) || moving == 0; runs++ {
		r := s.run(s.options())
		if r.Verdict != reconcile.VerdictConsistent {
			t.Fatalf("run %d: %v\n%+v\n%+v", runs, short(r), r.Findings, r.Incomplete)
		}
		if r.Scopes[0].InMotion {
			moving++
		}
	}
	before := tr.finished.Load()

	s.leak(s.scopes[0], 1)
	fault := time.Now()
	tries := 1
	r := s.run(s.options())
	for ; r.Verdict == reconcile.VerdictConsistent; tries++ { // the range still held zero
		r = s.run(s.options())
	}
	s.want(r, "drift", "count_drift 0", "b0 +1")
	if !r.Scopes[0].InMotion {
		t.Error("the scope is not marked as in motion")
	}
	t.Logf("%d runs without a finding, %d of them in motion, %d orders meanwhile; the fault was found by run %d after %v, %d orders later",
		runs, moving, before, tries, time.Since(fault).Round(time.Millisecond), tr.finished.Load()-before)
}

// A deep pass over a hot scope finds nothing that is only in motion, and the one
// fault in the midst of it.
func TestDeepUnderTraffic(t *testing.T) {
	s := one(t, 1)
	s.do("hset", s.scopes[0].StockKey(), "initial", 1_000_000, "available", 1_000_000)
	s.exec(`UPDATE seckill.scope_allocation SET total = 1000000 WHERE activity_id = $1`, s.scopes[0].ActivityID)
	all := s.reserve(2000)
	s.order(all[:1000]...)
	s.finish(all[:1000]...)
	tr := s.startTraffic(4, true)
	defer tr.stop()
	o := s.deep()
	o.Settle, o.Batch = 500*time.Millisecond, 250
	runs, moving, looked := 0, 0, int64(0)
	o.Progress = func(int64, int64) { looked++ }
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end) || moving == 0; runs++ {
		r := s.run(o)
		if r.Verdict != reconcile.VerdictConsistent {
			t.Fatalf("run %d: %s\n%+v\n%+v", runs, r.Verdict, standing(r), r.Incomplete)
		}
		if r.Scopes[0].InMotion {
			moving++
		}
	}
	s.lose(all[0], true)
	r := s.run(o)
	found := standing(r)
	for _, f := range found {
		if f.Check != reconcile.CheckLostReservation && f.Check != reconcile.CheckCountDrift {
			t.Errorf("%+v", f)
		}
	}
	if r.Summary[reconcile.CheckLostReservation] != 1 || r.Verdict != reconcile.VerdictDrift {
		t.Errorf("the fault was not found: %s\n%+v\n%+v", r.Verdict, found, r.Incomplete)
	}
	t.Logf("%d deep runs without a finding, %d of them in motion, %d pages, %d orders meanwhile", runs, moving, looked, tr.finished.Load())
}

// standing are the findings that make a drift.
func standing(r *reconcile.Report) []reconcile.Finding {
	var found []reconcile.Finding
	for _, f := range r.Findings {
		if f.Severity.Drift() {
			found = append(found, f)
		}
	}
	return found
}
