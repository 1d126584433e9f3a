package client_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// pair is two SKUs of one activity on one gateway: one has a fault.
type pair struct {
	*sale
	other client.Sale
	g     *client.Gateway
}

func pairOf(s *sale, rdb redis.UniversalClient, o client.Options) *pair {
	s.t.Helper()
	other := s.Sale
	other.SKUID = "other"
	s.provision(other, 100)
	catalog, err := client.NewCatalog(s.Sale, other)
	s.must(err)
	return &pair{s, other, s.gatewayOf(rdb, catalog, o)}
}

// otherSells wants the SKU without a fault to be sold as ever.
func (p *pair) otherSells(user string) {
	p.t.Helper()
	click := p.click(user)
	click.SKUID, click.RequestID = p.other.SKUID, "qo-"+user
	if r, err := p.g.Reserve(p.t.Context(), click); err != nil || !r.Accepted() {
		p.t.Errorf("the other SKU: %+v, %v", r.ReserveReply, err)
	}
}

// stopped wants the faulty SKU alone to be stopped, by the kind, and its
// requests to get no further than the gateway.
func (p *pair) stopped(kind string) {
	p.t.Helper()
	stops := p.g.Stopped()
	if len(stops) != 1 || stops[0].SKUID != p.SKUID || stops[0].ActivityID != p.ActivityID || stops[0].Kind != kind || stops[0].Since.IsZero() {
		p.t.Fatalf("stopped: %+v, want %s by %s", stops, p.SKUID, kind)
	}
	if n := value(p.t, p.g, "seckill_sku_stopped"); n != 1 {
		p.t.Errorf("metric: %v SKUs stopped", n)
	}
}

// recovers wants the SKU to sell again, and is asked until then.
func (p *pair) recovers(user string) {
	p.t.Helper()
	eventually(p.t, func() string {
		r, err := p.g.Reserve(p.t.Context(), p.click(user))
		if err != nil || !r.Accepted() {
			return fmt.Sprintf("the SKU does not recover: %+v, %v", r.ReserveReply, err)
		}
		return ""
	})
	if stops := p.g.Stopped(); len(stops) != 0 {
		p.t.Errorf("still stopped: %+v", stops)
	}
}

// never is a cool-down that does not end within a test.
const never = time.Hour

// TestInvariantStopsOneSKU: code 19. While it lasts no request reaches Redis
// but a probe, and a probe that finds an earlier result proves nothing.
func TestInvariantStopsOneSKU(t *testing.T) {
	t.Parallel()
	everyTarget(t, func(t *testing.T, target string) {
		t.Helper()
		s := on(t, target, 1, 100)
		rdb := s.connect()
		p := pairOf(s, rdb, client.Options{Cooldown: never})
		stock := s.ScopeOf("").StockKey()
		s.accept(p.g, "first")
		break19 := func(by int64) { s.must(s.rdb.HIncrBy(t.Context(), stock, "available", by).Err()) }
		break19(5)
		_, err := p.g.Reserve(t.Context(), s.click("alice"))
		if e := busy(t, err, client.KindInvariant); !strings.Contains(e.Error(), "STOCK_INVARIANT_VIOLATION") || !e.Response().Retryable {
			t.Errorf("%v, %+v", e, e.Response())
		}
		p.stopped(client.KindInvariant)
		p.otherSells("alice")
		break19(-5) // mended, which the gateway does not know
		_, err = p.g.Reserve(t.Context(), s.click("alice"))
		busy(t, err, client.KindSKUStopped)
		if available, reserved := s.units(); available != 99 || reserved != 1 {
			t.Errorf("%d available and %d reserved: a stopped SKU was sold", available, reserved)
		}

		soon := pairOf2(p, rdb, client.Options{Cooldown: 30 * time.Millisecond})
		break19(5)
		_, err = soon.g.Reserve(t.Context(), s.click("bob"))
		busy(t, err, client.KindInvariant)
		replayed := s.click("first")
		eventually(t, func() string { // the probe is let through, and answered from what was kept
			if r, err := soon.g.Reserve(t.Context(), replayed); err != nil || !r.Replay {
				return fmt.Sprintf("no probe: %+v, %v", r.ReserveReply, err)
			}
			return ""
		})
		soon.stopped(client.KindInvariant)
		break19(-5)
		soon.recovers("bob")
		soon.otherSells("bob")
	})
}

