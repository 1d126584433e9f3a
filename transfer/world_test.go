package transfer_test

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a version on a real Redis. Its journal is kept in memory, its orders
// are counts, and its reservations are moved by hand: what is of interest is
// where the units are.
type world struct {
	testing.TB
	store  *redisstore.Store
	client redis.UniversalClient
	key    transfer.Key
	orders map[int64]int64 // of each bucket, in PostgreSQL
	tasks  []reservation.TaskReport

	mu      sync.Mutex
	version transfer.Version
}

// openStore connects to a Redis deployment as the daemon does.
func openStore(tb testing.TB, addrs ...string) (*redisstore.Store, redis.UniversalClient) {
	tb.Helper()
	clients, err := redisstore.Open(tb.Context(), config.Redis{
		Addrs: addrs, Mode: config.RedisAuto, DialTimeout: 2 * time.Second, CommandTimeout: 10 * time.Second, PoolSize: 8,
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = clients.Close() })
	store, err := redisstore.New(clients, 10*time.Second)
	if err != nil {
		tb.Fatal(err)
	}
	return store, clients.Reading
}

// newWorld opens a sale with so many units in each bucket.
func newWorld(tb testing.TB, store *redisstore.Store, client redis.UniversalClient, units ...int64) *world {
	tb.Helper()
	w := &world{TB: tb, store: store, client: client, key: transfer.KeyOf(stacktest.Scope(tb)), orders: map[int64]int64{}}
	now := time.Now()
	w.version = transfer.Version{Key: w.key, Count: int64(len(units)), StartsAt: now.Add(-time.Minute), EndsAt: now.Add(time.Hour)}
	batch := store.Writer().Batch()
	for i, n := range units {
		w.version.Allocated += n
		w.version.Buckets = append(w.version.Buckets, transfer.Bucket{ID: int64(i), Initial: n, State: "ACTIVE"})
		batch.Provision(w.key.Scope(int64(i)), lua.ProvisionArgs{
			State: lua.StateActive, StartsAtMS: now.Add(-time.Minute).UnixMilli(), EndsAtMS: now.Add(time.Hour).UnixMilli(),
			RetentionUntilMS: now.Add(2 * time.Hour).UnixMilli(), SchemaVersion: 1, Initial: n,
		})
	}
	w.must(batch.Run(tb.Context()))
	return w
}

// onEach runs a test on each of the four Redis targets.
func onEach(t *testing.T, test func(t *testing.T, open func(units ...int64) *world)) {
	t.Helper()
	for _, target := range stacktest.RedisTargets(t) {
		t.Run(target.Name, func(t *testing.T) {
			t.Parallel()
			store, client := openStore(t, target.Addrs...)
			test(t, func(units ...int64) *world { return newWorld(t, store, client, units...) })
		})
	}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// The journal, in memory.

func (w *world) Versions(_ context.Context, f transfer.Filter) ([]transfer.Version, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if f.Journalled && len(w.version.Transfers) == 0 {
		return nil, nil
	}
	v := w.version
	v.ReadAt = time.Now()
	v.Transfers, v.Buckets = slices.Clone(v.Transfers), slices.Clone(v.Buckets)
	return []transfer.Version{v}, nil
}

func (w *world) CreateTransfers(_ context.Context, transfers []transfer.Transfer) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.version.Transfers = append(w.version.Transfers, transfers...)
	return nil
}

func (w *world) NoteTransfers(_ context.Context, changes []transfer.Change) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range changes {
		for i := range w.version.Transfers {
			if t := &w.version.Transfers[i]; t.ID == c.ID && t.State == c.From {
				t.State = c.To
			}
		}
	}
	return nil
}

func (w *world) ReportTasks(_ context.Context, reports []reservation.TaskReport) error {
	w.tasks = append(w.tasks, reports...)
	return nil
}

// Deviations counts only what is lost: reservations that have an order and are
// not reserved.
func (w *world) Deviations(_ context.Context, scopes []reservation.Scope) []transfer.Deviation {
	out := make([]transfer.Deviation, len(scopes))
	for i, s := range scopes {
		out[i].Units = min(w.stock(s.Bucket).Reserved-w.orders[s.Bucket], 0)
	}
	return out
}

func (w *world) worker() *transfer.Worker {
	return &transfer.Worker{Journal: w, Stocks: w.store, Drift: w, Tasks: w}
}

func (w *world) planner() *transfer.Planner {
	return &transfer.Planner{Journal: w, Stocks: w.store, Drift: w}
}

// pass makes one pass that must not fail.
func (w *world) pass() map[string]int {
	w.Helper()
	tally, err := w.worker().Pass(w.Context())
	w.must(err)
	return tally.Counts()
}

// plan journals a transfer past every check.
func (w *world) plan(donor, receiver, amount int64) transfer.Transfer {
	w.Helper()
	t := transfer.Transfer{
		ID: transfer.NewID(), Key: w.key, Donor: donor, Receiver: receiver, Amount: amount, State: transfer.Planned, CreatedAt: time.Now(), UpdatedAt: time.Now(),
	}
	w.must(w.CreateTransfers(w.Context(), []transfer.Transfer{t}))
	return t
}

func (w *world) state(id string) transfer.State {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.version.Transfers {
		if t.ID == id {
			return t.State
		}
	}
	return ""
}

// The stock.

func (w *world) books() transfer.Books {
	w.Helper()
	versions, err := w.Versions(w.Context(), transfer.Filter{})
	w.must(err)
	b := versions[0].Keep(w.store.ReadTransfers(w.Context(), versions[0].Queries()))
	w.must(b.Check())
	return b
}

