package reconcile_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// counter makes the shop's counter of sold units say so.
func (s *sale) counter(sold int) {
	s.t.Helper()
	b := s.scopes[0]
	s.exec(`INSERT INTO shop.stock (activity_id, sku_id, activity_version, total, sold) VALUES ($1, $2, $3, $4, $5)
		ON CONFLICT (activity_id, sku_id, activity_version) DO UPDATE SET sold = excluded.sold`,
		b.ActivityID, b.SKUID, b.Version, initial*len(s.scopes), sold)
}

// The counter of sold units lies between the active orders and all of them:
// whether a cancelled one gave its unit back is the shop's business.
func TestSoldCounter(t *testing.T) {
	s := one(t, 2)
	all := settled(t, s) // 30 orders
	o := s.options()
	o.Checks = []string{reconcile.CheckSoldMismatch}
	r := s.run(o)
	if _, made := r.Summary[reconcile.CheckSoldMismatch]; made || !strings.Contains(r.NotMade[reconcile.CheckSoldMismatch], "not applicable") {
		t.Errorf("without a counter: %v %v", r.Summary, r.NotMade)
	}
	s.exec(`UPDATE shop.orders SET status = 'CANCELLED' WHERE reservation_id = ANY ($1)`, []string{all[0].id, all[1].id})
	for _, c := range []struct {
		sold    int
		want    string // in the message; "" for none
		differs int64
	}{
		{27, "1 orders were not deducted", -1},
		{28, "", 0},
		{29, "", 0},
		{30, "", 0},
		{33, "3 units were deducted for no order", 3},
	} {
		s.counter(c.sold)
		r := s.run(o)
		if n, made := r.Summary[reconcile.CheckSoldMismatch]; !made || len(r.NotMade) != 0 || (n == 1) != (c.want != "") {
			t.Errorf("%d sold: %v %v", c.sold, r.Summary, r.NotMade)
		}
		if c.want == "" {
			if r.Verdict != reconcile.VerdictConsistent {
				t.Errorf("%d sold: %s %+v %+v", c.sold, r.Verdict, r.Findings, r.Incomplete)
			}
			continue
		}
		f := only(t, r, s.scopes[0].Tag())
		if !strings.Contains(f.Message, c.want) || f.Evidence.Postgres["sold"] != int64(c.sold) || f.Evidence.Postgres["active"] != int64(28) {
			t.Errorf("%d sold: %+v", c.sold, f)
		}
	}
}

// An adopter's view says where an adopter's counter is; one that cannot be
// read makes the run incomplete.
func TestSoldCounterOfAnAdopter(t *testing.T) {
	s := one(t, 1)
	settled(t, s)
	s.exec(`DROP VIEW seckill.stock_evidence`)
	o := s.options()
	o.Checks = []string{reconcile.CheckSoldMismatch}
	if r := s.run(o); r.Verdict != reconcile.VerdictConsistent || r.NotMade[reconcile.CheckSoldMismatch] == "" {
		t.Errorf("no view: %s %v %+v", r.Verdict, r.NotMade, r.Incomplete)
	}
	s.exec(`CREATE TABLE public.goods (activity text, article text, warehouse int, pieces int, gone int)`)
	s.exec(`INSERT INTO public.goods VALUES ($1, 'sku', 1, 600, 10), ($1, 'sku', 2, 400, 21)`, s.scopes[0].ActivityID)
	s.exec(`CREATE VIEW seckill.stock_evidence AS SELECT activity AS activity_id, article AS sku_id, 1::bigint AS activity_version,
		pieces AS total, gone AS sold FROM public.goods`)
	s.want(s.run(o), "incomplete", "postgres 0", "b0 ?")
	s.exec(`GRANT SELECT ON seckill.stock_evidence TO seckill_daemon`)
	r := s.run(o)
	s.want(r, "drift", "sold_mismatch 0", "b0 +0")
	s.exec(`UPDATE public.goods SET gone = gone - 1 WHERE warehouse = 2`)
	s.want(s.run(o), "consistent", "b0 +0")
}

// fixedNodes are settings without a server.
type fixedNodes []reconcile.RedisNode

func (n fixedNodes) Nodes(context.Context) []reconcile.RedisNode { return n }

// setUp is a server as it has to be, but for one thing.
func setUp(but func(*reconcile.RedisNode)) reconcile.Nodes {
	n := reconcile.RedisNode{
		Addr: "10.0.0.1:6379", Role: "master", Replicas: 1, MinReplicas: true, EvictionPolicy: "noeviction", MaxMemory: 1 << 30,
		AppendOnly: true, LastAOFWriteOK: true, User: "reconciler",
	}
	but(&n)
	return fixedNodes{n}
}

// settingsOf are the settings that issues name.
func settingsOf(issues []reconcile.EnvironmentIssue) []string {
	var out []string
	for _, i := range issues {
		_, setting, _ := strings.Cut(strings.TrimPrefix(i.Subject, "redis "), " ")
		out = append(out, setting)
		if i.Message == "" || i.Remedy == "" {
			out = append(out, "says nothing")
		}
	}
	return out
}

