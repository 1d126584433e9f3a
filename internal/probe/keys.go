package probe

import (
	"math"
	"slices"

	"github.com/seckill/reconciler/reservation"
)

// KeySizes is how big the keys of one scope are, or why that could not be read.
type KeySizes struct {
	Scope reservation.Scope
	// AtMS is the time of the scope's node, so that two looks at it give a rate.
	AtMS int64
	// Fields is how many request results each shard of the 256 holds.
	Fields []int64
	// Pending and Expiry are the members of the two indexes.
	Pending, Expiry int64
	// Bytes of memory of the biggest shard and of the indexes, by estimate.
	ShardBytes, PendingBytes, ExpiryBytes int64
	Err                                   error
}

// Requests is how many request results all shards hold.
func (k KeySizes) Requests() int64 {
	var sum int64
	for _, n := range k.Fields {
		sum += n
	}
	return sum
}

// MaxFields is the size of the biggest shard.
func (k KeySizes) MaxFields() int64 {
	if len(k.Fields) == 0 {
		return 0
	}
	return slices.Max(k.Fields)
}

// minMeanFields is from how many fields in the average shard the skew says
// something: with a few requests one shard is always far above the others.
const minMeanFields = 64

// Skew is the biggest shard in relation to the average one, and 1 while there
// are too few requests to say. An even hash stays below 1.5.
func (k KeySizes) Skew() float64 {
	if len(k.Fields) == 0 {
		return 1
	}
	mean := float64(k.Requests()) / float64(len(k.Fields))
	if mean < minMeanFields {
		return 1
	}
	return float64(k.MaxFields()) / mean
}

// MaxBytes is the size of the biggest of the scope's keys.
func (k KeySizes) MaxBytes() int64 { return max(k.ShardBytes, k.PendingBytes, k.ExpiryBytes) }

// RequestRate is how many new requests a second the scope took between two
// looks at it: how hot its slot is. It is 0 without an earlier look.
func (k KeySizes) RequestRate(before KeySizes) float64 {
	if before.Err != nil || k.Err != nil || before.Scope != k.Scope || k.AtMS <= before.AtMS {
		return 0
	}
	return max(float64(k.Requests()-before.Requests())/float64(k.AtMS-before.AtMS)*1000, 0)
}

// Spread is how unevenly the available units of a version lie on its buckets.
type Spread struct {
	Min, Max int64
	Variance float64 // of the units, in units squared
}

// SpreadOf is the spread of the buckets' available units.
func SpreadOf(available []int64) Spread {
	if len(available) == 0 {
		return Spread{}
	}
	var sum float64
	for _, n := range available {
		sum += float64(n)
	}
	mean := sum / float64(len(available))
	var squares float64
	for _, n := range available {
		squares += math.Pow(float64(n)-mean, 2)
	}
	return Spread{Min: slices.Min(available), Max: slices.Max(available), Variance: squares / float64(len(available))}
}
