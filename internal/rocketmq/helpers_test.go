package rocketmq_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	rmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/reservation"
)

// testLimit bounds one call of a test.
const testLimit = 60 * time.Second

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// memoryRegistry is a QueueRegistry in memory, as an operator could use it.
type memoryRegistry struct {
	mu        sync.Mutex
	queues    map[[2]string]int32
	forgotten []string
	broken    error
}

func (r *memoryRegistry) Forgotten(context.Context) ([]string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.forgotten, r.broken
}

func (r *memoryRegistry) Record(_ context.Context, queues []rocketmq.ExpectedQueue) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.broken != nil {
		return r.broken
	}
	if r.queues == nil {
		r.queues = make(map[[2]string]int32)
	}
	for _, q := range queues {
		key := [2]string{q.Broker, q.Topic}
		r.queues[key] = max(r.queues[key], q.Queues)
	}
	return nil
}

func (r *memoryRegistry) Expected(_ context.Context, topic string) ([]rocketmq.ExpectedQueue, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.broken != nil {
		return nil, r.broken
	}
	var queues []rocketmq.ExpectedQueue
	for key, n := range r.queues {
		if key[1] == topic {
			queues = append(queues, rocketmq.ExpectedQueue{Broker: key[0], Topic: topic, Queues: n})
		}
	}
	return queues, nil
}

func (r *memoryRegistry) forget(broker string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.queues, func(key [2]string, _ int32) bool { return key[0] == broker })
	r.forgotten = append(r.forgotten, broker)
}

func (r *memoryRegistry) breakWith(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.broken = err
}

// bench is a topic and group on a stack, with what the tests do to them.
type bench struct {
	t        *testing.T
	stack    *devstack.Stack
	cfg      rocketmq.Config
	registry *memoryRegistry
	sender   *rocketmq.Sender
	evidence *rocketmq.Evidence
	prefix   string // of its message ids
	next     int
}

func newBench(t *testing.T, stack *devstack.Stack, topic, group string) *bench {
	t.Helper()
	b := &bench{t: t, stack: stack, prefix: "r-" + topic, registry: &memoryRegistry{}, cfg: rocketmq.Config{
		NameServers: []string{stack.NameServer().Addr()}, Topic: topic, ConsumerGroup: group,
		SendTimeout: testLimit / 2, RequestTimeout: testLimit / 3, // no test depends on a quick machine
	}}
	b.sender = b.newSender(b.cfg)
	b.evidence = b.newEvidence(b.cfg)
	return b
}

func (b *bench) newSender(cfg rocketmq.Config) *rocketmq.Sender {
	b.t.Helper()
	s, err := rocketmq.NewSender(cfg, quiet())
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), testLimit)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			b.t.Error(err)
		}
	})
	return s
}

func (b *bench) newEvidence(cfg rocketmq.Config) *rocketmq.Evidence {
	b.t.Helper()
	e, err := rocketmq.NewEvidence(cfg, b.registry, quiet())
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(e.Close)
	return e
}

// ids are message ids that no other test has used.
func (b *bench) ids(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		b.next++
		ids[i] = reservation.MessageID(b.prefix + "-" + strconv.Itoa(b.next))
	}
	return ids
}

func outgoing(ids []string) []rocketmq.Outgoing {
	messages := make([]rocketmq.Outgoing, len(ids))
	for i, id := range ids {
		messages[i] = rocketmq.Outgoing{MessageID: id, Body: []byte(`{"message_id":"` + id + `"}`)}
	}
	return messages
}

// send sends new messages, all of which must be stored, and returns the
// queries for them, with their positions.
func (b *bench) send(n int) []rocketmq.Query {
	b.t.Helper()
	return b.sendIDs(b.ids(n))
}

func (b *bench) sendIDs(ids []string) []rocketmq.Query {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), testLimit)
	defer cancel()
	reserved := nowMS()
	queries := make([]rocketmq.Query, 0, len(ids))
	for left := ids; len(left) > 0; {
		var busy []string // a loaded broker may well be: it did not store these
		for i, r := range b.sender.Send(ctx, outgoing(left)) {
			switch {
			case r.Outcome == rocketmq.Unavailable && ctx.Err() == nil:
				busy = append(busy, left[i])
			case r.Outcome != rocketmq.Stored || r.Position == "" || r.MessageID != left[i]:
				b.t.Fatalf("send of %s: %+v", left[i], r)
			default:
				queries = append(queries, rocketmq.Query{MessageID: r.MessageID, ReservedAtMS: reserved, Sends: 1, Position: r.Position})
			}
		}
		if left = busy; len(left) > 0 {
			time.Sleep(100 * time.Millisecond)
		}
	}
	b.awaitQueued(queries)
	return queries
}

