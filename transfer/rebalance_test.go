package transfer_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// shelf is a bucket as a look sees it.
type shelf struct {
	available, asked int64
	state            string // "" means ACTIVE
	held             bool
}

var saleStart = time.Date(2026, 11, 11, 20, 0, 0, 0, time.UTC)

// look makes a look at a version with these buckets, an hour into its sale.
func look(transfers []transfer.Transfer, shelves ...shelf) (before, now transfer.Look) {
	v := transfer.Version{
		Key: transfer.Key{ActivityID: "a", SKUID: "s", Version: 1}, Count: int64(len(shelves)),
		StartsAt: saleStart, EndsAt: saleStart.Add(2 * time.Hour), Transfers: transfers,
	}
	books := transfer.Books{Version: v, Buckets: map[int64]transfer.Reading{}}
	now = transfer.Look{Requests: map[int64]int64{}}
	before = transfer.Look{Requests: map[int64]int64{}}
	for i, s := range shelves {
		id := int64(i)
		state := s.state
		if state == "" {
			state = "ACTIVE"
		}
		books.Version.Buckets = append(books.Version.Buckets, transfer.Bucket{ID: id, Initial: s.available + 5, State: state, Held: s.held})
		books.Version.Allocated += s.available + 5
		books.Buckets[id] = transfer.Reading{State: state, Initial: s.available + 5, Available: s.available, Reserved: 5, Markers: map[string]transfer.Marker{}}
		before.Requests[id], now.Requests[id] = 100, 100+s.asked
	}
	now.Books = books
	return before, now
}

var usual = transfer.Limits{Share: 50, MinUnits: 1, MaxUnits: 1000, CoolDown: time.Minute}

func TestRebalance(t *testing.T) {
	an := saleStart.Add(time.Hour)
	past := func(age time.Duration, state transfer.State) []transfer.Transfer {
		return []transfer.Transfer{{ID: "old", Donor: 0, Receiver: 1, Amount: 1, State: state, CreatedAt: an.Add(-age)}}
	}
	limits := func(change func(*transfer.Limits)) transfer.Limits {
		l := usual
		change(&l)
		return l
	}
	for name, c := range map[string]struct {
		shelves   []shelf
		transfers []transfer.Transfer
		limits    transfer.Limits
		at        time.Time
		want      []string // from>to:units
	}{
		"half of what is left":          {shelves: []shelf{{available: 40}, {asked: 9}}, want: []string{"0>1:20"}},
		"the last unit":                 {shelves: []shelf{{available: 1}, {asked: 9}}, want: []string{"0>1:1"}},
		"nobody asks":                   {shelves: []shelf{{available: 40}, {}}},
		"nobody is sold out":            {shelves: []shelf{{available: 40}, {available: 1, asked: 9}}},
		"nobody has any":                {shelves: []shelf{{asked: 3}, {asked: 9}}},
		"the donor is asked, too":       {shelves: []shelf{{available: 40, asked: 30}, {asked: 9}}, want: []string{"0>1:5"}},
		"the donor needs all":           {shelves: []shelf{{available: 40, asked: 40}, {asked: 9}}},
		"what a donor keeps":            {shelves: []shelf{{available: 40}, {asked: 9}}, limits: limits(func(l *transfer.Limits) { l.Keep = 30 }), want: []string{"0>1:5"}},
		"all at once":                   {shelves: []shelf{{available: 40}, {asked: 9}}, limits: limits(func(l *transfer.Limits) { l.Share = 100 }), want: []string{"0>1:40"}},
		"even parts, most asked first":  {shelves: []shelf{{available: 10}, {asked: 3}, {asked: 9}}, want: []string{"0>2:3", "0>1:2"}},
		"one unit, two that want it":    {shelves: []shelf{{available: 1}, {asked: 3}, {asked: 9}}, want: []string{"0>2:1"}},
		"from those that have most":     {shelves: []shelf{{available: 4}, {available: 20}, {asked: 9}}, want: []string{"1>2:10", "0>2:2"}},
		"at most so many":               {shelves: []shelf{{available: 40}, {asked: 9}}, limits: limits(func(l *transfer.Limits) { l.MaxUnits = 7 }), want: []string{"0>1:7"}},
		"fewer are not worth it":        {shelves: []shelf{{available: 8}, {asked: 9}}, limits: limits(func(l *transfer.Limits) { l.MinUnits = 5 })},
		"worth it for one of two":       {shelves: []shelf{{available: 16}, {asked: 3}, {asked: 9}}, limits: limits(func(l *transfer.Limits) { l.MinUnits = 5 }), want: []string{"0>2:8"}},
		"a held donor":                  {shelves: []shelf{{available: 40, held: true}, {asked: 9}}},
		"a held receiver":               {shelves: []shelf{{available: 40}, {asked: 9, held: true}}},
		"a paused donor":                {shelves: []shelf{{available: 40, state: "PAUSED"}, {asked: 9}}},
		"before the sale":               {shelves: []shelf{{available: 40}, {asked: 9}}, at: saleStart.Add(-time.Second)},
		"after the sale":                {shelves: []shelf{{available: 40}, {asked: 9}}, at: saleStart.Add(2 * time.Hour)},
		"a moment ago":                  {shelves: []shelf{{available: 40}, {asked: 9}}, transfers: past(59*time.Second, transfer.Cancelled)},
		"long ago":                      {shelves: []shelf{{available: 40}, {asked: 9}}, transfers: past(time.Minute, transfer.Cancelled), want: []string{"0>1:20"}},
		"another one is not begun yet":  {shelves: []shelf{{available: 40}, {asked: 9}}, transfers: past(time.Hour, transfer.Planned)},
		"another one is not done":       {shelves: []shelf{{available: 40}, {asked: 9}}, transfers: past(time.Hour, transfer.Out)},
		"a slot went back: fewer asked": {shelves: []shelf{{available: 40}, {asked: -50}}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.limits == (transfer.Limits{}) {
				c.limits = usual
			}
			if c.at.IsZero() {
				c.at = an
			}
			before, now := look(c.transfers, c.shelves...)
			plan := transfer.Rebalance(before, now, c.limits, c.at)
			var got []string
			for _, m := range plan.Moves {
				got = append(got, fmt.Sprintf("%d>%d:%d", m.Donor, m.Receiver, m.Amount))
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("moves (-want +got):\n%s\n%+v", diff, plan.Roles)
			}
			if len(plan.Roles) != len(c.shelves) || slices.ContainsFunc(plan.Roles, func(r transfer.Role) bool { return r.Why == "" }) {
				t.Errorf("roles %+v", plan.Roles)
			}
		})
	}
}

