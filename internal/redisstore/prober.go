package redisstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/probe"
)

// Prober asks every Redis server by itself, masters and replicas, each in its
// own time: one that is dead or hangs hides no other. Its connections are its
// own, one to a server (spec §6).
type Prober struct {
	config  config.Redis
	options redis.UniversalOptions

	mu      sync.Mutex
	mode    string                   // as found out; "" while it is not known
	clients map[string]*redis.Client // by address
	known   []probe.ClusterNode      // as last listed: a node that has left is no longer asked
}

// Depth says how much a probe asks of each server.
type Depth int

// The depths.
const (
	Vital Depth = iota // what is worth a sample every half minute
	Full               // its settings and its login's rights too
)

// NewProber prepares the connections; the first probe makes them.
func NewProber(c config.Redis) (*Prober, error) {
	options, err := universalOptions(c)
	if err != nil {
		return nil, err
	}
	p := &Prober{config: c, options: *options, clients: map[string]*redis.Client{}}
	if c.Mode != config.RedisAuto {
		p.mode = c.Mode
	}
	return p, nil
}

// Close ends the connections.
func (p *Prober) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	var errs []error
	for _, client := range p.clients {
		errs = append(errs, client.Close())
	}
	clear(p.clients)
	return errors.Join(errs...)
}

// client is the connection to one server.
func (p *Prober) client(addr string) *redis.Client {
	p.mu.Lock()
	defer p.mu.Unlock()
	client := p.clients[addr]
	if client == nil {
		o := p.options
		o.Addrs, o.PoolSize, o.MaxRetries = []string{addr}, 1, -1
		client = redis.NewClient(o.Simple())
		p.clients[addr] = client
	}
	return client
}

// forget ends the connections to servers that are not asked any more.
func (p *Prober) forget(asked []probe.ClusterNode) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for addr, client := range p.clients {
		if !slices.ContainsFunc(asked, func(n probe.ClusterNode) bool { return n.Addr == addr }) && !slices.Contains(p.config.Addrs, addr) {
			_ = client.Close() // nothing is in flight
			delete(p.clients, addr)
		}
	}
}

// limit bounds what is asked of one server.
func (p *Prober) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, p.config.DialTimeout+cmp.Or(p.config.CommandTimeout, defaultTimeout))
}

// Nodes asks every server that there is, in the order of their addresses. The
// error of a server that does not answer stands with it. It takes no longer
// than a few command time-outs.
func (p *Prober) Nodes(ctx context.Context, depth Depth) []probe.RedisNode {
	listed := p.list(ctx)
	p.forget(listed)
	nodes := make([]probe.RedisNode, len(listed))
	var asking sync.WaitGroup
	for i, n := range listed {
		asking.Go(func() {
			if n.Role == probe.RoleSentinel {
				nodes[i] = p.sentinel(ctx, n)
				return
			}
			nodes[i] = p.node(ctx, n, depth)
		})
	}
	asking.Wait()
	slices.SortFunc(nodes, func(a, b probe.RedisNode) int { return cmp.Compare(a.Addr, b.Addr) })
	return nodes
}

// list finds out which servers there are. Where nobody can say, they are those
// of the last time, or of the configuration.
func (p *Prober) list(ctx context.Context) []probe.ClusterNode {
	switch p.findMode(ctx) {
	case config.RedisCluster:
		return p.listCluster(ctx)
	case config.RedisSentinel:
		return p.listSentinel(ctx)
	case config.RedisStandalone:
		return []probe.ClusterNode{{Addr: p.config.Addrs[0], Role: probe.RoleUnknown}}
	default:
		return p.configured(probe.RoleUnknown)
	}
}

func (p *Prober) configured(role string) []probe.ClusterNode {
	nodes := make([]probe.ClusterNode, len(p.config.Addrs))
	for i, addr := range p.config.Addrs {
		nodes[i] = probe.ClusterNode{Addr: addr, Role: role}
	}
	return nodes
}

