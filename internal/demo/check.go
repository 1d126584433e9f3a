package demo

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/seckill/reconciler/reservation"
)

// Violation is a broken promise.
type Violation struct {
	Promise string `json:"promise"` // S1, S2, L1, L2, stock
	Scope   string `json:"scope"`   // tag; empty: the whole activity
	Subject string `json:"subject"` // a reservation or order id; empty: the scope
	Message string `json:"message"`
}

func (v Violation) String() string {
	text := v.Promise + ": " + v.Message
	if v.Subject != "" {
		text += " (" + v.Subject + ")"
	}
	if v.Scope != "" {
		text += " in " + v.Scope
	}
	return text
}

// Check says which promises of protocol.md the state breaks. At rest says
// whether everything has come to its end: then L1 and L2 must hold too. orphans
// are the ids of the reservations that are expected to wait for a person: none
// once the person has approved.
func (s *State) Check(atRest bool, orphans []string) []Violation {
	var all []Violation
	users := map[string]string{} // user → live reservation, over all buckets
	for i := range s.Scopes {
		c := checker{scope: &s.Scopes[i], users: users, atRest: atRest}
		c.safety()
		c.stock(reservation.Allocation(s.Activity.Total, s.Activity.Buckets)[i])
		if atRest {
			c.rest()
		}
		all = append(all, c.found...)
	}
	all = append(all, s.checkOrders()...)
	if atRest {
		all = append(all, s.checkOrphans(orphans)...)
	}
	slices.SortFunc(all, func(a, b Violation) int {
		return cmp.Or(cmp.Compare(a.Promise, b.Promise), cmp.Compare(a.Scope, b.Scope),
			cmp.Compare(a.Subject, b.Subject), cmp.Compare(a.Message, b.Message))
	})
	return all
}

// checker checks one scope.
type checker struct {
	scope  *ScopeState
	users  map[string]string
	atRest bool
	found  []Violation
}

func (c *checker) brokenf(promise, subject, format string, args ...any) {
	c.found = append(c.found, Violation{promise, c.scope.Scope.Tag(), subject, fmt.Sprintf(format, args...)})
}

// safety is S1 and the part of S2 that single reservations show. It holds at
// every moment, moving or not.
func (c *checker) safety() {
	for id, r := range c.scope.Reservations {
		final := r.Claim == reservation.OutcomeFenced || r.Claim == reservation.OutcomeRejected
		if r.Status == reservation.StatusReleased && !final {
			c.brokenf("S1", id, "RELEASED, but its claim is %s", orNone(string(r.Claim)))
		}
		if len(r.Orders) > 0 && (final || r.Status == reservation.StatusReleased) {
			c.brokenf("S1", id, "has an order, its claim is %s and its status %s", orNone(string(r.Claim)), orNone(string(r.Status)))
		}
		if len(r.Orders) > 1 {
			c.brokenf("S2", id, "has %d orders", len(r.Orders))
		}
		if r.Status == "" || r.Status == reservation.StatusReleased {
			continue
		}
		if other, live := c.users[r.UserID]; live {
			c.brokenf("S2", id, "user %s has another live reservation, %s", r.UserID, other)
		}
		c.users[r.UserID] = id
	}
}

// stock is what a scope's numbers promise. All of them are changed by one
// script at a time, so they hold at every moment; the hashes are counted
// later than the numbers, so released_total may only lag behind while things move.
func (c *checker) stock(initial int64) {
	s := c.scope
	if s.Initial != initial {
		c.brokenf("S2", "", "initial is %d, %d were allocated", s.Initial, initial)
	}
	if s.Initial != s.Available+s.Reserved {
		c.brokenf("S2", "", "initial %d is not available %d + reserved %d", s.Initial, s.Available, s.Reserved)
	}
	if s.Available < 0 || s.Reserved < 0 || s.ReleasedTotal < 0 {
		c.brokenf("S2", "", "available %d, reserved %d or released_total %d is negative", s.Available, s.Reserved, s.ReleasedTotal)
	}
	released := int64(s.ByStatus()[reservation.StatusReleased])
	if s.ReleasedTotal > released || (c.atRest && s.ReleasedTotal != released) {
		c.brokenf("S2", "", "released_total is %d, and %d reservations are RELEASED", s.ReleasedTotal, released)
	}
}

