package rocketmq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

// Health is what [Evidence.Probe] found.
type Health struct {
	NameServers map[string]error // by address; nil: it answers
	Brokers     map[string]error // by broker name, those that the topic is on; nil: it answers
	TopicExists bool
	GroupKnown  bool // some broker knows the consumer group
	Queues      int32
}

// Err is nil if the topic has a route, a name server answers and every broker
// of the topic does; else it says all that is wrong.
func (h Health) Err() error {
	var errs []error
	reachable := false
	for _, addr := range slices.Sorted(maps.Keys(h.NameServers)) {
		err := h.NameServers[addr]
		reachable = reachable || err == nil
		errs = append(errs, err)
	}
	if reachable {
		errs = errs[:0] // one is enough
		if !h.TopicExists {
			errs = append(errs, errors.New("the order topic has no route: create it, or correct rocketmq.topic"))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(h.Brokers)) {
		errs = append(errs, h.Brokers[name])
	}
	return errors.Join(errs...)
}

// Probe asks every name server and every broker of the topic whether it
// answers, and records the queues that it sees as expected, so that a broker is
// known before the first sweep. It does not wait for a pass under way.
func (e *Evidence) Probe(ctx context.Context) (Health, error) {
	h := Health{NameServers: make(map[string]error), Brokers: make(map[string]error)}
	merged := topicRoute{masters: map[string]string{}, queues: map[string]int32{}}
	var mu sync.Mutex
	var asking sync.WaitGroup
	for _, peer := range e.servers.peers {
		asking.Go(func() {
			route, err := peer.Route(ctx, e.cfg.Topic)
			mu.Lock()
			defer mu.Unlock()
			if isNoRoute(err) {
				err = nil
			} else if err == nil {
				h.TopicExists = true
				merged.add(route)
			}
			h.NameServers[peer.Addr()] = err
		})
	}
	asking.Wait()

	var seen []ExpectedQueue
	for name, addr := range merged.masters {
		asking.Go(func() {
			known, err := e.probeBroker(ctx, name, addr)
			mu.Lock()
			defer mu.Unlock()
			h.Brokers[name] = err
			h.GroupKnown = h.GroupKnown || known
			h.Queues += merged.queues[name]
			if n := merged.queues[name]; n > 0 {
				seen = append(seen, ExpectedQueue{Broker: name, Topic: e.cfg.Topic, Queues: n})
			}
		})
	}
	asking.Wait()
	if len(seen) > 0 {
		if err := e.registry.Record(ctx, seen); err != nil {
			return h, fmt.Errorf("record the queues of %s: %w", e.cfg.Topic, err)
		}
	}
	return h, nil
}

// probeBroker says whether the broker answers, and knows the consumer group.
// The connection is the probe's own: those of the passes belong to the pass.
func (e *Evidence) probeBroker(ctx context.Context, name, addr string) (knowsGroup bool, err error) {
	if addr == "" {
		return false, fmt.Errorf("broker %s has no master in the route", name)
	}
	peer := remoting.NewPeer(addr, e.cfg.peerOptions())
	defer peer.Close()
	groups, err := peer.Groups(ctx)
	if err != nil {
		return false, fmt.Errorf("broker %s: %w", name, err)
	}
	return groups[e.cfg.ConsumerGroup], nil
}

func isNoRoute(err error) bool { return remoting.IsCode(err, remoting.TopicNotExist) }
