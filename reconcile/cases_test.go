package reconcile

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/reservation"
)

// summary is a report in short: verdict, findings, what is incomplete.
func summary(r *Report) []string {
	out := []string{string(r.Verdict)}
	for _, f := range r.Findings {
		out = append(out, f.Check+" "+f.Subject)
	}
	for _, i := range r.Incomplete {
		scope := "all"
		if i.Scope != nil {
			scope = i.Scope.Reservation().Tag()
		}
		out = append(out, i.Source+" "+scope)
	}
	return out
}

func (w *world) run(t *testing.T, o Options) *Report {
	t.Helper()
	report, err := w.reconciler().Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func want(t *testing.T, r *Report, lines ...string) {
	t.Helper()
	if diff := cmp.Diff(lines, summary(r)); diff != "" {
		t.Errorf("report (-want +got):\n%s\n%+v", diff, r.Incomplete)
	}
}

// cancelled adds an order that was cancelled, whose reservation holds its unit
// or not.
func (w *world) cancelled(id string, scope reservation.Scope, held bool, status OrderStatus) {
	w.all[id] = &booking{scope: scope, held: held, ordered: true, order: Order{
		ReservationID: id, ActivityID: "act", SKUID: "sku", Version: scope.Version, Bucket: scope.Bucket, UserID: id, Status: status,
	}}
	if held {
		w.stock[scope].Reserved++
		w.stock[scope].Available--
	}
}

const (
	tag0 = "a:act:s:sku:v:1:b:0"
	tag1 = "a:act:s:sku:v:1:b:1"
)

func TestCancelledOrders(t *testing.T) {
	w := newWorld(1, 2, 100)
	w.cancelled("holds", w.scope(0), true, OrderCancelled)
	w.cancelled("released", w.scope(0), false, OrderCancelled)
	w.cancelled("unknown but held", w.scope(1), true, OrderUnknown)
	r := w.run(t, Options{})
	want(t, r, "consistent")
	if got := *r.Scopes[0].Postgres; got != (OrdersCount{Cancelled: 2}) {
		t.Errorf("orders %+v, want both cancelled ones", got)
	}

	w.cancelled("unknown and not held", w.scope(1), false, OrderUnknown)
	r = w.run(t, Options{})
	want(t, r, "incomplete", "postgres "+tag1)
	if r.Scopes[0].Verdict != VerdictConsistent || r.Scopes[1].Deviation != nil {
		t.Errorf("scopes %+v", r.Scopes)
	}
}

func TestCancelledOrderStillInExpiry(t *testing.T) {
	w := newWorld(1, 1, 100)
	w.cancelled("behind", w.scope(0), true, OrderCancelled)
	w.all["behind"].inE = true
	w.stock[w.scope(0)].Expiry++
	want(t, w.run(t, Options{}), "consistent")
}

// Orders without a bucket are counted once, in versions of one bucket and of
// several alike.
func TestBucketlessOrdersOfSeveralVersions(t *testing.T) {
	w := newWorld(1, 4, 100)
	w.sku.Versions = append(w.sku.Versions, Version{
		Number: 2, Allocated: 50, Count: 1, Buckets: []Bucket{{ID: 0, Initial: 50, Confirmed: true}},
	})
	second := w.scope(0)
	second.Version = 2
	w.stock[second] = &Stock{Initial: 50, Available: 50}
	for _, user := range []string{"u1", "u2", "u3", "u4", "u5"} {
		w.cancelled("1"+user, w.scope(reservation.BucketOf("act", "sku", "1"+user, 4)), true, OrderActive)
		w.cancelled("2"+user, second, true, OrderActive)
	}
	w.bucketless()
	r := w.run(t, Options{})
	want(t, r, "consistent")
	var active int64
	for _, s := range r.Scopes {
		active += s.Postgres.Active
	}
	if active != 10 {
		t.Errorf("%d orders counted, want 10", active)
	}
}

func TestOrdersWithoutVersion(t *testing.T) {
	w := newWorld(1, 1, 100)
	w.cancelled("r", w.scope(0), true, OrderActive)
	w.all["r"].order.Version = -1
	want(t, w.run(t, Options{}), "consistent")

	w.sku.Versions = append(w.sku.Versions, Version{
		Number: 2, Allocated: 50, Count: 1, Buckets: []Bucket{{ID: 0, Initial: 50, Confirmed: true}},
	})
	second := w.scope(0)
	second.Version = 2
	w.stock[second] = &Stock{Initial: 50, Available: 50}
	r := w.run(t, Options{})
	want(t, r, "incomplete", "postgres "+tag0, "postgres a:act:s:sku:v:2:b:0")
	if !strings.Contains(r.Incomplete[0].Reason, "name no activity_version") {
		t.Errorf("reason %q", r.Incomplete[0].Reason)
	}
}

// A version past its retention has no keys by design; its orders stay.
func TestVersionPastItsRetention(t *testing.T) {
	w := newWorld(1, 1, 100)
	w.sku.Versions = append(w.sku.Versions, Version{
		Number: 2, Allocated: 50, Count: 1, Buckets: []Bucket{{ID: 0, Initial: 50, Confirmed: true, Expired: true}},
	})
	w.all["old"] = &booking{ordered: true, order: Order{
		ReservationID: "old", ActivityID: "act", SKUID: "sku", Version: 2, UserID: "u", Status: OrderActive,
	}}
	r := w.run(t, Options{})
	want(t, r, "consistent")
	if len(r.Scopes) != 1 {
		t.Errorf("%d scopes, want 1", len(r.Scopes))
	}
}

func TestUnregisteredScope(t *testing.T) {
	w := newWorld(1, 1, 100)
	stray := w.scope(3)
	w.stock[stray] = &Stock{}
	w.cancelled("r", stray, true, OrderActive)
	r := w.run(t, Options{})
	want(t, r, "drift", CheckUnregisteredScope+" a:act:s:sku:v:1:b:3")
	if r.Findings[0].Rounds != 2 || r.Scopes[0].Verdict != VerdictConsistent {
		t.Errorf("%+v %+v", r.Findings[0], r.Scopes)
	}
	one := int64(0)
	want(t, w.run(t, Options{Filter: Filter{Bucket: &one}}), "consistent")
	want(t, w.run(t, Options{Checks: []string{CheckCountDrift}}), "consistent")
}

// hooked lets a test act at the start of each round.
type hooked struct {
	*world
	round   int
	atRound func(round int)
}

func (h *hooked) SKUs(ctx context.Context, activityID, skuID string) ([]SKU, error) {
	h.round++
	h.atRound(h.round)
	return h.world.SKUs(ctx, activityID, skuID)
}

func (h *hooked) run(t *testing.T, o Options) *Report {
	t.Helper()
	report, err := (&Reconciler{Registry: h, Stocks: h, Orders: h}).Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func leak(w *world, bucket, units int64) {
	w.stock[w.scope(bucket)].Reserved += units
	w.stock[w.scope(bucket)].Available -= units
}

func TestRounds(t *testing.T) {
	for name, c := range map[string]struct {
		leaks []int64 // the deviation in each round
		want  []string
		round int
	}{
		"the same twice":               {[]int64{2, 2}, []string{"drift", "count_drift " + tag0}, 2},
		"gone in the second":           {[]int64{2, 0}, []string{"consistent"}, 2},
		"the same in a later pair":     {[]int64{2, 1, 1}, []string{"drift", "count_drift " + tag0}, 3},
		"other numbers, one direction": {[]int64{-1, -2, -3, -4}, []string{"drift", "count_drift " + tag0}, 4},
		"other directions":             {[]int64{1, -1, 1, -1}, []string{"incomplete", "rounds " + tag0}, 4},
		"gone in the third":            {[]int64{1, 2, 0, 0}, []string{"consistent"}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(1, 2, 100)
			w.steps(60)
			at := int64(0)
			h := &hooked{world: w, atRound: func(round int) {
				leak(w, 0, c.leaks[round-1]-at)
				at = c.leaks[round-1]
			}}
			r := h.run(t, Options{})
			want(t, r, c.want...)
			if h.round != c.round {
				t.Errorf("%d rounds, want %d", h.round, c.round)
			}
			if changed := c.leaks[0] != c.leaks[1]; r.Scopes[0].InMotion != changed || r.Scopes[1].InMotion {
				t.Errorf("in motion: %v and %v, want %v and false", r.Scopes[0].InMotion, r.Scopes[1].InMotion, changed)
			}
		})
	}
}

func TestRoundsAreSettleApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(1, 1, 100)
		leak(w, 0, 1)
		begin := time.Now()
		want(t, w.run(t, Options{Settle: 5 * time.Second}), "drift", "count_drift "+tag0)
		if passed := time.Since(begin); passed != 5*time.Second {
			t.Errorf("%v, want one settle", passed)
		}
		begin = time.Now()
		leak(w, 0, -1)
		want(t, w.run(t, Options{Settle: 5 * time.Second}), "consistent")
		if passed := time.Since(begin); passed != 0 {
			t.Errorf("%v, want no wait where nothing contradicts", passed)
		}
	})
}

