package lua_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

func TestNewRunnerRefusesUnsafeClients(t *testing.T) {
	standalone := func(o *redis.UniversalOptions) redis.UniversalClient { return redis.NewClient(o.Simple()) }
	cluster := func(o *redis.UniversalOptions) redis.UniversalClient { return redis.NewClusterClient(o.Cluster()) }
	sentinel := func(o *redis.UniversalOptions) redis.UniversalClient {
		o.MasterName = "m"
		return redis.NewFailoverClient(o.Failover())
	}
	ring := func(*redis.UniversalOptions) redis.UniversalClient {
		return redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	}
	asIs := func(*redis.UniversalOptions) {}
	repeats := func(n int) func(*redis.UniversalOptions) {
		return func(o *redis.UniversalOptions) { o.MaxRetries = n }
	}
	noDeadline := func(o *redis.UniversalOptions) { o.ContextTimeoutEnabled = false }
	noTimeout := func(o *redis.UniversalOptions) { o.ReadTimeout = -1 }
	cases := []struct {
		name   string
		client func(*redis.UniversalOptions) redis.UniversalClient
		change func(*redis.UniversalOptions)
		unsafe bool
	}{
		{"standalone", standalone, asIs, false},
		{"standalone that repeats by default", standalone, repeats(0), true},
		{"standalone that repeats", standalone, repeats(2), true},
		{"standalone without the context's deadline", standalone, noDeadline, true},
		{"standalone that waits without end", standalone, noTimeout, true},
		{"sentinel", sentinel, asIs, false},
		{"sentinel that repeats by default", sentinel, repeats(0), true},
		{"cluster", cluster, asIs, false},
		{"cluster, whose nodes never repeat by default", cluster, repeats(0), false},
		{"cluster that repeats", cluster, repeats(2), true},
		{"cluster without the context's deadline", cluster, noDeadline, true},
		{"cluster that waits without end", cluster, noTimeout, true},
		{"cluster that reads from replicas", cluster, func(o *redis.UniversalOptions) { o.ReadOnly = true }, true},
		{"cluster that reads by latency", cluster, func(o *redis.UniversalOptions) { o.RouteByLatency = true }, true},
		{"cluster that reads anywhere", cluster, func(o *redis.UniversalOptions) { o.RouteRandomly = true }, true},
		{"ring", ring, asIs, true},
	}
	for _, c := range cases {
		o := lua.ClientOptions(&redis.UniversalOptions{Addrs: []string{"127.0.0.1:1"}})
		c.change(o)
		client := c.client(o)
		_, err := lua.NewRunner(client)
		_ = client.Close()
		if errors.Is(err, lua.ErrUnsafeClient) != c.unsafe || (err != nil) != c.unsafe {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestBatchIsRunOnce(t *testing.T) {
	w := newWorld(t, newClient(t, false, stacktest.Shared(t).Redis().Addr()))
	b := w.runner.Batch()
	w.must(b.Run(t.Context())) // empty
	b = w.runner.Batch()
	got := b.Snapshot(w.scope)
	if _, err := got.Get(); !errors.Is(err, lua.ErrNotRun) {
		t.Errorf("before Run: %v", err)
	}
	if b.Len() != 1 {
		t.Errorf("length %d", b.Len())
	}
	w.must(b.Run(t.Context()))
	if err := b.Run(t.Context()); err == nil {
		t.Error("a batch is run twice")
	}
	if _, err := got.Get(); err != nil {
		t.Error(err)
	}
}

// manyScopes are scopes with a sale each, spread over the nodes of a cluster.
func manyScopes(w *world, n int) []*world {
	w.Helper()
	out := make([]*world, n)
	for i := range out {
		out[i] = w.fresh()
		out[i].sale(1000, 0)
	}
	return out
}

// numbered are the arguments of the i'th of many reservations.
func (w *world) numbered(i int) lua.ReserveArgs {
	a := w.reserveArgs()
	a.RequestID, a.UserID, a.ReservationID = fmt.Sprintf("q%d", i), fmt.Sprintf("u%d", i), fmt.Sprintf("r%d", i)
	a.MessageID = reservation.MessageID(a.ReservationID)
	return a
}

// A page over many scopes and nodes, with a bad item in it: all others are done.
func TestOneBadItemNeverFailsThePage(t *testing.T) {
	onEach(t, func(w *world) {
		scopes := manyScopes(w, 12)
		scopes[5].spoil(scopes[5].scope.IndexKey(reservation.SendPending))
		runner := newRunner(w.T, w.client, lua.WithPipeline(7), lua.WithInFlight(2))
		b := runner.Batch()
		var accepted []*lua.Result[lua.ReserveReply]
		var moved []*lua.Result[lua.TransitionReply]
		for i := range 20 {
			for _, s := range scopes {
				a := s.numbered(i)
				accepted = append(accepted, b.Reserve(s.scope, a))
				moved = append(moved, b.Transition(s.scope, lua.TransitionArgs{
					ReservationID: a.ReservationID, Target: reservation.StatusEnqueued,
				}))
			}
		}
		w.must(b.Run(w.ctx()))
		for i := range accepted {
			bad := i%12 == 5
			r, err := accepted[i].Get()
			w.must(err)
			if (r.Code == lua.ReserveAccepted) == bad {
				w.Errorf("item %d: %+v", i, r)
			}
			// added after its reserve, and executed after it
			m, err := moved[i].Get()
			if bad {
				if !errors.Is(err, lua.ErrWrongData) {
					w.Errorf("item %d: %+v, %v", i, m, err)
				}
			} else if err != nil || m.Code != lua.TransitionUpdated {
				w.Errorf("item %d: %+v, %v", i, m, err)
			}
		}
	})
}

// onOwn runs a test on standalone servers that it may break.
func onOwn(t *testing.T, test func(*world, *devstack.Service)) {
	t.Helper()
	stack := stacktest.Own(t, devstack.Options{Redis: true, RedisFloor: true})
	for _, svc := range []*devstack.Service{stack.Redis(), stack.RedisFloor()} {
		t.Run(svc.Name(), func(t *testing.T) { test(newWorld(t, newClient(t, false, svc.Addr())), svc) })
	}
}

// flusher empties the script cache after each of the first n pipelines.
type flusher struct {
	redis.Hook
	client redis.UniversalClient
	mu     sync.Mutex
	left   int
}

func (f *flusher) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (f *flusher) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (f *flusher) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		f.mu.Lock()
		flush := f.left > 0
		f.left--
		f.mu.Unlock()
		if flush {
			if err := f.client.ScriptFlush(ctx).Err(); err != nil {
				return err
			}
		}
		return next(ctx, cmds)
	}
}

func TestScriptsAreFlushedInTheMiddleOfABatch(t *testing.T) {
	onOwn(t, func(w *world, svc *devstack.Service) {
		w.sale(1000, 0)
		admin := newClient(w.T, false, svc.Addr())
		hooked := newClient(w.T, false, svc.Addr())
		hook := &flusher{client: admin}
		hooked.AddHook(hook)
		w.runner = newRunner(w.T, hooked, lua.WithPipeline(50))
		all := func() []*lua.Result[lua.ReserveReply] {
			b := w.runner.Batch()
			results := make([]*lua.Result[lua.ReserveReply], 400)
			for i := range results {
				results[i] = b.Reserve(w.scope, w.numbered(i))
			}
			w.must(b.Run(w.ctx()))
			return results
		}

		// before every other pipeline of the batch, the re-runs included
		hook.left = 5
		for i, result := range all() {
			r, err := result.Get()
			if err != nil || r.Code != lua.ReserveAccepted || r.Replay || r.Remaining != int64(999-i) {
				w.Fatalf("item %d: %+v, %v", i, r, err)
			}
		}
		same(w, "stock", w.dump()["stock"].(dumped).Content, any(stockOf(600, 400)))

		// and by somebody else all the time
		done := make(chan struct{})
		var flushing sync.WaitGroup
		flushing.Go(func() {
			for {
				select {
				case <-done:
					return
				case <-time.After(2 * time.Millisecond):
					_ = admin.ScriptFlush(context.WithoutCancel(w.ctx())).Err()
				}
			}
		})
		for range 5 {
			for i, result := range all() {
				r, err := result.Get()
				if errors.Is(err, lua.ErrNoScript) { // honest: it was not executed
					continue
				}
				if err != nil || r.Code != lua.ReserveAccepted || !r.Replay || r.ReservationID != fmt.Sprintf("r%d", i) {
					w.Fatalf("item %d: %+v, %v", i, r, err)
				}
			}
		}
		close(done)
		flushing.Wait()

		// a node that never keeps a script is given up, typed
		hook.left = 1 << 30
		for _, result := range all() {
			if _, err := result.Get(); !errors.Is(err, lua.ErrNoScript) && err != nil {
				w.Fatalf("got %v", err)
			}
		}
	})
}

// The replies of a pipeline are lost, all of them or those behind a cut. Each
// call was executed at most once, what was answered is known, and asking again
// with the same ids tells the rest.
func TestRepliesAreLost(t *testing.T) {
	const n = 200
	faults := map[string]faultproxy.Faults{
		"all, after the scripts ran": {DropReplies: true},
		"all but a byte":             {CutAfter: 1},
		"half way":                   {CutAfter: 4000},
	}
	shared := stacktest.Shared(t)
	for _, addr := range []string{shared.Redis().Addr(), shared.RedisFloor().Addr()} {
		for name, fault := range faults {
			w := newWorld(t, newClient(t, false, addr))
			w.sale(1000, 0)
			proxy, err := faultproxy.Start(addr)
			w.must(err)
			t.Cleanup(proxy.Close)
			client := redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{
				Addrs: []string{proxy.Addr()}, ReadTimeout: time.Second,
			}))
			t.Cleanup(func() { _ = client.Close() })
			runner := newRunner(t, client)
			b := runner.Batch()
			b.Snapshot(w.scope) // the connection is up and its handshake done
			w.must(b.Run(t.Context()))

			page := func() []*lua.Result[lua.ReserveReply] {
				b := runner.Batch()
				results := make([]*lua.Result[lua.ReserveReply], n)
				for i := range results {
					results[i] = b.Reserve(w.scope, w.numbered(i))
				}
				w.must(b.Run(t.Context()))
				return results
			}
			proxy.Set(fault)
			known := 0
			for i, result := range page() {
				r, err := result.Get()
				switch {
				case errors.Is(err, lua.ErrOutcomeUnknown):
				case err != nil || r.Code != lua.ReserveAccepted || r.Replay:
					t.Errorf("%s: item %d: %+v, %v", name, i, r, err)
				case known < i:
					t.Errorf("%s: item %d was answered after one that was not", name, i)
				default:
					known++
				}
			}
			if (name == "half way") != (known > 0) || known == n {
				t.Errorf("%s: %d of %d answered", name, known, n)
			}
			proxy.Set(faultproxy.Faults{})
			for i, result := range page() {
				r, err := result.Get()
				// A cut also loses what the server has not read yet, so only the
				// dropped replies are certain to be of scripts that ran.
				ran := i < known || fault.DropReplies
				if err != nil || r.Code != lua.ReserveAccepted || (ran && !r.Replay) {
					t.Errorf("%s: asked again, item %d: %+v, %v", name, i, r, err)
				}
			}
			same(w, "stock", w.dump()["stock"].(dumped).Content, any(stockOf(1000-n, n)))
		}
	}
}

