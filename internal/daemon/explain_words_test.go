package daemon

import (
	"strings"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

// everyDecision calls f with all decisions that statuses, evidence and time can
// lead to.
func everyDecision(f func(reservation.Input, reservation.Action)) {
	const now = 1_000_000_000
	orders := []reservation.OrderEvidence{
		{State: reservation.OrderNone},
		{State: reservation.OrderExists, OrderID: "o"},
		{State: reservation.OrderRejected},
		{State: reservation.OrderFenced},
		reservation.UnknownOrders("orders_not_read"),
	}
	for _, cause := range []string{
		reservation.CauseOrderMissing, reservation.CauseOrderAfterFence, reservation.CauseDuplicateOrder,
		reservation.CauseOrderScopeMismatch, reservation.CauseUnknownOrderStatus,
	} {
		orders = append(orders, reservation.OrderEvidence{State: reservation.OrderContradictory, Cause: cause})
	}
	messages := []reservation.MessageEvidence{
		{},
		{State: reservation.MessageAbsent},
		{State: reservation.MessageConsumed},
		{State: reservation.MessagePending},
		{State: reservation.MessageRetrying},
		{State: reservation.MessageDead, SinceMS: now},
		{State: reservation.MessageDead, SinceMS: 1},
		reservation.UnknownMessages("broker_unreachable"), reservation.UnknownMessages("something_new"),
	}
	manual := reservation.DefaultPolicy()
	manual.Confirm, manual.Unsent, manual.LostMessage = reservation.ConfirmManual, reservation.UnsentRelease, reservation.LostMessageRelease
	for _, status := range reservation.Statuses {
		for _, p := range orders {
			for _, m := range messages {
				for _, age := range []time.Duration{0, time.Hour} {
					for _, refusals := range []int64{0, 9} {
						for _, policy := range []reservation.Policy{reservation.DefaultPolicy(), manual} {
							at := now - age.Milliseconds()
							in := reservation.Input{
								Orders: p, Messages: m, NowMS: now, Refusals: refusals, Policy: policy,
								Member: reservation.Member{
									ID: "r", Scope: reservation.Scope{ActivityID: "a", SKUID: "s"}, InExpiry: true, InPending: true,
									ExpiryScoreMS: at, PendingScoreMS: at,
									Reservation: reservation.Reservation{ID: "r", Status: status, ReservedAtMS: at, ExpiresAtMS: at + 1000, UpdatedAtMS: at},
								},
							}
							f(in, reservation.Decide(in))
						}
					}
				}
			}
		}
	}
	for _, m := range []reservation.Member{
		{ID: "r", Missing: true, InExpiry: true}, {ID: "r", Malformed: &reservation.MalformedError{Cause: "missing_field", Field: "user_id"}},
	} {
		in := reservation.Input{Member: m, NowMS: now, Policy: reservation.DefaultPolicy()}
		f(in, reservation.Decide(in))
	}
}

// TestEveryDecisionHasWords: who is woken at night reads sentences, not names.
func TestEveryDecisionHasWords(t *testing.T) {
	t.Parallel()
	now := situation{known: true, running: true}
	rows := map[int]bool{}
	everyDecision(func(in reservation.Input, a reservation.Action) {
		rows[a.Row] = true
		n := now.next(Explanation{ID: "r", Scope: in.Member.Scope, Input: in, Action: a, Decided: true}, config.Default())
		if n.Does == "" || n.When == "" || len(n.HeldBack) != 0 {
			t.Fatalf("row %d, %s, %s: %+v", a.Row, a.Verb, a.Cause, n)
		}
		_, known := causes[a.Cause]
		if !known && in.Messages.State != reservation.MessageUnknown {
			t.Errorf("cause %s of row %d has no words: %s", a.Cause, a.Row, n.Why)
		}
		if strings.Contains(n.Why, "something_new") || strings.Contains(n.Does, "  ") {
			t.Errorf("%+v", n)
		}
		if a.Verb == reservation.VerbWait && !strings.Contains(n.Does, "waits") {
			t.Errorf("row %d waits, and says: %s", a.Row, n.Does)
		}
	})
	for row := reservation.RowOrphan; row <= 14; row++ {
		if !rows[row] {
			t.Errorf("row %d was not among the decisions", row)
		}
	}
}

// TestHeldBack: everything that keeps a release from happening is named.
func TestHeldBack(t *testing.T) {
	t.Parallel()
	scope := reservation.Scope{ActivityID: "a", SKUID: "s"}
	e := Explanation{Scope: scope, Held: true, Decided: true, Action: reservation.Action{Row: 14, Verb: reservation.VerbRelease, Cause: "consumed_without_claim"}}
	e.Input.Member.InExpiry = true
	now := situation{
		observes: true, known: true, paused: []string{JobFencer}, notReady: true,
		halts: []pgstore.Task{{ID: 7, Kind: "release_storm", Scope: scope.Tag()}, {ID: 8, Kind: "postgres_changed"}, {ID: 9, Kind: "release_storm", Scope: "other"}},
	}
	got := strings.Join(now.next(e, config.Default()).HeldBack, "\n")
	for _, want := range []string{"scope is held", "mode is observe", "no daemon", "job fencer is paused", "task 7", "task 8", "order fence"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not said:\n%s", want, got)
		}
	}
	if strings.Contains(got, "task 9") {
		t.Errorf("another scope's halt is said:\n%s", got)
	}
	e.Action = reservation.Action{Row: 10, Verb: reservation.VerbWait, Cause: "not_expired"}
	if got := strings.Join(now.next(e, config.Default()).HeldBack, "\n"); strings.Contains(got, "halted") || strings.Contains(got, "order fence") {
		t.Errorf("a halt of releases holds nothing else back:\n%s", got)
	}
	if got := (situation{}).next(e, config.Default()).HeldBack; !strings.Contains(strings.Join(got, "\n"), "PostgreSQL does not answer") {
		t.Errorf("without PostgreSQL: %q", got)
	}
}
