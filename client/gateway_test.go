package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// TestThousandUsers: everybody gets one unit, and what is over is refused.
func TestThousandUsers(t *testing.T) {
	t.Parallel()
	everyTarget(t, func(t *testing.T, target string) {
		t.Helper()
		const users, units = 1000, 900
		s := on(t, target, 4, 4*units) // more than enough in every bucket
		g := s.gateway(s.connect(), client.Options{})
		var wg sync.WaitGroup
		results := make([]client.Result, users)
		errs := make([]error, users)
		for i := range users {
			wg.Go(func() { results[i], errs[i] = g.Reserve(t.Context(), s.click(user(i))) })
		}
		wg.Wait()
		ids := map[string]bool{}
		for i, r := range results {
			if errs[i] != nil || !r.Accepted() || !r.Unsent() || r.Replay {
				t.Fatalf("user %d: %+v, %v", i, r.ReserveReply, errs[i])
			}
			if want := s.ReservationID(user(i), r.Request.RequestID); r.ReservationID != want || r.Reservation.ID != want {
				t.Fatalf("user %d: reservation %s and %s, want %s", i, r.ReservationID, r.Reservation.ID, want)
			}
			if r.Scope != s.ScopeOf(user(i)) || r.Reservation.Scope() != r.Scope {
				t.Fatalf("user %d: scope %s", i, r.Scope)
			}
			ids[r.ReservationID] = true
		}
		if len(ids) != users {
			t.Errorf("%d reservations for %d users", len(ids), users)
		}
		s.wantUnits(4*units-users, users)
	})
}

// TestOneUnit: a crowd and one unit. One is accepted, the rest are told so, by
// Redis or by the local marker.
func TestOneUnit(t *testing.T) {
	t.Parallel()
	everyTarget(t, func(t *testing.T, target string) {
		t.Helper()
		const users = 500
		s := on(t, target, 1, 1)
		g := s.gateway(s.connect(), client.Options{})
		var wg sync.WaitGroup
		var accepted, soldOut, local atomic.Int64
		for i := range users {
			wg.Go(func() {
				r, err := g.Reserve(t.Context(), s.click(user(i)))
				switch {
				case err != nil:
					t.Error(err)
				case r.Accepted():
					accepted.Add(1)
				case r.Code == lua.ReserveSoldOut:
					soldOut.Add(1)
					if r.Local {
						local.Add(1)
					}
				default:
					t.Errorf("%+v", r.ReserveReply)
				}
			})
		}
		wg.Wait()
		if accepted.Load() != 1 || soldOut.Load() != users-1 {
			t.Errorf("%d accepted, %d sold out", accepted.Load(), soldOut.Load())
		}
		hot := g.HotScopes(10)
		if len(hot) != 1 {
			t.Fatalf("hot scopes %+v", hot)
		}
		got := hot[0]
		if got.Scope != s.ScopeOf("") || got.Requests != users || got.Accepted != 1 || got.LocalSoldOut != local.Load() ||
			got.SoldOut != users-1-local.Load() || got.Available != 0 || got.Failures != 0 {
			t.Errorf("counters %+v, %d local", got, local.Load())
		}
		s.wantUnits(0, 1)
	})
}

