package rocketmq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	rmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
)

// ProducerGroup is the producer group that the daemon sends as.
const ProducerGroup = "seckill-reconciler"

// libraryIOTimeout is the library's own default for reads and writes without a
// deadline; every send has one.
const libraryIOTimeout = 2 * time.Minute

var errSenderClosed = errors.New("the sender is closed")

// senders numbers the senders of the process: clients of one instance name
// would share their state.
var senders atomic.Int64

// Sender sends order messages, one by one and many at once. It never batches:
// a batch has one acknowledgement, so a failure would leave the outcome of all
// its messages unknown. It never retries: one slow send would become several
// stored copies, of which only the last error is seen.
//
// It is safe for concurrent use, and RocketMQ need not be up when it is made.
type Sender struct {
	cfg      Config
	limiter  *rate.Limiter
	slots    chan struct{}
	selector *healthSelector
	producer rmq.Producer
	servers  *nameServers

	mu      sync.Mutex
	started bool
	closed  bool
	flying  sync.WaitGroup // sends in the library's hands, the given-up ones included
}

// libraryConnections guards the library's connection settings, which are global.
var libraryConnections struct {
	sync.Mutex
	set bool
	was connectionSettings
}

type connectionSettings struct {
	dial time.Duration
	tls  bool
}

// NewSender makes a sender. It fails only on a wrong configuration. The
// library keeps its connection settings in a global: a second sender of the
// process must have the same DialTimeout and TLS, and the first one must be made
// before any other client of the library.
func NewSender(cfg Config, logger *slog.Logger) (*Sender, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	RouteLibraryLog(logger)
	s := &Sender{
		cfg:      cfg,
		limiter:  rate.NewLimiter(rate.Limit(cfg.SendRate), cfg.SendConcurrency),
		slots:    make(chan struct{}, cfg.SendConcurrency),
		selector: newHealthSelector(),
		servers:  newNameServers(cfg),
	}
	if s.producer, err = s.newProducer(); err != nil {
		s.servers.Close()
		return nil, fmt.Errorf("make the RocketMQ producer: %w", err)
	}
	return s, nil
}

func (s *Sender) newProducer() (rmq.Producer, error) {
	var addrs primitive.NamesrvAddr
	for _, addr := range s.cfg.NameServers {
		addrs = append(addrs, "http://"+strings.TrimPrefix(addr, "http://")) // else the library refuses host names
	}
	options := []producer.Option{
		producer.WithGroupName(ProducerGroup),
		producer.WithInstanceName(fmt.Sprintf("reconciler-%d-%d", os.Getpid(), senders.Add(1))),
		producer.WithNsResolver(primitive.NewPassthroughResolver(addrs)),
		producer.WithRetry(0),
		producer.WithSendMsgTimeout(s.cfg.SendTimeout),
		producer.WithQueueSelector(s.selector),
		producer.WithCredentials(primitive.Credentials{AccessKey: s.cfg.AccessKey, SecretKey: s.cfg.SecretKey}),
	}
	settings := connectionSettings{s.cfg.DialTimeout, s.cfg.TLS != nil}
	libraryConnections.Lock()
	defer libraryConnections.Unlock()
	switch {
	case !libraryConnections.set:
		options = append(options, producer.WithTls(settings.tls),
			producer.WithRemotingTimeout(settings.dial, libraryIOTimeout, libraryIOTimeout))
	case libraryConnections.was != settings:
		return nil, errors.New("this process has a sender with another dial_timeout or tls setting already")
	}
	p, err := rmq.NewProducer(options...)
	if err == nil {
		libraryConnections.set, libraryConnections.was = true, settings
	}
	return p, err
}

// Send sends the messages and returns one result for each, in their order. It
// returns when all are decided, each at most SendTimeout after its turn came; a
// broker that hangs holds up only what was sent to it. When ctx ends, messages
// that were not yet handed over are Unavailable, those under way Unknown.
func (s *Sender) Send(ctx context.Context, messages []Outgoing) []SendResult {
	results := make([]SendResult, len(messages))
	ctx, span := otel.Tracer(tracerName).Start(ctx, "rocketmq send", trace.WithAttributes(attribute.Int("messaging.batch.message_count", len(messages))))
	defer span.End()
	if err := s.start(ctx); err != nil {
		cause := CauseNameServersDown
		switch {
		case errors.Is(err, errNoRoute):
			cause = CauseNoRoute
		case errors.Is(err, errSenderClosed):
			cause = CauseSenderClosed
		}
		for i, m := range messages {
			results[i] = notSent(m.MessageID, cause, err)
		}
		return results
	}
	var turn sync.WaitGroup
	for i, m := range messages {
		if err := s.awaitTurn(ctx); err != nil {
			results[i] = notSent(m.MessageID, CauseNotSent, err)
			continue
		}
		turn.Go(func() {
			defer func() { <-s.slots }()
			results[i] = s.sendOne(ctx, m)
		})
	}
	turn.Wait()
	return results
}

