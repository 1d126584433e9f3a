package rocketmq

import (
	"context"
	"fmt"
	"math"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/reservation"
)

// sweep brings the indexes of all queues up to date, on all brokers at once.
func (p *pass) sweep(ctx context.Context) {
	kept := &budget{}
	var total int64
	for _, x := range p.e.indexes {
		total += x.len()
	}
	kept.left.Store(p.e.cfg.MaxSweepMessages - total)
	crowded := total > p.e.cfg.MaxSweepMessages/2
	startMS := p.windowStart()
	var mu sync.Mutex // guards the map of indexes
	p.each(ctx, func(b *brokerPass, ctx context.Context) error {
		return b.sweep(ctx, sweepRun{startMS: startMS, kept: kept, crowded: crowded, mu: &mu})
	})
}

type sweepRun struct {
	startMS int64
	kept    *budget
	crowded bool // forget what this pass does not ask for
	mu      *sync.Mutex
}

// windowStart is the earliest time from which an open query's message can be stored.
func (p *pass) windowStart() int64 {
	start := int64(math.MaxInt64)
	for _, open := range p.byFingerprint {
		for _, i := range open {
			start = min(start, p.startOf(i))
		}
	}
	return start
}

func (p *pass) startOf(i int) int64 {
	return max(p.queries[i].ReservedAtMS-p.e.cfg.SweepMargin.Milliseconds(), 0)
}

// queuesAtOnce is how many queues of one broker are swept at once.
const queuesAtOnce = 4

func (b *brokerPass) sweep(ctx context.Context, run sweepRun) error {
	cfg := b.p.e.cfg
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(queuesAtOnce)
	var mu sync.Mutex // guards b.coverage
	for topic, ranges := range b.ranges {
		if topic == cfg.Topic && !b.p.anyNeedsTopic() {
			continue
		}
		for _, kept := range ranges {
			group.Go(func() error {
				key := queueKey{b.name, topic, kept.Queue}
				covered, err := b.sweepQueue(ctx, key, kept, run)
				mu.Lock()
				defer mu.Unlock()
				if covered.sinceMS > b.coverage[topic].sinceMS {
					b.coverage[topic] = covered
				}
				return err
			})
		}
	}
	return group.Wait()
}

func (p *pass) anyNeedsTopic() bool {
	for i := range p.messages {
		if p.messages[i].needsTopic() {
			return true
		}
	}
	return false
}

// sweepQueue brings one queue's index up to date and says what it covers.
func (b *brokerPass) sweepQueue(ctx context.Context, key queueKey, kept remoting.QueueRange, run sweepRun) (coverage, error) {
	q := queueReader{peer: b.peer, topic: key.topic, queue: key.queue, ours: b.relevant(key.topic)}
	w, err := b.window(ctx, q, key, kept, run)
	if err != nil {
		return coverage{}, err
	}
	run.mu.Lock()
	x := b.p.e.indexes[key]
	run.mu.Unlock()
	x, err = q.sync(ctx, x, w.window, run.kept)
	run.mu.Lock()
	b.p.e.indexes[key] = x
	run.mu.Unlock()
	if err != nil {
		return coverage{}, err
	}
	switch {
	case x.to < w.max:
		return coverage{math.MaxInt64, UnknownWindowTooLarge}, nil
	case x.from > max(w.start, w.min):
		first, err := q.record(ctx, x.from)
		return coverage{first.StoreMS + 1, UnknownWindowTooLarge}, err
	case w.mayLackOlder && b.info.EarliestMS > run.startMS:
		return coverage{b.info.EarliestMS + 1, UnknownRetention}, nil
	default:
		return coverage{}, nil
	}
}

type queueWindow struct {
	window
	// mayLackOlder: records from before the queue's first one could have been in
	// the window; only the age of the broker's oldest record tells.
	mayLackOlder bool
}

