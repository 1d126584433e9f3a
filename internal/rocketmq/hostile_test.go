package rocketmq_test

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/reservation"
)

// What a broker in front of the daemon can do: whatever it sends, the evidence
// is UNKNOWN, in bounded time and memory.
func TestHostileBrokersLeaveEverythingUnknown(t *testing.T) {
	t.Parallel()
	big := bytes.Repeat([]byte("["), 8<<20)
	tests := map[string]func(request *remoting.Command) *remoting.Command{
		"never answers": func(*remoting.Command) *remoting.Command { return nil },
		"refuses all":   func(*remoting.Command) *remoting.Command { return &remoting.Command{Code: remoting.SystemError} },
		"agrees to all": func(*remoting.Command) *remoting.Command { return &remoting.Command{} },
		"empty objects": func(*remoting.Command) *remoting.Command { return &remoting.Command{Body: []byte("{}")} },
		"nested deep":   func(*remoting.Command) *remoting.Command { return &remoting.Command{Body: big} },
		"huge numbers": func(*remoting.Command) *remoting.Command {
			return &remoting.Command{
				ExtFields: map[string]string{"offset": "9223372036854775807", "minOffset": "0", "maxOffset": "9223372036854775807", "nextBeginOffset": "0"},
				Body:      []byte(`{"table":{"bootTimestamp":"9223372036854775807","runtime":"[ 9 days, 9 hours, 9 minutes, 9 seconds ]","earliestMessageTimeStamp":"1","dispatchBehindBytes":"0","commitLogMaxOffset":"0"}}`),
			}
		},
	}
	for name, answer := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			broker := startFake(t, answer)
			b := &bench{t: t, registry: &memoryRegistry{}, cfg: rocketmq.Config{
				NameServers: []string{fakeRoute(t, 4, map[string]string{"b": broker.addr()}).addr()},
				Topic:       "t", ConsumerGroup: "g", RequestTimeout: 300 * time.Millisecond,
			}}
			b.evidence = b.newEvidence(b.cfg)
			began := time.Now()
			for i := range 3 {
				query := rocketmq.Query{MessageID: "m" + strconv.Itoa(i), ReservedAtMS: nowMS(), Sends: 1, Position: "b,0,5,7F00000100002A9F0000000000000123"}
				e := b.gather([]rocketmq.Query{query})[query.MessageID]
				if e.State != reservation.MessageUnknown || e.Cause == "" {
					t.Errorf("%+v, want UNKNOWN", e)
				}
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("three passes took %s", took)
			}
		})
	}
}

// A broker that says it holds an absurd number of messages costs no memory.
func TestAnAbsurdQueueIsUnknown(t *testing.T) {
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, topic, group)
	query := unplaced(b.send(1))[0]
	b.evidence = b.newEvidence(tampered(t, stack, b.cfg, func(request, reply *remoting.Command) {
		if request.Code == remoting.RequestTopicStats && request.ExtFields["topic"] == topic {
			setJSON(reply, `"maxOffset":`, "9000000000000000000")
		}
	}))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	e := b.gather([]rocketmq.Query{query})[query.MessageID]
	runtime.ReadMemStats(&after)
	if e.State != reservation.MessageUnknown || e.Cause != rocketmq.UnknownQueueChanged {
		t.Errorf("%+v, want UNKNOWN %s", e, rocketmq.UnknownQueueChanged)
	}
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 256<<20 {
		t.Errorf("%d bytes were allocated", grown)
	}
}