// compensate cut off three times releases once.
func TestCompensateCutOff(t *testing.T) {
	w := newWorld(t, newClient(t, false, stacktest.Shared(t).Redis().Addr()))
	w.reserved(reservation.StatusReleasePending)
	proxy, err := faultproxy.Start(stacktest.Shared(t).Redis().Addr())
	w.must(err)
	defer proxy.Close()
	runner := newRunner(t, newClient(t, false, proxy.Addr()))
	compensate := func() (lua.CompensateReply, error) {
		b := runner.Batch()
		got := b.Compensate(w.scope, lua.CompensateArgs{ReservationID: rid, UserID: user, Reason: "x", NowMS: w.base})
		w.must(b.Run(t.Context()))
		return got.Get()
	}
	for range 3 {
		b := runner.Batch()
		b.Snapshot(w.scope)
		w.must(b.Run(t.Context()))
		proxy.Set(faultproxy.Faults{CutAfter: 1})
		if _, err := compensate(); lua.Classify(err) != lua.ClassUnknown {
			t.Errorf("cut off: %v", err)
		}
		proxy.Set(faultproxy.Faults{})
	}
	got, err := compensate()
	if err != nil || got.Code != lua.CompensateAlreadyReleased || got.Available != 10 {
		t.Errorf("got %+v, %v", got, err)
	}
	same(w, "stock", w.dump()["stock"].(dumped).Content, any(with(stockOf(10, 0), "released_total", "1")))
}