func (p *Prober) findMode(ctx context.Context) string {
	p.mu.Lock()
	mode := p.mode
	p.mu.Unlock()
	if mode != "" {
		return mode
	}
	options := p.options
	mode, err := detectMode(ctx, p.config, &options)
	if err != nil {
		return ""
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode = mode
	return mode
}

// listCluster asks the nodes in turn for all of them.
func (p *Prober) listCluster(ctx context.Context) []probe.ClusterNode {
	p.mu.Lock()
	known := slices.Clone(p.known)
	p.mu.Unlock()
	entries := slices.Clone(p.config.Addrs)
	for _, n := range known {
		if !slices.Contains(entries, n.Addr) {
			entries = append(entries, n.Addr)
		}
	}
	for _, addr := range entries {
		bound, cancel := p.limit(ctx)
		text, err := p.client(addr).ClusterNodes(bound).Result()
		cancel()
		if err != nil {
			continue
		}
		nodes := probe.ParseClusterNodes(withHost(text, addr))
		p.mu.Lock()
		p.known = nodes
		p.mu.Unlock()
		return nodes
	}
	if len(known) > 0 {
		return known
	}
	return p.configured(probe.RoleUnknown)
}

// withHost puts the address that was asked in place of that of the node's own
// line, which a node that has met no other leaves without a host.
func withHost(text, addr string) string {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return text
	}
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		parts := strings.SplitN(line, " ", 3)
		if len(parts) == 3 && strings.HasPrefix(parts[1], ":") {
			lines[i] = parts[0] + " " + host + parts[1] + " " + parts[2]
		}
	}
	return strings.Join(lines, "\n")
}

