package transfer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

var errKilled = errors.New("the process was killed")

// mortal is an instance that dies at its n'th call of anything outside: before
// the call is made, or after it with its answer lost. A dead one does nothing.
type mortal struct {
	*world
	stocks transfer.Stocks
	left   int
	after  bool
	dead   bool
}

// call says whether the call is made, and whether its answer arrives.
func (m *mortal) call() (made, answered bool) {
	if m.dead {
		return false, false
	}
	if m.left--; m.left >= 0 {
		return true, true
	}
	m.dead = true
	return m.after, false
}

func (m *mortal) Versions(ctx context.Context, f transfer.Filter) ([]transfer.Version, error) {
	if _, answered := m.call(); !answered {
		return nil, errKilled
	}
	return m.world.Versions(ctx, f)
}

func (m *mortal) NoteTransfers(ctx context.Context, changes []transfer.Change) error {
	made, answered := m.call()
	if made {
		m.must(m.world.NoteTransfers(ctx, changes))
	}
	if !answered {
		return errKilled
	}
	return nil
}

func (m *mortal) ReadTransfers(ctx context.Context, queries []transfer.Query) []transfer.Reading {
	if _, answered := m.call(); answered {
		return m.stocks.ReadTransfers(ctx, queries)
	}
	readings := make([]transfer.Reading, len(queries))
	for i := range readings {
		readings[i].Err = errKilled
	}
	return readings
}

func (m *mortal) MoveUnits(ctx context.Context, moves []transfer.Move) []transfer.Outcome {
	made, answered := m.call()
	outcomes := make([]transfer.Outcome, len(moves))
	if made {
		outcomes = m.stocks.MoveUnits(ctx, moves)
	}
	if !answered {
		for i := range outcomes {
			outcomes[i] = transfer.Outcome{Err: errKilled}
		}
	}
	return outcomes
}

func (m *mortal) PublishAvailable(context.Context, []reservation.Scope) error { return nil }

// dies runs an instance until it is killed; false when it ended by itself.
func (w *world) dies(at int, after bool) bool {
	m := &mortal{world: w, stocks: w.store, left: at, after: after}
	worker := &transfer.Worker{Journal: m, Stocks: m, Drift: w, Tasks: w}
	_, _ = worker.Pass(w.Context()) // what a dead one says nobody hears
	return m.dead
}

// An instance is killed at every call that it makes, before and after; then
// either slot fails over to every state that it had, both legs are run again by a
// stale instance, or all of it. In the end every unit is in one bucket.
func TestEveryStepUnderEveryFault(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	faults := map[string]func(w *world, row transfer.Transfer, donor, receiver image){
		"restart":                 func(*world, transfer.Transfer, image, image) {},
		"donor fails over":        func(w *world, _ transfer.Transfer, donor, _ image) { w.failover(donor) },
		"receiver fails over":     func(w *world, _ transfer.Transfer, _, receiver image) { w.failover(receiver) },
		"both fail over":          func(w *world, _ transfer.Transfer, donor, receiver image) { w.failover(donor); w.failover(receiver) },
		"both legs again":         func(w *world, row transfer.Transfer, _, _ image) { w.replay(row) },
		"failover, then stale IN": func(w *world, row transfer.Transfer, donor, _ image) { w.failover(donor); w.replayIn(row) },
	}
	for name, fault := range faults {
		t.Run(name, func(t *testing.T) {
			steps := 0
			for _, units := range []int64{5, 3} { // enough, and too few
				for _, amount := range []int64{1, 4} {
					for _, after := range []bool{false, true} {
						for at := 0; ; at++ {
							w := newWorld(t, store, client, units, 2)
							row := w.plan(0, 1, amount)
							donor, receiver := w.image(0), w.image(1)
							died := w.dies(at, after)
							what := fmt.Sprintf("%d of %d units, killed at call %d (after: %v)", amount, units, at, after)
							w.whole(what)
							fault(w, row, donor, receiver)
							w.whole(what + ", faulted")
							w.pass()
							w.atRest(what + ", driven")
							w.drain()
							w.atRest(what + ", drained")
							steps++
							if !died {
								break
							}
						}
					}
				}
			}
			t.Logf("%d ways to die", steps)
		})
	}
}

