package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// Limits say how a version is rebalanced.
type Limits struct {
	Keep     int64         // units that a donor keeps at least
	Share    int64         // percent of what is above that which it gives in one run, 1 to 100
	MinUnits int64         // least units of one receiver's share: fewer are not worth a transfer
	MaxUnits int64         // most units of one version in one run
	CoolDown time.Duration // a bucket that took part in a transfer is left alone for so long
}

// Look is a version at one time, with what its buckets were asked for.
type Look struct {
	Books    Books
	Requests map[int64]int64 // requests that each bucket has answered so far, whatever the answer
}

// Role is a bucket's part in a rebalancing, and why it has it.
type Role struct {
	Bucket    int64
	Available int64
	Asked     int64 // requests since the look before
	Gives     int64
	Gets      int64
	Why       string
}

// Plan is what a rebalancing of one version would do.
type Plan struct {
	Key   Key
	Roles []Role // by bucket
	Moves []Request
}

// Rebalance plans what to move between two looks at a version. It is pure.
//
// A bucket gets units if it has none and was asked since the look before: users
// keep their bucket, so that is the demand which nobody else can serve. A bucket
// gives of what it has above its own needs: as many units as it was asked for in
// that time, and Keep at least. It gives Share percent of that, so that a guess
// that was wrong is made again with what is left; the last unit is given, too.
// What is given goes to the receivers in equal parts, to those asked most first.
func Rebalance(before, now Look, limits Limits, at time.Time) Plan {
	plan := Plan{Key: now.Books.Version.Key}
	idle := ""
	switch v := now.Books.Version; {
	case now.Books.Check() != nil || now.Books.Difference() != 0:
		idle = "the version's sums do not hold: see `reconciler reconcile`"
	case !now.Books.settled():
		idle = "another transfer of the version is not finished"
	case at.Before(v.StartsAt) || !at.Before(v.EndsAt):
		idle = "the sale is not running"
	}
	for _, b := range now.Books.Version.Buckets {
		r := role(before, now, b, limits, at)
		if idle != "" {
			r.Gives, r.Gets, r.Why = 0, 0, idle
		}
		plan.Roles = append(plan.Roles, r)
	}
	plan.share(limits)
	return plan
}

// wanted marks a receiver until its share is known.
const wanted = int64(-1)

// role says what a bucket could give, or that it wants units.
func role(before, now Look, b Bucket, limits Limits, at time.Time) Role {
	reading := now.Books.Buckets[b.ID]
	r := Role{Bucket: b.ID, Available: reading.Available, Asked: max(now.Requests[b.ID]-before.Requests[b.ID], 0)}
	_, transfers := now.Books.bucket(b.ID)
	switch keep := max(limits.Keep, r.Asked); {
	case b.Held:
		r.Why = "a person holds it"
	case reading.State != "ACTIVE":
		r.Why = "it is " + reading.State
	case transfers >= MostPerBucket:
		r.Why = fmt.Sprintf("it has %d transfers already", transfers)
	case now.cooling(b.ID, limits.CoolDown, at):
		r.Why = "it took part in a transfer a moment ago"
	case r.Available == 0 && r.Asked > 0:
		r.Gets, r.Why = wanted, fmt.Sprintf("sold out, and asked %d times since", r.Asked)
	case r.Available == 0:
		r.Why = "sold out, and nobody asks"
	case r.Available <= keep:
		r.Why = fmt.Sprintf("keeps its %d units: it was asked %d times", r.Available, r.Asked)
	default:
		spare := r.Available - keep
		r.Gives = (spare*limits.Share + 99) / 100
		r.Why = fmt.Sprintf("has %d units more than the %d that it keeps, and gives %d%% of them", spare, keep, limits.Share)
	}
	return r
}

// cooling says whether the bucket took part in a transfer a moment ago.
func (l Look) cooling(bucket int64, pause time.Duration, at time.Time) bool {
	return slices.ContainsFunc(l.Books.Version.Transfers, func(t Transfer) bool {
		return (t.Donor == bucket || t.Receiver == bucket) && at.Sub(t.CreatedAt) < pause
	})
}

// share deals what is given out to those that want it.
func (p *Plan) share(limits Limits) {
	var givers, takers []*Role
	var given int64
	for i := range p.Roles {
		switch r := &p.Roles[i]; {
		case r.Gives > 0:
			givers = append(givers, r)
			given += r.Gives
		case r.Gets == wanted:
			r.Gets = 0
			takers = append(takers, r)
		}
	}
	slices.SortStableFunc(givers, func(x, y *Role) int { return cmp.Compare(y.Gives, x.Gives) })
	slices.SortStableFunc(takers, func(x, y *Role) int { return cmp.Compare(y.Asked, x.Asked) })
	given = min(given, limits.MaxUnits)
	least := max(limits.MinUnits, 1)
	takers = takers[:min(int64(len(takers)), given/least)]
	for i, units := range allocate(given, int64(len(takers))) {
		takers[i].Gets = units
	}
	offers := make([]int64, len(givers))
	for i, g := range givers {
		offers[i], g.Gives = g.Gives, 0
	}
	for _, taker := range takers {
		p.serve(taker, givers, offers)
	}
}

