package doctor

import (
	"errors"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/probe"
	"github.com/seckill/reconciler/reconcile"
)

// states are the rows' states by subject and check.
func states(list []Row) map[string]string {
	s := map[string]string{}
	for _, r := range list {
		s[r.Subject+"|"+r.Check] = string(r.State)
		if r.Unread {
			s[r.Subject+"|"+r.Check] = "unread"
		}
	}
	return s
}

// changes is what differs between two sets of rows.
func changes(before, after []Row) map[string]string {
	old, now := states(before), states(after)
	diff := map[string]string{}
	for row := range maps.Keys(old) {
		if old[row] != now[row] {
			diff[row] = old[row] + ">" + now[row]
		}
	}
	for row := range maps.Keys(now) {
		if _, there := old[row]; !there {
			diff[row] = ">" + now[row]
		}
	}
	return diff
}

var at = time.Unix(10_000, 0)

// master is one that has nothing to find fault with.
func master() probe.RedisNode {
	return probe.RedisNode{
		Addr: "r1", Role: probe.RoleMaster, SlowTotal: 0, Refused: map[string]error{},
		RedisInfo: probe.RedisInfo{
			Version: "8.2.3", MaxMemory: 100, UsedMemory: 10, ConnectedReplicas: 1, GoodReplicas: 1, ClusterEnabled: true,
			AOFEnabled: true, AOFWriteOK: true, AOFRewriteOK: true, SnapshotOK: true,
		},
		Replicas: []probe.RedisReplica{{Addr: "r2", Online: true}}, Cluster: probe.ClusterState{Known: true, OK: true},
		Config: map[string]string{"slowlog-log-slower-than": "2000", "latency-monitor-threshold": "5"},
		Settings: &reconcile.RedisNode{
			Addr: "r1", Role: "master", Replicas: 1, MinReplicas: true, EvictionPolicy: "noeviction", MaxMemory: 100, AppendOnly: true, LastAOFWriteOK: true, User: "seckill-daemon",
		},
	}
}

