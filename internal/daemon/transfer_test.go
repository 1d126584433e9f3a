package daemon_test

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/reconciliation"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// bucketed is a second version of the sale's SKU, of several buckets, with a
// gateway before it.
type bucketed struct {
	*sale
	activity upstream.Activity
	gateway  *upstream.Gateway
	postgres *pgstore.Store
	redis    *redisstore.Store
}

func (s *sale) buckets(buckets, total int64) *bucketed {
	s.t.Helper()
	b := &bucketed{sale: s, activity: upstream.Activity{
		ActivityID: s.scope.ActivityID, SKUID: s.scope.SKUID, Version: 2, Buckets: buckets, Total: total,
	}}
	var err error
	if b.postgres, err = pgstore.Open(s.t.Context(), pgstore.Config{URL: s.config.Postgres.URL}); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(b.postgres.Close)
	clients, err := redisstore.Open(s.t.Context(), s.config.Redis)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = clients.Close() })
	if b.redis, err = redisstore.New(clients, 5*time.Second); err != nil {
		s.t.Fatal(err)
	}
	now := time.Now().Truncate(time.Millisecond)
	v := pgstore.Version{
		ActivityID: b.activity.ActivityID, SKUID: b.activity.SKUID, Version: 2, Total: total, Buckets: buckets,
		StartsAt: now.Add(-time.Minute), EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(2 * time.Hour),
	}
	var rows []pgstore.Bucket
	for id, units := range reservation.Allocation(total, buckets) {
		rows = append(rows, pgstore.Bucket{ID: int64(id), Initial: units, State: pgstore.ScopeActive, Confirmed: true})
	}
	if err := b.postgres.RegisterVersion(s.t.Context(), v, rows, "test"); err != nil {
		s.t.Fatal(err)
	}
	if err := b.activity.Open(s.t.Context(), s.runner, s.db, time.Hour); err != nil {
		s.t.Fatal(err)
	}
	b.open()
	return b
}

// open puts the gateway before the version.
func (b *bucketed) open() {
	b.t.Helper()
	sender, err := rocketmq.NewSender(rocketmq.Config{
		NameServers: b.config.RocketMQ.NameServers, Topic: b.config.RocketMQ.Topic, ConsumerGroup: b.config.RocketMQ.ConsumerGroup, SendTimeout: 10 * time.Second,
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(b.t.Context()), 20*time.Second)
		defer cancel()
		if err := sender.Close(ctx); err != nil {
			b.t.Error(err)
		}
	})
	gatewayRedis := redis.NewUniversalClient(client.RedisOptions(&redis.UniversalOptions{Addrs: b.config.Redis.Addrs, ReadTimeout: 5 * time.Second}))
	b.t.Cleanup(func() { _ = gatewayRedis.Close() })
	b.gateway = &upstream.Gateway{
		Activity: b.activity, Secret: []byte("secret"), TTL: 3 * time.Second, Timeout: 10 * time.Second, Redis: gatewayRedis, Sender: sender,
	}
}

// fans are n users who all belong to one bucket.
func (b *bucketed) fans(bucket int64, n int) []string {
	var users []string
	for i := 0; len(users) < n; i++ {
		if user := fmt.Sprint("fan-", i); b.activity.ScopeOf(user).Bucket == bucket {
			users = append(users, user)
		}
	}
	return users
}

// click lets the users ask, each by a request of its own, and returns those who
// got nothing.
func (b *bucketed) click(users []string, turn int) (left []string) {
	b.t.Helper()
	requests := make([]upstream.Request, len(users))
	for i, user := range users {
		requests[i] = upstream.Request{UserID: user, RequestID: fmt.Sprintf("q-%d-%s", turn, user)}
	}
	var accepted []reservation.Reservation
	for i, answer := range b.gateway.Reserve(b.t.Context(), requests) {
		switch {
		case answer.Accepted():
			accepted = append(accepted, answer.Reservation)
		case answer.Err == nil && answer.Reply.Code == lua.ReserveSoldOut:
			left = append(left, users[i])
		default:
			b.t.Fatalf("user %s: %+v", users[i], answer)
		}
	}
	if _, err := b.gateway.DeliverAll(b.t.Context(), upstream.Faults{}, upstream.Delays{}, accepted); err != nil {
		b.t.Fatal(err)
	}
	return left
}

