package lua_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newClient is a client as the daemon makes it.
func newClient(tb testing.TB, cluster bool, addrs ...string) redis.UniversalClient {
	tb.Helper()
	client := redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{
		Addrs: addrs, IsClusterMode: cluster, ReadTimeout: 20 * time.Second, PoolSize: 16,
	}))
	tb.Cleanup(func() { _ = client.Close() })
	return client
}

func newRunner(tb testing.TB, client redis.UniversalClient, options ...lua.Option) *lua.Runner {
	tb.Helper()
	runner, err := lua.NewRunner(client, options...)
	if err != nil {
		tb.Fatal(err)
	}
	return runner
}

// onEach runs a test on each of the four real Redis targets.
func onEach(t *testing.T, test func(*world)) {
	t.Helper()
	for _, target := range stacktest.RedisTargets(t) {
		t.Run(target.Name, func(t *testing.T) {
			t.Parallel()
			test(newWorld(t, newClient(t, target.Cluster, target.Addrs...)))
		})
	}
}

// world is one scope on one Redis, with a state that a test can set, run
// scripts on and dump.
type world struct {
	*testing.T
	client redis.UniversalClient
	runner *lua.Runner
	scope  reservation.Scope
	base   int64 // now_ms of the test: the real time at its start
	until  int64 // retention_until_ms
	keys   []string
}

const (
	rid, request, user = "r1", "q1", "u1"
	message            = "reserve-order:r1:v1"
	otherRID           = "r2"
	transfer           = "t1"
)

func newWorld(t *testing.T, client redis.UniversalClient) *world {
	t.Helper()
	base := time.Now().UnixMilli()
	w := &world{
		T: t, client: client, runner: newRunner(t, client),
		scope: stacktest.Scope(t), base: base, until: base + time.Hour.Milliseconds(),
	}
	w.track()
	return w
}

// on is the world under a sub-test, with a scope of its own.
func (w *world) on(t *testing.T) *world {
	t.Helper()
	next := *w
	next.T, next.scope = t, stacktest.Scope(t)
	next.track()
	return &next
}

// fresh is the same world with a scope of its own.
func (w *world) fresh() *world { return w.on(w.T) }

// track names every key that a script of this test may touch.
func (w *world) track() {
	s := w.scope
	w.keys = []string{
		s.MetaKey(), s.StockKey(), s.RequestKey(request), s.UserKey(user), s.ReservationKey(rid),
		s.IndexKey(reservation.SendPending), s.IndexKey(reservation.ReservationExpiry), s.SoldOutKey(),
		s.UserKey("u2"), s.ReservationKey(otherRID), s.TransferKey(transfer),
	}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) ctx() context.Context { return w.Context() }

type fields = map[string]string

// meta is a running sale's.
func (w *world) meta() fields {
	return fields{
		"activity_id": w.scope.ActivityID, "sku_id": w.scope.SKUID, "bucket_id": itoa(w.scope.Bucket),
		"version": itoa(w.scope.Version), "state": "ACTIVE", "starts_at_ms": itoa(w.base - 1000),
		"ends_at_ms": itoa(w.until - 60_000), "retention_until_ms": itoa(w.until), "schema_version": "1",
	}
}

func stockOf(available, reserved int64) fields {
	return fields{
		"initial": itoa(available + reserved), "available": itoa(available), "reserved": itoa(reserved),
		"released_total": "0",
	}
}

// hash is a complete reservation in the given status.
func (w *world) hash(status reservation.Status) fields {
	return fields{
		"reservation_id": rid, "request_id": request, "message_id": message, "activity_id": w.scope.ActivityID,
		"sku_id": w.scope.SKUID, "user_id": user, "activity_version": itoa(w.scope.Version),
		"bucket_id": itoa(w.scope.Bucket), "status": string(status), "reserved_at_ms": itoa(w.base - 500),
		"expires_at_ms": itoa(w.base + 60_000), "updated_at_ms": itoa(w.base - 500), "schema_version": "1",
	}
}

func with(f fields, pairs ...string) fields {
	out := maps.Clone(f)
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i]] = pairs[i+1]
	}
	return out
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

// The setters write a key with the scope's retention as its expiry.
func (w *world) setHash(key string, f fields) {
	w.Helper()
	w.must(w.client.Del(w.ctx(), key).Err())
	if len(f) > 0 {
		w.must(w.client.HSet(w.ctx(), key, f).Err())
		w.expire(key)
	}
}

func (w *world) setText(key, value string) {
	w.Helper()
	w.must(w.client.Set(w.ctx(), key, value, 0).Err())
	w.expire(key)
}

func (w *world) setMember(index reservation.Index, id string, score int64) {
	w.Helper()
	key := w.scope.IndexKey(index)
	w.must(w.client.ZAdd(w.ctx(), key, redis.Z{Score: float64(score), Member: id}).Err())
	w.expire(key)
}

