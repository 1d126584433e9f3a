package transfer

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/seckill/reconciler/reservation"
)

// Filler gives a bucket the units that its own orders lack and other buckets of
// the version have (protocol §4: a DEFICIT may be filled by a planned transfer).
type Filler struct {
	Planner *Planner
	Worker  *Worker
	Actor   string
}

// FinishTransfers drives the transfers of the versions that the scopes are
// buckets of. With fill it also helps pairs whose units are in both buckets while
// both are sold out: the unit too many has been sold there, and the one that is
// left over for it is in a third bucket. It is moved to the donor, which then
// makes up for its leg.
func (f *Filler) FinishTransfers(ctx context.Context, scopes []reservation.Scope, fill bool) error {
	var errs []error
	done := map[Key]bool{}
	for _, s := range scopes {
		if key := KeyOf(s); !done[key] {
			done[key] = true
			errs = append(errs, f.finish(ctx, key, fill))
		}
	}
	return errors.Join(errs...)
}

func (f *Filler) finish(ctx context.Context, key Key, fill bool) error {
	if _, err := f.Worker.Drive(ctx, FilterOf(key)); err != nil || !fill {
		return err
	}
	books, err := f.Planner.open(ctx, Request{Key: key})
	if err != nil {
		return err
	}
	for _, p := range books.Unequal() {
		if Next(p).Verb != Wait || p.Held {
			continue
		}
		if _, err := f.FillDeficit(ctx, p.Transfer.DonorScope(), -p.InTransit()); err != nil {
			return err
		}
	}
	return nil
}

// FillDeficit plans transfers of so many units to a bucket, from those that have
// most available, and drives them. It returns how many units came in, which may
// be fewer: other buckets may have none, need theirs, or be held.
func (f *Filler) FillDeficit(ctx context.Context, scope reservation.Scope, units int64) (int64, error) {
	key := KeyOf(scope)
	probe := Request{Key: key, Receiver: scope.Bucket, Reason: ReasonDeficit, Actor: f.Actor}
	books, err := f.Planner.open(ctx, probe)
	if err != nil {
		return 0, err
	}
	var planned []string
	var errs []error
	for _, donor := range donors(books, scope.Bucket) {
		if units <= 0 {
			break
		}
		r := probe
		r.Donor, r.Amount = donor, min(units, books.Buckets[donor].Available)
		t, _, err := f.Planner.Plan(ctx, r)
		if _, refused := errors.AsType[*RefusedError](err); refused {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			break
		}
		planned, units = append(planned, t.ID), units-r.Amount
	}
	if len(planned) == 0 {
		return 0, errors.Join(errs...)
	}
	if _, err := f.Worker.Drive(ctx, FilterOf(key)); err != nil {
		errs = append(errs, err)
	}
	came, err := f.came(ctx, probe, planned)
	return came, errors.Join(append(errs, err)...)
}

// donors are the other buckets with units, the one with most first.
func donors(b Books, receiver int64) []int64 {
	var ids []int64
	for id, r := range b.Buckets {
		if id != receiver && r.Err == nil && r.Available > 0 {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(x, y int64) int {
		if d := b.Buckets[y].Available - b.Buckets[x].Available; d != 0 {
			return int(max(min(d, 1), -1))
		}
		return int(x - y)
	})
	return ids
}

// came is how many units the transfers brought.
func (f *Filler) came(ctx context.Context, r Request, planned []string) (int64, error) {
	books, err := f.Planner.open(ctx, r)
	if err != nil {
		return 0, fmt.Errorf("see what came in: %w", err)
	}
	var units int64
	for _, id := range planned {
		units += books.Buckets[r.Receiver].Markers[id].Amount
	}
	return units, nil
}