// Whatever a version looks like: nobody gives what it needs, nobody gets who has
// some, what is given is what is got, and limits hold.
func TestRebalanceProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		shelves := rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) shelf {
			return shelf{
				available: rapid.Int64Range(0, 50).Draw(rt, "available"), asked: rapid.Int64Range(0, 30).Draw(rt, "asked"),
				held: rapid.IntRange(0, 9).Draw(rt, "held") == 0,
			}
		}), 2, 8).Draw(rt, "buckets")
		limits := transfer.Limits{
			Keep: rapid.Int64Range(0, 10).Draw(rt, "keep"), Share: rapid.Int64Range(1, 100).Draw(rt, "share"),
			MinUnits: rapid.Int64Range(1, 5).Draw(rt, "min"), MaxUnits: rapid.Int64Range(5, 40).Draw(rt, "max"),
		}
		before, now := look(nil, shelves...)
		plan := transfer.Rebalance(before, now, limits, saleStart.Add(time.Hour))
		gives, gets, total := map[int64]int64{}, map[int64]int64{}, int64(0)
		for _, m := range plan.Moves {
			gives[m.Donor] += m.Amount
			gets[m.Receiver] += m.Amount
			total += m.Amount
		}
		if total > limits.MaxUnits {
			rt.Fatalf("%d units of at most %d", total, limits.MaxUnits)
		}
		for i, s := range shelves {
			id := int64(i)
			if gives[id] > 0 && (s.held || s.available-gives[id] < max(limits.Keep, s.asked)) {
				rt.Fatalf("bucket %d of %+v gives %d", id, s, gives[id])
			}
			if gets[id] > 0 && (s.held || s.available > 0 || s.asked == 0 || gets[id] < limits.MinUnits) {
				rt.Fatalf("bucket %d of %+v gets %d", id, s, gets[id])
			}
			if r := plan.Roles[i]; r.Gives != gives[id] || r.Gets != gets[id] {
				rt.Fatalf("bucket %d: role %+v, moves %+v", id, r, plan.Moves)
			}
		}
	})
}

// requested counts requests by hand.
type requested map[int64]int64

func (r requested) Requests(_ context.Context, scopes []reservation.Scope) ([]int64, error) {
	counts := make([]int64, len(scopes))
	for i, s := range scopes {
		counts[i] = r[s.Bucket]
	}
	return counts, nil
}

// The last units of a sale reach those who ask for them: two of three buckets are
// never asked, and in a few passes the third one sells all there is.
func TestRebalancerSellsTheLastUnits(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	w := newWorld(t, store, client, 10, 25, 1)
	demand := requested{}
	r := &transfer.Rebalancer{Planner: w.planner(), Demand: demand, Limits: transfer.Limits{Share: 50, MinUnits: 1, MaxUnits: 1000}, Actor: "test"}
	for passes := 1; w.stock(2).Reserved < 36; passes++ {
		if passes > 12 {
			t.Fatalf("%v after %d passes", w.numbers(), passes)
		}
		w.trade(2, w.stock(2).Available) // whoever asks gets what there is
		demand[2] += 50
		tally, err := r.Pass(t.Context())
		w.must(err)
		if passes == 1 && tally.Done[transfer.DonePlanned] != 0 {
			t.Error("the first pass has nothing to compare with")
		}
		w.pass()
		w.trade(2, w.stock(2).Available)
	}
	w.atRest("sold")
	w.want("sold", "0/0", "0/0", "0/36")
}

// An observing rebalancer plans nothing, and donors that need their units keep
// them.
func TestRebalancerHoldsBack(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	w := newWorld(t, store, client, 10, 0)
	demand := requested{}
	r := &transfer.Rebalancer{Planner: w.planner(), Demand: demand, Limits: transfer.Limits{Share: 50, MinUnits: 1, MaxUnits: 1000}, Observe: true}
	pass := func() map[string]int {
		demand[1] += 5
		tally, err := r.Pass(t.Context())
		w.must(err)
		return tally.Done
	}
	pass()
	if done := pass(); done[transfer.DoneWaiting] != 1 || len(w.version.Transfers) != 0 {
		t.Errorf("observing: %v, %+v", done, w.version.Transfers)
	}
	r.Observe = false
	w.orders[0] = 1 // whose reservation is lost
	if done := pass(); done[transfer.DoneKept] != 1 || len(w.version.Transfers) != 0 {
		t.Errorf("needed: %v, %+v", done, w.version.Transfers)
	}
	w.restore()
	if done := pass(); done[transfer.DonePlanned] != 1 || len(w.version.Transfers) != 1 {
		t.Errorf("planned: %v, %+v", done, w.version.Transfers)
	}
}
