package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// The checks of cross-bucket transfers.
const (
	CheckStuckTransfer    = "stuck_transfer"
	CheckTransferConflict = transfer.TaskConflict
)

// defaultStuckAfter is how long a pair of markers may be unequal.
const defaultStuckAfter = time.Minute

var transferChecks = []Check{
	{
		ID: CheckStuckTransfer, Severity: SeverityError, Level: LevelQuick,
		Compares: "the units that each transfer took out of a bucket with those that came into the other",
		Cost:     "the journal of transfers, and one script call a bucket of the versions that have any",
		Repair:   RepairAutomatic,
		Advice:   "finish it: --repair, or the daemon's job transfer; see `reconciler transfer show` for what it waits for",
		needs:    needs{transfers: true}, compare: stuckTransfers,
	},
	{
		ID: CheckTransferConflict, Severity: SeverityCritical, Level: LevelQuick,
		Compares: "the markers of transfers with the journal and, where units are still to be moved, the sums of the version",
		Cost:     "the same reads",
		Repair:   RepairManual,
		Advice:   "nothing is moved in the version: find out who changed its initial stock or its markers, and put it right by `reconciler task show`",
		needs:    needs{transfers: true}, compare: conflictingTransfers,
	},
}

// readTransfers lists the versions that have transfers. It comes before any
// bucket of the round is read.
func (r *run) readTransfers(ctx context.Context) {
	r.reader.journalled, r.reader.journalErr = nil, nil
	if !r.reader.needs.transfers || r.source.Transfers == nil {
		return
	}
	f := r.options.Filter
	r.reader.journalled, r.reader.journalErr = r.source.Transfers.Journal.Versions(ctx, transfer.Filter{
		ActivityID: f.ActivityID, SKUID: f.SKUID, Version: f.Version, Journalled: true,
	})
}

// readBooks reads the transfers of a SKU's versions with its buckets' stocks,
// each bucket at one instant. What cannot be read fails the scopes of its
// version: their sums cannot be judged.
func (r *reader) readBooks(ctx context.Context, k *skuReading) {
	if !r.needs.transfers || r.transfers == nil {
		return
	}
	k.books, k.unread, k.stuckAfter = map[int64]transfer.Books{}, map[int64]bool{}, r.stuckAfter
	if r.journalErr != nil {
		for _, v := range k.sku.Versions {
			k.cannotTell(v.Number, SourcePostgres, r.journalErr)
		}
		return
	}
	var versions []transfer.Version
	for _, v := range r.journalled {
		if v.Key.ActivityID == k.sku.ActivityID && v.Key.SKUID == k.sku.SKUID && k.full(v.Key.Version) {
			versions = append(versions, v)
		}
	}
	if len(versions) == 0 {
		return
	}
	for _, b := range r.transfers.Books(ctx, versions) {
		if err := b.Check(); err != nil && !errors.Is(err, transfer.ErrContradictory) {
			k.cannotTell(b.Version.Key.Version, SourceRedis, err)
		} else {
			k.books[b.Version.Key.Version] = b
		}
	}
}

// cannotTell notes that the transfers of a version are not known.
func (k *skuReading) cannotTell(version int64, source string, err error) {
	k.unread[version] = true
	failAll(k.where(func(s *scopeReading) bool { return s.full && s.scope.Version == version }), source, err)
}

// full says whether a bucket of the version is to be read.
func (k *skuReading) full(version int64) bool {
	return slices.ContainsFunc(k.scopes, func(s *scopeReading) bool { return s.full && s.scope.Version == version })
}

// expected is the initial stock that a bucket should have: as registered, and
// what transfers brought and took.
func (k *skuReading) expected(v Version, b Bucket) int64 {
	if books, journalled := k.books[v.Number]; journalled && books.Check() == nil {
		return books.Expected(b.ID)
	}
	return b.Initial
}

// stuckTransfers: pairs of markers that nobody makes equal. There is one
// finding for each donor.
func stuckTransfers(k *skuReading) []contradiction {
	var out []contradiction
	for _, books := range k.journals() {
		if books.Check() != nil || books.Difference() != 0 {
			continue // transfer_conflict, or allocation_mismatch
		}
		stuck := map[reservation.Scope][]transfer.Pair{}
		for _, p := range books.Unequal() {
			if books.Idle(p) > k.stuckAfter {
				scope := p.Transfer.DonorScope()
				stuck[scope] = append(stuck[scope], p)
			}
		}
		for _, b := range books.Version.Buckets {
			scope := books.Version.Key.Scope(b.ID)
			if pairs := stuck[scope]; len(pairs) > 0 && k.byName[scope] != nil && k.byName[scope].full {
				out = append(out, stuckIn(scope, pairs))
			}
		}
	}
	return out
}

