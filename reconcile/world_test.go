package reconcile

import (
	"context"
	"errors"
	"hash/fnv"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"

	"github.com/seckill/reconciler/reservation"
)

// world is a SKU that is sold while it is read: every call of a port lets some
// steps of the sale happen before and after it.
type world struct {
	rng   *rand.Rand
	busy  int // at most so many steps around each call
	sku   SKU
	stock map[reservation.Scope]*Stock
	ids   []string
	all   map[string]*booking
	gone  error // of the PostgreSQL side, once set
}

// booking is a reservation and its order.
type booking struct {
	scope    reservation.Scope
	user     string
	inE      bool
	held     bool // the hash exists and is not RELEASED
	ordered  bool
	finished bool
	order    Order
}

func newWorld(seed uint64, buckets, initial int64) *world {
	w := &world{
		rng:   rand.New(rand.NewPCG(seed, 1)),
		sku:   SKU{ActivityID: "act", SKUID: "sku", Versions: []Version{{Number: 1, Allocated: buckets * initial, Count: buckets}}},
		stock: map[reservation.Scope]*Stock{}, all: map[string]*booking{},
	}
	for b := range buckets {
		w.sku.Versions[0].Buckets = append(w.sku.Versions[0].Buckets, Bucket{ID: b, Initial: initial, Confirmed: true})
		w.stock[w.scope(b)] = &Stock{Initial: initial, Available: initial}
	}
	return w
}

func (w *world) scope(bucket int64) reservation.Scope {
	return reservation.Scope{ActivityID: "act", SKUID: "sku", Version: 1, Bucket: bucket}
}

// steps lets the sale go on.
func (w *world) steps(n int) {
	for range n {
		w.step()
	}
}

func (w *world) traffic() { w.steps(w.rng.IntN(w.busy + 1)) }

func (w *world) step() {
	if len(w.ids) == 0 || w.rng.IntN(3) == 0 {
		w.reserve()
		return
	}
	// The newest ones move most, as in a sale: that is where reads race with them.
	i := len(w.ids) - 1 - min(w.rng.IntN(len(w.ids)), w.rng.IntN(len(w.ids)))
	b := w.all[w.ids[i]]
	stock := w.stock[b.scope]
	switch {
	case b.ordered && !b.finished:
		b.finished, b.inE = true, false
		stock.Expiry--
	case b.finished && b.order.Status == OrderActive && w.rng.IntN(4) == 0:
		b.order.Status = OrderCancelled
	case b.inE && w.rng.IntN(5) == 0: // fenced, released
		b.inE, b.held = false, false
		stock.Expiry--
		stock.Reserved--
		stock.Available++
		stock.ReleasedTotal++
	case b.inE:
		b.ordered, b.order.Status = true, OrderActive
	}
}

func (w *world) reserve() {
	user := "u" + strconv.Itoa(len(w.ids))
	scope := w.scope(reservation.BucketOf("act", "sku", user, w.sku.Versions[0].Count))
	stock := w.stock[scope]
	if stock.Available == 0 {
		return
	}
	stock.Available--
	stock.Reserved++
	stock.Expiry++
	id := "r" + strconv.Itoa(len(w.ids))
	w.ids = append(w.ids, id)
	w.all[id] = &booking{scope: scope, user: user, inE: true, held: true, order: Order{
		ReservationID: id, ActivityID: "act", SKUID: "sku", Version: 1, Bucket: scope.Bucket, UserID: user,
	}}
}

// bucketless makes the shop one without a column for the bucket.
func (w *world) bucketless() {
	for _, b := range w.all {
		b.order.Bucket = -1
	}
}

func (w *world) SKUs(context.Context, string, string) ([]SKU, error) {
	w.traffic()
	return []SKU{w.sku}, w.gone
}

func (w *world) Stocks(_ context.Context, scopes []reservation.Scope) []StockReply {
	replies := make([]StockReply, len(scopes))
	for i, s := range scopes {
		w.traffic()
		replies[i].Stock = *w.stock[s]
	}
	w.traffic()
	return replies
}

