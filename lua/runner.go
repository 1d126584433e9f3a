package lua

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	defaultPipeline = 256 // larger pipelines hardly help
	defaultInFlight = 4   // pipelines of all batches together, per node
	// maxLoads bounds how often a chunk's scripts are loaded: a node that
	// forgets them again and again is not waited for.
	maxLoads = 3
	// maxRedirects bounds how often a call follows MOVED or ASK.
	maxRedirects = 3
	// settleGrace is how long Run waits beyond the context for replies that
	// have arrived already.
	settleGrace = 100 * time.Millisecond
)

// Runner runs batches on one Redis deployment. It is safe for concurrent use.
type Runner struct {
	single   *redis.Client
	cluster  *redis.ClusterClient
	pipeline int
	inFlight int

	mu    sync.Mutex
	nodes map[string]*node // by address
}

// Option changes a limit of a [Runner].
type Option func(*Runner)

// WithPipeline sets how many calls go into one pipeline at most (256).
func WithPipeline(calls int) Option { return func(r *Runner) { r.pipeline = max(calls, 1) } }

// WithInFlight sets how many pipelines, of all batches together, may be on
// their way to one node (4). A node that stalls never holds more than these.
func WithInFlight(pipelines int) Option { return func(r *Runner) { r.inFlight = max(pipelines, 1) } }

// NewRunner makes a runner for a *redis.Client (standalone or Sentinel) or a
// *redis.ClusterClient. It refuses with [ErrUnsafeClient] a client that
// repeats writes, ignores the context's deadline, can wait without end for a
// reply, or reads from replicas: see [ClientOptions]. The runner does not own
// the client; close the client after the last batch has been run.
func NewRunner(client redis.UniversalClient, options ...Option) (*Runner, error) {
	r := &Runner{pipeline: defaultPipeline, inFlight: defaultInFlight, nodes: map[string]*node{}}
	var err error
	switch c := client.(type) {
	case *redis.Client:
		r.single, err = c, checkSingle(c.Options())
	case *redis.ClusterClient:
		r.cluster, err = c, checkCluster(c.Options())
	default:
		err = fmt.Errorf("%T is neither *redis.Client nor *redis.ClusterClient", client)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnsafeClient, err)
	}
	for _, option := range options {
		option(r)
	}
	return r, nil
}

// Batch starts an empty batch.
func (r *Runner) Batch() *Batch { return &Batch{runner: r} }

// route says where a call goes: to the master of its key's slot when client is
// nil, else where a redirection pointed.
type route struct {
	client *redis.Client
	asking bool // ASK: the node serves the slot only right after ASKING
}

// outcome is what became of a call at one node.
type outcome struct {
	call     *call
	reply    any
	err      error
	redirect string // MOVED or ASK: the address; empty: settled
	asking   bool
	hops     int
}

// Run sends the batch and returns when every call has an outcome, at the
// latest shortly (0.1 s) after the end of ctx; what is still on its way then is
// [ErrOutcomeUnknown]. Failures of single calls are in their results; Run's own
// error is that of ctx, or of a batch that was run before.
func (b *Batch) Run(ctx context.Context) error {
	if b.ran {
		return errors.New("run a batch: it was run before")
	}
	b.ran = true
	f := &flight{runner: b.runner, out: make(chan []outcome), done: make(chan struct{})}
	defer close(f.done)

	open := 0
	valid := make([]outcome, 0, len(b.calls))
	for _, c := range b.calls {
		if c.invalid != nil {
			c.finish(nil, c.failure(ErrInvalidArgument, c.invalid))
			continue
		}
		valid = append(valid, outcome{call: c})
		open++
	}
	if open > 0 {
		go f.dispatch(ctx, valid)
	}
	end := ctx.Done()
	var late <-chan time.Time
	for open > 0 {
		select {
		case outcomes := <-f.out:
			for _, o := range outcomes {
				o.call.finish(o.reply, o.err)
			}
			open -= len(outcomes)
		case <-end:
			end, late = nil, time.After(settleGrace)
		case <-late:
			b.abandon(ctx)
			open = 0
		}
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("run %d scripts: %w", len(b.calls), err)
	}
	return nil
}

// abandon settles what is still on its way when the context has ended. Its
// goroutines end by the client's time-outs and find nobody listening.
func (b *Batch) abandon(ctx context.Context) {
	for _, c := range b.calls {
		if !c.settled {
			c.finish(nil, c.failure(ErrOutcomeUnknown, context.Cause(ctx)))
		}
	}
}

func (c *call) finish(reply any, err error) {
	c.settled = true
	c.settle(reply, err)
}

