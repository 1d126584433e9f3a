//go:build slow

package daemon_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// nothingReleased checks that no unit was given back and nothing was fenced.
func (s *sale) nothingReleased() error {
	if stock := s.stock(); stock[3] != 0 {
		return fmt.Errorf("%d units were released", stock[3])
	}
	if n := s.fences(); n != 0 {
		return fmt.Errorf("%d reservations were fenced", n)
	}
	return nil
}

// RocketMQ is away for longer than the reservations live: nothing is released
// and every status stays; a person gets one task for each cause. Afterwards all
// that was unsent is sent, and what is sent becomes an order.
func TestSlowRocketMQDownBeyondTheExpiry(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	s := newSale(t, stack, hurried)
	const each, ttl = 40, time.Second
	sent := s.sendAll(each) // with the broker, which is about to die
	broker, names := stack.Brokers()[0], stack.NameServer()
	daemon := s.serve()
	daemon.awaitLog(1, logHolding)
	for _, svc := range []*devstack.Service{names, broker} {
		if err := svc.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	var unsent, unknown, lost []string
	for range each {
		unsent = append(unsent, s.reserve(ttl))
		unknown = append(unknown, s.reserve(ttl))
		s.walk(unknown[len(unknown)-1], "SEND_UNKNOWN")
		lost = append(lost, s.lost()) // due for its release, if only the evidence could be read
	}
	stays := func() error {
		for want, ids := range map[reservation.Status][]string{"RESERVED": unsent, "SEND_UNKNOWN": unknown, "ENQUEUED": append(lost, sent...)} {
			if err := s.is(want, ids...); err != nil {
				return err
			}
		}
		return s.nothingReleased()
	}
	s.throughout(10*ttl, stays)
	causes := s.taskCauses("send_blocked")
	t.Logf("send_blocked: %v", causes)
	if len(causes) == 0 || len(causes) > 3 {
		t.Errorf("tasks send_blocked by cause: %v, want a few for %d reservations", causes, 2*each)
	}
	s.keepsPromises()

	for _, svc := range []*devstack.Service{names, broker} {
		if err := svc.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	s.eventually(time.Minute, func() error { return s.is(reservation.StatusEnqueued, append(unsent, unknown...)...) })
	s.subscribe(upstream.Subscription{}, nil)
	s.settles(2 * time.Minute)
	for want, ids := range map[reservation.Status][]string{"ORDER_CREATED": append(append(sent, unsent...), unknown...), "RELEASED": lost} {
		if err := s.is(want, ids...); err != nil {
			t.Errorf("want %s: %v", want, err)
		}
	}
	daemon.end()
}

// One of two brokers is gone for good, with messages that nobody has read. Their
// reservations, and all that only a complete sweep could decide, wait until an
// operator says that it will not come back; those of the other broker go on.
func TestSlowOneOfTwoBrokersGoneForGood(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 2})
	s := newSale(t, stack, hurried)
	gone := stack.Brokers()[1]
	var atLimit, belowLimit, onKept []string
	for len(onKept) < 10 || len(belowLimit) < 10 { // a broker that was slow is left out for a while
		if len(onKept) > units/2 {
			t.Fatalf("%d messages, and hardly any on %s", len(onKept), gone.Name())
		}
		for _, id := range s.sendAll(20) {
			switch {
			case !strings.HasPrefix(s.hash(id)["mq_position"], gone.Name()+","):
				onKept = append(onKept, id)
			case len(atLimit) <= len(belowLimit):
				s.redis.HSet(t.Context(), s.scope.ReservationKey(id), "resend_count", "3")
				atLimit = append(atLimit, id)
			default:
				belowLimit = append(belowLimit, id)
			}
		}
	}
	s.passes(s.open(), 1) // a pass that knows both brokers
	if err := gone.Kill(); err != nil {
		t.Fatal(err)
	}
	nowhere := s.lost() // it might be on the one that is gone
	waiting := append(append([]string{nowhere}, atLimit...), belowLimit...)
	daemon := s.serve()
	s.subscribe(upstream.Subscription{}, nil)
	unsent := []string{s.expired(), s.expired("SEND_UNKNOWN")}
	s.eventually(time.Minute, func() error { return s.is(reservation.StatusOrderCreated, append(unsent, onKept...)...) })
	s.throughout(3*time.Second, func() error {
		if err := s.is(reservation.StatusEnqueued, waiting...); err != nil {
			return err
		}
		return s.nothingReleased()
	})
	v := s.passes(s.open(), 1)
	if n := decidedBy(v, 11, "broker_missing"); n == 0 || !v.Incomplete {
		t.Errorf("decisions %+v, want row 11, broker_missing, and an incomplete verdict", v.Jobs)
	}
	s.keepsPromises()

	if err := s.operator().ForgetBroker(t.Context(), gone.Name(), "test", "its disk is gone"); err != nil {
		t.Fatal(err)
	}
	s.settles(2 * time.Minute)
	if err := s.is(reservation.StatusOrderCreated, belowLimit...); err != nil {
		t.Errorf("resent to the broker that stays: %v", err)
	}
	if err := s.is(reservation.StatusReleased, append(atLimit, nowhere)...); err != nil {
		t.Errorf("resent to the limit before: %v", err)
	}
	daemon.end()
}

