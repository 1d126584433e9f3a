package upstream

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	rmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// consumers numbers the consumers of the process: clients of one instance name
// would share their state.
var consumers atomic.Int64

// pushConsumer is the client library's consumer, with an end that waits.
type pushConsumer struct {
	library rmq.PushConsumer
	receive func(context.Context, *primitive.MessageExt) consumer.ConsumeResult

	mu      sync.Mutex
	stopped bool
	running sync.WaitGroup
}

func newPushConsumer(s Subscription, receive func(context.Context, *primitive.MessageExt) consumer.ConsumeResult) (*pushConsumer, error) {
	p := &pushConsumer{receive: receive}
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: orDefault(s.Tag, "*")}
	servers := make(primitive.NamesrvAddr, len(s.NameServers))
	for i, addr := range s.NameServers {
		servers[i] = "http://" + addr // else the library refuses host names
	}
	var err error
	p.library, err = rmq.NewPushConsumer(
		consumer.WithGroupName(s.Group),
		consumer.WithInstance(fmt.Sprintf("order-consumer-%d-%d", os.Getpid(), consumers.Add(1))),
		consumer.WithNsResolver(primitive.NewPassthroughResolver(servers)),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumeGoroutineNums(orDefault(s.Goroutines, 16)),
		consumer.WithMaxReconsumeTimes(orDefault(s.MaxAttempts, 3)),
	)
	if err != nil {
		return nil, err
	}
	if err := p.library.Subscribe(s.Topic, selector, p.handle); err != nil {
		return nil, err
	}
	if err := p.library.Start(); err != nil {
		return nil, err
	}
	return p, nil
}

// handle gets one message at a time: that is the library's default batch. The
// answer of a batch is one for all, so a single failure would repeat them all.
func (p *pushConsumer) handle(ctx context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
	if !p.enter() {
		return consumer.ConsumeRetryLater, nil
	}
	defer p.running.Done()
	for _, m := range messages {
		if result := p.receive(ctx, m); result != consumer.ConsumeSuccess {
			return result, nil
		}
	}
	return consumer.ConsumeSuccess, nil
}

func (p *pushConsumer) enter() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stopped {
		return false
	}
	p.running.Add(1)
	return true
}

// stop ends the consumption. The library's own end does not wait for handlers.
func (p *pushConsumer) stop(ctx context.Context) error {
	p.mu.Lock()
	already := p.stopped
	p.stopped = true
	p.mu.Unlock()
	if already {
		return nil
	}
	done := make(chan struct{})
	go func() { p.running.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		return fmt.Errorf("stop the order consumer: deliveries are still under way: %w", context.Cause(ctx))
	}
	if err := p.library.Shutdown(); err != nil {
		return fmt.Errorf("stop the order consumer: %w", err)
	}
	return nil
}
