package devstack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"golang.org/x/sync/errgroup"
)

// Names of the Redis services.
const (
	redisName        = "redis"
	redisFloorName   = "redis-floor"
	clusterName      = "cluster"
	clusterFloorName = "cluster-floor"
)

const (
	clusterNodes = 6
	// clusterTimeout is cluster-node-timeout. A shorter one brings failovers that
	// nobody asked for when two cores run a whole test suite; a test of failovers
	// sets its own by Options.RedisArgs.
	clusterTimeout = "5000"
)

// RedisCluster has the six nodes of a Redis Cluster.
type RedisCluster []*Service

// Addrs are the addresses of all nodes.
func (c RedisCluster) Addrs() []string {
	out := make([]string, 0, len(c))
	for _, node := range c {
		out = append(out, node.Addr())
	}
	return out
}

// Masters are the nodes that are masters now, as the first node that answers
// sees them.
func (c RedisCluster) Masters(ctx context.Context) ([]*Service, error) {
	var errs []error
	for _, node := range c {
		if !node.Alive() {
			continue
		}
		nodes, err := clusterView(ctx, node.Addr())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		var out []*Service
		for _, svc := range c {
			if nodes[svc.Addr()].serves() {
				out = append(out, svc)
			}
		}
		return out, nil
	}
	return nil, fmt.Errorf("ask for the masters of the cluster: %w", errors.Join(errs...))
}