// pairOf2 is another gateway on the same two SKUs.
func pairOf2(p *pair, rdb redis.UniversalClient, o client.Options) *pair {
	p.t.Helper()
	catalog, err := client.NewCatalog(p.Sale, p.other)
	p.must(err)
	return &pair{p.sale, p.other, p.gatewayOf(rdb, catalog, o)}
}

// TestOutOfMemory: a Redis that is full stops the SKU that met it; one that did
// not is not stopped, and sells as soon as there is memory.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Redis: true})
	s := at(t, []string{stack.Redis().Addr()}, false, 1, 100)
	p := pairOf(s, s.connect(), client.Options{Cooldown: 50 * time.Millisecond})
	s.accept(p.g, "first")
	limit := func(bytes string) { s.must(s.rdb.ConfigSet(t.Context(), "maxmemory", bytes).Err()) }
	limit("1")
	_, err := p.g.Reserve(t.Context(), s.click("alice"))
	if e := busy(t, err, "out_of_memory"); !errors.Is(err, lua.ErrOutOfMemory) || e.OutcomeUnknown || !e.Response().Retryable {
		t.Errorf("%+v", e)
	}
	p.stopped("out_of_memory")
	eventually(t, func() string { // a probe that fails keeps it stopped
		if _, err := p.g.Reserve(t.Context(), s.click("alice")); !errors.Is(err, lua.ErrOutOfMemory) {
			return fmt.Sprintf("no probe: %v", err)
		}
		return ""
	})
	p.stopped("out_of_memory")
	limit("0")
	p.otherSells("alice")
	p.recovers("alice")
	if n := value(t, p.g, "seckill_sku_stopped_total", "out_of_memory"); n != 1 {
		t.Errorf("stopped %v times", n)
	}
}

// crossSlot makes a real CROSSSLOT error of the pipelines that name a key. All
// keys of a scope have one tag, so that only a broken set-up brings it about.
type crossSlot struct {
	mu  sync.Mutex
	tag string
	err error
}

func (h *crossSlot) DialHook(next redis.DialHook) redis.DialHook          { return next }
func (h *crossSlot) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }
func (h *crossSlot) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		h.mu.Lock()
		tag, failure := h.tag, h.err
		h.mu.Unlock()
		for _, cmd := range cmds {
			if tag != "" && strings.Contains(fmt.Sprint(cmd.Args()...), tag) {
				for _, cmd := range cmds {
					cmd.SetErr(failure)
				}
				return failure
			}
		}
		return next(ctx, cmds)
	}
}

func (h *crossSlot) fail(tag string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.tag, h.err = tag, err
}

func TestCrossSlotStopsOneSKU(t *testing.T) {
	t.Parallel()
	s := on(t, "8-cluster", 1, 100)
	node := redis.NewClient(&redis.Options{Addr: s.addrs[0]})
	t.Cleanup(func() { _ = node.Close() })
	refusal := node.MGet(t.Context(), "a", "b").Err()
	if refusal == nil || !strings.HasPrefix(refusal.Error(), "CROSSSLOT") {
		t.Fatalf("MGET of two slots: %v", refusal)
	}
	rdb, hook := s.connect(), &crossSlot{}
	addHook(rdb, hook)
	p := pairOf(s, rdb, client.Options{Cooldown: 50 * time.Millisecond})
	hook.fail(s.ScopeOf("").Tag(), refusal)
	_, err := p.g.Reserve(t.Context(), s.click("alice"))
	if busy(t, err, "cross_slot"); !errors.Is(err, lua.ErrCrossSlot) {
		t.Error(err)
	}
	p.stopped("cross_slot")
	p.otherSells("alice")
	hook.fail("", nil)
	p.recovers("alice")
	s.wantUnits(99, 1)
}

