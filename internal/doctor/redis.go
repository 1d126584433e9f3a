package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/probe"
	"github.com/seckill/reconciler/reconcile"
)

// Limits from which a Redis server is worth a warning, or more.
const (
	memoryWarning  = 0.70
	memoryBroken   = 0.80
	lagSeconds     = 2       // min-replicas-max-lag of spec §6
	lagBytes       = 8 << 20 // a second's worth at full load
	forkLimit      = 0.1     // seconds in which the server answers nobody
	slowRecent     = 10 * time.Minute
	latencyRecent  = time.Hour
	latencyWarning = 100 * time.Millisecond
	oldestVersion  = 7
)

const dead = "start it, or see why it hangs; what it holds waits meanwhile"

// Redis judges the servers. now is this process's time, by which entries are
// old or new.
func Redis(nodes []probe.RedisNode, now time.Time) []Row {
	all := &rows{area: AreaRedis}
	masters := 0
	for _, n := range nodes {
		if n.Err == nil && n.Role == probe.RoleMaster {
			masters++
		}
	}
	if masters == 0 {
		all.unread("masters", errNoMaster, "correct redis.addrs, redis.mode and redis.username, or start the servers")
	} else {
		all.ok("masters", fmt.Sprintf("%d of %d servers take writes", masters, len(nodes)))
	}
	list := all.list
	for _, n := range nodes {
		list = append(list, redisNode(n, now)...)
	}
	return list
}

type constError string

func (e constError) Error() string { return string(e) }

const errNoMaster constError = "no server that takes writes answered"

func redisNode(n probe.RedisNode, now time.Time) []Row {
	r := &rows{area: AreaRedis, subject: n.Addr}
	if n.Err != nil {
		r.unread("answers", n.Err, dead)
		return r.list
	}
	r.ok("answers", n.Role)
	if n.Role == probe.RoleSentinel {
		return r.list
	}
	major, _, _ := strings.Cut(n.Version, ".")
	v, err := strconv.Atoi(major)
	r.judge("version", err == nil && v >= oldestVersion, n.Version, Broken, "version "+n.Version+" is older than 7.0", "upgrade it")
	r.settings(n)
	r.memory(n)
	r.persistence(n)
	if n.Role == probe.RoleMaster {
		r.replication(n)
	} else {
		r.judge("replica-link", n.LinkUp, "connected to its master", Broken, "it has lost its master and falls behind", "see its log and the network between the two")
	}
	if n.ClusterEnabled {
		r.cluster(n)
	}
	r.slowLog(n, now)
	r.latency(n, now)
	return r.list
}

// settingChecks are those that package reconcile judges, with what is worse
// than a risk.
var settingChecks = []struct {
	name   string
	broken bool
	fine   string
	master bool // of masters only
}{
	{"role", true, "takes writes", true},
	{"maxmemory-policy", true, "noeviction", false},
	{"maxmemory", false, "limited", false},
	{"replicas", false, "connected", true},
	{"min-replicas-to-write", false, "set", true},
	{"appendonly", false, "on", false},
	{"aof-write", true, "the last write succeeded", false},
	{"acl-user", false, "a user with limited rights", false},
}