func (w *world) expire(key string) {
	w.Helper()
	w.must(w.client.PExpireAt(w.ctx(), key, time.UnixMilli(w.until)).Err())
}

// spoil makes key a list: the wrong type for every key of the contract.
func (w *world) spoil(key string) {
	w.Helper()
	w.must(w.client.Del(w.ctx(), key).Err())
	w.must(w.client.RPush(w.ctx(), key, "x").Err())
	w.expire(key)
}

// sale is a scope with a running sale.
func (w *world) sale(available, reserved int64) {
	w.Helper()
	w.setHash(w.scope.MetaKey(), w.meta())
	w.setHash(w.scope.StockKey(), stockOf(available, reserved))
}

// reserved is a sale with one reservation in the given status, as the scripts
// leave it.
func (w *world) reserved(status reservation.Status) {
	w.Helper()
	w.sale(9, 1)
	w.setHash(w.scope.ReservationKey(rid), w.hash(status))
	w.setText(w.scope.UserKey(user), rid)
	w.setHash(w.scope.RequestKey(request), fields{request: "0|r1|9|QUEUED|u1"})
	if status.Unsent() {
		w.setMember(reservation.SendPending, rid, w.base)
	}
	switch {
	case status.Releasing():
		w.setMember(reservation.ReservationExpiry, rid, w.base)
	case !status.Terminal():
		w.setMember(reservation.ReservationExpiry, rid, w.base+60_000)
	}
}

// dump is everything that the scope holds: type, absolute expiry and content of
// each key.
type dump map[string]any

type dumped struct {
	Type     string
	ExpireAt int64 // -1: never
	Content  any
}

func (w *world) dump() dump {
	w.Helper()
	pipe := w.client.Pipeline()
	types, expiries := make([]*redis.StatusCmd, len(w.keys)), make([]*redis.DurationCmd, len(w.keys))
	for i, key := range w.keys {
		types[i], expiries[i] = pipe.Type(w.ctx(), key), pipe.PExpireTime(w.ctx(), key)
	}
	_, err := pipe.Exec(w.ctx())
	w.must(err)
	out := dump{}
	for i, key := range w.keys {
		if types[i].Val() == "none" {
			continue
		}
		d := dumped{Type: types[i].Val(), ExpireAt: -1}
		if at := expiries[i].Val(); at > 0 {
			d.ExpireAt = at.Milliseconds()
		}
		switch d.Type {
		case "hash":
			d.Content, err = w.client.HGetAll(w.ctx(), key).Result()
		case "string":
			d.Content, err = w.client.Get(w.ctx(), key).Result()
		case "zset":
			d.Content, err = w.client.ZRangeWithScores(w.ctx(), key, 0, -1).Result()
		case "list":
			d.Content, err = w.client.LRange(w.ctx(), key, 0, -1).Result()
		}
		w.must(err)
		out[key[len("seckill:{"+w.scope.Tag()+"}:"):]] = d
	}
	return out
}

// unchanged runs do and demands that it writes nothing at all.
func (w *world) unchanged(do func()) {
	w.Helper()
	before := w.dump()
	do()
	if diff := cmp.Diff(before, w.dump()); diff != "" {
		w.Errorf("the scope changed (-before +after):\n%s", diff)
	}
}

// allExpireAtRetention demands the scope's absolute expiry on every key.
func (w *world) allExpireAtRetention() {
	w.Helper()
	all := w.dump()
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if at := all[key].(dumped).ExpireAt; at != w.until {
			w.Errorf("%s expires at %d, want %d", key, at, w.until)
		}
	}
}

func (w *world) field(key, name string) string {
	w.Helper()
	value, err := w.client.HGet(w.ctx(), key, name).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		w.Fatal(err)
	}
	return value
}

func (w *world) score(index reservation.Index, id string) string {
	w.Helper()
	score, err := w.client.ZScore(w.ctx(), w.scope.IndexKey(index), id).Result()
	if errors.Is(err, redis.Nil) {
		return "none"
	}
	w.must(err)
	return itoa(int64(score))
}

func (w *world) text(key string) string {
	w.Helper()
	value, err := w.client.Get(w.ctx(), key).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		w.Fatal(err)
	}
	return value
}

// one runs a batch of a single call.
func one[T any](w *world, add func(*lua.Batch) *lua.Result[T]) (T, error) {
	w.Helper()
	b := w.runner.Batch()
	result := add(b)
	w.must(b.Run(w.ctx()))
	return result.Get()
}

// reply is that of a call that must not fail.
func reply[T any](w *world, add func(*lua.Batch) *lua.Result[T]) T {
	w.Helper()
	got, err := one(w, add)
	w.must(err)
	return got
}

func same[T any](w *world, what string, got, want T) {
	w.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		w.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func sameText(w *world, what string, got, want any) {
	w.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		w.Errorf("%s: got %v, want %v", what, got, want)
	}
}
