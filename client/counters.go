package client

import (
	"cmp"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// ScopeStats are the counters of one scope since the gateway first met it.
type ScopeStats struct {
	Scope          reservation.Scope
	Requests       int64   // local rejections included
	Accepted       int64   // replays not included
	SoldOut        int64   // by Redis
	LocalSoldOut   int64   // by the local marker
	Failures       int64   // without a result
	PerSecond      float64 // requests in the last full second
	LuaP99         time.Duration
	Available      int64         // as the last reply said, or [lua.Missing]
	SoldOutAfter   time.Duration // from the first request to the first sell-out; 0: not yet
	MarkerStanding bool
}

// latencyBounds are the upper bounds of a scope's latency classes.
var latencyBounds = [...]time.Duration{
	250 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 2 * time.Millisecond, 3 * time.Millisecond,
	5 * time.Millisecond, 8 * time.Millisecond, 12 * time.Millisecond, 20 * time.Millisecond, 30 * time.Millisecond,
	40 * time.Millisecond, 80 * time.Millisecond, 200 * time.Millisecond,
}

// scopeState is what a gateway keeps of one bucket.
type scopeState struct {
	scope  reservation.Scope
	marker marker

	requests, accepted, soldOut, local, failures atomic.Int64
	available                                    atomic.Int64
	firstNS, soldOutNS                           atomic.Int64 // since the gateway's start
	second, inSecond, lastSecond                 atomic.Int64
	latency                                      [len(latencyBounds) + 1]atomic.Int64
}

func newScopeState(s reservation.Scope) *scopeState {
	state := &scopeState{scope: s}
	state.available.Store(lua.Missing)
	return state
}

// seen counts a request.
func (s *scopeState) seen(now time.Duration) {
	s.requests.Add(1)
	s.firstNS.CompareAndSwap(0, max(int64(now), 1))
	second, current := int64(now/time.Second), s.second.Load()
	if second != current && s.second.CompareAndSwap(current, second) {
		last := s.inSecond.Swap(0)
		if second != current+1 {
			last = 0
		}
		s.lastSecond.Store(last)
	}
	s.inSecond.Add(1)
}

// replied counts a reply of Redis.
func (s *scopeState) replied(now time.Duration, r lua.ReserveReply) {
	switch {
	case r.Code == lua.ReserveAccepted && !r.Replay:
		s.accepted.Add(1)
	case r.Code == lua.ReserveSoldOut:
		s.soldOut.Add(1)
	}
	if r.Replay || r.Remaining == lua.Missing {
		return
	}
	s.available.Store(r.Remaining)
	if r.Remaining == 0 {
		s.soldOutNS.CompareAndSwap(0, int64(now))
	}
}

func (s *scopeState) took(d time.Duration) {
	i, _ := slices.BinarySearch(latencyBounds[:], d)
	s.latency[i].Add(1)
}

// p99 is the upper bound of the class in which the 99th percentile lies.
func (s *scopeState) p99() time.Duration {
	var counts [len(latencyBounds) + 1]int64
	var total int64
	for i := range counts {
		counts[i] = s.latency[i].Load()
		total += counts[i]
	}
	rank := int64(math.Ceil(float64(total) * 0.99))
	for i, n := range counts {
		if rank -= n; rank <= 0 && total > 0 {
			return latencyBounds[min(i, len(latencyBounds)-1)]
		}
	}
	return 0
}

func (s *scopeState) stats(now time.Duration) ScopeStats {
	stats := ScopeStats{
		Scope: s.scope, Requests: s.requests.Load(), Accepted: s.accepted.Load(), SoldOut: s.soldOut.Load(),
		LocalSoldOut: s.local.Load(), Failures: s.failures.Load(), LuaP99: s.p99(), Available: s.available.Load(),
		MarkerStanding: s.marker.until.Load() != 0,
	}
	switch second := s.second.Load(); int64(now/time.Second) - second {
	case 0:
		stats.PerSecond = float64(s.lastSecond.Load())
	case 1:
		stats.PerSecond = float64(s.inSecond.Load())
	}
	if at := s.soldOutNS.Load(); at != 0 {
		stats.SoldOutAfter = time.Duration(at - s.firstNS.Load())
	}
	return stats
}

// HotScopes are the n scopes with most requests in the last full second, the
// hottest first. One with far more than the others is a hot key; it is one slot,
// which buckets of another version may spread, once it is measured to be the limit.
func (g *Gateway) HotScopes(n int) []ScopeStats {
	now := g.now()
	var all []ScopeStats
	for _, sale := range g.states() {
		for i := range sale.scopes {
			if s := sale.scopes[i].Load(); s != nil {
				all = append(all, s.stats(now))
			}
		}
	}
	slices.SortFunc(all, func(a, b ScopeStats) int {
		return cmp.Or(cmp.Compare(b.PerSecond, a.PerSecond), cmp.Compare(b.Requests, a.Requests), cmp.Compare(a.Scope.Tag(), b.Scope.Tag()))
	})
	return all[:min(n, len(all))]
}
