package reservation_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/seckill/reconciler/reservation"
)

// Times of the table test: reserved at 1,000,000 ms, expires 900 s later.
const (
	reservedAtMS = int64(1_000_000)
	expiresAtMS  = reservedAtMS + 900_000
)

// input is a reservation of the given status with P and M, read at nowMS.
func input(status reservation.Status, orders reservation.OrderState, messages reservation.MessageState, nowMS int64) reservation.Input {
	return reservation.Input{
		Member: reservation.Member{
			Scope: testScope, ID: "r1", InExpiry: true, ExpiryScoreMS: expiresAtMS,
			Reservation: reservation.Reservation{
				ID: "r1", RequestID: "q1", MessageID: "reserve-order:r1:v1", UserID: "u1", Status: status,
				ReservedAtMS: reservedAtMS, ExpiresAtMS: expiresAtMS, UpdatedAtMS: reservedAtMS,
			},
		},
		Orders:   reservation.OrderEvidence{State: orders},
		Messages: reservation.MessageEvidence{State: messages},
		NowMS:    nowMS,
		Policy:   reservation.DefaultPolicy(),
	}
}

func TestDecide(t *testing.T) {
	const (
		fresh   = reservedAtMS + 1_000 // younger than send_grace
		early   = reservedAtMS + 60_000
		expired = expiresAtMS + 1
		late    = expiresAtMS + 3_600_000 // escalate_after has passed
	)
	type want struct {
		Row   int
		Verb  reservation.Verb
		Path  []reservation.Status
		Cause string
		Task  string // kind/cause
	}
	statuses := func(s ...reservation.Status) []reservation.Status { return s }
	releasePath := statuses("RELEASE_PENDING")
	type change = func(*reservation.Input)
	with := func(changes ...change) []change { return changes }
	policy := func(f func(*reservation.Policy)) change { return func(in *reservation.Input) { f(&in.Policy) } }

	for name, c := range map[string]struct {
		in     reservation.Input
		change []change
		want   want
	}{
		"orphan: hash gone": {
			in: input("ENQUEUED", "FENCED", "", expired), change: with(func(in *reservation.Input) { in.Member.Missing = true }),
			want: want{reservation.RowOrphan, "wait", nil, "hash_missing", "orphan_member/hash_missing"},
		},
		"0: malformed wins over any evidence": {
			in: input("RELEASE_PENDING", "FENCED", "", expired),
			change: with(func(in *reservation.Input) {
				in.Member.Malformed = &reservation.MalformedError{Cause: "missing_field", Field: "user_id"}
			}),
			want: want{0, "wait", nil, "missing_field", "malformed_reservation/missing_field: user_id"},
		},
		"1: ORDER_CREATED": {in: input("ORDER_CREATED", "UNKNOWN", "", expired), want: want{1, "unindex", nil, "decided", ""}},
		"1: RELEASED":      {in: input("RELEASED", "ORDER", "", expired), want: want{1, "unindex", nil, "decided", ""}},

		"2: PostgreSQL unreachable": {
			in: input("RELEASE_PENDING", "UNKNOWN", "ABSENT", early), change: with(func(in *reservation.Input) { in.Orders.Cause = "postgres_unreachable" }),
			want: want{2, "wait", nil, "postgres_unreachable", ""},
		},
		"2: evidence never gathered":  {in: input("ENQUEUED", "", "ABSENT", expired), want: want{2, "wait", nil, "orders_not_read", ""}},
		"2: evidence of another time": {in: input("ENQUEUED", "PERHAPS", "ABSENT", expired), want: want{2, "wait", nil, "orders_not_read", ""}},
		"2: unknown for too long":     {in: input("ENQUEUED", "UNKNOWN", "", late), want: want{2, "wait", nil, "orders_not_read", "evidence_stuck/orders_unknown"}},
		"2: contradiction": {
			in: input("RESERVED", "CONTRADICTORY", "", early), change: with(func(in *reservation.Input) { in.Orders.Cause = "order_missing" }),
			want: want{2, "wait", nil, "order_missing", "order_missing/order_missing"},
		},

		"3: RELEASE_PENDING with an order": {in: input("RELEASE_PENDING", "ORDER", "", early), want: want{3, "confirm", nil, "order_exists", ""}},
		"3: REJECTED with an order":        {in: input("REJECTED", "ORDER", "ABSENT", expired), want: want{3, "confirm", nil, "order_exists", ""}},
		"3: confirm by hand": {
			in: input("RELEASE_PENDING", "ORDER", "", early), change: with(policy(func(p *reservation.Policy) { p.Confirm = "manual" })),
			want: want{3, "wait", nil, "confirm_manual", "order_after_release_pending/confirm_manual"},
		},
		"4: RELEASE_PENDING without a claim": {in: input("RELEASE_PENDING", "NONE", "", early), want: want{4, "release", nil, "release_pending", ""}},
		"4: REJECTED without a claim": {
			in: input("REJECTED", "NONE", "PENDING", early), change: with(func(in *reservation.Input) { in.Member.Reservation.ReleaseReason = "stock" }),
			want: want{4, "release", nil, "stock", ""},
		},
		"5: RELEASE_PENDING, fenced":  {in: input("RELEASE_PENDING", "FENCED", "", early), want: want{5, "compensate", nil, "claim_final", ""}},
		"5: REJECTED, claim REJECTED": {in: input("REJECTED", "REJECTED", "", early), want: want{5, "compensate", nil, "claim_final", ""}},

		"6: RESERVED":     {in: input("RESERVED", "ORDER", "", fresh), want: want{6, "advance", statuses("ENQUEUED", "ORDER_CREATED"), "order_exists", ""}},
		"6: SEND_UNKNOWN": {in: input("SEND_UNKNOWN", "ORDER", "", early), want: want{6, "advance", statuses("ENQUEUED", "ORDER_CREATED"), "order_exists", ""}},
		"6: ENQUEUED":     {in: input("ENQUEUED", "ORDER", "", early), want: want{6, "advance", statuses("ORDER_CREATED"), "order_exists", ""}},
		"6: order without a claim": {
			in: input("ENQUEUED", "ORDER", "", early), change: with(func(in *reservation.Input) { in.Orders.Cause = reservation.CauseOrderWithoutClaim }),
			want: want{6, "advance", statuses("ORDER_CREATED"), "order_exists", "order_without_claim/order_without_claim"},
		},
		"7: RESERVED": {in: input("RESERVED", "REJECTED", "", early), want: want{7, "compensate", statuses("ENQUEUED", "REJECTED"), "rejected", ""}},
		"7: ENQUEUED": {in: input("ENQUEUED", "REJECTED", "PENDING", early), want: want{7, "compensate", statuses("REJECTED"), "rejected", ""}},
		"8: RESERVED": {in: input("RESERVED", "FENCED", "", early), want: want{8, "compensate", releasePath, "fenced", ""}},
		"8: ENQUEUED, the fence's reason is kept": {
			in: input("ENQUEUED", "FENCED", "", early), change: with(func(in *reservation.Input) { in.Orders.Reason = "message_lost" }),
			want: want{8, "compensate", releasePath, "message_lost", ""},
		},

		"9: RESERVED, its gateway's still": {in: input("RESERVED", "NONE", "", fresh), want: want{9, "wait", nil, "send_grace", ""}},
		"9: RESERVED":                      {in: input("RESERVED", "NONE", "", early), want: want{9, "send", nil, "unsent", ""}},
		"9: SEND_UNKNOWN has no grace":     {in: input("SEND_UNKNOWN", "NONE", "", fresh), want: want{9, "send", nil, "unsent", ""}},
		"9: never released for time alone": {in: input("RESERVED", "NONE", "ABSENT", late), want: want{9, "send", nil, "unsent", ""}},
		"9: refused too often": {
			in: input("RESERVED", "NONE", "", early), change: with(func(in *reservation.Input) { in.Refusals = 3 }),
			want: want{9, "wait", nil, "send_refused", "send_refused/message_refused"},
		},
		"9: unsent: release, not expired": {
			in: input("SEND_UNKNOWN", "NONE", "ABSENT", early), change: with(policy(func(p *reservation.Policy) { p.Unsent = "release" })),
			want: want{9, "send", nil, "unsent", ""},
		},
		"9: unsent: release, absent": {
			in: input("RESERVED", "NONE", "ABSENT", expired), change: with(policy(func(p *reservation.Policy) { p.Unsent = "release" })),
			want: want{9, "release", releasePath, "unsent_absent", ""},
		},
		"9: unsent: release, unknown": {
			in: input("RESERVED", "NONE", "UNKNOWN", expired), change: with(policy(func(p *reservation.Policy) { p.Unsent = "release" })),
			want: want{9, "wait", nil, "messages_not_read", ""},
		},

		"10: not expired":      {in: input("ENQUEUED", "NONE", "ABSENT", early), want: want{10, "wait", nil, "not_expired", ""}},
		"11: unknown":          {in: input("ENQUEUED", "NONE", "UNKNOWN", expired), want: want{11, "wait", nil, "messages_not_read", ""}},
		"11: never gathered":   {in: input("ENQUEUED", "NONE", "", expired), want: want{11, "wait", nil, "messages_not_read", ""}},
		"11: pending":          {in: input("ENQUEUED", "NONE", "PENDING", expired), want: want{11, "wait", nil, "message_pending", ""}},
		"11: retrying":         {in: input("ENQUEUED", "NONE", "RETRYING", expired), want: want{11, "wait", nil, "message_retrying", ""}},
		"11: pending for long": {in: input("ENQUEUED", "NONE", "PENDING", late), want: want{11, "wait", nil, "message_pending", "evidence_stuck/message_pending"}},
		"11: unknown with why": {
			in: input("ENQUEUED", "NONE", "UNKNOWN", late), change: with(func(in *reservation.Input) { in.Messages.Cause = "broker_missing" }),
			want: want{11, "wait", nil, "broker_missing", "evidence_stuck/broker_missing"},
		},
		"11: absent, not settled since the send": {
			in: input("ENQUEUED", "NONE", "ABSENT", expired), change: with(func(in *reservation.Input) { in.Member.Reservation.LastSentAtMS = expired - 9_999 }),
			want: want{11, "wait", nil, "not_settled", ""},
		},
		"11: consumed, not settled since a resend": {
			in: input("ENQUEUED", "NONE", "CONSUMED", expired), change: with(func(in *reservation.Input) { in.Member.Reservation.LastSentAtMS = expired - 1 }),
			want: want{11, "wait", nil, "not_settled", ""},
		},

		"12: lost":           {in: input("ENQUEUED", "NONE", "ABSENT", expired), want: want{12, "resend", nil, "message_lost", ""}},
		"12: lost, settled":  {in: input("ENQUEUED", "NONE", "ABSENT", expired), change: with(func(in *reservation.Input) { in.Member.Reservation.LastSentAtMS = expired - 10_000 }), want: want{12, "resend", nil, "message_lost", ""}},
		"12: third resend":   {in: input("ENQUEUED", "NONE", "ABSENT", expired), change: with(func(in *reservation.Input) { in.Member.Reservation.ResendCount = 2 }), want: want{12, "resend", nil, "message_lost", ""}},
		"12: resent 3 times": {in: input("ENQUEUED", "NONE", "ABSENT", expired), change: with(func(in *reservation.Input) { in.Member.Reservation.ResendCount = 3 }), want: want{12, "release", releasePath, "message_lost", ""}},
		"12: policy release": {in: input("ENQUEUED", "NONE", "ABSENT", expired), change: with(policy(func(p *reservation.Policy) { p.LostMessage = "release" })), want: want{12, "release", releasePath, "message_lost", ""}},
		"12: refused too often": {
			in: input("ENQUEUED", "NONE", "ABSENT", expired), change: with(func(in *reservation.Input) { in.Refusals = 3 }),
			want: want{12, "wait", nil, "send_refused", "send_refused/message_refused"},
		},
		"13: dead, held": {
			in: input("ENQUEUED", "NONE", "DEAD", expired), change: with(func(in *reservation.Input) { in.Messages.SinceMS = expired - 86_399_999 }),
			want: want{13, "wait", nil, "dead_letter_held", "dead_letter/dead_letter"},
		},
		"13: dead for dead_letter_after": {
			in: input("ENQUEUED", "NONE", "DEAD", expired), change: with(func(in *reservation.Input) { in.Messages.SinceMS = expired - 86_400_000 }),
			want: want{13, "release", releasePath, "dead_letter", ""},
		},
		"13: policy release": {
			in: input("ENQUEUED", "NONE", "DEAD", expired), change: with(func(in *reservation.Input) { in.Messages.SinceMS = expired }, policy(func(p *reservation.Policy) { p.DeadLetter = "release" })),
			want: want{13, "release", releasePath, "dead_letter", ""},
		},
		"14: consumed": {in: input("ENQUEUED", "NONE", "CONSUMED", expired), want: want{14, "release", releasePath, "consumed_without_claim", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, f := range c.change {
				f(&c.in)
			}
			a := reservation.Decide(c.in)
			got := want{a.Row, a.Verb, a.Path, a.Cause, ""}
			if a.Task != nil {
				got.Task = a.Task.Kind + "/" + a.Task.Cause
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Error(diff)
			}
			if a.DeferMS <= c.in.NowMS {
				t.Errorf("deferred to %d, not after now %d: due for ever", a.DeferMS, c.in.NowMS)
			}
		})
	}
}

