package reconcile

import (
	"fmt"
	"slices"
	"strings"

	"github.com/seckill/reconciler/reservation"
)

// view is what both sides say of one reservation of a scope.
type view struct {
	state    MemberState
	evidence reservation.OrderEvidence
	record   reservation.Record
	closed   bool // the version takes no reservations any more
	leaks    bool // units of the scope are reserved by nobody, or may be
}

func newView(state MemberState, record reservation.Record, reading *scopeReading) view {
	return view{
		state: state, record: record, closed: reading.closed(), leaks: !reading.counted || reading.deviation() > 0,
		evidence: reservation.ClassifyOrders(state.Scope, state.Reservation.UserID, record),
	}
}

// causes are the contradictions within PostgreSQL, each a check of its own.
var causes = map[string]string{
	reservation.CauseDuplicateOrder:     CheckDuplicateOrder,
	reservation.CauseOrderScopeMismatch: CheckOrderScopeMismatch,
	reservation.CauseUnknownOrderStatus: CheckUnknownOrderStatus,
	reservation.CauseOrderAfterFence:    CheckOrderAfterFence,
	reservation.CauseOrderMissing:       CheckOrderMissing,
}

// judge names what contradicts in a view. It reads nothing: the same view
// always gets the same answer. What stands in the way of everything else comes
// alone, so that one fault is one finding.
func judge(v view) []contradiction {
	m := v.state.Member
	if m.Malformed != nil {
		return []contradiction{v.found(CheckMalformedReservation, m.Malformed.Error(), "the hash is malformed: "+m.Malformed.Error())}
	}
	if check, contradicts := causes[v.evidence.Cause]; contradicts && v.evidence.State == reservation.OrderContradictory {
		if check == CheckOrderMissing && v.closed { // old orders may be archived
			return nil
		}
		return []contradiction{v.found(check, check, v.contradictory(check))}
	}
	var found []contradiction
	if v.evidence.Cause == reservation.CauseOrderWithoutClaim {
		found = append(found, v.found(CheckOrderWithoutClaim, v.evidence.OrderID, "order "+v.evidence.OrderID+" has no claim"))
	}
	if m.Missing {
		return append(found, judgeMissing(v)...)
	}
	found = append(found, judgeStatus(v)...)
	found = append(found, judgeIndexes(v)...)
	found = append(found, judgeMarker(v)...)
	found = append(found, judgeRequest(v)...)
	return append(found, judgeExpiry(v)...)
}

// judgeExpiry: each key of a reservation ends with its scope.
func judgeExpiry(v view) []contradiction {
	s := v.state
	var keys []string
	if s.NoExpiry {
		keys = append(keys, s.Scope.ReservationKey(s.ID))
	}
	if s.MarkerNoExpiry && s.Marker == s.ID { // one that names another is that one's
		keys = append(keys, s.Scope.UserKey("")+"…") // a user id is not shown
	}
	if len(keys) == 0 {
		return nil
	}
	c := v.found(CheckMissingTTL, strings.Join(keys, " "), "it never expires: "+strings.Join(keys, ", "))
	c.redis["keys"] = keys
	return []contradiction{c}
}

func (v view) contradictory(check string) string {
	claim := "no claim"
	if c := v.record.Claim; c != nil {
		claim = "a claim " + string(c.Outcome)
	}
	var ids []string
	for _, o := range v.record.Orders {
		ids = append(ids, o.OrderID)
	}
	return fmt.Sprintf("%s: %s and orders [%s]", check, claim, strings.Join(ids, " "))
}

// judgeMissing: the hash is gone.
func judgeMissing(v view) []contradiction {
	s := v.state
	indexed := s.InPending || s.InExpiry
	named := namesRequest(s.Request, s.ID)
	switch {
	case v.evidence.State == reservation.OrderExists && v.evidence.Active:
		c := v.lost("active", "active order "+v.evidence.OrderID+", and no reservation")
		c.redis["unit_deducted"] = indexed || named || s.Marker == s.ID // restore.lua asks the same
		return []contradiction{c}
	case v.evidence.State == reservation.OrderExists && (indexed || named || s.Marker == s.ID):
		return []contradiction{v.lost("cancelled", "cancelled order "+v.evidence.OrderID+" whose unit is still deducted, and no reservation")}
	case v.evidence.State == reservation.OrderExists: // the whole reserve was undone: it holds nothing
		return nil
	case indexed:
		return []contradiction{v.found(CheckOrphanMember, "hash_missing", "an index holds it, its hash is gone, and there is no order")}
	case named:
		return judgeLeaked(v)
	default: // not there at all
		return nil
	}
}

