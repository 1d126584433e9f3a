package rocketmq_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"

	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/reservation"
)

func TestMessagesFromPendingToConsumed(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 4)
	b := newBench(t, stack, topic, group)

	sent := b.send(50)
	b.want(reservation.MessagePending, "", sent...)

	b.consumeUntil(reservation.MessageConsumed, sent, 16, consumeAll)
	b.want(reservation.MessageConsumed, "", sent...)

	later := b.send(3)
	b.want(reservation.MessagePending, "", later...)
	b.want(reservation.MessageConsumed, "", sent...)

	never := later[0]
	never.MessageID = b.ids(1)[0] // the position of another message
	b.want(reservation.MessageAbsent, "", never)
}

func TestMessagesThatDie(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)

	sent := b.send(5)
	before := nowMS()
	b.consumeUntil(reservation.MessageDead, sent[1:], 1, func(msg *primitive.MessageExt, _ int) consumer.ConsumeResult {
		if msg.GetKeys() == sent[0].MessageID {
			return consumer.ConsumeSuccess
		}
		return consumer.ConsumeRetryLater
	})
	b.want(reservation.MessageDead, "", sent[1:]...)
	b.want(reservation.MessageConsumed, "", sent[0])
	for id, e := range b.gather(sent[1:]) {
		if e.SinceMS < before || e.SinceMS > nowMS() {
			t.Errorf("%s is dead since %d, want a time between %d and now", id, e.SinceMS, before)
		}
	}

	b.sendIDs([]string{sent[1].MessageID}) // replayed from the dead-letter topic
	b.want(reservation.MessageDead, "", sent[2:]...)
	if e := b.gather(unplaced(sent[1:2]))[sent[1].MessageID]; e.State != reservation.MessagePending {
		t.Errorf("after a replay: %+v, want PENDING", e)
	}
}

func TestAResentMessageCountsByItsStrongestCopy(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	sent := b.send(4)
	b.consumeUntil(reservation.MessageConsumed, sent, 16, consumeAll)
	again := b.sendIDs([]string{sent[0].MessageID})[0]
	again.Sends = 2

	b.want(reservation.MessagePending, "", again) // at its new position, which does not count for two sends
	stale := again
	stale.Position = sent[0].Position
	b.evidence = b.newEvidence(b.cfg)             // one that has swept nothing yet
	b.want(reservation.MessagePending, "", stale) // at its old position
	b.want(reservation.MessageConsumed, "", sent[1:]...)
}

func TestAMessageThatSucceedsAtLastIsConsumed(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	sent := b.send(20)
	b.consumeUntil(reservation.MessageConsumed, sent, 16, func(_ *primitive.MessageExt, times int) consumer.ConsumeResult {
		if times < 3 {
			return consumer.ConsumeRetryLater
		}
		return consumer.ConsumeSuccess
	})
	b.want(reservation.MessageConsumed, "", sent...) // its copies in SCHEDULE and %RETRY% are passed
	b.evidence = b.newEvidence(b.cfg)
	b.want(reservation.MessageConsumed, "", sent...)
}

func TestOnlyTheConsumersTagIsDelivered(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	others := b.send(20) // without the tag: another application's
	b.cfg.Tag = "orders"
	b.sender = b.newSender(b.cfg)
	b.evidence = b.newEvidence(b.cfg)
	sent := b.send(20)
	b.want(reservation.MessagePending, "", sent...)

	delivered := 0
	h, stop := b.consume("orders", 16, func(msg *primitive.MessageExt, _ int) consumer.ConsumeResult {
		if msg.GetTags() != "orders" {
			delivered++
		}
		return consumer.ConsumeSuccess
	})
	h.await(t, 1, sent...)
	for _, q := range sent {
		b.eventually(reservation.MessageConsumed, q)
	}
	stop()
	if delivered > 0 {
		t.Errorf("%d messages without the tag were delivered", delivered)
	}
	b.want(reservation.MessageConsumed, "", sent...)
	// Passed without being delivered: the offset cannot tell, the claim can.
	for _, q := range others {
		b.eventually(reservation.MessageConsumed, q)
	}
}