// A run that is told to stop says so, and finds nothing that was not settled.
func TestStoppedRunIsIncomplete(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(1, 1, 100)
		leak(w, 0, 1)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		begin := time.Now()
		r, err := w.reconciler().Run(ctx, Options{Settle: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		if passed := time.Since(begin); passed != time.Second {
			t.Errorf("it went on for %v", passed)
		}
		if len(r.Findings) != 0 || r.Verdict != VerdictIncomplete || r.Resumable() ||
			!slices.ContainsFunc(r.Incomplete, func(i Incomplete) bool { return i.Source == SourceTime && i.Scope == nil }) {
			t.Errorf("%+v", r)
		}
	})
}

// Time that runs out leaves what was not settled incomplete, never a finding.
func TestTimeRunsOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(1, 1, 100)
		leak(w, 0, 1)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		h := &hooked{world: w, atRound: func(round int) {
			if round == 2 {
				w.gone = context.DeadlineExceeded
			}
		}}
		r, err := (&Reconciler{Registry: h, Stocks: h, Orders: h}).Run(ctx, Options{Settle: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		want(t, r, "incomplete", "postgres all")
	})
}

func TestPostgresGone(t *testing.T) {
	w := newWorld(1, 2, 100)
	leak(w, 0, 1)
	h := &hooked{world: w, atRound: func(round int) {
		if round == 2 {
			w.gone = errGone
		}
	}}
	r := h.run(t, Options{})
	want(t, r, "incomplete", "postgres all")
	if len(r.Scopes) != 2 || r.Scopes[0].Verdict != VerdictIncomplete || r.Scopes[1].Verdict != VerdictIncomplete || r.Scopes[0].Deviation != nil {
		t.Errorf("%+v", r.Scopes)
	}

	r = h.run(t, Options{})
	want(t, r, "incomplete", "postgres all")
	if len(r.Scopes) != 0 {
		t.Errorf("%+v", r.Scopes)
	}
}

