package reconcile

import (
	"testing"

	"pgregory.net/rapid"
)

// However the reads fall into a sale, the range holds the true deviation.
func TestRangeHoldsTheDeviation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.Uint64().Draw(t, "seed"), rapid.Int64Range(1, 4).Draw(t, "buckets"), 60)
		w.steps(rapid.IntRange(0, 300).Draw(t, "sold before"))
		w.busy = rapid.IntRange(0, 12).Draw(t, "busy")
		fault := rapid.Int64Range(-5, 5).Draw(t, "fault")
		scope := w.scope(0)
		w.stock[scope].Reserved += fault
		w.stock[scope].Initial += fault // what the count has to find, not the invariant
		if rapid.Bool().Draw(t, "bucketless") {
			w.bucketless()
			w.busy = 0 // new orders name a bucket
		}
		for _, s := range w.reading(t.Context(), rapid.IntRange(1, 7).Draw(t, "batch"), rapid.IntRange(1, 3).Draw(t, "tries")) {
			want := int64(0)
			if s.scope == scope {
				want = fault
			}
			if s.failed() || !s.counted {
				t.Fatalf("%s: %v", s.scope, s.failures)
			}
			if want < s.lo || want > s.hi {
				t.Fatalf("%s: range [%d, %d] does not hold %d", s.scope, s.lo, s.hi, want)
			}
			if !s.moved && s.lo != s.hi {
				t.Fatalf("%s: range [%d, %d] of numbers that did not move", s.scope, s.lo, s.hi)
			}
		}
	})
}

// A sale without faults is never drift, whatever the traffic.
func TestTrafficIsNoDrift(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.Uint64().Draw(t, "seed"), rapid.Int64Range(1, 4).Draw(t, "buckets"), 200)
		w.steps(rapid.IntRange(0, 200).Draw(t, "sold before"))
		w.busy = rapid.IntRange(1, 20).Draw(t, "busy")
		report, err := w.reconciler().Run(t.Context(), Options{Batch: rapid.IntRange(1, 50).Draw(t, "batch")})
		if err != nil {
			t.Fatal(err)
		}
		if report.Verdict != VerdictConsistent {
			t.Fatalf("%s: %+v %+v", report.Verdict, report.Findings, report.Incomplete)
		}
	})
}

// A fault is found with its exact size once the traffic pauses for a moment.
func TestFaultIsFound(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(rapid.Uint64().Draw(t, "seed"), 2, 300)
		w.steps(rapid.IntRange(100, 300).Draw(t, "sold before"))
		fault := rapid.Int64Range(-3, 3).Filter(func(n int64) bool { return n != 0 }).Draw(t, "fault")
		w.stock[w.scope(1)].Reserved += fault
		w.stock[w.scope(1)].Available -= fault // the sum still holds
		report, err := w.reconciler().Run(t.Context(), Options{Batch: 10})
		if err != nil {
			t.Fatal(err)
		}
		if len(report.Findings) != 1 || report.Verdict != VerdictDrift || report.Summary[CheckCountDrift] != 1 {
			t.Fatalf("%s: %+v %+v", report.Verdict, report.Findings, report.Incomplete)
		}
		f := report.Findings[0]
		if f.Check != CheckCountDrift || f.Scope.Bucket != 1 || f.Rounds != 2 || *report.Scopes[1].Deviation != fault {
			t.Fatalf("finding %+v, deviation %d, want %d", f, *report.Scopes[1].Deviation, fault)
		}
	})
}
