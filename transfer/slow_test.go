//go:build slow

package transfer_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/transfer"
)

// Many more histories than the fast part has time for, and longer ones.
func TestSlowRandomHistories(t *testing.T) { random(t, 800, 120) }

// broken is a version of two buckets on different masters of a six-node cluster
// that the test may break.
type broken struct {
	*world
	nodes   devstack.RedisCluster
	cluster *redis.ClusterClient
}

func newBroken(t *testing.T, units ...int64) *broken {
	t.Helper()
	stack := stacktest.Own(t, devstack.Options{Cluster: true, RedisArgs: []string{"--cluster-node-timeout", "2000"}})
	nodes := stack.Cluster()
	store, client := openStore(t, nodes.Addrs()...)
	cluster, ok := client.(*redis.ClusterClient)
	if !ok {
		t.Fatalf("%T is no cluster client", client)
	}
	for { // versions are drawn until the two buckets are apart
		b := &broken{world: newWorld(t, store, client, units...), nodes: nodes, cluster: cluster}
		if b.owner(0) != b.owner(1) {
			return b
		}
	}
}

// owner is the master that serves a bucket.
func (b *broken) owner(bucket int64) *devstack.Service {
	b.Helper()
	master, err := b.cluster.MasterForKey(b.Context(), b.key.Scope(bucket).StockKey())
	b.must(err)
	masters, err := b.nodes.Masters(b.Context())
	b.must(err)
	for _, svc := range masters {
		if svc.Addr() == master.Options().Addr {
			return svc
		}
	}
	b.Fatalf("nobody owns bucket %d", bucket)
	return nil
}

// eventually tries until it is so. The time is generous: machines are busy.
func (b *broken) eventually(what string, try func() bool) {
	b.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !try(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("%s: not within two minutes", what)
		}
	}
}

// settles drives what there is until every pair is equal.
func (b *broken) settles(what string) {
	b.Helper()
	b.eventually(what, func() bool {
		_, err := b.worker().Pass(b.Context())
		return err == nil && len(b.books().Unequal()) == 0
	})
	b.atRest(what)
	if len(b.tasks) > 0 {
		b.Errorf("%s: tasks that nobody's hand is to blame for: %+v", what, b.tasks)
	}
}

// A master is killed while units are on their way out of one of its buckets, and
// one while they come in. The replica may lack what the master acknowledged.
func TestSlowMasterKilledDuringATransfer(t *testing.T) {
	b := newBroken(t, 300, 100)
	for _, bucket := range []int64{0, 1} {
		stop, stopped := make(chan struct{}), make(chan int)
		go func() { // transfers both ways, all the time
			n := 0
			for ; ; n++ {
				select {
				case <-stop:
					stopped <- n
					return
				default:
				}
				if n < 400 {
					row := transfer.Transfer{
						ID: fmt.Sprintf("k%d-%d", bucket, n), Key: b.key, Donor: int64(n % 2), Receiver: int64((n + 1) % 2), Amount: 1 + int64(n%4),
						State: transfer.Planned, CreatedAt: time.Now(),
					}
					_ = b.CreateTransfers(b.Context(), []transfer.Transfer{row}) // in memory
				}
				_, _ = b.worker().Pass(b.Context()) // fails while the node is down
			}
		}()
		b.eventually("transfers run", func() bool {
			b.mu.Lock()
			defer b.mu.Unlock()
			return len(b.version.Transfers) > int(20+40*bucket)
		})
		victim := b.owner(bucket)
		b.must(victim.Kill())
		b.eventually("a replica has taken over", func() bool {
			readings := b.store.ReadTransfers(b.Context(), []transfer.Query{{Scope: b.key.Scope(bucket)}})
			return readings[0].Err == nil
		})
		close(stop)
		t.Logf("bucket %d: %d passes, its master was killed", bucket, <-stopped)
		b.settles("after the failover")
		b.must(victim.Start(b.Context()))
	}
}

// A slot moves to another node in the middle of a transfer: nothing is moved
// while its keys are on both nodes (TRYAGAIN, ASK), and all of it afterwards.
func TestSlowSlotMigrationDuringATransfer(t *testing.T) {
	for _, bucket := range []int64{0, 1} {
		t.Run(fmt.Sprint("bucket ", bucket), func(t *testing.T) {
			b := newBroken(t, 30, 1)
			b.plan(0, 1, 3)
			b.pass() // both buckets have a marker now
			row := b.plan(0, 1, 5)
			if bucket == 1 { // on its way already
				b.dies(3, true)
			}
			finish := b.migrate(bucket)
			for range 3 {
				_, err := b.worker().Pass(t.Context())
				if err == nil {
					t.Log("a pass went through while the slot was on both nodes")
				}
			}
			finish()
			b.settles("after the migration")
			b.want("after the migration", "22/0", "9/0")
			if b.state(row.ID) != transfer.Done {
				t.Errorf("the row is %s", b.state(row.ID))
			}
		})
	}
}

// migrate begins to move a bucket's slot to the other bucket's node, with some of
// its keys moved already; the function returned moves the rest.
func (b *broken) migrate(bucket int64) (finish func()) {
	b.Helper()
	node := func(svc *devstack.Service) *redis.Client {
		c := redis.NewClient(&redis.Options{Addr: svc.Addr(), DisableIdentity: true})
		b.Cleanup(func() { _ = c.Close() })
		return c
	}
	id := func(c *redis.Client) string {
		text, err := c.Do(b.Context(), "cluster", "myid").Text()
		b.must(err)
		return text
	}
	target := b.owner(1 - bucket)
	from, to := node(b.owner(bucket)), node(target)
	slot, err := from.ClusterKeySlot(b.Context(), b.key.Scope(bucket).StockKey()).Result()
	b.must(err)
	b.must(to.Do(b.Context(), "cluster", "setslot", slot, "importing", id(from)).Err())
	b.must(from.Do(b.Context(), "cluster", "setslot", slot, "migrating", id(to)).Err())
	move := func(keys ...string) {
		args := []any{"migrate", "127.0.0.1", target.Port(), "", 0, 5000, "keys"}
		for _, key := range keys {
			args = append(args, key)
		}
		b.must(from.Do(b.Context(), args...).Err())
	}
	move(b.key.Scope(bucket).StockKey())
	if _, err := from.HGet(b.Context(), b.key.Scope(bucket).StockKey(), "initial").Result(); err == nil || errors.Is(err, redis.Nil) {
		b.Fatalf("the stock is still where it was: %v", err)
	}
	return func() {
		keys, err := from.ClusterGetKeysInSlot(b.Context(), int(slot), 1000).Result()
		b.must(err)
		move(keys...)
		masters, err := b.nodes.Masters(b.Context())
		b.must(err)
		b.must(to.Do(b.Context(), "cluster", "setslot", slot, "node", id(to)).Err())
		for _, svc := range masters {
			b.must(node(svc).Do(b.Context(), "cluster", "setslot", slot, "node", id(to)).Err())
		}
	}
}