// awaitQueued waits until the queues show what was sent: a broker acknowledges
// a message when its log has it, and puts it into its queue a moment later.
func (b *bench) awaitQueued(queries []rocketmq.Query) {
	b.t.Helper()
	last := make(map[string]rocketmq.Position)
	for _, q := range queries {
		position, err := rocketmq.ParsePosition(q.Position)
		if err != nil {
			b.t.Fatal(err)
		}
		key := fmt.Sprint(position.Broker, position.Queue)
		if position.Offset >= last[key].Offset {
			last[key] = position
		}
	}
	for _, position := range last {
		peer := remoting.NewPeer(b.stack.Service(position.Broker).Addr(), remoting.Options{})
		for deadline := time.Now().Add(testLimit); ; time.Sleep(2 * time.Millisecond) {
			next, err := peer.MaxOffset(b.t.Context(), b.cfg.Topic, position.Queue)
			if err == nil && next > position.Offset {
				break
			}
			if time.Now().After(deadline) {
				b.t.Fatalf("position %s is not in its queue: next offset %d, %v", position, next, err)
			}
		}
		peer.Close()
	}
}

func nowMS() int64 { return time.Now().UnixMilli() }

func (b *bench) gather(queries []rocketmq.Query) map[string]reservation.MessageEvidence {
	b.t.Helper()
	return gather(b.t, b.evidence, queries)
}

func gather(t *testing.T, e *rocketmq.Evidence, queries []rocketmq.Query) map[string]reservation.MessageEvidence {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testLimit)
	defer cancel()
	return e.Gather(ctx, nowMS(), queries)
}

// want checks the evidence of all queries, as they are and without positions.
func (b *bench) want(state reservation.MessageState, cause string, queries ...rocketmq.Query) {
	b.t.Helper()
	for name, asked := range map[string][]rocketmq.Query{"with": queries, "without": unplaced(queries)} {
		found := b.gather(asked)
		for _, q := range asked {
			if e := found[q.MessageID]; e.State != state || e.Cause != cause {
				b.t.Fatalf("%s position: %s is %+v, want %s %s", name, q.MessageID, e, state, cause)
			}
		}
	}
}

// want2 checks queries that a verified position decides one way, and that are
// UNKNOWN if a sweep has to decide.
func (b *bench) want2(placed, swept reservation.MessageState, cause string, queries ...rocketmq.Query) {
	b.t.Helper()
	for id, e := range b.gather(queries) {
		if e.State != placed {
			b.t.Fatalf("with position: %s is %+v, want %s", id, e, placed)
		}
	}
	for id, e := range b.gather(unplaced(queries)) {
		if e.State != swept || e.Cause != cause {
			b.t.Fatalf("without position: %s is %+v, want %s %s", id, e, swept, cause)
		}
	}
}

// commit sets the group's offset on all queues of the topic on a broker.
func (b *bench) commit(svc *devstack.Service, offset int64) {
	b.t.Helper()
	const updateConsumerOffset = 15
	peer := b.peer(svc)
	ranges, err := peer.TopicStats(b.t.Context(), b.cfg.Topic)
	if err != nil {
		b.t.Fatal(err)
	}
	for queue, kept := range ranges {
		_, err := peer.Do(b.t.Context(), updateConsumerOffset, map[string]string{
			"consumerGroup": b.cfg.ConsumerGroup, "topic": b.cfg.Topic, "queueId": strconv.Itoa(int(queue)),
			"commitOffset": strconv.FormatInt(min(offset, kept.Max), 10),
		}, nil)
		if err != nil {
			b.t.Fatal(err)
		}
	}
}

// unplaced are the same queries without positions, so that the sweep decides.
func unplaced(queries []rocketmq.Query) []rocketmq.Query {
	queries = slices.Clone(queries)
	for i := range queries {
		queries[i].Position = ""
	}
	return queries
}

// handled collects what a consumer was given.
type handled struct {
	mu    sync.Mutex
	times map[string]int // by message id
	more  chan struct{}  // closed and replaced with each delivery
}

func (h *handled) add(msg *primitive.MessageExt) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.times[msg.GetKeys()]++
	close(h.more)
	h.more = make(chan struct{})
	return h.times[msg.GetKeys()]
}