func (w *world) stock(bucket int64) transfer.Reading {
	w.Helper()
	r := w.store.ReadTransfers(w.Context(), []transfer.Query{{Scope: w.key.Scope(bucket)}})[0]
	w.must(r.Err)
	return r
}

// trade moves n units from available to reserved, or back.
func (w *world) trade(bucket, n int64) {
	w.Helper()
	key := w.key.Scope(bucket).StockKey()
	_, err := w.client.TxPipelined(w.Context(), func(pipe redis.Pipeliner) error {
		pipe.HIncrBy(w.Context(), key, "available", -n)
		pipe.HIncrBy(w.Context(), key, "reserved", n)
		return nil
	})
	w.must(err)
}

// numbers are "available/reserved" of each bucket.
func (w *world) numbers() (out []string) {
	w.Helper()
	for _, b := range w.version.Buckets {
		r := w.stock(b.ID)
		out = append(out, strconv.FormatInt(r.Available, 10)+"/"+strconv.FormatInt(r.Reserved, 10))
	}
	return out
}

func (w *world) want(what string, numbers ...string) {
	w.Helper()
	if got := w.numbers(); !slices.Equal(got, numbers) {
		w.Errorf("%s: the buckets hold %v, want %v", what, got, numbers)
	}
}

// whole demands what holds whatever happens: the sums, and in each bucket.
func (w *world) whole(what string) {
	w.Helper()
	b := w.books()
	if d := b.Difference(); d != 0 {
		w.Fatalf("%s: Σ initial %d + in transit %d is %+d against %d allocated", what, b.Initial(), b.InTransit(), d, b.Version.Allocated)
	}
	for id, r := range b.Buckets {
		if r.Initial != r.Available+r.Reserved || r.Initial != b.Expected(id) {
			w.Fatalf("%s: bucket %d: %+v, expected an initial stock of %d", what, id, r, b.Expected(id))
		}
	}
}

// atRest demands that every pair is equal, too, and no unit on its way.
func (w *world) atRest(what string) {
	w.Helper()
	w.whole(what)
	if b := w.books(); b.Initial() != b.Version.Allocated || len(b.Unequal()) > 0 {
		w.Fatalf("%s: Σ initial %d of %d allocated, unequal %+v", what, b.Initial(), b.Version.Allocated, b.Unequal())
	}
}

// image is what a slot held at one time: what a replica has.
type image struct {
	bucket int64
	values map[string]string
}

func (w *world) keysOf(bucket int64) []string {
	s := w.key.Scope(bucket)
	keys := []string{s.MetaKey(), s.StockKey(), s.SoldOutKey()}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, t := range w.version.Transfers {
		keys = append(keys, s.TransferKey(t.ID))
	}
	return keys
}

func (w *world) image(bucket int64) image {
	w.Helper()
	keys := w.keysOf(bucket)
	dumps := make([]*redis.StringCmd, len(keys))
	_, err := w.client.TxPipelined(w.Context(), func(pipe redis.Pipeliner) error {
		for i, key := range keys {
			dumps[i] = pipe.Dump(w.Context(), key)
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		w.Fatal(err)
	}
	img := image{bucket, map[string]string{}}
	for i, key := range keys {
		if value, err := dumps[i].Result(); err == nil {
			img.values[key] = value
		}
	}
	return img
}

// failover takes a slot back to the image: every write since is lost.
func (w *world) failover(img image) {
	w.Helper()
	until := w.stock(img.bucket).RetentionUntilMS
	_, err := w.client.TxPipelined(w.Context(), func(pipe redis.Pipeliner) error {
		for _, key := range w.keysOf(img.bucket) {
			if _, known := img.values[key]; !known {
				pipe.Del(w.Context(), key)
			}
		}
		for _, key := range slices.Sorted(maps.Keys(img.values)) {
			pipe.Do(w.Context(), "restore", key, until, img.values[key], "replace", "absttl")
		}
		return nil
	})
	w.must(err)
}

// drain lets the sale end: reservations become orders while there are units in
// PostgreSQL, the others are released, lost ones are restored, and the worker and
// the filler go on until nothing changes any more.
func (w *world) drain() {
	w.Helper()
	for _, b := range w.version.Buckets {
		for reserved := w.stock(b.ID).Reserved; reserved > w.orders[b.ID]; {
			if w.sold() < w.version.Allocated {
				w.orders[b.ID]++
			} else {
				w.trade(b.ID, -1)
				reserved--
			}
		}
	}
	filler := &transfer.Filler{Planner: w.planner(), Worker: w.worker(), Actor: "test"}
	for n := 0; ; n++ {
		if n > 30 {
			w.Fatalf("it does not come to rest: %v, %+v", w.numbers(), w.books().Unequal())
		}
		before := w.numbers()
		w.restore()
		w.must(filler.FinishTransfers(w.Context(), []reservation.Scope{w.key.Scope(0)}, true))
		for _, b := range w.version.Buckets {
			if r := w.stock(b.ID); r.Reserved < w.orders[b.ID] && r.Available == 0 {
				_, err := filler.FillDeficit(w.Context(), w.key.Scope(b.ID), w.orders[b.ID]-r.Reserved)
				w.must(err)
			}
		}
		w.restore()
		if slices.Equal(before, w.numbers()) && len(w.books().Unequal()) == 0 {
			return
		}
	}
}

// restore takes units for orders whose reservations are lost.
func (w *world) restore() {
	w.Helper()
	for _, b := range w.version.Buckets {
		r := w.stock(b.ID)
		if n := min(w.orders[b.ID]-r.Reserved, r.Available); n > 0 {
			w.trade(b.ID, n)
		}
	}
}

func (w *world) sold() (n int64) {
	for _, orders := range w.orders {
		n += orders
	}
	return n
}
