package rocketmq

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/reservation"
)

// Causes of UNKNOWN evidence, stable names: tasks and counts are by them.
const (
	UnknownInvalidQuery   = "invalid_query"       // no message_id or reserved_at_ms to search by
	UnknownNameServers    = "name_servers_down"   // none answered
	UnknownNoRoute        = "route_absent"        // the name servers have no route for the topic
	UnknownGroup          = "group_absent"        // no broker knows the consumer group
	UnknownBroker         = "broker_unreachable"  // did not answer in time
	UnknownBrokerMissing  = "broker_missing"      // seen before, now out of the route: `broker forget` ends it
	UnknownQueueMissing   = "queue_missing"       // a broker has fewer queues than it had
	UnknownMasterMissing  = "master_missing"      // the route names no master for a broker
	UnknownRegistry       = "registry_unreadable" // the expected queues could not be read or recorded
	UnknownRefused        = "broker_refused"      // the broker refused a read, for example by its ACL
	UnknownProtocol       = "broker_protocol"     // the broker sent what the protocol does not allow
	UnknownQueueChanged   = "queue_changed"       // records were lost or replaced while they were read
	UnknownBatchQueue     = "batch_queue"         // the topic stores several messages under one offset
	UnknownRetention      = "retention_passed"    // the broker no longer keeps the whole window
	UnknownWindowTooLarge = "window_too_large"    // MaxSweepMessages does not hold the window
	UnknownInterrupted    = "sweep_interrupted"   // time ran out; the next pass goes on from there
	UnknownClockSkew      = "clock_skew"          // a broker's clock is off by more than half the margin
	UnknownDispatchBehind = "dispatch_behind"     // the broker's queues lag behind its log
	UnknownTimerWheel     = "timer_wheel_retries" // retries wait in the timer wheel, which cannot be read
	UnknownPOP            = "pop_consumer"        // POP: a passed offset proves nothing
)

const (
	// maxDispatchBehind is how far, in bytes, a broker's queues may lag behind its
	// log: about a second's worth at full load, far less than `settle` allows.
	maxDispatchBehind = 16 << 20
	// dispatchLimit is how long a pass waits for a broker's queues to catch up
	// with what was stored before it looked; idle, they lag by a millisecond.
	dispatchLimit = 2 * time.Second
	dispatchPause = 5 * time.Millisecond
	// defaultGatherLimit bounds a pass whose caller set no deadline.
	defaultGatherLimit = 2 * time.Minute
	// confirmsAtOnce is how many hits are confirmed at once on one broker.
	confirmsAtOnce = 32
)

// Query asks for the evidence of one message.
type Query = reservation.MessageQuery

// Evidence gathers M of protocol §2. It keeps what its sweeps have read, so one
// Evidence should live as long as the daemon. It is safe for concurrent use;
// passes run one at a time.
type Evidence struct {
	cfg      Config
	registry QueueRegistry
	logger   *slog.Logger
	servers  *nameServers

	turn chan struct{} // holds one token: whoever has it owns the fields below

	peers    map[string]*remoting.Peer // by broker address
	forgetMS int64                     // nothing reserved before is asked for any more; 0: unknown

	indexing sync.Mutex // guards the map: queues are swept side by side
	indexes  map[queueKey]*queueIndex
}

func (e *Evidence) index(key queueKey) *queueIndex {
	e.indexing.Lock()
	defer e.indexing.Unlock()
	return e.indexes[key]
}

func (e *Evidence) setIndex(key queueKey, x *queueIndex) {
	e.indexing.Lock()
	defer e.indexing.Unlock()
	e.indexes[key] = x
}

// queueKey names a queue.
type queueKey struct {
	broker, topic string
	queue         int32
}

func (k queueKey) String() string {
	return fmt.Sprintf("broker %s, %s queue %d", k.broker, k.topic, k.queue)
}

// NewEvidence makes the gatherer. It fails only on a wrong configuration;
// RocketMQ need not be up.
func NewEvidence(cfg Config, registry QueueRegistry, logger *slog.Logger) (*Evidence, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	e := &Evidence{
		cfg: cfg, registry: registry, logger: logger, servers: newNameServers(cfg),
		turn:  make(chan struct{}, 1),
		peers: make(map[string]*remoting.Peer), indexes: make(map[queueKey]*queueIndex),
	}
	e.turn <- struct{}{}
	return e, nil
}

// Close ends all connections. It waits for a pass under way; passes that begin
// later are UNKNOWN.
func (e *Evidence) Close() {
	<-e.turn
	defer e.giveBack()
	e.servers.Close()
	for _, p := range e.peers {
		p.Close()
	}
}