// listSentinel is the sentinels, and what the first that answers knows.
func (p *Prober) listSentinel(ctx context.Context) []probe.ClusterNode {
	nodes := p.configured(probe.RoleSentinel)
	for _, addr := range p.config.Addrs {
		servers, err := p.askSentinel(ctx, addr)
		if err == nil {
			p.mu.Lock()
			p.known = servers
			p.mu.Unlock()
			return append(nodes, servers...)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return append(nodes, p.known...)
}

func (p *Prober) sentinelClient(addr string) *redis.SentinelClient {
	s := p.config.Sentinel
	return redis.NewSentinelClient(&redis.Options{
		Addr: addr, Username: s.Username, Password: s.Password, TLSConfig: p.options.TLSConfig, PoolSize: 1, MaxRetries: -1,
		DialTimeout: p.options.DialTimeout, ReadTimeout: p.options.ReadTimeout, WriteTimeout: p.options.WriteTimeout,
		ContextTimeoutEnabled: true, DisableIdentity: true, MaintNotificationsConfig: p.options.MaintNotificationsConfig,
	})
}

func (p *Prober) askSentinel(ctx context.Context, addr string) ([]probe.ClusterNode, error) {
	bound, cancel := p.limit(ctx)
	defer cancel()
	client := p.sentinelClient(addr)
	defer func() { _ = client.Close() }() // nothing is in flight
	master, err := client.GetMasterAddrByName(bound, p.config.Sentinel.Master).Result()
	if err != nil {
		return nil, err
	}
	if len(master) != 2 {
		return nil, fmt.Errorf("sentinel %s knows no master %s", addr, p.config.Sentinel.Master)
	}
	nodes := []probe.ClusterNode{{Addr: net.JoinHostPort(master[0], master[1]), Role: probe.RoleMaster}}
	replicas, err := client.Replicas(bound, p.config.Sentinel.Master).Result()
	for _, r := range replicas {
		nodes = append(nodes, probe.ClusterNode{Addr: net.JoinHostPort(r["ip"], r["port"]), Role: probe.RoleReplica})
	}
	return nodes, err
}

func (p *Prober) sentinel(ctx context.Context, n probe.ClusterNode) probe.RedisNode {
	bound, cancel := p.limit(ctx)
	defer cancel()
	client := p.sentinelClient(n.Addr)
	defer func() { _ = client.Close() }() // nothing is in flight
	_, err := client.GetMasterAddrByName(bound, p.config.Sentinel.Master).Result()
	if errors.Is(err, redis.Nil) {
		err = fmt.Errorf("it knows no master set %q", p.config.Sentinel.Master)
	}
	return probe.RedisNode{Addr: n.Addr, Role: n.Role, Err: err}
}

// slowEntries is how many entries of the slow log are read at a time.
const slowEntries = 16

// node asks one server, in one pipeline.
func (p *Prober) node(ctx context.Context, listed probe.ClusterNode, depth Depth) probe.RedisNode {
	n := probe.RedisNode{Addr: listed.Addr, Role: listed.Role, Alone: listed.Role == probe.RoleUnknown, Refused: map[string]error{}, SlowTotal: -1}
	client := p.client(listed.Addr)
	bound, cancel := p.limit(ctx)
	defer cancel()
	// Asked first, so that the clock's question does not wait for the connection.
	if n.Err = client.Ping(bound).Err(); n.Err != nil {
		return n
	}
	if n.Err = clock(bound, client, &n); n.Err != nil {
		return n
	}
	pipe := client.Pipeline()
	info := pipe.Info(bound, "server", "clients", "memory", "persistence", "stats", "replication", "cpu", "cluster")
	slow := pipe.SlowLogGet(bound, slowEntries)
	latency := pipe.Latency(bound)
	_, _ = pipe.Exec(bound) // each command has its own error
	text, err := info.Result()
	if err != nil {
		n.Err = err
		return n
	}
	if n.RedisInfo, n.Role, n.Replicas, n.Err = probe.ParseRedisInfo(text); n.Err != nil {
		return n
	}
	readSlow(slow, &n)
	readLatency(latency, &n)
	if n.ClusterEnabled {
		text, err := client.ClusterInfo(bound).Result()
		refused(&n, "CLUSTER INFO", err)
		n.Cluster = probe.ParseClusterInfo(text)
	}
	if depth == Full {
		readSettings(bound, client, &n)
	}
	return n
}

// refused notes that a command failed on a server that answers others.
func refused(n *probe.RedisNode, command string, err error) {
	if err != nil {
		n.Refused[command] = err
	}
}

// clock compares the server's clock with ours, around half the round trip.
func clock(ctx context.Context, client *redis.Client, n *probe.RedisNode) error {
	began := time.Now()
	at, err := client.Time(ctx).Result()
	if err != nil {
		return err
	}
	half := time.Since(began) / 2
	n.Clock, n.ClockError = at.Sub(began.Add(half)), half
	return nil
}

// readSlow keeps what the newest entries tell without their arguments. The
// slow log is never reset: its ids go on counting.
func readSlow(cmd *redis.SlowLogCmd, n *probe.RedisNode) {
	entries, err := cmd.Result()
	refused(n, "SLOWLOG GET", err)
	if err != nil {
		return
	}
	n.SlowTotal = 0
	for _, e := range entries {
		n.SlowTotal = max(n.SlowTotal, e.ID+1)
		slow := probe.SlowCommand{ID: e.ID, At: e.Time.UTC(), Took: e.Duration}
		if len(e.Args) > 0 {
			slow.Command = strings.ToUpper(e.Args[0])
		}
		n.Slow = append(n.Slow, slow)
	}
}

func readLatency(cmd *redis.LatencyCmd, n *probe.RedisNode) {
	events, err := cmd.Result()
	refused(n, "LATENCY LATEST", err)
	for _, e := range events {
		n.Latency = append(n.Latency, probe.LatencyEvent{Event: e.Name, At: e.Time.UTC(), Latest: e.Latest, Max: e.Max})
	}
}

// observedSettings are what slow commands and latency events depend on (spec §6).
var observedSettings = []string{"slowlog-log-slower-than", "latency-monitor-threshold", "min-replicas-to-write", "min-replicas-max-lag"}

// readSettings reads how the server is set up, for the check environment and
// for doctor alike.
func readSettings(ctx context.Context, client *redis.Client, n *probe.RedisNode) {
	settings := readNode(ctx, client)
	n.Settings, n.Config = &settings, map[string]string{}
	for _, name := range observedSettings {
		values, err := client.ConfigGet(ctx, name).Result()
		if err != nil {
			refused(n, "CONFIG GET", err)
			return
		}
		if value, there := values[name]; there {
			n.Config[name] = value
		}
	}
}