// WaitReady returns when every living node sees all slots served and every
// replica follows its master.
func (c RedisCluster) WaitReady(ctx context.Context) error {
	err := poll(ctx, func(ctx context.Context) error {
		for _, node := range c {
			if !node.Alive() {
				continue
			}
			if err := clusterNodeReady(ctx, node.Addr(), len(c)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("wait for the Redis Cluster: %w", err)
	}
	return nil
}

func (s *Stack) bringUpRedis(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, server := range []struct {
		wanted, cluster bool
		name            string
		program         program
	}{
		{s.parts.Redis, false, redisName, s.install.redis},
		{s.parts.RedisFloor, false, redisFloorName, s.install.redisFloor},
		{s.parts.Cluster, true, clusterName, s.install.redis},
		{s.parts.ClusterFloor, true, clusterFloorName, s.install.redisFloor},
	} {
		switch {
		case !server.wanted:
		case server.cluster:
			g.Go(func() error { return s.bringUpCluster(ctx, server.name, server.program) })
		default:
			g.Go(func() error { return s.bringUpStandalone(ctx, server.name, server.program) })
		}
	}
	if s.parts.Sentinel {
		g.Go(func() error { return s.bringUpSentinel(ctx) })
	}
	return g.Wait()
}

func (s *Stack) bringUpStandalone(ctx context.Context, name string, p program) error {
	svc, err := s.service(name, 1, 0, func(rec *record) error {
		s.defineRedis(rec, kindRedis, p)
		return nil
	})
	if err != nil {
		return err
	}
	return s.run(ctx, svc)
}

func (s *Stack) defineRedis(rec *record, k kind, p program, extra ...string) {
	rec.Kind, rec.Version, rec.Launch.Path = k, p.version, p.path
	rec.Launch.Args = []string{
		"--port", strconv.Itoa(rec.Port), "--bind", "127.0.0.1", "--dir", rec.Dir,
		"--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction",
		"--enable-debug-command", "local",
	}
	rec.Launch.Args = append(rec.Launch.Args, extra...)
	rec.Launch.Args = append(rec.Launch.Args, s.opts.RedisArgs...)
}

// bringUpCluster starts the nodes and joins them to a cluster once.
func (s *Stack) bringUpCluster(ctx context.Context, name string, p program) error {
	nodes := make(RedisCluster, clusterNodes)
	g, gctx := errgroup.WithContext(ctx)
	for i := range nodes {
		svc, err := s.service(fmt.Sprintf("%s-%d", name, i), 2, 0, func(rec *record) error {
			// The bus would take port + 10000, which is another stack's block.
			s.defineRedis(rec, kindNode, p, "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
				"--cluster-port", strconv.Itoa(rec.Port+1), "--cluster-node-timeout", clusterTimeout,
				"--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0",
				// CLUSTER SLOTS omits a replica until the first ping moved its offset.
				"--repl-ping-replica-period", "1")
			return nil
		})
		if err != nil {
			return errors.Join(err, g.Wait())
		}
		nodes[i] = svc
		g.Go(func() error { return s.run(gctx, svc) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	if err := s.form(ctx, nodes); err != nil {
		return err
	}
	return nodes.WaitReady(ctx)
}

// form makes three masters and three replicas of six empty nodes. A file says
// that it was done: nodes that belong to a cluster are never reset.
func (s *Stack) form(ctx context.Context, nodes RedisCluster) error {
	mark := filepath.Join(nodes[0].Dir(), "formed")
	if _, err := os.Stat(mark); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, node := range nodes { // an attempt that was interrupted leaves slots behind
		client := redisClient(node.Addr())
		err := client.ClusterResetHard(ctx).Err()
		_ = client.Close()
		if err != nil {
			return fmt.Errorf("reset %s before it joins the cluster: %w", node.Name(), err)
		}
	}
	args := append([]string{"--cluster", "create"}, nodes.Addrs()...)
	out, err := exec.CommandContext(ctx, s.install.redisCLI, append(args, "--cluster-replicas", "1", "--cluster-yes")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("create the Redis Cluster: %w\n%s", err, out)
	}
	return writeFile(mark, nil)
}

// clusterMember is one line of CLUSTER NODES.
type clusterMember struct {
	flags string
	slots int // slot ranges
	link  string
}

func (m clusterMember) master() bool { return strings.Contains(m.flags, "master") }

// serves reports a master that has slots and is not known to have failed. A
// suspicion ("fail?") is no failure.
func (m clusterMember) serves() bool {
	failed := strings.Contains(m.flags, "fail") && !strings.Contains(m.flags, "fail?")
	return m.master() && m.slots > 0 && !failed
}

// clusterView is the cluster as the node at addr sees it, by address.
func clusterView(ctx context.Context, addr string) (map[string]clusterMember, error) {
	client := redisClient(addr)
	defer func() { _ = client.Close() }()
	text, err := client.ClusterNodes(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("ask %s for its cluster: %w", addr, err)
	}
	out := map[string]clusterMember{}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		const fixed = 8 // id address flags master ping pong epoch link, then slots
		if len(f) < fixed {
			continue
		}
		host, _, _ := strings.Cut(f[1], "@")
		out[host] = clusterMember{flags: f[2], slots: len(f) - fixed, link: f[7]}
	}
	return out, nil
}

func clusterNodeReady(ctx context.Context, addr string, size int) error {
	client := redisClient(addr)
	defer func() { _ = client.Close() }()
	info, err := client.ClusterInfo(ctx).Result()
	if err != nil {
		return fmt.Errorf("%s: cluster info: %w", addr, err)
	}
	for _, want := range []string{"cluster_state:ok", "cluster_slots_ok:16384", fmt.Sprintf("cluster_known_nodes:%d", size)} {
		if !strings.Contains(info, want+"\r\n") {
			return fmt.Errorf("%s does not report %s", addr, want)
		}
	}
	nodes, err := clusterView(ctx, addr)
	if err != nil {
		return err
	}
	masters := 0
	for _, m := range nodes {
		if m.serves() {
			masters++
		}
	}
	if masters != size/2 {
		return fmt.Errorf("%s sees %d masters with slots, not %d", addr, masters, size/2)
	}
	repl, err := client.Info(ctx, "replication").Result()
	if err != nil {
		return fmt.Errorf("%s: replication: %w", addr, err)
	}
	if strings.Contains(repl, "role:slave") && !strings.Contains(repl, "master_link_status:up") {
		return fmt.Errorf("%s does not follow its master yet", addr)
	}
	return nil
}

func pingRedis(ctx context.Context, addr string) error {
	if err := pingTCP(ctx, addr); err != nil {
		return err // the client would log each refused connection
	}
	client := redisClient(addr)
	defer func() { _ = client.Close() }()
	return client.Ping(ctx).Err()
}

// redisClient is a plain client of one node for a few commands.
func redisClient(addr string) *redis.Client { return redis.NewClient(redisOptions(addr)) }

func redisOptions(addr string) *redis.Options {
	return &redis.Options{
		Addr: addr, MaxRetries: -1, DialerRetries: 1, PoolSize: 1, ContextTimeoutEnabled: true,
		DialTimeout: time.Second, ReadTimeout: 10 * time.Second, DisableIdentity: true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	}
}
