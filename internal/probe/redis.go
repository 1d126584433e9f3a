package probe

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seckill/reconciler/reconcile"
)

// Roles of a Redis server.
const (
	RoleMaster   = "master"
	RoleReplica  = "replica"
	RoleSentinel = "sentinel"
	RoleUnknown  = "unknown" // it did not answer, and nobody said
)

// RedisNode is one Redis server as it answered.
type RedisNode struct {
	Addr string
	Role string
	// Err says why it could not be asked. Nothing else is known of it then.
	Err error

	// Alone says that it is the one server that was named, and not known to be
	// part of a group: a replica is out of place then.
	Alone bool

	RedisInfo
	// Replicas are those that a master names.
	Replicas []RedisReplica
	Cluster  ClusterState
	// Commands that failed although the server answers, by name, such as
	// "SLOWLOG GET": mostly an ACL that forbids them.
	Refused map[string]error

	// SlowTotal is how many commands were entered in the slow log since the
	// server started, or -1: its ids count up from 0.
	SlowTotal int64
	Slow      []SlowCommand // the newest entries, newest first
	Latency   []LatencyEvent
	// Clock is the server's time minus that of this process, known to
	// ± ClockError: half of the question's round trip.
	Clock      time.Duration
	ClockError time.Duration

	// Settings is how it is set up, with its login's rights; nil unless it was
	// asked for.
	Settings *reconcile.RedisNode
	// Config has the settings that CONFIG GET showed.
	Config map[string]string
}

// RedisInfo is what INFO says of a server. Times are in seconds, sizes in bytes.
type RedisInfo struct {
	Version           string
	UptimeSeconds     int64
	UsedMemory        int64
	MaxMemory         int64 // 0: no limit
	EvictedKeys       int64 // since the server started
	ConnectedClients  int64
	Ops               int64 // commands in the last second
	ConnectedReplicas int64
	GoodReplicas      int64 // near enough for min-replicas-to-write; -1 while that is not set
	ReplOffset        int64
	LinkUp            bool // of a replica to its master
	AOFEnabled        bool
	AOFRewriting      bool
	AOFWriteOK        bool
	AOFRewriteOK      bool
	SnapshotOK        bool
	ForkSeconds       float64
	CPUSystem         float64
	CPUUser           float64
	ClusterEnabled    bool
}

// RedisReplica is a replica as its master sees it.
type RedisReplica struct {
	Addr   string
	Online bool
	// BehindBytes is how much of the replication stream it has not
	// acknowledged, AckSeconds how long ago it last did.
	BehindBytes int64
	AckSeconds  int64
}

// ClusterState is what CLUSTER INFO says; Known is false outside a cluster.
type ClusterState struct {
	Known      bool
	OK         bool
	SlotsOK    int64
	SlotsFail  int64 // pfail included
	KnownNodes int64
}

// SlowCommand is an entry of the slow log. Its arguments are left out: they
// name users.
type SlowCommand struct {
	ID      int64
	At      time.Time
	Took    time.Duration
	Command string
}

// LatencyEvent is what LATENCY LATEST says of one kind of event.
type LatencyEvent struct {
	Event  string
	At     time.Time
	Latest time.Duration
	Max    time.Duration
}