func TestAGroupOrTopicThatDoesNotExistIsUnknown(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	sent := b.send(3)

	misspelt := b.cfg
	misspelt.ConsumerGroup = group + "-x"
	b.evidence = b.newEvidence(misspelt)
	b.want(reservation.MessageUnknown, rocketmq.UnknownGroup, sent...)
	b.want(reservation.MessageUnknown, rocketmq.UnknownGroup, sent...) // asking did not create it

	missing := b.cfg
	missing.Topic = topic + "-x"
	b.evidence = b.newEvidence(missing)
	b.want(reservation.MessageUnknown, rocketmq.UnknownNoRoute, sent...)

	down := b.cfg
	down.NameServers = []string{deadAddr(t)}
	b.evidence = b.newEvidence(down)
	b.want(reservation.MessageUnknown, rocketmq.UnknownNameServers, sent...)

	b.evidence = b.newEvidence(b.cfg)
	b.want(reservation.MessageUnknown, rocketmq.UnknownInvalidQuery,
		rocketmq.Query{MessageID: "a|b", ReservedAtMS: nowMS()}, rocketmq.Query{MessageID: "a"})
	b.want(reservation.MessagePending, "", sent...)
}

// A broker that acknowledged a message and was gone before anybody looked is
// missing for that message alone, until a person forgets it.
func TestAPositionOnABrokerNobodySaw(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	sent := b.send(2)
	away := rocketmq.Query{MessageID: b.ids(1)[0], ReservedAtMS: nowMS(), Sends: 1, Position: "broker-that-died,0,5,7F0000010000278F0000000000000ABC"}
	again := away
	again.MessageID, again.Sends = b.ids(1)[0], 4
	wantAway := func(state reservation.MessageState, cause string) {
		t.Helper()
		found := b.evidence.Gather(t.Context(), nowMS(), append([]rocketmq.Query{away, again}, sent...))
		for _, q := range []rocketmq.Query{away, again} {
			if e := found[q.MessageID]; e.State != state || e.Cause != cause {
				t.Errorf("after %d sends: %+v, want %s %s", q.Sends, e, state, cause)
			}
		}
		if e := found[sent[0].MessageID]; cause != rocketmq.UnknownRegistry && e.State != reservation.MessagePending {
			t.Errorf("its neighbour: %+v, want PENDING", e)
		}
	}
	wantAway(reservation.MessageUnknown, rocketmq.UnknownBrokerMissing)
	b.registry.forget("broker-that-died")
	wantAway(reservation.MessageAbsent, "")
	b.registry.breakWith(errors.New("away"))
	wantAway(reservation.MessageUnknown, rocketmq.UnknownRegistry)
}

func TestPassedOffsetsProveNothingForPOP(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	sent := b.send(4)
	b.consumeUntil(reservation.MessageConsumed, sent, 16, consumeAll)
	waiting := b.send(2)

	b.cfg.ConsumerProtocol = rocketmq.ProtocolPOP
	b.evidence = b.newEvidence(b.cfg)
	b.want(reservation.MessageUnknown, rocketmq.UnknownPOP, sent...)
	b.want(reservation.MessagePending, "", waiting...)
	b.want(reservation.MessageUnknown, rocketmq.UnknownPOP, rocketmq.Query{MessageID: b.ids(1)[0], ReservedAtMS: nowMS()})
}

func TestOffsetsThatWereReset(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, topic, group)
	sent := b.send(10)
	for _, svc := range stack.Brokers() {
		b.commit(svc, 1<<40) // skipped without being delivered
	}
	b.want(reservation.MessageConsumed, "", sent...)
	for _, svc := range stack.Brokers() {
		b.commit(svc, 0) // and back: all of it will be delivered once more
	}
	b.want(reservation.MessagePending, "", sent...)
}

