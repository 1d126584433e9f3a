package redisstore

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// Durability is how far a node's writes had spread when it was asked. It is a
// best effort: a failover may still elect a replica that lacks them.
type Durability struct {
	Node     string // host:port
	Replicas int64  // that have all writes so far; those of an AOF too, if it was asked for
	Local    bool   // the node's own AOF has them; false if not asked for
	Err      error
}

// AwaitDurability waits until replicas have what was written to the scopes'
// nodes, and with aof until they and the nodes have it on disk, or until the
// time-out. It changes nothing: the expiry that it sets is the one in force.
func (s *Store) AwaitDurability(ctx context.Context, scopes []reservation.Scope, replicas int, aof bool, timeout time.Duration) []Durability {
	var all []Durability
	asked := map[string]bool{}
	for _, scope := range scopes {
		node, err := s.masterOf(ctx, scope)
		if err != nil {
			all = append(all, Durability{Node: scope.Tag(), Err: err})
			continue
		}
		if addr := node.Options().Addr; !asked[addr] {
			asked[addr] = true
			all = append(all, awaitNode(ctx, node, scope, replicas, aof, timeout))
		}
	}
	return all
}

func (s *Store) masterOf(ctx context.Context, scope reservation.Scope) (*redis.Client, error) {
	switch client := s.reading.(type) {
	case *redis.ClusterClient:
		return client.MasterForKey(ctx, scope.MetaKey())
	case *redis.Client:
		return client, nil
	default:
		return nil, fmt.Errorf("no way to reach one node through a %T", client)
	}
}

// waitGrace is the time that a reply may take beyond what it waits for.
const waitGrace = 2 * time.Second

// awaitNode waits on a connection that has written last: WAIT speaks of the
// writes up to its own connection's newest.
func awaitNode(ctx context.Context, node *redis.Client, scope reservation.Scope, replicas int, aof bool, timeout time.Duration) Durability {
	d := Durability{Node: node.Options().Addr}
	ctx, cancel := context.WithTimeout(ctx, timeout+waitGrace)
	defer cancel()
	// A connection of its own, whose reads may take as long as the wait.
	o := *node.Options()
	o.PoolSize, o.ReadTimeout = 1, timeout+waitGrace
	own := redis.NewClient(&o)
	defer func() { _ = own.Close() }() // nothing is in flight
	conn := own.Conn()
	defer func() { _ = conn.Close() }()
	until, err := conn.PExpireTime(ctx, scope.MetaKey()).Result()
	if err == nil && until > 0 {
		err = conn.PExpireAt(ctx, scope.MetaKey(), time.UnixMilli(until.Milliseconds())).Err()
	}
	if err != nil {
		d.Err = fmt.Errorf("write to %s: %w", d.Node, err)
		return d
	}
	if aof {
		var local, others int64
		local, others, d.Err = waitAOF(ctx, conn, replicas, timeout)
		d.Local, d.Replicas = local > 0, others
	} else {
		d.Replicas, d.Err = conn.Wait(ctx, replicas, timeout).Result()
	}
	if d.Err != nil {
		d.Err = fmt.Errorf("wait for the replicas of %s: %w", d.Node, d.Err)
	}
	return d
}

// waitAOF is WAITAOF, which Redis has from 7.2 on.
func waitAOF(ctx context.Context, conn *redis.Conn, replicas int, timeout time.Duration) (local, others int64, err error) {
	cmd := redis.NewIntSliceCmd(ctx, "waitaof", 1, replicas, timeout.Milliseconds())
	if err := conn.Process(ctx, cmd); err != nil {
		return 0, 0, err
	}
	counts := cmd.Val()
	if len(counts) != 2 {
		return 0, 0, fmt.Errorf("WAITAOF replied %v", counts)
	}
	return counts[0], counts[1], nil
}
