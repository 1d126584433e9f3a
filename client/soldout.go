package client

import (
	"math/rand/v2"
	"sync/atomic"
	"time"
)

// Limits of the local sold-out marker (spec §5). It holds for at most
// TTL·(1+markerSpread), and for one re-check more, together at most half a
// second.
const (
	defaultMarkerTTL = 300 * time.Millisecond
	maxMarkerTTL     = 300 * time.Millisecond
	markerSpread     = 1.0 / 3 // so that gateways do not ask all at once
	markerRecheck    = 100 * time.Millisecond
)

// marker is a gateway's own belief that a scope is sold out. It saves Redis the
// requests of a crowd, and is never the truth.
type marker struct {
	until atomic.Int64  // ns since the gateway's start; 0: not set
	since atomic.Int64  // when it was set first, re-checks that confirmed it aside
	epoch atomic.Uint64 // counts notices of units that came free
}

// verdict is what the marker means for a request.
type verdict int

const (
	ask      verdict = iota // no marker: ask Redis
	recheck                 // the marker has aged: this request asks for all
	rejected                // sold out, as far as is known here
)

// look says what a request is to do. When the marker has aged, one request
// re-checks it, and the others go on believing it for a moment.
func (m *marker) look(now time.Duration) verdict {
	until := m.until.Load()
	switch {
	case until == 0:
		return ask
	case int64(now) < until:
		return rejected
	case m.until.CompareAndSwap(until, int64(now+markerRecheck)):
		return recheck
	default:
		return rejected
	}
}

// set starts the marker, or renews it, unless units came free since epoch.
func (m *marker) set(now, ttl time.Duration, epoch uint64) {
	if m.epoch.Load() != epoch {
		return
	}
	spread := 1 + markerSpread*(2*rand.Float64()-1) //nolint:gosec // a spread, not a secret
	m.since.CompareAndSwap(0, int64(now))
	m.until.Store(int64(now) + int64(float64(ttl)*spread))
}

// clear ends the marker and says how long it stood; 0: it was not set.
func (m *marker) clear(now time.Duration) time.Duration {
	if m.until.Swap(0) == 0 {
		return 0
	}
	return now - time.Duration(m.since.Swap(0))
}