func TestDecideDefersToTheMomentThatMatters(t *testing.T) {
	if a := reservation.Decide(input("ENQUEUED", "NONE", "", reservedAtMS+1)); a.DeferMS != expiresAtMS {
		t.Errorf("row 10 deferred to %d, want the expiry %d", a.DeferMS, expiresAtMS)
	}
	if a := reservation.Decide(input("RESERVED", "NONE", "", reservedAtMS+1)); a.DeferMS != reservedAtMS+3000 {
		t.Errorf("send_grace deferred to %d, want %d", a.DeferMS, reservedAtMS+3000)
	}
	in := input("ENQUEUED", "NONE", "ABSENT", expiresAtMS)
	in.Member.Reservation.LastSentAtMS = expiresAtMS
	if a := reservation.Decide(in); a.DeferMS != expiresAtMS+10_000 {
		t.Errorf("settle deferred to %d, want %d", a.DeferMS, expiresAtMS+10_000)
	}
}

// anyInput draws inputs far wider than real ones.
func anyInput(t *rapid.T) reservation.Input {
	status := rapid.SampledFrom(append([]reservation.Status{"", "WEIRD"}, reservation.Statuses...)).Draw(t, "status")
	orders := rapid.SampledFrom([]reservation.OrderState{"", "ORDER", "REJECTED", "FENCED", "NONE", "UNKNOWN", "CONTRADICTORY"}).Draw(t, "P")
	messages := rapid.SampledFrom([]reservation.MessageState{"", "UNKNOWN", "PENDING", "RETRYING", "DEAD", "CONSUMED", "ABSENT"}).Draw(t, "M")
	in := input(status, orders, messages, rapid.Int64Range(0, 10*expiresAtMS).Draw(t, "now"))
	r := &in.Member.Reservation
	r.LastSentAtMS = rapid.Int64Range(0, 5*expiresAtMS).Draw(t, "last sent")
	r.ResendCount = rapid.Int64Range(0, 5).Draw(t, "resends")
	r.RetryCount = rapid.Int64Range(0, 1<<40).Draw(t, "retries")
	in.Messages.SinceMS = rapid.Int64Range(0, 5*expiresAtMS).Draw(t, "since")
	in.Refusals = rapid.Int64Range(0, 5).Draw(t, "refusals")
	in.Member.Missing = rapid.Bool().Draw(t, "missing")
	if !status.Known() || rapid.IntRange(0, 9).Draw(t, "malformed") == 0 {
		in.Member.Malformed = &reservation.MalformedError{Cause: "any"}
	}
	in.Policy.LostMessage = rapid.SampledFrom([]string{"resend", "release"}).Draw(t, "lost_message")
	in.Policy.DeadLetter = rapid.SampledFrom([]string{"hold", "release"}).Draw(t, "dead_letter")
	in.Policy.Confirm = rapid.SampledFrom([]string{"auto", "manual"}).Draw(t, "confirm")
	in.Policy.Unsent = rapid.SampledFrom([]string{"resend", "release"}).Draw(t, "unsent")
	return in
}

