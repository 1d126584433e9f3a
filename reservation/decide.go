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
		return in.waitLong(RowOrphan, "hash_missing", &Task{TaskOrphanMember, "hash_missing"})
	case m.Malformed != nil:
		return in.waitLong(0, m.Malformed.Cause, &Task{TaskMalformed, m.Malformed.Error()})
	case r.Status.Terminal():
		return in.act(1, VerbUnindex, nil, "decided")
	case in.Orders.State == OrderContradictory:
		return in.wait(2, in.Orders.Cause, &Task{in.Orders.Cause, in.Orders.Cause})
	case !in.Orders.State.read():
		return in.wait(2, orElse(in.Orders.Cause, "orders_not_read"), in.stuckTask("orders_unknown"))
	case r.Status.Releasing():
		return in.decideReleasing()
	case in.Orders.State != OrderNone:
		return in.decideClaimed()
	case r.Status.Unsent():
		return in.decideUnsent()
	default:
		return in.decideEnqueued()
	}
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

// decideClaimed is rows 6 to 8: PostgreSQL has decided, and Redis follows.
func (in Input) decideClaimed() Action {
	status := in.Member.Reservation.Status
	switch in.Orders.State {
	case OrderRejected:
		return in.act(7, VerbCompensate, Path(status, StatusRejected), "rejected")
	case OrderFenced:
		return in.act(8, VerbCompensate, Path(status, StatusReleasePending), orElse(in.Orders.Reason, "fenced"))
	default:
		a := in.act(6, VerbAdvance, Path(status, StatusOrderCreated), "order_exists")
		if in.Orders.Cause == CauseOrderWithoutClaim {
			a.Task = &Task{CauseOrderWithoutClaim, CauseOrderWithoutClaim}
		}
		return a
	}
}

// decideUnsent is row 9: RESERVED and SEND_UNKNOWN without a claim.
func (in Input) decideUnsent() Action {
	r := in.Member.Reservation
	if in.Policy.Unsent == UnsentRelease && in.NowMS >= r.ExpiresAtMS {
		return in.decideByMessage(true)
	}
	if in.Refusals >= in.Policy.MaxRefusals {
		return in.waitLong(9, "send_refused", &Task{TaskSendRefused, "message_refused"})
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

// decideEnqueued is rows 10 to 14: ENQUEUED without a claim.
func (in Input) decideEnqueued() Action {
	if r := in.Member.Reservation; in.NowMS < r.ExpiresAtMS {
		a := in.wait(10, "not_expired", nil)
		a.DeferMS = r.ExpiresAtMS
		return a
	}
	return in.decideByMessage(false)
}

// decideByMessage is rows 11 to 14: expired, and no claim. unsent is the
// policy `unsent: release`, which is row 9 and where an absent message is
// released without a resend.
func (in Input) decideByMessage(unsent bool) Action {
	a := in.decideByState(unsent)
	if unsent {
		a.Row = 9
	}
	return a
}

func (in Input) decideByState(unsent bool) Action {
	m := in.Messages
	waits := func(cause string) Action { return in.wait(11, cause, in.stuckTask(cause)) }
	// A copy that was still on its way to the broker when the sweep passed
	// would be missed; the position of an older copy says nothing of it.
	settledMS := in.Member.Reservation.LastAttemptMS() + in.Policy.Settle.Milliseconds()
	if (m.State == MessageAbsent || m.State == MessageConsumed) && in.NowMS < settledMS {
		a := waits("not_settled")
		a.DeferMS = max(settledMS, in.after(in.Policy.BackoffMin))
		return a
	}
	switch m.State {
	case MessageAbsent:
		return in.decideAbsent(unsent)
	case MessageDead:
		return in.decideDead()
	case MessageConsumed:
		return in.act(14, VerbRelease, releasePath(), "consumed_without_claim")
	case MessagePending:
		return waits("message_pending")
	case MessageRetrying:
		return waits("message_retrying")
	case MessageUnknown:
		return waits(orElse(m.Cause, "messages_not_read"))
	default: // never gathered
		return waits("messages_not_read")
	}
}

// decideAbsent is row 12: a complete sweep did not find the message.
func (in Input) decideAbsent(unsent bool) Action {
	switch {
	case unsent:
		return in.act(9, VerbRelease, releasePath(), "unsent_absent")
	case in.Policy.LostMessage != LostMessageResend || in.Member.Reservation.ResendCount >= in.Policy.MaxResends:
		return in.act(12, VerbRelease, releasePath(), "message_lost")
	case in.Refusals >= in.Policy.MaxRefusals:
		return in.waitLong(12, "send_refused", &Task{TaskSendRefused, "message_refused"})
	default:
		return in.act(12, VerbResend, nil, "message_lost")
	}
}

// decideDead is row 13: the consumer gave the message up.
func (in Input) decideDead() Action {
	heldUntilMS := in.Messages.SinceMS + in.Policy.DeadLetterAfter.Milliseconds()
	if in.Policy.DeadLetter == DeadLetterHold && in.NowMS < heldUntilMS {
		a := in.wait(13, "dead_letter_held", &Task{TaskDeadLetter, "dead_letter"})
		a.DeferMS = min(a.DeferMS, max(heldUntilMS, in.after(in.Policy.BackoffMin)))
		return a
	}
	return in.act(13, VerbRelease, releasePath(), "dead_letter")
}

func releasePath() []Status { return []Status{StatusReleasePending} }

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

// waitLong is a wait without a count in the hash to grow by: nothing but a
// person changes what it waits for.
func (in Input) waitLong(row int, cause string, task *Task) Action {
	a := in.wait(row, cause, task)
	a.DeferMS = in.after(in.Policy.BackoffMax)
	return a
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