// TestOtherAnswers: codes 10 to 15 are results, 16 is a refusal that leaks
// nothing, and bad ids never reach Redis.
func TestOtherAnswers(t *testing.T) {
	t.Parallel()
	s := on(t, "8-standalone", 1, 10)
	g := s.gateway(s.connect(), client.Options{})
	ctx := t.Context()
	first := s.accept(g, "alice")

	again, err := g.Reserve(ctx, s.click("alice"))
	if err != nil || !again.Accepted() || !again.Replay || again.ReservationID != first.ReservationID || !again.Unsent() {
		t.Errorf("the same click again: %+v, %v", again, err)
	}
	click := s.click("alice")
	click.RequestID = "q-other"
	other, err := g.Reserve(ctx, click)
	if err != nil || other.Code != lua.ReserveUserAlreadyReserved || other.ReservationID != first.ReservationID || other.Accepted() {
		t.Errorf("another request of the user: %+v, %v", other.ReserveReply, err)
	}
	if _, _, err := other.Message(); err == nil {
		t.Error("a request that was not accepted has a message")
	}
	click = s.click("bob")
	click.RequestID = "q-alice"
	refused := func(err error, code string) {
		t.Helper()
		e, ok := errors.AsType[*client.RefusedError](err)
		if !ok || e.Code != code || e.Response() != (client.Response{Code: code, RequestID: e.RequestID}) {
			t.Errorf("%v, want %s", err, code)
		}
	}
	stolen, err := g.Reserve(ctx, click)
	refused(err, "REQUEST_ID_CONFLICT")
	if stolen.ReservationID != "" || strings.Contains(err.Error(), first.ReservationID) {
		t.Errorf("another user's request leaks %+v, %v", stolen, err)
	}
	for _, bad := range []client.Request{
		{ActivityID: s.ActivityID, SKUID: s.SKUID, UserID: "a b", RequestID: "q"},
		{ActivityID: s.ActivityID, SKUID: s.SKUID, UserID: "a}{b", RequestID: "q"},
		{ActivityID: s.ActivityID, SKUID: s.SKUID, UserID: "a", RequestID: "q|r"},
		{ActivityID: s.ActivityID, SKUID: s.SKUID, UserID: "a"},
	} {
		_, err := g.Reserve(ctx, bad)
		refused(err, client.CodeInvalidRequest)
		if bad.UserID != "a" && strings.Contains(err.Error(), bad.UserID) {
			t.Errorf("%v shows a user id", err)
		}
	}
	_, err = g.Reserve(ctx, client.Request{ActivityID: s.ActivityID, SKUID: "nothing", UserID: "a", RequestID: "q"})
	refused(err, client.CodeNotOnSale)

	s.must(s.rdb.HSet(ctx, first.Scope.MetaKey(), "state", "PAUSED").Err())
	if r, err := g.Reserve(ctx, s.click("carol")); err != nil || r.Code != lua.ReserveActivityNotActive {
		t.Errorf("paused: %+v, %v", r.ReserveReply, err)
	}
	s.must(s.rdb.HDel(ctx, first.Scope.MetaKey(), "state").Err())
	_, err = g.Reserve(ctx, s.click("dave"))
	if e := busy(t, err, client.KindConfigMissing); e.OutcomeUnknown {
		t.Errorf("%v: nothing is unknown", e)
	}
	s.wantUnits(9, 1)
}

// TestMessage: the body is interface §3's, and the same as the daemon's.
func TestMessage(t *testing.T) {
	t.Parallel()
	s := on(t, "8-standalone", 4, 10)
	r := s.accept(s.gateway(s.connect(), client.Options{}), "alice")
	key, body, err := r.Message()
	s.must(err)
	at, err := s.rdb.HGet(t.Context(), r.Scope.ReservationKey(r.ReservationID), "reserved_at_ms").Int64()
	s.must(err)
	want := fmt.Sprintf(`{"schema_version":1,"message_id":"reserve-order:%[1]s:v1","reservation_id":"%[1]s","request_id":"q-alice",`+
		`"activity_id":"%[2]s","sku_id":"sku","user_id":"alice","activity_version":1,"bucket_id":%[3]d,"reserved_at_ms":%[4]d}`,
		r.ReservationID, s.ActivityID, r.Scope.Bucket, at)
	if string(body) != want || key != reservation.MessageID(r.ReservationID) {
		t.Errorf("message %s\n%s\nwant\n%s", key, body, want)
	}
	m, err := client.ParseMessage(body)
	if err != nil || m.Scope() != r.Scope {
		t.Errorf("parsed %+v, %v", m, err)
	}
}

// lossOnce ends a fault after the first pipeline of a client, so that the second
// attempt of a call is answered.
type lossOnce struct {
	armed atomic.Bool
	end   func()
	pipes atomic.Int64
}

func (l *lossOnce) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (l *lossOnce) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (l *lossOnce) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		l.pipes.Add(1)
		err := next(ctx, cmds)
		if l.armed.CompareAndSwap(true, false) {
			l.end()
		}
		return err
	}
}

