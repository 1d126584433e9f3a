package reservation

import "time"

// Verb is what a worker is to do with a member.
type Verb string

// The verbs of [Action].
const (
	VerbUnindex    Verb = "unindex"    // drop leftover index members of a decided reservation
	VerbWait       Verb = "wait"       // move the score forward; nothing else
	VerbConfirm    Verb = "confirm"    // RELEASE_PENDING or REJECTED with an order: confirm.lua
	VerbAdvance    Verb = "advance"    // walk Path
	VerbCompensate Verb = "compensate" // the claim allows it: walk Path, then compensate.lua
	VerbRelease    Verb = "release"    // fence; won: walk Path, then compensate.lua; lost: decide again
	VerbSend       Verb = "send"       // send the message, when the member is due in send_pending
	VerbResend     Verb = "resend"     // send a lost message again, same message_id
)

// Kinds of tasks that a decision opens, beside the causes of a contradiction.
const (
	TaskMalformed      = "malformed_reservation"
	TaskOrphanMember   = "orphan_member"
	TaskSendRefused    = "send_refused"
	TaskEvidenceStuck  = "evidence_stuck"
	TaskDeadLetter     = "dead_letter"
	TaskConfirmPending = "order_after_release_pending"
)

// Task asks for a person. Tasks are aggregated by (kind, scope, cause).
type Task struct {
	Kind  string
	Cause string
}

// RowOrphan is the row shown for a member whose hash is gone: protocol §3
// handles it beside the table.
const RowOrphan = -1

// Input is everything that a decision rests on.
type Input struct {
	Member   Member
	Orders   OrderEvidence   // P, read after Messages
	Messages MessageEvidence // M; only looked at where [NeedsMessages] says so
	NowMS    int64           // Redis TIME of the scope's node, read before the evidence
	Refusals int64           // how often the broker refused the message itself
	Policy   Policy
}

// Action is the decision: one row of the table of protocol §3.
type Action struct {
	Row   int // the row's number, or RowOrphan
	Verb  Verb
	Path  []Status // transition.lua targets to walk first
	Cause string   // why, a stable name: counted, shown, and the release_reason
	// DeferMS is the absolute time to which the member's score moves. For
	// VerbRelease, VerbCompensate and the like it is where the member goes if
	// the effect cannot be had; it is never in the past.
	DeferMS int64
	Task    *Task // nil: nobody needs to be asked
}

// NeedsMessages says whether the decision depends on M: the reservation could
// be released for want of an order, so PostgreSQL alone does not settle it.
func NeedsMessages(in Input) bool {
	m := in.Member
	if m.Missing || m.Malformed != nil || in.Orders.State != OrderNone {
		return false
	}
	expired := in.NowMS >= m.Reservation.ExpiresAtMS
	switch {
	case m.Reservation.Status == StatusEnqueued:
		return expired
	case m.Reservation.Status.Unsent():
		return expired && in.Policy.Unsent == UnsentRelease
	default:
		return false
	}
}

// Decide is the table of protocol §3: the first matching row wins. It does no
// I/O and reads no clock. Nothing else in this module decides what happens to
// a reservation.
func Decide(in Input) Action {
	m, r := in.Member, in.Member.Reservation
	switch {
	case m.Missing:
		return in.wait(RowOrphan, "hash_missing", &Task{TaskOrphanMember, "hash_missing"})
	case m.Malformed != nil:
		return in.wait(0, m.Malformed.Cause, &Task{TaskMalformed, m.Malformed.Error()})
	case r.Status.Terminal():
		return in.act(1, VerbUnindex, nil, "decided")
	}

	switch in.Orders.State {
	case OrderContradictory:
		return in.wait(2, in.Orders.Cause, &Task{in.Orders.Cause, in.Orders.Cause})
	case OrderExists, OrderRejected, OrderFenced, OrderNone:
	default: // OrderUnknown, and evidence that was never gathered
		return in.wait(2, orElse(in.Orders.Cause, "orders_not_read"), in.stuckTask("orders_unknown"))
	}

	if r.Status.Releasing() {
		return in.decideReleasing()
	}
	switch in.Orders.State {
	case OrderExists:
		a := in.act(6, VerbAdvance, Path(r.Status, StatusOrderCreated), "order_exists")
		if in.Orders.Cause == CauseOrderWithoutClaim {
			a.Task = &Task{CauseOrderWithoutClaim, CauseOrderWithoutClaim}
		}
		return a
	case OrderRejected:
		return in.act(7, VerbCompensate, Path(r.Status, StatusRejected), "rejected")
	case OrderFenced:
		return in.act(8, VerbCompensate, Path(r.Status, StatusReleasePending), orElse(in.Orders.Reason, "fenced"))
	}

	expired := in.NowMS >= r.ExpiresAtMS
	if r.Status.Unsent() {
		if in.Policy.Unsent == UnsentRelease && expired {
			return in.decideByMessage(true)
		}
		return in.decideUnsent()
	}
	if !expired {
		a := in.wait(10, "not_expired", nil)
		a.DeferMS = r.ExpiresAtMS
		return a
	}
	return in.decideByMessage(false)
}

