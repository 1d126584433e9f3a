package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reservation"
)

// errFenced is what either kind of consumer learns when it is too late.
var errFenced = errors.New("fenced or rejected")

func (s *sale) consumer() *pgxpool.Pool {
	s.t.Helper()
	url := stacktest.LoginURL(s.t, s.stack, s.db.Config().ConnString(), "seckill_consumer")
	pool, err := pgxpool.New(s.t.Context(), url)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(pool.Close)
	return pool
}

const insertOrder = `
	INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
	VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`

// unmodified inserts the order and knows nothing of claims.
func (s *sale) unmodified(ctx context.Context, pool *pgxpool.Pool, id, request, user string) error {
	_, err := pool.Exec(ctx, insertOrder, "o-"+id, id, request, s.scope.ActivityID, s.scope.SKUID, s.scope.Version, s.scope.Bucket, user)
	if fencedOff(err) {
		return errFenced
	}
	return err
}

// claiming asks for the claim first, as protocol §1 lets a consumer do.
func (s *sale) claiming(ctx context.Context, pool *pgxpool.Pool, id, request, user string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var outcome reservation.Outcome
		if err := tx.QueryRow(ctx, `SELECT outcome FROM seckill.claim_reservation($1, $2, $3, $4)`, id, "o-"+id, s.scope.Tag(), user).Scan(&outcome); err != nil {
			return err
		}
		if outcome != reservation.OutcomeOrder {
			return errFenced
		}
		time.Sleep(time.Duration(rand.IntN(3)) * time.Millisecond)
		_, err := tx.Exec(ctx, insertOrder, "o-"+id, id, request, s.scope.ActivityID, s.scope.SKUID, s.scope.Version, s.scope.Bucket, user)
		return err
	})
}

// An order that commits at any moment around the fencer's check and its fence
// stands, and a fence that is first keeps every order out: 1,000 races, half of
// them with each kind of consumer, against two daemons at once.
func TestOrdersRaceTheFence(t *testing.T) {
	t.Parallel()
	const races = 1000
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) {
		c.Fencer.LostMessage = reservation.LostMessageRelease
		c.Fencer.MaxRelease.Min = races
		c.Fencer.Batch = 64
	})
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 1))

	ids := make([]string, races)
	for i := range ids {
		ids[i] = s.expired("ENQUEUED")
	}
	due()
	pool := s.consumer()
	var wg sync.WaitGroup
	for range 2 {
		d := s.open()
		wg.Go(func() { s.work(d) })
	}
	created := make([]bool, races)
	order := random.Perm(races)
	var consumers sync.WaitGroup
	work := make(chan int)
	for range 8 {
		consumers.Go(func() {
			for i := range work {
				create := s.unmodified
				if i%2 == 0 {
					create = s.claiming
				}
				user, request := fmt.Sprint("u", i+1), fmt.Sprint("q", i+1)
				err := create(t.Context(), pool, ids[i], request, user)
				if err != nil && !errors.Is(err, errFenced) {
					t.Errorf("order of %s: %v", ids[i], err)
				}
				created[i] = err == nil
			}
		})
	}
	for _, i := range order {
		time.Sleep(time.Duration(random.IntN(1500)) * time.Microsecond)
		work <- i
	}
	close(work)
	consumers.Wait()
	wg.Wait()
	s.passes(s.open(), 3)

	counts := map[string]int{}
	for i, id := range ids {
		want := reservation.StatusReleased
		if created[i] {
			want = reservation.StatusOrderCreated
			counts["orders"]++
		} else {
			counts["fences"]++
		}
		if got := s.status(id); got != want {
			t.Errorf("%s: %s, want %s (order created: %v, claim %s)", id, got, want, created[i], s.claim(id))
		}
	}
	t.Logf("%v", counts)
	if counts["orders"] == 0 || counts["fences"] == 0 {
		t.Errorf("no race: %v", counts)
	}
	s.holdsPromises(ids)
}

// work runs passes one after another, as a daemon does.
func (s *sale) work(d *daemon.Daemon) {
	for range 6 {
		d.Once(s.t.Context())
		time.Sleep(100 * time.Millisecond)
	}
}

// Two daemons work on the same members at the same time, again and again: each
// unit comes back once, each message is resent within its limit.
func TestTwoDaemonsHaveOneEffect(t *testing.T) {
	t.Parallel()
	const members = 300
	// Room for all, and for a page of them that another daemon fenced just before:
	// near the end of a budget those count too, and releases halt for a person.
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) { c.Fencer.MaxRelease.Min = 2 * members })
	var ids []string
	for i := range members {
		switch i % 3 {
		case 0:
			ids = append(ids, s.expired("RELEASE_PENDING"))
		case 1:
			ids = append(ids, s.expired("ENQUEUED", "REJECTED"))
		default:
			ids = append(ids, s.expired("ENQUEUED"))
			s.redis.HSet(t.Context(), s.scope.ReservationKey(ids[i]), "resend_count", "3")
		}
	}
	due()
	var wg sync.WaitGroup
	for range 4 {
		d := s.open()
		wg.Go(func() { s.work(d) })
	}
	wg.Wait()
	last := s.open()
	s.eventually(time.Minute, func() error { // what the four held up for each other
		s.passes(last, 1)
		return s.is("RELEASED", ids...)
	})
	s.holdsPromises(ids)
	if diff := cmp.Diff([4]int64{1000, 1000, 0, members}, s.stock()); diff != "" {
		t.Errorf("stock: %s", diff)
	}
}

// More members that cannot be helped than a page holds stand at the head of
// both indexes; the good one behind them is handled in the same pass.
func TestPoisonAtTheHeadStarvesNobody(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) {
		c.Scanner.Batch, c.Fencer.Batch, c.Compensator.Batch = 8, 8, 8
	})
	pipe := s.redis.Pipeline()
	for i := range 30 {
		for _, index := range []reservation.Index{reservation.SendPending, reservation.ReservationExpiry} {
			pipe.ZAdd(t.Context(), s.scope.IndexKey(index), z(fmt.Sprint("orphan", i), 1), z(fmt.Sprint("bad", i), 1), z(fmt.Sprint("text", i), 1))
		}
		pipe.HSet(t.Context(), s.scope.ReservationKey(fmt.Sprint("bad", i)), "status", "ENQUEUED", "reservation_id", "another")
		pipe.Set(t.Context(), s.scope.ReservationKey(fmt.Sprint("text", i)), "x", 0)
	}
	if _, err := pipe.Exec(t.Context()); err != nil {
		t.Fatal(err)
	}
	unsent, releasing, ordered := s.expired(), s.expired("RELEASE_PENDING"), s.expired("ENQUEUED")
	s.mustOrder(ordered)
	due()
	v := s.open().Once(t.Context())
	if v.Incomplete {
		t.Errorf("verdict: %v", v.Err())
	}
	for id, want := range map[string]reservation.Status{unsent: "ENQUEUED", releasing: "RELEASED", ordered: "ORDER_CREATED"} {
		if got := s.status(id); got != want {
			t.Errorf("%s: %s, want %s", id, got, want)
		}
	}
	tasks := s.tasks()
	if tasks["orphan_member"] != 30 || tasks["malformed_reservation"] == 0 {
		t.Errorf("tasks %v, want orphan_member 30 and malformed_reservation", tasks)
	}
}