// rest is what holds once everything is decided.
func (c *checker) rest() {
	s := c.scope
	if open := s.count((*Reservation).Open); open > 0 {
		c.brokenf("L1", "", "%d reservations are undecided", open)
	}
	if d := s.Deviation(); d != 0 {
		c.brokenf("L2", "", "reserved is %d: %d orders and %d that wait for a person differ from it by %d",
			s.Reserved, s.Orders(), s.count((*Reservation).Orphan), d)
	}
	for id, r := range s.Reservations {
		switch {
		case r.Status == reservation.StatusOrderCreated && len(r.Orders) == 0:
			c.brokenf("L2", id, "ORDER_CREATED, but there is no order")
		case r.Status != reservation.StatusOrderCreated && len(r.Orders) > 0:
			c.brokenf("L2", id, "has an order, but its status is %s", orNone(string(r.Status)))
		case r.Status.Terminal() && r.Indexed:
			c.brokenf("L2", id, "decided, but still in an index")
		case len(r.Orders) > 0 && r.Claim != reservation.OutcomeOrder:
			c.brokenf("L2", id, "has an order, but its claim is %s", orNone(string(r.Claim)))
		case r.Claim == reservation.OutcomeOrder && len(r.Orders) == 0:
			c.brokenf("L2", id, "claimed for an order that does not exist")
		}
	}
}

// checkOrders is the order side's own sums, which hold at every moment.
func (s *State) checkOrders() []Violation {
	var found []Violation
	brokenf := func(subject, format string, args ...any) {
		found = append(found, Violation{Promise: "stock", Subject: subject, Message: fmt.Sprintf(format, args...)})
	}
	users := map[string]string{}
	for i := range s.Scopes {
		for _, r := range s.Scopes[i].Reservations {
			for _, o := range r.Orders {
				if other, has := users[o.UserID]; has && o.Active {
					brokenf(o.ID, "user %s has another order, %s", o.UserID, other)
				}
				users[o.UserID] = o.ID
			}
		}
	}
	if s.Sold != s.Active {
		brokenf("", "shop.stock has sold %d, and there are %d active orders", s.Sold, s.Active)
	}
	if s.Active > s.Activity.Total || s.Sold > s.Total {
		brokenf("", "oversold: %d orders for %d units", s.Active, s.Activity.Total)
	}
	for _, stray := range s.Strays {
		brokenf(stray, "belongs to no bucket of the activity")
	}
	return found
}

// checkOrphans: exactly those reservations wait for a person whose hashes were
// deleted and not yet approved, and a task asks for each scope's.
func (s *State) checkOrphans(expected []string) []Violation {
	var found []Violation
	got := s.Orphans()
	for _, id := range got {
		if !slices.Contains(expected, id) {
			found = append(found, Violation{Promise: "L1", Subject: id, Message: "its hash is gone: nobody deleted it, or its approval did not end it"})
		}
	}
	for _, id := range expected {
		if !slices.Contains(got, id) {
			found = append(found, Violation{Promise: "L1", Subject: id, Message: "its hash was deleted, and it does not wait for a person"})
		}
	}
	for i := range s.Scopes {
		scope := &s.Scopes[i]
		if n := scope.count((*Reservation).Orphan); n > 0 && scope.OrphanTasks == 0 {
			found = append(found, Violation{
				Promise: "L1", Scope: scope.Scope.Tag(),
				Message: fmt.Sprintf("%d reservations wait for a person, and no orphan_member task says so", n),
			})
		}
	}
	return found
}

func orNone(s string) string {
	if s == "" {
		return "none"
	}
	return s
}
