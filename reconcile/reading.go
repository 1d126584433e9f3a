package reconcile

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// skuReading is what one round read of a SKU.
type skuReading struct {
	sku    SKU
	scopes []*scopeReading // in the order of the registry
	byName map[reservation.Scope]*scopeReading

	straysRead bool
	strays     []OrderCount // orders of versions and buckets that are not registered
	sold       *soldReading // nil where nothing says where the counter is

	books      map[int64]transfer.Books // of the versions that have transfers, by number
	unread     map[int64]bool           // versions whose transfers could not be read
	stuckAfter time.Duration            // for how long a pair of transfers may be unequal
}

// scopeReading is what one round read of a scope.
type scopeReading struct {
	scope   reservation.Scope
	version Version
	bucket  Bucket
	asked   bool // has a row in the report
	full    bool // to be read in this round
	sibling bool // only its stock is to be read, for what the version's buckets share

	stock       *Stock // the newest, nil when it was not read
	state       string // of meta
	retentionMS int64
	nowMS       int64
	malformed   string // why the stock means nothing
	missing     []string
	failures    []Incomplete
	moved       bool // the numbers changed while they were read

	counted  bool // the numbers below are there
	active   int64
	canceled int64
	holding  int64 // cancelled orders, and such of unknown status, whose reservation holds a unit
	met      int64 // orders of O that are met in E
	lo, hi   int64 // the deviation lies between, both included

	soldCompared bool // the counter of the version's sold units was there
}

// fail notes that something of the scope could not be read or compared. One
// reason for each source is enough.
func (s *scopeReading) fail(source, reason string) {
	for _, f := range s.failures {
		if f.Source == source {
			return
		}
	}
	name := jsonScope(s.scope)
	s.failures = append(s.failures, Incomplete{Source: source, Scope: &name, Reason: oneLine(reason)})
}

func (s *scopeReading) failed() bool { return len(s.failures) > 0 }

// take keeps the newest stock, and notes whether it changed.
func (s *scopeReading) take(stock Stock) {
	if s.stock != nil && *s.stock != stock {
		s.moved = true
	}
	s.stock = &stock
}

// reader makes the reads of one round.
type reader struct {
	registry Registry
	stocks   Stocks
	orders   Orders
	needs    needs
	batch    int
	tries    int

	transfers  *transfer.Reader // nil: no transfers are read
	stuckAfter time.Duration
	journalled []transfer.Version // the versions that have transfers, as the round began
	journalErr error              // why they could not be listed
}

// read fills the reading of one SKU. Its errors are in the scopes' failures:
// one that cannot be read never stops the others.
func (r *reader) read(ctx context.Context, k *skuReading, strays bool) {
	full := k.where(func(s *scopeReading) bool { return s.full })
	if r.needs.config {
		r.readFields(ctx, full)
	}
	r.readBooks(ctx, k)
	// Siblings, and scopes that lack something and so are not compared: what is
	// there of their stock is shown all the same.
	r.readStocks(ctx, k.where(func(s *scopeReading) bool { return s.sibling || len(s.missing) > 0 }))
	if !r.needs.orders {
		r.readStocks(ctx, readable(full))
	}
	if !r.needs.orders && !strays {
		return
	}
	var open []*scopeReading
	if r.needs.orders {
		open = full
	}
	for try := 0; try < r.tries && (try == 0 || len(open) > 0); try++ {
		r.compare(ctx, k, open, strays && try == 0)
		open = slices.DeleteFunc(slices.Clone(open), func(s *scopeReading) bool { return !s.inexact() })
	}
	compared := k.soldCompared()
	for _, s := range full {
		s.soldCompared = compared
	}
}

// inexact says that the scope's deviation is a range: it was in motion.
func (s *scopeReading) inexact() bool { return s.counted && !s.failed() && s.lo < s.hi }

func (k *skuReading) where(keep func(*scopeReading) bool) []*scopeReading {
	var out []*scopeReading
	for _, s := range k.scopes {
		if keep(s) {
			out = append(out, s)
		}
	}
	return out
}

func names(scopes []*scopeReading) []reservation.Scope {
	out := make([]reservation.Scope, len(scopes))
	for i, s := range scopes {
		out[i] = s.scope
	}
	return out
}

