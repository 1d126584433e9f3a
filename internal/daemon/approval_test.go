package daemon_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// A dead letter that is held is released when a person says so, on the word of
// the real dead-letter topic; a message that is only pending is not.
func TestHeldDeadLetterIsReleasedByAPerson(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	id := s.sendAll(1)[0]
	d := s.open()
	consumer := &deliveries{until: make(chan struct{})}
	close(consumer.until)
	s.subscribe(upstream.Subscription{MaxAttempts: 1}, consumer.fail)
	s.eventually(time.Minute, func() error {
		if v := s.passes(d, 1); decided(v, daemon.JobFencer, 13, "dead_letter_held") != 1 {
			return fmt.Errorf("decisions %+v, want row 13, dead_letter_held", v.Jobs)
		}
		return nil
	})
	task := s.tasksOf(reservation.TaskDeadLetter)[0]
	pending := s.expired("ENQUEUED") // its message was never sent: it is lost, and no dead letter

	plan, err := d.Approver().Propose(t.Context(), task, approval.Selection{})
	if err != nil || len(plan.Proposals) != 1 || plan.Proposals[0].ID != id || plan.Proposals[0].Action != approval.Release {
		t.Fatalf("%+v, %v; want the one dead letter", plan.Proposals, err)
	}
	report, err := d.Approver().Apply(t.Context(), plan, approval.Act{Actor: "alice", Reason: "the consumer cannot read it"})
	if err != nil || report.Counts()[approval.Applied] != 1 || !report.Resolved {
		t.Fatalf("%+v, %v", report, err)
	}
	if err := s.is(reservation.StatusReleased, id); err != nil {
		t.Error(err)
	}
	if err := s.is(reservation.StatusEnqueued, pending); err != nil {
		t.Error(err)
	}
	if err := s.order(id); !fencedOff(err) {
		t.Errorf("an order for the dead letter after its release: %v, want SK001", err)
	}
	s.keepsPromises()
}

// A sale's orphans are approved beside a daemon that goes on working: every
// reservation comes to its end, and the books agree.
func TestOrphansAreApprovedBesideTheDaemon(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	ids := make([]string, 30)
	for i := range ids {
		ids[i] = s.expired("ENQUEUED", "RELEASE_PENDING")
	}
	for i, id := range ids {
		if i%3 == 0 {
			s.redis.Del(t.Context(), s.scope.ReservationKey(id))
			s.redis.ZAdd(t.Context(), s.scope.IndexKey(reservation.ReservationExpiry), z(id, 1))
		}
	}
	d := s.open()
	s.passes(d, 1)
	task := s.tasksOf(reservation.TaskOrphanMember)[0]
	other := s.open()
	working := make(chan struct{})
	go func() {
		defer close(working)
		for range 5 {
			other.Once(t.Context())
		}
	}()
	plan, err := d.Approver().Propose(t.Context(), task, approval.Selection{})
	if err != nil || len(plan.Proposals) != 10 {
		t.Fatalf("%d proposals, %v; want the 10 orphans", len(plan.Proposals), err)
	}
	report, err := d.Approver().Apply(t.Context(), plan, approval.Act{Actor: "alice", Reason: "lost in a failover"})
	<-working
	if err != nil || report.Counts()[approval.Applied] != 10 || !report.Resolved {
		t.Fatalf("%+v, %v", report.Counts(), err)
	}
	s.settles(time.Minute)
}
