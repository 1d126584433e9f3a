package upstream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"

	rmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"

	"github.com/seckill/reconciler/internal/rocketmq"
)

// Subscription says where order messages come from.
type Subscription struct {
	NameServers []string // host:port
	Topic       string
	Group       string
	Tag         string
	Goroutines  int   // deliveries at once; default 16
	MaxAttempts int32 // further deliveries before a dead letter; default 3
	Logger      *slog.Logger
}

// Subscriber takes messages from RocketMQ and hands them to consumers.
type Subscriber struct {
	consumers []*Consumer
	log       *slog.Logger
	library   rmq.PushConsumer
	turn      atomic.Uint64

	mu      sync.Mutex
	stopped bool
	running sync.WaitGroup
}

// subscribers numbers the subscribers of the process: clients of one instance
// name would share their state.
var subscribers atomic.Int64

// Subscribe consumes in the background until [Subscriber.Stop]. Deliveries go to
// the consumers in turn, as in the middle of a rolling deployment: what one kind
// failed at, the other may get next.
//
// All of them share one member of the consumer group: two members that join at
// the same moment were seen to leave messages unread for over a minute.
func Subscribe(s Subscription, consumers ...*Consumer) (*Subscriber, error) {
	if len(consumers) == 0 {
		return nil, errors.New("subscribe to order messages: there is no consumer to take them")
	}
	rocketmq.RouteLibraryLog(s.Logger)
	sub := &Subscriber{consumers: consumers, log: s.Logger}
	if err := sub.start(s); err != nil {
		return nil, fmt.Errorf("subscribe to order messages of %s: %w", s.Topic, err)
	}
	return sub, nil
}

func (s *Subscriber) start(o Subscription) error {
	servers := make(primitive.NamesrvAddr, len(o.NameServers))
	for i, addr := range o.NameServers {
		servers[i] = "http://" + addr // else the library refuses host names
	}
	var err error
	s.library, err = rmq.NewPushConsumer(
		consumer.WithGroupName(o.Group),
		consumer.WithInstance(fmt.Sprintf("order-consumer-%d-%d", os.Getpid(), subscribers.Add(1))),
		consumer.WithNsResolver(primitive.NewPassthroughResolver(servers)),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumeGoroutineNums(orDefault(o.Goroutines, 16)),
		consumer.WithMaxReconsumeTimes(orDefault(o.MaxAttempts, 3)),
	)
	if err != nil {
		return err
	}
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: orDefault(o.Tag, "*")}
	if err := s.library.Subscribe(o.Topic, selector, s.handle); err != nil {
		return err
	}
	return s.library.Start()
}

// handle gets one message at a time: that is the library's default batch. The
// answer of a batch is one for all, so a single failure would repeat them all.
func (s *Subscriber) handle(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
	if !s.enter() {
		return consumer.ConsumeRetryLater, nil
	}
	defer s.running.Done()
	for _, m := range messages {
		if !s.deliver(ctx, m) {
			return consumer.ConsumeRetryLater, nil
		}
	}
	return consumer.ConsumeSuccess, nil
}

func (s *Subscriber) deliver(ctx context.Context, m *primitive.MessageExt) (acknowledge bool) {
	c := s.consumers[s.turn.Add(1)%uint64(len(s.consumers))]
	d := Delivery{Body: m.Body, Attempt: m.ReconsumeTimes, Replayed: m.GetProperty(propertyReplay) != ""}
	event, acknowledge, err := c.Consume(ctx, d)
	if err != nil {
		s.log.Debug("order message failed", "event", string(event), "kind", string(c.Kind),
			"message_id", m.GetKeys(), "attempt", d.Attempt, "error", err.Error())
	}
	return acknowledge
}

func (s *Subscriber) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false
	}
	s.running.Add(1)
	return true
}

// Stop ends the consumption and waits for the deliveries under way, which the
// library's own end does not.
func (s *Subscriber) Stop(ctx context.Context) error {
	s.mu.Lock()
	already := s.stopped
	s.stopped = true
	s.mu.Unlock()
	if already {
		return nil
	}
	done := make(chan struct{})
	go func() { s.running.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		return fmt.Errorf("stop the order consumers: deliveries are still under way: %w", context.Cause(ctx))
	}
	if err := s.library.Shutdown(); err != nil {
		return fmt.Errorf("stop the order consumers: %w", err)
	}
	return nil
}
