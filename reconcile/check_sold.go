package reconcile

import (
	"context"
	"fmt"
)

// SoldCounter is PostgreSQL's own counter of a version's sold units: what the
// order side deducts from, in the same transaction as it creates an order. Its
// fields are the columns of the view seckill.stock_evidence.
type SoldCounter struct {
	Version int64
	Total   int64
	Sold    int64
}

// soldReading is the counters of a SKU beside its orders, of one snapshot.
type soldReading struct {
	counters []SoldCounter
	orders   map[int64]OrderCount // by version
}

// notMadeSold is why sold_mismatch was not made.
const notMadeSold = "not applicable: no row of the view seckill.stock_evidence says where the counter of sold units is"

// readSold reads the counters in the snapshot in which the orders were counted.
func (c *count) readSold(ctx context.Context, counts []OrderCount) error {
	counters, applies, err := c.orders.Sold(ctx, c.sku.sku.ActivityID, c.sku.sku.SKUID)
	if err != nil || !applies {
		return err
	}
	reading := &soldReading{counters: counters, orders: map[int64]OrderCount{}}
	for _, n := range counts {
		version, _ := c.sku.versionOf(n.Version) // ambiguous ones were refused before
		sum := reading.orders[version.Number]
		sum.Active, sum.Cancelled, sum.Unknown = sum.Active+n.Active, sum.Cancelled+n.Cancelled, sum.Unknown+n.Unknown
		reading.orders[version.Number] = sum
	}
	c.sku.sold = reading
	return nil
}

// mismatchedSold: the counter of sold units is the number of orders. An order
// that is not active may have given its unit back or not: this design has no
// way back from ORDER_CREATED, an adopter's may. So the counter lies between the
// active orders and all of them.
func mismatchedSold(k *skuReading) []contradiction {
	if k.sold == nil {
		return nil
	}
	var out []contradiction
	for _, counter := range k.sold.counters {
		at := k.first(counter.Version)
		if at == nil {
			continue
		}
		n := k.sold.orders[counter.Version]
		least, most := n.Active, n.Active+n.Cancelled+n.Unknown
		c := contradiction{
			check: CheckSoldMismatch, scope: at.scope,
			pg: map[string]any{"total": counter.Total, "sold": counter.Sold, "active": n.Active, "cancelled": n.Cancelled, "unknown_status": n.Unknown},
		}
		says := fmt.Sprintf("the counter says %d of %d units sold, and version %d has %d active and %d other orders", counter.Sold, counter.Total,
			counter.Version, n.Active, n.Cancelled+n.Unknown)
		switch {
		case counter.Sold < least:
			c.cause, c.lo, c.hi = "below", counter.Sold-least, counter.Sold-least
			c.message = fmt.Sprintf("%s: %d orders were not deducted, and their units can be sold again", says, least-counter.Sold)
		case counter.Sold > most:
			c.cause, c.lo, c.hi = "above", counter.Sold-most, counter.Sold-most
			c.message = fmt.Sprintf("%s: %d units were deducted for no order, and cannot be sold", says, counter.Sold-most)
		case counter.Sold > counter.Total:
			c.cause, c.lo, c.hi = "beyond_total", counter.Sold-counter.Total, counter.Sold-counter.Total
			c.message = says + ": more than there are"
		default:
			continue
		}
		out = append(out, c)
	}
	return out
}

// first is the first bucket of a version that was asked for and read.
func (k *skuReading) first(version int64) *scopeReading {
	for _, s := range k.scopes {
		if s.scope.Version == version && s.full && s.counted && !s.failed() {
			return s
		}
	}
	return nil
}

// soldCompared says whether the counter of a version was there to compare.
func (k *skuReading) soldCompared() bool {
	if k.sold == nil {
		return false
	}
	for _, counter := range k.sold.counters {
		if k.first(counter.Version) != nil {
			return true
		}
	}
	return false
}
