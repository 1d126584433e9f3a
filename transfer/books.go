package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seckill/reconciler/reservation"
)

// Books are a version's buckets and pairs as one round read them. Each bucket
// is of one instant of its own, which is enough for the sums: every script keeps
// stock and markers of its own slot in step.
type Books struct {
	Version Version
	Buckets map[int64]Reading

	problem error // why they are not to be judged, beyond what the readings say
}

// Queries ask for every bucket of the version, with the markers of its side of
// every transfer in the journal.
func (v Version) Queries() []Query {
	queries := make([]Query, len(v.Buckets))
	for i, b := range v.Buckets {
		queries[i].Scope = v.Key.Scope(b.ID)
		for _, t := range v.Transfers {
			if t.Donor == b.ID || t.Receiver == b.ID {
				queries[i].Transfers = append(queries[i].Transfers, t.ID)
			}
		}
	}
	return queries
}

// Keep makes books of the replies to the version's queries.
func (v Version) Keep(readings []Reading) Books {
	b := Books{Version: v, Buckets: make(map[int64]Reading, len(v.Buckets))}
	for i, r := range readings {
		b.Buckets[v.Buckets[i].ID] = r
	}
	return b
}

// ErrUnreadable says that not all of a version could be read: nothing is
// concluded of it.
var ErrUnreadable = errors.New("not every bucket of the version could be read")

// ErrContradictory says that what a bucket holds of a transfer cannot be what a
// script wrote.
var ErrContradictory = errors.New("a transfer's marker contradicts its journal row")

// ErrMoving says that transfers were journalled while a version was read, each
// time anew: the next read sees it whole.
var ErrMoving = errors.New("transfers were journalled while their version was read")

// Reader reads versions with the markers of their transfers.
type Reader struct {
	Journal Journal
	Stocks  Stocks
}

// readings is how often a version is read whose journal changes meanwhile.
const readings = 3

// Books reads versions from the journal as it was listed. A transfer that was
// journalled since may be in the stocks and not among the markers: where the sums
// do not hold, the journal is read again, and the version too if it has changed. A
// row is committed before its first leg, so a difference that is left is one.
func (r Reader) Books(ctx context.Context, versions []Version) []Books {
	all := r.read(ctx, versions)
	for i, b := range all {
		if b.Check() == nil && b.Difference() != 0 {
			all[i] = r.settle(ctx, b)
		}
	}
	return all
}

// read makes the books of the versions, all in one batch.
func (r Reader) read(ctx context.Context, versions []Version) []Books {
	var queries []Query
	for _, v := range versions {
		queries = append(queries, v.Queries()...)
	}
	replies := r.Stocks.ReadTransfers(ctx, queries)
	all := make([]Books, len(versions))
	for i, v := range versions {
		all[i], replies = v.Keep(replies[:len(v.Buckets)]), replies[len(v.Buckets):]
	}
	return all
}

// settle reads a version whose sums do not hold until its journal stands still.
func (r Reader) settle(ctx context.Context, b Books) Books {
	sameID := func(x, y Transfer) bool { return x.ID == y.ID }
	for range readings {
		now, err := r.Journal.Versions(ctx, FilterOf(b.Version.Key))
		if err != nil {
			b.problem = fmt.Errorf("%w: %w", ErrUnreadable, err)
			return b
		}
		if len(now) != 1 || slices.EqualFunc(now[0].Transfers, b.Version.Transfers, sameID) {
			return b
		}
		if b = r.read(ctx, now)[0]; b.Check() != nil || b.Difference() == 0 {
			return b
		}
	}
	b.problem = ErrMoving
	return b
}

