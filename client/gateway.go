package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// schemaVersion is that of the reservations written here.
const schemaVersion = 1

// RedisOptions sets in o what [NewGateway] and [NewConsumer] demand of a
// go-redis client: no repeats, and the context's deadline in force. Time-outs
// and pool sizes stay yours. It returns o.
func RedisOptions(o *redis.UniversalOptions) *redis.UniversalOptions { return lua.ClientOptions(o) }

// Options are a gateway's settings. The zero value is the contract's.
type Options struct {
	ReservationTTL time.Duration // of a reservation; 0: 15 min
	Budget         time.Duration // of one attempt to run reserve.lua; 0: 40 ms
	Timeout        time.Duration // of a mark or a look-up; 0: 2 s
	RetryAfter     time.Duration // when the daemon looks at a send of unknown outcome, counted from the reservation; 0: 1 s
	// SoldOutTTL is how long a SOLD_OUT is believed without asking Redis, ± one
	// third; 0 means 300 ms, which is also the most. Negative: never.
	SoldOutTTL time.Duration
	Cooldown   time.Duration // until a stopped SKU lets one request through; 0: 3 s
	// Orders is PostgreSQL for [Gateway.Lookup], with the right to read
	// seckill.reservation_claim and seckill.order_evidence; nil: Redis alone.
	Orders Querier
	Logger *slog.Logger // tells of stopped SKUs; nil: nobody
}

