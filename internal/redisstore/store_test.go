package redisstore_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// sale is one test's scopes on one of the four real Redis deployments.
type sale struct {
	t      *testing.T
	store  *redisstore.Store
	client redis.UniversalClient
	scopes []reservation.Scope
}

func onEveryRedis(t *testing.T, buckets int, test func(s sale)) {
	t.Helper()
	for _, target := range stacktest.RedisTargets(t) {
		t.Run(target.Name, func(t *testing.T) {
			t.Parallel()
			clients, err := redisstore.Open(t.Context(), config.Redis{
				Addrs: target.Addrs, Mode: config.RedisAuto, DialTimeout: time.Second, CommandTimeout: 5 * time.Second, PoolSize: 4,
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = clients.Close() })
			if _, clustered := clients.Mutating.(*redis.ClusterClient); clustered != target.Cluster {
				t.Fatalf("mode auto took %s for %T", target.Name, clients.Mutating)
			}
			store, err := redisstore.New(clients, 5*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			s := sale{t: t, store: store, client: target.Client(t)}
			scope := stacktest.Scope(t)
			for b := range buckets {
				scope.Bucket = int64(b)
				s.scopes = append(s.scopes, scope)
			}
			s.provision(1000)
			test(s)
		})
	}
}

func (s sale) provision(initial int64) {
	s.t.Helper()
	now := time.Now().UnixMilli()
	batch := s.store.Writer().Batch()
	var results []*lua.Result[lua.ProvisionReply]
	for _, scope := range s.scopes {
		results = append(results, batch.Provision(scope, lua.ProvisionArgs{
			State: lua.StateActive, StartsAtMS: now - 1000, EndsAtMS: now + 3_600_000, RetentionUntilMS: now + 7_200_000,
			SchemaVersion: 1, Initial: initial,
		}))
	}
	if err := batch.Run(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	for _, r := range results {
		if reply, err := r.Get(); err != nil || reply.Code != lua.ProvisionCreated {
			s.t.Fatalf("provision: %+v, %v", reply, err)
		}
	}
}

// reserve makes n reservations in the scope with an expiry already due.
func (s sale) reserve(scope reservation.Scope, n int) []string {
	s.t.Helper()
	batch := s.store.Writer().Batch()
	ids := make([]string, n)
	results := make([]*lua.Result[lua.ReserveReply], n)
	for i := range n {
		user, request := fmt.Sprint("u", i), fmt.Sprintf("q%d-%d", scope.Bucket, i)
		ids[i] = reservation.NewID([]byte("secret"), scope.ActivityID, scope.SKUID, user, request)
		results[i] = batch.Reserve(scope, lua.ReserveArgs{
			RequestID: request, ReservationID: ids[i], UserID: user, TTLMS: 1,
			SchemaVersion: 1, MessageID: reservation.MessageID(ids[i]),
		})
	}
	if err := batch.Run(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	for _, r := range results {
		if reply, err := r.Get(); err != nil || reply.Code != lua.ReserveAccepted {
			s.t.Fatalf("reserve: %+v, %v", reply, err)
		}
	}
	time.Sleep(5 * time.Millisecond) // past the TTL
	return ids
}

func (s sale) do(args ...any) {
	s.t.Helper()
	if err := s.client.Do(s.t.Context(), args...).Err(); err != nil {
		s.t.Fatal(err)
	}
}

// walk reads an index to its end in pages of limit.
func (s sale) walk(index reservation.Index, limit int) map[reservation.Scope][]string {
	s.t.Helper()
	met := map[reservation.Scope][]string{}
	walk := pass.Walk{Index: index}
	tally := pass.NewTally()
	walk.Each(s.t.Context(), s.store, s.scopes, pass.Limits{Batch: limit, Items: 1_000_000, Time: time.Minute}, tally,
		func(_ context.Context, pages []reservation.Page) {
			for _, p := range pages {
				for _, m := range p.Members {
					met[p.Scope] = append(met[p.Scope], m.ID)
				}
			}
		})
	if err := tally.Err(); err != nil || !tally.Complete {
		s.t.Fatalf("walk: complete %v, %v", tally.Complete, err)
	}
	return met
}

func TestPagesMeetEveryDueMemberOnce(t *testing.T) {
	onEveryRedis(t, 4, func(s sale) {
		t := s.t
		for i, scope := range s.scopes {
			want := s.reserve(scope, 40*i+7)
			// One score for all of them: more than a page holds.
			for _, id := range want {
				s.do("zadd", scope.IndexKey(reservation.ReservationExpiry), 1000, id)
			}
			if i == 3 {
				// Scores that no script writes must not hide their members.
				s.do("zadd", scope.IndexKey(reservation.ReservationExpiry), "-5.5", want[0])
				s.do("zadd", scope.IndexKey(reservation.ReservationExpiry), "-inf", want[1])
				s.do("zadd", scope.IndexKey(reservation.ReservationExpiry), "1000.5", want[2], "1000.25", want[3])
			}
		}
		for _, limit := range []int{3, 50, 1000} {
			met := s.walk(reservation.ReservationExpiry, limit)
			for i, scope := range s.scopes {
				got := met[scope]
				slices.Sort(got)
				if n := len(slices.Compact(slices.Clone(got))); n != 40*i+7 || len(got) != n {
					t.Errorf("pages of %d: bucket %d: met %d members, %d different, want %d once each", limit, i, len(got), n, 40*i+7)
				}
			}
		}
	})
}

func TestPagesShowWhatTheScriptsWrote(t *testing.T) {
	onEveryRedis(t, 1, func(s sale) {
		t := s.t
		scope := s.scopes[0]
		ids := s.reserve(scope, 3)
		s.do("del", scope.ReservationKey(ids[1]))
		s.do("set", scope.ReservationKey("not-a-hash"), "x")
		s.do("zadd", scope.IndexKey(reservation.ReservationExpiry), 5, "not-a-hash")
		reply := s.store.Pages(t.Context(), []pass.PageRequest{{Scope: scope, Index: reservation.ReservationExpiry, Limit: 10}})[0]
		if reply.Err != nil || !reply.End {
			t.Fatalf("end %v, %v", reply.End, reply.Err)
		}
		if skew := time.Since(time.UnixMilli(reply.NowMS)); skew.Abs() > time.Minute {
			t.Errorf("the page's time is %s off", skew)
		}
		byID := map[string]reservation.Member{}
		for _, m := range reply.Members {
			byID[m.ID] = m
		}
		if len(byID) != 4 {
			t.Fatalf("met %d members, want 4", len(byID))
		}
		whole := byID[ids[0]]
		if whole.Missing || whole.Malformed != nil || whole.Reservation.Status != reservation.StatusReserved ||
			whole.Reservation.UserID != "u0" || !whole.InPending || !whole.InExpiry ||
			whole.ExpiryScoreMS != whole.Reservation.ExpiresAtMS || whole.PendingScoreMS != whole.Reservation.ReservedAtMS {
			t.Errorf("a fresh reservation reads as %+v", whole)
		}
		if !byID[ids[1]].Missing {
			t.Errorf("a deleted hash reads as %+v", byID[ids[1]])
		}
		if m := byID["not-a-hash"].Malformed; m == nil || m.Cause != "not_a_hash" {
			t.Errorf("a string in the place of a hash reads as %+v", byID["not-a-hash"])
		}
	})
}

func TestPagesDoNotTakeABrokenIndexForAnEmptyOne(t *testing.T) {
	onEveryRedis(t, 2, func(s sale) {
		t := s.t
		s.reserve(s.scopes[1], 2)
		s.do("set", s.scopes[0].IndexKey(reservation.SendPending), "x")
		var requests []pass.PageRequest
		for _, scope := range s.scopes {
			requests = append(requests, pass.PageRequest{Scope: scope, Index: reservation.SendPending, Limit: 10})
		}
		replies := s.store.Pages(t.Context(), requests)
		if replies[0].Err == nil {
			t.Error("an index of the wrong type reads as an empty one")
		}
		if replies[1].Err != nil || len(replies[1].Members) != 2 {
			t.Errorf("its neighbour: %d members, %v; want 2", len(replies[1].Members), replies[1].Err)
		}
	})
}

func TestApply(t *testing.T) {
	onEveryRedis(t, 2, func(s sale) {
		t := s.t
		scope := s.scopes[0]
		ids := s.reserve(scope, 6)
		now := time.Now().UnixMilli()
		on := func(op reservation.Op, id string, change func(*reservation.Effect)) reservation.Effect {
			e := reservation.Effect{Op: op, Scope: scope, ID: id}
			if change != nil {
				change(&e)
			}
			return e
		}
		to := func(id string, status reservation.Status) reservation.Effect {
			return on(reservation.OpTransition, id, func(e *reservation.Effect) { e.To = status })
		}
		release := func(id, user string) reservation.Effect {
			return on(reservation.OpCompensate, id, func(e *reservation.Effect) { e.UserID, e.Reason = user, "test" })
		}
		type result struct {
			Result reservation.Result
			Code   string
		}
		for _, c := range []struct {
			name  string
			chain []reservation.Effect
			want  []result
		}{
			{"walk to an order", []reservation.Effect{to(ids[0], "ENQUEUED"), to(ids[0], "ORDER_CREATED")}, []result{{reservation.Changed, "UPDATED"}, {reservation.Changed, "UPDATED"}}},
			{"the same again", []reservation.Effect{to(ids[0], "ENQUEUED"), to(ids[0], "ORDER_CREATED")}, []result{{reservation.Refused, "ILLEGAL_TRANSITION"}, {reservation.Already, "IDEMPOTENT"}}},
			{"release", []reservation.Effect{to(ids[1], "RELEASE_PENDING"), release(ids[1], "u1")}, []result{{reservation.Changed, "UPDATED"}, {reservation.Changed, "RELEASED"}}},
			{"release twice", []reservation.Effect{release(ids[1], "u1")}, []result{{reservation.Already, "ALREADY_RELEASED"}}},
			{"release what is not pending", []reservation.Effect{release(ids[2], "u2")}, []result{{reservation.Refused, "NOT_COMPENSATABLE"}}},
			{"record a send", []reservation.Effect{on(reservation.OpRecordSend, ids[2], func(e *reservation.Effect) { e.Expected, e.Record = "RESERVED", reservation.RecordSend })}, []result{{reservation.Changed, "RECORDED"}}},
			{"record a send of another status", []reservation.Effect{on(reservation.OpRecordSend, ids[2], func(e *reservation.Effect) { e.Expected, e.Record = "ENQUEUED", reservation.RecordSend })}, []result{{reservation.Refused, "STATUS_CHANGED"}}},
			{"defer", []reservation.Effect{on(reservation.OpDefer, ids[3], func(e *reservation.Effect) {
				e.Index, e.Expected, e.AtMS = reservation.ReservationExpiry, "RESERVED", now+60_000
			})}, []result{{reservation.Changed, "MOVED"}}},
			{"confirm what is not releasing", []reservation.Effect{on(reservation.OpConfirm, ids[4], nil)}, []result{{reservation.Refused, "NOT_CONFIRMABLE"}}},
			{"confirm", []reservation.Effect{to(ids[4], "RELEASE_PENDING"), on(reservation.OpConfirm, ids[4], func(e *reservation.Effect) { e.OrderID = "o4" })}, []result{{reservation.Changed, "UPDATED"}, {reservation.Changed, "CONFIRMED"}}},
			{"reindex what is indexed", []reservation.Effect{on(reservation.OpReindex, ids[5], nil)}, []result{{reservation.Already, "ALREADY_INDEXED"}}},
			{"unindex what is decided and gone", []reservation.Effect{on(reservation.OpUnindex, ids[0], nil)}, []result{{reservation.Already, "NOT_INDEXED"}}},
			{"nothing there", []reservation.Effect{to("nobody", "ENQUEUED")}, []result{{reservation.Refused, "NOT_FOUND"}}},
			{"no effect at all", nil, nil},
		} {
			applied := s.store.Apply(t.Context(), [][]reservation.Effect{c.chain})[0]
			var got []result
			for _, a := range applied {
				if a.Err != nil {
					t.Errorf("%s: %v", c.name, a.Err)
				}
				got = append(got, result{a.Result, a.Code})
			}
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("%s: %s", c.name, diff)
			}
		}
		snapshot := s.store.Snapshots(t.Context(), s.scopes[:1])[0]
		if snapshot.Err != nil || snapshot.Initial != 1000 || snapshot.Available != 995 || snapshot.Reserved != 5 || snapshot.ReleasedTotal != 1 {
			t.Errorf("6 reserved, 1 released: %+v, %v", snapshot.SnapshotReply, snapshot.Err)
		}
	})
}

func TestApplyIsolatesCorruptData(t *testing.T) {
	onEveryRedis(t, 1, func(s sale) {
		t := s.t
		scope := s.scopes[0]
		ids := s.reserve(scope, 3)
		s.do("del", scope.ReservationKey(ids[1]))
		s.do("set", scope.ReservationKey(ids[1]), "x")
		var chains [][]reservation.Effect
		for _, id := range ids {
			chains = append(chains, []reservation.Effect{{Op: reservation.OpTransition, Scope: scope, ID: id, To: reservation.StatusEnqueued}})
		}
		applied := s.store.Apply(t.Context(), chains)
		for i, want := range []reservation.Result{reservation.Changed, reservation.Refused, reservation.Changed} {
			if got := applied[i][0]; got.Result != want {
				t.Errorf("%d: result %d (%s, %v), want %d", i, got.Result, got.Code, got.Err, want)
			}
		}
		if got := applied[1][0]; got.Code != "WRONGDATA" || got.Err == nil {
			t.Errorf("corrupt data: code %s, %v", got.Code, got.Err)
		}
	})
}

func TestConfigured(t *testing.T) {
	onEveryRedis(t, 3, func(s sale) {
		t := s.t
		s.do("hdel", s.scopes[1].StockKey(), "reserved")
		s.do("hset", s.scopes[2].StockKey(), "available", "many")
		snapshots := s.store.Snapshots(t.Context(), s.scopes)
		if snapshots[0].Err != nil || !snapshots[0].Configured() {
			t.Errorf("a complete scope: %+v", snapshots[0])
		}
		if snapshots[1].Err != nil || snapshots[1].Configured() {
			t.Errorf("a missing number reads as one: %+v", snapshots[1])
		}
		if lua.Classify(snapshots[2].Err) != lua.ClassData {
			t.Errorf("a corrupt number: %v, want wrong data", snapshots[2].Err)
		}
	})
}

func TestPublishAvailable(t *testing.T) {
	onEveryRedis(t, 1, func(s sale) {
		t := s.t
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		sub := s.client.Subscribe(ctx, s.scopes[0].EventsChannel())
		defer func() { _ = sub.Close() }()
		if _, err := sub.Receive(ctx); err != nil {
			t.Fatal(err)
		}
		if err := s.store.PublishAvailable(ctx, s.scopes); err != nil {
			t.Fatal(err)
		}
		m, err := sub.ReceiveMessage(ctx)
		if err != nil || m.Payload != "available" {
			t.Errorf("got %+v, %v", m, err)
		}
	})
}

func TestUnreachable(t *testing.T) {
	c := config.Redis{Addrs: []string{"127.0.0.1:1"}, Mode: config.RedisAuto, DialTimeout: time.Second, CommandTimeout: time.Second, PoolSize: 2}
	if _, err := redisstore.Open(t.Context(), c); err == nil {
		t.Error("mode auto without a server: no error")
	}
	c.Mode = config.RedisStandalone
	clients, err := redisstore.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = clients.Close() }()
	if err := clients.Ping(t.Context()); err == nil {
		t.Error("a ping of nobody succeeds")
	}
	store, err := redisstore.New(clients, time.Second)
	if err != nil {
		t.Fatal(err)
	}
	scope := stacktest.Scope(t)
	if reply := store.Pages(t.Context(), []pass.PageRequest{{Scope: scope, Index: reservation.SendPending, Limit: 1}})[0]; reply.Err == nil || reply.End {
		t.Errorf("a page of nobody: %+v", reply)
	}
	applied := store.Apply(t.Context(), [][]reservation.Effect{{{Op: reservation.OpReindex, Scope: scope, ID: "r"}}})
	if got := applied[0][0]; got.Result != reservation.Failed || got.Err == nil {
		t.Errorf("an effect on nobody: %+v", got)
	}
}
