package reservation

// Op is one of the scripts that change a reservation (spec §4).
type Op string

// The operations of [Effect], each one script.
const (
	OpTransition Op = "transition"
	OpCompensate Op = "compensate"
	OpConfirm    Op = "confirm"
	OpReindex    Op = "reindex"
	OpUnindex    Op = "unindex"
	OpDefer      Op = "defer"
	OpRecordSend Op = "record_send"
)

// SendRecord is what record_send.lua is to note.
type SendRecord string

// The modes of record_send.lua.
const (
	RecordSend   SendRecord = "send"   // before a send
	RecordResend SendRecord = "resend" // one resend of a lost message more
	RecordStored SendRecord = "stored" // the position that the broker acknowledged
)

// Effect is one script call on a reservation. Only the fields that its Op
// reads are set. Every effect is idempotent, and its script checks again what
// the decision rested on, so that a stale or a second actor does no harm.
type Effect struct {
	Op    Op
	Scope Scope
	ID    string // the reservation_id

	To        Status     // OpTransition
	MessageID string     // OpTransition; empty: not compared
	OrderID   string     // OpTransition, OpConfirm
	ErrorCode string     // OpTransition
	Position  string     // OpTransition, OpRecordSend
	UserID    string     // OpCompensate
	Reason    string     // OpCompensate: the release_reason
	Index     Index      // OpDefer
	Expected  string     // OpDefer, OpRecordSend: the status that was read; see Expect…
	AtMS      int64      // OpDefer: the new score; OpTransition to SEND_UNKNOWN: the next retry
	Record    SendRecord // OpRecordSend
}

// What [Effect].Expected holds when it is not a status.
const (
	ExpectMissing = ""  // the hash must be gone
	ExpectAny     = "*" // the hash was not read, or not understood
)

// Result says what became of an effect.
type Result int

// The results of an effect.
const (
	// Failed: Applied.Err says why. Whether the script ran may be unknown.
	Failed  Result = iota
	Changed        // it took effect now
	Already        // it had taken effect before
	Refused        // the script found another state than the decision rested on, or wrong data (then with Applied.Err)
)

// Applied is an effect with its result.
type Applied struct {
	Effect Effect
	Result Result
	Code   string // the script's code by name
	Status Status // the reservation's status afterwards, where the script replies it
	Err    error  // with Failed, and with Refused for wrong data
}

// Done says whether the effect is in force.
func (o Applied) Done() bool { return o.Result == Changed || o.Result == Already }

// Defer is the effect of waiting: the member's score in index moves to atMS,
// never back, and only while the hash still shows what the decision saw.
func (m Member) Defer(index Index, atMS int64) Effect {
	expected := string(m.Reservation.Status)
	switch {
	case m.Missing:
		expected = ExpectMissing
	case m.Malformed != nil:
		expected = ExpectAny
	}
	return Effect{Op: OpDefer, Scope: m.Scope, ID: m.ID, Index: index, Expected: expected, AtMS: atMS}
}

// Effects are the script calls that carry the action out on m, in their order;
// index is the one through which m was found. [VerbSend] and [VerbResend] have
// none of their own, and those of [VerbRelease] hold only once the fence is won.
func (a Action) Effects(m Member, index Index, orders OrderEvidence) []Effect {
	on := func(op Op) Effect { return Effect{Op: op, Scope: m.Scope, ID: m.ID} }
	walk := func() []Effect {
		effects := make([]Effect, 0, len(a.Path)+1)
		for _, to := range a.Path {
			e := on(OpTransition)
			e.To = to
			if to == StatusOrderCreated {
				e.OrderID = orders.OrderID
			}
			effects = append(effects, e)
		}
		return effects
	}
	switch a.Verb {
	case VerbUnindex:
		return []Effect{on(OpUnindex)}
	case VerbWait:
		return []Effect{m.Defer(index, a.DeferMS)}
	case VerbConfirm:
		e := on(OpConfirm)
		e.OrderID = orders.OrderID
		return []Effect{e}
	case VerbAdvance:
		return walk()
	case VerbCompensate, VerbRelease:
		e := on(OpCompensate)
		e.UserID, e.Reason = m.Reservation.UserID, a.Cause
		return append(walk(), e)
	default:
		return nil
	}
}

// Page is a stretch of a scope's index: members that are due, with what their
// hashes showed, and the time of the scope's own Redis node before they were
// read.
type Page struct {
	Scope   Scope
	Index   Index
	NowMS   int64
	Members []Member
}

// NeedOrders are the ids of the page whose decision depends on P: those of rows
// 0 and 1 of [Decide] and of orphans do not.
func (p Page) NeedOrders() []string {
	var ids []string
	for _, m := range p.Members {
		if !m.Missing && m.Malformed == nil && !m.Reservation.Status.Terminal() {
			ids = append(ids, m.ID)
		}
	}
	return ids
}
