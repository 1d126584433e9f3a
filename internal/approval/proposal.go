// Package approval carries out what a person approves: the manual repairs of
// protocol §5.
//
// A repair is staged. [Approver.Propose] finds the reservations behind a task
// anew, from Redis and PostgreSQL by the task's kind and scope, and proposes
// one action for each, with the state of the world that it rests on; the
// proposals are kept. [Approver.Apply] reads both sides again, leaves alone
// what is no longer what was proposed and says what moved, and carries out the
// rest: through the fence wherever a unit could be given back, and with scripts
// that check their reason once more. Every application leaves two rows in the
// audit trail, one before anything is changed and one behind it.
//
// It decides with [reservation.Decide] wherever the table has an answer: a
// person's word only takes the place of a policy or of the evidence of a
// message, never that of a claim or an order.
package approval

import (
	"fmt"
	"strings"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

// Action is what is proposed for one reservation.
type Action string

// The actions.
const (
	// None: there is nothing to approve; Proposal.Why says why.
	None Action = "none"
	// Restore rebuilds the lost hash of a reservation whose order exists.
	Restore Action = "restore"
	// Adopt fences a reservation whose hash is lost, gives it a hash again and
	// gives its unit back.
	Adopt Action = "adopt"
	// Confirm makes a reservation that was to be released ORDER_CREATED: its
	// order exists. No stock moves.
	Confirm Action = "confirm"
	// Release fences a reservation and gives its unit back.
	Release Action = "release"
	// TakeUnit makes a RELEASED reservation whose order exists ORDER_CREATED
	// and takes a unit for it.
	TakeUnit Action = "take_unit"
	// Fence fences a reservation that leaked: no order can come for it any
	// more. No stock moves.
	Fence Action = "fence"
	// Recount replaces the numbers of a stopped scope by those that the evidence
	// calls for. Its proposal is about the scope, and its ID is the scope's tag.
	Recount Action = "recount"
)

// actionText says what an action does, for people.
var actionText = map[Action]string{
	Restore:  "rebuild its hash as ORDER_CREATED; if no other trace of it is left in Redis, its unit is taken again: available -1, reserved +1",
	Adopt:    "fence it, so that no order can come any more, rebuild its hash from its request and give its unit back: available +1, reserved -1",
	Confirm:  "ORDER_CREATED; no stock moves",
	Release:  "fence it, so that no order can come any more, and give its unit back: available +1, reserved -1",
	TakeUnit: "ORDER_CREATED, taking a unit for its order: available -1, reserved +1",
	Fence:    "fence it, so that no order can come any more; no stock moves: its unit comes back with the recount of the scope",
}

// text says what the proposed action does.
func (p Proposal) text() string {
	if p.Action == Recount && p.Expected.Recount != nil {
		return p.Expected.Recount.does()
	}
	return actionText[p.Action]
}

// ends is the status in which the action leaves the reservation.
var ends = map[Action]reservation.Status{
	Restore:  reservation.StatusOrderCreated,
	Adopt:    reservation.StatusReleased,
	Confirm:  reservation.StatusOrderCreated,
	Release:  reservation.StatusReleased,
	TakeUnit: reservation.StatusOrderCreated,
}

// endsAs says whether the action leaves the reservation in the status.
func (a Action) endsAs(status reservation.Status) bool {
	end, ends := ends[a]
	return ends && end == status
}

// movesStock says whether the action may change how many units are available.
func (a Action) movesStock() bool { return a != Confirm && a != None }

// World is what a proposal rests on. It names no user.
type World struct {
	Status  reservation.Status       `json:"status"`           // empty: the hash is gone
	Indexed bool                     `json:"indexed"`          // the hash is gone, and an index names it
	Orders  reservation.OrderState   `json:"orders"`           // P of protocol §2
	Cause   string                   `json:"cause,omitempty"`  // of a contradiction
	Claim   reservation.Outcome      `json:"claim"`            // empty: none
	OrderID string                   `json:"order_id"`         // empty: none
	Active  bool                     `json:"order_active"`     // false for a cancelled order
	Message reservation.MessageState `json:"message"`          // M, where the action rests on it
	Detail  string                   `json:"detail,omitempty"` // why M is not known
	// Newer is the reservation that the user's marker names instead, where that
	// one counts or may count.
	Newer   string      `json:"newer,omitempty"`
	Recount *Recounting `json:"recount,omitempty"` // of a scope
}

// moved says what differs between the world that was proposed on and the one
// that is; empty for no difference.
func (w World) moved(is World) string {
	var moved []string
	add := func(what string, was, is any) {
		if was != is {
			moved = append(moved, fmt.Sprintf("%s was %s, is %s", what, orNone(was), orNone(is)))
		}
	}
	add("status", w.Status, is.Status)
	add("evidence of orders", w.Orders, is.Orders)
	add("claim", w.Claim, is.Claim)
	add("order", w.OrderID, is.OrderID)
	add("order active", w.Active, is.Active)
	add("message", w.Message, is.Message)
	add("named by an index", w.Indexed, is.Indexed)
	add("the user's newer reservation", w.Newer, is.Newer)
	return strings.Join(moved, "; ")
}

func orNone(value any) string {
	if text := fmt.Sprint(value); text != "" {
		return text
	}
	return "none"
}

// Proposal is an action for one reservation behind a task.
type Proposal struct {
	Scope    reservation.Scope
	ID       string
	Action   Action
	Does     string // what the action does
	Why      string // why there is none
	Expected World
}

// Selection says which reservations behind a task are looked at.
type Selection struct {
	Reservation string // only this one; empty: all of the task's
	Max         int    // at most so many; 0: [DefaultMax]
}

// DefaultMax bounds the reservations of one proposal.
const DefaultMax = 100

// Plan is what is proposed for a task.
type Plan struct {
	Task      pgstore.Task
	Scope     reservation.Scope
	Selection Selection
	Proposals []Proposal
	Truncated bool // more reservations stand behind the task
	// Unclear counts those that could not be told to stand behind it, since
	// evidence is missing.
	Unclear int
}

// Act is who approves, and why.
type Act struct{ Actor, Reason string }

// Outcome is what became of one proposal.
type Outcome string

// The outcomes.
const (
	Applied Outcome = "applied" // carried out now
	Already Outcome = "already" // it was carried out before, by whomever
	Moved   Outcome = "moved"   // the world is no longer what was proposed: nothing done
	Refused Outcome = "refused" // it cannot be done now: nothing done, Detail says why
	Failed  Outcome = "failed"  // a dependency failed; whether it was done may be unknown
	Nothing Outcome = "nothing" // no action was proposed
)

// Values are the world and its stock at one moment.
type Values struct {
	World
	Stock *Stock `json:"stock"` // null: not read
}

// Stock is a scope's numbers. Other reservations move them too.
type Stock struct {
	Initial       int64 `json:"initial"`
	Available     int64 `json:"available"`
	Reserved      int64 `json:"reserved"`
	ReleasedTotal int64 `json:"released_total"`
}

// Result is one proposal with what became of it.
type Result struct {
	Proposal
	Outcome Outcome
	Detail  string
	Before  Values
	After   Values
}

// Report is what an approval did.
type Report struct {
	Plan     Plan
	Results  []Result
	Resolved bool // nothing is left behind the task: it was resolved
}

// Counts sums the results by outcome.
func (r Report) Counts() map[Outcome]int {
	counts := map[Outcome]int{}
	for _, one := range r.Results {
		counts[one.Outcome]++
	}
	return counts
}