// judgeLeaked: nothing but a request result is left. Once no order can come for
// it, it matters only while units of its scope are held by nobody.
func judgeLeaked(v view) []contradiction {
	const what = "its request was accepted, its hash is gone, no index holds it, and "
	decided := v.evidence.State == reservation.OrderFenced || v.evidence.State == reservation.OrderRejected
	switch {
	case !decided:
		return []contradiction{v.found(CheckLeakedReservation, "hash_missing", what+"there is no order")}
	case v.leaks:
		return []contradiction{v.found(CheckLeakedReservation, "fenced", what+"no order can come any more: its unit may be one of those that nobody holds")}
	default:
		return nil
	}
}

// lost is a lost reservation. Its order must say whose it is, or a person has
// to (protocol §2).
func (v view) lost(cause, message string) contradiction {
	c := v.found(CheckLostReservation, cause, message)
	o := v.record.Orders[0]
	if reservation.ValidateID(o.UserID) != nil || reservation.ValidateID(o.RequestID) != nil {
		c.manual, c.message = true, message+"; restore_impossible: the order names no user or no request"
	}
	return c
}

// judgeStatus compares the status with what PostgreSQL has decided.
func judgeStatus(v view) []contradiction {
	status := v.state.Reservation.Status
	cause := string(status) + "/" + string(v.evidence.State)
	says := fmt.Sprintf("Redis says %s, PostgreSQL %s", status, v.evidence.State)
	decided := v.evidence.State == reservation.OrderFenced || v.evidence.State == reservation.OrderRejected
	switch {
	case v.evidence.State == reservation.OrderExists:
		return judgeOrdered(v, cause, says)
	case status == reservation.StatusOrderCreated:
		return []contradiction{v.found(CheckOrderCreatedWithoutOrder, cause, says)}
	case decided && status != reservation.StatusReleased:
		return []contradiction{v.found(CheckStatusBehind, cause, says)}
	case !decided && status == reservation.StatusReleased:
		return []contradiction{v.found(CheckReleaseWithoutClaim, cause, "RELEASED without a claim: an order could still be created")}
	default:
		return nil
	}
}

// judgeOrdered compares the status with an order.
func judgeOrdered(v view, cause, says string) []contradiction {
	switch r, order := v.state.Reservation, v.evidence; {
	case r.Status == reservation.StatusReleased && order.Active:
		return []contradiction{v.found(CheckOrderAfterRelease, cause, "RELEASED, and active order "+order.OrderID)}
	case r.Status == reservation.StatusReleased:
		return nil // cancelled: neither side holds a unit
	case r.Status.Releasing():
		return []contradiction{v.found(CheckOrderAfterReleasePending, cause, says)}
	case r.Status != reservation.StatusOrderCreated:
		return []contradiction{v.found(CheckStatusBehind, cause, says)}
	case r.OrderID != "" && r.OrderID != order.OrderID:
		return []contradiction{v.found(CheckDuplicateOrder, "redis:"+r.OrderID, "Redis names order "+r.OrderID+", PostgreSQL "+order.OrderID)}
	case !order.Active:
		return []contradiction{v.found(CheckCancelledHoldsStock, "cancelled", "cancelled order "+order.OrderID+" holds a unit")}
	default:
		return nil
	}
}

// judgeIndexes compares the status with the indexes. What PostgreSQL has
// decided leaves or enters them with its status.
func judgeIndexes(v view) []contradiction {
	m := v.state.Member
	status := m.Reservation.Status
	switch {
	case status.Terminal():
		if m.InPending || m.InExpiry {
			return []contradiction{v.found(CheckLeftoverMember, string(status), string(status)+", and still in an index")}
		}
	case v.evidence.State == reservation.OrderNone:
		var missing []string
		if !m.InExpiry {
			missing = append(missing, string(reservation.ReservationExpiry))
		}
		if status.Unsent() && !m.InPending {
			missing = append(missing, string(reservation.SendPending))
		}
		if len(missing) > 0 {
			where := strings.Join(missing, ", ")
			return []contradiction{v.found(CheckUnindexedReservation, where, string(status)+", and not in "+where)}
		}
	}
	return nil
}