// The end of the context ends Run, whatever the connection does.
func TestRunEndsWithTheContext(t *testing.T) {
	w := newWorld(t, newClient(t, false, stacktest.Shared(t).Redis().Addr()))
	proxy, err := faultproxy.Start(stacktest.Shared(t).Redis().Addr())
	w.must(err)
	defer proxy.Close()
	client := redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{
		Addrs: []string{proxy.Addr()}, ReadTimeout: 2 * time.Second,
	}))
	defer func() { _ = client.Close() }()
	runner := newRunner(t, client, lua.WithInFlight(1))
	b := runner.Batch()
	b.Snapshot(w.scope)
	w.must(b.Run(t.Context()))
	proxy.Set(faultproxy.Faults{Stall: true})

	run := func(ctx context.Context) (time.Duration, error, error) {
		b := runner.Batch()
		got := b.Snapshot(w.scope)
		begin := time.Now()
		err := b.Run(ctx)
		_, callErr := got.Get()
		return time.Since(begin), err, callErr
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	took, err, callErr := run(ctx) // nothing but the cancellation would end it within 2 s
	if !errors.Is(err, context.Canceled) || !errors.Is(callErr, lua.ErrOutcomeUnknown) || took > time.Second {
		t.Errorf("cancelled: %v, %v, %v", took, err, callErr)
	}
	// the abandoned pipeline still holds the node's only place
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	took, err, callErr = run(ctx)
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(callErr, lua.ErrUnreachable) || took > time.Second {
		t.Errorf("no place: %v, %v, %v", took, err, callErr)
	}
	ended, stop := context.WithCancel(t.Context())
	stop()
	if _, err, callErr := run(ended); !errors.Is(err, context.Canceled) || lua.Classify(callErr) != lua.ClassNotExecuted {
		t.Errorf("ended before: %v, %v", err, callErr)
	}
	proxy.Set(faultproxy.Faults{})
	if _, err, callErr := run(t.Context()); err != nil || callErr != nil {
		t.Errorf("afterwards: %v, %v", err, callErr)
	}
}

