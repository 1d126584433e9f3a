package reconcile

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/reservation"
)

// contradiction is what one round saw of a possible finding.
type contradiction struct {
	check   string
	scope   reservation.Scope
	subject string // the reservation or request; empty: the scope
	cause   string // contradictions of different causes are different ones
	lo, hi  int64  // by how much the sides differ, where that is a number; both bounds included
	message string
	manual  bool // this one is not repaired automatically, whatever its check
	redis   map[string]any
	pg      map[string]any
}

// same says whether two rounds saw the same contradiction.
func (c contradiction) same(other contradiction) bool {
	return c.cause == other.cause && max(c.lo, other.lo) <= min(c.hi, other.hi)
}

// alike says whether two rounds saw contradictions of one cause and direction.
func (c contradiction) alike(other contradiction) bool {
	return c.cause == other.cause && (c.lo > 0) == (other.lo > 0) && (c.hi < 0) == (other.hi < 0)
}

// missingConfig: a scope that Redis was seen to hold lacks keys (protocol §4).
func missingConfig(k *skuReading) []contradiction {
	var out []contradiction
	for _, s := range k.scopes {
		if len(s.missing) == 0 || !s.bucket.Confirmed {
			continue
		}
		out = append(out, contradiction{
			check: CheckConfigMissing, scope: s.scope, cause: strings.Join(s.missing, ","),
			message: "the scope is registered and was confirmed, but Redis has no " + strings.Join(s.missing, ", "),
			redis:   map[string]any{"missing": s.missing},
			pg:      map[string]any{"confirmed": true},
		})
	}
	return out
}

// brokenInvariant: initial = available + reserved, none negative.
func brokenInvariant(k *skuReading) []contradiction {
	var out []contradiction
	for _, s := range k.scopes {
		if !s.full {
			continue
		}
		c := contradiction{check: CheckInvariantBroken, scope: s.scope}
		switch {
		case s.malformed != "":
			c.cause, c.message = s.malformed, s.malformed
			c.redis = map[string]any{"malformed": s.malformed}
		case s.stock == nil || len(s.stock.missing()) > 0:
			continue
		default:
			var broken bool
			if c, broken = invariant(s.scope, *s.stock); !broken {
				continue
			}
		}
		out = append(out, c)
	}
	return out
}

// invariant says what is wrong with a stock, if something is.
func invariant(scope reservation.Scope, stock Stock) (c contradiction, broken bool) {
	c = contradiction{check: CheckInvariantBroken, scope: scope}
	difference := stock.Initial - stock.Available - stock.Reserved
	var negative []string
	for _, f := range []struct {
		name  string
		value int64
	}{
		{"initial", stock.Initial}, {"available", stock.Available}, {"reserved", stock.Reserved}, {"released_total", stock.ReleasedTotal},
	} {
		if f.value < 0 {
			negative = append(negative, f.name)
		}
	}
	switch {
	case difference != 0:
		c.cause, c.lo, c.hi = "sum", difference, difference
		c.message = fmt.Sprintf("initial %d is not available %d + reserved %d", stock.Initial, stock.Available, stock.Reserved)
	case len(negative) > 0:
		c.cause = "negative:" + strings.Join(negative, ",")
		c.message = strings.Join(negative, ", ") + " below zero"
	default:
		return c, false
	}
	c.redis = map[string]any{
		"initial": stock.Initial, "available": stock.Available, "reserved": stock.Reserved, "released_total": stock.ReleasedTotal,
	}
	return c, true
}

// mismatchedAllocation: Σ initial over the buckets of a version + in transit =
// allocated. It is judged only when every bucket could be read.
func mismatchedAllocation(k *skuReading) []contradiction {
	var out []contradiction
	for _, v := range k.sku.Versions {
		if c, found := allocation(k, v); found {
			out = append(out, c)
		}
	}
	return out
}

// errNotAllRead says that a version's buckets cannot be summed up.
var errNotAllRead = errors.New("not every bucket of the version was read")

// initialOfAll sums up the initial stocks of a version's buckets.
func (k *skuReading) initialOfAll(v Version) (int64, error) {
	var sum int64
	for _, b := range v.Buckets {
		s := k.byName[k.sku.scope(v, b)]
		if s == nil || s.stock == nil || s.stock.Initial == Missing {
			return 0, errNotAllRead
		}
		sum += s.stock.Initial
	}
	if int64(len(v.Buckets)) != v.Count {
		return 0, errNotAllRead
	}
	return sum, nil
}

// differing is the bucket that a finding about a version names: of those that
// were asked for, the first whose initial stock is not the expected one, if there
// is one.
func (k *skuReading) differing(v Version) *scopeReading {
	var first *scopeReading
	for _, b := range v.Buckets {
		s := k.byName[k.sku.scope(v, b)]
		if s == nil || !s.full || s.stock == nil {
			continue
		}
		if s.stock.Initial != k.expected(v, b) {
			return s
		}
		if first == nil {
			first = s
		}
	}
	return first
}

func allocation(k *skuReading, v Version) (contradiction, bool) {
	at := k.differing(v)
	if at == nil || k.unread[v.Number] {
		return contradiction{}, false
	}
	var sum, inTransit int64
	var err error
	if books, journalled := k.books[v.Number]; journalled {
		if books.Check() != nil || waiting(books) > 0 {
			return contradiction{}, false // transfer_conflict says it, alone
		}
		sum, inTransit = books.Initial(), books.InTransit()
	} else {
		sum, err = k.initialOfAll(v)
	}
	if err != nil {
		return contradiction{}, false
	}
	difference := sum + inTransit - v.Allocated
	if difference == 0 {
		return contradiction{}, false
	}
	return contradiction{
		check: CheckAllocationMismatch, scope: at.scope, cause: "sum", lo: difference, hi: difference,
		message: fmt.Sprintf("the initial stocks of %d buckets are %d units and %d are in transit, but %d were allocated to version %d",
			v.Count, sum, inTransit, v.Allocated, v.Number),
		redis: map[string]any{"initial_of_all_buckets": sum, "in_transit": inTransit, "initial": at.stock.Initial},
		pg:    map[string]any{"allocated": v.Allocated, "buckets": v.Count, "initial": k.expected(v, at.bucket)},
	}, true
}

