package observe

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seckill/reconciler/internal/probe"
)

// Groups of samples, each shown as a whole.
const (
	groupRedis     = "redis"
	groupStock     = "stock"
	groupKeys      = "keys"
	groupTransfers = "transfers"
	groupTasks     = "tasks"
	groupReconcile = "reconcile"
	groupServices  = "services"
)

// The label node is a server's address: as many as there are servers.
var redisMetrics = []metric{
	{name: "redis_up", help: "Whether the Redis server answered the last probe.", labels: []string{"node"}},
	{name: "redis_node_info", help: "1, with the role and version of the Redis server.", labels: []string{"node", "role", "version"}},
	{name: "redis_uptime_seconds", help: "Time since the Redis server started.", labels: []string{"node"}},
	{name: "redis_connected_clients", help: "Connections of clients to the Redis server.", labels: []string{"node"}},
	{name: "redis_commands_per_second", help: "Commands that the Redis server ran in the last second before the probe.", labels: []string{"node"}},
	{name: "redis_server_cpu_seconds_total", help: "CPU time of the Redis server.", labels: []string{"node", "mode"}, counter: true},
	{name: "evicted_keys_total", help: "Keys that Redis removed for want of memory: reservations and stock are lost with them.", labels: []string{"node"}, counter: true},
	{name: "used_memory_bytes", help: "Memory that Redis has allocated.", labels: []string{"node"}},
	{name: "maxmemory_bytes", help: "Limit of that memory; absent where there is none.", labels: []string{"node"}},
	{name: "connected_replicas", help: "Replicas that are connected to the master.", labels: []string{"node"}},
	{name: "redis_good_replicas", help: "Replicas that are near enough for min-replicas-to-write; absent where that is not set.", labels: []string{"node"}},
	{name: "redis_replica_link_up", help: "Whether the replica is connected to its master.", labels: []string{"node"}},
	{name: "master_repl_offset_bytes", help: "How much the server has of the replication stream.", labels: []string{"node"}},
	{name: "replication_lag_bytes", help: "How much of the stream the master's slowest replica has not acknowledged.", labels: []string{"node"}},
	{name: "replication_lag_seconds", help: "How long ago the master's slowest replica last acknowledged.", labels: []string{"node"}},
	{name: "redis_aof_enabled", help: "Whether the append-only file is on.", labels: []string{"node"}},
	{name: "redis_aof_last_write_ok", help: "Whether the last write of the append-only file succeeded.", labels: []string{"node"}},
	{name: "aof_rewrite_in_progress", help: "Whether the append-only file is being rewritten.", labels: []string{"node"}},
	{name: "latest_fork_seconds", help: "How long the last fork stopped the server.", labels: []string{"node"}},
	{name: "cluster_state", help: "Whether the node counts the cluster as serving (1) or not (0); absent outside a cluster.", labels: []string{"node"}},
	{name: "cluster_slots_failed", help: "Slots that the node counts as failed, or begins to.", labels: []string{"node"}},
	{name: "redis_slowlog_entries_total", help: "Commands that were entered in the slow log since the server started.", labels: []string{"node"}, counter: true},
	{name: "redis_latency_event_max_seconds", help: "The longest of each kind of latency event that the server remembers.", labels: []string{"node", "event"}},
	{name: "redis_clock_offset_seconds", help: "The server's clock minus PostgreSQL's.", labels: []string{"node"}},
}

// SetRedis shows what the servers answered. postgres is PostgreSQL's clock
// minus this process's; known is false when it could not be read.
func (m *Metrics) SetRedis(nodes []probe.RedisNode, postgres time.Duration, known bool) {
	s := m.board.sample()
	for _, n := range nodes {
		s.flag("redis_up", n.Err == nil, n.Addr)
		if n.Err != nil || n.Role == probe.RoleSentinel {
			continue
		}
		s.redisNode(n)
		if known {
			s.set("redis_clock_offset_seconds", (n.Clock - postgres).Seconds(), n.Addr)
		}
	}
	m.board.show(groupRedis, s)
}

