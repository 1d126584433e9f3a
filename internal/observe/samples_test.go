package observe

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/seckill/reconciler/internal/probe"
)

// only is the scraped lines of some metrics.
func only(text string, names ...string) string {
	var out strings.Builder
	for line := range strings.Lines(text) {
		name, _, _ := strings.Cut(strings.TrimRight(line, "\n"), " ")
		name, _, _ = strings.Cut(name, "{")
		for _, wanted := range names {
			if name == "seckill_"+wanted {
				out.WriteString(line)
			}
		}
	}
	return out.String()
}

// sampled has had every sample of everything.
func sampled() *Metrics {
	m := NewMetrics("v1")
	m.SetLease(true, false)
	m.SetRedis([]probe.RedisNode{
		{
			Addr: "r1", Role: probe.RoleMaster, SlowTotal: 4, Clock: time.Second,
			RedisInfo: probe.RedisInfo{Version: "8.2.3", EvictedKeys: 2, MaxMemory: 100, UsedMemory: 70, GoodReplicas: 1, ConnectedReplicas: 1},
			Replicas:  []probe.RedisReplica{{Addr: "r2", BehindBytes: 5, AckSeconds: 1}, {Addr: "r4", BehindBytes: 9}},
			Cluster:   probe.ClusterState{Known: true, OK: true},
			Latency:   []probe.LatencyEvent{{Event: "fork", Max: 50 * time.Millisecond}},
		},
		{Addr: "r2", Role: probe.RoleReplica, RedisInfo: probe.RedisInfo{GoodReplicas: -1, LinkUp: true}, SlowTotal: -1},
		{Addr: "r3", Role: probe.RoleUnknown, Err: errors.New("refused")},
		{Addr: "s1", Role: probe.RoleSentinel},
	}, 400*time.Millisecond, true)
	m.SetStock(Stock{States: map[string]int{"ACTIVE": 2, "missing": 1}, SoldOut: 1, Deviating: 1, MostVariance: 2.5, MostSpread: 4, SoldOutUneven: time.Minute})
	m.SetKeys(Keys{MaxFields: 10, Skew: 1.5, Pending: 1, Expiry: 2, ShardBytes: 3, PendingBytes: 4, ExpiryBytes: 5, HottestRate: 6})
	m.SetTransfers(2, time.Hour)
	m.SetTasks([]OpenTasks{{"dead_letter", 3, time.Minute}})
	m.SetReconciliations([]Reconciliation{{Mode: "quick", Verdict: "drift", FinishedAt: time.Unix(1000, 0), Incomplete: 1}})
	m.SetServices(Services{Up: map[string]bool{"redis": true, "rocketmq": false}, Brokers: map[string]bool{"b1": false}, GroupKnown: true})
	m.Asked(SourceRocketMQ, 10, map[string]int{"clock_skew": 2})
	m.Asked(SourcePostgres, 0, nil)
	return m
}

func TestSamples(t *testing.T) {
	m := sampled()
	got := only(scrape(t, m), "redis_up", "replication_lag_bytes", "redis_good_replicas", "redis_replica_link_up", "redis_clock_offset_seconds",
		"maxmemory_bytes", "cluster_state", "redis_latency_event_max_seconds", "redis_slowlog_entries_total", "scopes", "tasks_open", "reconcile_verdict",
		"dependency_up", "evidence_queries_total", "evidence_failures_total", "evidence_last_complete_timestamp_seconds", "lease_held")
	want := `seckill_cluster_state{node="r1"} 1
seckill_dependency_up{dependency="redis"} 1
seckill_dependency_up{dependency="rocketmq"} 0
seckill_evidence_failures_total{cause="clock_skew",source="rocketmq"} 2
seckill_evidence_queries_total{source="rocketmq"} 10
seckill_lease_held 1
seckill_maxmemory_bytes{node="r1"} 100
seckill_reconcile_verdict{mode="quick",verdict="consistent"} 0
seckill_reconcile_verdict{mode="quick",verdict="drift"} 1
seckill_reconcile_verdict{mode="quick",verdict="incomplete"} 0
seckill_redis_clock_offset_seconds{node="r1"} 0.6
seckill_redis_clock_offset_seconds{node="r2"} -0.4
seckill_redis_good_replicas{node="r1"} 1
seckill_redis_latency_event_max_seconds{event="fork",node="r1"} 0.05
seckill_redis_replica_link_up{node="r2"} 1
seckill_redis_slowlog_entries_total{node="r1"} 4
seckill_redis_up{node="r1"} 1
seckill_redis_up{node="r2"} 1
seckill_redis_up{node="r3"} 0
seckill_redis_up{node="s1"} 1
seckill_replication_lag_bytes{node="r1"} 9
seckill_scopes{state="ACTIVE"} 2
seckill_scopes{state="missing"} 1
seckill_tasks_open{kind="dead_letter"} 3
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestSamplesReplaceEachOther: what is gone where it was sampled is gone here.
func TestSamplesReplaceEachOther(t *testing.T) {
	m := sampled()
	m.SetTasks([]OpenTasks{{"send_blocked", 1, 0}})
	if got, want := only(scrape(t, m), "tasks_open"), "seckill_tasks_open{kind=\"send_blocked\"} 1\n"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestStandbyShowsNothing: what an instance sampled while it worked is not
// shown by one that works no more.
func TestStandbyShowsNothing(t *testing.T) {
	m := sampled()
	m.SetSendPending(5, time.Minute)
	m.SetReconciled("quick", map[string]int{"drift": 1}, map[string]int{"leaked_reservation": 2})
	m.SetDeviation(1, 1)
	m.SetHalted("compensator", 1)
	m.SetLease(false, true)
	for line := range strings.Lines(scrape(t, m)) {
		name, _, _ := strings.Cut(line, " ")
		name, _, _ = strings.Cut(name, "{")
		switch name {
		case "seckill_build_info", "seckill_evidence_failures_total", "seckill_evidence_queries_total", "seckill_lease_since_timestamp_seconds":
		case "seckill_lease_held", "seckill_lease_losses_total":
			if line != "seckill_lease_held 0\n" && line != "seckill_lease_losses_total 1\n" {
				t.Error(line)
			}
		default:
			t.Errorf("still shown: %s", line)
		}
	}
}

// TestSampledConventions lints what TestMetricConventions has not set. Names of
// the data contract are the only exceptions.
func TestSampledConventions(t *testing.T) {
	families, err := sampled().Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		if strings.HasPrefix(p.Metric, "seckill_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}
