package reservation

import "time"

// OrderState is P of protocol §2: what PostgreSQL knows of a reservation.
type OrderState string

// The states of the order side. The zero value counts as [OrderUnknown].
const (
	OrderExists        OrderState = "ORDER"         // an order, active or cancelled, or a claim for one
	OrderRejected      OrderState = "REJECTED"      // the consumer refused to create one, for good
	OrderFenced        OrderState = "FENCED"        // none can be created any more
	OrderNone          OrderState = "NONE"          // neither claim nor order
	OrderUnknown       OrderState = "UNKNOWN"       // not read: error, time-out
	OrderContradictory OrderState = "CONTRADICTORY" // the two sides exclude each other: a person decides
)

// Outcome is the outcome of a claim.
type Outcome string

// The outcomes of a claim: whoever inserts first wins, and it never changes.
const (
	OutcomeOrder    Outcome = "ORDER"
	OutcomeRejected Outcome = "REJECTED"
	OutcomeFenced   Outcome = "FENCED"
)

// Claim is the row of reservation_claim. Absent columns are empty, or −1 for
// Version and Bucket.
type Claim struct {
	Outcome    Outcome
	ActivityID string
	SKUID      string
	Version    int64
	Bucket     int64
	UserID     string
	OrderID    string
	Reason     string
	ClaimedBy  string
	ClaimedAt  time.Time
}

// Order is one order of order_evidence, all its lines taken together. Version
// and Bucket are −1 where the adopter's tables have no such column.
type Order struct {
	OrderID     string
	RequestID   string
	ActivityID  string
	SKUID       string
	Version     int64
	Bucket      int64
	UserID      string
	Active      bool
	StatusKnown bool // false when active is NULL: held and reported, never guessed
	CreatedAt   time.Time
}

// Record is what one statement read from PostgreSQL for a reservation.
type Record struct {
	Claim  *Claim
	Orders []Order // one per order_id
}

// read says whether s is a finding rather than the want of one.
func (s OrderState) read() bool {
	return s == OrderExists || s == OrderRejected || s == OrderFenced || s == OrderNone
}

// OrderEvidence is P, with what a task or an explanation needs.
type OrderEvidence struct {
	State   OrderState
	OrderID string // of the order, or of the claim for it
	Active  bool   // false: cancelled; an inactive order is still an order
	Cause   string // names the contradiction, the failure, or order_without_claim
	Reason  string // the claim's reason, for FENCED and REJECTED
}

// Causes of contradictions; each is the kind of the task that it opens.
const (
	CauseOrderMissing       = "order_missing"        // claim ORDER without an order row
	CauseOrderAfterFence    = "order_after_fence"    // an order beside FENCED or REJECTED
	CauseDuplicateOrder     = "duplicate_order"      // two order ids under one reservation
	CauseOrderScopeMismatch = "order_scope_mismatch" // order or claim of another scope or user
	CauseUnknownOrderStatus = "unknown_order_status" // a status that the view does not map
	CauseOrderWithoutClaim  = "order_without_claim"  // no contradiction: reported beside ORDER
)

// UnknownOrders is the evidence of a read that failed.
func UnknownOrders(cause string) OrderEvidence {
	return OrderEvidence{State: OrderUnknown, Cause: cause}
}

// ClassifyOrders turns what PostgreSQL holds for a reservation into P
// (protocol §2). FENCED and REJECTED count whatever scope they name, since no
// order can be created under that id. userID may be empty when the
// reservation's hash is gone: then only the scope is compared.
func ClassifyOrders(s Scope, userID string, record Record) OrderEvidence {
	if cause := record.contradiction(s, userID); cause != "" {
		e := OrderEvidence{State: OrderContradictory, Cause: cause}
		if len(record.Orders) > 0 {
			e.OrderID, e.Active = record.Orders[0].OrderID, record.Orders[0].Active
		} else if record.Claim != nil {
			e.OrderID = record.Claim.OrderID
		}
		return e
	}
	switch claim := record.Claim; {
	case len(record.Orders) > 0:
		e := OrderEvidence{State: OrderExists, OrderID: record.Orders[0].OrderID, Active: record.Orders[0].Active}
		if claim == nil {
			e.Cause = CauseOrderWithoutClaim
		}
		return e
	case claim == nil:
		return OrderEvidence{State: OrderNone}
	case claim.Outcome == OutcomeRejected:
		return OrderEvidence{State: OrderRejected, Reason: claim.Reason}
	default:
		return OrderEvidence{State: OrderFenced, Reason: claim.Reason}
	}
}