func notSent(messageID, cause string, err error) SendResult {
	return SendResult{MessageID: messageID, Outcome: Unavailable, Cause: cause, Err: fmt.Errorf("send %s: %w", messageID, err)}
}

// SetRate changes how many messages are sent per second at most, also for sends
// that wait for their turn now.
func (s *Sender) SetRate(perSecond float64) { s.limiter.SetLimit(rate.Limit(perSecond)) }

// awaitTurn takes a slot and a token of the rate limit.
func (s *Sender) awaitTurn(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	if err := s.limiter.Wait(ctx); err != nil {
		<-s.slots
		return err
	}
	return nil
}

// start starts the producer when the topic has a route for the first time.
// Before, the library would ask the name servers once per message, one after
// the other and without a deadline.
func (s *Sender) start(ctx context.Context) error {
	s.mu.Lock()
	started, closed := s.started, s.closed
	s.mu.Unlock()
	if closed {
		return errSenderClosed
	}
	if started {
		return nil
	}
	if _, err := s.servers.route(ctx, s.cfg.Topic); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return errSenderClosed
	case s.started:
		return nil
	}
	if err := s.producer.Start(); err != nil {
		return fmt.Errorf("start the RocketMQ producer: %w", err)
	}
	s.started = true
	return nil
}

// sendOne hands one message to the library and waits for SendTimeout, whatever
// the library does.
func (s *Sender) sendOne(ctx context.Context, m Outgoing) SendResult {
	msg := s.message(ctx, m)
	ctx, cancel := context.WithTimeout(ctx, s.cfg.SendTimeout)
	if !s.takeOff() {
		cancel()
		return notSent(m.MessageID, CauseSenderClosed, errSenderClosed)
	}
	s.selector.begin(ctx, msg)
	done := make(chan SendResult, 1)
	go func() {
		defer s.flying.Done()
		defer cancel()
		result, err := s.producer.SendSync(ctx, msg)
		done <- s.settle(msg, classify(m.MessageID, result, err))
	}()
	select {
	case result := <-done:
		return result
	case <-ctx.Done():
		return s.settle(msg, SendResult{
			MessageID: m.MessageID, Outcome: Unknown, Cause: CauseSendTimeout,
			Err: fmt.Errorf("send %s: no answer within %s: %w", m.MessageID, s.cfg.SendTimeout, context.Cause(ctx)),
		})
	}
}

// settle tells the selector how the attempt ended, and names the true cause of
// an attempt that the selector itself prevented.
func (s *Sender) settle(msg *primitive.Message, result SendResult) SendResult {
	if result.Cause == CauseNoRoute && s.selector.allResting() {
		result.Cause = CauseBrokersUnavailable
	}
	s.selector.end(msg, result)
	return result
}

// takeOff counts a send in, unless the sender is closed.
func (s *Sender) takeOff() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.flying.Add(1)
	return true
}

// message is what the broker is given. It carries the trace that it is sent in,
// unless it carries one.
func (s *Sender) message(ctx context.Context, m Outgoing) *primitive.Message {
	msg := primitive.NewMessage(s.cfg.Topic, m.Body)
	if span := trace.SpanContextFromContext(ctx); span.IsSampled() {
		msg.WithProperty(TraceProperty, span.TraceID().String())
	}
	for name, value := range m.Properties {
		msg.WithProperty(name, value)
	}
	msg.WithKeys([]string{m.MessageID})
	if tag := orDefault(m.Tag, s.cfg.Tag); tag != "" {
		msg.WithTag(tag)
	}
	return msg
}

// Close refuses further sends, waits for those under way, each of which is
// bounded by SendTimeout, and shuts the producer down. If ctx ends first, the
// library is left as it is: it does not bear a shutdown during a send.
func (s *Sender) Close(ctx context.Context) error {
	s.mu.Lock()
	already := s.closed
	s.closed = true
	s.mu.Unlock()
	if already {
		return nil
	}
	s.servers.Close()
	landed := make(chan struct{})
	go func() { s.flying.Wait(); close(landed) }()
	select {
	case <-landed:
	case <-ctx.Done():
		return fmt.Errorf("close the RocketMQ sender: sends are still under way: %w", context.Cause(ctx))
	}
	if err := s.producer.Shutdown(); err != nil {
		return fmt.Errorf("shut the RocketMQ producer down: %w", err)
	}
	return nil
}
