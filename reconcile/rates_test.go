//go:build bench

package reconcile_test

import (
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// room gives each bucket of the version so many units.
func (s *sale) room(units int) {
	s.t.Helper()
	for _, scope := range s.scopes {
		s.do("hset", scope.StockKey(), "initial", units, "available", units)
	}
	s.exec(`UPDATE seckill.scope SET initial = $2 WHERE activity_id = $1`, s.scopes[0].ActivityID, units)
	s.exec(`UPDATE seckill.scope_allocation SET total = $2 WHERE activity_id = $1`, s.scopes[0].ActivityID, units*len(s.scopes))
}

// fastest is the shortest of some runs: what else the machine does only adds.
func fastest(runs int, do func()) time.Duration {
	best := time.Duration(1<<63 - 1)
	for range runs {
		began := time.Now()
		do()
		best = min(best, time.Since(began))
	}
	return best
}

// What each level of a run costs, beside the bare pipelined reads of the same
// keys and rows, in one process and on one stack. Half of the reservations have
// orders, and the others wait.
func TestBenchRates(t *testing.T) {
	const n, runs = 60_000, 3
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true})
	s := newSale(t, stack, []string{stack.Redis().Addr()}, 1)
	s.room(n)
	began := time.Now()
	s.sell(n)
	t.Logf("%d reservations, %d orders: filled in %v", n, n/2, time.Since(began).Round(time.Second))
	consistent := func(r *reconcile.Report) {
		if r.Verdict != reconcile.VerdictConsistent {
			t.Fatalf("%v\n%+v\n%+v", short(r), r.Findings, r.Incomplete)
		}
	}
	quick := s.options()
	quick.Batch, quick.Settle = 1000, time.Millisecond
	deep := reconcile.Options{Deep: true, Settle: time.Millisecond}
	set := reconcile.Options{Settle: time.Millisecond} // every check: the scope with drift is looked through
	rate := func(what string, took, bare time.Duration) {
		t.Logf("%-6s %9.0f reservations/s, bare reads %9.0f/s: ratio %.2f", what, n/took.Seconds(), n/bare.Seconds(), float64(bare)/float64(took))
	}
	rate("quick", fastest(runs, func() { consistent(s.run(quick)) }), fastest(runs, s.bareQuick))
	bare := fastest(runs, func() {
		if got := s.bareMembers(); got != n {
			t.Fatalf("%d members", got)
		}
		s.bareQuick()
	})
	rate("deep", fastest(runs, func() { consistent(s.run(deep)) }), bare)
	s.leak(s.scopes[0], 1)
	rate("set", fastest(runs, func() {
		if r := s.run(set); r.Summary[reconcile.CheckCountDrift] != 1 || r.Summary[reconcile.CheckLeakedReservation] != 0 {
			t.Fatalf("%v", short(r))
		}
	}), bare)
}

// bareQuick reads what a quick run reads, page by page, and compares nothing.
func (s *sale) bareQuick() {
	ctx := s.t.Context()
	for _, snapshot := range s.stocks.Snapshots(ctx, s.scopes) {
		if snapshot.Err != nil {
			s.t.Fatal(snapshot.Err)
		}
	}
	for _, scope := range s.scopes {
		for cursor, first := uint64(0), true; first || cursor != 0; first = false {
			page := s.stocks.ExpiryPages(ctx, []reconcile.PageRequest{{Scope: scope, Cursor: cursor, Limit: 1000}})[0]
			if page.Err != nil {
				s.t.Fatal(page.Err)
			}
			var orders int
			if err := s.db.QueryRow(ctx, `SELECT count(*) FROM seckill.order_evidence WHERE reservation_id = ANY ($1)`, page.IDs).Scan(&orders); err != nil {
				s.t.Fatal(err)
			}
			cursor = page.Cursor
		}
	}
	var orders int
	if err := s.db.QueryRow(ctx, `SELECT count(*) FROM seckill.order_evidence WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`,
		s.scopes[0].ActivityID, s.scopes[0].SKUID, s.scopes[0].Version).Scan(&orders); err != nil {
		s.t.Fatal(err)
	}
}

// A deep pass over a million reservations in 32 buckets, in bounded memory:
// the heap in use, sampled every 5 ms, and beside it what the system gives the
// process.
func TestBenchDeepMillion(t *testing.T) {
	const n, buckets, most = 1_000_000, 32, 150 << 20
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true})
	s := newSale(t, stack, []string{stack.Redis().Addr()}, buckets)
	s.room(2 * n / buckets) // users are spread by their hashes, not evenly
	began := time.Now()
	s.sellMany(n)
	t.Logf("filled in %v", time.Since(began).Round(time.Second))
	debug.FreeOSMemory()
	var looked int64
	o := reconcile.Options{Deep: true, Settle: 100 * time.Millisecond, Progress: func(done, _ int64) { looked = done }}
	heap, stop := watchHeap()
	resident, stopResident := watchResident(t)
	began = time.Now()
	r := s.run(o)
	took := time.Since(began)
	stop()
	stopResident()
	t.Logf("%d members looked at in %v: %.0f reservations/s; peak heap in use %.1f MiB, resident %.1f MiB",
		looked, took.Round(time.Millisecond), n/took.Seconds(), mib(heap.Load()), mib(resident.Load()))
	if r.Verdict != reconcile.VerdictConsistent || looked < n {
		t.Errorf("%s, %d looked at\n%+v\n%+v", r.Verdict, looked, r.Findings, r.Incomplete)
	}
	if heap.Load() > most {
		t.Errorf("peak heap %.1f MiB, want at most %d", mib(heap.Load()), most>>20)
	}
}