// ParseRedisInfo reads the reply to INFO. A field that an old server lacks is
// zero; without those that say what the server is, it is an error.
func ParseRedisInfo(text string) (info RedisInfo, role string, replicas []RedisReplica, err error) {
	f := infoFields{values: map[string]string{}}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			f.values[name] = value
		}
	}
	for _, name := range []string{"role", "used_memory", "master_repl_offset", "aof_enabled"} {
		if f.values[name] == "" {
			return RedisInfo{}, "", nil, errors.New("INFO names no " + name)
		}
	}
	info = RedisInfo{
		Version: f.values["redis_version"], UptimeSeconds: f.number("uptime_in_seconds"),
		UsedMemory: f.number("used_memory"), MaxMemory: f.number("maxmemory"), EvictedKeys: f.number("evicted_keys"),
		ConnectedClients: f.number("connected_clients"), Ops: f.number("instantaneous_ops_per_sec"),
		ConnectedReplicas: f.number("connected_slaves"), GoodReplicas: -1, ReplOffset: f.number("master_repl_offset"),
		LinkUp:     f.values["master_link_status"] == "up",
		AOFEnabled: f.values["aof_enabled"] == "1", AOFRewriting: f.values["aof_rewrite_in_progress"] == "1",
		AOFWriteOK: f.values["aof_last_write_status"] == "ok", AOFRewriteOK: f.values["aof_last_bgrewrite_status"] == "ok",
		SnapshotOK:  f.values["rdb_last_bgsave_status"] == "ok",
		ForkSeconds: f.float("latest_fork_usec") / 1e6, CPUSystem: f.float("used_cpu_sys"), CPUUser: f.float("used_cpu_user"),
		ClusterEnabled: f.values["cluster_enabled"] == "1",
	}
	if _, set := f.values["min_slaves_good_slaves"]; set {
		info.GoodReplicas = f.number("min_slaves_good_slaves")
	}
	role = RoleMaster
	if f.values["role"] == "slave" {
		role = RoleReplica
	}
	return info, role, f.replicas(info.ReplOffset), f.err
}

type infoFields struct {
	values map[string]string
	err    error
}

func (f *infoFields) number(name string) int64 {
	text := f.values[name]
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil && f.err == nil {
		f.err = fmt.Errorf("INFO: %s is %.40q", name, text)
	}
	return n
}

func (f *infoFields) float(name string) float64 {
	text := f.values[name]
	if text == "" {
		return 0
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil && f.err == nil {
		f.err = fmt.Errorf("INFO: %s is %.40q", name, text)
	}
	return n
}

// replicas reads lines such as slave0:ip=…,port=…,state=online,offset=…,lag=1.
func (f *infoFields) replicas(masterOffset int64) []RedisReplica {
	var found []RedisReplica
	for i := 0; ; i++ {
		line, there := f.values["slave"+strconv.Itoa(i)]
		if !there {
			break
		}
		parts := infoFields{values: map[string]string{}}
		for part := range strings.SplitSeq(line, ",") {
			name, value, _ := strings.Cut(part, "=")
			parts.values[name] = value
		}
		found = append(found, RedisReplica{
			Addr: parts.values["ip"] + ":" + parts.values["port"], Online: parts.values["state"] == "online",
			BehindBytes: max(masterOffset-parts.number("offset"), 0), AckSeconds: parts.number("lag"),
		})
		f.err = cmp.Or(f.err, parts.err)
	}
	slices.SortFunc(found, func(a, b RedisReplica) int { return cmp.Compare(a.Addr, b.Addr) })
	return found
}

// ParseClusterInfo reads the reply to CLUSTER INFO.
func ParseClusterInfo(text string) ClusterState {
	f := infoFields{values: map[string]string{}}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			f.values[name] = value
		}
	}
	return ClusterState{
		Known: f.values["cluster_state"] != "", OK: f.values["cluster_state"] == "ok",
		SlotsOK: f.number("cluster_slots_ok"), SlotsFail: f.number("cluster_slots_fail") + f.number("cluster_slots_pfail"),
		KnownNodes: f.number("cluster_known_nodes"),
	}
}

// ClusterNode is a node as CLUSTER NODES lists it.
type ClusterNode struct {
	Addr string
	Role string
	Fail bool // others count it as failed, or begin to
}

// ParseClusterNodes reads the reply to CLUSTER NODES. Nodes without an
// address, or that are still being introduced, are left out.
func ParseClusterNodes(text string) []ClusterNode {
	var nodes []ClusterNode
	for line := range strings.Lines(text) {
		parts := strings.Fields(line)
		if len(parts) < 8 {
			continue
		}
		flags := strings.Split(parts[2], ",")
		addr, _, _ := strings.Cut(parts[1], "@")
		if addr == "" || strings.HasPrefix(addr, ":") || slices.Contains(flags, "noaddr") || slices.Contains(flags, "handshake") {
			continue
		}
		n := ClusterNode{Addr: addr, Role: RoleReplica, Fail: slices.Contains(flags, "fail") || slices.Contains(flags, "fail?")}
		if slices.Contains(flags, "master") {
			n.Role = RoleMaster
		}
		nodes = append(nodes, n)
	}
	return nodes
}