// window is the part of a queue that matters: from the earliest store time in
// the topic and %DLQ%, from the first record that is not passed in the others.
func (b *brokerPass) window(ctx context.Context, q queueReader, key queueKey, kept remoting.QueueRange, run sweepRun) (queueWindow, error) {
	w := queueWindow{window: window{min: kept.Min, max: kept.Max}}
	switch key.topic {
	case b.p.e.cfg.retryTopic():
		w.start = b.committed[key] // 0 if nothing was passed
		w.keepFrom = w.start
		w.mayLackOlder = w.start < w.min
		return w, nil
	case scheduleTopic:
		w.start = b.delivered[int(key.queue)+1]
		w.keepFrom = w.start
		w.mayLackOlder = w.start < w.min
		return w, nil
	}
	if w.min == w.max {
		w.start, w.mayLackOlder = w.max, w.min > 0
		return w, nil
	}
	var err error
	if w.start, err = q.peer.SearchOffset(ctx, q.topic, q.queue, run.startMS); err != nil {
		return w, err
	}
	w.start = min(w.start, w.max)
	w.mayLackOlder = w.min > 0 && w.start <= w.min
	if run.crowded {
		w.keepFrom = w.start
	}
	if forgetMS := b.p.e.forgetMS - b.p.e.cfg.SweepMargin.Milliseconds(); forgetMS > 0 {
		before, err := q.peer.SearchOffset(ctx, q.topic, q.queue, min(forgetMS, run.startMS))
		if err != nil {
			return w, err
		}
		w.keepFrom = max(w.keepFrom, min(before, w.start))
	}
	return w, nil
}

// relevant is the filter of a topic's records: SCHEDULE holds those of all
// groups and topics, of which only ours are of interest.
func (b *brokerPass) relevant(topic string) func(remoting.Record) bool {
	if topic != scheduleTopic {
		return nil
	}
	ours, retry := b.p.e.cfg.Topic, b.p.e.cfg.retryTopic()
	return func(r remoting.Record) bool {
		target := r.Properties[remoting.PropertyRealTopic]
		return target == ours || target == retry
	}
}

// confirmHits reads the record of every hit and adds what it says.
func (b *brokerPass) confirmHits(ctx context.Context) error {
	fingerprints := make([]uint64, 0, len(b.p.byFingerprint))
	for f := range b.p.byFingerprint {
		fingerprints = append(fingerprints, f)
	}
	sought := newWanted(fingerprints)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(confirmsAtOnce)
	for topic, ranges := range b.ranges {
		for queue := range ranges {
			key := queueKey{b.name, topic, queue}
			x := b.p.e.indexes[key]
			if x == nil {
				continue
			}
			for _, h := range x.find(sought, b.countsFrom(key)) {
				group.Go(func() error { return b.confirm(ctx, key, h) })
			}
		}
	}
	return group.Wait()
}

// countsFrom is the first offset whose copies count.
func (b *brokerPass) countsFrom(key queueKey) int64 {
	switch key.topic {
	case b.p.e.cfg.retryTopic():
		return b.committed[key]
	case scheduleTopic:
		return b.delivered[int(key.queue)+1]
	default:
		return 0
	}
}

// dropStale forgets what is kept of brokers whose queues changed under it: the
// next pass reads them afresh.
func (p *pass) dropStale() {
	for key := range p.e.indexes {
		if b := p.broker(key.broker); b != nil && b.stale {
			delete(p.e.indexes, key)
		}
	}
}

func (b *brokerPass) confirm(ctx context.Context, key queueKey, h hit) error {
	q := queueReader{peer: b.peer, topic: key.topic, queue: key.queue}
	record, err := q.record(ctx, h.offset)
	if err != nil {
		return err
	}
	same := false
	for k := range record.Keys() {
		same = same || fingerprint(k) == h.fingerprint
	}
	if !same {
		return fmt.Errorf("%w: another record at offset %d of %s", errQueueChanged, h.offset, q)
	}
	for _, i := range b.p.byFingerprint[h.fingerprint] {
		if record.HasKey(b.p.queries[i].MessageID) {
			b.p.addCopy(i, b.copyAt(key, record))
		}
	}
	return nil
}

func (p *pass) addCopy(i int, e reservation.MessageEvidence) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.messages[i].add(e)
}

// copyAt is what a copy at or beyond countsFrom says.
func (b *brokerPass) copyAt(key queueKey, r remoting.Record) reservation.MessageEvidence {
	e := reservation.MessageEvidence{Detail: fmt.Sprintf("%s, offset %d", key, r.QueueOffset)}
	switch key.topic {
	case b.p.e.cfg.Topic:
		return b.copyInTopic(key, r.QueueOffset)
	case b.p.e.cfg.deadTopic():
		e.State, e.SinceMS = reservation.MessageDead, r.StoreMS
	case scheduleTopic:
		e.State = reservation.MessageRetrying
		if r.Properties[remoting.PropertyRealTopic] == b.p.e.cfg.Topic {
			e.State = reservation.MessagePending // its first delivery is delayed
		}
	default:
		e.State = reservation.MessageRetrying
	}
	return e
}
