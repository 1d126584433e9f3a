package rocketmq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/reservation"
)

// problem is why evidence is UNKNOWN.
type problem struct {
	cause  string // stable name
	detail string // for people
}

func (p problem) evidence() reservation.MessageEvidence {
	return reservation.MessageEvidence{State: reservation.MessageUnknown, Cause: p.cause, Detail: p.detail}
}

// problemOf names what an error of a broker means.
func problemOf(broker string, err error) problem {
	var refused *remoting.CodeError
	cause := UnknownBroker
	switch {
	case errors.Is(err, errQueueChanged):
		cause = UnknownQueueChanged
	case errors.Is(err, remoting.ErrInnerBatch):
		cause = UnknownBatchQueue
	case errors.Is(err, remoting.ErrProtocol):
		cause = UnknownProtocol
	case errors.Is(err, errInterrupted):
		cause = UnknownInterrupted
	case errors.As(err, &refused):
		cause = UnknownRefused
	}
	return problem{cause, fmt.Sprintf("broker %s: %v", broker, err)}
}

// errInterrupted is the cause of the sweep's own deadline.
var errInterrupted = errors.New("the sweep's time is up")

// messageState is what a pass has found out about one query.
type messageState struct {
	problem  *problem // decides if set
	position *Position
	verified bool // the record at the position is the message
	final    bool // pending at its position: nothing more to read
	found    reservation.MessageEvidence
	any      bool // found is set
}

func (m *messageState) add(e reservation.MessageEvidence) {
	switch {
	case !m.any:
	case e.State == m.found.State && e.SinceMS == m.found.SinceMS:
		e.Detail = min(e.Detail, m.found.Detail) // brokers answer in any order
	default:
		e = m.found.Stronger(e)
	}
	m.found, m.any = e, true
}

// pass is one run of Gather.
type pass struct {
	e        *Evidence
	began    time.Time
	nowMS    int64
	queries  []Query
	messages []messageState

	brokers  []*brokerPass
	expected map[string][]ExpectedQueue // by topic
	overall  *problem                   // nothing can be said of any message
	sweeping *problem                   // nothing can be said of a message that a sweep decides

	byFingerprint map[uint64][]int // queries still open
	mu            sync.Mutex       // guards messages while brokers work
}

func (p *pass) fail(why problem) {
	if p.overall == nil {
		p.overall = &why
	}
}

func (p *pass) failSweep(why problem) {
	if p.sweeping == nil {
		p.sweeping = &why
	}
}

// brokerPass is the part of a pass that concerns one broker. Its fields belong
// to the goroutine that works on the broker, until that has ended.
type brokerPass struct {
	p    *pass
	name string
	peer *remoting.Peer // nil if it has no master

	info      remoting.RuntimeInfo
	groups    map[string]bool
	hasOffset bool
	committed map[queueKey]int64 // the group's offsets; no entry: nothing passed
	delivered map[int]int64      // delay level → offset
	ranges    map[string]map[int32]remoting.QueueRange
	mu        sync.Mutex // guards windows and coverage while queues are swept
	windows   map[queueKey]queueWindow
	coverage  map[string]coverage // by topic; no entry: complete
	stale     bool                // what is kept of the broker's queues is worthless
	problem   *problem
}

// coverage says that what was stored before sinceMS is not completely covered.
type coverage struct {
	sinceMS int64
	why     string // cause
}

func (b *brokerPass) fail(err error) {
	b.stale = b.stale || errors.Is(err, errQueueChanged)
	if b.problem == nil {
		why := problemOf(b.name, err)
		b.problem = &why
	}
}

