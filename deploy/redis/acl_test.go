// Package redis_test proves deploy/redis/users.acl on real servers: each role
// can do all that it must, and nothing else.
package redis_test

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/probe"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// shop is one Redis with the roles of users.acl, under names of the test's own.
type shop struct {
	t      *testing.T
	target stacktest.RedisTarget
	admin  redis.UniversalClient
	suffix string
	sale   client.Sale
	scope  reservation.Scope
}

const password = "p"

func open(t *testing.T, target stacktest.RedisTarget) *shop {
	t.Helper()
	s := &shop{t: t, target: target, admin: target.Client(t), suffix: "-" + strings.ToLower(rand.Text()[:8]), scope: stacktest.Scope(t)}
	s.sale = client.Sale{ActivityID: s.scope.ActivityID, SKUID: s.scope.SKUID, Version: s.scope.Version, Secret: []byte("secret")}
	text, err := os.ReadFile("users.acl")
	if err != nil {
		t.Fatal(err)
	}
	hash := sha256.Sum256([]byte(password))
	for line := range strings.Lines(strings.ReplaceAll(string(text), strings.Repeat("0", 64), hex.EncodeToString(hash[:]))) {
		words := strings.Fields(line)
		name := words[1] + s.suffix
		args := []any{"acl", "setuser", name, "reset"}
		for _, w := range words[2:] {
			args = append(args, w)
		}
		s.everywhere(args...)
		t.Cleanup(func() { s.everywhere("acl", "deluser", name) })
	}
	s.provision()
	return s
}

// everywhere runs a command on every server.
func (s *shop) everywhere(args ...any) {
	s.t.Helper()
	ctx := context.WithoutCancel(s.t.Context())
	run := func(ctx context.Context, c *redis.Client) error { return c.Do(ctx, args...).Err() }
	var err error
	switch c := s.admin.(type) {
	case *redis.ClusterClient:
		err = c.ForEachShard(ctx, run)
	case *redis.Client:
		err = run(ctx, c)
	}
	if err != nil {
		s.t.Fatalf("%v: %v", args, err)
	}
}

func (s *shop) as(role string) redis.UniversalClient {
	s.t.Helper()
	c := redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{
		Addrs: s.target.Addrs, IsClusterMode: s.target.Cluster, Username: role + s.suffix, Password: password, ReadTimeout: 10 * time.Second,
	}))
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

func (s *shop) provision() {
	s.t.Helper()
	now := time.Now().UnixMilli()
	s.batch(s.admin, func(b *lua.Batch) func() error {
		return get(b.Provision(s.scope, lua.ProvisionArgs{
			State: lua.StateActive, StartsAtMS: now - 1000, EndsAtMS: now + 3_600_000, RetentionUntilMS: now + 7_200_000, SchemaVersion: 1, Initial: 100,
		}))
	})
}

func get[T any](r *lua.Result[T]) func() error {
	return func() error { _, err := r.Get(); return err }
}

// batch runs one script; an error of the call, such as NOPERM, fails the test.
func (s *shop) batch(c redis.UniversalClient, add func(*lua.Batch) func() error) {
	s.t.Helper()
	if err := s.try(c, add); err != nil {
		s.t.Error(err)
	}
}

func (s *shop) try(c redis.UniversalClient, add func(*lua.Batch) func() error) error {
	s.t.Helper()
	runner, err := lua.NewRunner(c)
	if err != nil {
		s.t.Fatal(err)
	}
	b := runner.Batch()
	result := add(b)
	_ = b.Run(s.t.Context()) // the result has its own error
	return result()
}

