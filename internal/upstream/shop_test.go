package upstream_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// shop is one activity of a test: its own keys, database, topic and group.
type shop struct {
	t        *testing.T
	stack    *devstack.Stack
	activity upstream.Activity
	gateway  *upstream.Gateway
	sender   *rocketmq.Sender
	client   redis.UniversalClient
	owner    *pgxpool.Pool // sees everything
	consumer *pgxpool.Pool // as shop_consumer does
	topic    string
	group    string
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func target(t *testing.T, name string) stacktest.RedisTarget {
	t.Helper()
	for _, candidate := range stacktest.RedisTargets(t) {
		if candidate.Name == name {
			return candidate
		}
	}
	t.Fatalf("no Redis target %s", name)
	return stacktest.RedisTarget{}
}

// connect makes a client that a gateway accepts.
func connect(t *testing.T, timeout time.Duration, addrs ...string) redis.UniversalClient {
	t.Helper()
	c := redis.NewUniversalClient(client.RedisOptions(&redis.UniversalOptions{
		Addrs: addrs, IsClusterMode: len(addrs) > 1, ReadTimeout: timeout, WriteTimeout: timeout,
	}))
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func runner(t *testing.T, c redis.UniversalClient) *lua.Runner {
	t.Helper()
	r, err := lua.NewRunner(c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// open starts an activity of so many units on the given Redis.
func open(t *testing.T, redisName string, buckets, total int64) *shop {
	t.Helper()
	stack := stacktest.Shared(t)
	s := &shop{t: t, stack: stack, client: connect(t, 5*time.Second, target(t, redisName).Addrs...)}
	scope := stacktest.Scope(t)
	s.activity = upstream.Activity{ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: 1, Buckets: buckets, Total: total}
	s.topic, s.group = stacktest.Topic(t, stack, 4)
	url := stacktest.Database(t, stack)
	s.owner = pool(t, url)
	s.consumer = pool(t, stacktest.LoginURL(t, stack, url, "seckill_consumer"))
	var err error
	s.sender, err = rocketmq.NewSender(rocketmq.Config{
		NameServers: []string{stack.NameServer().Addr()}, Topic: s.topic, ConsumerGroup: s.group, SendTimeout: 10 * time.Second,
	}, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
		defer cancel()
		if err := s.sender.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	s.gateway = &upstream.Gateway{
		Activity: s.activity, Secret: []byte("a secret of the tests"), TTL: time.Second, Timeout: 10 * time.Second,
		Redis: s.client, Sender: s.sender,
	}
	if err := s.activity.Open(t.Context(), runner(t, s.client), s.owner, time.Hour); err != nil {
		t.Fatal(err)
	}
	return s
}

func pool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	p, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// order is a consumer of the shop; start lets it take messages from the broker.
func (s *shop) order(kind upstream.Kind, faults upstream.Faults) *upstream.Consumer {
	return &upstream.Consumer{
		Kind: kind, DB: s.consumer, Redis: s.client, FaultOf: faults.Of, Timeout: 20 * time.Second,
	}
}

func (s *shop) start(consumers ...*upstream.Consumer) {
	s.t.Helper()
	subscriber, err := upstream.Subscribe(upstream.Subscription{
		NameServers: []string{s.stack.NameServer().Addr()}, Topic: s.topic, Group: s.group,
		Goroutines: 8, MaxAttempts: 1, Logger: quiet(),
	}, consumers...)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), 20*time.Second)
		defer cancel()
		if err := subscriber.Stop(ctx); err != nil {
			s.t.Error(err)
		}
	})
}

// reserve makes one request for each user and wants all of them accepted.
func (s *shop) reserve(users ...string) []reservation.Reservation {
	s.t.Helper()
	requests := make([]upstream.Request, len(users))
	for i, user := range users {
		requests[i] = upstream.Request{UserID: user, RequestID: "q-" + user}
	}
	var made []reservation.Reservation
	for _, a := range s.gateway.Reserve(s.t.Context(), requests) {
		if !a.Accepted() {
			s.t.Fatalf("request of %s: %+v, %v", a.Request.UserID, a.Reply, a.Err)
		}
		made = append(made, a.Reservation)
	}
	return made
}

// found is where one reservation is.
type found struct {
	Status   reservation.Status // "" when the hash is gone
	Claim    string             // outcome, "" when there is none
	Orders   int
	Messages int // in the topic, copies included
	Dead     int // in the dead-letter topic
	Pending  bool
	Expiry   bool
	Position bool
}

// look finds all reservations at once.
func (s *shop) look(rs []reservation.Reservation) map[string]found {
	s.t.Helper()
	ctx := s.t.Context()
	messages, dead := s.messages(s.topic), s.messages("%DLQ%"+s.group)
	all := map[string]found{}
	for _, r := range rs {
		scope := s.activity.Scope(r.Bucket)
		fields, err := s.client.HGetAll(ctx, scope.ReservationKey(r.ID)).Result()
		if err != nil {
			s.t.Fatal(err)
		}
		f := found{
			Status: reservation.Status(fields["status"]), Position: fields["mq_position"] != "",
			Messages: messages[r.MessageID], Dead: dead[r.MessageID],
			Pending: s.indexed(scope, reservation.SendPending, r.ID), Expiry: s.indexed(scope, reservation.ReservationExpiry, r.ID),
		}
		err = s.owner.QueryRow(ctx, `SELECT
			coalesce((SELECT outcome FROM seckill.reservation_claim WHERE reservation_id = $1), ''),
			(SELECT count(*) FROM shop.orders WHERE reservation_id = $1)`, r.ID).Scan(&f.Claim, &f.Orders)
		if err != nil {
			s.t.Fatal(err)
		}
		all[r.ID] = f
	}
	return all
}

func (s *shop) indexed(scope reservation.Scope, index reservation.Index, id string) bool {
	s.t.Helper()
	err := s.client.ZScore(s.t.Context(), scope.IndexKey(index), id).Err()
	if err != nil && !errors.Is(err, redis.Nil) {
		s.t.Fatal(err)
	}
	return err == nil
}

// messages counts the copies of each message in a topic of the stack.
func (s *shop) messages(topic string) map[string]int {
	s.t.Helper()
	counts := map[string]int{}
	for _, broker := range s.stack.Brokers() {
		s.messagesOn(broker.Addr(), topic, counts)
	}
	return counts
}

func (s *shop) messagesOn(broker, topic string, counts map[string]int) {
	s.t.Helper()
	peer := remoting.NewPeer(broker, remoting.Options{DialTimeout: 5 * time.Second, CallTimeout: 20 * time.Second})
	defer peer.Close()
	stats, err := peer.TopicStats(s.t.Context(), topic)
	if remoting.IsCode(err, remoting.TopicNotExist) {
		return
	}
	if err != nil {
		s.t.Fatal(err)
	}
	for queue, r := range stats {
		for offset := r.Min; offset < r.Max; {
			pulled, err := peer.Pull(s.t.Context(), topic, queue, offset, 32)
			if err != nil {
				s.t.Fatal(err)
			}
			if len(pulled.Records) == 0 {
				break
			}
			for _, record := range pulled.Records {
				for key := range record.Keys() {
					counts[key]++
				}
			}
			offset = pulled.NextBegin
		}
	}
}

// stock is what both sides say of all buckets.
type stock struct{ Available, Reserved, Sold, Orders int64 }

func (s *shop) stock() stock {
	s.t.Helper()
	var sum stock
	for _, scope := range s.activity.Scopes() {
		fields, err := s.client.HMGet(s.t.Context(), scope.StockKey(), "available", "reserved").Result()
		if err != nil {
			s.t.Fatal(err)
		}
		for i, into := range []*int64{&sum.Available, &sum.Reserved} {
			text, _ := fields[i].(string)
			n, err := reservation.ParseNumber(text)
			if err != nil {
				s.t.Fatal(err)
			}
			*into += n
		}
	}
	err := s.owner.QueryRow(s.t.Context(), `SELECT sold, (SELECT count(*) FROM shop.orders WHERE activity_id = $1)
		FROM shop.stock WHERE activity_id = $1`, s.activity.ActivityID).Scan(&sum.Sold, &sum.Orders)
	if err != nil {
		s.t.Fatal(err)
	}
	return sum
}

// eventually waits for what happens elsewhere; want says what is still missing.
func eventually(t *testing.T, want func() string) {
	t.Helper()
	deadline := time.Now().Add(90 * time.Second)
	for {
		missing := want()
		if missing == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(missing)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// exec runs a statement as the database's owner.
func (s *shop) exec(sql string, args ...any) {
	s.t.Helper()
	if _, err := s.owner.Exec(s.t.Context(), sql, args...); err != nil {
		s.t.Fatal(err)
	}
}

// fence does what the daemon does before it releases.
func (s *shop) fence(r reservation.Reservation) {
	s.t.Helper()
	rows, err := s.owner.Query(s.t.Context(), `SELECT outcome, won FROM seckill.fence_reservations($1, 'test', $2)`,
		[]string{r.ID}, []string{s.activity.Scope(r.Bucket).Tag()})
	if err != nil {
		s.t.Fatal(err)
	}
	type answer struct {
		Outcome string
		Won     bool
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[answer])
	if err != nil || len(got) != 1 || got[0] != (answer{"FENCED", true}) {
		s.t.Fatalf("fence: %+v, %v", got, err)
	}
}

// unordered lists the reservations that have no order, for a failing test.
func (s *shop) unordered(sold []upstream.Sold) string {
	s.t.Helper()
	var rs []reservation.Reservation
	for _, one := range sold {
		rs = append(rs, one.Reservation)
	}
	var text strings.Builder
	got := s.look(rs)
	for _, one := range sold {
		if f := got[one.Reservation.ID]; f.Orders == 0 {
			fmt.Fprintf(&text, "%s %s: %+v\n", one.Reservation.ID, one.Fault, f)
		}
	}
	return text.String()
}
