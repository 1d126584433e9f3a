package rocketmq

import (
	"cmp"
	"hash/maphash"
	"slices"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

// Fingerprints of message ids, 64 bits; the seed is the process's own. A match
// is confirmed by reading the record, so a collision costs one read.
var fingerprintSeed = maphash.MakeSeed()

// noFingerprint marks a record that carries no id of interest.
const noFingerprint = 0

func fingerprint(messageID string) uint64 {
	return max(maphash.String(fingerprintSeed, messageID), noFingerprint+1)
}

const blockBits = 10

type block [1 << blockBits]uint64

// keyAt is a further key of a record that has several.
type keyAt struct {
	fingerprint uint64
	offset      int64
}

// queueIndex holds the fingerprint of every record of a queue from offset
// `from` to `to`, exclusive. Offsets have no gaps, so the offset is the place.
type queueIndex struct {
	from, to int64
	blocks   map[int64]*block // offset >> blockBits
	further  []keyAt
	last     recordMark // the record at to−1: tells a queue whose tail was replaced
}

// recordMark tells one record from any other at the same offset.
type recordMark struct{ logOffset, storeMS int64 }

func markOf(r remoting.Record) recordMark { return recordMark{r.LogOffset, r.StoreMS} }

// newQueueIndex is an empty index at the end of a queue.
func newQueueIndex(at int64) *queueIndex {
	return &queueIndex{from: at, to: at, blocks: make(map[int64]*block)}
}

func (x *queueIndex) len() int64 { return x.to - x.from }

// swept is a contiguous run of records with the fingerprints of their keys.
type swept struct {
	from    int64
	first   []uint64 // of the first key of each record
	further []keyAt
	end     recordMark // the last record
}

// add joins a run to either end. It must touch the index, or the index be empty.
func (x *queueIndex) add(run swept) {
	n := int64(len(run.first))
	if n == 0 {
		return
	}
	if x.len() == 0 {
		x.from, x.to = run.from, run.from
	}
	for i, f := range run.first {
		x.set(run.from+int64(i), f)
	}
	x.further = append(x.further, run.further...)
	if run.from+n > x.to {
		x.to, x.last = run.from+n, run.end
	}
	x.from = min(x.from, run.from)
}

func (x *queueIndex) set(offset int64, f uint64) {
	b := x.blocks[offset>>blockBits]
	if b == nil {
		b = new(block)
		x.blocks[offset>>blockBits] = b
	}
	b[offset&(1<<blockBits-1)] = f
}

// trim forgets what is before the offset and returns how much that was.
func (x *queueIndex) trim(before int64) int64 {
	before = min(before, x.to)
	forgotten := before - x.from
	if forgotten <= 0 {
		return 0
	}
	x.from = before
	for number := range x.blocks {
		if (number+1)<<blockBits <= before {
			delete(x.blocks, number)
		}
	}
	x.further = slices.DeleteFunc(x.further, func(k keyAt) bool { return k.offset < before })
	return forgotten
}

// hit is a record that may carry a wanted id.
type hit struct {
	fingerprint uint64
	offset      int64
}

// wanted is a set of fingerprints with a bitmap in front, since nearly every
// record of a sweep is not wanted.
type wanted struct {
	bits [1 << 10]uint64 // 65,536 bits
	set  map[uint64]struct{}
}

func newWanted(fingerprints []uint64) *wanted {
	w := &wanted{set: make(map[uint64]struct{}, len(fingerprints))}
	for _, f := range fingerprints {
		w.bits[f>>6&1023] |= 1 << (f & 63)
		w.set[f] = struct{}{}
	}
	return w
}

func (w *wanted) has(f uint64) bool {
	if w.bits[f>>6&1023]&(1<<(f&63)) == 0 {
		return false
	}
	_, ok := w.set[f]
	return ok
}

// find returns the hits, oldest first.
func (x *queueIndex) find(w *wanted) []hit {
	var hits []hit
	for _, number := range x.blockNumbers() {
		b, base := x.blocks[number], number<<blockBits
		low, high := max(x.from-base, 0), min(x.to-base, 1<<blockBits)
		for i := low; i < high; i++ {
			if b[i] != noFingerprint && w.has(b[i]) {
				hits = append(hits, hit{b[i], base + i})
			}
		}
	}
	for _, k := range x.further {
		if w.has(k.fingerprint) {
			hits = append(hits, hit(k))
		}
	}
	slices.SortFunc(hits, func(a, b hit) int { return cmp.Compare(a.offset, b.offset) })
	return hits
}

func (x *queueIndex) blockNumbers() []int64 {
	numbers := make([]int64, 0, len(x.blocks))
	for number := range x.blocks {
		numbers = append(numbers, number)
	}
	slices.Sort(numbers)
	return numbers
}