// consistent compares everything of the version.
func (b *bucketed) consistent() error {
	r := reconciliation.Reconciler(b.redis, b.postgres)
	r.Nodes, r.Server = nil, nil // the test's servers are as they are
	version := int64(2)
	report, err := r.Run(b.t.Context(), reconcile.Options{
		Filter: reconcile.Filter{ActivityID: b.activity.ActivityID, Version: &version}, Deep: true, Settle: 50 * time.Millisecond,
	})
	if err == nil && report.Verdict != reconcile.VerdictConsistent {
		err = fmt.Errorf("%s: %+v %+v", report.Verdict, report.Findings, report.Incomplete)
	}
	return err
}

func (b *bucketed) orders() (n int64) {
	b.t.Helper()
	if err := b.db.QueryRow(b.t.Context(), `SELECT count(*) FROM shop.orders WHERE activity_id = $1 AND activity_version = 2`, b.activity.ActivityID).Scan(&n); err != nil {
		b.t.Fatal(err)
	}
	return n
}

// Everybody who wants a unit belongs to one of four buckets. Without rebalancing
// three quarters of the units would stay where nobody asks for them; with it the
// sale ends with an order for each unit, and none for more.
func TestLastUnitsOfASkewedSaleAreSold(t *testing.T) {
	t.Parallel()
	const total = 120
	s := newSale(t, stacktest.Shared(t), hurried, func(c *config.Config) {
		c.Transfer.Every = 50 * time.Millisecond
		c.Rebalance.Enabled, c.Rebalance.Every, c.Rebalance.CoolDown = true, 100*time.Millisecond, 0
	})
	b := s.buckets(4, total)
	s.subscribe(upstream.Subscription{}, nil)
	waiting := b.click(b.fans(2, total+30), 0)
	if len(waiting) != 120 {
		t.Fatalf("%d users of a bucket of 30 units got none, want 120", len(waiting))
	}
	s.serve()
	turn := 0
	s.eventually(2*time.Minute, func() error {
		turn++
		if waiting = b.click(waiting, turn); len(waiting) > 30 {
			return fmt.Errorf("%d users still wait after %d turns", len(waiting), turn)
		}
		return nil
	})
	s.eventually(2*time.Minute, func() error {
		if n := b.orders(); n != total {
			return fmt.Errorf("%d orders", n)
		}
		return b.consistent()
	})
	if got := b.click(waiting, turn+1); len(got) != 30 {
		t.Errorf("%d users got a unit that is not there", 30-len(got))
	}
	rows, err := b.postgres.Transfers(t.Context(), pgstore.TransferFilter{ActivityID: b.activity.ActivityID})
	if err != nil || len(rows) == 0 {
		t.Fatalf("%d transfers, %v", len(rows), err)
	}
	var units int64
	for _, row := range rows {
		if row.State != transfer.Done && row.State != transfer.Cancelled {
			t.Errorf("%+v", row)
		}
		if row.State == transfer.Done {
			units += row.Amount
		}
	}
	if units < 90 {
		t.Errorf("%d units were moved, want the 90 of the other buckets", units)
	}
	t.Logf("%d transfers in %d turns", len(rows), turn)
}

// Units that a person's transfer has on its way are no difference for anybody,
// whatever instance drives them: two daemons and a command at once.
func TestTwoWorkersDriveOneTransfer(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), hurried)
	b := s.buckets(2, 200)
	drift := &reconcile.Reconciler{Registry: b.postgres, Stocks: b.redis, Orders: b.postgres}
	parts := reconciliation.NewTransfers(b.redis, b.postgres, drift, "test")
	key := transfer.Key{ActivityID: b.activity.ActivityID, SKUID: b.activity.SKUID, Version: 2}
	for n := range int64(20) {
		row, _, err := parts.Planner.Plan(t.Context(), transfer.Request{
			Key: key, Donor: n % 2, Receiver: (n + 1) % 2, Amount: 7, Reason: "test", Actor: "test",
		})
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error)
		for range 3 {
			go func() {
				_, err := parts.Worker.Drive(t.Context(), transfer.FilterOf(key))
				ended <- err
			}()
		}
		for range 3 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
		if row, err = b.postgres.Transfer(t.Context(), row.ID); err != nil || row.State != transfer.Done {
			t.Fatalf("%+v, %v", row, err)
		}
	}
	if err := b.consistent(); err != nil {
		t.Error(err)
	}
	for bucket, snapshot := range b.redis.Snapshots(t.Context(), b.activity.Scopes()) {
		if snapshot.Initial != 100 || snapshot.Available != 100 {
			t.Errorf("bucket %d: %+v", bucket, snapshot)
		}
	}
}
