package client_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patient is a budget that no busy machine uses up.
const patient = 30 * time.Second

// wire stands between a client and all nodes of a Redis.
type wire struct {
	t       *testing.T
	mu      sync.Mutex
	proxies map[string]*faultproxy.Proxy
	faults  faultproxy.Faults
}

func (w *wire) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	w.mu.Lock()
	p := w.proxies[addr]
	if p == nil {
		var err error
		if p, err = faultproxy.Start(addr); err != nil {
			w.mu.Unlock()
			return nil, err
		}
		p.Set(w.faults)
		w.proxies[addr] = p
		w.t.Cleanup(p.Close)
	}
	w.mu.Unlock()
	return (&net.Dialer{}).DialContext(ctx, network, p.Addr())
}

func (w *wire) set(f faultproxy.Faults) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.faults = f
	for _, p := range w.proxies {
		p.Set(f)
	}
}

// sale is one activity of a test, on one Redis.
type sale struct {
	t       *testing.T
	addrs   []string
	cluster bool
	rdb     redis.UniversalClient // sees everything, past the wire
	scripts *lua.Runner
	wire    *wire
	client.Sale
}

// on opens a sale on a target of the shared stack.
func on(t *testing.T, target string, buckets, units int64) *sale {
	t.Helper()
	for _, r := range stacktest.RedisTargets(t) {
		if r.Name == target {
			return at(t, r.Addrs, r.Cluster, buckets, units)
		}
	}
	t.Fatalf("no Redis target %s", target)
	return nil
}

func at(t *testing.T, addrs []string, cluster bool, buckets, units int64) *sale {
	t.Helper()
	s := &sale{t: t, addrs: addrs, cluster: cluster, wire: &wire{t: t, proxies: map[string]*faultproxy.Proxy{}}}
	s.rdb = s.connect(func(o *redis.UniversalOptions) { o.Dialer = nil })
	var err error
	if s.scripts, err = lua.NewRunner(s.rdb); err != nil {
		t.Fatal(err)
	}
	scope := stacktest.Scope(t)
	s.Sale = client.Sale{ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: scope.Version, Buckets: buckets, Secret: []byte("a test's secret")}
	s.provision(s.Sale, units)
	return s
}

