package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"
)

const (
	sentinelName      = "sentinel"
	sentinelRedisName = "sentinel-redis"
	sentinelQuorum    = 2
	sentinelCount     = 3
)

// SentinelMaster is the name under which the sentinels know their master.
const SentinelMaster = "seckill"

// SentinelGroup is a master, its replica and the sentinels that watch them.
type SentinelGroup struct {
	Servers   []*Service // the first one started as the master
	Sentinels []*Service
}

// SentinelAddrs are the addresses of the sentinels.
func (g SentinelGroup) SentinelAddrs() []string { return RedisCluster(g.Sentinels).Addrs() }

// Master is the server that the sentinels say is the master now.
func (g SentinelGroup) Master(ctx context.Context) (*Service, error) {
	var errs []error
	for _, sentinel := range g.Sentinels {
		fields, err := askSentinel(ctx, sentinel.Addr())
		if err != nil {
			errs = append(errs, err)
			continue
		}
		for _, server := range g.Servers {
			if strconv.Itoa(server.Port()) == fields["port"] {
				return server, nil
			}
		}
	}
	return nil, fmt.Errorf("ask the sentinels for their master: %w", errors.Join(errs...))
}

// WaitReady returns when every living sentinel sees the others, a healthy
// master and its replica, so that it can take part in a failover.
func (g SentinelGroup) WaitReady(ctx context.Context) error {
	err := poll(ctx, func(ctx context.Context) error {
		for _, sentinel := range g.Sentinels {
			if !sentinel.Alive() {
				continue
			}
			fields, err := askSentinel(ctx, sentinel.Addr())
			if err != nil {
				return err
			}
			others, replicas, flags := fields["num-other-sentinels"], fields["num-slaves"], fields["flags"]
			if others != strconv.Itoa(len(g.Sentinels)-1) || replicas != strconv.Itoa(len(g.Servers)-1) || flags != "master" {
				return fmt.Errorf("%s sees %s other sentinels, %s replicas and a master that is %q", sentinel.Name(), others, replicas, flags)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("wait for the sentinels: %w", err)
	}
	return nil
}

func askSentinel(ctx context.Context, addr string) (map[string]string, error) {
	if err := pingTCP(ctx, addr); err != nil {
		return nil, err
	}
	client := redis.NewSentinelClient(redisOptions(addr))
	defer func() { _ = client.Close() }()
	fields, err := client.Master(ctx, SentinelMaster).Result()
	if err != nil {
		return nil, fmt.Errorf("ask the sentinel on %s: %w", addr, err)
	}
	return fields, nil
}

// bringUpSentinel starts the pair and then its sentinels.
func (s *Stack) bringUpSentinel(ctx context.Context) error {
	master, err := s.service(sentinelRedisName+"-0", 1, 0, func(rec *record) error {
		s.defineRedis(rec, kindRedis, s.install.redis, "--repl-diskless-sync-delay", "0")
		return nil
	})
	if err != nil {
		return err
	}
	replica, err := s.service(sentinelRedisName+"-1", 1, 0, func(rec *record) error {
		s.defineRedis(rec, kindRedis, s.install.redis, "--repl-diskless-sync-delay", "0", "--replicaof", "127.0.0.1", strconv.Itoa(master.Port()))
		return nil
	})
	if err != nil {
		return err
	}
	for _, svc := range []*Service{master, replica} {
		if err := s.run(ctx, svc); err != nil {
			return err
		}
	}
	g, gctx := errgroup.WithContext(ctx)
	for i := range sentinelCount {
		svc, err := s.service(fmt.Sprintf("%s-%d", sentinelName, i), 1, 0, func(rec *record) error {
			return s.defineSentinel(rec, master.Port())
		})
		if err != nil {
			return errors.Join(err, g.Wait())
		}
		g.Go(func() error { return s.run(gctx, svc) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	return s.Sentinel().WaitReady(ctx)
}

// defineSentinel writes the configuration, which the sentinel then keeps up to
// date itself: after a restart it knows the master of the last failover.
func (s *Stack) defineSentinel(rec *record, masterPort int) error {
	rec.Kind, rec.Version, rec.Launch.Path = kindRedis, s.install.redis.version, s.install.redis.path
	conf := filepath.Join(rec.Dir, "sentinel.conf")
	rec.Launch.Args = []string{conf, "--sentinel"}
	lines := []string{
		"port " + strconv.Itoa(rec.Port), "bind 127.0.0.1", "dir " + rec.Dir,
		fmt.Sprintf("sentinel monitor %s 127.0.0.1 %d %d", SentinelMaster, masterPort, sentinelQuorum),
		"sentinel down-after-milliseconds " + SentinelMaster + " 1000",
		"sentinel failover-timeout " + SentinelMaster + " 5000",
	}
	if err := os.WriteFile(conf, []byte(strings.Join(lines, "\n")+"\n"), 0o644); err != nil {
		return fmt.Errorf("write the configuration of %s: %w", rec.Name, err)
	}
	return nil
}

// Sentinel is the group of servers under Sentinel; empty if the stack has none.
func (s *Stack) Sentinel() SentinelGroup {
	return SentinelGroup{Servers: s.named(sentinelRedisName + "-"), Sentinels: s.named(sentinelName + "-")}
}