// run reads everything that the queries need.
func (p *pass) run(ctx context.Context) {
	p.parseQueries()
	if !p.findBrokers(ctx) {
		return
	}
	p.checkPositions(ctx)
	p.each(ctx, (*brokerPass).readOffsets) // on all brokers before any sweep: see Gather
	p.each(ctx, (*brokerPass).awaitDispatch)
	if !p.knowsGroup() {
		return
	}
	p.settlePositions()
	p.byFingerprint = p.openQueries()
	if len(p.byFingerprint) == 0 {
		return
	}
	sweepCtx, cancel := p.sweepContext(ctx)
	p.each(sweepCtx, (*brokerPass).readRanges)
	p.checkExpected(ctx)
	p.sweep(sweepCtx)
	cancel()
	p.each(ctx, (*brokerPass).confirmHits)
	p.dropStale()
}

// parseQueries takes out what cannot be searched for.
func (p *pass) parseQueries() {
	for i, q := range p.queries {
		m := &p.messages[i]
		if err := reservation.ValidateMessageID(q.MessageID); err != nil || q.ReservedAtMS <= 0 {
			m.problem = &problem{UnknownInvalidQuery, fmt.Sprintf("message %.140q, reserved at %d", q.MessageID, q.ReservedAtMS)}
			continue
		}
		if position, err := ParsePosition(q.Position); err == nil && q.Sends <= 1 {
			m.position = &position
		}
	}
}

// checkPositions makes those messages UNKNOWN that an acknowledged send put on
// a broker that is not there and was never recorded: it came and went before
// anybody looked. However many sends were made, one copy is known to be on it.
func (p *pass) checkPositions(ctx context.Context) {
	away := make(map[string][]int)
	for i, q := range p.queries {
		position, err := ParsePosition(q.Position)
		if err == nil && p.messages[i].problem == nil && p.broker(position.Broker) == nil {
			away[position.Broker] = append(away[position.Broker], i)
		}
	}
	if len(away) == 0 {
		return
	}
	forgotten, err := p.e.registry.Forgotten(ctx)
	for broker, messages := range away {
		why := problem{UnknownBrokerMissing, fmt.Sprintf("broker %s acknowledged the message and is not in the route; `broker forget %s` if it is gone for good", broker, broker)}
		switch {
		case err != nil:
			why = problem{UnknownRegistry, fmt.Sprintf("read the forgotten brokers: %v", err)}
		case slices.Contains(forgotten, broker):
			continue
		}
		for _, i := range messages {
			p.messages[i].problem = &why
		}
	}
}

// each runs a step on all brokers at once that have not failed yet.
func (p *pass) each(ctx context.Context, step func(*brokerPass, context.Context) error) {
	var working sync.WaitGroup
	for _, b := range p.brokers {
		if b.problem != nil {
			continue
		}
		working.Go(func() {
			if err := step(b, ctx); err != nil {
				if cause := context.Cause(ctx); cause != nil {
					err = fmt.Errorf("%w: %w", errInterrupted, err)
				}
				b.fail(err)
			}
		})
	}
	working.Wait()
}

// sweepContext leaves a quarter of the time for confirming and concluding.
func (p *pass) sweepContext(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, _ := ctx.Deadline() // Gather sees to it that there is one
	return context.WithDeadlineCause(ctx, time.Now().Add(time.Until(deadline)*3/4), errInterrupted)
}

// findBrokers finds every broker that the topic, or the group's retry and
// dead-letter topics, are on or ever were.
func (p *pass) findBrokers(ctx context.Context) bool {
	cfg := p.e.cfg
	topics := []string{cfg.Topic, cfg.retryTopic(), cfg.deadTopic()}
	routes, errs := make([]topicRoute, len(topics)), make([]error, len(topics))
	var asking sync.WaitGroup
	for i, topic := range topics {
		asking.Go(func() { routes[i], errs[i] = p.e.servers.route(ctx, topic) })
	}
	asking.Go(func() { p.readExpected(ctx) })
	asking.Wait()

	masters := make(map[string]string)
	for i, err := range errs {
		switch {
		case err == nil:
			maps.Copy(masters, routes[i].masters)
		case !errors.Is(err, errNoRoute):
			p.fail(problem{UnknownNameServers, err.Error()})
			return false
		case i == 0:
			p.fail(problem{UnknownNoRoute, err.Error()})
			return false
		}
	}
	for _, name := range slices.Sorted(maps.Keys(masters)) {
		b := p.newBroker(name)
		if addr := masters[name]; addr != "" {
			b.peer = p.e.peer(addr)
		} else {
			b.problem = &problem{UnknownMasterMissing, "broker " + name + " has no master in the route"}
		}
		p.brokers = append(p.brokers, b)
	}
	return true
}