// soldOut is a gateway that believes in its marker of a scope of one unit.
func soldOut(t *testing.T, target string) (s *sale, g *client.Gateway, last client.Result) {
	t.Helper()
	s = on(t, target, 1, 1)
	g = s.gateway(s.connect(), client.Options{})
	last = s.accept(g, "first")
	channel := last.Scope.EventsChannel()
	eventually(t, func() string {
		if s.subscribers(channel) == 0 {
			return "the gateway does not listen to " + channel
		}
		return ""
	})
	// On a busy machine a marker may age before it answers: then it is renewed.
	n := 0
	eventually(t, func() string {
		n++
		r, err := g.Reserve(t.Context(), s.click(fmt.Sprintf("late-%d", n)))
		if err != nil || r.Code != lua.ReserveSoldOut {
			t.Fatalf("after the last unit: %+v, %v", r.ReserveReply, err)
		}
		if !r.Local {
			return "the marker never answers"
		}
		return ""
	})
	return s, g, last
}

// subscribers counts those of a channel on all nodes.
func (s *sale) subscribers(channel string) int64 {
	s.t.Helper()
	var sum int64
	count := func(ctx context.Context, node *redis.Client) error {
		n, err := node.PubSubNumSub(ctx, channel).Result()
		sum += n[channel]
		return err
	}
	if c, ok := s.rdb.(*redis.ClusterClient); ok {
		var mu sync.Mutex
		s.must(c.ForEachShard(s.t.Context(), func(ctx context.Context, node *redis.Client) error {
			mu.Lock()
			defer mu.Unlock()
			return count(ctx, node)
		}))
		return sum
	}
	node, ok := s.rdb.(*redis.Client)
	if !ok {
		s.t.Fatalf("%T has no nodes", s.rdb)
	}
	s.must(count(s.t.Context(), node))
	return sum
}

// TestNoticeEndsMarker: units come free and the daemon says so. The marker is
// gone without anybody asking Redis.
func TestNoticeEndsMarker(t *testing.T) {
	t.Parallel()
	everyTarget(t, func(t *testing.T, target string) {
		t.Helper()
		s, g, last := soldOut(t, target)
		s.release(last)
		eventually(t, func() string { // no request is made here: nothing but a notice can end it
			// Again and again: one that comes before the subscription is lost.
			s.must(s.rdb.Publish(t.Context(), last.Scope.EventsChannel(), reservation.NoticeAvailable).Err())
			if g.HotScopes(1)[0].MarkerStanding {
				return "the marker stands"
			}
			return ""
		})
		if n := value(t, g, "seckill_soldout_invalidation_delay_seconds", "notice"); n != 1 {
			t.Errorf("%v markers were ended by a notice", n)
		}
		if n := value(t, g, "seckill_soldout_false_positive_total"); n != 1 {
			t.Errorf("%v markers were wrong", n)
		}
		s.accept(g, "lucky")
	})
}

// TestRecheckEndsMarker: the notice is lost. The marker ages, and one request
// finds out for all.
func TestRecheckEndsMarker(t *testing.T) {
	t.Parallel()
	s, g, last := soldOut(t, "8-standalone")
	s.release(last)
	eventually(t, func() string {
		r, err := g.Reserve(t.Context(), s.click("lucky"))
		if err != nil || !r.Accepted() {
			return fmt.Sprintf("never re-checked: %+v, %v", r, err)
		}
		return ""
	})
	s.wantUnits(0, 1)
}

// TestRetryPassesMarker: who asks again after SYSTEM_BUSY may have a
// reservation, whatever the marker says.
func TestRetryPassesMarker(t *testing.T) {
	t.Parallel()
	s, g, last := soldOut(t, "7.0-standalone")
	click := s.click("first")
	click.Retry = true
	if r, err := g.Reserve(t.Context(), click); err != nil || !r.Replay || r.ReservationID != last.ReservationID {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestSoldOutNotice: the gateway that takes the last unit tells the others.
func TestSoldOutNotice(t *testing.T) {
	t.Parallel()
	for _, target := range []string{"8-standalone", "7.0-cluster"} {
		t.Run(target, func(t *testing.T) {
			t.Parallel()
			s := on(t, target, 1, 2)
			first, second := s.gateway(s.connect(), client.Options{}), s.gateway(s.connect(), client.Options{})
			last := s.accept(first, "alice")
			eventually(t, func() string {
				if n := s.subscribers(last.Scope.EventsChannel()); n != 1 {
					return fmt.Sprintf("%d listen", n)
				}
				return ""
			})
			s.accept(second, "bob")
			eventually(t, func() string {
				if !first.HotScopes(1)[0].MarkerStanding {
					return "the other gateway does not know"
				}
				return ""
			})
		})
	}
}
