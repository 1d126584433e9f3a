package rocketmq_test

import (
	"context"
	"crypto/rand"
	"errors"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/reservation"
)

func TestConfigNamesEveryMistake(t *testing.T) {
	t.Parallel()
	if err := (rocketmq.Config{NameServers: []string{"h:1"}, Topic: "t", ConsumerGroup: "g"}).Validate(); err != nil {
		t.Errorf("a good one: %v", err)
	}
	bad := rocketmq.Config{NameServers: []string{"nohost"}, Topic: "a b", ConsumerProtocol: "grpc", AccessKey: "x", SendRate: -1, SendTimeout: -1}
	err := bad.Validate()
	for _, setting := range []string{"name_servers", "topic", "consumer_group", "consumer_protocol", "access_key", "send_rate", "request_timeout"} {
		if err == nil || !containsAll(err.Error(), "rocketmq."+setting) {
			t.Errorf("%v does not name %s", err, setting)
		}
	}
}

func TestSentMessagesCarryKeysTagAndProperties(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, topic, group)
	b.cfg.Tag = "orders"
	b.sender = b.newSender(b.cfg)
	id := b.ids(1)[0]
	results := b.sender.Send(t.Context(), []rocketmq.Outgoing{{
		MessageID: id, Body: []byte("{}"), Properties: map[string]string{rocketmq.TraceProperty: "abc", "KEYS": "other"},
	}})
	position, err := rocketmq.ParsePosition(results[0].Position)
	if results[0].Outcome != rocketmq.Stored || err != nil {
		t.Fatalf("%+v, %v", results[0], err)
	}
	at, err := position.LogOffset()
	if err != nil {
		t.Fatal(err)
	}
	r, err := b.peer(stack.Service(position.Broker)).ViewMessage(t.Context(), topic, at)
	if err != nil || r.QueueID != position.Queue || r.QueueOffset != position.Offset {
		t.Fatalf("%+v, %v, want the record at %s", r, err, position)
	}
	got := map[string]string{}
	for _, name := range []string{"KEYS", "TAGS", "trace_id"} {
		got[name] = r.Properties[name]
	}
	if diff := cmp.Diff(map[string]string{"KEYS": id, "TAGS": "orders", "trace_id": "abc"}, got); diff != "" {
		t.Error(diff)
	}
}

// Every reply that a broker can give, and what services §2 makes of it.
func TestRepliesAreClassified(t *testing.T) {
	t.Parallel()
	acknowledged := map[string]string{"queueId": "1", "queueOffset": "5", "msgId": "7F00000100002A9F0000000000000123"}
	tests := map[string]struct {
		code    int
		ext     map[string]string
		outcome rocketmq.Outcome
		cause   string
	}{
		"stored":            {0, acknowledged, rocketmq.Stored, ""},
		"without a place":   {0, map[string]string{"queueId": "1"}, rocketmq.Stored, ""},
		"flush disk":        {10, acknowledged, rocketmq.Unknown, rocketmq.CauseStoredWeakly},
		"no slave":          {11, acknowledged, rocketmq.Unknown, rocketmq.CauseStoredWeakly},
		"flush slave":       {12, acknowledged, rocketmq.Unknown, rocketmq.CauseStoredWeakly},
		"system error":      {1, nil, rocketmq.Unknown, rocketmq.CauseBrokerError},
		"busy":              {2, nil, rocketmq.Unavailable, rocketmq.CauseBrokerBusy},
		"too large":         {13, nil, rocketmq.Refused, rocketmq.CauseMessageIllegal},
		"not available":     {14, nil, rocketmq.Unavailable, rocketmq.CauseBrokerBusy},
		"no permission":     {16, nil, rocketmq.Unavailable, rocketmq.CauseNoPermission},
		"no topic":          {17, nil, rocketmq.Unavailable, rocketmq.CauseTopicMissing},
		"invalid parameter": {29, nil, rocketmq.Refused, rocketmq.CauseInvalidParameter},
		"flow control":      {215, nil, rocketmq.Unavailable, rocketmq.CauseBrokerBusy},
		"something new":     {4711, nil, rocketmq.Unknown, rocketmq.CauseBrokerError},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			broker := startFake(t, func(*remoting.Command) *remoting.Command {
				return &remoting.Command{Code: tt.code, Remark: "as told", ExtFields: tt.ext}
			})
			names := fakeRoute(t, 1, map[string]string{"b": broker.addr()})
			b := bench{t: t, cfg: rocketmq.Config{NameServers: []string{names.addr()}, Topic: "t", ConsumerGroup: "g"}}
			r := b.newSender(b.cfg).Send(t.Context(), outgoing([]string{"m"}))[0]
			if r.Outcome != tt.outcome || r.Cause != tt.cause || (r.Err == nil) != (tt.outcome == rocketmq.Stored) {
				t.Errorf("%+v, want %s %s", r, tt.outcome, tt.cause)
			}
			if placed := tt.code == 0 && len(tt.ext) == 3; placed != (r.Position != "") {
				t.Errorf("position %q", r.Position)
			}
		})
	}
}