func (p *pass) newBroker(name string) *brokerPass {
	return &brokerPass{
		p: p, name: name,
		committed: make(map[queueKey]int64), ranges: make(map[string]map[int32]remoting.QueueRange),
		windows: make(map[queueKey]queueWindow), coverage: make(map[string]coverage),
	}
}

func (p *pass) readExpected(ctx context.Context) {
	p.expected = make(map[string][]ExpectedQueue, 4)
	for _, topic := range p.sweptTopics() {
		queues, err := p.e.registry.Expected(ctx, topic)
		if err != nil {
			p.failSweep(problem{UnknownRegistry, fmt.Sprintf("read the expected queues of %s: %v", topic, err)})
			return
		}
		p.expected[topic] = queues
	}
}

func (p *pass) sweptTopics() []string {
	cfg := p.e.cfg
	return []string{cfg.Topic, cfg.retryTopic(), cfg.deadTopic(), scheduleTopic}
}

// readOffsets reads what must be read before the sweeps: the group's offsets,
// the delivered offsets of the delay levels, and the records at the positions.
func (b *brokerPass) readOffsets(ctx context.Context) error {
	if err := b.readInfo(ctx); err != nil {
		return err
	}
	cfg := b.p.e.cfg
	for _, topic := range []string{cfg.Topic, cfg.retryTopic()} {
		ranges, err := b.stats(ctx, topic)
		if err != nil {
			return err
		}
		if err := b.readCommitted(ctx, topic, slices.Collect(maps.Keys(ranges))); err != nil {
			return err
		}
	}
	var err error
	if b.delivered, err = b.peer.AllDelayOffsets(ctx); err != nil {
		return err
	}
	if !b.hasOffset {
		if b.groups, err = b.peer.Groups(ctx); err != nil {
			return err
		}
	}
	return b.verifyPositions(ctx)
}

// readInfo compares the clocks and finds out what would make a sweep blind.
func (b *brokerPass) readInfo(ctx context.Context) error {
	cfg, asked := b.p.e.cfg, time.Now()
	var err error
	if b.info, err = b.peer.BrokerRuntimeInfo(ctx); err != nil {
		return err
	}
	roundTrip := time.Since(asked)
	redisNow := time.UnixMilli(b.p.nowMS).Add(time.Since(b.p.began))
	if skew := clockSkew(redisNow, b.info.Now, roundTrip); skew > cfg.SweepMargin/2 {
		b.p.failSweepLocked(problem{UnknownClockSkew, fmt.Sprintf("broker %s: its clock is %s off Redis, more than half the margin of %s", b.name, skew, cfg.SweepMargin)})
	}
	if b.info.DispatchBehind > maxDispatchBehind {
		b.p.failSweepLocked(problem{UnknownDispatchBehind, fmt.Sprintf("broker %s: its queues lag %d bytes behind its log", b.name, b.info.DispatchBehind)})
	}
	settings, err := b.peer.BrokerConfig(ctx)
	if err != nil {
		return err
	}
	if settings["timerInterceptDelayLevel"] == "true" && settings["timerWheelEnable"] == "true" {
		b.p.failSweepLocked(problem{UnknownTimerWheel, "broker " + b.name + " has timerInterceptDelayLevel=true"})
	}
	return nil
}

