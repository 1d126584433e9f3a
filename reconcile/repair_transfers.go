package reconcile

import (
	"context"
	"slices"

	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// Mover moves units between the buckets of a version (protocol §4, transfer).
type Mover interface {
	// FinishTransfers drives the transfers of the scopes' versions; with fill also
	// by units of buckets that have no part in them.
	FinishTransfers(ctx context.Context, scopes []reservation.Scope, fill bool) error
	// FillDeficit gives a scope so many units of other buckets, as far as they can
	// spare them, and says how many came.
	FillDeficit(ctx context.Context, scope reservation.Scope, units int64) (int64, error)
}

// repairable finds what a repair of the finding needs; false where it has none.
func (p *repairer) repairable(f Finding) (MemberQuery, bool) {
	if f.Check == CheckStuckTransfer {
		return MemberQuery{}, p.mover != nil
	}
	if p.sets == nil {
		return MemberQuery{}, false
	}
	query, known := p.sets.queries[keyOf(f)]
	return query, known
}

// incomplete says whether the evidence of the finding's scope is.
func (p *repairer) incomplete(f Finding) bool {
	if f.Check != CheckStuckTransfer {
		return p.sets.targets[f.Scope.Reservation()].failed()
	}
	return slices.ContainsFunc(p.report.Incomplete, func(i Incomplete) bool { return i.Scope == nil || *i.Scope == f.Scope })
}

// finishTransfers makes the pairs of the findings equal, as far as it goes. The
// run after the repairs says which of them still are not.
func (p *repairer) finishTransfers(ctx context.Context, items []*item) {
	scopes := make([]reservation.Scope, len(items))
	for k, i := range items {
		scopes[k], i.finding.Repair.Before = i.finding.Scope.Reservation(), i.finding.Evidence.Redis
	}
	p.noted(ctx, items, func(ctx context.Context) {
		err := p.mover.FinishTransfers(ctx, scopes, p.options.FillDeficit)
		for _, i := range items {
			i.finding.Repair.After = p.markers(ctx, i.finding.Scope.Reservation())
			if err != nil {
				i.finding.failed(err.Error())
			} else {
				i.finding.done("driven to its end")
			}
		}
	})
}

// markers are the values of a donor's transfers after a repair.
func (p *repairer) markers(ctx context.Context, donor reservation.Scope) map[string]any {
	versions, err := p.books.Journal.Versions(ctx, transfer.FilterOf(transfer.KeyOf(donor)))
	if err != nil {
		return nil // the run after the repairs says what cannot be read
	}
	markers := map[string]any{}
	for _, b := range p.books.Books(ctx, versions) {
		for _, pair := range b.Pairs() {
			if pair.Transfer.DonorScope() == donor {
				markers[pair.Transfer.ID] = map[string]any{"out": pair.Out().Amount, "in": pair.In().Amount}
			}
		}
	}
	return map[string]any{"transfers": markers}
}

// restoreOrders restores and, where a bucket has no unit left for its orders,
// takes units of other buckets and tries those again (protocol §4).
func (p *repairer) restoreOrders(ctx context.Context, requests []RestoreRequest) []RestoreReply {
	replies := p.mender.RestoreOrders(ctx, requests)
	if p.mover == nil || !p.options.FillDeficit {
		return replies
	}
	short := map[reservation.Scope][]int{}
	for i, reply := range replies {
		if reply.Err == nil && reply.Deficit {
			short[requests[i].Scope] = append(short[requests[i].Scope], i)
		}
	}
	for scope, at := range short {
		came, err := p.mover.FillDeficit(ctx, scope, int64(len(at)))
		if err != nil {
			for _, i := range at {
				replies[i].Err = err
			}
		}
		if came == 0 {
			continue
		}
		again := make([]RestoreRequest, len(at))
		for k, i := range at {
			again[k] = requests[i]
		}
		for k, reply := range p.mender.RestoreOrders(ctx, again) {
			replies[at[k]] = reply
		}
	}
	return replies
}