func TestARegistryThatCannotBeUsedIsUnknown(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	sent := b.send(3)
	b.registry.breakWith(errors.New("database is down"))
	b.want2(reservation.MessagePending, reservation.MessageUnknown, rocketmq.UnknownRegistry, sent...)
	b.registry.breakWith(nil)
	b.want(reservation.MessagePending, "", sent...)

	// A broker that was seen and is not in the route; and one with more queues than it has now.
	if err := b.registry.Record(t.Context(), []rocketmq.ExpectedQueue{{Broker: "gone", Topic: topic, Queues: 2}}); err != nil {
		t.Fatal(err)
	}
	b.want2(reservation.MessagePending, reservation.MessageUnknown, rocketmq.UnknownBrokerMissing, sent...)
	b.registry.forget("gone")
	b.want(reservation.MessagePending, "", sent...)
	name := stack.Brokers()[0].Name()
	if err := b.registry.Record(t.Context(), []rocketmq.ExpectedQueue{{Broker: name, Topic: topic, Queues: 3}}); err != nil {
		t.Fatal(err)
	}
	b.want2(reservation.MessagePending, reservation.MessageUnknown, rocketmq.UnknownQueueMissing, sent...)
	b.registry.forget(name)
	b.want(reservation.MessagePending, "", sent...)
}

func TestClocksThatDisagreeAreUnknown(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	absent := rocketmq.Query{MessageID: b.ids(1)[0], ReservedAtMS: nowMS()}
	half := rocketmq.DefaultSweepMargin / 2
	for _, tt := range []struct {
		skew time.Duration
		want reservation.MessageState
	}{
		{0, reservation.MessageAbsent},
		{half - 30*time.Second, reservation.MessageAbsent},
		{30*time.Second - half, reservation.MessageAbsent},
		{half + 30*time.Second, reservation.MessageUnknown},
		{-half - 30*time.Second, reservation.MessageUnknown},
	} {
		e := b.evidence.Gather(t.Context(), nowMS()+tt.skew.Milliseconds(), []rocketmq.Query{absent})[absent.MessageID]
		if e.State != tt.want || (e.State == reservation.MessageUnknown && e.Cause != rocketmq.UnknownClockSkew) {
			t.Errorf("Redis %s ahead: %+v, want %s", tt.skew, e, tt.want)
		}
	}
}

func TestAWindowThatDoesNotFitIsUnknown(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, topic, group)
	old := b.send(300)
	time.Sleep(20 * time.Millisecond)
	recent := b.send(40)
	b.cfg.MaxSweepMessages, b.cfg.SweepMargin = 200, 5*time.Millisecond
	b.evidence = b.newEvidence(b.cfg)
	old, recent = unplaced(old), unplaced(recent)

	found := b.gather(append(old, recent...))
	for _, q := range old[:10] { // the earliest
		if e := found[q.MessageID]; e.State != reservation.MessageUnknown || e.Cause != rocketmq.UnknownWindowTooLarge {
			t.Fatalf("%s is %+v, want UNKNOWN %s", q.MessageID, e, rocketmq.UnknownWindowTooLarge)
		}
	}
	for id, e := range b.gather(recent) { // asked alone, they fit: what the others needed was dropped
		if e.State != reservation.MessagePending {
			t.Fatalf("%s is %+v, want PENDING", id, e)
		}
	}
}

func TestMessagesSweptBeforeTheyWereAskedFor(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	first := b.send(100)
	b.want(reservation.MessagePending, "", first[0]) // sweeps all of them
	second := b.send(100)
	b.want(reservation.MessagePending, "", second[99])
	b.want(reservation.MessagePending, "", append(first, second...)...)

	older := first[7]
	older.ReservedAtMS -= 3_600_000 // an older start back-fills
	b.want(reservation.MessagePending, "", older)
	if err := b.evidence.Forget(t.Context(), nowMS()+rocketmq.DefaultSweepMargin.Milliseconds()+60_000); err != nil {
		t.Fatal(err)
	}
	b.want(reservation.MessagePending, "", append(first, second...)...) // forgotten, and read again
}

