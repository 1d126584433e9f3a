package lua_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// breakable is a cluster that a test may break.
type breakable struct {
	*world
	nodes devstack.RedisCluster
}

// Two clusters that may be broken.
func TestClustersInTrouble(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{
		Cluster: true, ClusterFloor: true, RedisArgs: []string{"--cluster-node-timeout", "2000"},
	})
	for name, nodes := range map[string]devstack.RedisCluster{"8": stack.Cluster(), "7.0": stack.ClusterFloor()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := newClient(t, true, nodes.Addrs()...)
			for _, test := range []struct {
				name string
				run  func(*breakable)
			}{
				{"slot migration", (*breakable).slotMigration},
				{"slot not served", (*breakable).slotNotServed},
				{"stalled and dead nodes", (*breakable).stalledAndDeadNodes}, // the last: it kills a node
			} {
				t.Run(test.name, func(t *testing.T) { test.run(&breakable{newWorld(t, client), nodes}) })
			}
		})
	}
}

// node is a plain client of one node.
func (c *breakable) node(svc *devstack.Service) *redis.Client {
	c.Helper()
	client, ok := newClient(c.T, false, svc.Addr()).(*redis.Client)
	if !ok {
		c.Fatal("not a client of one node")
	}
	return client
}

// owner is the master that serves the scope, and another one.
func (c *breakable) owner(s reservation.Scope) (owner, other *devstack.Service) {
	c.Helper()
	masters, err := c.nodes.Masters(c.ctx())
	c.must(err)
	master, err := c.client.(*redis.ClusterClient).MasterForKey(c.ctx(), s.StockKey())
	c.must(err)
	for _, svc := range masters {
		if svc.Addr() == master.Options().Addr {
			owner = svc
		} else {
			other = svc
		}
	}
	if owner == nil || other == nil {
		c.Fatalf("no owner of %s among %d masters", s, len(masters))
	}
	return owner, other
}

// migration is a slot on its way from one node to another.
type migration struct {
	c        *breakable
	slot     int64
	from, to *redis.Client
	toID     string
	fromID   string
	toPort   int
}

func (c *breakable) migrate(s reservation.Scope) *migration {
	c.Helper()
	owner, other := c.owner(s)
	m := &migration{c: c, from: c.node(owner), to: c.node(other), toPort: other.Port()}
	var err error
	m.slot, err = m.from.ClusterKeySlot(c.ctx(), s.StockKey()).Result()
	c.must(err)
	m.fromID, m.toID = c.id(m.from), c.id(m.to)
	c.must(m.to.Do(c.ctx(), "cluster", "setslot", m.slot, "importing", m.fromID).Err())
	c.must(m.from.Do(c.ctx(), "cluster", "setslot", m.slot, "migrating", m.toID).Err())
	return m
}

func (c *breakable) id(node *redis.Client) string {
	c.Helper()
	id, err := node.Do(c.ctx(), "cluster", "myid").Text()
	c.must(err)
	return id
}

// move moves keys; all of the slot's if none are named.
func (m *migration) move(keys ...string) {
	m.c.Helper()
	if len(keys) == 0 {
		var err error
		keys, err = m.from.ClusterGetKeysInSlot(m.c.ctx(), int(m.slot), 10_000).Result()
		m.c.must(err)
	}
	args := []any{"migrate", "127.0.0.1", m.toPort, "", 0, 5000, "keys"}
	for _, key := range keys {
		args = append(args, key)
	}
	m.c.must(m.from.Do(m.c.ctx(), args...).Err())
}

// finish gives the slot to its new owner, everywhere.
func (m *migration) finish() {
	m.c.Helper()
	masters, err := m.c.nodes.Masters(m.c.ctx())
	m.c.must(err)
	m.c.must(m.to.Do(m.c.ctx(), "cluster", "setslot", m.slot, "node", m.toID).Err())
	for _, svc := range masters {
		m.c.must(m.c.node(svc).Do(m.c.ctx(), "cluster", "setslot", m.slot, "node", m.toID).Err())
	}
}

// sends is a page of record_send calls, one for each of n reservations.
func (c *breakable) sends(n int) []*lua.Result[lua.RecordSendReply] {
	c.Helper()
	b := c.runner.Batch()
	results := make([]*lua.Result[lua.RecordSendReply], n)
	for i := range results {
		results[i] = b.RecordSend(c.scope, lua.RecordSendArgs{
			ReservationID: fmt.Sprintf("r%d", i), Expected: reservation.StatusReserved, Kind: lua.SendFirst,
		})
	}
	c.must(b.Run(c.ctx()))
	return results
}

func (c *breakable) expectSends(what string, n int, times int64) {
	c.Helper()
	for i, result := range c.sends(n) {
		if r, err := result.Get(); err != nil || r.Code != lua.RecordSendRecorded || r.SendCount != times {
			c.Fatalf("%s: item %d: %+v, %v; want send %d", what, i, r, err, times)
		}
	}
}

