package client

import (
	"context"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// notices listens to the channels of the scopes that a gateway has met, and
// tells the others of a sell-out. What is missed costs a marker's time at most.
type notices struct {
	rdb   redis.UniversalClient
	o     Options
	heard func(s *scopeState, payload string)

	ctx    context.Context //nolint:containedctx // the life of the background work
	cancel context.CancelFunc
	wg     sync.WaitGroup
	wake   chan struct{}

	mu     sync.Mutex
	wanted map[string]*scopeState // by channel
	closed bool
}

func newNotices(rdb redis.UniversalClient, o Options, heard func(*scopeState, string)) *notices {
	n := &notices{rdb: rdb, o: o, heard: heard, wake: make(chan struct{}, 1), wanted: map[string]*scopeState{}}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.wg.Go(n.listen)
	return n
}

func (n *notices) close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	n.wg.Wait()
}

func (n *notices) add(s *scopeState)            { n.want(s.scope.EventsChannel(), s) }
func (n *notices) drop(scope reservation.Scope) { n.want(scope.EventsChannel(), nil) }

func (n *notices) want(channel string, s *scopeState) {
	n.mu.Lock()
	if s == nil {
		delete(n.wanted, channel)
	} else {
		n.wanted[channel] = s
	}
	n.mu.Unlock()
	select {
	case n.wake <- struct{}{}:
	default: // it is awake
	}
}

// listen follows what is wanted until the end. The library reconnects, and
// subscribes again to what it was told, by itself.
func (n *notices) listen() {
	pubsub := n.rdb.Subscribe(n.ctx)
	defer func() { _ = pubsub.Close() }()
	subscribed := map[string]bool{}
	var messages <-chan *redis.Message // nil until there is a subscription
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-n.wake:
			n.follow(pubsub, subscribed)
			if messages == nil && len(subscribed) > 0 {
				messages = pubsub.Channel()
			}
		case m := <-messages:
			if m == nil {
				return
			}
			n.mu.Lock()
			s := n.wanted[m.Channel]
			n.mu.Unlock()
			if s != nil {
				n.heard(s, m.Payload)
			}
		}
	}
}

// follow subscribes to what is new and unsubscribes from what is not wanted any more.
func (n *notices) follow(pubsub *redis.PubSub, subscribed map[string]bool) {
	var fresh, gone []string
	n.mu.Lock()
	for channel := range n.wanted {
		if !subscribed[channel] {
			subscribed[channel] = true
			fresh = append(fresh, channel)
		}
	}
	for channel := range subscribed {
		if n.wanted[channel] == nil {
			delete(subscribed, channel)
			gone = append(gone, channel)
		}
	}
	n.mu.Unlock()
	// Errors are those of the connection, which the library makes again.
	if len(fresh) > 0 {
		_ = pubsub.Subscribe(n.ctx, fresh...)
	}
	if len(gone) > 0 {
		_ = pubsub.Unsubscribe(n.ctx, gone...)
	}
}

// publish tells the other gateways, as best it can and without holding up the
// caller.
func (n *notices) publish(scope reservation.Scope, payload string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return
	}
	n.wg.Go(func() {
		ctx, cancel := context.WithTimeout(n.ctx, n.o.Timeout)
		defer cancel()
		_ = n.rdb.Publish(ctx, scope.EventsChannel(), payload).Err()
	})
}
