//go:build slow

package rocketmq_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/reservation"
)

// What happens when brokers hang, die and lose what they acknowledged. The
// second retry of this stack waits for ten minutes.
func TestSlowBrokersThatBreak(t *testing.T) {
	delays := "messageDelayLevel=1s 1s 1s 600s" + strings.Repeat(" 1s", 14)
	stack := stacktest.Own(t, devstack.Options{Brokers: 2, BrokerSettings: []string{delays}})
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	step := func(name string, f func(b *bench)) {
		t.Run(name, func(t *testing.T) {
			inner := *b
			inner.t = t
			f(&inner)
			b.next = inner.next
		})
	}
	sent := b.send(20)
	b.want(reservation.MessagePending, "", sent...)

	step("a message between two retries is RETRYING", func(b *bench) { testBetweenRetries(b, sent) })
	step("a hanging broker is bounded", func(b *bench) { testHangingBroker(b, sent) })
	step("a killed broker is missed until it is forgotten", func(b *bench) { testKilledBroker(b, sent) })
	step("a message that was acknowledged and lost is ABSENT", testLostMessage)
}

func testBetweenRetries(b *bench, sent []rocketmq.Query) {
	retried := sent[:5]
	failing := make(map[string]bool)
	for _, q := range retried {
		failing[q.MessageID] = true
	}
	handle := func(msg *primitive.MessageExt, _ int) consumer.ConsumeResult {
		if failing[msg.GetKeys()] {
			return consumer.ConsumeRetryLater
		}
		return consumer.ConsumeSuccess
	}
	b.consumeUntil(reservation.MessageConsumed, sent[5:], 16, handle)
	for deadline := time.Now().Add(testLimit); ; { // until all wait for their second retry, and the first is passed
		delayed := 0
		for _, e := range b.gather(retried) {
			if e.State == reservation.MessageRetrying && strings.Contains(e.Detail, "SCHEDULE_TOPIC_XXXX queue 3") {
				delayed++
			}
		}
		if delayed == len(retried) {
			break
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("not all are delayed: %+v", b.gather(retried))
		}
		h, stop := b.consume("*", 16, handle)
		h.awaitQuiet(2 * time.Second)
		stop()
	}
	b.want(reservation.MessageRetrying, "", retried...)
	b.want(reservation.MessageConsumed, "", sent[5:]...)
	other := rocketmq.Query{MessageID: b.ids(1)[0], ReservedAtMS: nowMS()}
	b.want(reservation.MessageAbsent, "", other)
}

func testHangingBroker(b *bench, sent []rocketmq.Query) {
	hung := b.stack.Brokers()[1]
	b.cfg.RequestTimeout = 3 * time.Second
	b.evidence = b.newEvidence(b.cfg)
	if err := hung.Pause(); err != nil {
		b.t.Fatal(err)
	}
	began := time.Now()
	b.want(reservation.MessageUnknown, rocketmq.UnknownBroker, sent...)
	if took := time.Since(began); took > 40*time.Second {
		b.t.Errorf("two passes took %s", took)
	}
	if err := hung.Resume(); err != nil {
		b.t.Fatal(err)
	}
	b.eventually(reservation.MessageConsumed, sent[9])
}