func TestABrokerThatHangsIsBounded(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	proxies := proxyBrokers(t, stack)
	b.cfg = proxies.config(b.cfg)
	b.cfg.RequestTimeout = 2 * time.Second
	b.evidence = b.newEvidence(b.cfg)
	sent := b.send(40)
	b.want(reservation.MessagePending, "", sent...)

	hung := stack.Brokers()[1].Name()
	for name, faults := range map[string]faultproxy.Faults{
		"hangs": {Stall: true}, "answers nothing": {DropReplies: true}, "resets": {CutAfter: 100},
	} {
		proxies.brokers[hung].Set(faults)
		began := time.Now()
		placed, swept := b.gather(sent), b.gather(unplaced(sent))
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("%s: two passes took %s", name, took)
		}
		for _, q := range sent {
			position, _ := rocketmq.ParsePosition(q.Position)
			want := reservation.MessagePending // known by its position on the healthy broker
			if position.Broker == hung {
				want = reservation.MessageUnknown
			}
			if e := placed[q.MessageID]; e.State != want {
				t.Fatalf("%s: %s at %s is %+v, want %s", name, q.MessageID, q.Position, e, want)
			}
			if e := swept[q.MessageID]; e.State != reservation.MessageUnknown || e.Cause != rocketmq.UnknownBroker {
				t.Fatalf("%s: %s without position is %+v, want UNKNOWN", name, q.MessageID, e)
			}
		}
		proxies.brokers[hung].Set(faultproxy.Faults{})
		b.eventually(reservation.MessagePending, sent[0])
		b.want(reservation.MessagePending, "", sent...)
	}
}

func TestAPassEndsWithItsContext(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	sent := unplaced(b.send(10))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for id, e := range b.evidence.Gather(ctx, nowMS(), sent) {
		if e.State != reservation.MessageUnknown || e.Cause == "" {
			t.Errorf("%s: %+v", id, e)
		}
	}
	if len(b.evidence.Gather(t.Context(), nowMS(), nil)) != 0 {
		t.Error("no query has an answer")
	}
	b.want(reservation.MessagePending, "", sent...)
}

func TestProbe(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 3)
	b := newBench(t, stack, topic, group)
	h, err := b.evidence.Probe(t.Context())
	if err != nil || h.Err() != nil || !h.TopicExists || !h.GroupKnown || h.Queues != 6 || len(h.Brokers) != 2 {
		t.Errorf("%+v, %v, %v", h, h.Err(), err)
	}
	if seen, err := b.registry.Expected(t.Context(), topic); err != nil || len(seen) != 2 || seen[0].Queues != 3 {
		t.Errorf("recorded %v, %v", seen, err)
	}
	missing := b.cfg
	missing.Topic, missing.ConsumerGroup = topic+"-x", group+"-x"
	if h, err = b.newEvidence(missing).Probe(t.Context()); err != nil || h.TopicExists || h.GroupKnown || h.Err() == nil {
		t.Errorf("missing topic: %+v, %v", h, err)
	}
	half := b.cfg
	half.NameServers = append(half.NameServers, deadAddr(t))
	if h, err = b.newEvidence(half).Probe(t.Context()); err != nil || h.Err() != nil || h.NameServers[half.NameServers[1]] == nil {
		t.Errorf("one of two name servers: %+v, %v", h, err)
	}
	down := b.cfg
	down.NameServers = []string{fakeRoute(t, 1, map[string]string{"b": deadAddr(t)}).addr()}
	if h, err = b.newEvidence(down).Probe(t.Context()); err != nil || h.Err() == nil || h.Brokers["b"] == nil {
		t.Errorf("broker down: %+v, %v", h, err)
	}
}

// A message that fails again and again moves between SCHEDULE and %RETRY% all
// the time. Whenever it is looked for, it must be found waiting: only the order
// in which offsets and topics are read sees to that.
func TestAFailingMessageIsNeverTakenForConsumed(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	sent := b.send(40)
	failing := map[string]bool{}
	for _, q := range sent {
		failing[q.MessageID] = true
	}
	h, stop := b.consume("*", 16, func(msg *primitive.MessageExt, _ int) consumer.ConsumeResult {
		if failing[msg.GetKeys()] {
			return consumer.ConsumeRetryLater
		}
		return consumer.ConsumeSuccess
	})
	h.await(t, 1, sent...)

	states := map[reservation.MessageState]int{}
	for looks := 0; h.timesOf(sent[len(sent)-1]) < 7; looks++ {
		b.send(8) // the consumer stores its offset when it asks for more
		asked := unplaced(sent)
		if looks%2 == 1 {
			asked = sent
		}
		for id, e := range b.gather(asked) {
			states[e.State]++
			if e.State != reservation.MessagePending && e.State != reservation.MessageRetrying {
				t.Fatalf("%s is %+v while it is being retried", id, e)
			}
		}
	}
	stop()
	if states[reservation.MessageRetrying] == 0 {
		t.Errorf("none was seen between two deliveries: %v", states)
	}
	t.Logf("looked at %v", states)
}