// settings are what the check environment of a reconciliation judges.
func (r *rows) settings(n probe.RedisNode) {
	if n.Settings == nil {
		return
	}
	issues := settingIssues(n)
	_, noInfo := n.Settings.Unread["INFO"]
	for _, check := range settingChecks {
		issue, bad := issues[check.name]
		delete(issues, check.name)
		switch {
		case bad && check.broken:
			r.add(check.name, Broken, issue.Message, issue.Remedy)
		case bad:
			r.add(check.name, Warning, issue.Message, issue.Remedy)
		case check.name == "acl-user":
			r.aclUser(n)
		case applies(check.name, check.master, n) && !noInfo:
			r.ok(check.name, check.fine)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(issues)) {
		r.unread(name, constError(issues[name].Message), issues[name].Remedy)
	}
}

// settingIssues are what package reconcile says of the server, by setting.
func settingIssues(n probe.RedisNode) map[string]reconcile.EnvironmentIssue {
	judged := *n.Settings
	if n.Role == probe.RoleReplica && !n.Alone {
		// A replica in its place: what only a master has is not asked of it.
		judged.Role, judged.Replicas, judged.MinReplicas = "master", 1, true
	}
	issues := map[string]reconcile.EnvironmentIssue{}
	for _, i := range reconcile.JudgeRedis(judged) {
		name := strings.TrimPrefix(i.Subject, "redis "+n.Addr+" ")
		i.Message = strings.TrimPrefix(i.Message, "redis "+n.Addr+": ")
		issues[name] = i
	}
	return issues
}

// applies says whether a setting is asked of the server.
func applies(name string, ofMasters bool, n probe.RedisNode) bool {
	if name == "min-replicas-to-write" && n.Settings.Replicas == 0 {
		return false // judged with the replicas
	}
	return !ofMasters || n.Role == probe.RoleMaster || n.Alone
}

func (r *rows) aclUser(n probe.RedisNode) {
	if _, unread := n.Settings.Unread["ACL WHOAMI"]; unread {
		return
	}
	why := n.Settings.User + " with limited rights"
	if n.Refused["CONFIG GET"] != nil {
		why += "; slowlog-log-slower-than and latency-monitor-threshold are not shown to it"
	}
	r.ok("acl-user", why)
}

func (r *rows) memory(n probe.RedisNode) {
	r.judge("evicted-keys", n.EvictedKeys == 0, "none", Broken, fmt.Sprintf("%d keys were removed for want of memory since the server started: reservations or stock are lost", n.EvictedKeys),
		"set maxmemory-policy noeviction, then run `reconciler reconcile --deep`")
	if n.MaxMemory <= 0 {
		return
	}
	used := float64(n.UsedMemory) / float64(n.MaxMemory)
	why := fmt.Sprintf("%.0f %% of maxmemory", used*100)
	state := Warning
	if used >= memoryBroken {
		state = Broken
	}
	r.judge("memory-use", used < memoryWarning, why, state, why+": when it is full, reserving stops", "raise maxmemory, or close versions that are over")
}

func (r *rows) persistence(n probe.RedisNode) {
	if n.AOFEnabled {
		r.judge("aof-rewrite", n.AOFRewriteOK, "the last rewrite succeeded", Warning, "the last rewrite of the append-only file failed: it grows without end", "see the server's log: disk or memory is short")
	}
	r.judge("snapshot", n.SnapshotOK, "the last snapshot succeeded", Warning, "the last snapshot failed", "see the server's log: disk or memory is short")
	r.judge("fork-time", n.ForkSeconds < forkLimit, fmt.Sprintf("%.1f ms", n.ForkSeconds*1000), Warning,
		fmt.Sprintf("the last fork stopped the server for %.0f ms", n.ForkSeconds*1000), "smaller servers, or no transparent huge pages")
}

func (r *rows) replication(n probe.RedisNode) {
	if n.GoodReplicas >= 0 {
		r.judge("good-replicas", n.GoodReplicas > 0, fmt.Sprintf("%d near enough for min-replicas-to-write", n.GoodReplicas), Broken,
			"no replica is near enough for min-replicas-to-write: every write is refused (NOREPLICAS)", "start the replicas, or see why they lag")
	}
	for _, replica := range n.Replicas {
		check := "lag " + replica.Addr
		why := fmt.Sprintf("%d bytes, heard of %d s ago", replica.BehindBytes, replica.AckSeconds)
		switch {
		case !replica.Online:
			r.add(check, Warning, "the replica is still loading", "wait; a failover now would lose what it lacks")
		case replica.AckSeconds > lagSeconds || replica.BehindBytes > lagBytes:
			r.add(check, Warning, why+": a failover now would lose that much", "see the replica's load, its disk and the network")
		default:
			r.ok(check, why)
		}
	}
}

func (r *rows) cluster(n probe.RedisNode) {
	if err := n.Refused["CLUSTER INFO"]; err != nil {
		r.unread("cluster-state", err, "allow CLUSTER INFO to the daemon's user (deploy/redis/users.acl)")
		return
	}
	switch {
	case !n.Cluster.OK:
		r.add("cluster-state", Broken, "the node counts the cluster as failed: some slots are served by nobody", "see `redis-cli --cluster check`")
	case n.Cluster.SlotsFail > 0:
		r.add("cluster-state", Warning, fmt.Sprintf("%d slots are, or may be, without a master", n.Cluster.SlotsFail), "see which node is away")
	default:
		r.ok("cluster-state", fmt.Sprintf("ok, %d nodes", n.Cluster.KnownNodes))
	}
}

func (r *rows) slowLog(n probe.RedisNode, now time.Time) {
	if err := n.Refused["SLOWLOG GET"]; err != nil {
		r.add("slow-log", Warning, "could not be read: "+err.Error(), "allow SLOWLOG GET to the daemon's user (deploy/redis/users.acl)")
		return
	}
	var slowest probe.SlowCommand
	count := 0
	for _, c := range n.Slow {
		if now.Sub(c.At) < slowRecent {
			count++
			if c.Took > slowest.Took {
				slowest = c
			}
		}
	}
	if threshold, known := n.Config["slowlog-log-slower-than"]; known {
		micros, err := strconv.ParseInt(threshold, 10, 64)
		r.judge("slowlog-log-slower-than", err == nil && micros >= 0 && micros <= 10_000, threshold+" µs", Warning,
			"it is "+threshold+": commands that hold up the sale are not in the slow log", "CONFIG SET slowlog-log-slower-than 2000")
	}
	r.judge("slow-log", count == 0, fmt.Sprintf("nothing in the last 10 minutes, %d since the start", n.SlowTotal), Warning,
		fmt.Sprintf("%d or more slow commands in the last 10 minutes, the slowest %s with %s", count, slowest.Command, slowest.Took),
		"see SLOWLOG GET on the server: who runs it, and is it a script of the contract?")
}

func (r *rows) latency(n probe.RedisNode, now time.Time) {
	if err := n.Refused["LATENCY LATEST"]; err != nil {
		r.add("latency", Warning, "could not be read: "+err.Error(), "allow LATENCY LATEST to the daemon's user (deploy/redis/users.acl)")
		return
	}
	if threshold, known := n.Config["latency-monitor-threshold"]; known {
		r.judge("latency-monitor-threshold", threshold != "0", threshold+" ms", Warning, "latency events are not recorded", "CONFIG SET latency-monitor-threshold 5")
	}
	var worst probe.LatencyEvent
	for _, e := range n.Latency {
		if now.Sub(e.At) < latencyRecent && e.Latest > worst.Latest {
			worst = e
		}
	}
	r.judge("latency", worst.Latest < latencyWarning, fmt.Sprintf("%d kinds of events, none of 100 ms in the last hour", len(n.Latency)), Warning,
		fmt.Sprintf("%s took %s", worst.Event, worst.Latest), "see LATENCY DOCTOR on the server")
}
