package reconcile_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sale is a version of a SKU on real services, and the hands of the test in
// each of them.
type sale struct {
	t      testing.TB
	scopes []reservation.Scope
	redis  redis.UniversalClient
	stocks *redisstore.Store
	orders *pgstore.Store
	db     *pgxpool.Pool // as the superuser
	users  int
	inTurn bool            // buckets in turn and not by the users' hashes: the same numbers in every run
	nodes  reconcile.Nodes // nil: the settings of Redis are not looked at
}

const initial = 1000 // units of each bucket

// newSale opens a sale over some buckets on the Redis servers named and the
// stack's PostgreSQL.
func newSale(tb testing.TB, stack *devstack.Stack, redisAddrs []string, buckets int64) *sale {
	tb.Helper()
	clients, err := redisstore.Open(tb.Context(), config.Redis{
		Addrs: redisAddrs, Mode: config.RedisAuto, DialTimeout: time.Second, CommandTimeout: 5 * time.Second, PoolSize: 4,
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = clients.Close() })
	s := &sale{t: tb, redis: clients.Reading}
	if s.stocks, err = redisstore.New(clients, 5*time.Second); err != nil {
		tb.Fatal(err)
	}
	url := stacktest.Database(tb, stack)
	s.orders, err = pgstore.Open(tb.Context(), pgstore.Config{URL: stacktest.LoginURL(tb, stack, url, "seckill_daemon")})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.orders.Close)
	if s.db, err = pgxpool.New(tb.Context(), url); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(s.db.Close)
	scope := stacktest.Scope(tb)
	for scope.Bucket = range buckets {
		s.scopes = append(s.scopes, scope)
	}
	s.open()
	return s
}

// open registers the version and provisions its buckets.
func (s *sale) open() {
	s.t.Helper()
	now := time.Now().Truncate(time.Second)
	v := pgstore.Version{
		ActivityID: s.scopes[0].ActivityID, SKUID: s.scopes[0].SKUID, Version: s.scopes[0].Version,
		Total: initial * int64(len(s.scopes)), Buckets: int64(len(s.scopes)),
		StartsAt: now.Add(-time.Minute), EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(24 * time.Hour),
	}
	var buckets []pgstore.Bucket
	batch := s.stocks.Writer().Batch()
	var provisioned []*lua.Result[lua.ProvisionReply]
	for _, scope := range s.scopes {
		buckets = append(buckets, pgstore.Bucket{ID: scope.Bucket, Initial: initial, State: pgstore.ScopeActive, Confirmed: true})
		provisioned = append(provisioned, batch.Provision(scope, lua.ProvisionArgs{
			State: lua.StateActive, StartsAtMS: v.StartsAt.UnixMilli(), EndsAtMS: v.EndsAt.UnixMilli(),
			RetentionUntilMS: v.RetentionUntil.UnixMilli(), SchemaVersion: 1, Initial: initial,
		}))
	}
	if err := s.orders.RegisterVersion(s.t.Context(), v, buckets, "test"); err != nil {
		s.t.Fatal(err)
	}
	if err := batch.Run(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	for _, p := range provisioned {
		if reply, err := p.Get(); err != nil || reply.Code != lua.ProvisionCreated {
			s.t.Fatalf("provision: %+v, %v", reply, err)
		}
	}
}

// booking is a reservation of the test.
type booking struct {
	scope reservation.Scope
	id    string
	user  string
}

// newBooking is the next user's.
func (s *sale) newBooking() booking {
	user := fmt.Sprint("u", s.users)
	scope := s.scopes[s.users%len(s.scopes)]
	if !s.inTurn {
		scope.Bucket = reservation.BucketOf(scope.ActivityID, scope.SKUID, user, int64(len(s.scopes)))
	}
	s.users++
	return booking{scope, reservation.NewID([]byte("secret"), scope.ActivityID, scope.SKUID, user, user), user}
}

// reserve makes n reservations, as the gateway does.
func (s *sale) reserve(n int) []booking {
	s.t.Helper()
	bookings := make([]booking, n)
	for i := range bookings {
		bookings[i] = s.newBooking()
	}
	if err := reserveAll(s.t.Context(), s.stocks.Writer(), bookings); err != nil {
		s.t.Fatal(err)
	}
	return bookings
}

func reserveAll(ctx context.Context, runner *lua.Runner, bookings []booking) error {
	batch := runner.Batch()
	results := make([]*lua.Result[lua.ReserveReply], len(bookings))
	for i, b := range bookings {
		results[i] = batch.Reserve(b.scope, lua.ReserveArgs{
			RequestID: b.user, ReservationID: b.id, UserID: b.user, TTLMS: 900_000, SchemaVersion: 1, MessageID: reservation.MessageID(b.id),
		})
	}
	if err := batch.Run(ctx); err != nil {
		return err
	}
	for _, r := range results {
		if reply, err := r.Get(); err != nil || reply.Code != lua.ReserveAccepted {
			return fmt.Errorf("reserve: %+v, %w", reply, err)
		}
	}
	return nil
}

// order creates the orders, as the consumer does.
func (s *sale) order(bookings ...booking) {
	s.t.Helper()
	for _, b := range bookings {
		if err := insertOrder(s.t.Context(), s.db, b); err != nil {
			s.t.Fatal(err)
		}
	}
}

func insertOrder(ctx context.Context, db interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}, b booking,
) error {
	_, err := db.Exec(ctx, `INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		VALUES ('o-' || $1, $1, $2, $3, $4, $5, $6, $2)`, b.id, b.user, b.scope.ActivityID, b.scope.SKUID, b.scope.Version, b.scope.Bucket)
	return err
}

