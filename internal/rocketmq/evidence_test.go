package rocketmq_test

import (
	"testing"

	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
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