// flight is one run of a batch. Its goroutines only ever read calls; outcomes
// go to Run, which alone settles them.
type flight struct {
	runner *Runner
	out    chan []outcome
	done   chan struct{} // closed when Run has returned
}

func (f *flight) report(outcomes []outcome) {
	if len(outcomes) == 0 {
		return
	}
	select {
	case f.out <- outcomes:
	case <-f.done:
	}
}

// dispatch sends calls to their nodes, each node on a goroutine of its own, so
// that one that stalls delays only itself.
func (f *flight) dispatch(ctx context.Context, calls []outcome) {
	groups, failed := f.runner.group(ctx, calls)
	for to, group := range groups {
		go f.runNode(ctx, to, group)
	}
	f.report(failed)
}

// runNode sends the calls of one node in pipelines, one after the other.
func (f *flight) runNode(ctx context.Context, to route, calls []outcome) {
	n := f.runner.node(to.client)
	for chunk := range slices.Chunk(calls, f.runner.pipeline) {
		f.runChunk(ctx, n, to, chunk)
	}
}

func (f *flight) runChunk(ctx context.Context, n *node, to route, chunk []outcome) {
	select {
	case n.slots <- struct{}{}:
		defer func() { <-n.slots }()
	case <-ctx.Done():
		f.report(unsent(chunk, context.Cause(ctx)))
		return
	}
	if ctx.Err() != nil {
		f.report(unsent(chunk, context.Cause(ctx)))
		return
	}
	settled, redirected := n.run(ctx, to, chunk)
	if f.runner.cluster != nil && slices.ContainsFunc(settled, func(o outcome) bool { return o.err != nil && stale(o.err) }) {
		f.runner.cluster.ReloadState(ctx) // asynchronous, and coalesced by the client
	}
	f.report(settled)
	if len(redirected) > 0 {
		go f.dispatch(ctx, redirected)
	}
}

// unsent settles calls that were never handed to a connection.
func unsent(calls []outcome, cause error) []outcome {
	out := slices.Clone(calls)
	for i := range out {
		out[i].err = out[i].call.failure(ErrUnreachable, cause)
	}
	return out
}

// group sorts calls by the node that each goes to, keeping their order.
func (r *Runner) group(ctx context.Context, calls []outcome) (groups map[route][]outcome, failed []outcome) {
	groups = map[route][]outcome{}
	if r.single != nil {
		groups[route{client: r.single}] = calls
		return groups, nil
	}
	var byAddress map[string]*redis.Client
	if slices.ContainsFunc(calls, func(o outcome) bool { return o.redirect != "" }) {
		byAddress = r.reload(ctx)
	}
	masters := map[string]*redis.Client{} // by scope's first key: most calls of a batch share few scopes
	for _, o := range calls {
		to, err := r.routeOf(ctx, o, byAddress, masters)
		if err != nil {
			o.err = err
			failed = append(failed, o)
			continue
		}
		o.redirect, o.asking = "", false
		groups[to] = append(groups[to], o)
	}
	return groups, failed
}

func (r *Runner) routeOf(
	ctx context.Context, o outcome, byAddress, masters map[string]*redis.Client,
) (route, error) {
	c := o.call
	if o.redirect != "" {
		client := byAddress[o.redirect]
		switch {
		case client != nil:
			return route{client, o.asking}, nil
		case o.asking:
			return route{}, c.failure(ErrRedirected, fmt.Errorf("ASK names %s, which is not in the cluster", o.redirect))
		}
	}
	tag := c.scope.Tag()
	if client := masters[tag]; client != nil {
		return route{client: client}, nil
	}
	client, err := r.cluster.MasterForKey(ctx, c.keys[0])
	if err != nil {
		return route{}, c.failure(ErrUnreachable, err)
	}
	masters[tag] = client
	return route{client: client}, nil
}

// reload reads the cluster's topology anew and returns its masters by address.
// When it cannot, the old picture serves, and a call that is redirected again
// and again ends as ErrRedirected.
func (r *Runner) reload(ctx context.Context) map[string]*redis.Client {
	var mu sync.Mutex
	byAddress := map[string]*redis.Client{}
	// ForEachMaster is the one call of the client that reloads at once.
	_ = r.cluster.ForEachMaster(ctx, func(_ context.Context, client *redis.Client) error {
		mu.Lock()
		defer mu.Unlock()
		byAddress[client.Options().Addr] = client
		byAddress[client.NodeAddress()] = client
		return nil
	})
	return byAddress
}

// node is what the runner remembers of one server.
type node struct {
	client *redis.Client
	slots  chan struct{}
	loaded *loadedScripts
}

// loadedScripts are the scripts that a server is believed to know.
type loadedScripts struct {
	mu  sync.Mutex
	sha map[string]bool
}

