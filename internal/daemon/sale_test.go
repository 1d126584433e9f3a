package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// sale is one scope with its own database and topic on real services, and the
// hands of the test in each of them.
type sale struct {
	t      *testing.T
	stack  *devstack.Stack
	scope  reservation.Scope
	config config.Config
	redis  redis.UniversalClient
	runner *lua.Runner
	db     *pgxpool.Pool // as the superuser
	users  int

	sending *daemon.Daemon // of [sale.sender]
}

// newSale prepares a sale of 1,000 units on the stack.
func newSale(t *testing.T, stack *devstack.Stack, change ...func(*config.Config)) *sale {
	t.Helper()
	s := &sale{t: t, stack: stack, scope: stacktest.Scope(t)}
	url := stacktest.Database(t, stack)
	topic, group := stacktest.Topic(t, stack, 2)
	c := config.Default()
	c.Mode = config.ModeAct
	c.Redis.Addrs = []string{stack.Redis().Addr()}
	c.Postgres.URL = stacktest.LoginURL(t, stack, url, "seckill_daemon")
	c.RocketMQ.NameServers = []string{stack.NameServer().Addr()}
	c.RocketMQ.Topic, c.RocketMQ.ConsumerGroup = topic, group
	c.Scanner.SendGrace = 100 * time.Millisecond
	c.Fencer.Settle = 100 * time.Millisecond
	c.Fencer.Recheck = 100 * time.Millisecond
	c.Fencer.BackoffMin, c.Fencer.BackoffMax = 50*time.Millisecond, 200*time.Millisecond
	c.Fencer.MaxRelease.Min = 1000
	c.Admin.Listen = "127.0.0.1:0"
	// What the workers do is looked at without what reconciliation repairs.
	c.Reconcile.Quick, c.Reconcile.Deep, c.Reconcile.Repair = "", "", config.RepairOff
	c.Reconcile.Settle = 50 * time.Millisecond
	for _, f := range change {
		f(&c)
	}
	limitRights(t, &c)
	s.config = c

	s.redis = redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{Addrs: c.Redis.Addrs, ReadTimeout: 5 * time.Second}))
	t.Cleanup(func() { _ = s.redis.Close() })
	var err error
	if s.runner, err = lua.NewRunner(s.redis); err != nil {
		t.Fatal(err)
	}
	if s.db, err = pgxpool.New(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.db.Close)
	s.register(1000)
	return s
}

// register creates the scope in the registry, the shop and Redis.
func (s *sale) register(total int64) {
	s.t.Helper()
	now := time.Now().Truncate(time.Millisecond)
	store, err := pgstore.Open(s.t.Context(), pgstore.Config{URL: s.db.Config().ConnString()})
	if err != nil {
		s.t.Fatal(err)
	}
	defer store.Close()
	v := pgstore.Version{
		ActivityID: s.scope.ActivityID, SKUID: s.scope.SKUID, Version: s.scope.Version, Total: total, Buckets: 1,
		StartsAt: now.Add(-time.Minute), EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(2 * time.Hour),
	}
	bucket := pgstore.Bucket{ID: 0, Initial: total, State: pgstore.ScopeActive, Confirmed: true}
	if err := store.RegisterVersion(s.t.Context(), v, []pgstore.Bucket{bucket}, "test"); err != nil {
		s.t.Fatal(err)
	}
	s.exec(`INSERT INTO shop.stock (activity_id, sku_id, activity_version, total) VALUES ($1, $2, $3, $4)`,
		s.scope.ActivityID, s.scope.SKUID, s.scope.Version, total)
	b := s.runner.Batch()
	r := b.Provision(s.scope, lua.ProvisionArgs{
		State: lua.StateActive, StartsAtMS: v.StartsAt.UnixMilli(), EndsAtMS: v.EndsAt.UnixMilli(),
		RetentionUntilMS: v.RetentionUntil.UnixMilli(), SchemaVersion: 1, Initial: total,
	})
	s.run(b)
	if reply, err := r.Get(); err != nil || reply.Code != lua.ProvisionCreated {
		s.t.Fatalf("provision: %+v, %v", reply, err)
	}
}

// open puts a daemon together.
func (s *sale) open(change ...func(*daemon.Options)) *daemon.Daemon {
	s.t.Helper()
	o := daemon.Options{Config: s.config, Logger: slog.New(slog.DiscardHandler), Metrics: observe.NewMetrics("test")}
	for _, f := range change {
		f(&o)
	}
	d, err := daemon.Open(s.t.Context(), o)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { d.Close(context.WithoutCancel(s.t.Context())) })
	return d
}