func stuckIn(scope reservation.Scope, pairs []transfer.Pair) contradiction {
	var causes, texts []string
	markers := map[string]any{}
	rows := map[string]any{}
	for _, p := range pairs {
		t, out, in := p.Transfer, p.Out().Amount, p.In().Amount
		causes = append(causes, fmt.Sprint(t.ID, "=", out, "/", in))
		texts = append(texts, fmt.Sprintf("transfer %s to bucket %d: %s", t.ID, t.Receiver, transfer.Next(p).Why))
		markers[t.ID] = map[string]any{"out": out, "in": in}
		rows[t.ID] = map[string]any{"receiver": t.Receiver, "amount": t.Amount, "state": t.State}
	}
	return contradiction{
		check: CheckStuckTransfer, scope: scope, cause: "unequal:" + strings.Join(causes, ","), message: strings.Join(texts, "; "),
		redis: map[string]any{"transfers": markers}, pg: map[string]any{"transfers": rows},
	}
}

// conflictingTransfers: what the worker refuses to move because of it.
func conflictingTransfers(k *skuReading) []contradiction {
	var out []contradiction
	for _, v := range k.sku.Versions {
		books, journalled := k.books[v.Number]
		at := k.firstFull(v)
		if !journalled || at == nil {
			continue
		}
		c := contradiction{check: CheckTransferConflict, scope: at.scope}
		switch err := books.Check(); {
		case err != nil:
			c.cause, c.message = transfer.CauseMarker, err.Error()
		case books.Difference() != 0 && waiting(books) > 0:
			c.cause, c.lo, c.hi = transfer.CauseSum, books.Difference(), books.Difference()
			c.message = fmt.Sprintf("%d transfers wait: the initial stocks of %d buckets are %d units and %d are in transit, but %d were allocated",
				waiting(books), v.Count, books.Initial(), books.InTransit(), v.Allocated)
			c.redis = map[string]any{
				"initial_of_all_buckets": books.Initial(), "in_transit": books.InTransit(), "unexpected_initial": unexpected(books),
			}
			c.pg = map[string]any{"allocated": v.Allocated, "waiting": waiting(books)}
		default:
			continue
		}
		out = append(out, c)
	}
	return out
}

// firstFull is the first bucket of the version that is read: the one that the
// worker names, too, so that both speak of one task.
func (k *skuReading) firstFull(v Version) *scopeReading {
	for _, b := range v.Buckets {
		if s := k.byName[k.sku.scope(v, b)]; s != nil && s.full {
			return s
		}
	}
	return nil
}

// unexpected are the initial stocks that are not what registration and transfers
// say, by bucket.
func unexpected(books transfer.Books) map[string]any {
	out := map[string]any{}
	for _, b := range books.Version.Buckets {
		if is, should := books.Buckets[b.ID].Initial, books.Expected(b.ID); is != should {
			out[strconv.FormatInt(b.ID, 10)] = map[string]any{"is": is, "expected": should}
		}
	}
	return out
}

// waiting counts the transfers of which something is still to be done.
func waiting(b transfer.Books) (n int) {
	for _, p := range b.Pairs() {
		if p.InTransit() != 0 || p.Transfer.Open() {
			n++
		}
	}
	return n
}

// journals are the books that were read, by version.
func (k *skuReading) journals() []transfer.Books {
	var all []transfer.Books
	for _, b := range k.books {
		all = append(all, b)
	}
	slices.SortFunc(all, func(x, y transfer.Books) int { return cmp.Compare(x.Version.Key.Version, y.Version.Key.Version) })
	return all
}

// Deviations reads how many units each scope has reserved beyond what its
// reservations and orders account for, as near to zero as is certain (protocol
// §5, level 2). It makes one round: who moves units out of a bucket asks whether
// to leave them, and asks again the next time.
func (r *Reconciler) Deviations(ctx context.Context, scopes []reservation.Scope) []transfer.Deviation {
	reader := &reader{
		registry: r.Registry, stocks: r.Stocks, orders: r.Orders, needs: needs{orders: true}, batch: defaultBatch, tries: defaultTries,
	}
	deviations := make([]transfer.Deviation, len(scopes))
	for i, scope := range scopes {
		deviations[i].Units, deviations[i].Err = reader.deviation(ctx, scope)
	}
	return deviations
}

func (r *reader) deviation(ctx context.Context, scope reservation.Scope) (int64, error) {
	skus, err := r.registry.SKUs(ctx, scope.ActivityID, scope.SKUID)
	if err != nil {
		return 0, err
	}
	for _, sku := range skus {
		k := &skuReading{sku: sku, byName: map[reservation.Scope]*scopeReading{}}
		for _, v := range sku.Versions {
			for _, b := range v.Buckets {
				if sku.scope(v, b) == scope {
					s := &scopeReading{scope: scope, version: v, bucket: b, full: true}
					k.scopes, k.byName[scope] = append(k.scopes, s), s
				}
			}
		}
		if len(k.scopes) == 0 {
			continue
		}
		r.read(ctx, k, false)
		switch s := k.scopes[0]; {
		case s.failed():
			return 0, fmt.Errorf("read %s: %s", s.failures[0].Source, s.failures[0].Reason)
		case !s.counted:
			return 0, fmt.Errorf("scope %s could not be counted", scope)
		default:
			return s.deviation(), nil
		}
	}
	return 0, fmt.Errorf("scope %s is not registered", scope)
}