// Where there is no server, nothing was executed, and that is known.
func TestUnreachableServers(t *testing.T) {
	scope := stacktest.Scope(t)
	call := func(client redis.UniversalClient) error {
		b := newRunner(t, client).Batch()
		got := b.Snapshot(scope)
		if err := b.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		_, err := got.Get()
		return err
	}
	proxy, err := faultproxy.Start(stacktest.Shared(t).Redis().Addr())
	if err != nil {
		t.Fatal(err)
	}
	dead := proxy.Addr()
	proxy.Close() // nobody listens there any more
	for _, cluster := range []bool{false, true} {
		if err := call(newClient(t, cluster, dead)); !errors.Is(err, lua.ErrUnreachable) || lua.Classify(err) != lua.ClassNotExecuted {
			t.Errorf("nobody listens (cluster %v): %v", cluster, err)
		}
	}
	wrong := redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{
		Addrs: []string{stacktest.Shared(t).Redis().Addr()}, Username: "nobody", Password: "wrong",
	}))
	defer func() { _ = wrong.Close() }()
	if err := call(wrong); !errors.Is(err, lua.ErrNoPermission) || lua.Classify(err) != lua.ClassConfiguration {
		t.Errorf("wrong password: %v", err)
	}
}

func waitFor(w *world, condition func() bool) {
	w.Helper()
	for end := time.Now().Add(20 * time.Second); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			w.Fatal("waited 20 s in vain")
		}
	}
}

