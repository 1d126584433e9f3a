//go:build slow

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/doctor"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// patient is an installation that is examined.
type patient struct {
	t       *testing.T
	stack   *devstack.Stack
	config  config.Config
	url     string // of the superuser
	scope   reservation.Scope
	master  *devstack.Service
	replica *devstack.Service
	redis   *redis.Client // of the master

	heedsSlow bool // the slow log is part of the chart
}

func newPatient(t *testing.T) *patient {
	t.Helper()
	p := &patient{t: t, stack: stacktest.Own(t, devstack.Options{Sentinel: true, Postgres: true, Brokers: 1}), scope: stacktest.Scope(t)}
	group := p.stack.Sentinel()
	var err error
	if p.master, err = group.Master(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, s := range group.Servers {
		if s != p.master {
			p.replica = s
		}
	}
	p.redis = redis.NewClient(&redis.Options{Addr: p.master.Addr()})
	t.Cleanup(func() { _ = p.redis.Close() })
	p.url = stacktest.Database(t, p.stack)
	topic, consumers := stacktest.Topic(t, p.stack, 2)
	c := config.Default()
	c.Redis.Addrs, c.Redis.Mode, c.Redis.Sentinel.Master = group.SentinelAddrs(), config.RedisSentinel, devstack.SentinelMaster
	c.Redis.DialTimeout, c.Redis.CommandTimeout = time.Second, time.Second
	c.Postgres.URL = stacktest.LoginURL(t, p.stack, p.url, "seckill_daemon")
	c.RocketMQ.NameServers = []string{p.stack.NameServer().Addr()}
	c.RocketMQ.Topic, c.RocketMQ.ConsumerGroup = topic, consumers
	c.RocketMQ.Tag = consumersTag
	p.config = c
	p.register()
	p.consume()
	return p
}

func (p *patient) register() {
	p.t.Helper()
	store, err := pgstore.Open(p.t.Context(), pgstore.Config{URL: p.url})
	if err != nil {
		p.t.Fatal(err)
	}
	defer store.Close()
	now := time.Now().Truncate(time.Second)
	err = store.RegisterVersion(p.t.Context(), pgstore.Version{
		ActivityID: p.scope.ActivityID, SKUID: p.scope.SKUID, Version: p.scope.Version, Total: 5, Buckets: 1,
		StartsAt: now, EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(24 * time.Hour),
	}, []pgstore.Bucket{{ID: 0, Initial: 5, State: pgstore.ScopeActive, Confirmed: true}}, "test")
	if err != nil {
		p.t.Fatal(err)
	}
}

// consumersTag is what the consumer takes, and the gateway sends.
const consumersTag = "order"

// consume has an order consumer online.
func (p *patient) consume() {
	p.t.Helper()
	sub, err := upstream.Subscribe(upstream.Subscription{
		NameServers: p.config.RocketMQ.NameServers, Topic: p.config.RocketMQ.Topic, Group: p.config.RocketMQ.ConsumerGroup,
		Tag: consumersTag, Logger: slog.New(slog.DiscardHandler),
	}, &upstream.Consumer{})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = sub.Stop(context.WithoutCancel(p.t.Context())) })
}

func (p *patient) exec(sql string) {
	p.t.Helper()
	conn, err := pgx.Connect(p.t.Context(), p.url)
	if err != nil {
		p.t.Fatal(err)
	}
	defer conn.Close(p.t.Context())
	if _, err := conn.Exec(p.t.Context(), sql); err != nil {
		p.t.Fatalf("%s: %v", sql, err)
	}
}

func (p *patient) set(name, value string) {
	p.t.Helper()
	if err := p.redis.ConfigSet(p.t.Context(), name, value).Err(); err != nil {
		p.t.Fatal(err)
	}
}

// chart is the state of each row; a row that could not be read has its own.
func (p *patient) chart() map[string]string {
	p.t.Helper()
	chart := map[string]string{}
	for _, r := range examine(p.t.Context(), p.config).Rows {
		state := string(r.State)
		if r.Unread {
			state = "unread"
		}
		if r.State != doctor.OK && (r.Why == "" || r.Remedy == "") {
			p.t.Errorf("%+v says not why, or what to do", r)
		}
		if r.Check == "fork-time" || r.Check == "slow-log" && !p.heedsSlow {
			continue // a busy machine makes them warnings, which stay for a while
		}
		chart[strings.Join([]string{r.Area, r.Subject, r.Check}, "|")] = state
	}
	return chart
}

// changed is what differs from the healthy chart: "old>new" by row.
func changed(healthy, chart map[string]string) map[string]string {
	diff := map[string]string{}
	for row, state := range healthy {
		if chart[row] != state {
			diff[row] = state + ">" + chart[row]
		}
	}
	for row, state := range chart {
		if _, there := healthy[row]; !there {
			diff[row] = ">" + state
		}
	}
	return diff
}

