package rocketmq

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

// errNoRoute says that the name servers know no route for the topic.
var errNoRoute = errors.New("no route")

// stragglerGrace is how long a slower name server is waited for once another
// has answered: their views can differ, and one that hangs must not hold up a pass.
const stragglerGrace = 300 * time.Millisecond

// nameServers asks all name servers at once and puts their answers together:
// each broker registers at all of them, but not at the same moment.
type nameServers struct {
	peers []*remoting.Peer
}

func newNameServers(c Config) *nameServers {
	n := &nameServers{}
	for _, addr := range c.NameServers {
		n.peers = append(n.peers, remoting.NewPeer(addr, c.peerOptions()))
	}
	return n
}

func (n *nameServers) Close() {
	for _, p := range n.peers {
		p.Close()
	}
}

// topicRoute is where a topic is, put together from all name servers.
type topicRoute struct {
	masters map[string]string // broker name → address of its master; "" if it has none
	queues  map[string]int32  // broker name → queues of the topic
}

// route is the union of what the name servers know of the topic. It fails with
// errNoRoute only if every one that answered knows none; if none answered, with
// their errors.
func (n *nameServers) route(ctx context.Context, topic string) (topicRoute, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		route remoting.Route
		err   error
	}
	answers := make(chan answer, len(n.peers))
	for _, p := range n.peers {
		go func() {
			route, err := p.Route(ctx, topic)
			answers <- answer{route, err}
		}()
	}

	merged := topicRoute{masters: map[string]string{}, queues: map[string]int32{}}
	var errs []error
	answered, unrouted := false, false
	var grace <-chan time.Time
	for range n.peers {
		select {
		case a := <-answers:
			switch {
			case a.err == nil:
				merged.add(a.route)
				answered = true
			case remoting.IsCode(a.err, remoting.TopicNotExist):
				unrouted = true
			default:
				errs = append(errs, a.err)
				continue
			}
			if grace == nil {
				grace = time.After(stragglerGrace)
			}
			continue
		case <-grace:
		}
		break
	}
	switch {
	case answered:
		return merged, nil
	case unrouted:
		return topicRoute{}, fmt.Errorf("topic %s: %w", topic, errNoRoute)
	default:
		return topicRoute{}, fmt.Errorf("ask the name servers for topic %s: %w", topic, errors.Join(errs...))
	}
}

func (r *topicRoute) add(route remoting.Route) {
	for _, b := range route.Brokers {
		if master := b.Master(); master != "" || r.masters[b.Name] == "" {
			r.masters[b.Name] = master
		}
	}
	for _, q := range route.Queues {
		r.queues[q.Broker] = max(r.queues[q.Broker], q.ReadQueues, q.WriteQueues)
	}
}