// finish advances Redis to ORDER_CREATED, as the consumer does.
func (s *sale) finish(bookings ...booking) {
	s.t.Helper()
	if err := advance(s.t.Context(), s.stocks.Writer(), bookings, reservation.StatusEnqueued, reservation.StatusOrderCreated); err != nil {
		s.t.Fatal(err)
	}
}

func advance(ctx context.Context, runner *lua.Runner, bookings []booking, path ...reservation.Status) error {
	for _, status := range path {
		batch := runner.Batch()
		results := make([]*lua.Result[lua.TransitionReply], len(bookings))
		for i, b := range bookings {
			args := lua.TransitionArgs{ReservationID: b.id, Target: status}
			if status == reservation.StatusOrderCreated {
				args.OrderID = "o-" + b.id
			}
			results[i] = batch.Transition(b.scope, args)
		}
		if err := batch.Run(ctx); err != nil {
			return err
		}
		for _, r := range results {
			if reply, err := r.Get(); err != nil || reply.Code != lua.TransitionUpdated {
				return fmt.Errorf("to %s: %+v, %w", status, reply, err)
			}
		}
	}
	return nil
}

// release gives the units back, as the compensator does.
func (s *sale) release(bookings ...booking) {
	s.t.Helper()
	if err := compensate(s.t.Context(), s.stocks.Writer(), bookings); err != nil {
		s.t.Fatal(err)
	}
}

func compensate(ctx context.Context, runner *lua.Runner, bookings []booking) error {
	if err := advance(ctx, runner, bookings, reservation.StatusReleasePending); err != nil {
		return err
	}
	batch := runner.Batch()
	results := make([]*lua.Result[lua.CompensateReply], len(bookings))
	for i, b := range bookings {
		results[i] = batch.Compensate(b.scope, lua.CompensateArgs{ReservationID: b.id, UserID: b.user, Reason: "test"})
	}
	if err := batch.Run(ctx); err != nil {
		return err
	}
	for _, r := range results {
		if reply, err := r.Get(); err != nil || reply.Code != lua.CompensateReleased {
			return fmt.Errorf("compensate: %+v, %w", reply, err)
		}
	}
	return nil
}

func (s *sale) exec(sql string, args ...any) {
	s.t.Helper()
	if _, err := s.db.Exec(s.t.Context(), sql, args...); err != nil {
		s.t.Fatal(err)
	}
}

func (s *sale) do(args ...any) {
	s.t.Helper()
	if err := s.redis.Do(s.t.Context(), args...).Err(); err != nil {
		s.t.Fatal(err)
	}
}

// leak moves units from available to reserved, or back, as no script does.
func (s *sale) leak(scope reservation.Scope, units int) {
	s.t.Helper()
	_, err := s.redis.TxPipelined(s.t.Context(), func(p redis.Pipeliner) error {
		p.HIncrBy(s.t.Context(), scope.StockKey(), "available", int64(-units))
		p.HIncrBy(s.t.Context(), scope.StockKey(), "reserved", int64(units))
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
}

// options are those of a run of the quick checks alone.
func (s *sale) options() reconcile.Options {
	o := reconcile.Options{Settle: 20 * time.Millisecond, Batch: 100}
	for _, c := range reconcile.Checks() {
		if c.Level == reconcile.LevelQuick {
			o.Checks = append(o.Checks, c.ID)
		}
	}
	return o
}

func (s *sale) reconciler() *reconcile.Reconciler {
	r := &reconcile.Reconciler{
		Registry: s.orders, Stocks: s.stocks, Orders: s.orders, Members: s.stocks, Claims: s.orders, Mender: s.stocks,
		Guard: pgstore.RepairGuard{Store: s.orders, Sighted: s.stocks.Sighting}, Trail: s.orders, Nodes: s.nodes,
		Transfers: &transfer.Reader{Journal: s.orders, Stocks: s.stocks},
	}
	r.Mover = s.filler(r)
	return r
}

func (s *sale) run(o reconcile.Options) *reconcile.Report {
	s.t.Helper()
	report, err := s.reconciler().Run(s.t.Context(), o)
	if err != nil {
		s.t.Fatal(err)
	}
	return report
}

// want compares a report in short: the verdict, the findings as "check bucket",
// what is incomplete as "source bucket", and the deviation of each scope.
func (s *sale) want(r *reconcile.Report, want ...string) {
	s.t.Helper()
	if diff := cmp.Diff(want, short(r)); diff != "" {
		s.t.Errorf("report (-want +got):\n%s\nfindings %+v\nincomplete %+v", diff, r.Findings, r.Incomplete)
	}
}

func short(r *reconcile.Report) []string {
	out := []string{string(r.Verdict)}
	for _, f := range r.Findings {
		out = append(out, fmt.Sprint(f.Check, " ", f.Scope.Bucket))
	}
	for _, i := range r.Incomplete {
		if i.Scope == nil {
			out = append(out, i.Source+" all")
			continue
		}
		out = append(out, fmt.Sprint(i.Source, " ", i.Scope.Bucket))
	}
	for _, s := range r.Scopes {
		if s.Deviation == nil {
			out = append(out, fmt.Sprintf("b%d ?", s.Bucket))
			continue
		}
		out = append(out, fmt.Sprintf("b%d %+d", s.Bucket, *s.Deviation))
	}
	return out
}
