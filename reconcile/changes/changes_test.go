package changes_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reconcile/changes"
)

func scope(bucket int64) reconcile.Scope {
	return reconcile.Scope{ActivityID: "a", SKUID: "s", Version: 1, Bucket: bucket}
}

// report has one scope, and findings written as check/bucket/subject, with a
// "+" at the end for one that was repaired.
func report(mode string, scopeVerdict reconcile.Verdict, reserved int64, findings ...string) *reconcile.Report {
	r := &reconcile.Report{
		Mode: mode, Verdict: scopeVerdict, Summary: map[string]int{reconcile.CheckCountDrift: 0, reconcile.CheckLostReservation: 0},
		Scopes: []reconcile.ScopeReport{{Scope: scope(0), Verdict: scopeVerdict, Redis: &reconcile.RedisCount{Reserved: &reserved}}},
	}
	for _, text := range findings {
		name, repaired := strings.CutSuffix(text, "+")
		parts := strings.Split(name, "/")
		f := reconcile.Finding{Check: parts[0], Severity: reconcile.SeverityCritical, Subject: parts[2]}
		var bucket int64
		_, _ = fmt.Sscan(parts[1], &bucket)
		f.Scope = scope(bucket)
		if repaired {
			f.Repair.State = reconcile.RepairStateDone
		} else {
			r.Summary[f.Check]++
		}
		r.Findings = append(r.Findings, f)
	}
	return r
}

func names(findings []reconcile.Finding) string {
	var all []string
	for _, f := range findings {
		all = append(all, fmt.Sprintf("%s/%d/%s", f.Check, f.Scope.Bucket, f.Subject))
	}
	return strings.Join(all, " ")
}

const (
	lost  = "lost_reservation/0/rid1"
	lost2 = "lost_reservation/0/rid2"
	count = "count_drift/0/a:s"
)

func TestBetween(t *testing.T) {
	const deep, quick, drift, consistent = reconcile.ModeDeep, reconcile.ModeQuick, reconcile.VerdictDrift, reconcile.VerdictConsistent
	partial := func(r *reconcile.Report, at *reconcile.Scope) *reconcile.Report {
		r.Incomplete, r.Verdict = []reconcile.Incomplete{{Source: "redis", Scope: at}}, reconcile.VerdictIncomplete
		return r
	}
	here, there := scope(0), scope(1)
	notMade := report(deep, drift, 1, count)
	delete(notMade.Summary, reconcile.CheckLostReservation)
	bounded := report(deep, drift, 1, lost2)
	bounded.Omitted = map[string]int{reconcile.CheckLostReservation: 5}
	for name, tt := range map[string]struct {
		before, after                  *reconcile.Report
		appeared, gone, stays, unclear string
	}{
		"new and persisting":         {report(deep, drift, 1, lost), report(deep, drift, 1, lost, lost2), lost2, "", lost, ""},
		"gone":                       {report(deep, drift, 1, lost), report(deep, consistent, 1), "", lost, "", ""},
		"repaired":                   {report(quick, drift, 1, lost), report(quick, consistent, 1, lost+"+"), "", lost, "", ""},
		"repaired before, and again": {report(deep, consistent, 1, lost+"+"), report(deep, drift, 1, lost), lost, "", "", ""},
		"scope not read":             {report(deep, drift, 1, lost), partial(report(deep, consistent, 1), &here), "", "", "", lost},
		"another scope not read":     {report(deep, drift, 1, lost), partial(report(deep, consistent, 1), &there), "", lost, "", ""},
		"registry not read":          {report(deep, drift, 1, lost), partial(report(deep, consistent, 1), nil), "", "", "", lost},
		"check not made":             {report(deep, drift, 1, lost), notMade, count, "", "", lost},
		"members not looked at":      {report(quick, drift, 1, lost, count), report(quick, consistent, 1), "", count, "", lost},
		"members looked at":          {report(quick, drift, 1, lost, count), report(quick, drift, 1, count), "", lost, count, ""},
		"scope not in the report":    {report(deep, drift, 1, "count_drift/7/x"), report(deep, consistent, 1), "", "", "", "count_drift/7/x"},
		"left out of the report":     {report(deep, drift, 1, lost), bounded, lost2, "", "", lost},
	} {
		d := changes.Between(tt.before, tt.after)
		got := []string{names(d.Appeared), names(d.Gone), names(d.Persist), names(d.Unclear)}
		if diff := cmp.Diff([]string{tt.appeared, tt.gone, tt.stays, tt.unclear}, got); diff != "" {
			t.Errorf("%s: new, gone, persisting, unclear (-want +got):\n%s", name, diff)
		}
	}
	if d := changes.Between(report(deep, drift, 1, lost), bounded); !slices.Equal(d.Truncated, []string{reconcile.CheckLostReservation}) {
		t.Errorf("truncated: %v", d.Truncated)
	}
}