// Forget says that no message reserved before oldestLiveMS (Redis time) is
// going to be asked for: what the sweeps keep of older ones is dropped with the
// next pass. Asking for an older one all the same reads its window once more.
func (e *Evidence) Forget(ctx context.Context, oldestLiveMS int64) error {
	if err := e.take(ctx); err != nil {
		return fmt.Errorf("forget swept messages: %w", err)
	}
	defer e.giveBack()
	e.forgetMS = oldestLiveMS
	return nil
}

func (e *Evidence) take(ctx context.Context) error {
	select {
	case <-e.turn:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (e *Evidence) giveBack() { e.turn <- struct{}{} }

// Gather concludes M for each query (protocol §2, services §3). nowMS is Redis
// time at the moment of the call. Every query has an entry in the answer;
// whatever could not be read is UNKNOWN with a cause, never an error.
//
// A message whose position is known is looked up there: the record must carry
// its id, and only one send was made. All others are looked for in a sweep of
// the topic, from the earliest reserved_at_ms minus the margin. What the group
// has passed is then looked for in the retry, delay and dead-letter topics:
//
//	stored at or beyond the group's offset               PENDING
//	in SCHEDULE_TOPIC_XXXX at or beyond what was
//	delivered of its level, or in %RETRY% at or
//	beyond the group's offset there                      RETRYING
//	in %DLQ%                                             DEAD, since its store time
//	passed, and in none of these                         CONSUMED
//	nowhere                                              ABSENT
//
// Order of reads. A message that fails moves from the topic to SCHEDULE, from
// there to %RETRY%, back and forth, and at last to %DLQ%; the offset it leaves
// behind moves only after the copy is stored. So every offset (the group's on
// the topic and on %RETRY%, and the delivered ones) is read, on all brokers,
// before the first sweep of SCHEDULE, %RETRY% and %DLQ% begins, on any. Whatever
// was behind an offset then lies where the sweeps have yet to look: let the
// message be in SCHEDULE (or %RETRY%) when that topic's offset is read; its copy
// there counts, or it was moved meanwhile to the other one, where it counts too,
// because it was stored after that one's offset was read or before its being
// passed. "Stored" is in the commit log; the queues that the sweeps read follow a
// moment later, so the pass waits until they have caught up with what was stored
// when the last offset was read. The topic itself may be swept at any time: a copy that is found is
// compared with an offset that is too old at worst, which makes PENDING of
// CONSUMED, the waiting side. It is swept last, together with the others, so
// that as few as possible are stored after it; `settle` covers those.
func (e *Evidence) Gather(ctx context.Context, nowMS int64, queries []Query) map[string]reservation.MessageEvidence {
	if len(queries) == 0 {
		return map[string]reservation.MessageEvidence{}
	}
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, defaultGatherLimit)
		defer cancel()
	}
	ctx, span := otel.Tracer(tracerName).Start(ctx, "rocketmq evidence", trace.WithAttributes(attribute.Int("messaging.batch.message_count", len(queries))))
	defer span.End()
	p := &pass{e: e, began: time.Now(), nowMS: nowMS, queries: queries, messages: make([]messageState, len(queries))}
	if err := e.take(ctx); err != nil {
		p.fail(problem{UnknownInterrupted, "another pass is under way"})
		return p.conclude()
	}
	defer e.giveBack()
	p.run(ctx)
	e.closeUnused(p)
	e.logger.DebugContext(ctx, "message evidence gathered", "messages", len(queries), "brokers", len(p.brokers),
		"swept", len(p.byFingerprint), "latency_ms", time.Since(p.began).Milliseconds())
	return p.conclude()
}

// peer is the connection to the broker at addr.
func (e *Evidence) peer(addr string) *remoting.Peer {
	peer := e.peers[addr]
	if peer == nil {
		peer = remoting.NewPeer(addr, e.cfg.peerOptions())
		e.peers[addr] = peer
	}
	return peer
}

// closeUnused drops connections and indexes of brokers that left.
func (e *Evidence) closeUnused(p *pass) {
	if len(p.brokers) == 0 {
		return // the pass knows no brokers: it did not get that far
	}
	inUse := make(map[string]bool, len(p.brokers))
	names := make(map[string]bool, len(p.brokers))
	for _, b := range p.brokers {
		names[b.name] = true
		if b.peer != nil {
			inUse[b.peer.Addr()] = true
		}
	}
	for addr, peer := range e.peers {
		if !inUse[addr] {
			peer.Close()
			delete(e.peers, addr)
		}
	}
	for key := range e.indexes {
		if !names[key.broker] {
			delete(e.indexes, key)
		}
	}
}