func TestARealBrokerRefusesWhatIsTooLarge(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, topic, group)
	body := make([]byte, 5<<20)
	if _, err := rand.Read(body); err != nil { // random: it cannot be compressed
		t.Fatal(err)
	}
	ids := b.ids(3)
	messages := outgoing(ids)
	messages[1].Body = body
	results := b.sender.Send(t.Context(), messages)
	if r := results[1]; r.Outcome != rocketmq.Refused || r.Cause != rocketmq.CauseMessageIllegal {
		t.Errorf("%+v, want refused", r)
	}
	if results[0].Outcome != rocketmq.Stored || results[2].Outcome != rocketmq.Stored {
		t.Errorf("the others: %+v", results)
	}
}

func TestUnavailableIsNotUnknown(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	dead := deadAddr(t)
	base := rocketmq.Config{Topic: "nobody-made-this", ConsumerGroup: "g"}
	tests := map[string]struct {
		names string
		cause string
	}{
		"no route":          {stack.NameServer().Addr(), rocketmq.CauseNoRoute},
		"name servers down": {dead, rocketmq.CauseNameServersDown},
		"broker down":       {fakeRoute(t, 1, map[string]string{"b": dead}).addr(), rocketmq.CauseDialFailed},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := bench{t: t, cfg: base}
			b.cfg.NameServers = []string{tt.names}
			s := b.newSender(b.cfg)
			causes := map[string]int{}
			for _, r := range s.Send(t.Context(), outgoing([]string{"a", "b", "c"})) {
				if r.Outcome != rocketmq.Unavailable || r.Err == nil {
					t.Errorf("%+v, want unavailable", r)
				}
				causes[r.Cause]++
			}
			if causes[tt.cause] == 0 {
				t.Errorf("causes %v, want %s", causes, tt.cause)
			}
		})
	}
	t.Run("context over", func(t *testing.T) {
		t.Parallel()
		b := newBench(t, stack, "nobody-made-this", "g")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for _, r := range b.sender.Send(ctx, outgoing([]string{"a", "b"})) {
			if r.Outcome != rocketmq.Unavailable {
				t.Errorf("%+v", r)
			}
		}
	})
}

func TestASenderOutlivesANameServerThatComesLater(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 1)
	proxy, err := faultproxy.Start(stack.NameServer().Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	proxy.Set(faultproxy.Faults{Refuse: true})
	b := bench{t: t, cfg: rocketmq.Config{NameServers: []string{proxy.Addr()}, Topic: topic, ConsumerGroup: group}}
	s := b.newSender(b.cfg)
	if r := s.Send(t.Context(), outgoing([]string{"m"}))[0]; r.Outcome != rocketmq.Unavailable {
		t.Errorf("while it is down: %+v", r)
	}
	proxy.Set(faultproxy.Faults{})
	if r := s.Send(t.Context(), outgoing([]string{"m"}))[0]; r.Outcome != rocketmq.Stored {
		t.Errorf("once it is up: %+v", r)
	}
}

func TestATimedOutSendIsUnknownAndCanBeStoredLater(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, topic, group)
	proxies := proxyBrokers(t, stack)
	cfg := proxies.config(b.cfg)
	cfg.SendTimeout = 500 * time.Millisecond
	s := b.newSender(cfg)
	for _, r := range s.Send(t.Context(), outgoing(b.ids(10))) { // connections are open
		if r.Outcome != rocketmq.Stored {
			t.Fatalf("%+v", r)
		}
	}
	for _, proxy := range proxies.brokers {
		proxy.Set(faultproxy.Faults{Stall: true})
	}
	id := b.ids(1)[0]
	query := rocketmq.Query{MessageID: id, ReservedAtMS: nowMS(), Sends: 1}
	r := s.Send(t.Context(), outgoing([]string{id}))[0]
	if r.Outcome != rocketmq.Unknown || r.Cause != rocketmq.CauseSendTimeout || r.Position != "" {
		t.Fatalf("%+v, want unknown", r)
	}
	b.want(reservation.MessageAbsent, "", query)
	for _, proxy := range proxies.brokers {
		proxy.Set(faultproxy.Faults{})
	}
	b.eventually(reservation.MessagePending, query)
}

