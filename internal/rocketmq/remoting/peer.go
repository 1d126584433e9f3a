package remoting

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // RocketMQ's ACL prescribes HMAC-SHA1
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// ErrLost says that the connection broke while the request was under way: it
// may have been carried out.
var ErrLost = errors.New("connection lost")

// ErrClosed says that the peer was closed by its owner.
var ErrClosed = errors.New("peer is closed")

// CodeError is the server's own refusal of a request.
type CodeError struct {
	Request int // request code
	Code    int // response code
	Remark  string
}

func (e *CodeError) Error() string {
	return fmt.Sprintf("request %d refused with code %d: %.300s", e.Request, e.Code, e.Remark)
}

// IsCode says whether err is the server's refusal with one of the codes.
func IsCode(err error, codes ...int) bool {
	var refused *CodeError
	return errors.As(err, &refused) && slices.Contains(codes, refused.Code)
}

// Options of a [Peer]. The zero value works.
type Options struct {
	DialTimeout time.Duration // default 1s
	CallTimeout time.Duration // of one request, beside its context; default 3s
	MaxFrame    int           // bytes; default DefaultMaxFrame
	MaxInFlight int           // requests under way at once; default 64
	TLS         *tls.Config   // nil: plain TCP
	AccessKey   string        // with SecretKey: requests are signed for the broker's ACL
	SecretKey   string
}

func (o Options) withDefaults() Options {
	if o.DialTimeout <= 0 {
		o.DialTimeout = time.Second
	}
	if o.CallTimeout <= 0 {
		o.CallTimeout = 3 * time.Second
	}
	if o.MaxFrame <= 0 {
		o.MaxFrame = DefaultMaxFrame
	}
	if o.MaxInFlight <= 0 {
		o.MaxInFlight = 64
	}
	return o
}

// Peer is one name server or broker. It is safe for concurrent use.
type Peer struct {
	addr   string
	opts   Options
	slots  chan struct{}
	opaque atomic.Int32

	lifetime context.Context //nolint:containedctx // ends with Close; a dial outlives the call that began it
	end      context.CancelFunc

	mu      sync.Mutex
	conn    *connection
	dialing *dialAttempt
	closed  bool
	readers sync.WaitGroup
}

// dialAttempt is shared by all calls that wait for the same connection.
type dialAttempt struct {
	done chan struct{}
	conn *connection
	err  error
}

// NewPeer returns a peer for addr, host:port. It dials when it is first used.
func NewPeer(addr string, opts Options) *Peer {
	opts = opts.withDefaults()
	lifetime, end := context.WithCancel(context.Background())
	return &Peer{addr: addr, opts: opts, slots: make(chan struct{}, opts.MaxInFlight), lifetime: lifetime, end: end}
}

// Addr is the address that the peer was made for.
func (p *Peer) Addr() string { return p.addr }

// Close ends the connection and waits until its reader has gone. Calls under
// way fail with [ErrLost], later ones with [ErrClosed].
func (p *Peer) Close() {
	p.mu.Lock()
	p.closed = true
	conn := p.conn
	p.conn = nil
	p.mu.Unlock()
	p.end()
	if conn != nil {
		conn.fail(ErrClosed)
	}
	p.readers.Wait()
}

// tracerName is this package as traces name it.
const tracerName = "github.com/seckill/reconciler/internal/rocketmq/remoting"

// Call sends a request and waits for its reply, whatever code that has. It is
// bounded by ctx and by Options.CallTimeout, dialling and the wait for a free
// slot included. Nothing is sent twice.
func (p *Peer) Call(ctx context.Context, code int, ext map[string]string, body []byte) (*Command, error) {
	ctx, cancel := context.WithTimeout(ctx, p.opts.CallTimeout)
	defer cancel()
	ctx, span := otel.Tracer(tracerName).Start(ctx, "rocketmq request", trace.WithSpanKind(trace.SpanKindClient),
		trace.WithAttributes(attribute.Int("rocketmq.request_code", code), attribute.String("server.address", p.addr)))
	defer span.End()
	reply, err := p.call(ctx, code, ext, body)
	if err != nil {
		span.SetStatus(otelcodes.Error, "no reply")
		return nil, fmt.Errorf("request %d to %s: %w", code, p.addr, err)
	}
	return reply, nil
}

// Do is Call for requests whose only good reply is code 0; any other is a
// [*CodeError].
func (p *Peer) Do(ctx context.Context, code int, ext map[string]string, body []byte) (*Command, error) {
	reply, err := p.Call(ctx, code, ext, body)
	if err != nil {
		return nil, err
	}
	if reply.Code != Success {
		return nil, fmt.Errorf("%s: %w", p.addr, &CodeError{Request: code, Code: reply.Code, Remark: reply.Remark})
	}
	return reply, nil
}

func (p *Peer) call(ctx context.Context, code int, ext map[string]string, body []byte) (*Command, error) {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for a free slot: %w", context.Cause(ctx))
	}
	conn, err := p.connect(ctx)
	if err != nil {
		return nil, err
	}
	request := &Command{
		Code: code, Language: "GO", Version: clientVersion, Opaque: p.opaque.Add(1),
		ExtFields: p.sign(ext, body), Body: body,
	}
	return conn.roundTrip(ctx, request, p.opts.CallTimeout/2)
}