func TestWhatMakesASweepBlindIsUnknown(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, topic, group)
	sent := b.send(40)
	for deep := map[string]bool{}; len(deep) < len(stack.Brokers()); { // a broker that was busy has had few
		sent = append(sent, b.send(10)...)
		for _, q := range sent {
			if position, err := rocketmq.ParsePosition(q.Position); err == nil && position.Offset >= 19 {
				deep[position.Broker] = true
			}
		}
	}
	query := sent[slices.IndexFunc(sent, func(q rocketmq.Query) bool {
		position, err := rocketmq.ParsePosition(q.Position)
		return err == nil && position.Offset == 7 // beyond what is said to be deleted below
	})]
	query.Position = ""
	b.want(reservation.MessagePending, "", query)
	future := strconv.FormatInt(nowMS()+3_600_000, 10)
	ofTopic := func(request *remoting.Command, code int) bool {
		return request.Code == code && request.ExtFields["topic"] == topic
	}
	tests := map[string]struct {
		alter func(request, reply *remoting.Command)
		cause string
	}{
		"records of the window were deleted": {func(request, reply *remoting.Command) {
			switch {
			case ofTopic(request, remoting.RequestTopicStats):
				setJSON(reply, `"minOffset":`, "3")
			case request.Code == remoting.RequestBrokerRuntimeInfo:
				setJSON(reply, `"earliestMessageTimeStamp":`, `"`+strconv.FormatInt(query.ReservedAtMS, 10)+`"`)
			}
		}, rocketmq.UnknownRetention},
		"all records were deleted": {func(request, reply *remoting.Command) {
			switch {
			case ofTopic(request, remoting.RequestTopicStats):
				setJSON(reply, `"minOffset":`, "20")
				setJSON(reply, `"maxOffset":`, "20")
			case request.Code == remoting.RequestBrokerRuntimeInfo:
				setJSON(reply, `"earliestMessageTimeStamp":`, `"`+future+`"`)
			}
		}, rocketmq.UnknownRetention},
		"queues lag behind": {func(request, reply *remoting.Command) {
			if request.Code == remoting.RequestBrokerRuntimeInfo {
				setJSON(reply, `"dispatchBehindBytes":`, `"99999999"`)
			}
		}, rocketmq.UnknownDispatchBehind},
		"retries in the timer wheel": {func(request, reply *remoting.Command) {
			if request.Code == remoting.RequestBrokerConfig {
				reply.Body = []byte("timerWheelEnable=true\ntimerInterceptDelayLevel=true\n")
			}
		}, rocketmq.UnknownTimerWheel},
		"ACL refuses the delay offsets": {func(request, reply *remoting.Command) {
			if request.Code == remoting.RequestAllDelayOffset {
				reply.Code = remoting.NoPermission
			}
		}, rocketmq.UnknownRefused},
		"a record is missing": {func(request, reply *remoting.Command) {
			if ofTopic(request, remoting.RequestPullMessage) && len(reply.Body) > 4 {
				reply.Body = reply.Body[binary.BigEndian.Uint32(reply.Body):] // the first of each page
			}
		}, rocketmq.UnknownQueueChanged},
		"several messages under one offset": {func(request, reply *remoting.Command) {
			if ofTopic(request, remoting.RequestPullMessage) && len(reply.Body) > 40 {
				reply.Body[39] |= 1 << 7
			}
		}, rocketmq.UnknownBatchQueue},
		"records are garbage": {func(request, reply *remoting.Command) {
			if ofTopic(request, remoting.RequestPullMessage) && len(reply.Body) > 40 {
				copy(reply.Body[4:], "garbage")
			}
		}, rocketmq.UnknownProtocol},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := b.newEvidence(tampered(t, stack, b.cfg, tt.alter))
			found := gather(t, e, []rocketmq.Query{query})[query.MessageID]
			if found.State != reservation.MessageUnknown || found.Cause != tt.cause {
				t.Errorf("%+v, want UNKNOWN %s", found, tt.cause)
			}
		})
	}
	t.Run("old records were deleted before the window", func(t *testing.T) {
		t.Parallel()
		e := b.newEvidence(tampered(t, stack, b.cfg, func(request, reply *remoting.Command) {
			if ofTopic(request, remoting.RequestTopicStats) {
				setJSON(reply, `"minOffset":`, "1") // the broker's oldest record is older than the window
			}
			if request.Code == remoting.RequestBrokerRuntimeInfo {
				setJSON(reply, `"earliestMessageTimeStamp":`, `"1000"`)
			}
		}))
		if found := gather(t, e, []rocketmq.Query{query})[query.MessageID]; found.State != reservation.MessagePending {
			t.Errorf("%+v, want PENDING", found)
		}
	})
}

// The broker lost its tail and reused the offsets: what was swept of it is
// worthless, although the queue is as long as before.
func TestATailThatWasReplacedIsReadAgain(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	before, group := stacktest.Topic(t, stack, 1)
	after, _ := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, before, group)
	b.prefix = "r-" + group // the topics' names are swapped below
	lost := unplaced(b.send(40))
	b.cfg.Topic = after
	b.sender = b.newSender(b.cfg)
	kept := unplaced(b.send(60))
	b.cfg.Topic = before

	// To the daemon one topic: at first as before, then as after.
	replaced := false
	b.evidence = b.newEvidence(tamperedRequests(t, stack, b.cfg, func(request *remoting.Command) {
		if request.ExtFields["topic"] == before && replaced {
			request.ExtFields["topic"] = after
		}
	}, func(_, reply *remoting.Command) {
		reply.Body = bytes.ReplaceAll(reply.Body, []byte(after), []byte(before))
	}))
	b.want(reservation.MessagePending, "", lost...)
	b.want(reservation.MessageAbsent, "", kept...)
	replaced = true
	b.want(reservation.MessageAbsent, "", lost...)
	b.want(reservation.MessagePending, "", kept...)
}