// What a server in trouble answers, by a server in that trouble: typed, and
// nothing was written.
func TestServersInTrouble(t *testing.T) {
	onOwn(t, func(w *world, svc *devstack.Service) {
		admin := newClient(w.T, false, svc.Addr()).(*redis.Client)
		config := func(pairs ...string) {
			w.Helper()
			for i := 0; i < len(pairs); i += 2 {
				w.must(admin.ConfigSet(w.ctx(), pairs[i], pairs[i+1]).Err())
			}
		}
		run := func(w *world) error {
			_, err := one(w, func(b *lua.Batch) *lua.Result[lua.ReserveReply] { return b.Reserve(w.scope, w.reserveArgs()) })
			return err
		}
		expect := func(what string, want error, class lua.Class) {
			w.Helper()
			if err := run(w); !errors.Is(err, want) || lua.Classify(err) != class {
				w.Errorf("%s: %v (%s)", what, err, lua.Classify(err))
			}
		}
		w.sale(10, 0)
		before := w.dump()

		config("min-replicas-to-write", "1")
		expect("too few replicas", lua.ErrNotEnoughReplicas, lua.ClassNotExecuted)
		config("min-replicas-to-write", "0")

		config("replica-serve-stale-data", "yes")
		w.must(admin.Do(w.ctx(), "replicaof", "127.0.0.1", "1").Err())
		expect("a replica", lua.ErrReadOnly, lua.ClassNotExecuted)
		config("replica-serve-stale-data", "no")
		_, err := one(w, func(b *lua.Batch) *lua.Result[lua.SnapshotReply] { return b.Snapshot(w.scope) })
		if !errors.Is(err, lua.ErrMasterDown) || lua.Classify(err) != lua.ClassNotExecuted {
			w.Errorf("a replica without its master: %v", err)
		}
		w.must(admin.Do(w.ctx(), "replicaof", "no", "one").Err())

		w.must(admin.Do(w.ctx(), "acl", "setuser", "reader", "on", ">pw", "~*", "+@all", "-@scripting").Err())
		w.must(admin.Do(w.ctx(), "acl", "setuser", "halfway", "on", ">pw", "~*", "+@all", "-zadd").Err())
		as := func(user string) *world {
			client := redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{
				Addrs: []string{svc.Addr()}, Username: user, Password: "pw",
			}))
			w.Cleanup(func() { _ = client.Close() })
			other := *w
			other.client, other.runner = client, newRunner(w.T, client)
			return &other
		}
		if err := run(as("reader")); !errors.Is(err, lua.ErrNoPermission) || lua.Classify(err) != lua.ClassConfiguration {
			w.Errorf("no right to run scripts: %v", err)
		}

		busy := newClient(w.T, false, svc.Addr())
		config("busy-reply-threshold", "1")
		var endless sync.WaitGroup
		endless.Go(func() { _ = busy.Eval(context.WithoutCancel(w.ctx()), "while true do end", nil).Err() })
		waitFor(w, func() bool { return admin.Ping(w.ctx()).Err() != nil }) // over its time: PING answers BUSY
		expect("busy", lua.ErrBusy, lua.ClassNotExecuted)
		w.must(admin.ScriptKill(w.ctx()).Err())
		endless.Wait()

		// A directory in the dump's place makes every save fail.
		w.must(os.Mkdir(filepath.Join(svc.Dir(), "dump.rdb"), 0o700))
		config("save", "3600 1")
		w.must(admin.BgSave(w.ctx()).Err())
		waitFor(w, func() bool {
			info, err := admin.InfoMap(w.ctx(), "persistence").Result()
			w.must(err)
			return info["Persistence"]["rdb_last_bgsave_status"] == "err"
		})
		expect("cannot persist", lua.ErrPersistence, lua.ClassNotExecuted)
		config("save", "")

		if diff := diffOf(before, w.dump()); diff != "" {
			w.Errorf("something was written:\n%s", diff)
		}

		// A right that is missing inside the script is found half way: unknown.
		if err := run(as("halfway")); !errors.Is(err, lua.ErrScriptFailed) || lua.Classify(err) != lua.ClassUnknown {
			w.Errorf("no right to ZADD: %v", err)
		}
		sameText(w, "the marker, written before ZADD was refused", w.text(markerKey(w)), rid)
	})
}

// When memory is full the scripts that free stock run, and the others are
// refused before they write anything.
func TestOutOfMemory(t *testing.T) {
	allowed := map[string]bool{
		"compensate": true, "transition": true, "confirm": true, "defer": true, "record_send": true, "unindex": true,
		"snapshot": true,
	}
	onOwn(t, func(w *world, _ *devstack.Service) {
		config := func(value string) { w.must(w.client.ConfigSet(w.ctx(), "maxmemory", value).Err()) }
		w.must(w.client.ConfigSet(w.ctx(), "maxmemory-policy", "noeviction").Err())
		defer config("0")
		for _, s := range subjects() {
			w := w.fresh()
			config("0")
			s.setup(w)
			before := w.dump()
			config("1")
			w.must(w.client.ScriptFlush(w.ctx()).Err()) // loading must work, too
			got, err := s.run(w)
			after := w.dump()
			if allowed[s.script] {
				if err != nil || (s.refused != nil && s.refused(got)) || (s.script != "snapshot" && equal(before, after)) {
					w.Errorf("%s does not work when memory is full: %+v, %v", s.script, got, err)
				}
				continue
			}
			if !errors.Is(err, lua.ErrOutOfMemory) || lua.Classify(err) != lua.ClassConfiguration {
				w.Errorf("%s: %+v, %v", s.script, got, err)
			}
			if diff := diffOf(before, after); diff != "" {
				w.Errorf("%s wrote before it was refused:\n%s", s.script, diff)
			}
		}
	})
}
