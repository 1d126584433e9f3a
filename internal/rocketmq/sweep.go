package rocketmq

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

const (
	pullRecords   = 32   // the broker's own limit for one PULL
	sweepChunk    = 4096 // records that are read before they are kept
	pullsPerChunk = 16   // PULLs of one queue under way at once
)

// errQueueChanged says that a queue is not what it was: its tail was lost and
// replaced, or records within it are gone. What was kept of it is worthless.
var errQueueChanged = errors.New("queue changed while it was read")

// queueReader reads the records of one queue.
type queueReader struct {
	peer  *remoting.Peer
	topic string
	queue int32
	// ours says whether a record can concern our messages; nil: all can.
	ours func(remoting.Record) bool
}

func (q queueReader) String() string {
	return fmt.Sprintf("%s queue %d on %s", q.topic, q.queue, q.peer.Addr())
}

// record reads the record at an offset that is known to exist.
func (q queueReader) record(ctx context.Context, offset int64) (remoting.Record, error) {
	pulled, err := q.peer.Pull(ctx, q.topic, q.queue, offset, 1)
	if err != nil {
		return remoting.Record{}, err
	}
	if len(pulled.Records) != 1 || pulled.Records[0].QueueOffset != offset {
		return remoting.Record{}, fmt.Errorf("%w: no record at offset %d of %s (code %d, %d to %d)",
			errQueueChanged, offset, q, pulled.Code, pulled.Min, pulled.Max)
	}
	return pulled.Records[0], nil
}

// read reads the records from offset from to offset to, exclusive, all of which
// must exist: many PULLs at once, and any gap or disorder is errQueueChanged.
func (q queueReader) read(ctx context.Context, from, to int64) (swept, error) {
	run := swept{from: from, first: make([]uint64, to-from)}
	segments := make([]segment, (to-from+pullRecords-1)/pullRecords)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(pullsPerChunk)
	for i := range segments {
		low := from + int64(i)*pullRecords
		high := min(low+pullRecords, to)
		group.Go(func() (err error) {
			segments[i], err = q.segment(ctx, low, high, run.first[low-from:high-from])
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return swept{}, err
	}
	for i, s := range segments {
		if i > 0 && s.begin.logOffset <= run.end.logOffset {
			return swept{}, fmt.Errorf("%w: records of %s are out of order", errQueueChanged, q)
		}
		run.end = s.end
		run.further = append(run.further, s.further...)
	}
	return run, nil
}

// segment is what one worker read.
type segment struct {
	begin, end recordMark
	further    []keyAt
}

func (q queueReader) segment(ctx context.Context, from, to int64, into []uint64) (segment, error) {
	var s segment
	for at := from; at < to; {
		pulled, err := q.peer.Pull(ctx, q.topic, q.queue, at, int(to-at))
		if err != nil {
			return segment{}, err
		}
		if len(pulled.Records) == 0 {
			return segment{}, fmt.Errorf("%w: nothing at offset %d of %s (code %d)", errQueueChanged, at, q, pulled.Code)
		}
		for _, r := range pulled.Records {
			if r.QueueOffset != at || (at > from && r.LogOffset <= s.end.logOffset) {
				return segment{}, fmt.Errorf("%w: offset %d follows %d in %s", errQueueChanged, r.QueueOffset, at-1, q)
			}
			if at == from {
				s.begin = markOf(r)
			}
			s.end = markOf(r)
			q.keep(r, &into[at-from], &s.further)
			at++
		}
	}
	return s, nil
}

// keep notes the fingerprints of the record's keys.
func (q queueReader) keep(r remoting.Record, first *uint64, further *[]keyAt) {
	if q.ours != nil && !q.ours(r) {
		return
	}
	for key := range r.Keys() {
		if f := fingerprint(key); *first == noFingerprint {
			*first = f
		} else {
			*further = append(*further, keyAt{f, r.QueueOffset})
		}
	}
}

// budget is how many more fingerprints may be kept, over all queues.
type budget struct{ left atomic.Int64 }

// take takes up to n and returns how many it got.
func (b *budget) take(n int64) int64 {
	for {
		left := b.left.Load()
		got := max(min(n, left), 0)
		if got == 0 || b.left.CompareAndSwap(left, left-got) {
			return got
		}
	}
}

func (b *budget) giveBack(n int64) { b.left.Add(n) }

// window is what a pass wants of a queue.
type window struct {
	start    int64 // the first offset that matters
	min, max int64 // what the broker keeps; max exclusive
	keepFrom int64 // what is before it may be forgotten
}

// prepare forgets what does not matter any more, or all of it if the broker
// lost or replaced the tail that the index knows: offsets are reused then, and
// the fingerprints are those of messages that are gone.
func (q queueReader) prepare(ctx context.Context, x *queueIndex, w window, b *budget) (*queueIndex, error) {
	if x == nil {
		return newQueueIndex(w.max), nil
	}
	stale := x.len() == 0 || x.to > w.max || x.to-1 < w.min
	if !stale {
		last, err := q.record(ctx, x.to-1)
		if err != nil && !errors.Is(err, errQueueChanged) {
			return nil, err
		}
		stale = err != nil || markOf(last) != x.last
	}
	if stale {
		b.giveBack(x.len())
		return newQueueIndex(w.max), nil
	}
	b.giveBack(x.trim(max(w.min, w.keepFrom)))
	return x, nil
}

// fill reads the tail, and then what is missing before the index, newest first,
// so that an interruption or a used-up budget costs the oldest messages. What
// was read is kept even if it returns an error. Afterwards the index holds
// everything from x.from on, provided that x.to reached w.max.
func (q queueReader) fill(ctx context.Context, x *queueIndex, w window, b *budget) error {
	for x.to < w.max {
		n := b.take(min(sweepChunk, w.max-x.to))
		if n == 0 {
			return nil
		}
		if err := q.fetch(ctx, x, x.to, x.to+n, b); err != nil {
			return err
		}
	}
	for start := max(w.start, w.min); x.from > start; {
		n := b.take(min(sweepChunk, x.from-start))
		if n == 0 {
			return nil
		}
		if err := q.fetch(ctx, x, x.from-n, x.from, b); err != nil {
			return err
		}
	}
	return nil
}

func (q queueReader) fetch(ctx context.Context, x *queueIndex, from, to int64, b *budget) error {
	run, err := q.read(ctx, from, to)
	if err != nil {
		b.giveBack(to - from)
		return err
	}
	if from == x.to && x.len() > 0 && run.end.logOffset <= x.last.logOffset {
		b.giveBack(to - from)
		return fmt.Errorf("%w: the tail of %s was replaced", errQueueChanged, q)
	}
	x.add(run)
	return nil
}
