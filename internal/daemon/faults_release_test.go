package daemon_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// lost makes a reservation whose message is lost for good: it is due for its
// release.
func (s *sale) lost() string {
	s.t.Helper()
	id := s.expired("ENQUEUED")
	s.redis.HSet(s.t.Context(), s.scope.ReservationKey(id), "resend_count", "3")
	return id
}

func (s *sale) claimed(id, outcome string) {
	s.t.Helper()
	s.exec(`INSERT INTO seckill.reservation_claim (reservation_id, outcome, claimed_by) VALUES ($1, $2, 'test')`, id, outcome)
}

// Without the trigger on the order table a fence stops no order. So nothing is
// released, not even what is fenced already, until it is back; what moves no
// stock goes on, and a person is told.
func TestNothingIsReleasedWithoutTheOrderTrigger(t *testing.T) {
	t.Parallel()
	const trigger = "TRIGGER zzz_seckill_order_insert"
	enable := []string{"ALTER TABLE shop.orders ENABLE ALWAYS " + trigger}
	for name, sql := range map[string]struct {
		breakIt string
		repair  []string
	}{
		"disabled":     {"ALTER TABLE shop.orders DISABLE " + trigger, enable},
		"replica only": {"ALTER TABLE shop.orders ENABLE REPLICA " + trigger, enable},
		"not always":   {"ALTER TABLE shop.orders ENABLE " + trigger, enable},
		"missing": {"DROP " + trigger + " ON shop.orders", []string{
			`SELECT seckill.install_order_fence('shop.orders', 'reservation_id', 'order_id',
				'{"activity_id": "activity_id", "sku_id": "sku_id", "activity_version": "activity_version", "bucket_id": "bucket_id", "user_id": "user_id"}')`,
			`CALL seckill.backfill_order_fence('shop.orders')`,
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSale(t, stacktest.Shared(t))
			d := s.open()
			due := map[string]string{
				"ENQUEUED lost": s.lost(), "RELEASE_PENDING": s.expired("RELEASE_PENDING"), "REJECTED": s.expired("ENQUEUED", "REJECTED"),
				"ENQUEUED fenced": s.expired("ENQUEUED"), "REJECTED claimed": s.expired("ENQUEUED", "REJECTED"),
			}
			s.claimed(due["ENQUEUED fenced"], "FENCED")
			s.claimed(due["REJECTED claimed"], "REJECTED")
			ordered, pendingOrdered := s.expired("ENQUEUED"), s.expired("RELEASE_PENDING")
			s.mustOrder(ordered)
			s.mustOrder(pendingOrdered)
			before := map[string]reservation.Status{}
			for kind, id := range due {
				before[kind] = s.status(id)
			}

			s.exec(sql.breakIt)
			slipped := s.expired("ENQUEUED") // its order may come without a claim
			s.mustOrder(slipped)
			s.passes(d, 3)
			for kind, id := range due {
				if got := s.status(id); got != before[kind] {
					t.Errorf("%s became %s without the trigger", kind, got)
				}
			}
			if n := s.fences(); n != 1 {
				t.Errorf("%d claims FENCED, want the test's own", n)
			}
			if err := s.is(reservation.StatusOrderCreated, ordered, pendingOrdered, slipped); err != nil {
				t.Errorf("what moves no stock: %v", err)
			}
			if got := s.taskCauses("fence_not_ready"); len(got) != 1 {
				t.Errorf("tasks fence_not_ready by cause: %v, want one", got)
			}
			s.keepsPromises()

			for _, statement := range sql.repair {
				s.exec(statement)
			}
			s.passes(d, 2)
			for kind, id := range due {
				if got := s.status(id); got != reservation.StatusReleased {
					t.Errorf("%s is %s after the repair, want RELEASED", kind, got)
				}
			}
			if err := s.settled(); err != nil {
				t.Error(err)
			}
			s.keepsPromises()
		})
	}
}