// denied are the entries of the servers' ACL logs that name the role.
func (s *shop) denied(role string) (entries []string) {
	s.t.Helper()
	read := func(ctx context.Context, c *redis.Client) error {
		log, err := c.ACLLog(ctx, 128).Result()
		for _, e := range log {
			if e.Username == role+s.suffix {
				entries = append(entries, fmt.Sprintf("%s %s (%s)", e.Reason, e.Object, e.Context))
			}
		}
		return err
	}
	var err error
	switch c := s.admin.(type) {
	case *redis.ClusterClient:
		err = c.ForEachMaster(s.t.Context(), read)
	case *redis.Client:
		err = read(s.t.Context(), c)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return entries
}

// sell makes a reservation as the gateway.
func (s *shop) sell(g *client.Gateway, user string) reservation.Reservation {
	s.t.Helper()
	r, err := g.Reserve(s.t.Context(), client.Request{ActivityID: s.scope.ActivityID, SKUID: s.scope.SKUID, UserID: user, RequestID: "q-" + user})
	if err != nil {
		s.t.Fatal(err)
	}
	return r.Reservation
}

func (s *shop) gateway() *client.Gateway {
	s.t.Helper()
	catalog, err := client.NewCatalog(s.sale)
	if err != nil {
		s.t.Fatal(err)
	}
	rdb := s.as("seckill-gateway")
	if _, err := rdb.Get(s.t.Context(), reservation.CurrentVersionKey(s.scope.ActivityID)).Result(); err != nil && err != redis.Nil { //nolint:errorlint // the library returns it as it is
		s.t.Error(err)
	}
	g, err := client.NewGateway(rdb, catalog, client.Options{Budget: 20 * time.Second, Timeout: 20 * time.Second})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(g.Close)
	return g
}

// forbidden are what no program may do, and changes of another role.
var forbidden = [][]any{
	{"flushall"},
	{"flushdb"},
	{"keys", "*"},
	{"scan", "0"},
	{"monitor"},
	{"config", "get", "*"},
	{"config", "set", "maxmemory", "0"},
	{"acl", "list"},
	{"acl", "setuser", "x"},
	{"debug", "sleep", "0"},
	{"shutdown", "nosave"},
	{"slowlog", "reset"},
	{"latency", "reset"},
	{"client", "kill", "id", "1"},
	{"replicaof", "no", "one"},
	{"cluster", "reset"},
	{"script", "flush"},
	{"function", "list"},
	{"get", "other:key"},
	{"set", "other:key", "1"},
}

func (s *shop) mayNot(role string, more ...[]any) {
	s.t.Helper()
	c := s.as(role)
	for _, args := range append(append([][]any{}, forbidden...), more...) {
		if err := c.Do(s.t.Context(), args...).Err(); !redis.HasErrorPrefix(err, "NOPERM") {
			s.t.Errorf("%s: %v: %v, want NOPERM", role, args, err)
		}
	}
}

func onEach(t *testing.T, test func(t *testing.T, s *shop)) {
	t.Helper()
	for _, target := range stacktest.RedisTargets(t) {
		t.Run(target.Name, func(t *testing.T) { test(t, open(t, target)) })
	}
}

func TestGatewayRole(t *testing.T) {
	onEach(t, func(t *testing.T, s *shop) {
		t.Helper()
		g := s.gateway()
		sent, unknown := s.sell(g, "u1"), s.sell(g, "u2")
		if err := g.MarkEnqueued(t.Context(), sent, "broker,0,1,AC"); err != nil {
			t.Error(err)
		}
		if err := g.MarkSendUnknown(t.Context(), unknown, "timeout"); err != nil {
			t.Error(err)
		}
		if _, err := g.Lookup(t.Context(), client.Query{ActivityID: s.scope.ActivityID, SKUID: s.scope.SKUID, UserID: "u1", RequestID: "q-u1"}); err != nil {
			t.Error(err)
		}
		c := s.as("seckill-gateway")
		events := c.Subscribe(t.Context(), s.scope.EventsChannel())
		defer func() { _ = events.Close() }()
		if _, err := events.Receive(t.Context()); err != nil {
			t.Error(err)
		}
		if err := c.Publish(t.Context(), s.scope.EventsChannel(), reservation.NoticeSoldOut).Err(); err != nil {
			t.Error(err)
		}
		if denied := s.denied("seckill-gateway"); len(denied) > 0 {
			t.Errorf("denied: %v", denied)
		}
		s.batch(s.admin, func(b *lua.Batch) func() error {
			return get(b.Transition(s.scope, lua.TransitionArgs{ReservationID: sent.ID, Target: reservation.StatusReleasePending}))
		})
		err := s.try(c, func(b *lua.Batch) func() error {
			return get(b.Compensate(s.scope, lua.CompensateArgs{ReservationID: sent.ID, UserID: "u1", Reason: "test"}))
		})
		if err == nil {
			t.Error("the gateway gave a unit back")
		}
		s.mayNot("seckill-gateway",
			[]any{"del", s.scope.StockKey()}, []any{"set", reservation.CurrentVersionKey(s.scope.ActivityID), "9"},
			[]any{"hset", s.scope.TransferKey("x"), "amount", "1"}, []any{"hgetall", s.scope.StockKey()}, []any{"publish", "other", "x"}, []any{"zcard", s.scope.IndexKey(reservation.SendPending)})
	})
}

func TestConsumerRole(t *testing.T) {
	onEach(t, func(t *testing.T, s *shop) {
		t.Helper()
		g := s.gateway()
		for i, mark := range []func(*client.Consumer, client.Message) error{
			func(c *client.Consumer, m client.Message) error { return c.MarkOrderCreated(t.Context(), m, "o1") },
			func(c *client.Consumer, m client.Message) error { return c.MarkRejected(t.Context(), m, "sold_out") },
		} {
			sold := s.sell(g, fmt.Sprint("u", i))
			if err := g.MarkEnqueued(t.Context(), sold, "broker,0,1,AC"); err != nil {
				t.Fatal(err)
			}
			consumer, err := client.NewConsumer(s.as("seckill-consumer"), client.ConsumerOptions{Timeout: 20 * time.Second})
			if err != nil {
				t.Fatal(err)
			}
			if err := mark(consumer, reservation.NewOrderMessage(sold)); err != nil {
				t.Error(err)
			}
		}
		if denied := s.denied("seckill-consumer"); len(denied) > 0 {
			t.Errorf("denied: %v", denied)
		}
		s.mayNot("seckill-consumer",
			[]any{"hmget", s.scope.StockKey(), "available"}, []any{"hset", s.scope.StockKey(), "available", "1"}, []any{"hget", s.scope.MetaKey(), "state"},
			[]any{"get", s.scope.UserKey("u0")}, []any{"set", s.scope.SoldOutKey(), "1"}, []any{"del", s.scope.ReservationKey("x")},
			[]any{"hset", s.scope.RequestShardKey(0), "q", "x"}, []any{"publish", s.scope.EventsChannel(), "available"})
	})
}

func TestReaderRole(t *testing.T) {
	onEach(t, func(t *testing.T, s *shop) {
		t.Helper()
		s.sell(s.gateway(), "u1")
		c := s.as("seckill-reader")
		for _, args := range [][]any{
			{"hgetall", s.scope.StockKey()},
			{"hgetall", s.scope.MetaKey()},
			{"get", s.scope.UserKey("u1")},
			{"zrange", s.scope.IndexKey(reservation.SendPending), "0", "-1"},
			{"zcard", s.scope.IndexKey(reservation.ReservationExpiry)},
			{"hlen", s.scope.RequestShardKey(3)},
			{"memory", "usage", s.scope.StockKey()},
			{"pttl", s.scope.MetaKey()},
			{"info"},
			{"slowlog", "get", "1"},
			{"latency", "latest"},
			{"acl", "whoami"},
		} {
			if err := c.Do(t.Context(), args...).Err(); err != nil {
				t.Errorf("%v: %v", args, err)
			}
		}
		s.mayNot("seckill-reader",
			[]any{"hset", s.scope.StockKey(), "available", "1"}, []any{"set", s.scope.SoldOutKey(), "1"}, []any{"del", s.scope.StockKey()},
			[]any{"eval", "return 1", "0"}, []any{"publish", s.scope.EventsChannel(), "available"}, []any{"pexpireat", s.scope.StockKey(), "1"})
	})
}

// TestDaemonRole runs every script of the daemon and what its probes ask; the
// daemon's own tests run under this user too (TestSlowUnderACL).
func TestDaemonRole(t *testing.T) {
	onEach(t, func(t *testing.T, s *shop) {
		t.Helper()
		s.daemonScripts(s.as("seckill-daemon"), s.gateway())
		settings := config.Default().Redis
		settings.Addrs, settings.Username, settings.Password = s.target.Addrs, "seckill-daemon"+s.suffix, password
		prober, err := redisstore.NewProber(settings)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = prober.Close() }()
		for _, n := range prober.Nodes(t.Context(), redisstore.Vital) {
			if n.Err != nil || len(n.Refused) > 0 {
				t.Errorf("%s: %v, refused %v", n.Addr, n.Err, n.Refused)
			}
		}
		clients, err := redisstore.Open(t.Context(), settings)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = clients.Close() }()
		store, err := redisstore.New(clients, 10*time.Second)
		if err != nil {
			t.Fatal(err)
		}
		for _, k := range store.KeySizes(t.Context(), []reservation.Scope{s.scope}) {
			if k.Err != nil || k.Requests() < 3 || k.ShardBytes == 0 {
				t.Errorf("sizes: %+v", k)
			}
		}
		if err := store.RaiseVersion(t.Context(), reservation.CurrentVersionKey(s.scope.ActivityID), 1, time.Now().Add(time.Hour)); err != nil {
			t.Error(err)
		}
		if err := store.SetSighting(t.Context(), "test"+s.suffix, "x"); err != nil {
			t.Error(err)
		}
		if denied := s.denied("seckill-daemon"); len(denied) > 0 {
			t.Errorf("denied: %v", denied)
		}
		s.mayNot("seckill-daemon", []any{"set", "seckill:other", "1"}, []any{"publish", "other", "x"}, []any{"rename", s.scope.StockKey(), s.scope.MetaKey()})
		for _, n := range prober.Nodes(t.Context(), redisstore.Full) { // what is not shown to it is said, and no more
			if n.Role == probe.RoleMaster && (n.Settings == nil || n.Settings.AllRights || n.Refused["CONFIG GET"] == nil) {
				t.Errorf("%s: %+v, refused %v", n.Addr, n.Settings, n.Refused)
			}
		}
	})
}