// contradiction names what excludes each other in the record, or is empty.
func (record Record) contradiction(s Scope, userID string) string {
	claim, orders := record.Claim, record.Orders
	ordered := claim != nil && claim.Outcome == OutcomeOrder
	switch {
	case len(orders) > 1:
		return CauseDuplicateOrder
	case claim != nil && !claim.Outcome.known():
		return CauseUnknownOrderStatus
	case claim != nil && !ordered && len(orders) > 0:
		return CauseOrderAfterFence
	case ordered && len(orders) == 0:
		return CauseOrderMissing
	case len(orders) == 0:
		return ""
	default:
		return orders[0].contradiction(claim, s, userID)
	}
}

// contradiction names what is wrong with the one order of a reservation of s.
func (o Order) contradiction(claim *Claim, s Scope, userID string) string {
	switch {
	case !o.belongs(s, userID), claim != nil && !claim.belongs(s, userID):
		return CauseOrderScopeMismatch
	case claim != nil && claim.OrderID != "" && claim.OrderID != o.OrderID:
		return CauseDuplicateOrder
	case !o.StatusKnown:
		return CauseUnknownOrderStatus
	default:
		return ""
	}
}

func (o Outcome) known() bool {
	return o == OutcomeOrder || o == OutcomeRejected || o == OutcomeFenced
}

func (o Order) belongs(s Scope, userID string) bool {
	return sameScope(s, o.ActivityID, o.SKUID, o.Version, o.Bucket) && (userID == "" || o.UserID == userID)
}

func (c Claim) belongs(s Scope, userID string) bool {
	return sameScope(s, c.ActivityID, c.SKUID, c.Version, c.Bucket) && (userID == "" || c.UserID == "" || c.UserID == userID)
}

// sameScope compares what a row names with s; what it leaves out is no difference.
func sameScope(s Scope, activityID, skuID string, version, bucket int64) bool {
	return (activityID == "" || activityID == s.ActivityID) &&
		(skuID == "" || skuID == s.SKUID) &&
		(version < 0 || version == s.Version) &&
		(bucket < 0 || bucket == s.Bucket)
}

// MessageState is M of protocol §2: what RocketMQ knows of a message.
type MessageState string

// The states of the message side. The zero value counts as [MessageUnknown].
const (
	MessageUnknown  MessageState = "UNKNOWN"  // a broker, queue or page is missing
	MessagePending  MessageState = "PENDING"  // stored, not yet passed by the group
	MessageRetrying MessageState = "RETRYING" // waits for another delivery
	MessageDead     MessageState = "DEAD"     // in the dead-letter topic
	MessageConsumed MessageState = "CONSUMED" // passed by the group, in neither
	MessageAbsent   MessageState = "ABSENT"   // a complete sweep did not find it
)

// messageRank orders the states of several copies: the lowest wins.
var messageRank = map[MessageState]int{
	MessageUnknown: 0, "": 0, MessagePending: 1, MessageRetrying: 2,
	MessageDead: 3, MessageConsumed: 4, MessageAbsent: 5,
}

// MessageEvidence is M.
type MessageEvidence struct {
	State   MessageState
	SinceMS int64  // DEAD: the store time of the dead-letter record, on the broker's clock
	Cause   string // UNKNOWN: why, a stable name
	Detail  string // for people: broker, queue, offset
}

// Stronger is the one of two copies' evidence that counts (protocol §2): the
// first of UNKNOWN, PENDING, RETRYING, DEAD, CONSUMED, ABSENT. Of two dead
// copies the younger counts.
func (e MessageEvidence) Stronger(other MessageEvidence) MessageEvidence {
	a, b := messageRank[e.State], messageRank[other.State]
	if b < a || (a == b && other.SinceMS > e.SinceMS) {
		return other
	}
	return e
}

// UnknownMessages is the evidence of a sweep that could not be completed.
func UnknownMessages(cause string) MessageEvidence {
	return MessageEvidence{State: MessageUnknown, Cause: cause}
}