// TestReplyLost: the script runs and its reply is lost. The same ids find the
// one reservation that there is.
func TestReplyLost(t *testing.T) {
	t.Parallel()
	everyTarget(t, func(t *testing.T, target string) {
		t.Helper()
		s := on(t, target, 1, 10)
		rdb := s.connect()
		hook := &lossOnce{end: func() { s.wire.set(faultproxy.Faults{}) }}
		addHook(rdb, hook)
		g := s.gateway(rdb, client.Options{Budget: 2 * time.Second})
		s.accept(g, "bob") // connects and loads the script
		hook.armed.Store(true)
		s.wire.set(faultproxy.Faults{DropReplies: true})
		r, err := g.Reserve(t.Context(), s.click("alice"))
		if err != nil || !r.Accepted() || !r.Replay || !r.Unsent() {
			t.Fatalf("%+v, %v", r.ReserveReply, err)
		}
		if hook.armed.Load() {
			t.Fatal("no reply was lost")
		}
		s.wantUnits(8, 2)
		if got := value(t, g, "seckill_redis_outcome_unknown_total"); got != 1 {
			t.Errorf("%v attempts of unknown outcome", got)
		}
	})
}

// addHook adds it to the client of every node: scripts run on those.
func addHook(rdb redis.UniversalClient, hook redis.Hook) {
	if c, ok := rdb.(*redis.ClusterClient); ok {
		c.OnNewNode(func(node *redis.Client) { node.AddHook(hook) })
		return
	}
	rdb.AddHook(hook)
}

// TestRepliesLostTwice: the gateway gives up, says so in a way that the user may
// ask again, and asks no more often than twice.
func TestRepliesLostTwice(t *testing.T) {
	t.Parallel()
	everyTarget(t, func(t *testing.T, target string) {
		t.Helper()
		s := on(t, target, 1, 10)
		rdb := s.connect()
		hook := &lossOnce{}
		addHook(rdb, hook)
		g := s.gateway(rdb, client.Options{Budget: 300 * time.Millisecond})
		eventually(t, func() string { // loads the script, in spite of the budget
			if _, err := g.Reserve(t.Context(), s.click("bob")); err != nil {
				return err.Error()
			}
			return ""
		})
		before := hook.pipes.Load()
		s.wire.set(faultproxy.Faults{DropReplies: true})
		r, err := g.Reserve(t.Context(), s.click("alice"))
		e := busy(t, err, "")
		if !e.OutcomeUnknown || r.Accepted() || e.ReservationID != s.ReservationID("alice", "q-alice") {
			t.Errorf("%+v, %+v", r, e)
		}
		if n := hook.pipes.Load() - before; n > 2 {
			t.Errorf("reserve.lua was sent %d times", n)
		}
		text, err := json.Marshal(e.Response())
		s.must(err)
		if diff := cmp.Diff(`{"code":"SYSTEM_BUSY","retryable":true,"request_id":"q-alice"}`, string(text)); diff != "" {
			t.Error(diff)
		}
		s.wire.set(faultproxy.Faults{})
		click := s.click("alice")
		click.Retry = true
		eventually(t, func() string {
			r, err := g.Reserve(t.Context(), click)
			if err != nil || !r.Accepted() || r.ReservationID != e.ReservationID {
				return fmt.Sprintf("asked again: %+v, %v", r.ReserveReply, err)
			}
			return ""
		})
		s.wantUnits(8, 2)
	})
}

// TestRedisHangs: the budget bounds a call, not Redis and not the client's
// time-outs.
func TestRedisHangs(t *testing.T) {
	t.Parallel()
	for _, target := range []string{"8-standalone", "8-cluster"} {
		t.Run(target, func(t *testing.T) {
			t.Parallel()
			s := on(t, target, 1, 10)
			g := s.gateway(s.connect(), client.Options{Budget: 40 * time.Millisecond})
			eventually(t, func() string {
				if _, err := g.Reserve(t.Context(), s.click("bob")); err != nil {
					return err.Error()
				}
				return ""
			})
			s.wire.set(faultproxy.Faults{Stall: true})
			defer s.wire.set(faultproxy.Faults{}) // a call that hangs fails the test's own limit
			began := time.Now()
			_, err := g.Reserve(t.Context(), s.click("alice"))
			took := time.Since(began)
			e := busy(t, err, "")
			if !e.Response().Retryable {
				t.Errorf("%+v", e.Response())
			}
			// 2 × 40 ms. Much more than that is a busy machine's; the client's own
			// time-outs are 30 s.
			if took > 5*time.Second {
				t.Errorf("it took %s", took)
			}
			s.wire.set(faultproxy.Faults{})
			click := s.click("alice")
			click.Retry = true
			eventually(t, func() string {
				if r, err := g.Reserve(t.Context(), click); err != nil || !r.Accepted() {
					return fmt.Sprintf("asked again: %+v, %v", r.ReserveReply, err)
				}
				return ""
			})
			s.wantUnits(8, 2)
		})
	}
}