func TestScopesThatDiffer(t *testing.T) {
	before, after := report(reconcile.ModeQuick, reconcile.VerdictConsistent, 3), report(reconcile.ModeQuick, reconcile.VerdictDrift, 4)
	after.Scopes[0].Deviation = new(int64(1))
	before.Scopes = append(before.Scopes, reconcile.ScopeReport{Scope: scope(1)})
	after.Scopes = append(after.Scopes, reconcile.ScopeReport{Scope: scope(2), Verdict: reconcile.VerdictIncomplete})
	var got []string
	for _, s := range changes.Between(before, after).Scopes {
		parts := []string{fmt.Sprintf("%d %s %s>%s", s.Bucket, s.Change, s.Verdict.Old, s.Verdict.New)}
		for _, n := range s.Numbers {
			parts = append(parts, fmt.Sprintf("%s:%v>%v", n.Name, show(n.Old), show(n.New)))
		}
		got = append(got, strings.Join(parts, " "))
	}
	want := []string{"0 changed consistent>drift reserved:3>4 deviation:?>1", "1 removed >", "2 added >incomplete"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func show(n *int64) string {
	if n == nil {
		return "?"
	}
	return strconv.FormatInt(*n, 10)
}

// Every finding that stands in one of the reports is in exactly one list, and a
// report does not differ from itself.
func TestNothingIsLost(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(label string) *reconcile.Report {
			var findings []string
			seen := map[string]bool{}
			for range rapid.IntRange(0, 12).Draw(t, label) {
				f := fmt.Sprintf("%s/%d/r%d", rapid.SampledFrom([]string{"count_drift", "lost_reservation"}).Draw(t, "check"),
					rapid.IntRange(0, 1).Draw(t, "bucket"), rapid.IntRange(0, 3).Draw(t, "subject"))
				if !seen[f] {
					seen[f] = true
					findings = append(findings, f+rapid.SampledFrom([]string{"", "", "+"}).Draw(t, "repaired"))
				}
			}
			return report(rapid.SampledFrom([]string{reconcile.ModeQuick, reconcile.ModeDeep}).Draw(t, "mode"),
				rapid.SampledFrom([]reconcile.Verdict{reconcile.VerdictConsistent, reconcile.VerdictDrift}).Draw(t, "verdict"), 1, findings...)
		}
		before, after := draw("before"), draw("after")
		d := changes.Between(before, after)
		if got := len(d.Persist) + len(d.Gone) + len(d.Unclear); got != before.Standing() {
			t.Fatalf("%d of the %d findings before", got, before.Standing())
		}
		if got := len(d.Persist) + len(d.Appeared); got != after.Standing() {
			t.Fatalf("%d of the %d findings after", got, after.Standing())
		}
		if same := changes.Between(after, after); len(same.Appeared)+len(same.Gone)+len(same.Unclear)+len(same.Scopes) != 0 {
			t.Fatalf("differs from itself: %+v", same)
		}
	})
}
