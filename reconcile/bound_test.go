package reconcile_test

import (
	"fmt"
	"strconv"
	"testing"

	"pgregory.net/rapid"

	"github.com/seckill/reconciler/reconcile"
)

// A bounded report loses no count, starves no check and stays within its limit.
func TestBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		report := reconcile.Report{Summary: map[string]int{}}
		repaired, sizes := map[string]int{}, map[string]int{}
		for i := range rapid.IntRange(0, 300).Draw(t, "findings") {
			f := reconcile.Finding{Check: fmt.Sprintf("check%d", rapid.IntRange(0, 5).Draw(t, "check")), Subject: strconv.Itoa(i)}
			if rapid.IntRange(0, 3).Draw(t, "repaired") == 0 {
				f.Repair.State = reconcile.RepairStateDone
				repaired[f.Check]++
			} else {
				report.Summary[f.Check]++
			}
			sizes[f.Check+strconv.FormatBool(f.Stands())]++
			report.Findings = append(report.Findings, f)
		}
		limit := rapid.IntRange(20, 400).Draw(t, "limit")
		bounded := report.Bounded(limit)
		if len(bounded.Findings) > limit || len(bounded.Findings) < min(limit, len(report.Findings))-len(sizes) {
			t.Fatalf("%d of %d findings with limit %d", len(bounded.Findings), len(report.Findings), limit)
		}
		standing, done, kept := map[string]int{}, map[string]int{}, map[string]int{}
		last := -1
		for _, f := range bounded.Findings {
			var at int
			if _, err := fmt.Sscan(f.Subject, &at); err != nil || at <= last {
				t.Fatalf("finding %s comes after %d", f.Subject, last)
			}
			last = at
			kept[f.Check+strconv.FormatBool(f.Stands())]++
			if f.Stands() {
				standing[f.Check]++
			} else {
				done[f.Check]++
			}
		}
		for check, n := range report.Summary {
			if standing[check]+bounded.Omitted[check] != n {
				t.Errorf("%s: %d rows and %d omitted of %d", check, standing[check], bounded.Omitted[check], n)
			}
		}
		for check, n := range repaired {
			if done[check]+bounded.OmittedRepaired[check] != n {
				t.Errorf("%s: %d repaired rows and %d omitted of %d", check, done[check], bounded.OmittedRepaired[check], n)
			}
		}
		for group, n := range sizes {
			if kept[group] < min(n, limit/len(sizes)) {
				t.Errorf("%s has %d of %d with limit %d for %d groups", group, kept[group], n, limit, len(sizes))
			}
		}
	})
}
