package reservation

import "slices"

// Status is a reservation's place in the state machine (spec §3).
type Status string

// The statuses of a reservation.
const (
	StatusReserved       Status = "RESERVED"
	StatusSendUnknown    Status = "SEND_UNKNOWN"
	StatusEnqueued       Status = "ENQUEUED"
	StatusRejected       Status = "REJECTED"
	StatusReleasePending Status = "RELEASE_PENDING"
	StatusOrderCreated   Status = "ORDER_CREATED"
	StatusReleased       Status = "RELEASED"
)

// Statuses lists every status in the order in which a reservation may pass them.
var Statuses = []Status{
	StatusReserved, StatusSendUnknown, StatusEnqueued, StatusRejected,
	StatusReleasePending, StatusOrderCreated, StatusReleased,
}

// transitions are those that transition.lua makes. Two more edges exist for
// the scripts named in spec §3 alone: compensate.lua to RELEASED and
// confirm.lua to ORDER_CREATED, both from REJECTED and RELEASE_PENDING.
var transitions = map[Status][]Status{
	StatusReserved:    {StatusSendUnknown, StatusEnqueued, StatusReleasePending},
	StatusSendUnknown: {StatusEnqueued, StatusReleasePending},
	StatusEnqueued:    {StatusOrderCreated, StatusRejected, StatusReleasePending},
	StatusRejected:    {StatusReleasePending},
}

// Known says whether s is one of the contract's statuses.
func (s Status) Known() bool {
	switch s {
	case StatusReserved, StatusSendUnknown, StatusEnqueued, StatusRejected,
		StatusReleasePending, StatusOrderCreated, StatusReleased:
		return true
	}
	return false
}

// Terminal says whether no daemon or consumer leaves s again.
func (s Status) Terminal() bool { return s == StatusOrderCreated || s == StatusReleased }

// Releasing says whether s is compensated once the claim in PostgreSQL allows it.
func (s Status) Releasing() bool { return s == StatusRejected || s == StatusReleasePending }

// Unsent says whether nothing yet shows that the order message was stored.
func (s Status) Unsent() bool { return s == StatusReserved || s == StatusSendUnknown }

// CanTransition says whether transition.lua moves a reservation from one
// status to another. The same status is not a transition.
func CanTransition(from, to Status) bool {
	return slices.Contains(transitions[from], to)
}

// Path is the shortest sequence of transition.lua targets that leads from one
// status to another, without the start; nil when there is none. It is how the
// daemon walks RESERVED to ORDER_CREATED: → ENQUEUED → ORDER_CREATED.
func Path(from, to Status) []Status {
	type step struct {
		at   Status
		path []Status
	}
	seen := map[Status]bool{from: true}
	queue := []step{{at: from}}
	for len(queue) > 0 {
		current := queue[0]
		queue = queue[1:]
		for _, next := range transitions[current.at] {
			path := append(append([]Status(nil), current.path...), next)
			if next == to {
				return path
			}
			if !seen[next] {
				seen[next] = true
				queue = append(queue, step{next, path})
			}
		}
	}
	return nil
}