// decideReleasing is rows 3 to 5: REJECTED and RELEASE_PENDING.
func (in Input) decideReleasing() Action {
	switch in.Orders.State {
	case OrderExists:
		if in.Policy.Confirm == ConfirmManual {
			return in.wait(3, "confirm_manual", &Task{TaskConfirmPending, "confirm_manual"})
		}
		return in.act(3, VerbConfirm, nil, "order_exists")
	case OrderNone:
		return in.act(4, VerbRelease, nil, orElse(in.Member.Reservation.ReleaseReason, "release_pending"))
	default:
		return in.act(5, VerbCompensate, nil, orElse(in.Orders.Reason, "claim_final"))
	}
}

// decideUnsent is row 9: RESERVED and SEND_UNKNOWN without a claim.
func (in Input) decideUnsent() Action {
	r := in.Member.Reservation
	if in.Refusals >= in.Policy.MaxRefusals {
		a := in.wait(9, "send_refused", &Task{TaskSendRefused, "message_refused"})
		a.DeferMS = in.after(in.Policy.BackoffMax)
		return a
	}
	graceEndsMS := r.ReservedAtMS + in.Policy.SendGrace.Milliseconds()
	if r.Status == StatusReserved && in.NowMS < graceEndsMS {
		a := in.wait(9, "send_grace", nil)
		a.DeferMS = graceEndsMS
		return a
	}
	a := in.act(9, VerbSend, nil, "unsent")
	a.DeferMS = in.after(in.Policy.Recheck)
	return a
}

// decideByMessage is rows 11 to 14: expired, and no claim. unsent is the
// policy `unsent: release`, which is row 9 and where an absent message is
// released without a resend.
func (in Input) decideByMessage(unsent bool) Action {
	r, m := in.Member.Reservation, in.Messages
	row := func(n int) int {
		if unsent {
			return 9
		}
		return n
	}
	settledMS := r.LastAttemptMS() + in.Policy.Settle.Milliseconds()
	switch m.State {
	case MessageAbsent, MessageConsumed:
		// A copy that was still on its way to the broker when the sweep passed
		// would be missed; the position of an older copy says nothing of it.
		if in.NowMS < settledMS {
			a := in.wait(row(11), "not_settled", in.stuckTask("not_settled"))
			a.DeferMS = max(settledMS, in.after(in.Policy.BackoffMin))
			return a
		}
	case MessageDead:
	case MessagePending:
		return in.wait(row(11), "message_pending", in.stuckTask("message_pending"))
	case MessageRetrying:
		return in.wait(row(11), "message_retrying", in.stuckTask("message_retrying"))
	default:
		cause := orElse(m.Cause, "messages_not_read")
		return in.wait(row(11), cause, in.stuckTask(cause))
	}

	release := []Status{StatusReleasePending}
	switch m.State {
	case MessageConsumed:
		return in.act(row(14), VerbRelease, release, "consumed_without_claim")
	case MessageDead:
		heldUntilMS := m.SinceMS + in.Policy.DeadLetterAfter.Milliseconds()
		if in.Policy.DeadLetter == DeadLetterHold && in.NowMS < heldUntilMS {
			a := in.wait(row(13), "dead_letter_held", &Task{TaskDeadLetter, "dead_letter"})
			a.DeferMS = min(a.DeferMS, max(heldUntilMS, in.after(in.Policy.BackoffMin)))
			return a
		}
		return in.act(row(13), VerbRelease, release, "dead_letter")
	default: // MessageAbsent
		if unsent {
			return in.act(9, VerbRelease, release, "unsent_absent")
		}
		if in.Policy.LostMessage == LostMessageResend && r.ResendCount < in.Policy.MaxResends {
			if in.Refusals >= in.Policy.MaxRefusals {
				return in.wait(12, "send_refused", &Task{TaskSendRefused, "message_refused"})
			}
			return in.act(12, VerbResend, nil, "message_lost")
		}
		return in.act(12, VerbRelease, release, "message_lost")
	}
}

// stuckTask escalates a wait that has outlasted the reservation's expiry by
// Policy.EscalateAfter.
func (in Input) stuckTask(cause string) *Task {
	stuckMS := in.Member.Reservation.ExpiresAtMS + in.Policy.EscalateAfter.Milliseconds()
	if in.NowMS < stuckMS {
		return nil
	}
	return &Task{TaskEvidenceStuck, cause}
}

func (in Input) act(row int, verb Verb, path []Status, cause string) Action {
	return Action{Row: row, Verb: verb, Path: path, Cause: cause, DeferMS: in.backoff()}
}

func (in Input) wait(row int, cause string, task *Task) Action {
	return Action{Row: row, Verb: VerbWait, Cause: cause, Task: task, DeferMS: in.backoff()}
}

func (in Input) backoff() int64 {
	return in.after(in.Policy.Backoff(in.Member.ID, in.Member.Reservation.RetryCount))
}

// after is at least a millisecond ahead: a score that does not move is due for ever.
func (in Input) after(d time.Duration) int64 { return in.NowMS + max(d.Milliseconds(), 1) }

func orElse(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}