// connect makes a client behind the wire, unless change says otherwise.
func (s *sale) connect(changes ...func(*redis.UniversalOptions)) redis.UniversalClient {
	s.t.Helper()
	o := client.RedisOptions(&redis.UniversalOptions{
		Addrs: s.addrs, IsClusterMode: s.cluster, Dialer: s.wire.dial, ReadTimeout: patient, WriteTimeout: patient, PoolTimeout: patient,
	})
	for _, change := range changes {
		change(o)
	}
	c := redis.NewUniversalClient(o)
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

func (s *sale) provision(of client.Sale, units int64) {
	s.t.Helper()
	now := time.Now()
	batch := s.scripts.Batch()
	var results []*lua.Result[lua.ProvisionReply]
	for bucket, initial := range reservation.Allocation(units, of.Buckets) {
		scope := reservation.Scope{ActivityID: of.ActivityID, SKUID: of.SKUID, Version: of.Version, Bucket: int64(bucket)}
		results = append(results, batch.Provision(scope, lua.ProvisionArgs{
			State: lua.StateActive, StartsAtMS: now.Add(-time.Minute).UnixMilli(), EndsAtMS: now.Add(time.Hour).UnixMilli(),
			RetentionUntilMS: now.Add(2 * time.Hour).UnixMilli(), SchemaVersion: 1, Initial: initial,
		}))
	}
	s.must(batch.Run(s.t.Context()))
	for _, result := range results {
		if reply, err := result.Get(); err != nil || reply.Code != lua.ProvisionCreated {
			s.t.Fatalf("provision: %v, %v", reply.Code, err)
		}
	}
}

func (s *sale) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// gateway is one of the sale's, with time enough unless o has a budget.
func (s *sale) gateway(rdb redis.UniversalClient, o client.Options) *client.Gateway {
	s.t.Helper()
	catalog, err := client.NewCatalog(s.Sale)
	s.must(err)
	return s.gatewayOf(rdb, catalog, o)
}

func (s *sale) gatewayOf(rdb redis.UniversalClient, source client.ScopeSource, o client.Options) *client.Gateway {
	s.t.Helper()
	if o.Budget == 0 {
		o.Budget = patient
	}
	if o.Timeout == 0 {
		o.Timeout = patient
	}
	g, err := client.NewGateway(rdb, source, o)
	s.must(err)
	s.t.Cleanup(g.Close)
	return g
}

func (s *sale) click(user string) client.Request {
	return client.Request{ActivityID: s.ActivityID, SKUID: s.SKUID, UserID: user, RequestID: "q-" + user}
}

// accept makes a request and wants it accepted.
func (s *sale) accept(g *client.Gateway, user string) client.Result {
	s.t.Helper()
	r, err := g.Reserve(s.t.Context(), s.click(user))
	if err != nil || !r.Accepted() {
		s.t.Fatalf("request of %s: %+v, %v", user, r.ReserveReply, err)
	}
	return r
}

// units are available and reserved units over all buckets.
func (s *sale) units() (available, reserved int64) {
	s.t.Helper()
	for bucket := range s.Buckets {
		scope := reservation.Scope{ActivityID: s.ActivityID, SKUID: s.SKUID, Version: s.Version, Bucket: bucket}
		a, err := s.rdb.HGet(s.t.Context(), scope.StockKey(), "available").Int64()
		s.must(err)
		r, err := s.rdb.HGet(s.t.Context(), scope.StockKey(), "reserved").Int64()
		s.must(err)
		available, reserved = available+a, reserved+r
	}
	return available, reserved
}

func (s *sale) wantUnits(available, reserved int64) {
	s.t.Helper()
	if a, r := s.units(); a != available || r != reserved {
		s.t.Errorf("%d available and %d reserved, want %d and %d", a, r, available, reserved)
	}
}

func (s *sale) status(r client.Result) string {
	s.t.Helper()
	status, err := s.rdb.HGet(s.t.Context(), r.Scope.ReservationKey(r.ReservationID), "status").Result()
	s.must(err)
	return status
}

// release gives a reservation's unit back, as the daemon's scripts do.
func (s *sale) release(r client.Result) {
	s.t.Helper()
	batch := s.scripts.Batch()
	batch.Transition(r.Scope, lua.TransitionArgs{ReservationID: r.ReservationID, Target: reservation.StatusReleasePending})
	compensated := batch.Compensate(r.Scope, lua.CompensateArgs{ReservationID: r.ReservationID, UserID: r.Request.UserID, Reason: "test"})
	s.must(batch.Run(s.t.Context()))
	if reply, err := compensated.Get(); err != nil || reply.Code != lua.CompensateReleased {
		s.t.Fatalf("compensate: %v, %v", reply.Code, err)
	}
}

// busy wants the error to be a BusyError of the kind.
func busy(t *testing.T, err error, kind string) *client.BusyError {
	t.Helper()
	e, ok := errors.AsType[*client.BusyError](err)
	if !ok || kind != "" && e.Kind != kind {
		t.Fatalf("%v, want a BusyError %s", err, kind)
	}
	return e
}

// eventually waits for what happens elsewhere; want says what is still missing.
func eventually(t *testing.T, want func() string) {
	t.Helper()
	deadline := time.Now().Add(90 * time.Second)
	for {
		missing := want()
		if missing == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(missing)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// everyTarget runs a test on all four servers.
func everyTarget(t *testing.T, test func(t *testing.T, target string)) {
	t.Helper()
	for _, target := range []string{"8-standalone", "7.0-standalone", "8-cluster", "7.0-cluster"} {
		t.Run(target, func(t *testing.T) {
			t.Parallel()
			test(t, target)
		})
	}
}

func user(i int) string { return fmt.Sprintf("u-%d", i) }