// awaitDispatch waits until everything that was stored before the offsets were
// read is in the broker's queues, where the sweeps look. A message is stored
// first and put into its queue a moment later: one that has just moved from
// SCHEDULE to %RETRY% is behind the offset of the one, and not yet in the other.
func (b *brokerPass) awaitDispatch(ctx context.Context) error {
	info, err := b.peer.BrokerRuntimeInfo(ctx)
	if err != nil {
		return err
	}
	stored, logEnd := info.LogEnd, info.LogEnd
	for began := time.Now(); ; {
		if info, err = b.peer.BrokerRuntimeInfo(ctx); err != nil {
			return err
		}
		// The end that was read before the lag: the log can only have grown.
		if logEnd-info.DispatchBehind >= stored {
			return nil
		}
		if time.Since(began) > dispatchLimit {
			b.p.failSweepLocked(problem{UnknownDispatchBehind, fmt.Sprintf("broker %s: its queues lag %d bytes behind its log", b.name, info.DispatchBehind)})
			return nil
		}
		logEnd = info.LogEnd
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(dispatchPause):
		}
	}
}

// clockSkew is how far the clocks are apart at least. The broker's is known to
// lie within the second that begins at cut, and within the round trip.
func clockSkew(redis, cut time.Time, roundTrip time.Duration) time.Duration {
	switch earliest, latest := cut.Add(-roundTrip), cut.Add(time.Second+roundTrip); {
	case redis.Before(earliest):
		return earliest.Sub(redis)
	case redis.After(latest):
		return redis.Sub(latest)
	default:
		return 0
	}
}

func (p *pass) failSweepLocked(why problem) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failSweep(why)
}

// stats reads what the broker keeps of a topic; nothing if it has no such topic.
func (b *brokerPass) stats(ctx context.Context, topic string) (map[int32]remoting.QueueRange, error) {
	ranges, err := b.peer.TopicStats(ctx, topic)
	if remoting.IsCode(err, remoting.TopicNotExist) {
		return nil, nil
	}
	return ranges, err
}

func (b *brokerPass) readCommitted(ctx context.Context, topic string, queues []int32) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(confirmsAtOnce)
	var mu sync.Mutex
	for _, queue := range queues {
		group.Go(func() error {
			offset, found, err := b.peer.ConsumerOffset(ctx, b.p.e.cfg.ConsumerGroup, topic, queue)
			if err != nil || !found {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			b.committed[queueKey{b.name, topic, queue}] = offset
			b.hasOffset = true
			return nil
		})
	}
	return group.Wait()
}

// verifyPositions reads the record at each position that names this broker.
// A broker that lost its tail reuses offsets, so the record must carry the id.
func (b *brokerPass) verifyPositions(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(confirmsAtOnce)
	for i := range b.p.messages {
		m, q := &b.p.messages[i], b.p.queries[i]
		if m.position == nil || m.position.Broker != b.name {
			continue
		}
		group.Go(func() error {
			logOffset, err := m.position.LogOffset()
			if err != nil {
				return nil //nolint:nilerr // of no use: the sweep decides
			}
			record, err := b.peer.ViewMessage(ctx, b.p.e.cfg.Topic, logOffset)
			switch {
			case remoting.IsCode(err, remoting.SystemError): // no record there
			case err != nil:
				return err
			case record.Topic == b.p.e.cfg.Topic && record.QueueID == m.position.Queue &&
				record.QueueOffset == m.position.Offset && record.HasKey(q.MessageID):
				m.verified = true // each query belongs to one broker: no lock needed
			}
			return nil
		})
	}
	return group.Wait()
}

// knowsGroup says whether any broker knows the consumer group. An unknown one
// has passed nothing, and a name misspelt in the configuration must not make
// a sale's messages look unread for ever, or consumed.
func (p *pass) knowsGroup() bool {
	for _, b := range p.brokers {
		if b.hasOffset || b.groups[p.e.cfg.ConsumerGroup] {
			return true
		}
	}
	for _, b := range p.brokers {
		if b.problem != nil {
			p.fail(*b.problem)
			return false
		}
	}
	p.fail(problem{UnknownGroup, "no broker knows the consumer group " + p.e.cfg.ConsumerGroup})
	return false
}

