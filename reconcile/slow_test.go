//go:build slow

package reconcile_test

import (
	"runtime/debug"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reconcile"
)

// A deep pass streams: its memory does not grow with the sale. The heap is
// measured against the same sale grown fourfold, in one process.
func TestSlowDeepMemory(t *testing.T) {
	const least, most, within = 50_000, 200_000, 10 << 20
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true})
	s := newSale(t, stack, []string{stack.Redis().Addr()}, 1)
	s.do("hset", s.scopes[0].StockKey(), "initial", most, "available", most)
	s.exec(`UPDATE seckill.scope_allocation SET total = $2 WHERE activity_id = $1`, s.scopes[0].ActivityID, most)
	defer debug.SetGCPercent(debug.SetGCPercent(20)) // what is live, and little garbage

	var peaks []uint64
	sold := 0
	for _, n := range []int{least, most} {
		s.sell(n - sold)
		sold = n
		o := reconcile.Options{Settle: 100 * time.Millisecond, Deep: true}
		var looked int64
		o.Progress = func(done, _ int64) { looked = done }
		s.run(o) // connections and pools are there
		peak, stop := watchHeap()
		began := time.Now()
		r := s.run(o)
		took := time.Since(began)
		stop()
		if r.Verdict != reconcile.VerdictConsistent || looked < int64(n) {
			t.Fatalf("%d reservations: %s, %d looked at\n%+v\n%+v", n, r.Verdict, looked, r.Findings, r.Incomplete)
		}
		peaks = append(peaks, peak.Load())
		t.Logf("%d reservations: peak %.1f MiB, %v, %.0f members/s", n, float64(peak.Load())/(1<<20), took.Round(time.Millisecond), float64(looked)/took.Seconds())
	}
	if peaks[1] > peaks[0]+within {
		t.Errorf("peaks %v: it grew by %.1f MiB", peaks, float64(peaks[1]-peaks[0])/(1<<20))
	}
}
