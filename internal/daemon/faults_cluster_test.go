//go:build slow

package daemon_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/upstream"
)

// The master that holds the scope is killed while the daemon works on it, and
// its replica takes over, perhaps without the newest writes: what went back is
// driven forward again, and nothing is given back twice.
func TestSlowMasterOfTheClusterIsKilled(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Cluster: true, Postgres: true, Brokers: 1})
	s := newSale(t, stack, hurried, func(c *config.Config) {
		c.Redis.Addrs = stack.Cluster().Addrs()
		c.Redis.CommandTimeout, c.Redis.DialTimeout = 500*time.Millisecond, 500*time.Millisecond
		c.Scanner.Batch, c.Fencer.Batch, c.Compensator.Batch = 16, 16, 16 // passes long enough to be hit
	})
	for range 20 {
		for _, k := range everyKind {
			s.stuckOne(k, time.Millisecond)
		}
	}
	cluster, ok := s.redis.(*redis.ClusterClient)
	if !ok {
		t.Fatalf("%T is no cluster", s.redis)
	}
	node, err := cluster.MasterForKey(t.Context(), s.scope.StockKey())
	if err != nil {
		t.Fatal(err)
	}
	// What was reserved is on the replica; only what the daemon does may be lost.
	if n, err := node.Wait(t.Context(), 1, 10*time.Second).Result(); err != nil || n < 1 {
		t.Fatalf("%d replicas have the sale, %v", n, err)
	}
	running := s.serve()
	running.awaitLog(1, logHolding)
	time.Sleep(300 * time.Millisecond)
	for _, svc := range stack.Cluster() {
		if svc.Addr() == node.Options().Addr {
			svc.Kill()
		}
	}
	s.eventually(time.Minute, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.redis.Get(ctx, s.scope.SoldOutKey()).Err(); err != nil && err != redis.Nil { //nolint:errorlint // a reply
			return fmt.Errorf("the replica has not taken over: %w", err)
		}
		return nil
	})
	s.subscribe(upstream.Subscription{}, func(string) upstream.Fault { return upstream.None })
	s.settles(2 * time.Minute)
	running.end()
}
