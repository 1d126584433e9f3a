package redisstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reconcile"
)

// Nodes reads how the servers that take writes are set up, each once. What an
// ACL forbids, or a server that does not answer, is named in Unread.
func (s *Store) Nodes(ctx context.Context) []reconcile.RedisNode {
	bound, cancel := s.bound(ctx)
	defer cancel()
	switch client := s.reading.(type) {
	case *redis.ClusterClient:
		return clusterNodes(bound, client)
	case *redis.Client:
		return []reconcile.RedisNode{readNode(bound, client)}
	default:
		return []reconcile.RedisNode{{Unread: map[string]string{"INFO": fmt.Sprintf("no way to ask a %T", client)}}}
	}
}

func clusterNodes(ctx context.Context, client *redis.ClusterClient) []reconcile.RedisNode {
	var mu sync.Mutex
	var nodes []reconcile.RedisNode
	err := client.ForEachMaster(ctx, func(ctx context.Context, master *redis.Client) error {
		node := readNode(ctx, master)
		mu.Lock()
		defer mu.Unlock()
		nodes = append(nodes, node)
		return nil
	})
	if err != nil {
		nodes = append(nodes, reconcile.RedisNode{Addr: "cluster", Unread: map[string]string{"INFO": err.Error()}})
	}
	slices.SortFunc(nodes, func(a, b reconcile.RedisNode) int { return strings.Compare(a.Addr, b.Addr) })
	return nodes
}

// readNode reads one server.
func readNode(ctx context.Context, client *redis.Client) reconcile.RedisNode {
	n := reconcile.RedisNode{Addr: client.Options().Addr, Unread: map[string]string{}}
	info, err := client.Info(ctx, "replication", "memory", "persistence").Result()
	if err != nil {
		n.Unread["INFO"] = err.Error()
	} else if err := parseInfo(info, &n); err != nil {
		n.Unread["INFO"] = err.Error()
	}
	if n.User, err = client.Do(ctx, "acl", "whoami").Text(); err != nil {
		n.Unread["ACL WHOAMI"] = err.Error()
		return n
	}
	reply, err := client.Do(ctx, "acl", "getuser", n.User).Result()
	switch {
	case redis.HasErrorPrefix(err, "NOPERM"): // so it has not every right
	case err != nil:
		n.Unread["ACL GETUSER"] = err.Error()
	default:
		n.AllRights = allRights(reply)
	}
	return n
}

// parseInfo reads the lines of INFO that are judged.
func parseInfo(info string, n *reconcile.RedisNode) error {
	fields := map[string]string{}
	for line := range strings.Lines(info) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			fields[name] = value
		}
	}
	for _, name := range []string{"role", "connected_slaves", "maxmemory", "maxmemory_policy", "aof_enabled", "aof_last_write_status"} {
		if fields[name] == "" {
			return errors.New("INFO names no " + name)
		}
	}
	n.Role, n.EvictionPolicy = fields["role"], fields["maxmemory_policy"]
	n.AppendOnly, n.LastAOFWriteOK = fields["aof_enabled"] == "1", fields["aof_last_write_status"] == "ok"
	_, n.MinReplicas = fields["min_slaves_good_slaves"] // there only while it is set
	var errs [2]error
	n.Replicas, errs[0] = strconv.ParseInt(fields["connected_slaves"], 10, 64)
	n.MaxMemory, errs[1] = strconv.ParseInt(fields["maxmemory"], 10, 64)
	return errors.Join(errs[:]...)
}

// allRights says whether ACL GETUSER shows every command on every key. The
// reply is a map, or its pairs one after another in the older protocol.
func allRights(reply any) bool {
	text := func(name string) string {
		switch r := reply.(type) {
		case map[any]any:
			return fmt.Sprint(r[name])
		case []any:
			for i := 0; i+1 < len(r); i += 2 {
				if r[i] == name {
					return fmt.Sprint(r[i+1])
				}
			}
		}
		return ""
	}
	return text("commands") == "+@all" && slices.Contains(strings.Fields(strings.Trim(text("keys"), "[]")), "~*")
}