// A slot moves while its scripts run: each call is followed to its node, and
// executed once.
func (c *breakable) slotMigration() {
	const n = 100
	c.sale(1000, 0)
	b := c.runner.Batch()
	for i := range n {
		b.Reserve(c.scope, c.numbered(i))
	}
	c.must(b.Run(c.ctx()))
	c.expectSends("before", n, 1)

	m := c.migrate(c.scope)
	var moved []string
	for i := range n / 2 {
		moved = append(moved, c.scope.ReservationKey(fmt.Sprintf("r%d", i)))
	}
	m.move(moved...)
	c.must(m.to.ScriptFlush(c.ctx()).Err()) // ASK leads to a node that does not know the script
	c.expectSends("half of the keys moved: ASK", n, 2)

	// keys on both sides: the node cannot run the script, and says so
	_, err := one(c.world, func(b *lua.Batch) *lua.Result[lua.TransitionReply] {
		return b.Transition(c.scope, lua.TransitionArgs{ReservationID: "r0", Target: reservation.StatusEnqueued})
	})
	if !errors.Is(err, lua.ErrTryAgain) || lua.Classify(err) != lua.ClassNotExecuted {
		c.Errorf("keys on both sides: %v", err)
	}

	m.move()
	c.expectSends("all keys moved, the slot not yet", n, 3)
	m.finish()
	c.expectSends("the slot moved: MOVED", n, 4)
	got := reply(c.world, func(b *lua.Batch) *lua.Result[lua.SnapshotReply] { return b.Snapshot(c.scope) })
	if got.Available != 900 || got.Reserved != 100 || got.Pending != n {
		c.Errorf("after the move: %+v", got)
	}
}

// Nobody serves the slot: typed, and other slots are not touched by it.
func (c *breakable) slotNotServed() {
	c.sale(10, 0)
	other := c.fresh()
	for o, _ := c.owner(other.scope); ; o, _ = c.owner(other.scope) {
		if mine, _ := c.owner(c.scope); mine == o {
			break
		}
		other = c.fresh()
	}
	other.sale(10, 0)
	owner, _ := c.owner(c.scope)
	node := c.node(owner)
	slot, err := node.ClusterKeySlot(c.ctx(), c.scope.StockKey()).Result()
	c.must(err)
	c.must(node.ClusterDelSlots(c.ctx(), int(slot)).Err())
	b := c.runner.Batch()
	down, up := b.Reserve(c.scope, c.reserveArgs()), b.Reserve(other.scope, other.reserveArgs())
	c.must(b.Run(c.ctx()))
	if _, err := down.Get(); !errors.Is(err, lua.ErrClusterDown) || lua.Classify(err) != lua.ClassNotExecuted {
		c.Errorf("not served: %v", err)
	}
	if r, err := up.Get(); err != nil || r.Code != lua.ReserveAccepted {
		c.Errorf("another slot of the same node: %+v, %v", r, err)
	}
	c.must(node.ClusterAddSlots(c.ctx(), int(slot)).Err())
}

// A node that hangs costs its own calls alone, until the context ends; a node
// that is dead is found again once its replica has taken over.
func (c *breakable) stalledAndDeadNodes() {
	worlds := manyScopes(c.world, 30)
	stalled, _ := c.owner(worlds[0].scope)
	on := map[int]bool{}
	for i, w := range worlds {
		owner, _ := c.owner(w.scope)
		on[i] = owner == stalled
	}
	page := func(ctx context.Context) ([]*lua.Result[lua.ReserveReply], error) {
		b := c.runner.Batch()
		results := make([]*lua.Result[lua.ReserveReply], len(worlds))
		for i, w := range worlds {
			results[i] = b.Reserve(w.scope, w.reserveArgs())
		}
		return results, b.Run(ctx)
	}
	warm := c.runner.Batch()
	for _, w := range worlds {
		warm.Snapshot(w.scope)
	}
	c.must(warm.Run(c.ctx()))

	c.must(stalled.Pause())
	ctx, cancel := context.WithTimeout(c.ctx(), 500*time.Millisecond)
	defer cancel()
	begin := time.Now()
	results, err := page(ctx)
	took := time.Since(begin) // the socket's deadline may come before the context's: then there is no error
	if (err != nil && !errors.Is(err, context.DeadlineExceeded)) || took > 5*time.Second {
		c.Errorf("a stalled node: %v after %v", err, took)
	}
	for i, result := range results {
		r, err := result.Get()
		if on[i] {
			if !errors.Is(err, lua.ErrOutcomeUnknown) {
				c.Errorf("scope %d, stalled: %+v, %v", i, r, err)
			}
		} else if err != nil || r.Code != lua.ReserveAccepted || r.Replay {
			c.Errorf("scope %d: %+v, %v", i, r, err)
		}
	}
	c.must(stalled.Resume())
	results, err = page(c.ctx())
	c.must(err)
	for i, result := range results {
		if r, err := result.Get(); err != nil || r.Code != lua.ReserveAccepted || (!on[i] && !r.Replay) {
			c.Errorf("scope %d, asked again: %+v, %v", i, r, err)
		}
		same(worlds[i], "stock", worlds[i].dump()["stock"].(dumped).Content, any(stockOf(999, 1)))
	}

	c.must(stalled.Kill())
	begin = time.Now()
	waitFor(c.world, func() bool {
		time.Sleep(100 * time.Millisecond)
		results, err = page(c.ctx())
		c.must(err)
		for i, result := range results {
			_, err := result.Get()
			switch {
			case err == nil:
			case !on[i]:
				c.Errorf("scope %d, of a living node: %v", i, err)
			default:
				if class := lua.Classify(err); class != lua.ClassNotExecuted && class != lua.ClassUnknown {
					c.Errorf("scope %d, of the dead node: %v", i, err)
				}
				return false
			}
		}
		return true
	})
	c.Logf("found the replica %v after the kill", time.Since(begin).Round(100*time.Millisecond))
}