// countDrift: reserved = |E| + |O| − |E ∩ O|, as far as the range tells.
func countDrift(k *skuReading) []contradiction {
	var out []contradiction
	for _, s := range k.scopes {
		if !s.counted || s.failed() || (s.lo <= 0 && s.hi >= 0) {
			continue
		}
		what := "units are reserved by no reservation and no order"
		if s.hi < 0 {
			what = "units have a reservation or an order and are not reserved"
		}
		out = append(out, contradiction{
			check: CheckCountDrift, scope: s.scope, cause: "deviation", lo: s.lo, hi: s.hi,
			message: fmt.Sprintf("deviation %+d: %s", s.deviation(), what),
			redis: map[string]any{
				"reserved": s.stock.Reserved, "reservation_expiry": s.stock.Expiry,
				"deviation_min": s.lo, "deviation_max": s.hi,
			},
			pg: map[string]any{
				"active": s.active, "cancelled": s.canceled, "cancelled_holding_a_unit": s.holding, "still_in_reservation_expiry": s.met,
			},
		})
	}
	return out
}

// deviation is the range's value nearest to zero: as much as is certain.
func (s *scopeReading) deviation() int64 {
	return max(s.lo, min(s.hi, 0))
}

// unregisteredScopes: orders that name a version or bucket that the registry
// does not have.
func unregisteredScopes(k *skuReading) []contradiction {
	out := make([]contradiction, 0, len(k.strays))
	for _, n := range k.strays {
		scope := k.sku.scope(Version{Number: n.Version}, Bucket{ID: n.Bucket})
		out = append(out, contradiction{
			check: CheckUnregisteredScope, scope: scope, cause: "orders",
			message: fmt.Sprintf("%d orders name a scope that is not registered: nothing reconciles or recovers it", n.Active+n.Cancelled+n.Unknown),
			pg:      map[string]any{"active": n.Active, "cancelled": n.Cancelled, "unknown_status": n.Unknown},
		})
	}
	return out
}

// oversoldVersions: more active orders than units. It is judged only where every
// bucket of the version was counted.
func oversoldVersions(k *skuReading) []contradiction {
	var out []contradiction
	for _, v := range k.sku.Versions {
		var active int64
		counted := int64(0)
		var at *scopeReading // the bucket that sold most beyond its part
		for _, b := range v.Buckets {
			s := k.byName[k.sku.scope(v, b)]
			if s == nil || !s.full || !s.counted || s.failed() {
				continue
			}
			counted++
			active += s.active
			if at == nil || s.active-k.expected(v, b) > at.active-k.expected(v, at.bucket) {
				at = s
			}
		}
		if counted != v.Count || active <= v.Allocated {
			continue
		}
		out = append(out, contradiction{
			check: CheckOversold, scope: at.scope, cause: "active", lo: active - v.Allocated, hi: active - v.Allocated,
			message: fmt.Sprintf("%d active orders of version %d, which has %d units", active, v.Number, v.Allocated),
			pg:      map[string]any{"active": active, "allocated": v.Allocated},
		})
	}
	return out
}

// statesAhead are the states in Redis that a registered state rules out: the
// control plane writes both, and a failover may undo only the one in Redis.
var statesAhead = map[string][]string{
	"ACTIVE": {"PREPARED"},
	"PAUSED": {"PREPARED", "ACTIVE"},
	"CLOSED": {"PREPARED", "ACTIVE", "PAUSED"},
}

// regressedStates: a failover undid PAUSED or CLOSED (protocol §5).
func regressedStates(k *skuReading) []contradiction {
	var out []contradiction
	for _, s := range k.scopes {
		if !s.full || !slices.Contains(statesAhead[s.bucket.State], s.state) {
			continue
		}
		out = append(out, contradiction{
			check: CheckStateRegressed, scope: s.scope, cause: s.bucket.State + ">" + s.state,
			message: fmt.Sprintf("the scope is %s in the registry and %s in Redis", s.bucket.State, s.state),
			redis:   map[string]any{"state": s.state}, pg: map[string]any{"state": s.bucket.State},
		})
	}
	return out
}

// retentionRisk is how long before the end of its retention a scope should
// have nothing undecided any more.
const retentionRisk = 6 * time.Hour

// retentionRisks: undecided reservations whose keys expire soon.
func retentionRisks(k *skuReading) []contradiction {
	var out []contradiction
	for _, s := range k.scopes {
		if !s.full || s.stock == nil || s.stock.Expiry == 0 || s.retentionMS <= 0 || s.nowMS <= 0 {
			continue
		}
		left := time.Duration(s.retentionMS-s.nowMS) * time.Millisecond
		if left > retentionRisk {
			continue
		}
		out = append(out, contradiction{
			check: CheckRetentionRisk, scope: s.scope, cause: "undecided",
			message: fmt.Sprintf("%d reservations are undecided, and their keys expire in %s", s.stock.Expiry, left.Round(time.Minute)),
			redis:   map[string]any{"reservation_expiry": s.stock.Expiry, "retention_until_ms": s.retentionMS},
		})
	}
	return out
}
