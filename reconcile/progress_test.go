package reconcile_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// names are the findings as "check subject".
func names(r *reconcile.Report) []string {
	var all []string
	for _, f := range r.Findings {
		all = append(all, f.Check+" "+f.Subject)
	}
	slices.Sort(all)
	return all
}

// looking counts the members that a run looks at.
func looking(o *reconcile.Options, most int64, stop context.CancelFunc) (looked *int64) {
	looked = new(int64)
	var first int64
	if o.Resume != nil {
		first = o.Resume.Progress.Looked
	}
	o.Progress = func(done, _ int64) {
		if *looked = done - first; *looked >= most && stop != nil {
			stop()
		}
	}
	return looked
}

// A deep pass that is told to stop, again and again, and continued each time
// finds what one pass finds, and looks at each member about once in all.
func TestStoppedPassIsContinued(t *testing.T) {
	s := one(t, 2)
	all := s.reserve(900)
	s.order(all[:600]...)
	s.finish(all[:600]...)
	for _, i := range []int{0, 17, 300, 599} {
		s.lose(all[i], false)
	}
	for _, i := range []int{650, 899} {
		s.do("zrem", all[i].scope.IndexKey(reservation.ReservationExpiry), all[i].id)
	}
	s.do("hset", all[700].scope.RequestKey("alien"), "alien", "nonsense")
	whole := s.deep()
	total := looking(&whole, 0, nil)
	want := s.run(whole)
	if want.Verdict != reconcile.VerdictDrift || len(want.Findings) < 7 {
		t.Fatalf("%s: %v", want.Verdict, names(want))
	}

	for _, most := range []int64{400, 700, 1400} {
		t.Run(fmt.Sprint("after ", most), func(t *testing.T) {
			s.continued(t, want, *total, most)
		})
	}
}

// continued stops a pass each time it has looked at so many members, which are
// more than an index has: an index is walked as a whole.
func (s *sale) continued(t *testing.T, want *reconcile.Report, total, most int64) {
	t.Helper()
	var from *reconcile.Resume
	var sum int64
	started := time.Now()
	for stops := 0; ; stops++ {
		if stops > 10_000 {
			t.Fatal("it gets nowhere")
		}
		ctx, cancel := context.WithCancel(t.Context())
		o := s.deep()
		o.Resume = from
		var kept []byte
		o.Checkpoint = func(_ context.Context, p reconcile.Progress) {
			var err error
			if kept, err = json.Marshal(p); err != nil { // as it is stored
				t.Error(err)
			}
		}
		looked := looking(&o, most, cancel)
		r, err := s.reconciler().Run(ctx, o)
		stopped := ctx.Err() != nil && r != nil && r.Resumable()
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		sum += *looked
		if !stopped {
			if diff := cmp.Diff(names(want), names(r)); diff != "" || r.Verdict != reconcile.VerdictDrift {
				t.Errorf("%s after %d stops (-one pass +continued):\n%s\n%+v", r.Verdict, stops, diff, r.Incomplete)
			}
			if from == nil || !r.StartedAt.Equal(from.StartedAt) || r.Complete() {
				t.Errorf("%d stops; started at %v, complete: %v", stops, r.StartedAt, r.Complete())
			}
			// A page is read again where a stop cut it off.
			if pages := int64(stops+1) * 200; sum > total+pages {
				t.Errorf("%d members were looked at with %d stops, one pass looks at %d", sum, stops, total)
			}
			return
		}
		if r.Verdict != reconcile.VerdictIncomplete || slices.ContainsFunc(r.Findings, func(f reconcile.Finding) bool {
			return f.Check == reconcile.CheckLostReservation
		}) {
			t.Errorf("stopped: %s, %v", r.Verdict, names(r))
		}
		from = &reconcile.Resume{RunID: "the-run", StartedAt: started}
		if err := json.Unmarshal(kept, &from.Progress); err != nil {
			t.Fatal(err)
		}
		if stops == 0 {
			other := s.deep()
			other.Resume, other.Checks = from, []string{reconcile.CheckLostReservation}
			if _, err := s.reconciler().Run(t.Context(), other); !errors.Is(err, reconcile.ErrOtherSelection) {
				t.Errorf("with other checks: %v", err)
			}
		}
	}
}

// What came under the orders' walk since, such as a bucket that was registered
// meanwhile, is not left out: its SKU's orders are walked again.
func TestContinuedPassLooksAtNewScopes(t *testing.T) {
	s := one(t, 2)
	all := s.reserve(40)
	s.order(all...)
	s.finish(all...)
	at := slices.IndexFunc(all, func(b booking) bool { return b.scope.Bucket == 1 })
	s.lose(all[at], false)
	old := reconcile.Scope{ActivityID: s.scopes[0].ActivityID, SKUID: s.scopes[0].SKUID, Version: s.scopes[0].Version}
	o := s.deep()
	checks := func() (ids []string) {
		for _, c := range reconcile.Checks() {
			if c.ID != reconcile.CheckEnvironment { // the test's servers are as they are
				ids = append(ids, c.ID)
			}
		}
		slices.Sort(ids)
		return ids
	}()
	o.Resume = &reconcile.Resume{RunID: "the-run", StartedAt: time.Now(), Progress: reconcile.Progress{
		Selection: reconcile.Selection{Checks: checks, Deep: true},
		SKUs:      []reconcile.SKUProgress{{ActivityID: old.ActivityID, SKUID: old.SKUID, Scopes: []reconcile.Scope{old}, Done: true}},
		Scopes: []reconcile.ScopeProgress{{Scope: old, Shard: reservation.RequestShards, Indexes: []reservation.Index{
			reservation.ReservationExpiry, reservation.SendPending,
		}}},
	}}
	if r := s.run(o); r.Summary[reconcile.CheckLostReservation] != 1 {
		t.Errorf("%s: %v %+v", r.Verdict, names(r), r.Incomplete)
	}
}

// The rate bounds how many members a second are looked at.
func TestSetPassKeepsItsRate(t *testing.T) {
	const rate = 1000
	s := one(t, 1)
	s.reserve(600)
	o := s.deep()
	o.Rate, o.Batch = rate, 50
	looked := looking(&o, 0, nil)
	began := time.Now()
	r := s.run(o)
	took := time.Since(began)
	burst := int64(rate / 10)
	least := time.Duration(*looked-burst) * time.Second / rate
	if r.Verdict != reconcile.VerdictConsistent || *looked < 1200 || took < least {
		t.Errorf("%s: %d members in %v, want at least %v", r.Verdict, *looked, took, least)
	}
	t.Logf("%d members in %v: %.0f a second", *looked, took.Round(time.Millisecond), float64(*looked)/took.Seconds())
}