func (o Options) withDefaults() (Options, error) {
	for _, d := range []struct {
		value    *time.Duration
		name     string
		fallback time.Duration
	}{
		{&o.ReservationTTL, "ReservationTTL", 15 * time.Minute},
		{&o.Budget, "Budget", 40 * time.Millisecond},
		{&o.Timeout, "Timeout", 2 * time.Second},
		{&o.RetryAfter, "RetryAfter", time.Second},
		{&o.Cooldown, "Cooldown", 3 * time.Second},
	} {
		if *d.value < 0 {
			return o, fmt.Errorf("%s %s is negative", d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.fallback
		}
	}
	if o.SoldOutTTL == 0 {
		o.SoldOutTTL = defaultMarkerTTL
	}
	if o.SoldOutTTL > maxMarkerTTL {
		return o, fmt.Errorf("SoldOutTTL %s is above %s: users would be turned away for too long", o.SoldOutTTL, maxMarkerTTL)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// Gateway takes requests of users. It is safe for concurrent use, and a
// [prometheus.Collector] of the hot path's metrics. Close it when done.
type Gateway struct {
	redis   redis.UniversalClient
	scripts *lua.Runner
	source  ScopeSource
	o       Options
	started time.Time
	metrics *metrics
	notices *notices // nil without local markers

	mu    sync.RWMutex
	sales map[skuKey]*saleState
}

var _ prometheus.Collector = (*Gateway)(nil)

type skuKey struct{ activityID, skuID string }

// saleState is what a gateway keeps of the version of a SKU that is on sale.
type saleState struct {
	sale    Sale
	breaker breaker
	scopes  []atomic.Pointer[scopeState] // by bucket, made when first met
}

// maxInFlight leaves the waiting to the connection pool, where it is measured.
const maxInFlight = 1 << 16

// NewGateway makes a gateway on a *redis.Client or *redis.ClusterClient with
// [RedisOptions]; another is refused with [lua.ErrUnsafeClient]. Redis need not
// answer yet. The client stays the caller's.
func NewGateway(rdb redis.UniversalClient, source ScopeSource, o Options) (*Gateway, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	scripts, err := lua.NewRunner(rdb, lua.WithInFlight(maxInFlight))
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	g := &Gateway{
		redis: rdb, scripts: scripts, source: source, o: o, started: time.Now(), metrics: newMetrics(),
		sales: map[skuKey]*saleState{},
	}
	if o.SoldOutTTL > 0 {
		g.notices = newNotices(rdb, o, g.heard)
	}
	return g, nil
}

// Close ends the gateway's subscription. Calls under way are not waited for.
func (g *Gateway) Close() {
	if g.notices != nil {
		g.notices.close()
	}
}

// now is the time since the gateway's start.
func (g *Gateway) now() time.Duration { return time.Since(g.started) }

// state finds or makes what is kept of a sale. A new version of a SKU takes the
// old one's place.
func (g *Gateway) state(s Sale) *saleState {
	key := skuKey{s.ActivityID, s.SKUID}
	same := func(state *saleState) bool {
		return state != nil && state.sale.Version == s.Version && state.sale.Buckets == s.Buckets
	}
	g.mu.RLock()
	state := g.sales[key]
	g.mu.RUnlock()
	if same(state) {
		return state
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	old := g.sales[key]
	if same(old) {
		return old
	}
	state = &saleState{sale: s, scopes: make([]atomic.Pointer[scopeState], max(s.Buckets, 1))}
	g.sales[key] = state
	if old != nil && g.notices != nil {
		for i := range old.scopes {
			if left := old.scopes[i].Load(); left != nil {
				g.notices.drop(left.scope)
			}
		}
	}
	return state
}

func (g *Gateway) states() []*saleState {
	g.mu.RLock()
	defer g.mu.RUnlock()
	all := make([]*saleState, 0, len(g.sales))
	for _, s := range g.sales {
		all = append(all, s)
	}
	return all
}

// scopeState finds or makes what is kept of a bucket.
func (g *Gateway) scopeState(sale *saleState, scope reservation.Scope) *scopeState {
	slot := &sale.scopes[scope.Bucket]
	if s := slot.Load(); s != nil {
		return s
	}
	if s := newScopeState(scope); slot.CompareAndSwap(nil, s) && g.notices != nil {
		g.notices.add(s)
	}
	return slot.Load()
}

// heard is told of a notice on a scope's channel (spec §5).
func (g *Gateway) heard(s *scopeState, payload string) {
	switch payload {
	case reservation.NoticeAvailable:
		s.marker.epoch.Add(1)
		g.proveWrong(s, "notice")
	case reservation.NoticeSoldOut:
		s.marker.set(g.now(), g.o.SoldOutTTL, s.marker.epoch.Load())
	}
}

// proveWrong ends a marker that stood although units had come free.
func (g *Gateway) proveWrong(s *scopeState, by string) {
	if stood := s.marker.clear(g.now()); stood > 0 {
		g.metrics.falseSoldOut.Inc()
		g.metrics.invalidation.WithLabelValues(by).Observe(stood.Seconds())
	}
}

// Stop is a SKU that is stopped.
type Stop struct {
	ActivityID string
	SKUID      string
	Version    int64
	Kind       string // of the failure that stopped it
	Since      time.Time
}

// Stopped lists the SKUs that are stopped now: an alert is due for each.
func (g *Gateway) Stopped() []Stop {
	var stopped []Stop
	for _, s := range g.states() {
		if !s.breaker.open.Load() {
			continue
		}
		s.breaker.mu.Lock()
		stopped = append(stopped, Stop{s.sale.ActivityID, s.sale.SKUID, s.sale.Version, s.breaker.kind, s.breaker.since})
		s.breaker.mu.Unlock()
	}
	return stopped
}

// poolWait is how long and how often commands waited for a connection.
func (g *Gateway) poolWait() (time.Duration, int64) {
	stats := g.redis.PoolStats()
	wait, waits := stats.WaitDurationNs, int64(stats.WaitCount)
	if p := stats.PipelineStats; p != nil {
		wait += p.WaitDurationNs
		waits += int64(p.WaitCount)
	}
	return time.Duration(wait), waits
}

// bound is a context for a call that is not reserve.lua.
func (g *Gateway) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, g.o.Timeout)
}

func isTimeout(err error) bool {
	timeout, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return errors.Is(err, context.DeadlineExceeded) || ok && timeout.Timeout()
}
