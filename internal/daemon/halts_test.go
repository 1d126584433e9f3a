package daemon_test

import (
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

// A scope whose stock is corrupt is in front of a person, and the scopes beside
// it go on.
func TestOneCorruptStockHoldsUpNoOtherScope(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	good := s.expired("RELEASE_PENDING")
	bad := *s
	bad.scope = stacktest.Scope(t)
	bad.register(1000)
	stuck := bad.expired("RELEASE_PENDING")
	s.redis.HSet(t.Context(), bad.scope.StockKey(), "available", "many")
	s.passes(s.open(), 2)
	if got := s.status(good); got != reservation.StatusReleased {
		t.Errorf("the good scope's reservation is %s, want RELEASED", got)
	}
	if got := bad.status(stuck); got != reservation.StatusReleasePending {
		t.Errorf("the corrupt scope's reservation is %s, want RELEASE_PENDING still", got)
	}
	if claim := bad.claim(stuck); claim != "" {
		t.Errorf("it was claimed %s, and could not be given back", claim)
	}
	if tasks := s.tasks(); tasks["invariant_broken"] == 0 {
		t.Errorf("tasks %v, want invariant_broken", tasks)
	}
}

// A release storm halts the scope with one task, whose end allows another
// budget; what waits meanwhile waits longer each time.
func TestReleaseStormIsLiftedByAPerson(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) {
		c.Fencer.MaxRelease.Min, c.Fencer.MaxRelease.Percent = 5, 0.1
		c.Fencer.BackoffMax = 400 * time.Millisecond
	})
	var ids []string
	for range 8 {
		ids = append(ids, s.expired("RELEASE_PENDING"))
	}
	d := s.open()
	released := func() (n int) {
		for _, id := range ids {
			if s.status(id) == reservation.StatusReleased {
				n++
			}
		}
		return n
	}
	s.passes(d, 3)
	if n := released(); n != 5 {
		t.Errorf("%d released, max_release is 5", n)
	}
	if tasks := s.tasks(); len(tasks) != 1 || tasks["release_storm"] == 0 {
		t.Errorf("tasks %v, want release_storm alone", tasks)
	}
	waits := 0
	for _, id := range ids {
		if s.status(id) != reservation.StatusReleased {
			n, _ := strconv.Atoi(s.hash(id)["retry_count"])
			waits += n
		}
	}
	if waits == 0 {
		t.Error("what is halted counts no waits: it stays due at the shortest backoff")
	}

	halts, err := d.Postgres.Halts(t.Context())
	if err != nil || len(halts) != 1 {
		t.Fatalf("halts %v, %v", halts, err)
	}
	if err := d.Postgres.ResolveTask(t.Context(), halts[0].ID, "test", "looked at"); err != nil {
		t.Fatal(err)
	}
	s.passes(d, 6)
	if n := released(); n != 8 {
		t.Errorf("%d released after the halt was lifted, want all 8", n)
	}
	if tasks := s.tasks(); len(tasks) != 0 {
		t.Errorf("tasks %v: the halt set itself again", tasks)
	}
	s.holdsPromises(ids)
}

// Another PostgreSQL, or one that went back, stops every release, also while
// nothing was due when it happened, and no person's word alone lifts it.
func TestChangedPostgresHaltsReleases(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	s.open().Once(t.Context()) // nothing is due; the identity is noted all the same

	// As a volume restored from an hour ago: the row in PostgreSQL went back
	// with it, this process is new, and only Redis remembers.
	s.exec(`DELETE FROM seckill.server_identity`)
	name, err := s.open().Postgres.ServerName(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	key := "seckill:reconciler:postgres:" + name
	kept, err := s.redis.Get(t.Context(), key).Result()
	if err != nil {
		t.Fatal(err)
	}
	identity, err := pgstore.ParseIdentity(kept)
	if err != nil {
		t.Fatal(err)
	}
	identity.WALPosition += 1 << 40
	s.redis.Set(t.Context(), key, identity.Encode(), time.Minute)

	id := s.expired("RELEASE_PENDING")
	ordered := s.expired("ENQUEUED")
	s.mustOrder(ordered)
	d := s.open()
	s.passes(d, 2)
	if got := s.status(id); got != reservation.StatusReleasePending || s.claim(id) != "" {
		t.Errorf("status %s, claim %q; want nothing released", got, s.claim(id))
	}
	if got := s.status(ordered); got != reservation.StatusOrderCreated {
		t.Errorf("an order is %s in Redis, want ORDER_CREATED: that gives nothing back", got)
	}
	halts, err := d.Postgres.Halts(t.Context())
	if err != nil || len(halts) != 1 || halts[0].Kind != "postgres_changed" || halts[0].Cause != "wal_position_went_back" {
		t.Fatalf("halts %+v, %v; want postgres_changed once", halts, err)
	}
	if err := d.Postgres.ResolveTask(t.Context(), halts[0].ID, "test", "never mind"); !errors.Is(err, pgstore.ErrNotLiftedByHand) {
		t.Errorf("resolving it: %v, want ErrNotLiftedByHand", err)
	}
	s.passes(d, 2)
	if got := s.status(id); got != reservation.StatusReleasePending {
		t.Errorf("status %s after it was to be resolved", got)
	}
}

// A member whose id no PostgreSQL can encode takes the evidence of nobody else.
func TestAnIDOfOtherCharactersHidesNobody(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	ordered := s.expired("ENQUEUED")
	s.mustOrder(ordered)
	const bad = "bad\xffid"
	s.redis.HSet(t.Context(), s.scope.ReservationKey(bad),
		"reservation_id", bad, "user_id", "u", "request_id", "q", "message_id", reservation.MessageID(bad),
		"status", "ENQUEUED", "reserved_at_ms", 1, "expires_at_ms", 2)
	s.redis.ZAdd(t.Context(), s.scope.IndexKey(reservation.ReservationExpiry), z(bad, 1))
	v := s.passes(s.open(), 1)
	if v.Incomplete {
		t.Errorf("verdict: %v", v.Err())
	}
	if got := s.status(ordered); got != reservation.StatusOrderCreated {
		t.Errorf("its neighbour is %s, want ORDER_CREATED", got)
	}
	if tasks := s.tasks(); tasks["malformed_reservation"] != 1 {
		t.Errorf("tasks %v, want one malformed_reservation", tasks)
	}
}

// A hold takes effect within a round of a pass under way, and ends the same way.
func TestHeldScopeIsNotTouched(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	ids := []string{s.expired(), s.expired("ENQUEUED"), s.expired("RELEASE_PENDING")}
	d := s.open()
	if err := d.Postgres.HoldScopes(t.Context(), []reservation.Scope{s.scope}, "test", "recount"); err != nil {
		t.Fatal(err)
	}
	before := fmt.Sprint(s.dump(ids))
	s.passes(d, 2)
	if after := fmt.Sprint(s.dump(ids)); after != before {
		t.Errorf("a held scope was changed:\n%s\n%s", before, after)
	}
	if err := d.Postgres.UnholdScopes(t.Context(), []reservation.Scope{s.scope}, "test", "done"); err != nil {
		t.Fatal(err)
	}
	s.passes(d, 2)
	if got := s.status(ids[2]); got != reservation.StatusReleased {
		t.Errorf("after the hold it is %s, want RELEASED", got)
	}
}