// sign adds the ACL signature: HMAC-SHA1 over the values of all fields in the
// order of their names, then the body.
func (p *Peer) sign(ext map[string]string, body []byte) map[string]string {
	if p.opts.AccessKey == "" || p.opts.SecretKey == "" {
		return ext
	}
	signed := maps.Clone(ext)
	if signed == nil {
		signed = make(map[string]string, 2)
	}
	signed["AccessKey"] = p.opts.AccessKey
	mac := hmac.New(sha1.New, []byte(p.opts.SecretKey))
	for _, name := range slices.Sorted(maps.Keys(signed)) {
		mac.Write([]byte(signed[name]))
	}
	mac.Write(body)
	signed["Signature"] = base64.StdEncoding.EncodeToString(mac.Sum(nil))
	return signed
}

// connect returns the live connection, or joins or begins an attempt to dial.
func (p *Peer) connect(ctx context.Context) (*connection, error) {
	p.mu.Lock()
	switch {
	case p.closed:
		p.mu.Unlock()
		return nil, ErrClosed
	case p.conn != nil && !p.conn.broken():
		conn := p.conn
		p.mu.Unlock()
		return conn, nil
	}
	attempt := p.dialing
	if attempt == nil {
		attempt = &dialAttempt{done: make(chan struct{})}
		p.dialing = attempt
		p.readers.Go(func() { p.dial(attempt) })
	}
	p.mu.Unlock()
	select {
	case <-attempt.done:
		return attempt.conn, attempt.err
	case <-ctx.Done():
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: context.Cause(ctx)}
	}
}

// dial makes one attempt, independent of the calls that wait for it, and then
// serves the connection until it breaks.
func (p *Peer) dial(attempt *dialAttempt) {
	ctx, cancel := context.WithTimeout(p.lifetime, p.opts.DialTimeout)
	defer cancel()
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", p.addr)
	if err == nil && p.opts.TLS != nil {
		raw, err = handshake(ctx, raw, p.opts.TLS, p.addr)
	}
	p.mu.Lock()
	p.dialing = nil
	if err == nil && p.closed {
		_ = raw.Close()
		err = ErrClosed
	}
	if err == nil {
		attempt.conn = &connection{raw: raw, pending: make(map[int32]chan *Command)}
		p.conn = attempt.conn
	}
	p.mu.Unlock()
	attempt.err = err
	close(attempt.done)
	if err == nil {
		attempt.conn.serve(p.opts.MaxFrame)
	}
}

func handshake(ctx context.Context, raw net.Conn, cfg *tls.Config, addr string) (net.Conn, error) {
	if cfg.ServerName == "" && !cfg.InsecureSkipVerify {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			_ = raw.Close()
			return nil, err
		}
		cfg = cfg.Clone()
		cfg.ServerName = host
	}
	secured := tls.Client(raw, cfg)
	if err := secured.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, &net.OpError{Op: "dial", Net: "tcp", Addr: raw.RemoteAddr(), Err: fmt.Errorf("TLS: %w", err)}
	}
	return secured, nil
}

// connection is one TCP connection with its requests under way.
type connection struct {
	raw     net.Conn
	writing sync.Mutex
	frames  atomic.Int64 // frames received, to tell a slow server from a dead path

	mu      sync.Mutex
	pending map[int32]chan *Command
	err     error
}

func (c *connection) broken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err != nil
}

// fail ends the connection: the first cause is what every call gets.
func (c *connection) fail(cause error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = cause
	}
	for opaque, waiting := range c.pending {
		close(waiting)
		delete(c.pending, opaque)
	}
	c.mu.Unlock()
	_ = c.raw.Close()
}

func (c *connection) serve(maxFrame int) {
	r := bufio.NewReaderSize(c.raw, 64<<10)
	for {
		reply, err := ReadFrame(r, maxFrame)
		if err != nil {
			c.fail(fmt.Errorf("%w: %w", ErrLost, err))
			return
		}
		c.frames.Add(1)
		if !reply.IsResponse() {
			continue // the server's own requests (consumer list changed, …) concern consumers
		}
		c.mu.Lock()
		waiting := c.pending[reply.Opaque]
		delete(c.pending, reply.Opaque)
		c.mu.Unlock()
		if waiting != nil {
			waiting <- reply
		}
	}
}

// roundTrip sends the request and waits. A server from which nothing came for
// silence is given up: the path may be dead without a reset, and a new
// connection recovers sooner than the old one's retransmissions.
func (c *connection) roundTrip(ctx context.Context, request *Command, silence time.Duration) (*Command, error) {
	frame, err := AppendFrame(nil, request)
	if err != nil {
		return nil, err
	}
	waiting := make(chan *Command, 1)
	c.mu.Lock()
	if c.err != nil {
		defer c.mu.Unlock()
		return nil, c.err
	}
	c.pending[request.Opaque] = waiting
	c.mu.Unlock()

	framesBefore, sentAt := c.frames.Load(), time.Now()
	if err := c.write(ctx, frame); err != nil {
		c.fail(fmt.Errorf("%w: write: %w", ErrLost, err)) // half a frame poisons the stream
		return nil, c.cause()
	}
	select {
	case reply, ok := <-waiting:
		if !ok {
			return nil, c.cause()
		}
		return reply, nil
	case <-ctx.Done():
		c.mu.Lock()
		delete(c.pending, request.Opaque)
		c.mu.Unlock()
		if c.frames.Load() == framesBefore && time.Since(sentAt) >= silence {
			c.fail(fmt.Errorf("%w: no reply within the time limit", ErrLost))
		}
		return nil, context.Cause(ctx)
	}
}

func (c *connection) write(ctx context.Context, frame []byte) error {
	c.writing.Lock()
	defer c.writing.Unlock()
	deadline, _ := ctx.Deadline() // Call always sets one
	if err := c.raw.SetWriteDeadline(deadline); err != nil {
		return err
	}
	_, err := c.raw.Write(frame)
	return err
}

func (c *connection) cause() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}