func (s *samples) redisNode(n probe.RedisNode) {
	s.set("redis_node_info", 1, n.Addr, n.Role, n.Version)
	s.set("redis_uptime_seconds", float64(n.UptimeSeconds), n.Addr)
	s.set("redis_connected_clients", float64(n.ConnectedClients), n.Addr)
	s.set("redis_commands_per_second", float64(n.Ops), n.Addr)
	s.set("redis_server_cpu_seconds_total", n.CPUSystem, n.Addr, "system")
	s.set("redis_server_cpu_seconds_total", n.CPUUser, n.Addr, "user")
	s.set("evicted_keys_total", float64(n.EvictedKeys), n.Addr)
	s.set("used_memory_bytes", float64(n.UsedMemory), n.Addr)
	if n.MaxMemory > 0 {
		s.set("maxmemory_bytes", float64(n.MaxMemory), n.Addr)
	}
	s.set("master_repl_offset_bytes", float64(n.ReplOffset), n.Addr)
	s.flag("redis_aof_enabled", n.AOFEnabled, n.Addr)
	s.flag("redis_aof_last_write_ok", n.AOFWriteOK, n.Addr)
	s.flag("aof_rewrite_in_progress", n.AOFRewriting, n.Addr)
	s.set("latest_fork_seconds", n.ForkSeconds, n.Addr)
	if n.Cluster.Known {
		s.flag("cluster_state", n.Cluster.OK, n.Addr)
		s.set("cluster_slots_failed", float64(n.Cluster.SlotsFail), n.Addr)
	}
	if n.SlowTotal >= 0 {
		s.set("redis_slowlog_entries_total", float64(n.SlowTotal), n.Addr)
	}
	for _, e := range n.Latency {
		s.set("redis_latency_event_max_seconds", e.Max.Seconds(), n.Addr, e.Event)
	}
	if n.Role == probe.RoleMaster {
		s.redisMaster(n)
		return
	}
	s.flag("redis_replica_link_up", n.LinkUp, n.Addr)
}

func (s *samples) redisMaster(n probe.RedisNode) {
	s.set("connected_replicas", float64(n.ConnectedReplicas), n.Addr)
	if n.GoodReplicas >= 0 {
		s.set("redis_good_replicas", float64(n.GoodReplicas), n.Addr)
	}
	var bytes, seconds int64
	for _, r := range n.Replicas {
		bytes, seconds = max(bytes, r.BehindBytes), max(seconds, r.AckSeconds)
	}
	if len(n.Replicas) > 0 {
		s.set("replication_lag_bytes", float64(bytes), n.Addr)
		s.set("replication_lag_seconds", float64(seconds), n.Addr)
	}
}

var stockMetrics = []metric{
	{name: "scopes", help: "Live scopes by the state that Redis has of them: missing, where meta or stock is gone; unreadable, where its node does not answer.", labels: []string{"state"}},
	{name: "soldout_scopes", help: "Live scopes with no unit available."},
	{name: "stock_deviating_scopes", help: "Live scopes whose initial is not available + reserved: something else than the scripts wrote."},
	{name: "bucket_remaining_variance", help: "Variance of the available units of a version's buckets, of the most uneven version."},
	{name: "bucket_remaining_spread", help: "Most minus least available units of a version's buckets, of the most uneven version."},
	{name: "bucket_soldout_uneven_seconds", help: "For how long a bucket has been sold out while another of its version had units left, of the version where that has lasted longest."},
}

// Stock is what the live scopes hold, added up.
type Stock struct {
	States        map[string]int // by state, or missing, or unreadable
	SoldOut       int
	Deviating     int // scopes
	MostVariance  float64
	MostSpread    int64
	SoldOutUneven time.Duration
}

// SetStock shows what the live scopes hold.
func (m *Metrics) SetStock(stock Stock) {
	s := m.board.sample()
	for state, n := range stock.States {
		s.set("scopes", float64(n), state)
	}
	s.set("soldout_scopes", float64(stock.SoldOut))
	s.set("stock_deviating_scopes", float64(stock.Deviating))
	s.set("bucket_remaining_variance", stock.MostVariance)
	s.set("bucket_remaining_spread", float64(stock.MostSpread))
	s.set("bucket_soldout_uneven_seconds", stock.SoldOutUneven.Seconds())
	m.board.show(groupStock, s)
}