// failing makes single reads fail.
type failing struct {
	*world
	freeze         error
	stocks, fields map[reservation.Scope]error
	lacks          map[reservation.Scope][]string
	bad            map[reservation.Scope]string
}

func (f failing) Freeze(ctx context.Context) (Frozen, error) {
	if f.freeze != nil {
		return nil, f.freeze
	}
	return f.world.Freeze(ctx)
}

func (f failing) Stocks(ctx context.Context, scopes []reservation.Scope) []StockReply {
	replies := f.world.Stocks(ctx, scopes)
	for i, s := range scopes {
		replies[i].Err, replies[i].Malformed = f.stocks[s], f.bad[s]
		if slices.Contains(f.lacks[s], "stock") {
			replies[i].Stock = Stock{Initial: Missing, Available: Missing, Reserved: Missing}
		}
	}
	return replies
}

func (f failing) MissingFields(_ context.Context, scopes []reservation.Scope) []FieldsReply {
	replies := make([]FieldsReply, len(scopes))
	for i, s := range scopes {
		replies[i] = FieldsReply{Missing: f.lacks[s], Err: f.fields[s]}
	}
	return replies
}

func (f failing) run(t *testing.T, o Options) *Report {
	t.Helper()
	report, err := (&Reconciler{Registry: f, Stocks: f, Orders: f}).Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func TestWhatCannotBeReadIsIncomplete(t *testing.T) {
	w := newWorld(1, 2, 100)
	w.steps(50)
	one, zero := w.scope(1), int64(0)
	only := Options{Filter: Filter{Bucket: &zero}}
	for name, c := range map[string]struct {
		f    failing
		o    Options
		want []string
	}{
		"orders":           {failing{freeze: errGone}, Options{}, []string{"incomplete", "postgres " + tag0, "postgres " + tag1}},
		"one stock":        {failing{stocks: map[reservation.Scope]error{one: errGone}}, Options{}, []string{"incomplete", "redis " + tag1}},
		"a sibling":        {failing{stocks: map[reservation.Scope]error{one: errGone}}, only, []string{"incomplete", "redis " + tag1}},
		"no sibling asked": {failing{stocks: map[reservation.Scope]error{one: errGone}}, Options{Filter: only.Filter, Checks: []string{CheckCountDrift}}, []string{"consistent"}},
		"fields":           {failing{fields: map[reservation.Scope]error{one: errGone}}, Options{}, []string{"incomplete", "redis " + tag1}},
		"no stock": {
			failing{lacks: map[reservation.Scope][]string{one: {"meta", "stock"}}},
			Options{},
			[]string{"incomplete", "config_missing " + tag1, "redis " + tag1},
		},
		"no stock, and nobody looks for it": {
			failing{lacks: map[reservation.Scope][]string{one: {"stock"}}},
			Options{Checks: []string{CheckCountDrift}},
			[]string{"incomplete", "redis " + tag1},
		},
		"malformed stock": {
			failing{bad: map[reservation.Scope]string{one: "stock is not a hash"}},
			Options{},
			[]string{"incomplete", "invariant_broken " + tag1, "redis " + tag1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c.f.world = w
			r := c.f.run(t, c.o)
			want(t, r, c.want...)
			for _, s := range r.Scopes {
				if s.Verdict == VerdictIncomplete && s.Deviation != nil {
					t.Errorf("%+v: a deviation of what was not read", s)
				}
			}
		})
	}
}

// A scope that was never confirmed may lack its keys without fault; it is not
// consistent either.
func TestUnconfirmedScope(t *testing.T) {
	w := newWorld(1, 1, 100)
	w.sku.Versions[0].Buckets[0].Confirmed = false
	f := failing{world: w, lacks: map[reservation.Scope][]string{w.scope(0): {"meta", "stock"}}}
	want(t, f.run(t, Options{}), "incomplete", "redis "+tag0)
}

func TestAllocation(t *testing.T) {
	w := newWorld(1, 3, 100)
	w.stock[w.scope(1)].Initial++
	w.stock[w.scope(1)].Available++
	want(t, w.run(t, Options{}), "drift", "allocation_mismatch "+tag1)

	zero := int64(0)
	r := w.run(t, Options{Filter: Filter{Bucket: &zero}})
	want(t, r, "drift", "allocation_mismatch "+tag0)

	w.sku.Versions[0].Buckets = w.sku.Versions[0].Buckets[:2]
	r = w.run(t, Options{})
	want(t, r, "incomplete", "postgres "+tag0, "postgres "+tag1)
}

func TestInvariant(t *testing.T) {
	w := newWorld(1, 1, 100)
	w.stock[w.scope(0)].Available = 99
	want(t, w.run(t, Options{}), "drift", "invariant_broken "+tag0)
	w.stock[w.scope(0)].Available, w.stock[w.scope(0)].Reserved = 101, -1
	want(t, w.run(t, Options{}), "drift", "count_drift "+tag0, "invariant_broken "+tag0)
}

func TestMistakes(t *testing.T) {
	w := newWorld(1, 1, 100)
	nine := int64(9)
	if _, err := w.reconciler().Run(t.Context(), Options{Filter: Filter{Version: &nine}}); !errors.Is(err, ErrNoScope) {
		t.Errorf("a filter that selects nothing: %v", err)
	}
	if _, err := w.reconciler().Run(t.Context(), Options{Checks: []string{"nonsense"}}); !errors.Is(err, ErrUnknownCheck) {
		t.Errorf("an unknown check: %v", err)
	}
}

// The summary names the checks that were made, and no others.
func TestSummaryNamesTheChecks(t *testing.T) {
	w := newWorld(1, 1, 100)
	r := w.run(t, Options{Checks: []string{CheckInvariantBroken, CheckCountDrift}})
	got := slices.Sorted(maps.Keys(r.Summary))
	if diff := cmp.Diff([]string{CheckCountDrift, CheckInvariantBroken}, got); diff != "" {
		t.Error(diff)
	}
	r = w.run(t, Options{Checks: []string{CheckInvariantBroken}})
	if r.Scopes[0].Postgres != nil || r.Scopes[0].Deviation != nil || r.Scopes[0].Redis == nil {
		t.Errorf("a check of Redis alone: %+v", r.Scopes[0])
	}
}

// staged changes what fails from round to round.
type staged struct {
	*failing
	round   int
	atRound func(f *failing, round int)
}

func (s *staged) SKUs(ctx context.Context, activityID, skuID string) ([]SKU, error) {
	s.round++
	s.atRound(s.failing, s.round)
	return s.failing.SKUs(ctx, activityID, skuID)
}

// What the second round could not read is neither confirmed nor refuted.
func TestSecondRoundCannotBeRead(t *testing.T) {
	for name, c := range map[string]struct {
		fault func(w *world)
		fail  func(f *failing)
		want  []string
	}{
		"orders, of a drift": {
			func(w *world) { leak(w, 0, 1) },
			func(f *failing) { f.freeze = errGone },
			[]string{"incomplete", "postgres " + tag0},
		},
		"orders, of a scope that is not registered": {
			func(w *world) {
				w.stock[w.scope(7)] = &Stock{}
				w.cancelled("r", w.scope(7), true, OrderActive)
			},
			func(f *failing) { f.freeze = errGone },
			[]string{"incomplete", "rounds a:act:s:sku:v:1:b:7"},
		},
		"a sibling, of an allocation": {
			func(w *world) { w.stock[w.scope(1)].Initial++; w.stock[w.scope(1)].Available++ },
			func(f *failing) { f.stocks = map[reservation.Scope]error{f.scope(0): errGone} },
			[]string{"incomplete", "redis " + tag0, "rounds " + tag1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(1, 2, 100)
			c.fault(w)
			s := &staged{failing: &failing{world: w}, atRound: func(f *failing, round int) {
				if round == 2 {
					c.fail(f)
				}
			}}
			r, err := (&Reconciler{Registry: s, Stocks: s, Orders: s}).Run(t.Context(), Options{Rounds: 2})
			if err != nil {
				t.Fatal(err)
			}
			want(t, r, c.want...)
			for _, row := range r.Scopes {
				if row.InMotion {
					t.Errorf("%+v: in motion, but nothing moved", row)
				}
			}
		})
	}
}

// sluggish is a world of many SKUs whose PostgreSQL does not answer.
type sluggish struct {
	*world
	skus   int
	frozen int
}

func (s *sluggish) SKUs(context.Context, string, string) ([]SKU, error) {
	skus := make([]SKU, s.skus)
	for i := range skus {
		skus[i] = s.sku
		skus[i].SKUID = fmt.Sprintf("sku%03d", i)
		s.stock[skus[i].scope(s.sku.Versions[0], Bucket{})] = &Stock{Initial: 100, Available: 100}
	}
	return skus, nil
}

func (s *sluggish) Freeze(context.Context) (Frozen, error) {
	s.frozen++
	time.Sleep(8 * time.Second)
	return nil, errGone
}

// A source that does not answer costs a bounded time, however many scopes
// there are; all of them are incomplete.
func TestSourceThatDoesNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &sluggish{world: newWorld(1, 1, 100), skus: 200}
		begin := time.Now()
		r, err := (&Reconciler{Registry: s, Stocks: s, Orders: s}).Run(t.Context(), Options{Settle: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if r.Verdict != VerdictIncomplete || len(r.Incomplete) != 200 || len(r.Scopes) != 200 {
			t.Errorf("%s, %d scopes, %d of them incomplete", r.Verdict, len(r.Scopes), len(r.Incomplete))
		}
		if passed := time.Since(begin); passed > 2*(30+8)*time.Second+time.Second || s.frozen != 8 {
			t.Errorf("%d tries, %v", s.frozen, passed)
		}
	})
}
