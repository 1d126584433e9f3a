package rocketmq

import (
	"context"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2/primitive"
)

// How long a broker that failed is left alone: doubled with each failure in a row.
const (
	shortestRest = time.Second
	longestRest  = 30 * time.Second
)

// attempt is one send in the library's hands.
type attempt struct {
	ctx    context.Context //nolint:containedctx // the library does not hand it to a selector
	broker string          // set by the selector
}

// brokerState is what the selector knows of a broker.
type brokerState struct {
	inFlight  int
	proven    bool // answered since it last failed
	failures  int  // in a row
	restUntil time.Time
	turn      int // picks its queues in turn
}

// healthSelector picks the queue of each message, so that a broker that is down
// or hangs costs the others as little as possible: the library dials under one
// mutex and knows no such thing as a broker's health.
//
//   - The broker with the fewest sends under way is taken, so sends pile up on
//     no broker that does not answer.
//   - A broker that has not answered since its last failure gets one send at a
//     time: only one dial at a time can hold up the others, for DialTimeout.
//   - A broker that failed rests, longer each time. If all rest, the message is
//     not sent at all.
type healthSelector struct {
	mu       sync.Mutex
	brokers  map[string]*brokerState
	attempts map[*primitive.Message]*attempt
	changed  chan struct{} // closed and replaced when an attempt ends
	turn     int
}

func newHealthSelector() *healthSelector {
	return &healthSelector{
		brokers:  make(map[string]*brokerState),
		attempts: make(map[*primitive.Message]*attempt),
		changed:  make(chan struct{}),
	}
}

// begin registers a message before the library gets it.
func (s *healthSelector) begin(ctx context.Context, msg *primitive.Message) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attempts[msg] = &attempt{ctx: ctx}
}

// end takes note of how the attempt went, once, for the broker it was made on.
func (s *healthSelector) end(msg *primitive.Message, result SendResult) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.attempts[msg]
	if a == nil {
		return
	}
	delete(s.attempts, msg)
	if a.broker != "" {
		state := s.state(a.broker)
		state.inFlight--
		state.learn(result)
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

func (b *brokerState) learn(result SendResult) {
	switch result.Cause {
	case CauseDialFailed, CauseSendTimeout, CauseConnectionLost, CauseNoRoute:
		b.proven = false
		if now := time.Now(); !now.Before(b.restUntil) { // sends that fail together are one failure
			b.restUntil = now.Add(min(shortestRest<<min(b.failures, 10), longestRest))
			b.failures++
		}
	case CauseBrokerBusy, CauseNoPermission, CauseTopicMissing:
		b.proven = true
		b.restUntil = time.Now().Add(shortestRest)
	case CauseNotSent:
	default:
		b.proven, b.failures, b.restUntil = true, 0, time.Time{}
	}
}

func (s *healthSelector) state(broker string) *brokerState {
	state := s.brokers[broker]
	if state == nil {
		state = &brokerState{}
		s.brokers[broker] = state
	}
	return state
}

// Select implements the library's QueueSelector. nil makes the library fail
// with "route info not found" before it sends anything.
func (s *healthSelector) Select(msg *primitive.Message, queues []*primitive.MessageQueue, _ string) *primitive.MessageQueue {
	for {
		queue, wait, ctx := s.pick(msg, queues)
		if queue != nil || wait == nil {
			return queue
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil
		}
	}
}

// pick chooses a queue, or says what to wait for: the end of a trial. Neither
// means that the message is not to be sent.
func (s *healthSelector) pick(msg *primitive.Message, queues []*primitive.MessageQueue) (*primitive.MessageQueue, <-chan struct{}, context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := s.attempts[msg]
	if a == nil || a.ctx.Err() != nil {
		return nil, nil, nil // given up meanwhile: a write past its deadline would close the connection of all
	}
	best, trial := s.bestBroker(queues)
	switch {
	case best != "":
		state := s.state(best)
		state.inFlight++
		state.turn++
		a.broker = best
		return nthOf(queues, best, state.turn), nil, nil
	case trial:
		return nil, s.changed, a.ctx
	default:
		return nil, nil, nil
	}
}

// bestBroker is the one with the fewest sends under way of those that may get
// another; trial says that some broker's trial is under way.
func (s *healthSelector) bestBroker(queues []*primitive.MessageQueue) (best string, trial bool) {
	now := time.Now()
	s.turn++ // among equals, another one each time
	for i := range queues {
		name := queues[(i+s.turn)%len(queues)].BrokerName
		state := s.state(name)
		switch {
		case now.Before(state.restUntil):
		case !state.proven && state.inFlight > 0:
			trial = true
		case best == "" || state.inFlight < s.state(best).inFlight:
			best = name
		}
	}
	return best, trial
}

// nthOf is the n-th of the broker's queues, counted round.
func nthOf(queues []*primitive.MessageQueue, broker string, n int) *primitive.MessageQueue {
	var own []*primitive.MessageQueue
	for _, queue := range queues {
		if queue.BrokerName == broker {
			own = append(own, queue)
		}
	}
	return own[n%len(own)]
}

// allResting says whether no broker would be picked now although some are known.
func (s *healthSelector) allResting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for _, state := range s.brokers {
		if !now.Before(state.restUntil) {
			return false
		}
	}
	return len(s.brokers) > 0
}
