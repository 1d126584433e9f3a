package scanner_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/scanner"
)

// broker answers sends as a real one cannot be told to: this or that outcome
// for this message. It notes what Redis showed when the send was made.
type broker struct {
	store  *redisstore.Store
	scope  reservation.Scope
	answer reservation.SendResult
	seen   map[string]reservation.Reservation // at the moment of the send
}

func (b *broker) Send(ctx context.Context, rs []reservation.Reservation) []reservation.SendResult {
	results := make([]reservation.SendResult, len(rs))
	for i, r := range rs {
		m := b.store.Members(ctx, []redisstore.Ref{{Scope: b.scope, ID: r.ID}})[0]
		b.seen[r.ID] = m.Reservation
		results[i] = b.answer
	}
	return results
}

type hall struct {
	t        *testing.T
	store    *redisstore.Store
	scope    reservation.Scope
	broker   *broker
	dispatch *scanner.Dispatcher
	n        int
}

func newHall(t *testing.T) *hall {
	t.Helper()
	clients, err := redisstore.Open(t.Context(), config.Redis{
		Addrs: []string{stacktest.Shared(t).Redis().Addr()}, Mode: config.RedisStandalone,
		DialTimeout: time.Second, CommandTimeout: 5 * time.Second, PoolSize: 2,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = clients.Close() })
	store, err := redisstore.New(clients, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	h := &hall{t: t, store: store, scope: stacktest.Scope(t)}
	h.broker = &broker{store: store, scope: h.scope, seen: map[string]reservation.Reservation{}}
	h.dispatch = &scanner.Dispatcher{Effects: store, Sender: h.broker, Actor: &pass.Actor{Effects: store}, RefusalsKept: time.Minute}
	now := time.Now().UnixMilli()
	b := store.Writer().Batch()
	b.Provision(h.scope, lua.ProvisionArgs{
		State: lua.StateActive, StartsAtMS: now - 1000, EndsAtMS: now + 3_600_000, RetentionUntilMS: now + 7_200_000, SchemaVersion: 1, Initial: 100,
	})
	if err := b.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	return h
}

// unsent is a case of a RESERVED reservation, or one that was walked on.
func (h *hall) unsent(walk ...reservation.Status) pass.Case {
	h.t.Helper()
	h.n++
	user := fmt.Sprint("u", h.n)
	id := reservation.NewID([]byte("secret"), h.scope.ActivityID, h.scope.SKUID, user, user)
	b := h.store.Writer().Batch()
	r := b.Reserve(h.scope, lua.ReserveArgs{RequestID: user, ReservationID: id, UserID: user, TTLMS: 60_000, SchemaVersion: 1, MessageID: reservation.MessageID(id)})
	for _, to := range walk {
		b.Transition(h.scope, lua.TransitionArgs{ReservationID: id, Target: to})
	}
	if err := b.Run(h.t.Context()); err != nil {
		h.t.Fatal(err)
	}
	if reply, err := r.Get(); err != nil || reply.Code != lua.ReserveAccepted {
		h.t.Fatalf("reserve: %+v, %v", reply, err)
	}
	return pass.Case{
		Input: reservation.Input{Member: h.member(id), NowMS: time.Now().UnixMilli(), Policy: reservation.DefaultPolicy()},
		Index: reservation.SendPending,
	}
}

func (h *hall) member(id string) reservation.Member {
	h.t.Helper()
	m := h.store.Members(h.t.Context(), []redisstore.Ref{{Scope: h.scope, ID: id}})[0]
	if m.Err != nil {
		h.t.Fatal(m.Err)
	}
	return m.Member
}

func TestSendIsOnRecordBeforeItIsMade(t *testing.T) {
	t.Parallel()
	h := newHall(t)
	h.broker.answer = reservation.SendResult{Outcome: reservation.SendStored, Position: "b,0,1,X"}
	c := h.unsent()
	tally := pass.NewTally()
	if !h.dispatch.Send(t.Context(), []pass.Case{c}, tally) {
		t.Error("a broker that took the message counts as away")
	}
	at := h.broker.seen[c.Member().ID]
	if at.SendCount != 1 || at.LastSentAtMS == 0 {
		t.Errorf("at the send Redis showed send_count %d, last_sent_at_ms %d: a late copy would not be known to be possible", at.SendCount, at.LastSentAtMS)
	}
	m := h.member(c.Member().ID)
	if m.Reservation.Status != reservation.StatusEnqueued || m.Reservation.Position != "b,0,1,X" || m.InPending {
		t.Errorf("stored: %+v", m)
	}
	if tally.Done[pass.DoneSent] != 1 {
		t.Errorf("counted %v", tally.Done)
	}
}

func TestSendOutcomes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer    reservation.SendResult
		status    reservation.Status
		available bool
		refusals  int64
		task      string
	}{
		"unknown":     {reservation.SendResult{Outcome: reservation.SendUnknown, Cause: "send_timeout"}, reservation.StatusSendUnknown, true, 0, ""},
		"no outcome":  {reservation.SendResult{}, reservation.StatusSendUnknown, true, 0, ""},
		"unavailable": {reservation.SendResult{Outcome: reservation.SendUnavailable, Cause: "no_route", Err: errors.New("x")}, reservation.StatusReserved, false, 0, scanner.TaskSendBlocked},
		"refused":     {reservation.SendResult{Outcome: reservation.SendRefused, Cause: "message_illegal"}, reservation.StatusReserved, true, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHall(t)
			h.broker.answer = c.answer
			one := h.unsent()
			tally := pass.NewTally()
			if got := h.dispatch.Send(t.Context(), []pass.Case{one}, tally); got != c.available {
				t.Errorf("available %v, want %v", got, c.available)
			}
			m := h.member(one.Member().ID)
			if m.Reservation.Status != c.status || !m.InPending {
				t.Errorf("status %s, in send_pending %v; want %s, still to be sent", m.Reservation.Status, m.InPending, c.status)
			}
			if m.PendingScoreMS <= one.Input.NowMS {
				t.Error("due again at once: a hot loop")
			}
			if got := h.dispatch.Refusals(one.Member().ID); got != c.refusals {
				t.Errorf("%d refusals, want %d", got, c.refusals)
			}
			task := ""
			for _, r := range tally.Tasks() {
				task = r.Kind
			}
			if task != c.task {
				t.Errorf("task %q, want %q", task, c.task)
			}
		})
	}
}