// replay runs both legs as an instance does that read the row long ago and saw
// the OUT marker then.
func (w *world) replay(row transfer.Transfer) {
	w.Helper()
	w.store.MoveUnits(w.Context(), []transfer.Move{{Scope: row.DonorScope(), TransferID: row.ID, Leg: transfer.LegOut, Target: row.Amount}})
	if w.books().Pairs()[0].Out().Amount == row.Amount {
		w.replayIn(row)
	}
}

func (w *world) replayIn(row transfer.Transfer) {
	w.Helper()
	w.store.MoveUnits(w.Context(), []transfer.Move{{Scope: row.ReceiverScope(), TransferID: row.ID, Leg: transfer.LegIn, Target: row.Amount}})
}

// lagging is an instance whose legs reach Redis at any later time, more than
// once, or never: it was suspended, its packets wait somewhere, it was killed.
type lagging struct {
	*world
	rng     *rand.Rand
	pending *[]transfer.Move
}

func (l *lagging) ReadTransfers(ctx context.Context, queries []transfer.Query) []transfer.Reading {
	return l.store.ReadTransfers(ctx, queries)
}

func (l *lagging) PublishAvailable(context.Context, []reservation.Scope) error { return nil }

func (l *lagging) MoveUnits(ctx context.Context, moves []transfer.Move) []transfer.Outcome {
	outcomes := make([]transfer.Outcome, len(moves))
	for i, m := range moves {
		outcomes[i].Err = errKilled
		switch l.rng.IntN(5) {
		case 0: // never
		case 1: // later
			*l.pending = append(*l.pending, m)
		case 2: // now and later, with the answer lost
			*l.pending = append(*l.pending, m)
			l.store.MoveUnits(ctx, []transfer.Move{m})
		default:
			outcomes[i] = l.store.MoveUnits(ctx, []transfer.Move{m})[0]
		}
	}
	return outcomes
}

// history is one random run.
type history struct {
	*world
	rng     *rand.Rand
	pending []transfer.Move // legs of stale instances
	images  []image         // what replicas have
	log     []string
}

func (h *history) bucket() int64 { return h.rng.Int64N(h.version.Count) }

// step does one thing of what may happen at any time.
func (h *history) step() {
	b := h.bucket()
	what := ""
	switch n := h.rng.IntN(12); n {
	case 0, 1:
		to := h.bucket()
		if to != b && len(h.version.Transfers) < 4 {
			t := h.plan(b, to, 1+h.rng.Int64N(3))
			what = fmt.Sprintf("plan %d from %d to %d", t.Amount, b, to)
		}
	case 2, 3, 4:
		worker := &transfer.Worker{Journal: h, Stocks: &lagging{h.world, h.rng, &h.pending}, Drift: h, Tasks: h}
		_, _ = worker.Pass(h.Context())
		what = "pass"
	case 5, 6:
		if len(h.pending) > 0 {
			i := h.rng.IntN(len(h.pending))
			h.store.MoveUnits(h.Context(), []transfer.Move{h.pending[i]})
			what = fmt.Sprintf("stale %+v", h.pending[i])
			if h.rng.IntN(2) == 0 {
				h.pending = slices.Delete(h.pending, i, i+1)
			}
		}
	case 7:
		if h.stock(b).Available > 0 {
			h.trade(b, 1)
			what = fmt.Sprint("reserve in ", b)
		}
	case 8:
		if r := h.stock(b); r.Reserved > h.orders[b] && h.sold() < h.version.Allocated {
			h.orders[b]++
			what = fmt.Sprint("order in ", b)
		}
	case 9:
		if r := h.stock(b); r.Reserved > h.orders[b] {
			h.trade(b, -1)
			what = fmt.Sprint("release in ", b)
		}
	case 10:
		h.images = append(h.images, h.image(b))
		what = fmt.Sprint("replica of ", b, " stops")
	case 11:
		if len(h.images) > 0 {
			i := h.rng.IntN(len(h.images))
			h.failover(h.images[i])
			what = fmt.Sprint("failover of ", h.images[i].bucket)
			// A replica that was promoted has no other past to go back to.
			bucket := h.images[i].bucket
			h.images = slices.DeleteFunc(h.images, func(img image) bool { return img.bucket == bucket })
		}
	}
	if what != "" {
		h.log = append(h.log, what+" "+fmt.Sprint(h.numbers()))
	}
	h.whole(fmt.Sprintf("seed's history %q", h.log))
}