// readFields finds what the keys meta and stock lack.
func (r *reader) readFields(ctx context.Context, scopes []*scopeReading) {
	if len(scopes) == 0 {
		return
	}
	for i, reply := range r.stocks.MissingFields(ctx, names(scopes)) {
		s := scopes[i]
		switch {
		case reply.Err != nil:
			s.fail(SourceRedis, reply.Err.Error())
		case len(reply.Missing) > 0:
			s.missing = reply.Missing
			s.fail(SourceRedis, s.lacks(reply.Missing))
		}
	}
}

// lacks says what it means that keys or fields are not there.
func (s *scopeReading) lacks(missing []string) string {
	text := strings.Join(missing, ", ") + " missing"
	if !s.bucket.Confirmed {
		text += ": the scope was registered but never confirmed, run `reconciler scope create` again"
	}
	return text
}

// readStocks reads the numbers of scopes, each at one instant.
func (r *reader) readStocks(ctx context.Context, scopes []*scopeReading) {
	if len(scopes) == 0 {
		return
	}
	for i, reply := range r.stocks.Stocks(ctx, names(scopes)) {
		s := scopes[i]
		switch {
		case reply.Err != nil:
			s.fail(SourceRedis, reply.Err.Error())
		case reply.Malformed != "":
			s.malformed = reply.Malformed
			s.fail(SourceRedis, reply.Malformed)
		default:
			s.take(reply.Stock)
			s.state, s.retentionMS, s.nowMS = reply.State, reply.RetentionMS, reply.NowMS
			if missing := reply.missing(); len(missing) > 0 {
				s.fail(SourceRedis, s.lacks(missing))
			}
		}
	}
}

// missing names the stock's fields that are not there.
func (s Stock) missing() []string {
	var missing []string
	for _, f := range []struct {
		name  string
		value int64
	}{{"stock.initial", s.Initial}, {"stock.available", s.Available}, {"stock.reserved", s.Reserved}} {
		if f.value == Missing {
			missing = append(missing, f.name)
		}
	}
	if len(missing) == 3 {
		return []string{"stock"}
	}
	return missing
}

// finished is F of the package comment: the units whose reservations have left
// reservation_expiry.
func (s Stock) finished() int64 { return s.Reserved - s.Expiry }

// failAll notes one reason for many scopes.
func failAll(scopes []*scopeReading, source string, err error) {
	for _, s := range scopes {
		s.fail(source, err.Error())
	}
}

// readable drops the scopes that have failed.
func readable(scopes []*scopeReading) []*scopeReading {
	var out []*scopeReading
	for _, s := range scopes {
		if !s.failed() {
			out = append(out, s)
		}
	}
	return out
}

// ownerOf finds the scope that an order belongs to: the one that it names, a
// missing bucket by the hash rule and a missing version by there being only
// one. It is nil when that scope is not read; ok is false when the order could
// belong to several.
func (k *skuReading) ownerOf(o Order) (owner *scopeReading, ok bool) {
	version, ok := k.versionOf(o.Version)
	if !ok {
		return nil, false
	}
	bucket := o.Bucket
	if bucket < 0 {
		bucket = reservation.BucketOf(k.sku.ActivityID, k.sku.SKUID, o.UserID, version.Count)
	}
	return k.byName[k.sku.scope(version, Bucket{ID: bucket})], true
}

// versionOf resolves an order's version; false when it names none and there
// are several.
func (k *skuReading) versionOf(number int64) (Version, bool) {
	if number < 0 {
		if len(k.sku.Versions) != 1 {
			return Version{}, false
		}
		return k.sku.Versions[0], true
	}
	for _, v := range k.sku.Versions {
		if v.Number == number {
			return v, true
		}
	}
	return Version{Number: number, Count: 1}, true
}

// registered says whether the registry has the bucket of the version.
func (v Version) registered(bucket int64) bool {
	for _, b := range v.Buckets {
		if b.ID == bucket {
			return true
		}
	}
	return false
}

// ambiguous is why orders that name no version cannot be counted.
func (k *skuReading) ambiguous(orders int64) error {
	return fmt.Errorf("%d orders name no activity_version, and %d versions of a:%s:s:%s are registered",
		orders, len(k.sku.Versions), k.sku.ActivityID, k.sku.SKUID)
}