// sellMany is sell without the order trigger and the consumer's scripts: it
// writes what they would have left.
func (s *sale) sellMany(n int) {
	s.t.Helper()
	const page = 10_000
	ctx := s.t.Context()
	s.exec(`ALTER TABLE shop.orders DISABLE TRIGGER ALL`)
	for range n / page {
		ordered := s.reserve(page)[:page/2]
		var orders, claims [][]any
		_, err := s.redis.Pipelined(ctx, func(p redis.Pipeliner) error {
			for _, b := range ordered {
				orders = append(orders, []any{"o-" + b.id, b.id, b.user, b.scope.ActivityID, b.scope.SKUID, b.scope.Version, b.scope.Bucket, b.user})
				claims = append(claims, []any{b.id, "ORDER", b.scope.ActivityID, b.scope.SKUID, b.scope.Version, b.scope.Bucket, b.user, "o-" + b.id, "test"})
				p.HSet(ctx, b.scope.ReservationKey(b.id), "status", "ORDER_CREATED", "order_id", "o-"+b.id)
				p.ZRem(ctx, b.scope.IndexKey(reservation.SendPending), b.id)
				p.ZRem(ctx, b.scope.IndexKey(reservation.ReservationExpiry), b.id)
			}
			return nil
		})
		if err != nil {
			s.t.Fatal(err)
		}
		for table, c := range map[string]struct {
			columns []string
			rows    [][]any
		}{
			"shop.orders": {
				[]string{"order_id", "reservation_id", "request_id", "activity_id", "sku_id", "activity_version", "bucket_id", "user_id"}, orders,
			},
			"seckill.reservation_claim": {
				[]string{"reservation_id", "outcome", "activity_id", "sku_id", "activity_version", "bucket_id", "user_id", "order_id", "claimed_by"}, claims,
			},
		} {
			if _, err := s.db.CopyFrom(ctx, strings.Split(table, "."), c.columns, pgx.CopyFromRows(c.rows)); err != nil {
				s.t.Fatal(err)
			}
		}
	}
	s.exec(`ANALYZE`)
}

func mib(n uint64) float64 { return float64(n) / (1 << 20) }

// watchResident samples the resident memory of the process.
func watchResident(t *testing.T) (peak *atomic.Uint64, stop func()) {
	t.Helper()
	peak = &atomic.Uint64{}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for tick := time.NewTicker(20 * time.Millisecond); ; {
			select {
			case <-done:
				return
			case <-tick.C:
				text, err := os.ReadFile("/proc/self/statm")
				if err != nil {
					continue
				}
				pages, _ := strconv.ParseUint(strings.Fields(string(text))[1], 10, 64)
				peak.Store(max(peak.Load(), pages*uint64(os.Getpagesize())))
			}
		}
	}()
	return peak, func() { close(done); <-ended }
}

// The walk over a SKU's orders by pages, with the index that it goes by and
// without.
func TestBenchOrderPages(t *testing.T) {
	const n, others, page = 100_000, 400_000, 1000
	s := newSale(t, stacktest.Shared(t), []string{stacktest.Shared(t).Redis().Addr()}, 1)
	s.exec(`ALTER TABLE shop.orders DISABLE TRIGGER ALL`)
	for sku, rows := range map[string]int{s.scopes[0].SKUID: n, "other": others} {
		s.exec(`INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
			SELECT 'o' || h, h, 'q', $1, $2, 1, 0, h FROM (SELECT md5(i::text || $2) AS h FROM generate_series(1, $3::bigint) AS i) AS t`,
			s.scopes[0].ActivityID, sku, rows)
	}
	walk := func() {
		read := 0
		for after := ""; ; {
			ids, err := s.orders.OrderPage(t.Context(), s.scopes[0].ActivityID, s.scopes[0].SKUID, after, page)
			if err != nil {
				t.Fatal(err)
			}
			if read += len(ids); len(ids) < page {
				break
			}
			after = ids[len(ids)-1]
		}
		if read != n {
			t.Fatalf("%d orders", read)
		}
	}
	s.exec(`ANALYZE shop.orders`)
	with := fastest(2, walk)
	s.exec(`DROP INDEX shop.orders_of_sku`)
	without := fastest(2, walk)
	t.Logf("%d orders among %d: %.0f/s with orders_of_sku, %.0f/s without", n, n+others, n/with.Seconds(), n/without.Seconds())
}
