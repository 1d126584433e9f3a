package reconcile

import (
	"context"
	"fmt"
	"slices"

	"github.com/seckill/reconciler/reservation"
)

// buffered is how many pages of E are held back while they are read, so that
// PostgreSQL is asked only after the reading of a usual scope has ended: the
// shorter that takes, the narrower the range of the deviation.
const buffered = 32

// count is one comparison of a SKU's scopes: a frozen view of the orders and
// the walk over the pages of E that falls into it. See the package comment for
// the order of the reads, which the ranges rest on.
type count struct {
	*reader
	sku    *skuReading
	orders Frozen
	scopes map[reservation.Scope]*tally
}

// tally is a scope in a count.
type tally struct {
	reading *scopeReading
	before  Stock

	active, cancelled, holding int64
	met                        map[string]struct{} // members of E with an active order
	uncertain                  map[string]struct{} // members of E whose order is not active
}

// compare reads both sides of the scopes once and narrows their ranges. With
// strays it also finds orders of scopes that are not registered.
func (r *reader) compare(ctx context.Context, k *skuReading, scopes []*scopeReading, strays bool) {
	scopes = readable(scopes)
	frozen, err := r.orders.Freeze(ctx)
	if err != nil {
		r.failOrders(k, scopes, err)
		return
	}
	defer frozen.Close()
	r.readStocks(ctx, scopes) // instant A
	scopes = readable(scopes)
	if len(scopes) == 0 && !strays {
		return
	}
	if err := frozen.Fix(ctx); err != nil { // instant T
		r.failOrders(k, scopes, err)
		return
	}
	c := &count{reader: r, sku: k, orders: frozen, scopes: map[reservation.Scope]*tally{}}
	for _, s := range scopes {
		c.scopes[s.scope] = &tally{
			reading: s, before: *s.stock, met: map[string]struct{}{}, uncertain: map[string]struct{}{},
		}
	}
	if err := c.readExpiry(ctx, scopes); err != nil { // and instant B
		r.failOrders(k, scopes, err)
		return
	}
	if err := c.countOrders(ctx, strays); err != nil {
		r.failOrders(k, scopes, err)
		return
	}
	for _, s := range readable(scopes) {
		c.scopes[s.scope].conclude()
	}
}

// failOrders notes that the orders could not be read. Without a scope to note
// it at, every asked one of the SKU is concerned: its strays are unknown.
func (r *reader) failOrders(k *skuReading, scopes []*scopeReading, err error) {
	if len(scopes) == 0 {
		scopes = k.where(func(s *scopeReading) bool { return s.full })
	}
	failAll(scopes, SourcePostgres, err)
}

// readExpiry walks the E of the scopes page by page, and takes their stocks
// again once all pages are read.
func (c *count) readExpiry(ctx context.Context, scopes []*scopeReading) error {
	requests := make([]PageRequest, 0, len(scopes))
	for _, s := range scopes {
		// Also where E was empty at A: what was reserved and ordered since is in T.
		requests = append(requests, PageRequest{Scope: s.scope, Limit: c.batch})
	}
	var held []Ref
	for len(requests) > 0 {
		var next []PageRequest
		for i, reply := range c.stocks.ExpiryPages(ctx, requests) {
			t := c.scopes[requests[i].Scope]
			if reply.Err != nil {
				t.reading.fail(SourceRedis, reply.Err.Error())
				continue
			}
			for _, id := range reply.IDs {
				held = append(held, Ref{requests[i].Scope, id})
			}
			if reply.Cursor != 0 {
				next = append(next, PageRequest{Scope: requests[i].Scope, Cursor: reply.Cursor, Limit: c.batch})
			}
		}
		requests = next
		if len(requests) > 0 && len(held) >= buffered*c.batch {
			if err := c.match(ctx, held); err != nil {
				return err
			}
			held = held[:0]
		}
	}
	c.readStocks(ctx, readable(scopes))
	return c.match(ctx, held)
}

// match finds the members that have orders in the scope that they are in.
func (c *count) match(ctx context.Context, members []Ref) error {
	for page := range slices.Chunk(members, c.batch) {
		ids := make([]string, 0, len(page))
		here := make(map[Ref]struct{}, len(page))
		for _, m := range page {
			if reservation.ValidateID(m.ID) == nil { // PostgreSQL cannot be asked for others, and has no order of theirs
				ids, here[m] = append(ids, m.ID), struct{}{}
			}
		}
		orders, err := c.orders.Match(ctx, ids)
		if err != nil {
			return err
		}
		for _, o := range orders {
			if o.ActivityID != c.sku.sku.ActivityID || o.SKUID != c.sku.sku.SKUID {
				continue
			}
			owner, _ := c.sku.ownerOf(o)
			if owner == nil {
				continue
			}
			if _, member := here[Ref{owner.scope, o.ReservationID}]; member {
				c.scopes[owner.scope].meet(o)
			}
		}
	}
	return nil
}