// settlePositions concludes from the positions that were verified.
func (p *pass) settlePositions() {
	for i := range p.messages {
		m := &p.messages[i]
		if m.problem != nil || !m.verified {
			continue
		}
		key := queueKey{m.position.Broker, p.e.cfg.Topic, m.position.Queue}
		b := p.broker(m.position.Broker)
		if b.problem != nil {
			continue
		}
		m.add(b.copyInTopic(key, m.position.Offset))
		m.final = m.found.State == reservation.MessagePending
	}
}

// copyInTopic is what a copy in the topic says.
func (b *brokerPass) copyInTopic(key queueKey, offset int64) reservation.MessageEvidence {
	state := reservation.MessagePending
	if committed, ok := b.committed[key]; ok && offset < committed {
		state = reservation.MessageConsumed
	}
	return reservation.MessageEvidence{State: state, Detail: fmt.Sprintf("%s, offset %d", key, offset)}
}

func (p *pass) broker(name string) *brokerPass {
	for _, b := range p.brokers {
		if b.name == name {
			return b
		}
	}
	return nil
}

// openQueries are those that the sweeps decide, by the fingerprint of their id.
func (p *pass) openQueries() map[uint64][]int {
	open := make(map[uint64][]int)
	for i := range p.messages {
		if m := &p.messages[i]; m.problem == nil && !m.final {
			f := fingerprint(p.queries[i].MessageID)
			open[f] = append(open[f], i)
		}
	}
	return open
}

// needsTopic says whether a query's copies in the topic have to be looked for.
func (m *messageState) needsTopic() bool { return m.problem == nil && !m.verified }

// readRanges reads what each topic holds now, after the offsets were read.
func (b *brokerPass) readRanges(ctx context.Context) error {
	for _, topic := range b.p.sweptTopics() {
		ranges, err := b.stats(ctx, topic)
		if err != nil {
			return err
		}
		if ranges != nil {
			b.ranges[topic] = ranges
		}
	}
	return nil
}

// queues is how many queues of a topic the broker has.
func (b *brokerPass) queues(topic string) int32 {
	return int32(len(b.ranges[topic])) //nolint:gosec // remoting refuses more than 4,096
}

// checkExpected compares what is there with what was ever seen, and records
// what is new before anything is concluded from it.
func (p *pass) checkExpected(ctx context.Context) {
	if p.sweeping != nil && p.sweeping.cause == UnknownRegistry {
		return
	}
	known := make(map[queueKey]int32)
	for topic, queues := range p.expected {
		for _, want := range queues {
			known[queueKey{broker: want.Broker, topic: topic}] = want.Queues
			b := p.broker(want.Broker)
			switch {
			case b == nil:
				p.failSweep(problem{UnknownBrokerMissing, fmt.Sprintf("broker %s, seen with %s, is not in the route; `broker forget %s` if it is gone for good", want.Broker, topic, want.Broker)})
			case b.problem == nil && b.queues(topic) < want.Queues:
				p.failSweep(problem{UnknownQueueMissing, fmt.Sprintf("broker %s has %d queues of %s, %d were seen; `broker forget %s` if that is intended", want.Broker, b.queues(topic), topic, want.Queues, want.Broker)})
			}
		}
	}
	var news []ExpectedQueue
	for _, b := range p.brokers {
		for topic := range b.ranges {
			if n := b.queues(topic); n > known[queueKey{broker: b.name, topic: topic}] {
				news = append(news, ExpectedQueue{Broker: b.name, Topic: topic, Queues: n})
			}
		}
	}
	if len(news) == 0 {
		return
	}
	if err := p.e.registry.Record(ctx, news); err != nil {
		p.failSweep(problem{UnknownRegistry, fmt.Sprintf("record the expected queues: %v", err)})
	}
}