func (s *sale) run(b *lua.Batch) {
	s.t.Helper()
	if err := b.Run(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

func (s *sale) exec(sql string, args ...any) {
	s.t.Helper()
	if _, err := s.db.Exec(s.t.Context(), sql, args...); err != nil {
		s.t.Fatalf("%s: %v", sql, err)
	}
}

// reserve makes a reservation that expires after ttl.
func (s *sale) reserve(ttl time.Duration) string {
	s.t.Helper()
	s.users++
	user, request := fmt.Sprint("u", s.users), fmt.Sprint("q", s.users)
	id := reservation.NewID([]byte("secret"), s.scope.ActivityID, s.scope.SKUID, user, request)
	b := s.runner.Batch()
	r := b.Reserve(s.scope, lua.ReserveArgs{
		RequestID: request, ReservationID: id, UserID: user, TTLMS: ttl.Milliseconds(), SchemaVersion: 1,
		MessageID: reservation.MessageID(id),
	})
	s.run(b)
	if reply, err := r.Get(); err != nil || reply.Code != lua.ReserveAccepted {
		s.t.Fatalf("reserve: %+v, %v", reply, err)
	}
	return id
}

// expired makes a reservation that is due, walked along the statuses.
func (s *sale) expired(walk ...reservation.Status) string {
	s.t.Helper()
	id := s.reserve(time.Millisecond)
	s.walk(id, walk...)
	return id
}

func (s *sale) walk(id string, statuses ...reservation.Status) {
	s.t.Helper()
	for _, to := range statuses {
		b := s.runner.Batch()
		r := b.Transition(s.scope, lua.TransitionArgs{ReservationID: id, Target: to})
		s.run(b)
		if reply, err := r.Get(); err != nil || reply.Code != lua.TransitionUpdated {
			s.t.Fatalf("transition of %s to %s: %+v, %v", id, to, reply, err)
		}
	}
}

// hash is the reservation's hash.
func (s *sale) hash(id string) map[string]string {
	s.t.Helper()
	h, err := s.redis.HGetAll(s.t.Context(), s.scope.ReservationKey(id)).Result()
	if err != nil {
		s.t.Fatal(err)
	}
	return h
}

func (s *sale) status(id string) reservation.Status {
	s.t.Helper()
	return reservation.Status(s.hash(id)["status"])
}

// order creates the reservation's order as an unmodified consumer does.
func (s *sale) order(id string) error {
	h := s.hash(id)
	_, err := s.db.Exec(s.t.Context(), `
		WITH created AS (
			INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
			VALUES ($1, $2, $3, $4, $5, $6, $7, $8) RETURNING 1)
		UPDATE shop.stock SET sold = sold + (SELECT count(*) FROM created)
		WHERE activity_id = $4 AND sku_id = $5 AND activity_version = $6`,
		"o-"+id, id, h["request_id"], s.scope.ActivityID, s.scope.SKUID, s.scope.Version, s.scope.Bucket, h["user_id"])
	return err
}

func (s *sale) mustOrder(id string) {
	s.t.Helper()
	if err := s.order(id); err != nil {
		s.t.Fatal(err)
	}
}

// claim is the outcome of the reservation's claim, or "".
func (s *sale) claim(id string) reservation.Outcome {
	s.t.Helper()
	var outcome reservation.Outcome
	err := s.db.QueryRow(s.t.Context(), `SELECT outcome FROM seckill.reservation_claim WHERE reservation_id = $1`, id).Scan(&outcome)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		s.t.Fatal(err)
	}
	return outcome
}

func fencedOff(err error) bool {
	var pe *pgconn.PgError
	return errors.As(err, &pe) && pe.Code == "SK001"
}

// stock is initial, available, reserved and released_total.
func (s *sale) stock() [4]int64 {
	s.t.Helper()
	values, err := s.redis.HMGet(s.t.Context(), s.scope.StockKey(), "initial", "available", "reserved", "released_total").Result()
	if err != nil {
		s.t.Fatal(err)
	}
	var numbers [4]int64
	for i, v := range values {
		text, _ := v.(string)
		if numbers[i], err = reservation.ParseNumber(text); err != nil {
			s.t.Fatalf("stock %v: %v", values, err)
		}
	}
	return numbers
}

// tasks counts the open tasks by kind.
func (s *sale) tasks() map[string]int64 {
	s.t.Helper()
	rows, err := s.db.Query(s.t.Context(), `SELECT kind, sum(count)::bigint FROM seckill.manual_task WHERE state = 'open' GROUP BY kind`)
	if err != nil {
		s.t.Fatal(err)
	}
	tasks := map[string]int64{}
	var kind string
	var n int64
	if _, err := pgx.ForEachRow(rows, []any{&kind, &n}, func() error { tasks[kind] = n; return nil }); err != nil {
		s.t.Fatal(err)
	}
	return tasks
}

// holdsPromises checks S1 and S2 of protocol.md for the whole scope, straight
// from Redis and PostgreSQL: the ids are all that were ever reserved.
func (s *sale) holdsPromises(ids []string) {
	s.t.Helper()
	stock := s.stock()
	if stock[0] != stock[1]+stock[2] {
		s.t.Errorf("initial %d is not available %d + reserved %d", stock[0], stock[1], stock[2])
	}
	var held, released int64
	for _, id := range ids {
		switch status := s.status(id); status {
		case reservation.StatusReleased:
			released++
			if claim := s.claim(id); claim != reservation.OutcomeFenced && claim != reservation.OutcomeRejected {
				s.t.Errorf("S1: %s is RELEASED and its claim is %q", id, claim)
			}
		default:
			held++
		}
	}
	if stock[2] != held || stock[3] != released {
		s.t.Errorf("S2: reserved %d, released_total %d; want %d and %d", stock[2], stock[3], held, released)
	}
}

// due waits until what was deferred a moment ago is due again.
func due() { time.Sleep(250 * time.Millisecond) }

func z(member string, score float64) redis.Z { return redis.Z{Member: member, Score: score} }