func TestALostReplyIsUnknownAndStored(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 1)
	b := newBench(t, stack, topic, group)
	proxies := proxyBrokers(t, stack)
	cfg := proxies.config(b.cfg)
	cfg.SendTimeout = 500 * time.Millisecond
	s := b.newSender(cfg)
	for _, proxy := range proxies.brokers {
		proxy.Set(faultproxy.Faults{DropReplies: true})
	}
	query := rocketmq.Query{MessageID: b.ids(1)[0], ReservedAtMS: nowMS(), Sends: 1}
	if r := s.Send(t.Context(), outgoing([]string{query.MessageID}))[0]; r.Outcome != rocketmq.Unknown {
		t.Fatalf("%+v, want unknown", r)
	}
	b.eventually(reservation.MessagePending, query)
}

func TestABrokerThatHangsDoesNotHoldUpTheOther(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	proxies := proxyBrokers(t, stack)
	cfg := proxies.config(b.cfg)
	cfg.SendTimeout = 3 * time.Second
	s := b.newSender(cfg)
	send := func(n int) (map[rocketmq.Outcome]int, time.Duration) {
		began := time.Now()
		outcomes := map[rocketmq.Outcome]int{}
		for _, r := range s.Send(t.Context(), outgoing(b.ids(n))) {
			outcomes[r.Outcome]++
		}
		return outcomes, time.Since(began)
	}
	if outcomes, _ := send(200); outcomes[rocketmq.Stored] != 200 {
		t.Fatalf("both up: %v", outcomes)
	}
	hung := slices.Sorted(maps.Keys(proxies.brokers))[0]
	proxies.brokers[hung].Set(faultproxy.Faults{Stall: true})

	outcomes, took := send(1000)
	if outcomes[rocketmq.Unknown] > rocketmq.DefaultSendConcurrency || outcomes[rocketmq.Stored] < 900 {
		t.Errorf("with %s hanging: %v", hung, outcomes)
	}
	if took > 30*time.Second {
		t.Errorf("with %s hanging it took %s", hung, took)
	}
	t.Logf("1000 messages with one of two brokers hanging: %v in %s", outcomes, took)

	proxies.brokers[hung].Set(faultproxy.Faults{})
	for deadline := time.Now().Add(testLimit); ; {
		placed := map[string]bool{}
		for _, r := range s.Send(t.Context(), outgoing(b.ids(20))) {
			if position, err := rocketmq.ParsePosition(r.Position); err == nil {
				placed[position.Broker] = true
			}
		}
		if placed[hung] {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s was never tried again", hung)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func TestCloseDuringSends(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	b := newBench(t, stack, topic, group)
	s := b.newSender(b.cfg)
	if r := s.Send(t.Context(), outgoing(b.ids(1)))[0]; r.Outcome != rocketmq.Stored {
		t.Fatalf("%+v", r)
	}
	batches := [][]string{b.ids(500), b.ids(500), b.ids(500), b.ids(500)}
	var sending sync.WaitGroup
	for _, ids := range batches {
		sending.Go(func() {
			for _, r := range s.Send(t.Context(), outgoing(ids)) {
				if r.Outcome != rocketmq.Stored && (r.Outcome != rocketmq.Unavailable || r.Cause != rocketmq.CauseSenderClosed) {
					t.Errorf("%+v", r)
				}
			}
		})
	}
	time.Sleep(20 * time.Millisecond) // let some be under way; the outcome does not depend on it
	ctx, cancel := context.WithTimeout(t.Context(), testLimit)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		t.Error(err)
	}
	sending.Wait()
	if r := s.Send(t.Context(), outgoing([]string{"late"}))[0]; r.Cause != rocketmq.CauseSenderClosed {
		t.Errorf("after Close: %+v", r)
	}
	if err := s.Close(ctx); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestCloseDoesNotWaitForEver(t *testing.T) {
	t.Parallel()
	broker := startFake(t, func(*remoting.Command) *remoting.Command { return nil })
	names := fakeRoute(t, 1, map[string]string{"b": broker.addr()})
	b := bench{t: t, cfg: rocketmq.Config{NameServers: []string{names.addr()}, Topic: "t", ConsumerGroup: "g", SendTimeout: 2 * time.Second}}
	s, err := rocketmq.NewSender(b.cfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan []rocketmq.SendResult, 1)
	go func() { done <- s.Send(t.Context(), outgoing([]string{"m"})) }()
	time.Sleep(300 * time.Millisecond) // the send is under way
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := s.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Close: %v, want a time-out", err)
	}
	if r := (<-done)[0]; r.Outcome != rocketmq.Unknown {
		t.Errorf("%+v, want unknown", r)
	}
}