// S1 and S3, as far as a decision can keep them: stock moves only on evidence
// that was read, and never beside an order.
func TestDecideKeepsThePromises(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := anyInput(t)
		a := reservation.Decide(in)
		if diff := cmp.Diff(a, reservation.Decide(in)); diff != "" {
			t.Fatalf("two decisions on the same input differ: %s", diff)
		}
		if a.DeferMS <= in.NowMS {
			t.Fatalf("%+v is due for ever", a)
		}
		status := in.Member.Reservation.Status
		stock := a.Verb == reservation.VerbRelease || a.Verb == reservation.VerbCompensate
		switch p := in.Orders.State; {
		case stock && (in.Member.Missing || in.Member.Malformed != nil || status.Terminal()):
			t.Fatalf("%+v moves stock of a member that is missing, malformed or decided", a)
		case a.Verb == reservation.VerbCompensate && p != reservation.OrderFenced && p != reservation.OrderRejected:
			t.Fatalf("%+v compensates on P = %s", a, p)
		case a.Verb == reservation.VerbRelease && p != reservation.OrderNone:
			t.Fatalf("%+v fences on P = %s", a, p)
		case a.Verb == reservation.VerbRelease && !status.Releasing():
			m := in.Messages.State
			if m != reservation.MessageAbsent && m != reservation.MessageConsumed && m != reservation.MessageDead {
				t.Fatalf("%+v releases on M = %s", a, m)
			}
			if in.NowMS < in.Member.Reservation.ExpiresAtMS {
				t.Fatalf("%+v releases before expiry", a)
			}
			if !reservation.NeedsMessages(in) {
				t.Fatalf("%+v rests on M, which nobody gathers", a)
			}
		case (a.Verb == reservation.VerbConfirm || a.Verb == reservation.VerbAdvance) && p != reservation.OrderExists:
			t.Fatalf("%+v creates an order in Redis on P = %s", a, p)
		case (a.Verb == reservation.VerbSend || a.Verb == reservation.VerbResend) && p != reservation.OrderNone:
			t.Fatalf("%+v sends on P = %s", a, p)
		}
		at := status
		for _, to := range a.Path {
			if !reservation.CanTransition(at, to) {
				t.Fatalf("%+v walks %s to %s", a, at, to)
			}
			at = to
		}
		if a.Verb == reservation.VerbCompensate && !at.Releasing() {
			t.Fatalf("%+v compensates from %s", a, at)
		}
	})
}