func (r *Runner) node(client *redis.Client) *node {
	address := client.Options().Addr
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[address]
	if n == nil {
		n = &node{
			client: client,
			slots:  make(chan struct{}, r.inFlight),
			loaded: &loadedScripts{sha: map[string]bool{}},
		}
		r.nodes[address] = n
	}
	if n.client != client { // the cluster client dropped and re-made the node
		n = &node{client: client, slots: n.slots, loaded: n.loaded}
		r.nodes[address] = n
	}
	return n
}

func (l *loadedScripts) missing(calls []outcome) []*script {
	l.mu.Lock()
	defer l.mu.Unlock()
	var missing []*script
	for _, o := range calls {
		if s := o.call.script; !l.sha[s.sha] && !slices.Contains(missing, s) {
			missing = append(missing, s)
		}
	}
	return missing
}

func (l *loadedScripts) add(s *script) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sha[s.sha] = true
}

// forget is called on NOSCRIPT: after a restart, a failover or SCRIPT FLUSH
// none of the scripts is there any more.
func (l *loadedScripts) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.sha)
}

// run sends one pipeline, and again those calls alone that the node had no
// script for. What it returns is settled, or redirected to another node.
func (n *node) run(ctx context.Context, to route, calls []outcome) (settled, redirected []outcome) {
	var loadErr error
	for load := 1; ; load++ {
		var unloaded []outcome
		commands, err := n.send(ctx, to, calls, &loadErr)
		for i, o := range calls {
			o.reply, o.err = commands[i].outcome(o.call, err)
			switch {
			case errors.Is(o.err, ErrNoScript) && load < maxLoads:
				unloaded = append(unloaded, o)
			case o.redirectTo() && o.hops <= maxRedirects:
				redirected = append(redirected, o)
			default:
				if loadErr != nil && errors.Is(o.err, ErrNoScript) {
					o.err = o.call.failure(ErrNoScript, loadErr)
				}
				settled = append(settled, o)
			}
		}
		if len(unloaded) == 0 {
			return settled, redirected
		}
		n.loaded.forget()
		calls = unloaded
	}
}

// redirectTo reads MOVED or ASK from the outcome's error.
func (o *outcome) redirectTo() bool {
	if !errors.Is(o.err, ErrRedirected) {
		return false
	}
	if address, ok := redis.IsMovedError(o.err); ok {
		o.redirect, o.asking = address, false
	} else if address, ok := redis.IsAskError(o.err); ok {
		o.redirect, o.asking = address, true
	}
	o.hops++
	return o.redirect != ""
}

// send writes one pipeline: the scripts that the node does not know yet, then
// the calls. The error is the pipeline's own, for calls that have none.
func (n *node) send(ctx context.Context, to route, calls []outcome, loadErr *error) ([]*command, error) {
	pipe := n.client.Pipeline()
	missing := n.loaded.missing(calls)
	loads := make([]*redis.StringCmd, len(missing))
	for i, s := range missing {
		loads[i] = redis.NewStringCmd(ctx, "script", "load", s.source)
		_ = pipe.Process(ctx, loads[i]) // queued: the error comes with Exec
	}
	commands := make([]*command, len(calls))
	for i, o := range calls {
		if to.asking {
			_ = pipe.Process(ctx, redis.NewStatusCmd(ctx, "asking"))
		}
		commands[i] = &command{Cmd: redis.NewCmd(ctx, o.call.args...)}
		_ = pipe.Process(ctx, commands[i])
	}
	_, err := pipe.Exec(ctx)
	for i, s := range missing {
		if loadFailed := loads[i].Err(); loadFailed != nil {
			*loadErr = loadFailed
		} else if loads[i].Val() == s.sha {
			n.loaded.add(s)
		}
	}
	return commands, err
}

// outcome types what a command came back with. A complete reply counts whatever
// the error: when the connection is lost half way through a pipeline, the
// library stamps the loss on the calls that were answered before it, too. A
// reply that was lost half way through is a nil slice. And a pipeline that
// failed before its first command (a refused login) leaves no error on the
// commands at all.
func (c *command) outcome(of *call, pipeline error) (any, error) {
	if reply, ok := c.Val().([]any); ok && reply != nil {
		return reply, nil
	}
	err := c.Err()
	if err == nil && (c.Val() != nil || pipeline == nil) {
		return nil, of.failure(ErrBadReply, fmt.Errorf("want an array, got %T", c.Val()))
	}
	if err == nil {
		err = pipeline
	}
	k := kindOf(err, c.written.Load())
	failure := of.failure(k, err)
	if k == ErrWrongData {
		failure.Key = wrongKey(err, failure.Key)
	}
	return nil, failure
}
