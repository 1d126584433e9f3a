package daemon_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// deliveries counts what reached a consumer, and stops it at the nth delivery.
type deliveries struct {
	mu    sync.Mutex
	count map[string]int
	hold  int           // this delivery waits …
	until chan struct{} // … until this is closed
}

func (d *deliveries) fail(id string) upstream.Fault {
	d.mu.Lock()
	if d.count == nil {
		d.count = map[string]int{}
	}
	d.count[id]++
	n := d.count[id]
	d.mu.Unlock()
	if n == d.hold {
		<-d.until
	}
	return upstream.DeadLetter
}

func (d *deliveries) of(id string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.count[id]
}

// A message that failed twice waits for its second retry: that is row 11,
// however long the reservation has been expired, and the reservation stays. At
// last it is a dead letter: row 13, which holds it and asks a person, and
// releases it only once dead_letter_after has passed.
func TestMessageInItsSecondRetryThenDeadLetter(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	id := s.sendAll(1)[0]
	d := s.open()
	consumer := &deliveries{hold: 3, until: make(chan struct{})}
	release := sync.OnceFunc(func() { close(consumer.until) })
	t.Cleanup(release) // before the subscriber waits for the delivery
	s.subscribe(upstream.Subscription{MaxAttempts: 2}, consumer.fail)

	s.eventually(time.Minute, func() error {
		if n := consumer.of(id); n != 2 {
			return fmt.Errorf("%d deliveries", n)
		}
		return nil
	})
	s.eventually(time.Minute, func() error {
		v := s.passes(d, 1)
		if n := consumer.of(id); n > consumer.hold {
			return fmt.Errorf("%d deliveries: the consumer was not held up", n)
		}
		if decided(v, daemon.JobFencer, 11, "message_retrying") != 1 {
			return fmt.Errorf("decisions %+v, want row 11, message_retrying", v.Jobs)
		}
		return nil
	})
	if err := s.is(reservation.StatusEnqueued, id); err != nil || s.fences() != 0 {
		t.Fatalf("%v, %d fences", err, s.fences())
	}

	release()
	s.eventually(time.Minute, func() error {
		v := s.passes(d, 1)
		if decided(v, daemon.JobFencer, 13, "dead_letter_held") != 1 {
			return fmt.Errorf("decisions %+v, want row 13, dead_letter_held", v.Jobs)
		}
		return nil
	})
	if err := s.is(reservation.StatusEnqueued, id); err != nil || s.fences() != 0 {
		t.Fatalf("a held dead letter: %v, %d fences", err, s.fences())
	}
	if causes := s.taskCauses("dead_letter"); len(causes) != 1 {
		t.Errorf("tasks dead_letter by cause: %v, want one", causes)
	}

	s.config.Fencer.DeadLetterAfter = time.Millisecond
	v := s.passes(s.open(), 1)
	if decided(v, daemon.JobFencer, 13, "dead_letter") != 1 {
		t.Errorf("decisions %+v, want row 13, dead_letter", v.Jobs)
	}
	if err := s.settled(); err != nil {
		t.Error(err)
	}
	if err := s.is(reservation.StatusReleased, id); err != nil {
		t.Error(err)
	}
	if err := s.order(id); !fencedOff(err) {
		t.Errorf("an order for the dead letter after its release: %v, want SK001", err)
	}
	s.keepsPromises()
}

// The broker acknowledged two messages and lost them: others are at their
// positions. They are absent, are resent to new offsets, wait there for the
// consumer, and end as it decides: by an order, or, dropped, by row 14.
func TestLostMessageIsResentAndConsumed(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	other := s.sendAll(1)[0]
	position := s.hash(other)["mq_position"]
	if position == "" {
		t.Fatal("the send left no position")
	}
	kept, dropped := s.expired("ENQUEUED"), s.expired("ENQUEUED")
	for _, id := range []string{kept, dropped} {
		s.redis.HSet(t.Context(), s.scope.ReservationKey(id), "mq_position", position, "send_count", "1")
	}
	d := s.open()
	v := s.passes(d, 1)
	if decided(v, daemon.JobFencer, 12, "message_lost") != 2 {
		t.Fatalf("decisions %+v, want row 12 twice", v.Jobs)
	}
	for _, id := range []string{kept, dropped} {
		if h := s.hash(id); h["resend_count"] != "1" || h["status"] != "ENQUEUED" || h["mq_position"] == position {
			t.Errorf("after the resend: %v", h)
		}
	}
	v = s.passes(d, 2)
	if decided(v, daemon.JobFencer, 11, "message_pending") != 3 {
		t.Errorf("decisions %+v, want row 11, message_pending of all", v.Jobs)
	}
	s.subscribe(upstream.Subscription{}, func(id string) upstream.Fault {
		if id == dropped {
			return upstream.Dropped
		}
		return upstream.None
	})
	s.eventually(time.Minute, func() error {
		if v := s.passes(d, 1); decided(v, daemon.JobFencer, 14, "consumed_without_claim") == 1 {
			return nil
		}
		return fmt.Errorf("%s is %s, want it decided by row 14", dropped, s.status(dropped))
	})
	s.settles(time.Minute)
	if err := s.is(reservation.StatusOrderCreated, kept, other); err != nil {
		t.Error(err)
	}
	if err := s.is(reservation.StatusReleased, dropped); err != nil {
		t.Error(err)
	}
	if n := s.hash(dropped)["resend_count"]; n != "1" {
		t.Errorf("resend_count %s, want 1", n)
	}
}

// A message that is too large for every broker is refused, and no outage: it is
// counted, capped, shown to a person, and its reservation is not released.
func TestRefusedMessageIsForAPerson(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) { c.RocketMQ.Tag = strings.Repeat("x", 40_000) })
	id := s.expired()
	d := s.open()
	s.passes(d, 8)
	if causes := s.taskCauses("send_refused"); len(causes) != 1 {
		t.Errorf("tasks send_refused by cause: %v, want one; all: %v", causes, s.tasks())
	}
	if h := s.hash(id); h["status"] != "RESERVED" || h["send_count"] != "3" || s.fences() != 0 {
		t.Errorf("%v, %d fences: want it RESERVED after 3 sends", h, s.fences())
	}
	s.keepsPromises()
}