var keyMetrics = []metric{
	{name: "request_shard_max_fields", help: "Request results in the biggest shard, over the live scopes as last measured."},
	{name: "request_shard_skew_ratio", help: "The biggest shard in relation to its scope's average one, of the most uneven scope; 1 while there are too few requests to say."},
	{name: "index_max_members", help: "Members of the biggest index of that kind.", labels: []string{"index"}},
	{name: "big_key_max_bytes", help: "Estimated memory of the biggest key of that kind.", labels: []string{"key"}},
	{name: "hottest_scope_requests_per_second", help: "New request ids of the scope that took most, between the last two looks at it."},
}

// Keys are the biggest keys of the live scopes.
type Keys struct {
	MaxFields                             int64
	Skew                                  float64
	Pending, Expiry                       int64 // members
	ShardBytes, PendingBytes, ExpiryBytes int64
	HottestRate                           float64 // requests per second
}

// SetKeys shows how big the keys have grown.
func (m *Metrics) SetKeys(k Keys) {
	s := m.board.sample()
	s.set("request_shard_max_fields", float64(k.MaxFields))
	s.set("request_shard_skew_ratio", k.Skew)
	s.set("index_max_members", float64(k.Pending), "send_pending")
	s.set("index_max_members", float64(k.Expiry), "reservation_expiry")
	s.set("big_key_max_bytes", float64(k.ShardBytes), "req")
	s.set("big_key_max_bytes", float64(k.PendingBytes), "send_pending")
	s.set("big_key_max_bytes", float64(k.ExpiryBytes), "reservation_expiry")
	s.set("hottest_scope_requests_per_second", k.HottestRate)
	m.board.show(groupKeys, s)
}

var workMetrics = []metric{
	{name: "bucket_transfer_pending", help: "Cross-bucket transfers that are not finished, as the journal has them."},
	{name: "bucket_transfer_oldest_age_seconds", help: "Age of the oldest of them."},
	{name: "tasks_open", help: "Open tasks by kind: they wait for a person.", labels: []string{"kind"}},
	{name: "tasks_oldest_age_seconds", help: "Age of the oldest open task of that kind.", labels: []string{"kind"}},
}

// SetTransfers shows how many transfers are not finished, and the oldest's age.
func (m *Metrics) SetTransfers(pending int, oldest time.Duration) {
	s := m.board.sample()
	s.set("bucket_transfer_pending", float64(pending))
	s.set("bucket_transfer_oldest_age_seconds", oldest.Seconds())
	m.board.show(groupTransfers, s)
}

// OpenTasks are the open tasks of one kind.
type OpenTasks struct {
	Kind   string
	Count  int
	Oldest time.Duration
}

// SetTasks shows the open tasks by kind. Kinds are few: protocol §3 names them.
func (m *Metrics) SetTasks(kinds []OpenTasks) {
	s := m.board.sample()
	for _, k := range kinds {
		s.set("tasks_open", float64(k.Count), k.Kind)
		s.set("tasks_oldest_age_seconds", k.Oldest.Seconds(), k.Kind)
	}
	m.board.show(groupTasks, s)
}

var reconcileMetrics = []metric{
	{name: "reconcile_last_finished_timestamp_seconds", help: "When the last reconciliation of all scopes of that mode finished.", labels: []string{"mode"}},
	{name: "reconcile_verdict", help: "1 for the verdict of that reconciliation, 0 for the others.", labels: []string{"mode", "verdict"}},
	{name: "reconcile_incomplete", help: "What it could not read.", labels: []string{"mode"}},
}

// Reconciliation is the last finished run of one mode over all scopes.
type Reconciliation struct {
	Mode       string
	Verdict    string
	FinishedAt time.Time
	Incomplete int
}

// verdicts are those of interface §5.
var verdicts = []string{"consistent", "drift", "incomplete"}