func TestJudgeEnvironment(t *testing.T) {
	for name, c := range map[string]struct {
		but  func(*reconcile.RedisNode)
		want []string
	}{
		"in order":                     {func(*reconcile.RedisNode) {}, nil},
		"eviction":                     {func(n *reconcile.RedisNode) { n.EvictionPolicy = "volatile-ttl" }, []string{"maxmemory-policy"}},
		"no limit":                     {func(n *reconcile.RedisNode) { n.MaxMemory = 0 }, []string{"maxmemory"}},
		"no replica":                   {func(n *reconcile.RedisNode) { n.Replicas, n.MinReplicas = 0, false }, []string{"replicas"}},
		"may be alone":                 {func(n *reconcile.RedisNode) { n.MinReplicas = false }, []string{"min-replicas-to-write"}},
		"no AOF":                       {func(n *reconcile.RedisNode) { n.AppendOnly = false }, []string{"appendonly"}},
		"AOF failed":                   {func(n *reconcile.RedisNode) { n.LastAOFWriteOK = false }, []string{"aof-write"}},
		"a replica":                    {func(n *reconcile.RedisNode) { n.Role, n.Replicas = "slave", 0 }, []string{"role"}},
		"default user":                 {func(n *reconcile.RedisNode) { n.User, n.AllRights = "default", true }, []string{"acl-user"}},
		"default user with few rights": {func(n *reconcile.RedisNode) { n.User = "default" }, nil},
		"INFO forbidden": {
			func(n *reconcile.RedisNode) {
				*n = reconcile.RedisNode{Addr: n.Addr, User: "x", Unread: map[string]string{"INFO": "NOPERM"}}
			}, []string{"INFO"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, settingsOf(reconcile.Environment(t.Context(), setUp(c.but), nil))); diff != "" {
				t.Errorf("issues (-want +got):\n%s", diff)
			}
		})
	}
}

// deaf is a PostgreSQL that does not answer.
type deaf struct{}

func (deaf) Server(context.Context) (reconcile.PostgresServer, error) {
	return reconcile.PostgresServer{}, errors.New("connection refused")
}

func TestEnvironmentOfAServerThatDoesNotAnswer(t *testing.T) {
	issues := reconcile.Environment(t.Context(), nil, deaf{})
	if len(issues) != 1 || !issues[0].Unread || issues[0].Subject != "postgres settings" {
		t.Errorf("%+v", issues)
	}
}

// The settings of real servers, in order and out of it.
func TestEnvironmentOfRealServers(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true})
	replica := stacktest.Own(t, devstack.Options{Redis: true})
	s := newSale(t, stack, []string{stack.Redis().Addr()}, 1)
	for setting, value := range map[string]string{
		"maxmemory": "1gb", "maxmemory-policy": "noeviction", "appendonly": "yes",
		"min-replicas-to-write": "1", "min-replicas-max-lag": "10",
	} {
		s.do("config", "set", setting, value)
	}
	host, port, _ := strings.Cut(stack.Redis().Addr(), ":")
	other := redis.NewClient(&redis.Options{Addr: replica.Redis().Addr()})
	t.Cleanup(func() { _ = other.Close() })
	if err := other.Do(t.Context(), "replicaof", host, port).Err(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the replica is connected", func() bool {
		return strings.Contains(s.redis.Info(t.Context(), "replication").Val(), "connected_slaves:1")
	})
	store := func(user string, rights ...any) *redisstore.Store {
		t.Helper()
		s.do(append([]any{"acl", "setuser", user, "reset", "on", ">secret"}, rights...)...)
		return openStore(t, stack.Redis().Addr(), user)
	}
	full := store("reconciler", "~*", "&*", "+@all", "-flushall")
	few := store("blind", "~seckill:*", "+@all", "-info", "-acl")
	want := func(what string, nodes reconcile.Nodes, server reconcile.Server, settings ...string) {
		t.Helper()
		issues := reconcile.Environment(t.Context(), nodes, server)
		if diff := cmp.Diff(settings, settingsOf(issues)); diff != "" {
			t.Errorf("%s (-want +got):\n%s\n%+v", what, diff, issues)
		}
	}
	want("in order", full, nil)
	want("forbidden", few, nil, "ACL WHOAMI", "INFO")
	want("as default", s.stocks, nil, "acl-user")
	s.do("config", "set", "maxmemory-policy", "allkeys-lru")
	s.do("config", "set", "maxmemory", "0")
	s.do("config", "set", "appendonly", "no")
	s.do("config", "set", "min-replicas-to-write", "0")
	want("out of order", full, nil, "maxmemory-policy", "maxmemory", "min-replicas-to-write", "appendonly")
	onReplica := openStore(t, replica.Redis().Addr(), "")
	want("a replica", onReplica, nil, "role", "acl-user")

	p, err := s.orders.Server(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p.Fsync, p.FullPageWrites = "on", "on" // as the stack's are not
	if diff := cmp.Diff(reconcile.PostgresServer{SynchronousCommit: "on", Fsync: "on", FullPageWrites: "on"}, p); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"recovery", "synchronous_commit", "fsync", "full_page_writes"}, postgresSettings(reconcile.JudgePostgres(
		reconcile.PostgresServer{InRecovery: true, SynchronousCommit: "off", Fsync: "off", FullPageWrites: "off"}))); diff != "" {
		t.Error(diff)
	}

	// In a run it is one finding for each, and no drift.
	r := s.reconciler()
	r.Nodes = full
	report, err := r.Run(t.Context(), reconcile.Options{Settle: time.Millisecond, Checks: []string{reconcile.CheckEnvironment}})
	if err != nil || report.Verdict != reconcile.VerdictConsistent || report.Summary[reconcile.CheckEnvironment] != 4 || len(report.Findings) != 4 {
		t.Errorf("%v: %+v", err, report)
	}
	report, err = r.Run(t.Context(), reconcile.Options{Settle: time.Millisecond})
	if _, made := report.Summary[reconcile.CheckEnvironment]; err != nil || made || report.NotMade[reconcile.CheckEnvironment] == "" {
		t.Errorf("a quick run, %v: %+v", err, report)
	}
}