// The broker refuses every send for the whole test while it answers every
// question: nothing is capped and nothing is released for it.
func TestSlowFlowControl(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	for name, refusing := range map[string]struct{ on, off, cause string }{
		// A pool without a free buffer is how a broker notices that its disk is too slow.
		"busy":          {"transientStorePoolEnable=true", "transientStorePoolEnable=false", "broker_busy"},
		"not writeable": {"brokerPermission=4", "brokerPermission=6", ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSale(t, stack, hurried)
			configureBroker(t, stack, refusing.on)
			var unsent, lost []string
			for range 30 {
				unsent = append(unsent, s.expired(), s.expired("SEND_UNKNOWN"))
				lost = append(lost, s.expired("ENQUEUED"))
			}
			daemon := s.serve()
			daemon.awaitLog(1, logHolding)
			s.eventually(time.Minute, func() error {
				if len(s.taskCauses("send_blocked")) == 0 {
					return fmt.Errorf("no task send_blocked; tasks: %v", s.tasks())
				}
				return nil
			})
			s.throughout(10*time.Second, func() error {
				for _, id := range lost {
					if n := s.hash(id)["resend_count"]; n != "" && n != "0" {
						return fmt.Errorf("resend_count %s for a broker that takes nothing", n)
					}
				}
				if err := s.is(reservation.StatusEnqueued, lost...); err != nil {
					return err
				}
				return s.nothingReleased()
			})
			tasks := s.tasks()
			causes := s.taskCauses("send_blocked")
			t.Logf("tasks %v, send_blocked %v", tasks, causes)
			if tasks["send_refused"] != 0 {
				t.Errorf("flow control was taken for a refusal of the messages: %v", tasks)
			}
			if _, ok := causes[refusing.cause]; refusing.cause != "" && !ok {
				t.Errorf("send_blocked by cause: %v, want %s among them", causes, refusing.cause)
			}
			s.keepsPromises()

			configureBroker(t, stack, refusing.off)
			s.subscribe(upstream.Subscription{}, nil)
			s.settles(2 * time.Minute)
			if err := s.is(reservation.StatusOrderCreated, append(unsent, lost...)...); err != nil {
				t.Error(err)
			}
			daemon.end()
		})
	}
}

// configureBroker changes a setting of the running broker.
func configureBroker(t *testing.T, stack *devstack.Stack, setting string) {
	t.Helper()
	const updateBrokerConfig = 25
	peer := remoting.NewPeer(stack.Brokers()[0].Addr(), remoting.Options{CallTimeout: 10 * time.Second})
	defer peer.Close()
	if _, err := peer.Do(t.Context(), updateBrokerConfig, nil, []byte(setting+"\n")); err != nil {
		t.Fatalf("set %s: %v", setting, err)
	}
}