// daemonScripts runs every script of the daemon, each to its last write.
func (s *shop) daemonScripts(c redis.UniversalClient, g *client.Gateway) {
	s.t.Helper()
	now, scope := time.Now().UnixMilli(), s.scope
	released, stays, orphan := s.sell(g, "u1"), s.sell(g, "u2"), s.sell(g, "u3")
	if err := s.admin.Del(s.t.Context(), scope.ReservationKey(orphan.ID)).Err(); err != nil {
		s.t.Fatal(err)
	}
	status := func(id string, want reservation.Status) {
		s.t.Helper()
		if got := s.admin.HGet(s.t.Context(), scope.ReservationKey(id), "status").Val(); got != string(want) {
			s.t.Errorf("%s is %s, want %s", id, got, want)
		}
	}
	run := func(add func(b *lua.Batch) func() error) { s.t.Helper(); s.batch(c, add) }
	lost := reservation.NewID(s.sale.Secret, scope.ActivityID, scope.SKUID, "u9", "q-u9")

	run(func(b *lua.Batch) func() error { return get(b.Snapshot(scope)) })
	run(func(b *lua.Batch) func() error {
		return get(b.RecordSend(scope, lua.RecordSendArgs{ReservationID: stays.ID, Expected: reservation.StatusReserved, Kind: lua.SendFirst}))
	})
	run(func(b *lua.Batch) func() error {
		return get(b.Transition(scope, lua.TransitionArgs{ReservationID: stays.ID, Target: reservation.StatusSendUnknown, NextRetryMS: now + 1000}))
	})
	run(func(b *lua.Batch) func() error {
		return get(b.Defer(scope, lua.DeferArgs{ReservationID: stays.ID, Index: reservation.SendPending, Expected: reservation.StatusSendUnknown, NextMS: now + 60_000}))
	})
	run(func(b *lua.Batch) func() error {
		return get(b.MarkUser(scope, lua.MarkUserArgs{ReservationID: stays.ID, UserID: "u2", Seen: "other"}))
	})
	run(func(b *lua.Batch) func() error {
		return get(b.Transition(scope, lua.TransitionArgs{ReservationID: released.ID, Target: reservation.StatusReleasePending}))
	})
	run(func(b *lua.Batch) func() error {
		return get(b.Reindex(scope, lua.ReindexArgs{ReservationID: released.ID}))
	})
	run(func(b *lua.Batch) func() error {
		return get(b.Compensate(scope, lua.CompensateArgs{ReservationID: released.ID, UserID: "u1", Reason: "test"}))
	})
	status(released.ID, reservation.StatusReleased)
	run(func(b *lua.Batch) func() error {
		return get(b.Unindex(scope, lua.UnindexArgs{ReservationID: released.ID}))
	})
	run(func(b *lua.Batch) func() error {
		return get(b.AdoptOrphan(scope, lua.AdoptOrphanArgs{
			ReservationID: orphan.ID, RequestID: "q-u3", UserID: "u3", MessageID: reservation.MessageID(orphan.ID), SchemaVersion: 1,
		}))
	})
	status(orphan.ID, reservation.StatusReleasePending)
	run(func(b *lua.Batch) func() error {
		return get(b.Confirm(scope, lua.ConfirmArgs{ReservationID: orphan.ID, OrderID: "o3"}))
	})
	status(orphan.ID, reservation.StatusOrderCreated)
	run(func(b *lua.Batch) func() error {
		return get(b.Restore(scope, lua.RestoreArgs{
			ReservationID: lost, RequestID: "q-u9", UserID: "u9", MessageID: reservation.MessageID(lost), OrderID: "o9",
			ReservedAtMS: now, ExpiresAtMS: now + 60_000, SchemaVersion: 1, Mode: lua.RestoreActive,
		}))
	})
	status(lost, reservation.StatusOrderCreated)
	run(func(b *lua.Batch) func() error {
		return get(b.TransferOut(scope, lua.TransferOutArgs{TransferID: "t1", Target: 5, Mode: lua.OutWhole}))
	})
	run(func(b *lua.Batch) func() error {
		return get(b.TransferIn(scope, lua.TransferInArgs{TransferID: "t2", Target: 5, Mode: lua.InRaise}))
	})
	run(func(b *lua.Batch) func() error { return get(b.TransferRead(scope, []string{"t1", "t2"})) })
	run(func(b *lua.Batch) func() error {
		return get(b.SetState(scope, lua.SetStateArgs{Expected: lua.StateActive, Target: lua.StatePaused}))
	})
	values := s.admin.HMGet(s.t.Context(), scope.StockKey(), "initial", "available", "reserved", "released_total").Val()
	text := func(i int) string { v, _ := values[i].(string); return v }
	run(func(b *lua.Batch) func() error {
		return get(b.Recount(scope, lua.RecountArgs{
			Seen: lua.StockText{Initial: text(0), Available: text(1), Reserved: text(2), ReleasedTotal: text(3)}, Initial: 3, Reserved: 3,
		}))
	})
	if s.admin.HGet(s.t.Context(), scope.StockKey(), "initial").Val() != "3" {
		s.t.Error("the recount was not made")
	}
	other := scope
	other.Bucket = 1
	run(func(b *lua.Batch) func() error {
		return get(b.Provision(other, lua.ProvisionArgs{
			State: lua.StatePrepared, StartsAtMS: now, EndsAtMS: now + 3_600_000, RetentionUntilMS: now + 7_200_000, SchemaVersion: 1, Initial: 10,
		}))
	})
}
