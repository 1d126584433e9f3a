//go:build slow

package daemon_test

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// stuck is one way in which a reservation gets stuck.
type stuck struct {
	kind string
	want reservation.Status // its end, with a consumer at work
	// prepare leaves the evidence in PostgreSQL, walk the statuses in Redis.
	prepare func(s *sale, id string)
	walk    []reservation.Status
}

// everyKind lists the ways in which a reservation gets stuck without RocketMQ
// knowing of it. Sent messages come from [sale.sendAll].
var everyKind = []stuck{
	{"reserved, never sent", "ORDER_CREATED", nil, nil},
	{"send unknown, never sent", "ORDER_CREATED", nil, []reservation.Status{"SEND_UNKNOWN"}},
	{"reserved, index lost", "ORDER_CREATED", func(s *sale, id string) {
		s.redis.ZRem(s.t.Context(), s.scope.IndexKey(reservation.SendPending), id)
	}, nil},
	{"reserved, has an order", "ORDER_CREATED", (*sale).mustOrder, nil},
	{"send unknown, has an order", "ORDER_CREATED", (*sale).mustOrder, []reservation.Status{"SEND_UNKNOWN"}},
	{"enqueued, message lost", "ORDER_CREATED", nil, []reservation.Status{"ENQUEUED"}},
	{"enqueued, message lost, resent to the limit", "RELEASED", func(s *sale, id string) {
		s.redis.HSet(s.t.Context(), s.scope.ReservationKey(id), "resend_count", "3")
	}, []reservation.Status{"ENQUEUED"}},
	{"enqueued, has an order", "ORDER_CREATED", (*sale).mustOrder, []reservation.Status{"ENQUEUED"}},
	{"enqueued, fenced", "RELEASED", func(s *sale, id string) { s.claimed(id, "FENCED") }, []reservation.Status{"ENQUEUED"}},
	{"enqueued, rejected", "RELEASED", func(s *sale, id string) { s.claimed(id, "REJECTED") }, []reservation.Status{"ENQUEUED"}},
	{"marked rejected, no claim", "RELEASED", nil, []reservation.Status{"ENQUEUED", "REJECTED"}},
	{"marked rejected, has an order", "ORDER_CREATED", (*sale).mustOrder, []reservation.Status{"ENQUEUED", "REJECTED"}},
	{"release pending, no claim", "RELEASED", nil, []reservation.Status{"RELEASE_PENDING"}},
	{"release pending, fenced", "RELEASED", func(s *sale, id string) { s.claimed(id, "FENCED") }, []reservation.Status{"RELEASE_PENDING"}},
	{"release pending, has an order", "ORDER_CREATED", (*sale).mustOrder, []reservation.Status{"RELEASE_PENDING"}},
}

// stuckOne makes one reservation that is stuck in the given way.
func (s *sale) stuckOne(k stuck, ttl time.Duration) string {
	s.t.Helper()
	id := s.reserve(ttl)
	if k.prepare != nil {
		k.prepare(s, id)
	}
	s.walk(id, k.walk...)
	return id
}

// ends is how many reservations of each kind ended how, with the outcome of
// their claims: what two runs of the same sale must agree in.
func (s *sale) ends(byKind map[string][]string) map[string]int {
	s.t.Helper()
	all, err := s.census()
	if err != nil {
		s.t.Fatal(err)
	}
	ends := map[string]int{}
	for kind, ids := range byKind {
		for _, id := range ids {
			e := all[id]
			ends[fmt.Sprintf("%s: %s, claim %s, %d orders", kind, e.status, e.claim, e.orders)]++
		}
	}
	return ends
}

// wantEnds fails the test unless each reservation ended as its kind should.
func (s *sale) wantEnds(byKind map[string][]string) {
	s.t.Helper()
	for _, k := range everyKind {
		if err := s.is(k.want, byKind[k.kind]...); err != nil {
			s.t.Errorf("%s: %v", k.kind, err)
		}
	}
}

// statuses is the status of each reservation, from Redis alone.
func (s *sale) statuses(byKind map[string][]string) map[string]reservation.Status {
	s.t.Helper()
	statuses := map[string]reservation.Status{}
	for _, kind := range slices.Sorted(maps.Keys(byKind)) {
		for i, id := range byKind[kind] {
			statuses[fmt.Sprint(kind, " ", i)] = s.status(id)
		}
	}
	return statuses
}

// dropping makes a consumer that acknowledges these messages and does nothing.
func dropping(ids []string) func(id string) upstream.Fault {
	return func(id string) upstream.Fault {
		if slices.Contains(ids, id) {
			return upstream.Dropped
		}
		return upstream.None
	}
}
