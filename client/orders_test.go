package client_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// shop is a sale with an order side.
type shop struct {
	*sale
	g        *client.Gateway
	c        *client.Consumer
	owner    *pgxpool.Pool // sees everything
	consumer *pgxpool.Pool // as an order consumer does
}

func shopOn(t *testing.T, target string, buckets, units int64) *shop {
	t.Helper()
	s := &shop{sale: on(t, target, buckets, units)}
	stack := stacktest.Shared(t)
	url := stacktest.Database(t, stack)
	s.owner, s.consumer = pool(t, url), pool(t, stacktest.LoginURL(t, stack, url, "seckill_consumer"))
	_, err := s.owner.Exec(t.Context(), `INSERT INTO shop.stock (activity_id, sku_id, activity_version, total) VALUES ($1, $2, $3, $4)`,
		s.ActivityID, s.SKUID, s.Version, units)
	s.must(err)
	rdb := s.connect()
	s.g = s.gateway(rdb, client.Options{Orders: s.owner})
	s.c, err = client.NewConsumer(rdb, client.ConsumerOptions{Timeout: patient})
	s.must(err)
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

// sent is an accepted request whose message is with the broker.
func (s *shop) sent(user string) (client.Result, client.Message) {
	s.t.Helper()
	r := s.accept(s.g, user)
	s.must(s.g.MarkEnqueued(s.t.Context(), r.Reservation, ""))
	return r, reservation.NewOrderMessage(r.Reservation)
}

var errNotWon = errors.New("not won")

// order does what a consumer does with a message.
func (s *shop) order(m client.Message, orderID string) (claim client.Claim, err error) {
	s.t.Helper()
	err = pgx.BeginFunc(s.t.Context(), s.consumer, func(tx pgx.Tx) error {
		if claim, err = s.c.Claim(s.t.Context(), tx, m, orderID); err != nil {
			return err
		}
		if !claim.Won {
			return errNotWon
		}
		return insert(s.t.Context(), tx, m, orderID)
	})
	if errors.Is(err, errNotWon) {
		err = nil
	}
	return claim, err
}

func insert(ctx context.Context, tx pgx.Tx, m client.Message, orderID string) error {
	_, err := tx.Exec(ctx, `INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`,
		orderID, m.ReservationID, m.RequestID, m.ActivityID, m.SKUID, m.ActivityVersion, m.BucketID, m.UserID)
	return client.ClaimError(err)
}

func (s *shop) fence(r client.Result) {
	s.t.Helper()
	var outcome string
	s.must(s.owner.QueryRow(s.t.Context(), `SELECT outcome FROM seckill.fence_reservations($1, 'test', $2)`,
		[]string{r.ReservationID}, []string{r.Scope.Tag()}).Scan(&outcome))
	if outcome != "FENCED" {
		s.t.Fatalf("fence: %s", outcome)
	}
}

func TestConsumer(t *testing.T) {
	t.Parallel()
	s := shopOn(t, "8-standalone", 4, 100)
	ctx := t.Context()

	r, m := s.sent("alice")
	claim, err := s.order(m, "o-1")
	if err != nil || !claim.Won || claim.Ordered() || claim.Excluded() || claim.OrderID != "o-1" {
		t.Errorf("first delivery: %+v, %v", claim, err)
	}
	s.must(s.c.MarkOrderCreated(ctx, m, claim.OrderID))
	if got := s.status(r); got != "ORDER_CREATED" {
		t.Errorf("after the mark: %s", got)
	}
	again, err := s.order(m, "o-2")
	if err != nil || !again.Ordered() || again.Won || again.OrderID != "o-1" {
		t.Errorf("second delivery: %+v, %v", again, err)
	}
	if outcome, err := s.c.Reject(ctx, s.consumer, m, "late"); err != nil || outcome != reservation.OutcomeOrder {
		t.Errorf("an order was rejected: %s, %v", outcome, err)
	}

	fenced, m := s.sent("bob")
	s.fence(fenced)
	claim, err = s.order(m, "o-3")
	if err != nil || !claim.Excluded() || claim.Won || claim.Outcome != reservation.OutcomeFenced {
		t.Errorf("fenced: %+v, %v", claim, err)
	}
	s.must(s.c.MarkRejected(ctx, m, "fenced"))
	if got := s.status(fenced); got != "REJECTED" {
		t.Errorf("fenced: %s", got)
	}

	_, m = s.sent("carol")
	if outcome, err := s.c.Reject(ctx, s.consumer, m, "out_of_stock"); err != nil || outcome != reservation.OutcomeRejected {
		t.Errorf("rejected: %s, %v", outcome, err)
	}
	if claim, err = s.order(m, "o-4"); err != nil || !claim.Excluded() {
		t.Errorf("after a rejection: %+v, %v", claim, err)
	}
	var orders int
	s.must(s.owner.QueryRow(ctx, `SELECT count(*) FROM shop.orders`).Scan(&orders))
	if orders != 1 {
		t.Errorf("%d orders", orders)
	}
}

// TestClaimErrors: a consumer without claims meets the trigger's errors, typed.
func TestClaimErrors(t *testing.T) {
	t.Parallel()
	s := shopOn(t, "7.0-standalone", 1, 100)
	ctx := t.Context()
	create := func(m client.Message, orderID string) error {
		return pgx.BeginFunc(ctx, s.consumer, func(tx pgx.Tx) error { return insert(ctx, tx, m, orderID) })
	}
	fenced, m := s.sent("alice")
	s.fence(fenced)
	if err := create(m, "o-1"); !errors.Is(err, client.ErrExcluded) {
		t.Errorf("an order of a fenced reservation: %v", err)
	}

	_, m = s.sent("bob")
	err := pgx.BeginFunc(ctx, s.consumer, func(tx pgx.Tx) error {
		if _, err := s.c.Claim(ctx, tx, m, "o-2"); err != nil {
			return err
		}
		return insert(ctx, tx, m, "o-3")
	})
	if !errors.Is(err, client.ErrOtherOrder) {
		t.Errorf("an order of another's claim: %v", err)
	}

	s.must(create(m, "o-4"))
	_, err = s.owner.Exec(ctx, `UPDATE shop.orders SET reservation_id = 'other' WHERE order_id = 'o-4'`)
	if !errors.Is(client.ClaimError(err), client.ErrReservationFixed) {
		t.Errorf("another reservation_id: %v", err)
	}
	other := errors.New("other")
	if client.ClaimError(nil) != nil || client.ClaimError(other) != other { //nolint:errorlint // the very same
		t.Error("other errors are changed")
	}
}

// TestLookup: Redis first; an order that only PostgreSQL knows is found there;
// nothing is said to be missing as long as somebody did not answer.
func TestLookup(t *testing.T) {
	t.Parallel()
	for _, target := range []string{"8-standalone", "7.0-cluster"} {
		t.Run(target, func(t *testing.T) {
			t.Parallel()
			s := shopOn(t, target, 4, 100)
			ctx := t.Context()
			query := func(user string) client.Query {
				return client.Query{ActivityID: s.ActivityID, SKUID: s.SKUID, UserID: user, RequestID: "q-" + user}
			}
			want := func(q client.Query, source client.Source, state client.State) client.Found {
				t.Helper()
				found, err := s.g.Lookup(ctx, q)
				if err != nil || found.Source != source || found.State != state {
					t.Errorf("%+v: %+v, %v; want %s from %s", q, found, err, state, source)
				}
				return found
			}
			missing := func(q client.Query) {
				t.Helper()
				if found, err := s.g.Lookup(ctx, q); !errors.Is(err, client.ErrNotFound) {
					t.Errorf("%+v: %+v, %v", q, found, err)
				}
			}

			r, m := s.sent("alice")
			found := want(query("alice"), client.FromRedis, client.StateQueued)
			if found.ReservationID != r.ReservationID || found.Scope != r.Scope || found.Reservation.UserID != "alice" {
				t.Errorf("%+v", found)
			}
			byID := client.Query{ActivityID: s.ActivityID, SKUID: s.SKUID, ReservationID: r.ReservationID}
			want(byID, client.FromRedis, client.StateQueued)
			thief := byID
			thief.UserID = "bob"
			missing(thief)
			missing(query("bob"))

			twice := s.click("alice")
			twice.RequestID = "q-alice-2"
			if a, err := s.g.Reserve(ctx, twice); err != nil || a.Code != lua.ReserveUserAlreadyReserved {
				t.Fatalf("%+v, %v", a, err)
			}
			second := query("alice")
			second.RequestID = "q-alice-2"
			if found := want(second, client.FromRedis, "USER_ALREADY_RESERVED"); found.ReservationID != r.ReservationID {
				t.Errorf("%+v", found)
			}

			if _, err := s.order(m, "o-1"); err != nil {
				t.Fatal(err)
			}
			s.must(s.c.MarkOrderCreated(ctx, m, "o-1"))
			want(query("alice"), client.FromRedis, client.StateOrderCreated)
			s.must(s.rdb.Del(ctx, r.Scope.ReservationKey(r.ReservationID)).Err())
			for _, q := range []client.Query{query("alice"), byID} {
				if found := want(q, client.FromPostgres, client.StateOrderCreated); found.OrderID != "o-1" || found.Scope != r.Scope {
					t.Errorf("%+v", found)
				}
			}
			missing(thief)

			fenced, _ := s.sent("carol")
			s.fence(fenced)
			s.must(s.rdb.Del(ctx, fenced.Scope.ReservationKey(fenced.ReservationID)).Err())
			want(query("carol"), client.FromPostgres, client.StateReleasing)

			released := s.accept(s.g, "dave")
			s.release(released)
			want(query("dave"), client.FromRedis, client.StateReleased)

			for _, bad := range []client.Query{
				{ActivityID: s.ActivityID, SKUID: s.SKUID},
				{ActivityID: s.ActivityID, SKUID: s.SKUID, RequestID: "q"},
				{ActivityID: s.ActivityID, SKUID: s.SKUID, UserID: "a b", RequestID: "q"},
				{ActivityID: "x", SKUID: "y", UserID: "u", RequestID: "q"},
			} {
				if _, err := s.g.Lookup(ctx, bad); err == nil || client.ResponseTo(err, "").Retryable {
					t.Errorf("%+v: %v", bad, err)
				}
			}
		})
	}
}

// TestLookupOfWhatDoesNotAnswer: with Redis away PostgreSQL tells what it knows,
// and what it does not know is not "not found".
func TestLookupOfWhatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	s := shopOn(t, "8-standalone", 1, 100)
	_, m := s.sent("alice")
	if _, err := s.order(m, "o-1"); err != nil {
		t.Fatal(err)
	}
	away := redis.NewUniversalClient(client.RedisOptions(&redis.UniversalOptions{Addrs: []string{"127.0.0.1:1"}}))
	t.Cleanup(func() { _ = away.Close() })
	g := s.gateway(away, client.Options{Orders: s.owner})
	query := client.Query{ActivityID: s.ActivityID, SKUID: s.SKUID, UserID: "alice", RequestID: "q-alice"}
	if found, err := g.Lookup(t.Context(), query); err != nil || found.Source != client.FromPostgres || found.OrderID != "o-1" {
		t.Errorf("without Redis: %+v, %v", found, err)
	}
	query.UserID, query.RequestID = "bob", "q-bob"
	_, err := g.Lookup(t.Context(), query)
	if e := busy(t, err, client.KindNotRead); !e.Response().Retryable {
		t.Errorf("%+v", e.Response())
	}
	dead := pool(t, "postgres://127.0.0.1:1/x?connect_timeout=1")
	both := s.gateway(away, client.Options{Orders: dead, Timeout: 5 * time.Second})
	_, err = both.Lookup(t.Context(), query)
	busy(t, err, client.KindNotRead)
	half := s.gateway(s.rdb, client.Options{Orders: dead, Timeout: 5 * time.Second})
	_, err = half.Lookup(t.Context(), query)
	busy(t, err, client.KindNotRead)
	alone := s.gateway(s.rdb, client.Options{})
	if _, err := alone.Lookup(t.Context(), query); !errors.Is(err, client.ErrNotFound) {
		t.Errorf("Redis alone: %v", err)
	}
}