// play runs one seed to its end.
func play(t *testing.T, store *redisstore.Store, h *history, steps int) {
	t.Helper()
	for range steps {
		h.step()
	}
	// Whoever was suspended wakes up before the end, in any order.
	h.rng.Shuffle(len(h.pending), func(i, j int) { h.pending[i], h.pending[j] = h.pending[j], h.pending[i] })
	store.MoveUnits(t.Context(), h.pending)
	h.drain()
	h.atRest(fmt.Sprintf("history %q", h.log))
	for _, b := range h.version.Buckets {
		if r := h.stock(b.ID); r.Reserved != h.orders[b.ID] {
			t.Fatalf("bucket %d: %d reserved for %d orders; history %q", b.ID, r.Reserved, h.orders[b.ID], h.log)
		}
	}
	if h.sold() > h.version.Allocated {
		t.Fatalf("%d orders of %d units", h.sold(), h.version.Allocated)
	}
}

// random plays many seeds: interleavings of planning, driving, stale legs,
// lost answers, sales and failovers of either slot to any earlier write.
func random(t *testing.T, seeds uint64, steps int) {
	t.Helper()
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 5))
		units := make([]int64, 2+rng.IntN(2))
		for i := range units {
			units[i] = rng.Int64N(5)
		}
		h := &history{world: newWorld(t, store, client, units...), rng: rng}
		ok := t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			h.TB = t
			play(t, store, h, steps)
		})
		if !ok {
			return // one history is enough to look at
		}
	}
}

func TestRandomHistories(t *testing.T) { random(t, 100, 60) }

// What the protocol's model found of the naive rule, on a real Redis: run OUT,
// run IN, close the row. Each leg is idempotent by its marker, and units are lost
// or there twice all the same. The rule in force puts both right.
func TestNaiveRuleLosesUnits(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	naive := func(w *world, row transfer.Transfer) {
		if w.state(row.ID) == transfer.Done {
			return // closed
		}
		w.replay(row)
		w.must(w.NoteTransfers(w.Context(), []transfer.Change{{ID: row.ID, From: w.state(row.ID), To: transfer.Done}}))
	}
	for name, c := range map[string]struct {
		fault func(w *world, donor, receiver image)
		left  int64 // Σ initial under the naive rule, of 7 allocated
	}{
		"the donor's slot fails over":    {func(w *world, donor, _ image) { w.failover(donor) }, 11},
		"the receiver's slot fails over": {func(w *world, _, receiver image) { w.failover(receiver) }, 3},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, store, client, 5, 2)
			row := w.plan(0, 1, 4)
			donor, receiver := w.image(0), w.image(1)
			naive(w, row)
			c.fault(w, donor, receiver)
			naive(w, row)
			if got := w.books().Initial(); got != c.left {
				t.Errorf("the naive rule leaves %d units, want %d: it is no demonstration any more", got, c.left)
			}
			w.pass()
			w.atRest("the rule in force")
		})
	}
}
