package daemon_test

import (
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
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
	bad := s.beside()
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

// beside is another scope of the same installation.
func (s *sale) beside() *sale {
	s.t.Helper()
	other := *s
	other.scope = stacktest.Scope(s.t)
	other.register(1000)
	return &other
}

// forgetPosition makes PostgreSQL look as if its volume had been restored: its
// own row went back with it, every process is new, and only Redis remembers.
func (s *sale) forgetPosition(d *daemon.Daemon) {
	s.t.Helper()
	s.exec(`DELETE FROM seckill.server_identity`)
	name, err := d.Postgres.ServerName(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	key := "seckill:reconciler:postgres:" + name
	kept, err := s.redis.Get(s.t.Context(), key).Result()
	if err != nil {
		s.t.Fatal(err)
	}
	identity, err := pgstore.ParseIdentity(kept)
	if err != nil {
		s.t.Fatal(err)
	}
	identity.WALPosition += 1 << 40
	if err := s.redis.Set(s.t.Context(), key, identity.Encode(), time.Minute).Err(); err != nil {
		s.t.Fatal(err)
	}
}

// PostgreSQL went back, also while nothing was due: releases stop, no person's
// word lifts that, and once every released reservation is fenced again they go
// on. One whose order was faster than its new fence is named.
func TestChangedPostgresHaltsUntilEverythingIsFencedAgain(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	var ids []string
	for range 5 {
		ids = append(ids, s.expired("RELEASE_PENDING"))
	}
	s.passes(s.open(), 2)
	// The restore lost three of the claims, and a late message was faster than
	// the new fence of one of them.
	s.exec(`ALTER TABLE seckill.reservation_claim DISABLE TRIGGER ALL`)
	s.exec(`DELETE FROM seckill.reservation_claim WHERE reservation_id = ANY ($1)`, ids[:3])
	s.exec(`ALTER TABLE seckill.reservation_claim ENABLE ALWAYS TRIGGER guard_row`)
	s.exec(`ALTER TABLE seckill.reservation_claim ENABLE ALWAYS TRIGGER guard_truncate`)
	s.mustOrder(ids[0])
	s.forgetPosition(s.open())

	late := s.expired("RELEASE_PENDING")
	ordered := s.expired("ENQUEUED")
	s.mustOrder(ordered)
	d := s.open()
	if err := d.Postgres.HoldScopes(t.Context(), []reservation.Scope{s.beside().scope}, "test", "keeps the halt"); err != nil {
		t.Fatal(err)
	}
	s.passes(d, 2)
	if got := s.status(late); got != reservation.StatusReleasePending || s.claim(late) != "" {
		t.Errorf("while halted: status %s, claim %q; want nothing released", got, s.claim(late))
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

	s.exec(`UPDATE seckill.scope SET held_at = NULL, held_by = NULL, held_reason = NULL`)
	s.passes(d, 3)
	for _, id := range ids[1:] {
		if got := s.claim(id); got != reservation.OutcomeFenced {
			t.Errorf("the released %s has claim %q, want FENCED again", id, got)
		}
	}
	if got := s.status(late); got != reservation.StatusReleased {
		t.Errorf("after the halt %s, want RELEASED", got)
	}
	tasks := s.tasks()
	if tasks["order_after_release"] != 1 || tasks["postgres_changed"] != 0 {
		t.Errorf("tasks %v, want the one order_after_release", tasks)
	}
	if err := s.order(ids[1]); !fencedOff(err) {
		t.Errorf("an order of a reservation that is fenced again: %v, want SK001", err)
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
