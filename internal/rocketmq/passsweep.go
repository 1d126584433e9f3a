package rocketmq

import (
	"context"
	"fmt"
	"math"

	"golang.org/x/sync/errgroup"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/reservation"
)

// sweep brings the indexes of all queues up to date, on all brokers at once.
// What is not needed any more is forgotten everywhere before anything is read,
// so that its room is free for whichever queue comes first.
func (p *pass) sweep(ctx context.Context) {
	run := &sweepRun{startMS: p.windowStart()}
	var total int64
	for _, x := range p.e.indexes {
		total += x.len()
	}
	run.kept.left.Store(p.e.cfg.MaxSweepMessages - total)
	run.crowded = total > p.e.cfg.MaxSweepMessages/2
	for _, step := range []func(*brokerPass, context.Context, queueKey, *sweepRun) error{
		(*brokerPass).prepareQueue, (*brokerPass).fillQueue,
	} {
		p.each(ctx, func(b *brokerPass, ctx context.Context) error {
			return b.eachQueue(ctx, func(ctx context.Context, key queueKey) error { return step(b, ctx, key, run) })
		})
	}
}

// sweepRun is what the queues of one sweep share.
type sweepRun struct {
	startMS int64 // the earliest store time that matters
	crowded bool  // forget what this pass does not ask for
	kept    budget
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

// eachQueue runs a step for every queue that has to be swept.
func (b *brokerPass) eachQueue(ctx context.Context, step func(context.Context, queueKey) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(queuesAtOnce)
	for topic, ranges := range b.ranges {
		if topic == b.p.e.cfg.Topic && !b.p.anyNeedsTopic() {
			continue
		}
		for queue := range ranges {
			group.Go(func() error { return step(ctx, queueKey{b.name, topic, queue}) })
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

func (b *brokerPass) reader(key queueKey) queueReader {
	return queueReader{peer: b.peer, topic: key.topic, queue: key.queue, ours: b.relevant(key.topic)}
}

// prepareQueue finds out which part of the queue matters, and drops what is
// kept of the rest.
func (b *brokerPass) prepareQueue(ctx context.Context, key queueKey, run *sweepRun) error {
	q := b.reader(key)
	w, err := b.window(ctx, q, key, run)
	if err != nil {
		return err
	}
	x, err := q.prepare(ctx, b.p.e.index(key), w.window, &run.kept)
	if err != nil {
		return err
	}
	b.p.e.setIndex(key, x)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.windows[key] = w
	return nil
}

// fillQueue reads what is missing, and notes what of the window is not covered.
func (b *brokerPass) fillQueue(ctx context.Context, key queueKey, run *sweepRun) error {
	b.mu.Lock()
	w := b.windows[key]
	b.mu.Unlock()
	q, x := b.reader(key), b.p.e.index(key)
	if err := q.fill(ctx, x, w.window, &run.kept); err != nil {
		return err
	}
	covered := coverage{}
	switch {
	case x.to < w.max, x.len() == 0 && max(w.start, w.min) < w.max:
		covered = coverage{math.MaxInt64, UnknownWindowTooLarge}
	case x.from > max(w.start, w.min):
		first, err := q.record(ctx, x.from)
		if err != nil {
			return err
		}
		covered = coverage{first.StoreMS + 1, UnknownWindowTooLarge}
	case w.mayLackOlder && b.info.EarliestMS > run.startMS:
		covered = coverage{b.info.EarliestMS + 1, UnknownRetention}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if covered.sinceMS > b.coverage[key.topic].sinceMS {
		b.coverage[key.topic] = covered
	}
	return nil
}

type queueWindow struct {
	window
	// mayLackOlder: records from before the queue's first one could have been in
	// the window; only the age of the broker's oldest record tells.
	mayLackOlder bool
}

// window is the part of a queue that matters: from the earliest store time in
// the topic and %DLQ%, from the first record that is not passed in the others.
func (b *brokerPass) window(ctx context.Context, q queueReader, key queueKey, run *sweepRun) (queueWindow, error) {
	kept := b.ranges[key.topic][key.queue]
	w := queueWindow{window: window{min: kept.Min, max: kept.Max}}
	if passed, ok := b.passed(key); ok {
		w.start, w.keepFrom = passed, passed
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

// passed is the offset before which a copy in %RETRY% or SCHEDULE does not
// count: it was delivered again. The other topics have none.
func (b *brokerPass) passed(key queueKey) (offset int64, ok bool) {
	switch key.topic {
	case b.p.e.cfg.retryTopic():
		return b.committed[key], true // 0 if the group has no offset
	case scheduleTopic:
		return b.delivered[int(key.queue)+1], true // queue n holds level n+1; 0 if it delivered nothing
	default:
		return 0, false
	}
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
			x := b.p.e.index(key)
			if x == nil {
				continue
			}
			for _, h := range x.find(sought) {
				group.Go(func() error { return b.confirm(ctx, key, h) })
			}
		}
	}
	return group.Wait()
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

// copyAt is what a copy that counts says.
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
