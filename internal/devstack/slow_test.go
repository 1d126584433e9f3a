//go:build slow

package devstack_test

import (
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

func TestSlowRocketMQSurvivesRestarts(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Brokers: 2})
	topic, _ := stacktest.Topic(t, stack, 4)
	peer := remoting.NewPeer(stack.NameServer().Addr(), remoting.Options{})
	defer peer.Close()

	for _, svc := range []*devstack.Service{stack.NameServer(), stack.Brokers()[1]} {
		if err := svc.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		// Restart returns when it serves: the route is complete at once.
		route, err := peer.Route(t.Context(), topic)
		if err != nil || len(route.Queues) != 2 {
			t.Errorf("after the restart of %s: route %+v, %v", svc.Name(), route, err)
		}
	}
	if err := stack.Brokers()[0].Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		route, err := peer.Route(t.Context(), topic)
		if err == nil && len(route.Queues) == 1 && route.Queues[0].Broker == stack.Brokers()[1].Name() {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the dead broker stays in the route: %+v, %v", route, err)
		}
	}
}

func TestSlowClusterFailsOver(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{ClusterFloor: true, RedisArgs: []string{"--cluster-node-timeout", "1000"}})
	cluster := stack.ClusterFloor()
	before, err := cluster.Masters(t.Context())
	if err != nil || len(before) != 3 {
		t.Fatalf("masters %v, %v", before, err)
	}
	dead := before[0]
	if err := dead.Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		now, err := cluster.Masters(t.Context())
		if err == nil && len(now) == 3 && !slices.Contains(now, dead) {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("no failover: %v", err)
		}
	}
	if err := dead.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := cluster.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestSlowSentinelPromotesTheReplica(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Sentinel: true})
	group := stack.Sentinel()
	master, err := group.Master(t.Context())
	if err != nil || master != group.Servers[0] {
		t.Fatalf("master %v, %v", master, err)
	}
	client := redis.NewFailoverClient(&redis.FailoverOptions{MasterName: devstack.SentinelMaster, SentinelAddrs: group.SentinelAddrs()})
	defer func() { _ = client.Close() }()
	if err := client.Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := master.Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		now, err := group.Master(t.Context())
		if err == nil && now == group.Servers[1] {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("no promotion: %v", err)
		}
	}
	if err := master.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := group.WaitReady(t.Context()); err != nil {
		t.Error(err)
	}
}