// eventually waits until the chart has changed exactly so.
func (p *patient) eventually(t *testing.T, healthy, want map[string]string) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		got := changed(healthy, p.chart())
		if maps.Equal(got, want) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("rows that changed, -want +got:\n%s", cmp.Diff(want, got))
		}
	}
}

// TestSlowDoctor breaks each thing on real services: exactly the rows that are
// about it change, and change back.
func TestSlowDoctor(t *testing.T) {
	p := newPatient(t)
	var healthy map[string]string
	for end := time.Now().Add(time.Minute); ; time.Sleep(200 * time.Millisecond) {
		healthy = p.chart()
		broken := slices.Sorted(maps.Keys(healthy))
		broken = slices.DeleteFunc(broken, func(row string) bool { return healthy[row] == "ok" || healthy[row] == "warning" })
		if len(broken) == 0 && healthy["rocketmq||consumers"] == "ok" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("a healthy stack has broken rows, or no consumer: %v %v", broken, healthy["rocketmq||consumers"])
		}
	}
	master, replica := "redis|"+p.master.Addr()+"|", "redis|"+p.replica.Addr()+"|"
	keys := "keys|" + p.scope.Tag() + "|"
	for _, tt := range []struct {
		name     string
		do, undo func()
		want     map[string]string
	}{
		{
			name: "eviction policy", do: func() { p.set("maxmemory-policy", "allkeys-lru") }, undo: func() { p.set("maxmemory-policy", "noeviction") },
			want: map[string]string{master + "maxmemory-policy": "ok>broken"},
		},
		{
			name: "memory nearly full", do: func() { p.set("maxmemory", strconv.FormatInt(usedMemory(p)*4/3, 10)) }, undo: func() { p.set("maxmemory", "0") },
			want: map[string]string{master + "maxmemory": "warning>ok", master + "memory-use": ">warning"},
		},
		{
			name: "append-only file", do: func() { p.set("appendonly", "yes") }, undo: func() { p.set("appendonly", "no") },
			want: map[string]string{master + "appendonly": "warning>ok", master + "aof-rewrite": ">ok"},
		},
		{
			name: "min-replicas-to-write", do: func() { p.set("min-replicas-to-write", "1") }, undo: func() { p.set("min-replicas-to-write", "0") },
			want: map[string]string{master + "min-replicas-to-write": "warning>ok", master + "good-replicas": ">ok"},
		},
		{
			name: "slow log off", do: func() { p.set("slowlog-log-slower-than", "-1") }, undo: func() { p.set("slowlog-log-slower-than", "10000") },
			want: map[string]string{master + "slowlog-log-slower-than": "ok>warning"},
		},
		{
			name: "latency monitor", do: func() { p.set("latency-monitor-threshold", "5") }, undo: func() { p.set("latency-monitor-threshold", "0") },
			want: map[string]string{master + "latency-monitor-threshold": "warning>ok"},
		},
		{
			name: "big shard", do: func() { p.fill(60_000) }, undo: func() { p.redis.Del(t.Context(), p.scope.RequestShardKey(7)) },
			want: map[string]string{keys + "request-shards": "ok>warning", keys + "shard-skew": "ok>warning"},
		},
		{
			name: "trigger disabled", do: func() { p.exec(`ALTER TABLE shop.orders DISABLE TRIGGER ALL`) }, undo: func() { p.enableTriggers() },
			want: map[string]string{"postgres||order-fence": "ok>broken"},
		},
		{
			name: "index dropped", do: func() { p.exec(`ALTER TABLE shop.orders DROP CONSTRAINT orders_reservation_id_key`) },
			undo: func() {
				p.exec(`ALTER TABLE shop.orders ADD CONSTRAINT orders_reservation_id_key UNIQUE (reservation_id)`)
			},
			want: map[string]string{"postgres||evidence-indexes": "ok>warning"},
		},
		{
			name: "synchronous_commit", do: func() {
				p.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$`)
			},
			undo: func() {
				p.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET synchronous_commit', current_database()); END $$`)
			},
			want: map[string]string{"postgres||synchronous_commit": "ok>broken"},
		},
		{
			name: "a broker that is gone", do: func() {
				p.exec(`INSERT INTO seckill.expected_queue (broker, topic, queues) VALUES ('broker-z', '` + p.config.RocketMQ.Topic + `', 2)`)
			},
			undo: func() { p.exec(`DELETE FROM seckill.expected_queue WHERE broker = 'broker-z'`) },
			want: map[string]string{"rocketmq||known-brokers": "ok>broken"},
		},
		{
			name: "wrong tag", do: func() { p.config.RocketMQ.Tag = "paid" }, undo: func() { p.config.RocketMQ.Tag = consumersTag },
			want: map[string]string{"rocketmq||subscription": "ok>broken"},
		},
		{
			name: "wrong group", do: func() { p.config.RocketMQ.ConsumerGroup += "-x" }, undo: func() { p.config.RocketMQ.ConsumerGroup = strings.TrimSuffix(p.config.RocketMQ.ConsumerGroup, "-x") },
			want: map[string]string{
				"rocketmq||group": "ok>broken", "rocketmq||consumers": "ok>warning", "rocketmq||subscription": "ok>", "rocketmq||message-model": "ok>",
			},
		},
		{
			name: "claims go before messages", do: func() { p.config.Purge.ClaimsAfter = time.Hour }, undo: func() { p.config.Purge.ClaimsAfter = config.Default().Purge.ClaimsAfter },
			want: map[string]string{"rocketmq|broker-0|retention": "ok>broken"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.do()
			defer func() {
				tt.undo()
				p.eventually(t, healthy, map[string]string{})
			}()
			p.eventually(t, healthy, tt.want)
		})
	}
	t.Run("a replica that hangs hides no other", func(t *testing.T) {
		if err := p.replica.Pause(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = p.replica.Resume() }()
		want := map[string]string{replica + "answers": "ok>unread", "clocks|redis " + p.replica.Addr() + "|clock": "ok>"}
		for row, state := range healthy {
			if strings.HasPrefix(row, replica) && row != replica+"answers" {
				want[row] = state + ">"
			}
		}
		want[master+"lag "+p.replica.Addr()] = "ok>warning"
		began := time.Now()
		p.eventually(t, healthy, want)
		if took := time.Since(began); took > 50*time.Second {
			t.Errorf("it took %s", took)
		}
	})
	t.Run("slow log", func(t *testing.T) {
		p.set("slowlog-log-slower-than", "0")
		p.heedsSlow = true
		defer func() { p.heedsSlow = false }()
		for end := time.Now().Add(time.Minute); p.chart()[master+"slow-log"] != "warning"; {
			if time.Now().After(end) {
				t.Fatal("slow commands are no warning")
			}
		}
		before := p.redis.SlowLogLen(t.Context()).Val()
		p.chart()
		if after := p.redis.SlowLogLen(t.Context()).Val(); after < before {
			t.Errorf("the slow log was reset: %d entries, before %d", after, before)
		}
	})
	t.Run("nobody answers", p.nobodyAnswers)
}