func postgresSettings(issues []reconcile.EnvironmentIssue) []string {
	var out []string
	for _, i := range issues {
		out = append(out, strings.TrimPrefix(i.Subject, "postgres "))
	}
	return out
}

func openStore(t *testing.T, addr, user string) *redisstore.Store {
	t.Helper()
	c := config.Redis{Addrs: []string{addr}, Mode: config.RedisStandalone, DialTimeout: time.Second, CommandTimeout: 5 * time.Second, PoolSize: 2}
	if user != "" {
		c.Username, c.Password = user, "secret"
	}
	clients, err := redisstore.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = clients.Close() })
	store, err := redisstore.New(clients, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

// eventually waits, generously, until something is so.
func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for !so() {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-deadline:
			t.Fatalf("not in a minute: %s", what)
		}
	}
}

// A key of any kind that never expires is found, by name.
func TestMissingTTLOfEveryKind(t *testing.T) {
	every(t, 1, func(t *testing.T, s *sale) {
		t.Helper()
		all := settled(t, s)
		b, scope := all[40], s.scopes[0]
		s.do("set", scope.SoldOutKey(), "0", "PX", 100_000_000)
		clean(t, s, "before")
		for name, key := range map[string]string{
			"meta": scope.MetaKey(), "stock": scope.StockKey(), "soldout": scope.SoldOutKey(),
			"send_pending": scope.IndexKey(reservation.SendPending), "reservation_expiry": scope.IndexKey(reservation.ReservationExpiry),
			"request shard": scope.RequestKey(b.user), "reservation": scope.ReservationKey(b.id), "user marker": scope.UserKey(b.user),
		} {
			left := s.redis.PTTL(t.Context(), key).Val()
			s.do("persist", key)
			subject, named := scope.Tag(), key
			switch name {
			case "reservation":
				subject = b.id
			case "user marker": // a user id is not shown
				subject, named = b.id, strings.TrimSuffix(key, b.user)+"…"
			}
			r := s.run(s.deep())
			if f := only(t, r, subject); len(r.Findings) != 1 || f.Check != reconcile.CheckMissingTTL || !strings.Contains(f.Message, named) {
				t.Errorf("%s: %+v", name, r.Findings)
			}
			s.do("pexpire", key, left.Milliseconds())
		}
		s.do("persist", scope.ReservationKey(b.id))
		s.do("persist", scope.UserKey(b.user))
		if f := only(t, s.run(s.deep()), b.id); strings.Count(f.Message, "seckill:") != 2 {
			t.Errorf("both of a reservation: %+v", f)
		}
	})
}

// The lost reservation of a cancelled order is never restored as active: its
// hash comes back where its unit is still deducted, and no unit is taken.
func TestCancelledOrdersOrphanTakesNoUnit(t *testing.T) {
	s := one(t, 1)
	all := settled(t, s)
	s.reserve(10)
	orphan, gone := all[30], all[0]
	s.order(orphan)
	s.exec(`UPDATE shop.orders SET status = 'CANCELLED' WHERE reservation_id = ANY ($1)`, []string{orphan.id, gone.id})
	s.lose(orphan, false) // its index members, request and marker are left
	s.lose(gone, true)    // all of it was undone
	stock := s.redis.HGetAll(t.Context(), s.scopes[0].StockKey()).Val()
	r := s.run(s.repairing(0))
	wantStates(t, r, reconcile.VerdictConsistent, map[string]int{"lost_reservation done": 1, "cancelled_order_holds_stock none": 1})
	if diff := cmp.Diff(stock, s.redis.HGetAll(t.Context(), s.scopes[0].StockKey()).Val()); diff != "" {
		t.Errorf("stock moved:\n%s", diff)
	}
	if status := s.redis.HGet(t.Context(), s.scopes[0].ReservationKey(orphan.id), "status").Val(); status != "ORDER_CREATED" {
		t.Errorf("the orphan is %q", status)
	}
	if n := s.redis.Exists(t.Context(), s.scopes[0].ReservationKey(gone.id)).Val(); n != 0 {
		t.Error("a reservation was restored whose unit is not deducted")
	}
}