// timesOf is how often the message was delivered.
func (h *handled) timesOf(q rocketmq.Query) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.times[q.MessageID]
}

// await waits until each of the messages was delivered so many times.
func (h *handled) await(t *testing.T, times int, queries ...rocketmq.Query) {
	t.Helper()
	timeout := time.After(testLimit)
	for {
		h.mu.Lock()
		missing := 0
		for _, q := range queries {
			if h.times[q.MessageID] < times {
				missing++
			}
		}
		more := h.more
		h.mu.Unlock()
		if missing == 0 {
			return
		}
		select {
		case <-more:
		case <-timeout:
			t.Fatalf("%d of %d messages were not delivered %d times", missing, len(queries), times)
		}
	}
}

// consumers numbers the consumers of the process.
var consumers struct {
	sync.Mutex
	n int
}

// consume runs a real push consumer until stop is called, which also stores
// its offsets on the brokers.
func (b *bench) consume(tag string, maxRetries int32, handle func(msg *primitive.MessageExt, times int) consumer.ConsumeResult) (*handled, func()) {
	b.t.Helper()
	consumers.Lock()
	consumers.n++
	name := fmt.Sprintf("test-consumer-%d", consumers.n)
	consumers.Unlock()
	c, err := rmq.NewPushConsumer(
		consumer.WithGroupName(b.cfg.ConsumerGroup), consumer.WithInstance(name),
		consumer.WithNameServer(b.cfg.NameServers), consumer.WithMaxReconsumeTimes(maxRetries),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
	)
	if err != nil {
		b.t.Fatal(err)
	}
	h := &handled{times: make(map[string]int), more: make(chan struct{})}
	err = c.Subscribe(b.cfg.Topic, consumer.MessageSelector{Type: consumer.TAG, Expression: tag},
		func(_ context.Context, msgs ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			result := consumer.ConsumeSuccess
			for _, msg := range msgs {
				if r := handle(msg, h.add(msg)); r != consumer.ConsumeSuccess {
					result = r
				}
			}
			return result, nil
		})
	if err != nil {
		b.t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		b.t.Fatal(err)
	}
	stop := sync.OnceFunc(func() { _ = c.Shutdown() })
	b.t.Cleanup(stop)
	return h, stop
}

// consumeUntil runs a consumer until the group's offsets on the brokers show
// the state. A consumer stores its offsets when it is stopped, but not those of
// messages that it is handling just then: it is started again for those.
func (b *bench) consumeUntil(state reservation.MessageState, queries []rocketmq.Query, maxRetries int32, handle func(msg *primitive.MessageExt, times int) consumer.ConsumeResult) {
	b.t.Helper()
	for deadline := time.Now().Add(testLimit); ; {
		h, stop := b.consume("*", maxRetries, handle)
		h.awaitQuiet(time.Second + 500*time.Millisecond) // longer than a retry's delay
		stop()
		found, settled := b.gather(unplaced(queries)), true
		for _, e := range found {
			settled = settled && e.State == state
		}
		if settled {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("not all %s after %s: %+v", state, testLimit, found)
		}
	}
}

// awaitQuiet waits until nothing was delivered for so long.
func (h *handled) awaitQuiet(quiet time.Duration) {
	for {
		h.mu.Lock()
		more := h.more
		h.mu.Unlock()
		select {
		case <-more:
		case <-time.After(quiet):
			return
		}
	}
}

func consumeAll(*primitive.MessageExt, int) consumer.ConsumeResult { return consumer.ConsumeSuccess }

// peer is a connection of the test's own to a broker.
func (b *bench) peer(svc *devstack.Service) *remoting.Peer {
	p := remoting.NewPeer(svc.Addr(), remoting.Options{})
	b.t.Cleanup(p.Close)
	return p
}

// eventually waits until the sweep sees the state.
func (b *bench) eventually(state reservation.MessageState, query rocketmq.Query) {
	b.t.Helper()
	for deadline := time.Now().Add(testLimit); ; time.Sleep(50 * time.Millisecond) {
		e := b.gather(unplaced([]rocketmq.Query{query}))[query.MessageID]
		if e.State == state {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("%s is %+v after %s, want %s", query.MessageID, e, testLimit, state)
		}
	}
}

func containsAll(s string, parts ...string) bool {
	for _, part := range parts {
		if !strings.Contains(s, part) {
			return false
		}
	}
	return true
}