func usedMemory(p *patient) int64 {
	p.t.Helper()
	info := p.redis.InfoMap(p.t.Context(), "memory").Val()["Memory"]
	var used int64
	if _, err := fmt.Sscan(info["used_memory"], &used); err != nil {
		p.t.Fatal(err)
	}
	return used
}

func (p *patient) fill(fields int) {
	p.t.Helper()
	values := make([]any, 0, 2*fields)
	for i := range fields {
		values = append(values, fmt.Sprint("q", i), "15||0|SOLD_OUT|u")
	}
	if err := p.redis.HSet(p.t.Context(), p.scope.RequestShardKey(7), values...).Err(); err != nil {
		p.t.Fatal(err)
	}
}

func (p *patient) enableTriggers() {
	p.exec(`DO $$ DECLARE name text; BEGIN
		FOR name IN SELECT tgname FROM pg_trigger WHERE tgrelid = 'shop.orders'::regclass AND NOT tgisinternal LOOP
			EXECUTE format('ALTER TABLE shop.orders ENABLE ALWAYS TRIGGER %I', name);
		END LOOP; END $$`)
}

// nobodyAnswers ends all services: each area still has its row, in time.
func (p *patient) nobodyAnswers(t *testing.T) {
	for _, s := range p.stack.Services() {
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	report := examine(t.Context(), p.config)
	areas := map[string]bool{}
	for _, r := range report.Rows {
		if !r.Unread {
			t.Errorf("nothing can be known, but: %+v", r)
		}
		areas[r.Area] = true
	}
	for _, area := range []string{doctor.AreaRedis, doctor.AreaPostgres, doctor.AreaRocketMQ} {
		if !areas[area] {
			t.Errorf("no row of %s", area)
		}
	}
	var out bytes.Buffer
	r := &result{a: &app{stdout: &out}, format: choice{value: "json"}}
	if err := printExamination(r, report, false); err != nil {
		t.Fatal(err)
	}
	var decoded map[string]any
	if err := json.Unmarshal(out.Bytes(), &decoded); err != nil || decoded["schema"] != 1.0 {
		t.Errorf("JSON: %v in %s", err, out.String())
	}
}