func TestBackoff(t *testing.T) {
	p := reservation.DefaultPolicy()
	rapid.Check(t, func(t *rapid.T) {
		attempt := rapid.Int64Range(-1, 1<<50).Draw(t, "attempt")
		got := p.Backoff(rapid.String().Draw(t, "id"), attempt)
		full := p.BackoffMax
		if attempt < 8 {
			full = p.BackoffMin << max(attempt, 0)
		}
		if got < full/2 || got > full {
			t.Fatalf("attempt %d waits %s, want %s to %s", attempt, got, full/2, full)
		}
	})
	spread := map[time.Duration]bool{}
	for _, id := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		spread[p.Backoff(id, 5)] = true
	}
	if len(spread) < 6 {
		t.Errorf("8 members wait %d different times: they stay together", len(spread))
	}
}

func TestPolicyValidate(t *testing.T) {
	if err := reservation.DefaultPolicy().Validate(); err != nil {
		t.Errorf("the default policy: %v", err)
	}
	for name, change := range map[string]func(*reservation.Policy){
		"lost_message":      func(p *reservation.Policy) { p.LostMessage = "drop" },
		"dead_letter":       func(p *reservation.Policy) { p.DeadLetter = "" },
		"confirm":           func(p *reservation.Policy) { p.Confirm = "Auto" },
		"unsent":            func(p *reservation.Policy) { p.Unsent = "hold" },
		"send_grace":        func(p *reservation.Policy) { p.SendGrace = 0 },
		"settle":            func(p *reservation.Policy) { p.Settle = -time.Second },
		"recheck":           func(p *reservation.Policy) { p.Recheck = 0 },
		"escalate_after":    func(p *reservation.Policy) { p.EscalateAfter = 0 },
		"dead_letter_after": func(p *reservation.Policy) { p.DeadLetterAfter = -1 },
		"backoff_max":       func(p *reservation.Policy) { p.BackoffMax = p.BackoffMin - 1 },
		"max_resends":       func(p *reservation.Policy) { p.MaxResends = -1 },
		"max_refusals":      func(p *reservation.Policy) { p.MaxRefusals = 0 },
	} {
		p := reservation.DefaultPolicy()
		change(&p)
		if err := p.Validate(); err == nil {
			t.Errorf("%s: a bad value passed", name)
		}
	}
}