func testKilledBroker(b *bench, sent []rocketmq.Query) {
	pending := b.send(20)
	killed := b.stack.Brokers()[1]
	if err := killed.Kill(); err != nil {
		b.t.Fatal(err)
	}
	// First it does not answer, then the name server drops it from the route.
	var cause string
	for deadline := time.Now().Add(testLimit); cause != rocketmq.UnknownBrokerMissing; time.Sleep(100 * time.Millisecond) {
		for id, e := range b.gather(unplaced(pending)) {
			if cause = e.Cause; e.State != reservation.MessageUnknown {
				b.t.Fatalf("%s is %+v with a broker down", id, e)
			}
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("the broker is still in the route: %s", cause)
		}
	}
	for id, e := range b.gather(pending) { // a position on the living broker still decides
		position, _ := rocketmq.ParsePosition(positionOf(pending, id))
		if lives := position.Broker != killed.Name(); lives != (e.State == reservation.MessagePending) {
			b.t.Errorf("%s on %s is %+v", id, position.Broker, e)
		}
	}

	b.registry.forget(killed.Name())
	for id, e := range b.gather(unplaced(pending)) { // an operator said that it is gone for good
		position, _ := rocketmq.ParsePosition(positionOf(pending, id))
		want := reservation.MessagePending
		if position.Broker == killed.Name() {
			want = reservation.MessageAbsent
		}
		if e.State != want {
			b.t.Errorf("%s on %s is %+v after the broker was forgotten, want %s", id, position.Broker, e, want)
		}
	}
	if err := killed.Start(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	for _, q := range pending {
		b.eventually(reservation.MessagePending, q)
	}
	b.want(reservation.MessageConsumed, "", sent[5:]...)
}

func positionOf(queries []rocketmq.Query, id string) string {
	for _, q := range queries {
		if q.MessageID == id {
			return q.Position
		}
	}
	return ""
}

// The broker comes back without its data and gives the same offsets to others.
func testLostMessage(b *bench) {
	victim := b.stack.Brokers()[1]
	// The old sender learns only within 30 s that the broker is back.
	b.sender = b.newSender(b.cfg)
	var lost []rocketmq.Query
	for deadline := time.Now().Add(testLimit); len(lost) == 0; {
		for _, q := range b.send(40) {
			if position, _ := rocketmq.ParsePosition(q.Position); position.Broker == victim.Name() {
				lost = append(lost, q)
			}
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("nothing was sent to %s", victim.Name())
		}
	}
	b.want(reservation.MessagePending, "", lost...)
	if err := victim.Kill(); err != nil {
		b.t.Fatal(err)
	}
	for _, part := range []string{"commitlog", "consumequeue", "index", "checkpoint"} {
		if err := os.RemoveAll(filepath.Join(victim.Dir(), "store", part)); err != nil {
			b.t.Fatal(err)
		}
	}
	if err := victim.Start(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	b.eventually(reservation.MessageAbsent, lost[0])
	b.want(reservation.MessageAbsent, "", lost...)
	b.sender = b.newSender(b.cfg)
	gone, err := rocketmq.ParsePosition(lost[0].Position)
	if err != nil {
		b.t.Fatal(err)
	}
	for deadline, reused := time.Now().Add(testLimit), false; !reused; { // others get the offsets again
		for _, q := range b.send(100) {
			position, _ := rocketmq.ParsePosition(q.Position)
			reused = reused || position.Broker == gone.Broker && position.Queue == gone.Queue && position.Offset == gone.Offset
		}
		b.want(reservation.MessageAbsent, "", lost...)
		if time.Now().After(deadline) {
			b.t.Fatalf("offset %s was never given to another message", gone)
		}
	}
}

// Brokers that authenticate: signed requests and sends pass, others are refused
// and leave the evidence UNKNOWN.
func TestSlowBrokersThatAuthenticate(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Brokers: 1, BrokerSettings: []string{
		"authenticationEnabled=true",
		"authenticationProvider=org.apache.rocketmq.auth.authentication.provider.DefaultAuthenticationProvider",
		"authenticationMetadataProvider=org.apache.rocketmq.auth.authentication.provider.LocalAuthenticationMetadataProvider",
		`initAuthenticationUser={"username":"daemon","password":"secret-1"}`,
		`innerClientAuthenticationCredentials={"accessKey":"daemon","secretKey":"secret-1"}`,
		"authenticationWhitelist=17,25,200", // what the stack itself asks
	}})
	topic, group := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, topic, group)
	signed := b.cfg
	signed.AccessKey, signed.SecretKey = "daemon", "secret-1"
	wrong := signed
	wrong.SecretKey = "secret-2"

	query := rocketmq.Query{MessageID: b.ids(1)[0], ReservedAtMS: nowMS(), Sends: 1}
	for name, cfg := range map[string]rocketmq.Config{"unsigned": b.cfg, "wrong key": wrong} {
		if r := b.newSender(cfg).Send(t.Context(), outgoing([]string{"m"}))[0]; r.Outcome == rocketmq.Stored || r.Outcome == rocketmq.Refused {
			t.Errorf("%s: %+v", name, r)
		}
		e := gather(t, b.newEvidence(cfg), []rocketmq.Query{query})[query.MessageID]
		if e.State != reservation.MessageUnknown || e.Cause != rocketmq.UnknownRefused {
			t.Errorf("%s: %+v, want UNKNOWN %s", name, e, rocketmq.UnknownRefused)
		}
	}
	if r := b.newSender(signed).Send(t.Context(), outgoing([]string{query.MessageID}))[0]; r.Outcome != rocketmq.Stored {
		t.Fatalf("signed: %+v", r)
	}
	b.evidence = b.newEvidence(signed)
	b.eventually(reservation.MessagePending, query)
}