// TestRedis changes what no real server was brought to in TestSlowDoctor.
func TestRedis(t *testing.T) {
	healthy := Redis([]probe.RedisNode{master()}, at)
	for _, r := range healthy {
		if r.State != OK {
			t.Errorf("of a healthy server: %+v", r)
		}
	}
	for name, tt := range map[string]struct {
		change func(*probe.RedisNode)
		want   map[string]string
	}{
		"old":                    {func(n *probe.RedisNode) { n.Version = "6.2.1" }, map[string]string{"r1|version": "ok>broken"}},
		"evicted":                {func(n *probe.RedisNode) { n.EvictedKeys = 1 }, map[string]string{"r1|evicted-keys": "ok>broken"}},
		"memory":                 {func(n *probe.RedisNode) { n.UsedMemory = 70 }, map[string]string{"r1|memory-use": "ok>warning"}},
		"memory full":            {func(n *probe.RedisNode) { n.UsedMemory = 80 }, map[string]string{"r1|memory-use": "ok>broken"}},
		"lag in seconds":         {func(n *probe.RedisNode) { n.Replicas[0].AckSeconds = 3 }, map[string]string{"r1|lag r2": "ok>warning"}},
		"lag in bytes":           {func(n *probe.RedisNode) { n.Replicas[0].BehindBytes = 9 << 20 }, map[string]string{"r1|lag r2": "ok>warning"}},
		"loading replica":        {func(n *probe.RedisNode) { n.Replicas[0].Online = false }, map[string]string{"r1|lag r2": "ok>warning"}},
		"no good replica":        {func(n *probe.RedisNode) { n.GoodReplicas = 0 }, map[string]string{"r1|good-replicas": "ok>broken"}},
		"rewrite failed":         {func(n *probe.RedisNode) { n.AOFRewriteOK = false }, map[string]string{"r1|aof-rewrite": "ok>warning"}},
		"file cannot be written": {func(n *probe.RedisNode) { n.Settings.LastAOFWriteOK = false }, map[string]string{"r1|aof-write": "ok>broken"}},
		"snapshot failed":        {func(n *probe.RedisNode) { n.SnapshotOK = false }, map[string]string{"r1|snapshot": "ok>warning"}},
		"long fork":              {func(n *probe.RedisNode) { n.ForkSeconds = 0.2 }, map[string]string{"r1|fork-time": "ok>warning"}},
		"cluster down":           {func(n *probe.RedisNode) { n.Cluster.OK = false }, map[string]string{"r1|cluster-state": "ok>broken"}},
		"slots without master":   {func(n *probe.RedisNode) { n.Cluster.SlotsFail = 5 }, map[string]string{"r1|cluster-state": "ok>warning"}},
		"cluster info refused":   {func(n *probe.RedisNode) { n.Refused["CLUSTER INFO"] = errors.New("NOPERM") }, map[string]string{"r1|cluster-state": "ok>unread"}},
		"slow log refused":       {func(n *probe.RedisNode) { n.Refused["SLOWLOG GET"] = errors.New("NOPERM") }, map[string]string{"r1|slow-log": "ok>warning", "r1|slowlog-log-slower-than": "ok>"}},
		"slow a while ago":       {func(n *probe.RedisNode) { n.Slow = []probe.SlowCommand{{At: at.Add(-time.Hour), Took: time.Second}} }, map[string]string{}},
		"slow now": {func(n *probe.RedisNode) {
			n.Slow = []probe.SlowCommand{{At: at.Add(-time.Minute), Took: time.Second, Command: "KEYS"}}
		}, map[string]string{"r1|slow-log": "ok>warning"}},
		"latency event": {func(n *probe.RedisNode) {
			n.Latency = []probe.LatencyEvent{{Event: "fork", At: at, Latest: time.Second}}
		}, map[string]string{"r1|latency": "ok>warning"}},
		"default user":    {func(n *probe.RedisNode) { n.Settings.User, n.Settings.AllRights = "default", true }, map[string]string{"r1|acl-user": "ok>warning"}},
		"settings unread": {func(n *probe.RedisNode) { n.Settings.Unread = map[string]string{"ACL WHOAMI": "NOPERM"} }, map[string]string{"r1|ACL WHOAMI": ">unread", "r1|acl-user": "ok>"}},
	} {
		n := master()
		tt.change(&n)
		if diff := cmp.Diff(tt.want, changes(healthy, Redis([]probe.RedisNode{n}, at))); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
	alone := master()
	alone.Role, alone.Alone, alone.LinkUp, alone.Settings.Role = probe.RoleReplica, true, true, "slave"
	if got := states(Redis([]probe.RedisNode{alone}, at)); got["r1|role"] != "broken" || got["|masters"] != "unread" {
		t.Errorf("a replica in place of the master: %v", got)
	}
}

func TestClocks(t *testing.T) {
	const margin = 5 * time.Minute
	for name, tt := range map[string]struct {
		redis, redisError, postgres, broker, brokerError time.Duration
		want                                             map[string]string
	}{
		"equal, on a host that is far off": {time.Hour, 0, time.Hour, time.Hour, time.Second / 2, map[string]string{"redis r1|clock": "ok", "broker b1|clock": "ok"}},
		"behind":                           {-501 * time.Millisecond, 0, 0, 0, 0, map[string]string{"redis r1|clock": "warning", "broker b1|clock": "ok"}},
		"within the round trip":            {700 * time.Millisecond, 300 * time.Millisecond, 0, 900 * time.Millisecond, 500 * time.Millisecond, map[string]string{"redis r1|clock": "ok", "broker b1|clock": "ok"}},
		"blind":                            {0, 0, 0, 3 * time.Minute, 0, map[string]string{"redis r1|clock": "ok", "broker b1|clock": "broken"}},
	} {
		got := states(Clocks([]probe.RedisNode{{Addr: "r1", Role: probe.RoleMaster, Clock: tt.redis, ClockError: tt.redisError}, {Addr: "dead", Err: errors.New("x")}},
			probe.Postgres{Clock: tt.postgres}, probe.RocketMQ{Brokers: []probe.Broker{{Name: "b1", Clock: tt.broker, ClockError: tt.brokerError}, {Name: "dead", Err: errors.New("x")}}}, margin))
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
	if rows := Clocks([]probe.RedisNode{{Addr: "r1"}}, probe.Postgres{Err: errors.New("x")}, probe.RocketMQ{}, margin); len(rows) > 0 {
		t.Errorf("compared with a PostgreSQL that does not answer: %+v", rows)
	}
}

// TestRocketMQ changes what no real broker was brought to in TestSlowDoctor.
func TestRocketMQ(t *testing.T) {
	settings := Messaging{Topic: "t", Group: "g", ClaimsAfter: 720 * time.Hour, DeadLetterAfter: 24 * time.Hour}
	build := func(change func(*probe.RocketMQ, *Messaging)) []Row {
		m := probe.RocketMQ{
			NameServers: map[string]error{"n1": nil}, TopicExists: true,
			Brokers: []probe.Broker{{
				Name: "b1", Addr: "a", GroupKnown: true, Retention: 72 * time.Hour,
				Consumers: probe.Consumers{Clients: []string{"c1"}, Type: "CONSUME_PASSIVELY", Model: "CLUSTERING", Subscribe: map[string]probe.Subscription{"t": {Type: "TAG", Expression: "*"}}},
			}},
		}
		c := settings
		if change != nil {
			change(&m, &c)
		}
		return RocketMQ(m, c)
	}
	healthy := build(nil)
	for _, r := range healthy {
		if r.State != OK {
			t.Errorf("of a healthy broker: %+v", r)
		}
	}
	for name, tt := range map[string]struct {
		change func(*probe.RocketMQ, *Messaging)
		want   map[string]string
	}{
		"one of two name servers": {func(m *probe.RocketMQ, _ *Messaging) { m.NameServers["n2"] = errors.New("refused") }, map[string]string{"n2|answers": ">warning"}},
		"no topic":                {func(m *probe.RocketMQ, _ *Messaging) { m.TopicExists, m.Brokers = false, nil }, map[string]string{"|topic": "ok>broken", "|group": "ok>", "|consumers": "ok>", "|subscription": "ok>", "|message-model": "ok>", "|consumer-protocol": "ok>", "|known-brokers": "ok>", "b1|answers": "ok>", "b1|retention": "ok>"}},
		"pop by heartbeat":        {func(m *probe.RocketMQ, _ *Messaging) { m.Brokers[0].Consumers.Type = "CONSUME_POP" }, map[string]string{"|consumer-protocol": "ok>broken"}},
		"pop by its topic":        {func(m *probe.RocketMQ, _ *Messaging) { m.PopTopic = "%RETRY%g_t" }, map[string]string{"|consumer-protocol": "ok>broken"}},
		"pop, and configured":     {func(m *probe.RocketMQ, c *Messaging) { m.Brokers[0].Consumers.Type, c.Pop = "CONSUME_POP", true }, map[string]string{}},
		"configured, and no pop":  {func(_ *probe.RocketMQ, c *Messaging) { c.Pop = true }, map[string]string{"|consumer-protocol": "ok>warning"}},
		"broadcasting":            {func(m *probe.RocketMQ, _ *Messaging) { m.Brokers[0].Consumers.Model = "BROADCASTING" }, map[string]string{"|message-model": "ok>broken"}},
		"another topic":           {func(m *probe.RocketMQ, _ *Messaging) { m.Brokers[0].Consumers.Subscribe = nil }, map[string]string{"|subscription": "ok>broken"}},
		"selected by SQL": {func(m *probe.RocketMQ, _ *Messaging) {
			m.Brokers[0].Consumers.Subscribe["t"] = probe.Subscription{Type: "SQL92"}
		}, map[string]string{"|subscription": "ok>warning"}},
		"a tag nobody sends": {func(m *probe.RocketMQ, _ *Messaging) {
			m.Brokers[0].Consumers.Subscribe["t"] = probe.Subscription{Type: "TAG", Expression: "paid"}
		}, map[string]string{"|subscription": "ok>broken"}},
		"dead letters vanish": {func(m *probe.RocketMQ, _ *Messaging) { m.Brokers[0].Retention = 24 * time.Hour }, map[string]string{"b1|retention": "ok>warning"}},
		"claims go first":     {func(_ *probe.RocketMQ, c *Messaging) { c.ClaimsAfter = 72 * time.Hour }, map[string]string{"b1|retention": "ok>broken"}},
		"claims stay":         {func(_ *probe.RocketMQ, c *Messaging) { c.ClaimsAfter = 0 }, map[string]string{}},
		"a broker is away": {func(m *probe.RocketMQ, _ *Messaging) {
			m.Brokers = append(m.Brokers, probe.Broker{Name: "b2", Err: errors.New("x")})
		}, map[string]string{"b2|answers": ">unread"}},
	} {
		if diff := cmp.Diff(tt.want, changes(healthy, build(tt.change))); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
}

// TestPostgres changes what no real server was brought to in TestSlowDoctor.
func TestPostgres(t *testing.T) {
	fine := reconcile.PostgresServer{SynchronousCommit: "on", Fsync: "on", FullPageWrites: "on"}
	healthy := Postgres(probe.Postgres{Settings: fine})
	for name, tt := range map[string]struct {
		change func(*probe.Postgres)
		want   map[string]string
	}{
		"standby":         {func(p *probe.Postgres) { p.Settings.InRecovery, p.FenceErr = true, errors.New("standby") }, map[string]string{"|recovery": "ok>broken", "|order-fence": "ok>broken"}},
		"fsync":           {func(p *probe.Postgres) { p.Settings.Fsync = "off" }, map[string]string{"|fsync": "ok>warning"}},
		"pooler":          {func(p *probe.Postgres) { p.TransactionPooler = true }, map[string]string{"|pooler": "ok>broken"}},
		"pooler unknown":  {func(p *probe.Postgres) { p.PoolerErr = errors.New("x") }, map[string]string{"|pooler": "ok>unread"}},
		"no schema":       {func(p *probe.Postgres) { p.SchemaErr = errors.New("at version 0") }, map[string]string{"|schema": "ok>broken", "|order-fence": "ok>", "|evidence-indexes": "ok>"}},
		"evidence denied": {func(p *probe.Postgres) { p.ScansErr = errors.New("denied") }, map[string]string{"|evidence-indexes": "ok>unread"}},
		"gone":            {func(p *probe.Postgres) { p.Err = errors.New("refused") }, nil},
	} {
		p := probe.Postgres{Settings: fine}
		tt.change(&p)
		got := Postgres(p)
		if tt.want == nil {
			if len(got) != 1 || !got[0].Unread {
				t.Errorf("%s: %+v", name, got)
			}
			continue
		}
		if diff := cmp.Diff(tt.want, changes(healthy, got)); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
}

func TestComplete(t *testing.T) {
	r := Report{Rows: []Row{{Area: AreaClocks, State: OK}, {Area: AreaRedis, Subject: "b", State: Broken, Unread: true}, {Area: AreaRedis, Subject: "a", State: Warning}}}
	r.Complete()
	if got, want := fmt.Sprint(r.Rows[0].Subject, r.Rows[1].Subject, r.Rows[2].Area, r.Summary, r.Unread), "abclocksmap[broken:1 ok:1 warning:1] 1"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
