package rocketmq_test

import (
	"context"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/reservation"
)

// Whatever was sent, consumed, asked for and forgotten before: an incremental
// sweep concludes what a fresh one does.
func TestAnIncrementalSweepEqualsAFreshOne(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 3)
	b := newBench(t, stack, topic, group)
	all := b.send(1)
	for seed := range uint64(12) {
		t.Logf("seed %d", seed)
		random := rand.New(rand.NewPCG(seed, 0))
		kept := b.newEvidence(b.cfg)
		for range 6 {
			switch random.IntN(4) {
			case 0:
				all = append(all, b.send(1+random.IntN(70))...)
			case 1:
				all = append(all, b.sendIDs([]string{all[random.IntN(len(all))].MessageID})...)
			case 2:
				b.commit(stack.Brokers()[random.IntN(2)], random.Int64N(60))
			case 3:
				before := all[0].ReservedAtMS + random.Int64N(600_000)
				if err := kept.Forget(t.Context(), before); err != nil {
					t.Fatal(err)
				}
			}
			asked := unplaced(all[random.IntN(len(all)):])
			asked = append(asked, rocketmq.Query{MessageID: b.ids(1)[0], ReservedAtMS: nowMS()})
			want, got := gather(t, b.newEvidence(b.cfg), asked), gather(t, kept, asked)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("fresh and incremental differ:\n%s", diff)
			}
		}
	}
}

// 20,000 messages: how long the sweep takes, and what it keeps.
func TestTwentyThousandMessages(t *testing.T) {
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 4)
	b := newBench(t, stack, topic, group)
	began := time.Now()
	sent := b.send(20_000)
	t.Logf("sent in %s", time.Since(began).Round(time.Millisecond))

	ctx, cancel := context.WithTimeout(t.Context(), testLimit)
	defer cancel()
	ask := func(what string, queries []rocketmq.Query) {
		t.Helper()
		began := time.Now()
		for id, e := range b.evidence.Gather(ctx, nowMS(), queries) {
			if e.State != reservation.MessagePending {
				t.Fatalf("%s: %s is %+v", what, id, e)
			}
		}
		t.Logf("%s: %s", what, time.Since(began).Round(time.Millisecond))
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	ask("full sweep, 1 wanted", unplaced(sent[:1]))
	runtime.GC()
	runtime.ReadMemStats(&after)
	ask("next sweep, 1 wanted", unplaced(sent[:1]))
	ask("next sweep, 1,000 wanted", unplaced(sent[:1000]))
	ask("1,000 by position", sent[:1000])
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 40*int64(len(sent)) {
		t.Errorf("%d bytes are kept for %d messages", grown, len(sent))
	} else {
		t.Logf("%d bytes kept, %.1f each", grown, float64(grown)/float64(len(sent)))
	}
}