func TestUnsafeClients(t *testing.T) {
	t.Parallel()
	s := on(t, "8-cluster", 1, 1)
	catalog, err := client.NewCatalog(s.Sale)
	s.must(err)
	for name, rdb := range map[string]redis.UniversalClient{
		"standalone": redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}),
		"cluster":    redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}}),
		"repeats":    s.connect(func(o *redis.UniversalOptions) { o.IsClusterMode, o.MaxRetries = false, 3 }),
		"replicas":   s.connect(func(o *redis.UniversalOptions) { o.ReadOnly = true }),
	} {
		t.Cleanup(func() { _ = rdb.Close() })
		if _, err := client.NewGateway(rdb, catalog, client.Options{}); !errors.Is(err, lua.ErrUnsafeClient) {
			t.Errorf("%s: a gateway was made: %v", name, err)
		}
		if _, err := client.NewConsumer(rdb, client.ConsumerOptions{}); !errors.Is(err, lua.ErrUnsafeClient) {
			t.Errorf("%s: a consumer was made: %v", name, err)
		}
	}
	for _, o := range []client.Options{{Budget: -1}, {SoldOutTTL: time.Second}} {
		if _, err := client.NewGateway(s.connect(), catalog, o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

// TestMarks: notes follow the legal path, and late ones are benign.
func TestMarks(t *testing.T) {
	t.Parallel()
	s := on(t, "7.0-cluster", 4, 100)
	rdb := s.connect()
	g := s.gateway(rdb, client.Options{RetryAfter: time.Minute})
	c, err := client.NewConsumer(rdb, client.ConsumerOptions{Timeout: patient})
	s.must(err)
	ctx := t.Context()
	message := func(r client.Result) client.Message { return reservation.NewOrderMessage(r.Reservation) }

	sent := s.accept(g, "alice")
	s.must(g.MarkEnqueued(ctx, sent.Reservation, "broker-a,1,2,"+strings.Repeat("0", 32)))
	if got := s.status(sent); got != "ENQUEUED" {
		t.Errorf("sent: %s", got)
	}
	again, err := g.Reserve(ctx, s.click("alice"))
	if err != nil || !again.Accepted() || again.Unsent() || again.Reservation.Position == "" {
		t.Errorf("a replay of what was sent: %+v, %v", again, err)
	}
	s.must(c.MarkOrderCreated(ctx, message(sent), "o-1"))
	s.must(c.MarkOrderCreated(ctx, message(sent), "o-1"))
	if got := s.status(sent); got != "ORDER_CREATED" {
		t.Errorf("ordered: %s", got)
	}
	s.must(g.MarkEnqueued(ctx, sent.Reservation, ""))     // late
	s.must(g.MarkSendUnknown(ctx, sent.Reservation, "x")) // and wrong
	s.must(c.MarkRejected(ctx, message(sent), "x"))
	if got := s.status(sent); got != "ORDER_CREATED" {
		t.Errorf("after late notes: %s", got)
	}

	unknown := s.accept(g, "bob")
	s.must(g.MarkSendUnknown(ctx, unknown.Reservation, "send_timeout"))
	score, err := s.rdb.ZScore(ctx, unknown.Scope.IndexKey(reservation.SendPending), unknown.ReservationID).Result()
	s.must(err)
	if want := unknown.Reservation.ReservedAtMS + 60_000; s.status(unknown) != "SEND_UNKNOWN" || int64(score) != want {
		t.Errorf("unknown: %s, next look at %.0f, want %d", s.status(unknown), score, want)
	}
	s.must(g.MarkEnqueued(ctx, unknown.Reservation, ""))
	s.must(c.MarkRejected(ctx, message(unknown), "out_of_stock"))
	if got := s.status(unknown); got != "REJECTED" {
		t.Errorf("rejected: %s", got)
	}

	gone := s.accept(g, "carol")
	s.must(s.rdb.Del(ctx, gone.Scope.ReservationKey(gone.ReservationID)).Err())
	s.must(g.MarkEnqueued(ctx, gone.Reservation, ""))
	s.must(c.MarkOrderCreated(ctx, message(gone), "o-2"))

	refused := s.accept(g, "dave")
	s.must(g.Mark(ctx, []client.Sent{{Reservation: refused.Reservation, Outcome: reservation.SendUnavailable}}))
	if got := s.status(refused); got != "RESERVED" {
		t.Errorf("not sent: %s", got)
	}
	other := refused.Reservation
	other.MessageID = "reserve-order:other:v1"
	if err := g.MarkEnqueued(ctx, other, ""); err == nil {
		t.Error("a note with another message was accepted")
	}
}

// TestVersionsRoll: the catalog follows current_version, every version is a
// namespace of its own, and an unknown one is not on sale.
func TestVersionsRoll(t *testing.T) {
	t.Parallel()
	for _, target := range []string{"8-standalone", "8-cluster"} {
		t.Run(target, func(t *testing.T) {
			t.Parallel()
			s := on(t, target, 4, 100)
			next := s.Sale
			next.Version, next.Buckets, next.Secret = 2, 2, []byte("another")
			s.provision(next, 50)
			catalog, err := client.NewCatalog(s.Sale, next)
			s.must(err)
			rdb := s.connect()
			g := s.gatewayOf(rdb, catalog, client.Options{})
			ctx := t.Context()
			if _, err := g.Reserve(ctx, s.click("alice")); !errors.Is(err, client.ErrNotOnSale) {
				t.Errorf("before a version is in force: %v", err)
			}
			if err := catalog.Refresh(ctx, rdb); !errors.Is(err, redis.Nil) {
				t.Errorf("without current_version: %v", err)
			}
			use := func(version string) {
				s.must(s.rdb.Set(ctx, reservation.CurrentVersionKey(s.ActivityID), version, time.Hour).Err())
				s.must(catalog.Refresh(ctx, rdb))
			}
			use("1")
			first := s.accept(g, "alice")
			use("2")
			second, err := g.Reserve(ctx, s.click("alice"))
			if err != nil || !second.Accepted() || second.Scope != next.ScopeOf("alice") || second.ReservationID == first.ReservationID {
				t.Errorf("in the new version: %+v, %v", second, err)
			}
			if hot := g.HotScopes(10); len(hot) != 1 || hot[0].Scope != second.Scope {
				t.Errorf("the old version is still kept: %+v", hot)
			}
			s.must(catalog.Replace(s.Sale, next))
			s.must(s.rdb.Set(ctx, reservation.CurrentVersionKey(s.ActivityID), "x", time.Hour).Err())
			if err := catalog.Refresh(ctx, rdb); err == nil {
				t.Error("a version that is no number was read")
			}
			if r, err := g.Reserve(ctx, s.click("bob")); err != nil || r.Scope.Version != 2 {
				t.Errorf("after a failed refresh: %+v, %v", r.Scope, err)
			}
			use("3")
			if _, err := g.Reserve(ctx, s.click("carol")); !errors.Is(err, client.ErrNotOnSale) {
				t.Errorf("in an unknown version: %v", err)
			}
		})
	}
}

// TestFollow: a catalog that follows current_version sees a roll by itself.
func TestFollow(t *testing.T) {
	t.Parallel()
	s := on(t, "7.0-standalone", 1, 1)
	next := s.Sale
	next.Version = 2
	catalog, err := client.NewCatalog(s.Sale, next)
	s.must(err)
	ctx, cancel := context.WithCancel(t.Context())
	var failures atomic.Int64
	var wg sync.WaitGroup
	wg.Go(func() {
		catalog.Follow(ctx, s.rdb, 20*time.Millisecond, func(error) { failures.Add(1) })
	})
	eventually(t, func() string { return map[bool]string{true: "", false: "no failure was told"}[failures.Load() > 0] })
	s.must(s.rdb.Set(t.Context(), reservation.CurrentVersionKey(s.ActivityID), "2", time.Hour).Err())
	eventually(t, func() string {
		if got, err := catalog.Sale(s.ActivityID, s.SKUID); err != nil || got.Version != 2 {
			return fmt.Sprintf("%+v, %v", got, err)
		}
		return ""
	})
	cancel()
	wg.Wait()
}

func TestCatalogRefusesBadSales(t *testing.T) {
	t.Parallel()
	good := client.Sale{ActivityID: "a", SKUID: "s", Secret: []byte("x")}
	for _, change := range []func(*client.Sale){
		func(s *client.Sale) { s.ActivityID = "a b" },
		func(s *client.Sale) { s.Version = -1 },
		func(s *client.Sale) { s.Buckets = 1 << 20 },
		func(s *client.Sale) { s.Secret = nil },
	} {
		bad := good
		change(&bad)
		if _, err := client.NewCatalog(bad); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}

// gathered are a gateway's metrics, by name.
func gathered(t *testing.T, g *client.Gateway) map[string]*dto.MetricFamily {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	if err := registry.Register(g); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	byName := map[string]*dto.MetricFamily{}
	for _, f := range families {
		byName[f.GetName()] = f
	}
	return byName
}

// value is the sum of a counter or gauge, or a histogram's count, over the
// series whose label values include all of labels.
func value(t *testing.T, g *client.Gateway, name string, labels ...string) float64 {
	t.Helper()
	var sum float64
	for _, m := range gathered(t, g)[name].GetMetric() {
		has := map[string]bool{}
		for _, l := range m.GetLabel() {
			has[l.GetValue()] = true
		}
		all := true
		for _, l := range labels {
			all = all && has[l]
		}
		if all {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// TestMetrics: those of spec §7 are there, and none has an id as a label.
func TestMetrics(t *testing.T) {
	t.Parallel()
	s := on(t, "8-cluster", 16, 16)
	g := s.gateway(s.connect(), client.Options{})
	var page []client.Request
	for i := range 200 {
		page = append(page, s.click(user(i)))
	}
	for _, a := range g.ReserveAll(t.Context(), page) {
		if a.Err != nil {
			t.Fatal(a.Err)
		}
	}
	families := gathered(t, g)
	for _, name := range []string{
		"reserve_lua_duration_seconds", "reserve_lua_rc_total", "redis_timeout_total", "redis_outcome_unknown_total",
		"redis_pool_wait_seconds_total", "local_soldout_reject_total", "redis_soldout_total", "soldout_false_positive_total",
		"bucket_qps", "bucket_lua_p99_seconds", "bucket_available", "bucket_soldout_time_seconds", "sku_stopped",
	} {
		if families["seckill_"+name] == nil {
			t.Errorf("no metric %s", name)
		}
	}
	series := 0
	for _, f := range families {
		series += len(f.GetMetric())
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if strings.Contains(l.GetValue(), s.ActivityID) || strings.HasPrefix(l.GetValue(), "u-") || l.GetValue() == s.SKUID {
					t.Errorf("%s has the label %s=%s", f.GetName(), l.GetName(), l.GetValue())
				}
			}
		}
	}
	if series > 60 {
		t.Errorf("%d series for 16 buckets", series)
	}
	accepted := value(t, g, "seckill_reserve_lua_rc_total", "ACCEPTED")
	sold := value(t, g, "seckill_redis_soldout_total")
	local := value(t, g, "seckill_local_soldout_reject_total")
	if available, reserved := s.units(); float64(reserved) != accepted || available+reserved != 16 || accepted+sold+local != 200 {
		t.Errorf("%v accepted, %v sold out, %v of them here; %d reserved", accepted, sold, local, reserved)
	}
	if got := value(t, g, "seckill_reserve_lua_duration_seconds"); got != 200-local {
		t.Errorf("%v times were taken", got)
	}
}
