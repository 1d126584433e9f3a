package reservation_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/seckill/reconciler/reservation"
)

func claim(outcome reservation.Outcome, change ...func(*reservation.Claim)) *reservation.Claim {
	c := &reservation.Claim{
		Outcome: outcome, ActivityID: testScope.ActivityID, SKUID: testScope.SKUID,
		Version: testScope.Version, Bucket: testScope.Bucket, UserID: "u1",
	}
	if outcome == reservation.OutcomeOrder {
		c.OrderID = "o1"
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func order(change ...func(*reservation.Order)) reservation.Order {
	o := reservation.Order{
		OrderID: "o1", RequestID: "q1", ActivityID: testScope.ActivityID, SKUID: testScope.SKUID,
		Version: testScope.Version, Bucket: testScope.Bucket, UserID: "u1", Active: true, StatusKnown: true,
	}
	for _, f := range change {
		f(&o)
	}
	return o
}

func TestClassifyOrders(t *testing.T) {
	type evidence = reservation.OrderEvidence
	elsewhere := func(c *reservation.Claim) { c.ActivityID, c.Version = "other", 1 }
	for name, c := range map[string]struct {
		claim  *reservation.Claim
		orders []reservation.Order
		user   string
		want   evidence
	}{
		"nothing":         {want: evidence{State: "NONE"}},
		"order and claim": {claim: claim("ORDER"), orders: []reservation.Order{order()}, want: evidence{State: "ORDER", OrderID: "o1", Active: true}},
		"cancelled is an order": {
			claim:  claim("ORDER"),
			orders: []reservation.Order{order(func(o *reservation.Order) { o.Active = false })},
			want:   evidence{State: "ORDER", OrderID: "o1"},
		},
		"order without claim": {orders: []reservation.Order{order()}, want: evidence{State: "ORDER", OrderID: "o1", Active: true, Cause: "order_without_claim"}},
		"claim without ids": {
			claim:  claim("ORDER", func(c *reservation.Claim) { *c = reservation.Claim{Outcome: "ORDER", Version: -1, Bucket: -1} }),
			orders: []reservation.Order{order()},
			want:   evidence{State: "ORDER", OrderID: "o1", Active: true},
		},
		"fenced":                  {claim: claim("FENCED", func(c *reservation.Claim) { c.Reason = "lost" }), want: evidence{State: "FENCED", Reason: "lost"}},
		"rejected":                {claim: claim("REJECTED"), want: evidence{State: "REJECTED"}},
		"fenced for another":      {claim: claim("FENCED", elsewhere), want: evidence{State: "FENCED"}},
		"claim without order":     {claim: claim("ORDER"), want: evidence{State: "CONTRADICTORY", Cause: "order_missing", OrderID: "o1"}},
		"order beside a fence":    {claim: claim("FENCED"), orders: []reservation.Order{order()}, want: evidence{State: "CONTRADICTORY", Cause: "order_after_fence", OrderID: "o1", Active: true}},
		"order beside a reject":   {claim: claim("REJECTED"), orders: []reservation.Order{order()}, want: evidence{State: "CONTRADICTORY", Cause: "order_after_fence", OrderID: "o1", Active: true}},
		"outcome of a later time": {claim: claim("HELD"), want: evidence{State: "CONTRADICTORY", Cause: "unknown_order_status"}},
		"two orders": {
			claim: claim("ORDER"), orders: []reservation.Order{order(), order(func(o *reservation.Order) { o.OrderID = "o2" })},
			want: evidence{State: "CONTRADICTORY", Cause: "duplicate_order", OrderID: "o1", Active: true},
		},
		"claim of another order": {
			claim: claim("ORDER", func(c *reservation.Claim) { c.OrderID = "o2" }), orders: []reservation.Order{order()},
			want: evidence{State: "CONTRADICTORY", Cause: "duplicate_order", OrderID: "o1", Active: true},
		},
		"order of another activity": {claim: claim("ORDER"), orders: []reservation.Order{order(func(o *reservation.Order) { o.ActivityID = "x" })}, want: mismatch()},
		"order of another sku":      {claim: claim("ORDER"), orders: []reservation.Order{order(func(o *reservation.Order) { o.SKUID = "x" })}, want: mismatch()},
		"order of another version":  {claim: claim("ORDER"), orders: []reservation.Order{order(func(o *reservation.Order) { o.Version = 8 })}, want: mismatch()},
		"order of another bucket":   {claim: claim("ORDER"), orders: []reservation.Order{order(func(o *reservation.Order) { o.Bucket = 0 })}, want: mismatch()},
		"order of another user":     {claim: claim("ORDER"), orders: []reservation.Order{order(func(o *reservation.Order) { o.UserID = "u2" })}, want: mismatch()},
		"claim of another scope":    {claim: claim("ORDER", elsewhere), orders: []reservation.Order{order()}, want: mismatch()},
		"claim of another user":     {claim: claim("ORDER", func(c *reservation.Claim) { c.UserID = "u2" }), orders: []reservation.Order{order()}, want: mismatch()},
		"shop without version and bucket": {
			claim: claim("ORDER"), orders: []reservation.Order{order(func(o *reservation.Order) { o.Version, o.Bucket = -1, -1 })},
			want: evidence{State: "ORDER", OrderID: "o1", Active: true},
		},
		"unmapped status": {
			claim: claim("ORDER"), orders: []reservation.Order{order(func(o *reservation.Order) { o.StatusKnown, o.Active = false, false })},
			want: evidence{State: "CONTRADICTORY", Cause: "unknown_order_status", OrderID: "o1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := reservation.ClassifyOrders(testScope, "u1", reservation.Record{Claim: c.claim, Orders: c.orders})
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("hash gone, user not known", func(t *testing.T) {
		got := reservation.ClassifyOrders(testScope, "", reservation.Record{Claim: claim("ORDER"), Orders: []reservation.Order{order()}})
		if got.State != reservation.OrderExists {
			t.Errorf("got %+v", got)
		}
	})
}

func mismatch() reservation.OrderEvidence {
	return reservation.OrderEvidence{State: "CONTRADICTORY", Cause: "order_scope_mismatch", OrderID: "o1", Active: true}
}

func TestStronger(t *testing.T) {
	ranked := []reservation.MessageState{"UNKNOWN", "PENDING", "RETRYING", "DEAD", "CONSUMED", "ABSENT"}
	rapid.Check(t, func(t *rapid.T) {
		i, j := rapid.IntRange(0, 5).Draw(t, "i"), rapid.IntRange(0, 5).Draw(t, "j")
		a, b := reservation.MessageEvidence{State: ranked[i]}, reservation.MessageEvidence{State: ranked[j]}
		if got, want := a.Stronger(b).State, ranked[min(i, j)]; got != want {
			t.Fatalf("%s, %s: %s, want %s", a.State, b.State, got, want)
		}
	})
	if got := (reservation.MessageEvidence{State: "ABSENT"}).Stronger(reservation.MessageEvidence{}); got.State != "" {
		t.Errorf("evidence that was not gathered lost to %s", got.State)
	}
	old, young := reservation.MessageEvidence{State: "DEAD", SinceMS: 1}, reservation.MessageEvidence{State: "DEAD", SinceMS: 2}
	if got := old.Stronger(young); got.SinceMS != 2 {
		t.Errorf("of two dead copies the one of %d counts, want 2", got.SinceMS)
	}
}