func TestSendLeavesAloneWhatMovedOn(t *testing.T) {
	t.Parallel()
	h := newHall(t)
	c := h.unsent()
	b := h.store.Writer().Batch()
	b.Transition(h.scope, lua.TransitionArgs{ReservationID: c.Member().ID, Target: reservation.StatusReleasePending})
	if err := b.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.dispatch.Send(t.Context(), []pass.Case{c}, pass.NewTally())
	if len(h.broker.seen) != 0 {
		t.Error("a reservation that is being released was sent")
	}
}

// With RocketMQ busy or away nothing is capped; a resend counts only when the
// broker may have the message.
func TestResendCountsWhatTheBrokerMayHave(t *testing.T) {
	t.Parallel()
	for outcome, want := range map[reservation.SendOutcome]int64{
		reservation.SendStored: 1, reservation.SendUnknown: 1, reservation.SendUnavailable: 0, reservation.SendRefused: 0,
	} {
		t.Run(string(outcome), func(t *testing.T) {
			t.Parallel()
			h := newHall(t)
			h.broker.answer = reservation.SendResult{Outcome: outcome, Position: "b,0,7,X", Cause: "c"}
			if outcome != reservation.SendStored {
				h.broker.answer.Position = ""
			}
			c := h.unsent(reservation.StatusEnqueued)
			c.Index = reservation.ReservationExpiry
			h.dispatch.Resend(t.Context(), []pass.Case{c}, pass.NewTally())
			m := h.member(c.Member().ID)
			if m.Reservation.ResendCount != want || m.Reservation.Status != reservation.StatusEnqueued {
				t.Errorf("resend_count %d, status %s; want %d, ENQUEUED", m.Reservation.ResendCount, m.Reservation.Status, want)
			}
			if m.Reservation.LastSentAtMS == 0 {
				t.Error("the send is not on record")
			}
			if stored := outcome == reservation.SendStored; stored != (m.Reservation.Position == "b,0,7,X") {
				t.Errorf("position %q after %s", m.Reservation.Position, outcome)
			}
		})
	}
}

func TestObserveSendsNothing(t *testing.T) {
	t.Parallel()
	h := newHall(t)
	h.dispatch.Actor.Observe = true
	c := h.unsent()
	h.dispatch.Send(t.Context(), []pass.Case{c}, pass.NewTally())
	h.dispatch.Resend(t.Context(), []pass.Case{c}, pass.NewTally())
	if m := h.member(c.Member().ID); len(h.broker.seen) != 0 || m.Reservation.SendCount != 0 {
		t.Errorf("sent %d, send_count %d", len(h.broker.seen), m.Reservation.SendCount)
	}
}