func (w *world) MissingFields(_ context.Context, scopes []reservation.Scope) []FieldsReply {
	return make([]FieldsReply, len(scopes))
}

// place orders members as a hash table does, whatever their scores.
func place(id string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(id))
	return h.Sum64()>>1 + 1
}

func (w *world) ExpiryPages(_ context.Context, requests []PageRequest) []PageReply {
	replies := make([]PageReply, len(requests))
	for i, r := range requests {
		w.traffic()
		var members []string
		for id, b := range w.all {
			if b.inE && b.scope == r.Scope && place(id) > r.Cursor {
				members = append(members, id)
			}
		}
		slices.SortFunc(members, func(a, b string) int { return int(min(max(int64(place(a)-place(b)), -1), 1)) })
		if len(members) > r.Limit {
			members = members[:r.Limit]
			replies[i].Cursor = place(members[r.Limit-1])
		}
		replies[i].IDs = members
	}
	w.traffic()
	return replies
}

func (w *world) Held(_ context.Context, refs []Ref) []HeldReply {
	w.traffic()
	replies := make([]HeldReply, len(refs))
	for i, r := range refs {
		b := w.all[r.ID]
		replies[i].Held = b != nil && b.scope == r.Scope && b.held
	}
	return replies
}

func (w *world) Freeze(context.Context) (Frozen, error) {
	w.traffic()
	return &frozenWorld{w: w}, w.gone
}

// frozenWorld is the orders as they were when it was fixed.
type frozenWorld struct {
	w      *world
	orders map[string]Order
}

func (f *frozenWorld) Close() {}

func (f *frozenWorld) Fix(context.Context) error {
	f.w.traffic()
	if f.orders != nil {
		return f.w.gone // a snapshot is taken once
	}
	f.orders = map[string]Order{}
	for id, b := range f.w.all {
		if b.ordered {
			f.orders[id] = b.order
		}
	}
	f.w.traffic()
	return f.w.gone
}

func (f *frozenWorld) Count(context.Context, string, string, []int64) ([]OrderCount, error) {
	f.w.traffic()
	counts := map[[2]int64]OrderCount{}
	for _, o := range f.orders {
		key := [2]int64{o.Version, o.Bucket}
		c := counts[key]
		c.Version, c.Bucket = o.Version, o.Bucket
		switch o.Status {
		case OrderActive:
			c.Active++
		case OrderCancelled:
			c.Cancelled++
		default:
			c.Unknown++
		}
		counts[key] = c
	}
	return slices.Collect(maps.Values(counts)), f.w.gone
}

func (f *frozenWorld) Match(_ context.Context, ids []string) ([]Order, error) {
	f.w.traffic()
	var out []Order
	for _, id := range ids {
		if o, ok := f.orders[id]; ok {
			out = append(out, o)
		}
	}
	return out, f.w.gone
}

func (f *frozenWorld) Walk(_ context.Context, walk OrderWalk, page func([]Order) error) error {
	var out []Order
	for _, o := range f.orders {
		if o.Status != OrderActive || (walk.Bucketless && o.Bucket < 0) {
			out = append(out, o)
		}
	}
	for p := range slices.Chunk(out, walk.Limit) {
		f.w.traffic()
		if err := page(p); err != nil {
			return err
		}
	}
	return f.w.gone
}

// Sold: the shop of the world has no counter.
func (f *frozenWorld) Sold(context.Context, string, string) ([]SoldCounter, bool, error) {
	f.w.traffic()
	return nil, false, f.w.gone
}

func (w *world) reconciler() *Reconciler { return &Reconciler{Registry: w, Stocks: w, Orders: w} }

// reading makes the reading of one round, for tests of its ranges.
func (w *world) reading(ctx context.Context, batch, tries int) []*scopeReading {
	checks := Checks()
	r := newRun(w.reconciler(), checks, Options{Batch: batch, Tries: tries})
	r.round = 1
	k, _ := r.prepare([]SKU{w.sku})
	r.reader.read(ctx, k[0], true)
	return k[0].scopes
}

var errGone = errors.New("the server is gone")