// allocate deals units out evenly.
func allocate(units, parts int64) []int64 {
	if parts == 0 {
		return nil
	}
	return reservation.Allocation(units, parts)
}

// serve takes a receiver's share from the offers.
func (p *Plan) serve(taker *Role, givers []*Role, offers []int64) {
	for need, i := taker.Gets, 0; need > 0 && i < len(givers); i++ {
		units := min(need, offers[i])
		if units == 0 {
			continue
		}
		offers[i] -= units
		givers[i].Gives += units
		need -= units
		p.Moves = append(p.Moves, Request{
			Key: p.Key, Donor: givers[i].Bucket, Receiver: taker.Bucket, Amount: units, Reason: ReasonRebalance,
		})
	}
}

// Demand tells how many requests buckets have answered so far.
type Demand interface {
	// Requests counts the request results of each scope; a scope that could not
	// be read has an error.
	Requests(ctx context.Context, scopes []reservation.Scope) ([]int64, error)
}

// Rebalancer gives sold-out buckets what others have left.
type Rebalancer struct {
	Planner *Planner
	Demand  Demand
	Limits  Limits
	Actor   string
	Observe bool

	before map[Key]Look
}

// Names under which a pass counts what it did.
const (
	DonePlanned = "planned" // transfers put into the journal
	DoneKept    = "kept"    // moves that were not planned after all: the donor needs its units
)

// Looks reads the running versions that the filter selects and in which there is
// something to rebalance: a bucket without units beside one that has some.
func (r *Rebalancer) Looks(ctx context.Context, f Filter) ([]Look, error) {
	f.Several = true
	versions, err := r.Planner.Journal.Versions(ctx, f)
	if err != nil {
		return nil, fmt.Errorf("list the versions of several buckets: %w", err)
	}
	now := time.Now()
	versions = slices.DeleteFunc(versions, func(v Version) bool { return now.Before(v.StartsAt) || !now.Before(v.EndsAt) })
	var looks []Look
	for _, books := range (Reader{r.Planner.Journal, r.Planner.Stocks}).Books(ctx, versions) {
		if !uneven(books) {
			continue
		}
		v, look := books.Version, Look{Books: books, Requests: map[int64]int64{}}
		scopes := make([]reservation.Scope, len(v.Buckets))
		for i, b := range v.Buckets {
			scopes[i] = v.Key.Scope(b.ID)
		}
		requests, err := r.Demand.Requests(ctx, scopes)
		if err != nil {
			return nil, fmt.Errorf("what the buckets of %s were asked for: %w", v.first(), err)
		}
		for i, b := range v.Buckets {
			look.Requests[b.ID] = requests[i]
		}
		looks = append(looks, look)
	}
	return looks, nil
}

// uneven says whether one bucket has no unit and another has some.
func uneven(b Books) bool {
	some, none := false, false
	for _, r := range b.Buckets {
		some = some || (r.complete() && r.Available > 0)
		none = none || (r.complete() && r.Available == 0)
	}
	return some && none
}

// Apply journals the moves of a plan; the worker carries them out. A donor that
// needs its units after all keeps them.
func (r *Rebalancer) Apply(ctx context.Context, p Plan, tally *pass.Tally) []Transfer {
	var planned []Transfer
	for _, move := range p.Moves {
		move.Actor = r.Actor
		t, _, err := r.Planner.Plan(ctx, move)
		if err != nil {
			tally.Did(DoneKept, 1)
			if _, refused := errors.AsType[*RefusedError](err); !refused {
				tally.Failed(err)
			}
			continue
		}
		tally.Did(DonePlanned, 1)
		planned = append(planned, t)
	}
	return planned
}

// Pass compares each version with the pass before, and plans what is to be
// moved. The first pass after a start only looks.
func (r *Rebalancer) Pass(ctx context.Context) (*pass.Tally, error) {
	tally := pass.NewTally()
	looks, err := r.Looks(ctx, Filter{})
	if err != nil {
		return tally, err
	}
	before := r.before
	r.before = map[Key]Look{}
	for _, now := range looks {
		key := now.Books.Version.Key
		tally.Seen++
		r.before[key] = now
		last, known := before[key]
		if !known {
			continue
		}
		plan := Rebalance(last, now, r.Limits, time.Now())
		if r.Observe {
			tally.Did(DoneWaiting, len(plan.Moves))
			continue
		}
		r.Apply(ctx, plan, tally)
	}
	return tally, tally.Err()
}