// meet notes that a member of E has an order.
func (t *tally) meet(o Order) {
	if o.Status == OrderActive {
		t.met[o.ReservationID] = struct{}{}
	} else {
		t.uncertain[o.ReservationID] = struct{}{}
	}
}

// countOrders counts O of every scope.
func (c *count) countOrders(ctx context.Context, strays bool) error {
	versions := c.versions(strays)
	counts, err := c.orders.Count(ctx, c.sku.sku.ActivityID, c.sku.sku.SKUID, versions)
	if err != nil {
		return err
	}
	walk := OrderWalk{ActivityID: c.sku.sku.ActivityID, SKUID: c.sku.sku.SKUID, Versions: versions, Limit: c.batch}
	rest := false // orders that a count of rows cannot settle
	for _, n := range counts {
		version, ok := c.sku.versionOf(n.Version)
		if !ok {
			return c.sku.ambiguous(n.Active + n.Cancelled + n.Unknown)
		}
		rest = rest || n.Cancelled+n.Unknown > 0
		bucket := n.Bucket
		if bucket < 0 {
			if version.Count > 1 {
				walk.Bucketless, rest = true, true
				continue
			}
			bucket = 0
		}
		if t := c.scopes[c.sku.sku.scope(version, Bucket{ID: bucket})]; t != nil {
			t.active += n.Active
		}
		if strays && !version.registered(bucket) {
			n.Version, n.Bucket = version.Number, bucket
			c.sku.strays = append(c.sku.strays, n)
		}
	}
	c.sku.straysRead = strays
	if c.needs.sold {
		if err := c.readSold(ctx, counts); err != nil {
			return err
		}
	}
	if !rest || len(c.scopes) == 0 {
		return nil
	}
	return c.orders.Walk(ctx, walk, func(page []Order) error { return c.countPage(ctx, page) })
}

// versions are those to count; nil is all.
func (c *count) versions(all bool) []int64 {
	if all && c.needs.allOrders {
		return nil
	}
	versions := []int64{}
	for _, t := range c.scopes {
		if v := t.reading.scope.Version; !slices.Contains(versions, v) {
			versions = append(versions, v)
		}
	}
	return versions
}

// countPage counts orders one by one: those without a bucket, whose place is
// their user's hash, and those that are not active, which hold a unit as long
// as their reservation does.
func (c *count) countPage(ctx context.Context, page []Order) error {
	var refs []Ref
	var orders []Order
	for _, o := range page {
		owner, ok := c.sku.ownerOf(o)
		if !ok {
			return c.sku.ambiguous(1)
		}
		if owner == nil {
			continue
		}
		t := c.scopes[owner.scope]
		switch {
		case t == nil:
		case o.Status == OrderActive:
			if o.Bucket < 0 && owner.version.Count > 1 {
				t.active++ // the others are counted already
			}
		default:
			refs = append(refs, Ref{owner.scope, o.ReservationID})
			orders = append(orders, o)
		}
	}
	if len(refs) == 0 {
		return nil
	}
	for i, reply := range c.stocks.Held(ctx, refs) {
		c.scopes[refs[i].Scope].add(orders[i], reply)
	}
	return nil
}

// add counts an order that is not active. An unknown status makes no
// difference while the reservation holds its unit; otherwise it would.
func (t *tally) add(o Order, reply HeldReply) {
	if o.Status == OrderCancelled {
		t.cancelled++
	}
	switch {
	case reply.Err != nil:
		t.reading.fail(SourceRedis, reply.Err.Error())
	case reply.Held:
		t.holding++
		if _, met := t.uncertain[o.ReservationID]; met {
			t.met[o.ReservationID] = struct{}{}
		}
	case o.Status == OrderUnknown:
		t.reading.fail(SourcePostgres, fmt.Sprintf(
			"the order of reservation %s has a status that order_evidence does not map: it may or may not hold a unit", o.ReservationID))
	}
}

// conclude narrows the reading's range by what this comparison found.
func (t *tally) conclude() {
	s := t.reading
	met := int64(len(t.met))
	outside := t.active + t.holding - met // |O outside E|
	a, b := t.before.finished()-outside, s.stock.finished()-outside
	lo, hi := min(a, b), max(a, b)
	if s.counted {
		s.moved = s.moved || s.active != t.active || s.canceled != t.cancelled
		// Both ranges hold the deviation, if it did not change in between.
		if l, h := max(lo, s.lo), min(hi, s.hi); l <= h {
			lo, hi = l, h
		}
	}
	s.counted, s.lo, s.hi = true, lo, hi
	s.active, s.canceled, s.holding, s.met = t.active, t.cancelled, t.holding, met
}