// Check says whether the books can be judged at all: errors are
// [ErrUnreadable] and [ErrMoving], or [ErrContradictory] where no retry helps.
func (b Books) Check() error {
	if b.problem != nil {
		return b.problem
	}
	if int64(len(b.Version.Buckets)) != b.Version.Count {
		return fmt.Errorf("%w: %d of its %d buckets are registered", ErrUnreadable, len(b.Version.Buckets), b.Version.Count)
	}
	for _, bucket := range b.Version.Buckets {
		scope, r := b.Version.Key.Scope(bucket.ID), b.Buckets[bucket.ID]
		switch {
		case r.WrongData != "":
			return fmt.Errorf("%w: %s: %s", ErrContradictory, scope, r.WrongData)
		case r.Err != nil:
			return fmt.Errorf("%w: %w", ErrUnreadable, r.Err)
		case !r.complete():
			return fmt.Errorf("%w: %s has no complete meta and stock", ErrUnreadable, scope)
		}
	}
	for _, p := range b.Pairs() {
		out, in := p.Out(), p.In()
		switch {
		case out.Leg == LegIn || in.Leg == LegOut:
			return fmt.Errorf("%w: %s has the markers of the wrong legs", ErrContradictory, p.Transfer.ID)
		case max(out.Amount, in.Amount) > p.Transfer.Amount:
			return fmt.Errorf("%w: %s is for %d units, but %d are out and %d in", ErrContradictory, p.Transfer.ID, p.Transfer.Amount, out.Amount, in.Amount)
		}
	}
	return nil
}

// Pairs are the transfers with their markers, the oldest first.
func (b Books) Pairs() []Pair {
	held := map[int64]bool{}
	for _, bucket := range b.Version.Buckets {
		held[bucket.ID] = bucket.Held
	}
	pairs := make([]Pair, len(b.Version.Transfers))
	for i, t := range b.Version.Transfers {
		pairs[i] = Pair{t, b.Buckets[t.Donor], b.Buckets[t.Receiver], held[t.Donor] || held[t.Receiver]}
	}
	return pairs
}

// InTransit is Σ (out − in), from the markers.
func (b Books) InTransit() int64 {
	var sum int64
	for _, p := range b.Pairs() {
		sum += p.InTransit()
	}
	return sum
}

// Initial is Σ initial over the buckets.
func (b Books) Initial() int64 {
	var sum int64
	for _, r := range b.Buckets {
		sum += r.Initial
	}
	return sum
}

// Difference is Σ initial + in transit − allocated: zero while nobody but the
// two scripts changed the buckets' initial stocks.
func (b Books) Difference() int64 { return b.Initial() + b.InTransit() - b.Version.Allocated }

// Expected is the initial stock that a bucket should have: what was registered,
// and what transfers brought and took by its own markers.
func (b Books) Expected(bucket int64) int64 {
	var initial int64
	for _, registered := range b.Version.Buckets {
		if registered.ID == bucket {
			initial = registered.Initial
		}
	}
	for _, t := range b.Version.Transfers {
		amount := b.Buckets[bucket].Markers[t.ID].Amount
		switch bucket {
		case t.Donor:
			initial -= amount
		case t.Receiver:
			initial += amount
		}
	}
	return initial
}

// Idle is for how long a pair has not changed, by the clocks of its nodes and of
// PostgreSQL.
func (b Books) Idle(p Pair) time.Duration {
	idle := b.Version.ReadAt.Sub(p.Transfer.UpdatedAt)
	for _, side := range []struct {
		reading Reading
		marker  Marker
	}{{p.Donor, p.Out()}, {p.Receiver, p.In()}} {
		if side.marker.Leg != "" {
			idle = min(idle, time.Duration(side.reading.TimeMS-side.marker.UpdatedAtMS)*time.Millisecond)
		}
	}
	return idle
}

// Unequal are the pairs whose legs do not match.
func (b Books) Unequal() []Pair {
	return slices.DeleteFunc(b.Pairs(), func(p Pair) bool { return p.InTransit() == 0 })
}

// settled says whether every pair is equal and none is still to be begun.
func (b Books) settled() bool {
	return !slices.ContainsFunc(b.Pairs(), func(p Pair) bool { return p.InTransit() != 0 || p.Transfer.Open() })
}

// first is the scope that tasks about the version as a whole are named by.
func (v Version) first() reservation.Scope {
	if len(v.Buckets) == 0 {
		return v.Key.Scope(0)
	}
	return v.Key.Scope(v.Buckets[0].ID)
}
