package scanner

import (
	"context"
	"sync"
	"time"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// TaskSendBlocked asks a person to look at RocketMQ: nothing can be sent, and
// nothing is released for it, however long it takes.
const TaskSendBlocked = "send_blocked"

// Sender sends order messages, one result for each reservation in the same
// order. It makes each send at most once.
type Sender interface {
	Send(ctx context.Context, reservations []reservation.Reservation) []reservation.SendResult
}

// Dispatcher sends the messages of reservations so that every send is on
// record before it is made: a message that the broker stores late is then
// known to have been possible (protocol §4).
type Dispatcher struct {
	Effects pass.Effects
	Sender  Sender
	Actor   *pass.Actor
	// RefusalsKept is how long a refusal counts: beyond it the message is tried
	// again, since the broker's limit may have been raised meanwhile.
	RefusalsKept time.Duration

	mu       sync.Mutex
	refusals map[string]refusal
}

// refusal is how often a message was refused, and when last.
type refusal struct {
	count int64
	last  time.Time
}

// maxRefusalsKept bounds the memory of refused messages; beyond it counting
// starts anew, which costs some more refused sends and nothing else.
const maxRefusalsKept = 100_000

// Refusals says how often the message itself was refused lately.
func (d *Dispatcher) Refusals(id string) int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	r, known := d.refusals[id]
	if known && time.Since(r.last) >= d.RefusalsKept {
		delete(d.refusals, id)
		return 0
	}
	return r.count
}

func (d *Dispatcher) refused(id string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.refusals == nil || len(d.refusals) >= maxRefusalsKept {
		d.refusals = map[string]refusal{}
	}
	d.refusals[id] = refusal{d.refusals[id].count + 1, time.Now()}
}

// sent is a case whose send was recorded, with its result.
type sent struct {
	pass.Case
	reservation.SendResult
}

// Send sends what was never acknowledged (row 9): stored → ENQUEUED, unknown →
// SEND_UNKNOWN with backoff. What was certainly not stored keeps its status
// and waits. It reports whether RocketMQ took any message at all.
func (d *Dispatcher) Send(ctx context.Context, cases []pass.Case, tally *pass.Tally) (available bool) {
	var chains [][]reservation.Effect
	var waiting []pass.Case
	results := d.send(ctx, cases, tally)
	for _, s := range results {
		m := s.Member()
		transition := reservation.Effect{
			Op: reservation.OpTransition, Scope: m.Scope, ID: m.ID, MessageID: m.Reservation.MessageID,
		}
		switch s.Outcome {
		case reservation.SendStored:
			transition.To, transition.Position = reservation.StatusEnqueued, s.Position
			chains = append(chains, []reservation.Effect{transition})
		case reservation.SendRefused, reservation.SendUnavailable:
			waiting = append(waiting, s.Case)
		default:
			transition.To, transition.ErrorCode = reservation.StatusSendUnknown, s.Cause
			transition.AtMS = s.Input.NowMS + s.Input.Policy.Backoff(m.ID, m.Reservation.SendCount).Milliseconds()
			chains = append(chains, []reservation.Effect{transition})
		}
		d.count(s, pass.DoneSent, tally)
	}
	d.apply(ctx, chains, tally)
	d.wait(ctx, waiting, tally)
	return takes(results)
}

// Resend sends messages that were proved lost (row 12), with the same
// message_id. A resend counts towards max_resends only if the broker took it
// or may have: with RocketMQ busy or away nothing is capped, and so nothing is
// released for it.
func (d *Dispatcher) Resend(ctx context.Context, cases []pass.Case, tally *pass.Tally) {
	var chains [][]reservation.Effect
	var waiting []pass.Case
	for _, s := range d.send(ctx, cases, tally) {
		d.count(s, pass.DoneResent, tally)
		waiting = append(waiting, s.Case)
		if s.Outcome == reservation.SendUnavailable || s.Outcome == reservation.SendRefused {
			continue
		}
		m := s.Member()
		note := reservation.Effect{
			Op: reservation.OpRecordSend, Scope: m.Scope, ID: m.ID,
			Expected: string(m.Reservation.Status), Record: reservation.RecordResend,
		}
		chain := []reservation.Effect{note}
		if s.Outcome == reservation.SendStored {
			note.Record, note.Position = reservation.RecordStored, s.Position
			chain = append(chain, note)
		}
		chains = append(chains, chain)
	}
	d.apply(ctx, chains, tally)
	d.wait(ctx, waiting, tally)
}

// send records the sends and makes those that could be recorded.
func (d *Dispatcher) send(ctx context.Context, cases []pass.Case, tally *pass.Tally) []sent {
	if d.Actor.Observe || len(cases) == 0 {
		return nil
	}
	chains := make([][]reservation.Effect, len(cases))
	for i, c := range cases {
		m := c.Member()
		chains[i] = []reservation.Effect{{
			Op: reservation.OpRecordSend, Scope: m.Scope, ID: m.ID,
			Expected: string(m.Reservation.Status), Record: reservation.RecordSend,
		}}
	}
	var recorded []pass.Case
	var reservations []reservation.Reservation
	for i, applied := range d.Effects.Apply(ctx, chains) {
		if applied[0].Result != reservation.Changed {
			// Decided meanwhile, or not on record: not sent, and still due.
			tally.Failed(applied[0].Err)
			continue
		}
		recorded = append(recorded, cases[i])
		reservations = append(reservations, message(cases[i].Member()))
	}
	if len(recorded) == 0 {
		return nil
	}
	results := d.Sender.Send(ctx, reservations)
	all := make([]sent, len(recorded))
	for i, c := range recorded {
		all[i] = sent{c, results[i]}
	}
	return all
}

// message is the reservation with the scope that its key proves: the hash of
// an old gateway may lack the fields.
func message(m reservation.Member) reservation.Reservation {
	r := m.Reservation
	r.ActivityID, r.SKUID, r.Version, r.Bucket = m.Scope.ActivityID, m.Scope.SKUID, m.Scope.Version, m.Scope.Bucket
	return r
}

func (d *Dispatcher) count(s sent, stored string, tally *pass.Tally) {
	m := s.Member()
	switch s.Outcome {
	case reservation.SendStored:
		tally.Did(stored, 1)
	case reservation.SendRefused:
		tally.Did(pass.DoneSendRefused, 1)
		d.refused(m.ID)
	case reservation.SendUnavailable:
		tally.Did(pass.DoneSendBlocked, 1)
		tally.Task(m.Scope, TaskSendBlocked, s.Cause, m.ID)
	default:
		tally.Did(pass.DoneSendUnknown, 1)
	}
}

// apply notes in Redis what became of sends. A note that cannot be written
// leaves the member due, and it is sent again with the same message_id.
func (d *Dispatcher) apply(ctx context.Context, chains [][]reservation.Effect, tally *pass.Tally) {
	for _, applied := range d.Effects.Apply(ctx, chains) {
		for _, a := range applied {
			tally.Failed(a.Err)
		}
	}
}

// wait defers the cases with backoff.
func (d *Dispatcher) wait(ctx context.Context, cases []pass.Case, tally *pass.Tally) {
	for i := range cases {
		in := &cases[i].Input
		cases[i].Action.DeferMS = in.NowMS + in.Policy.Backoff(in.Member.ID, in.Member.Reservation.RetryCount).Milliseconds()
	}
	d.Actor.Defer(ctx, cases, tally)
}

func takes(results []sent) bool {
	for _, s := range results {
		if s.Outcome != reservation.SendUnavailable {
			return true
		}
	}
	return len(results) == 0
}