// The daemon is told a group that reads the same topic for another purpose and
// is far ahead of the order consumer: every message looks consumed and without
// an order. max_release bounds the harm, a task tells of it, and only a person
// lets another budget through.
func TestWrongConsumerGroupIsStoppedByMaxRelease(t *testing.T) {
	t.Parallel()
	const sold, budget = 20, 5
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) {
		c.Fencer.MaxRelease = config.MaxRelease{Percent: 5, Min: budget, Window: time.Hour}
	})
	right := s.config.RocketMQ.ConsumerGroup
	_, wrong := stacktest.Topic(t, s.stack, 1)
	ids := s.sendAll(sold)
	consumed := s.subscribe(upstream.Subscription{Group: wrong}, func(string) upstream.Fault { return upstream.Dropped })
	s.config.RocketMQ.ConsumerGroup = wrong
	d := s.open()
	var v daemon.Verdict
	s.eventually(time.Minute, func() error { // until the group's offsets are stored
		v = s.passes(d, 1)
		if n := s.fences(); n < budget {
			return fmt.Errorf("%d fenced: %+v", n, v.Jobs)
		}
		return nil
	})
	s.unsubscribe(consumed)
	s.passes(d, 4)
	s.wantReleased(ids, budget)
	tasks := s.tasksOf("release_storm")
	if len(tasks) != 1 || tasks[0].Scope != s.scope.Tag() {
		t.Fatalf("tasks release_storm: %+v, want one of the scope", tasks)
	}

	// A restart gives no new budget; the person's decision does, once.
	d = s.open()
	s.passes(d, 2)
	s.wantReleased(ids, budget)
	s.resolve(tasks[0])
	s.passes(d, 4)
	s.wantReleased(ids, 2*budget)
	if again := s.tasksOf("release_storm"); len(again) != 1 {
		t.Errorf("after the second budget: tasks %+v, want one open", again)
	}

	// With the group put right, the rest waits for the consumer and is ordered.
	s.config.RocketMQ.ConsumerGroup = right
	d = s.open()
	s.passes(d, 2)
	s.wantReleased(ids, 2*budget)
	s.subscribe(upstream.Subscription{}, nil)
	s.eventually(time.Minute, func() error {
		s.passes(d, 1)
		return s.settled()
	})
	s.wantReleased(ids, 2*budget)
	s.keepsPromises()
}

// A wrong topic loses every message, as far as the daemon can see.
func TestWrongTopicIsStoppedByMaxRelease(t *testing.T) {
	t.Parallel()
	const sold, budget = 20, 5
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) {
		c.Fencer.MaxRelease = config.MaxRelease{Percent: 5, Min: budget, Window: time.Hour}
		c.Fencer.LostMessage = reservation.LostMessageRelease
	})
	ids := s.sendAll(sold)
	for _, id := range ids { // their positions would tell at once
		s.redis.HDel(t.Context(), s.scope.ReservationKey(id), "mq_position")
	}
	right := s.config.RocketMQ.Topic
	s.config.RocketMQ.Topic, _ = stacktest.Topic(t, s.stack, 1)
	s.passes(s.open(), 4)
	s.wantReleased(ids, budget)
	if tasks := s.tasksOf("release_storm"); len(tasks) != 1 {
		t.Errorf("tasks release_storm: %+v, want one", tasks)
	}
	s.config.RocketMQ.Topic = right
	d := s.open()
	s.subscribe(upstream.Subscription{}, nil)
	s.eventually(time.Minute, func() error {
		s.passes(d, 1)
		return s.settled()
	})
	s.wantReleased(ids, budget)
	s.keepsPromises()
}

// sendAll makes reservations whose messages are with the broker, and which are
// expired.
func (s *sale) sendAll(n int) []string {
	s.t.Helper()
	ids := make([]string, n)
	for i := range ids {
		ids[i] = s.expired()
	}
	s.eventually(time.Minute, func() error {
		s.passes(s.sender(), 1)
		return s.is(reservation.StatusEnqueued, ids...)
	})
	for _, id := range ids { // the sender put off for an hour what it could not send at once
		s.redis.ZAddXX(s.t.Context(), s.scope.IndexKey(reservation.ReservationExpiry), z(id, 1))
	}
	return ids
}

// sender is a daemon that sends and releases nothing.
func (s *sale) sender() *daemon.Daemon {
	s.t.Helper()
	if s.sending == nil {
		change := s.config
		s.config.Fencer.Recheck, s.config.Fencer.Settle = time.Hour, time.Hour
		s.sending = s.open()
		s.config = change
	}
	return s.sending
}

func (s *sale) wantReleased(ids []string, want int) {
	s.t.Helper()
	got := map[reservation.Status]int{}
	for _, id := range ids {
		got[s.status(id)]++
	}
	if got[reservation.StatusReleased] != want || s.fences() != want {
		s.t.Errorf("statuses %v and %d fences, want %d released", got, s.fences(), want)
	}
}

func (s *sale) tasksOf(kind string) []pgstore.Task {
	s.t.Helper()
	tasks, err := s.operator().Tasks(s.t.Context(), pgstore.TaskFilter{Kinds: []string{kind}, States: pgstore.Unresolved})
	if err != nil {
		s.t.Fatal(err)
	}
	return tasks
}

func (s *sale) resolve(task pgstore.Task) {
	s.t.Helper()
	if err := s.operator().ResolveTask(s.t.Context(), task.ID, "test", "a test"); err != nil {
		s.t.Fatal(err)
	}
}