// judgeMarker compares a reservation with its user's marker. Of cancelled
// orders, and of reservations that are about to be released, it says nothing.
func judgeMarker(v view) []contradiction {
	s := v.state
	if s.Reservation.Status == reservation.StatusReleased {
		if s.Marker == s.ID {
			c := v.found(CheckUserMarkerMismatch, "of_released", "the user's marker names it, and it is RELEASED")
			c.manual = true // no script removes a marker alone
			return []contradiction{c}
		}
		return nil
	}
	live := v.evidence.State == reservation.OrderNone || (v.evidence.State == reservation.OrderExists && v.evidence.Active)
	if !live || s.Marker == s.ID {
		return nil
	}
	if s.Marker == "" {
		return []contradiction{v.found(CheckUserMarkerMismatch, "none", "the user has no marker")}
	}
	return []contradiction{v.found(CheckUserMarkerMismatch, "names:"+s.Marker, "the user's marker names reservation "+s.Marker)}
}

// judgeRequest compares a live reservation with the result of its request. A
// result that is malformed is found where the shard is read.
func judgeRequest(v view) []contradiction {
	s := v.state
	if s.Reservation.Status == reservation.StatusReleased {
		return nil
	}
	c := v.found(CheckRequestResultMismatch, "", "")
	c.subject = s.Reservation.RequestID
	switch parts := splitResult(s.Request); {
	case s.Request == "":
		c.cause, c.message = "none", "reservation "+s.ID+" has no request result"
	case parts == nil: // another finding
		return nil
	case parts[0] != "0" || parts[1] != s.ID || parts[4] != s.Reservation.UserID:
		c.cause, c.message = "other", "the request result is not that of reservation "+s.ID
	default:
		return nil
	}
	return []contradiction{c}
}

// judgeResult compares one request result with the contract.
func judgeResult(r RequestResult) []contradiction {
	c := contradiction{
		check: CheckRequestResultMismatch, scope: r.Scope, subject: r.RequestID, redis: map[string]any{"shard": r.Shard, "value": r.Value},
	}
	switch {
	case reservation.RequestShard(r.RequestID) != r.Shard:
		c.cause, c.message = fmt.Sprint("shard:", r.Shard), fmt.Sprintf("the request result is in shard %03d and belongs into %03d", r.Shard, reservation.RequestShard(r.RequestID))
	case splitResult(r.Value) == nil:
		c.cause, c.message = "malformed", fmt.Sprintf("the request result %.80q is none", r.Value)
	default:
		return nil
	}
	return []contradiction{c}
}

// splitResult splits code|reservation_id|remaining|status|user_id (spec §2);
// nil when it is none.
func splitResult(value string) []string {
	parts := strings.Split(value, "|")
	if len(parts) != 5 || parts[4] == "" {
		return nil
	}
	if _, err := reservation.ParseNumber(parts[0]); err != nil {
		return nil
	}
	if parts[0] == "0" && reservation.ValidateID(parts[1]) != nil {
		return nil
	}
	return parts
}

// namesRequest says whether a request result accepted the reservation.
func namesRequest(value, id string) bool {
	parts := splitResult(value)
	return parts != nil && parts[0] == "0" && parts[1] == id
}

// found makes a contradiction of the view.
func (v view) found(check, cause, message string) contradiction {
	return contradiction{
		check: check, scope: v.state.Scope, subject: v.state.ID, cause: cause, message: message,
		redis: v.redis(), pg: v.postgres(),
	}
}

// redis is the Redis side as evidence; user ids are not shown.
func (v view) redis() map[string]any {
	s := v.state
	out := map[string]any{"hash": !s.Missing, "send_pending": s.InPending, "reservation_expiry": s.InExpiry}
	for name, value := range map[string]string{
		"status": string(s.Reservation.Status), "order_id": s.Reservation.OrderID, "request_id": s.Reservation.RequestID, "user_marker": s.Marker,
	} {
		if value != "" {
			out[name] = value
		}
	}
	return out
}

// postgres is the PostgreSQL side as evidence.
func (v view) postgres() map[string]any {
	out := map[string]any{"state": v.evidence.State, "claim": nil}
	if c := v.record.Claim; c != nil {
		out["claim"] = c.Outcome
	}
	if len(v.record.Orders) > 0 {
		var ids []string
		for _, o := range v.record.Orders {
			ids = append(ids, o.OrderID)
		}
		slices.Sort(ids)
		out["orders"], out["active"] = ids, v.evidence.Active
	}
	return out
}