// SetReconciliations shows the last run of each mode.
func (m *Metrics) SetReconciliations(runs []Reconciliation) {
	s := m.board.sample()
	for _, r := range runs {
		s.set("reconcile_last_finished_timestamp_seconds", float64(r.FinishedAt.UnixMilli())/1000, r.Mode)
		for _, v := range verdicts {
			s.flag("reconcile_verdict", v == r.Verdict, r.Mode, v)
		}
		s.set("reconcile_incomplete", float64(r.Incomplete), r.Mode)
	}
	m.board.show(groupReconcile, s)
}

var serviceMetrics = []metric{
	{name: "dependency_up", help: "Whether redis, postgres and rocketmq could be used at the last probe: every Redis master, a name server with the topic's route, every broker of the topic.", labels: []string{"dependency"}},
	{name: "rocketmq_broker_up", help: "Whether the broker answered the last probe.", labels: []string{"broker"}},
	{name: "rocketmq_group_known", help: "Whether a broker knows the order consumer's group."},
}

// Services is what of the dependencies could be used.
type Services struct {
	Up         map[string]bool // redis, postgres, rocketmq
	Brokers    map[string]bool // by name
	GroupKnown bool
}

// SetServices shows what could be used.
func (m *Metrics) SetServices(v Services) {
	s := m.board.sample()
	for name, up := range v.Up {
		s.flag("dependency_up", up, name)
	}
	for name, up := range v.Brokers {
		s.flag("rocketmq_broker_up", up, name)
	}
	s.flag("rocketmq_group_known", v.GroupKnown)
	m.board.show(groupServices, s)
}

// Sources of evidence.
const (
	SourceRedis    = "redis"
	SourcePostgres = "postgres"
	SourceRocketMQ = "rocketmq"
)

// evidence is what workers ask the sources.
type evidence struct {
	queries, failures *prometheus.CounterVec
	complete          *prometheus.GaugeVec
}

func newEvidence() evidence {
	return evidence{
		queries:  counter("evidence_queries_total", "Reservations or messages that a source was asked about.", "source"),
		failures: counter("evidence_failures_total", "Those of them that it gave no evidence of, by cause.", "source", "cause"),
		complete: gauge("evidence_last_complete_timestamp_seconds", "When a source last answered everything that it was asked.", "source"),
	}
}

// Asked counts what a source was asked, and by cause what it could not answer.
// Causes are the stable names of package rocketmq, or "error".
func (m *Metrics) Asked(source string, queries int, failures map[string]int) {
	if queries == 0 {
		return
	}
	m.evidence.queries.WithLabelValues(source).Add(float64(queries))
	failed := 0
	for cause, n := range failures {
		m.evidence.failures.WithLabelValues(source, cause).Add(float64(n))
		failed += n
	}
	if failed == 0 {
		m.evidence.complete.WithLabelValues(source).SetToCurrentTime()
	}
}

// lease is how the single instance's lease stands.
type lease struct {
	held, since *prometheus.GaugeVec // without labels, so that they are absent until set
	losses      *prometheus.CounterVec
}

func newLease() lease {
	return lease{
		held:   gauge("lease_held", "Whether this instance holds the lease and works."),
		since:  gauge("lease_since_timestamp_seconds", "Since when it has held it, or not."),
		losses: counter("lease_losses_total", "Times that it lost the lease while it worked."),
	}
}

// SetLease says whether this instance works. One that does not shows nothing of
// what it sampled while it did: another instance does now.
func (m *Metrics) SetLease(held, lost bool) {
	m.lease.since.WithLabelValues().SetToCurrentTime()
	losses := m.lease.losses.WithLabelValues()
	if lost {
		losses.Inc()
	}
	if held {
		m.lease.held.WithLabelValues().Set(1)
		return
	}
	m.lease.held.WithLabelValues().Set(0)
	m.board.clear()
	for _, v := range []*prometheus.GaugeVec{m.pending, m.pendingAge, m.expired, m.expiredAge, m.backlog, m.oldestAge, m.halted, m.compared, m.findings, m.invariant, m.deviation} {
		v.Reset()
	}
}
