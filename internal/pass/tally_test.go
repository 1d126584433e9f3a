package pass_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

func TestTasksAreAggregatedByCause(t *testing.T) {
	tally := pass.NewTally()
	s := reservation.Scope{ActivityID: "a", SKUID: "s", Version: 1}
	for i := range 25 {
		tally.Task(s, "send_blocked", "no_route", fmt.Sprint("r", i))
	}
	tally.Task(s, "send_blocked", "busy", "r1")
	tally.Task(reservation.Scope{}, "postgres_changed", "timeline", "")
	want := []reservation.TaskReport{
		{Kind: "postgres_changed", Cause: "timeline", Count: 1},
		{Kind: "send_blocked", Scope: s.Tag(), Cause: "busy", Count: 1, Sample: []string{"r1"}},
		{Kind: "send_blocked", Scope: s.Tag(), Cause: "no_route", Count: 25, Sample: []string{"r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7", "r8", "r9"}},
	}
	if diff := cmp.Diff(want, tally.Tasks()); diff != "" {
		t.Error(diff)
	}
}

func TestRestsOnUnknown(t *testing.T) {
	in := func(status reservation.Status, orders reservation.OrderState, messages reservation.MessageState) reservation.Input {
		return reservation.Input{
			Member:   reservation.Member{ID: "r", Reservation: reservation.Reservation{ID: "r", Status: status, ExpiresAtMS: 1000}},
			Orders:   reservation.OrderEvidence{State: orders},
			Messages: reservation.MessageEvidence{State: messages},
			NowMS:    1_000_000,
			Policy:   reservation.DefaultPolicy(),
		}
	}
	for name, c := range map[string]struct {
		in   reservation.Input
		want bool
	}{
		"orders unknown":       {in("ENQUEUED", "UNKNOWN", ""), true},
		"orders contradictory": {in("ENQUEUED", "CONTRADICTORY", ""), false},
		"messages unknown":     {in("ENQUEUED", "NONE", "UNKNOWN"), true},
		"messages pending":     {in("ENQUEUED", "NONE", "PENDING"), false},
		"messages dead, held":  {in("ENQUEUED", "NONE", "DEAD"), false},
		"message lost":         {in("ENQUEUED", "NONE", "ABSENT"), false},
		"decided":              {in("RELEASED", "UNKNOWN", ""), false},
		"unsent":               {in("RESERVED", "NONE", ""), false},
	} {
		if got := pass.RestsOnUnknown(c.in, reservation.Decide(c.in)); got != c.want {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
