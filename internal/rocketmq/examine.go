package rocketmq

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/seckill/reconciler/internal/probe"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

// Examine asks every name server and every broker of the topic how it is set
// up: what a sale needs, and what evidence rests on (protocol §2). It changes
// nothing, and does not wait for a pass under way. The error of one that does
// not answer stands with it.
func (e *Evidence) Examine(ctx context.Context) probe.RocketMQ {
	r := probe.RocketMQ{NameServers: make(map[string]error)}
	merged := topicRoute{masters: map[string]string{}, queues: map[string]int32{}}
	// Retry topics of POP consumers, in the forms of both versions of the broker.
	topic := e.cfg.Topic
	popTopics := []string{e.cfg.retryTopic() + "_" + topic, e.cfg.retryTopic() + "+" + topic}
	var mu sync.Mutex
	var asking sync.WaitGroup
	for _, peer := range e.servers.peers {
		asking.Go(func() {
			route, err := peer.Route(ctx, topic)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				r.TopicExists = true
				merged.add(route)
			case isNoRoute(err):
				err = nil
			}
			r.NameServers[peer.Addr()] = err
		})
		for _, pop := range popTopics {
			asking.Go(func() {
				if _, err := peer.Route(ctx, pop); err == nil {
					mu.Lock()
					defer mu.Unlock()
					r.PopTopic = pop
				}
			})
		}
	}
	asking.Wait()
	for name, addr := range merged.masters {
		asking.Go(func() {
			broker := e.examineBroker(ctx, name, addr)
			broker.Queues = merged.queues[name]
			mu.Lock()
			defer mu.Unlock()
			r.Brokers = append(r.Brokers, broker)
		})
	}
	asking.Wait()
	slices.SortFunc(r.Brokers, func(a, b probe.Broker) int { return cmp.Compare(a.Name, b.Name) })
	return r
}

func (e *Evidence) examineBroker(ctx context.Context, name, addr string) probe.Broker {
	b := probe.Broker{Name: name, Addr: addr}
	if addr == "" {
		b.Err = fmt.Errorf("broker %s has no master in the route", name)
		return b
	}
	peer := remoting.NewPeer(addr, e.cfg.peerOptions())
	defer peer.Close()
	groups, err := peer.Groups(ctx)
	if err != nil {
		b.Err = err
		return b
	}
	b.GroupKnown = groups[e.cfg.ConsumerGroup]
	b.Retention, b.RetentionErr = retention(ctx, peer)
	began := time.Now()
	info, err := peer.BrokerRuntimeInfo(ctx)
	half := time.Since(began) / 2
	b.ClockErr, b.Version = err, info.Version
	if err == nil { // the broker cuts its time to the second
		b.Clock = info.Now.Add(time.Second / 2).Sub(began.Add(half))
		b.ClockError = half + time.Second/2
	}
	online, err := peer.Consumers(ctx, e.cfg.ConsumerGroup)
	b.ConsumersErr = err
	b.Consumers = probe.Consumers{Type: online.ConsumeType, Model: online.MessageModel, Subscribe: map[string]probe.Subscription{}}
	for _, c := range online.Connections {
		b.Consumers.Clients = append(b.Consumers.Clients, c.ClientID)
	}
	slices.Sort(b.Consumers.Clients)
	for topic, s := range online.Subscriptions {
		b.Consumers.Subscribe[topic] = probe.Subscription{Type: s.ExpressionType, Expression: s.SubString}
	}
	return b
}

// retention is how long the broker keeps its files, by its own setting.
func retention(ctx context.Context, peer *remoting.Peer) (time.Duration, error) {
	settings, err := peer.BrokerConfig(ctx)
	if err != nil {
		return 0, err
	}
	hours, err := strconv.ParseInt(settings["fileReservedTime"], 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s: fileReservedTime is %.40q", peer.Addr(), settings["fileReservedTime"])
	}
	return time.Duration(hours) * time.Hour, nil
}
