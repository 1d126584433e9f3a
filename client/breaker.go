package client

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seckill/reconciler/lua"
)

// breaker stops one SKU after a failure that more requests cannot mend. After a
// while it lets one request through at a time; the first that Redis answers
// closes it.
type breaker struct {
	open atomic.Bool // read by every request; the rest only while it is open

	mu      sync.Mutex
	kind    string
	since   time.Time
	until   time.Time // then a request is let through
	probing bool
}

// admit says whether a request may go to Redis, and whether it is the probe of
// an open breaker; kind is why not.
func (b *breaker) admit(now time.Time) (admitted, probe bool, kind string) {
	if !b.open.Load() {
		return true, false, ""
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !b.open.Load():
		return true, false, ""
	case b.probing || now.Before(b.until):
		return false, false, b.kind
	default:
		b.probing = true
		return true, true, ""
	}
}

// trip opens the breaker, or keeps it open; true when it was closed.
func (b *breaker) trip(now time.Time, kind string, cooldown time.Duration, probe bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	first := !b.open.Swap(true)
	if first {
		b.since = now
	}
	if first || probe {
		b.kind, b.until = kind, now.Add(cooldown)
	}
	if probe {
		b.probing = false
	}
	return first
}

// answered notes a probe's end: closes the breaker if it proves that Redis
// works again, else waits for the next probe.
func (b *breaker) answered(now time.Time, proof bool, cooldown time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.probing = false
	if proof {
		b.open.Store(false)
		return
	}
	b.until = now.Add(cooldown)
}

// tripping are the failures that stop a SKU (spec §5). Those of the second
// line are asked once more first: a failover passes.
var tripping = []error{
	lua.ErrCrossSlot, lua.ErrOutOfMemory, lua.ErrNoPermission, lua.ErrRefused,
	lua.ErrNotEnoughReplicas, lua.ErrPersistence, lua.ErrLoading, lua.ErrBusy, lua.ErrReadOnly,
}

func trips(err error) bool {
	for _, kind := range tripping {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}
