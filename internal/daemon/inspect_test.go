package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// inspector opens one on the sale's configuration, changed.
func (s *sale) inspector(change func(*config.Config)) *daemon.Inspector {
	s.t.Helper()
	c := s.config
	if change != nil {
		change(&c)
	}
	i, err := daemon.OpenInspector(s.t.Context(), daemon.Options{
		Config: c, Logger: slog.New(slog.DiscardHandler), Metrics: observe.NewMetrics("test"),
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { i.Close(context.WithoutCancel(s.t.Context())) })
	return i
}

func unreadOf(unread []daemon.Unread) []string {
	var sources []string
	for _, u := range unread {
		sources = append(sources, u.Source)
	}
	slices.Sort(sources)
	return sources
}

// TestInspect: what is said of a reservation is what the daemon then does.
func TestInspect(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) { c.Scanner.SendGrace = time.Hour })
	const (
		enqueued = reservation.StatusEnqueued
		ordered  = reservation.StatusOrderCreated
	)
	young, sent, lost := s.reserve(time.Hour), s.reserve(time.Hour), s.expired(enqueued)
	s.walk(sent, enqueued)
	behind := s.expired(enqueued)
	s.mustOrder(behind)
	done := s.expired(enqueued, ordered)
	storm := s.expired(enqueued, reservation.StatusReleasePending)
	orphan := s.expired(enqueued)
	s.redis.Del(t.Context(), s.scope.ReservationKey(orphan))
	time.Sleep(2 * s.config.Fencer.Settle) // an absence counts only later; it may be later still
	i := s.inspector(nil)
	for _, test := range []struct {
		id, does, why string
		row           int
	}{
		{young, "waits and looks again", "row 9", 9},
		{sent, "waits and looks again", "row 10", 10},
		{lost, "sends its lost order message again, the same message_id, as resend 1 of at most 3", "row 12", 12},
		{behind, "makes it ORDER_CREATED", "row 6", 6},
		{done, "it is decided (ORDER_CREATED)", "row 1", 1},
		{storm, "puts a fence into PostgreSQL", "row 4", 4},
		{orphan, "asks a person (task orphan_member)", "row orphan", reservation.RowOrphan},
	} {
		var e daemon.Explanation
		s.eventually(90*time.Second, func() (err error) { // a busy broker may not answer in time
			if e, err = i.Reservation(t.Context(), test.id, daemon.In{}); err == nil && (!e.Decided || len(e.Unread) != 0) {
				err = fmt.Errorf("%s: %+v", test.does, e)
			}
			return err
		})
		n := e.Next
		if e.Action.Row != test.row || !strings.Contains(n.Does, test.does) || !strings.Contains(n.Why, test.why) || n.When == "" {
			t.Errorf("want %s by %s; got row %d: %+v", test.does, test.why, e.Action.Row, n)
		}
		if !slices.ContainsFunc(n.HeldBack, func(what string) bool { return strings.Contains(what, "no daemon holds the lease") }) {
			t.Errorf("no daemon runs, and it is not said: %v", n.HeldBack)
		}
		if e.Scope != s.scope {
			t.Errorf("scope %s", e.Scope)
		}
	}
	if _, err := i.Reservation(t.Context(), "nothing", daemon.In{}); !errors.Is(err, daemon.ErrNoReservation) {
		t.Errorf("an id that is nowhere: %v", err)
	}
}

// TestInspectRequestAndUser: both lead to the reservations that Redis or
// PostgreSQL knows of.
func TestInspectRequestAndUser(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	id := s.reserve(time.Hour) // of u1, by q1
	b := s.runner.Batch()
	b.Reserve(s.scope, lua.ReserveArgs{
		RequestID: "q1-again", ReservationID: "other", UserID: "u1", TTLMS: 1000, SchemaVersion: 1, MessageID: reservation.MessageID("other"),
	})
	s.run(b)
	onlyOrder := s.reserve(time.Hour) // of u2, by q2
	s.mustOrder(onlyOrder)
	i := s.inspector(nil)
	ctx := t.Context()

	f, err := i.Request(ctx, "q1", daemon.In{})
	if err != nil || len(f.Results) != 1 || f.Results[0].Result.Code != 0 || len(f.Reservations) != 1 || f.Reservations[0].ID != id || !f.Reservations[0].Decided {
		t.Errorf("q1: %+v, %v", f, err)
	}
	f, err = i.Request(ctx, "q1-again", daemon.In{ActivityID: s.scope.ActivityID, SKUID: s.scope.SKUID})
	if err != nil || len(f.Results) != 1 || f.Results[0].Result.Code != 10 || len(f.Reservations) != 1 || f.Reservations[0].ID != id {
		t.Errorf("q1-again: %+v, %v", f, err)
	}
	if _, err := i.Request(ctx, "q9", daemon.In{}); !errors.Is(err, pgstore.ErrNotFound) {
		t.Errorf("a request that is nowhere: %v", err)
	}

	u, err := i.User(ctx, "u1", daemon.In{})
	if err != nil || len(u.Markers) != 1 || u.Markers[0].ReservationID != id || len(u.Orders) != 0 || len(u.Reservations) != 1 {
		t.Errorf("u1: %+v, %v", u, err)
	}
	// Redis loses u2: PostgreSQL alone knows the order.
	for _, key := range []string{s.scope.UserKey("u2"), s.scope.ReservationKey(onlyOrder)} {
		s.redis.Del(ctx, key)
	}
	s.redis.ZRem(ctx, s.scope.IndexKey(reservation.ReservationExpiry), onlyOrder)
	s.redis.ZRem(ctx, s.scope.IndexKey(reservation.SendPending), onlyOrder)
	s.redis.HDel(ctx, s.scope.RequestKey("q2"), "q2")
	for what, find := range map[string]func() ([]daemon.Explanation, []pgstore.FoundOrder, error){
		"u2": func() ([]daemon.Explanation, []pgstore.FoundOrder, error) {
			u, err := i.User(ctx, "u2", daemon.In{})
			return u.Reservations, u.Orders, err
		},
		"q2": func() ([]daemon.Explanation, []pgstore.FoundOrder, error) {
			f, err := i.Request(ctx, "q2", daemon.In{})
			return f.Reservations, f.Orders, err
		},
	} {
		reservations, orders, err := find()
		if err != nil || len(orders) != 1 || orders[0].ReservationID != onlyOrder || len(reservations) != 1 || reservations[0].Scope != s.scope {
			t.Errorf("%s: %+v, %+v, %v", what, reservations, orders, err)
		}
	}
	if _, err := i.User(ctx, "u9", daemon.In{}); !errors.Is(err, pgstore.ErrNotFound) {
		t.Errorf("a user who is nowhere: %v", err)
	}
	if _, err := i.User(ctx, "somebody's name", daemon.In{}); err == nil || strings.Contains(err.Error(), "somebody") {
		t.Errorf("a bad user id: %v", err)
	}
}

// TestInspectWithoutASource: what does not answer is named, nothing is
// concluded from its silence, and the others are shown all the same.
func TestInspectWithoutASource(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	id := s.reserve(time.Hour)
	s.mustOrder(id)
	ctx := t.Context()
	const dead = "127.0.0.1:1"
	noRedis := func(c *config.Config) { c.Redis.Addrs = []string{dead} }
	noPostgres := func(c *config.Config) { c.Postgres.URL = "postgres://x@" + dead + "/x" }
	noRocketMQ := func(c *config.Config) { c.RocketMQ.NameServers = []string{dead} }
	named := daemon.In{Scopes: []reservation.Scope{s.scope}}

	e, err := s.inspector(noRedis).Reservation(ctx, id, daemon.In{})
	if err != nil || e.Decided || !slices.Equal(unreadOf(e.Unread), []string{"redis"}) || e.Record.Claim == nil || e.Scope != s.scope {
		t.Errorf("without Redis: %+v, %v", e, err)
	}
	if !strings.Contains(e.Next.Does, "cannot be read") {
		t.Errorf("without Redis: %+v", e.Next)
	}

	i := s.inspector(noPostgres)
	e, err = i.Reservation(ctx, id, named)
	if err != nil || !e.Decided || e.Action.Row != 2 || e.Action.Verb != reservation.VerbWait || !slices.Contains(unreadOf(e.Unread), "postgres") {
		t.Errorf("without PostgreSQL: %+v, %v", e, err)
	}
	e, err = i.Reservation(ctx, id, daemon.In{})
	if err != nil || e.Decided || !slices.Equal(unreadOf(e.Unread), []string{"postgres", "redis"}) || !strings.Contains(e.Unread[1].Reason, "--scope") {
		t.Errorf("without PostgreSQL and a scope: %+v, %v", e, err)
	}
	f, err := i.Request(ctx, "q1", named)
	if err != nil || len(f.Results) != 1 || len(f.Reservations) != 1 || !slices.Contains(unreadOf(f.Unread), "postgres") {
		t.Errorf("without PostgreSQL, by request: %+v, %v", f, err)
	}
	u, err := i.User(ctx, "u1", named)
	if err != nil || len(u.Markers) != 1 || !slices.Contains(unreadOf(u.Unread), "postgres") {
		t.Errorf("without PostgreSQL, by user: %+v, %v", u, err)
	}

	e, err = s.inspector(noRocketMQ).Reservation(ctx, id, daemon.In{})
	if err != nil || !e.Decided || e.Action.Row != 6 || !slices.Equal(unreadOf(e.Unread), []string{"rocketmq"}) {
		t.Errorf("without RocketMQ: %+v, %v", e, err)
	}
	all := s.inspector(func(c *config.Config) { noRedis(c); noPostgres(c); noRocketMQ(c) })
	if f, err := all.Request(ctx, "q1", daemon.In{}); err != nil || !slices.Equal(unreadOf(f.Unread), []string{"postgres", "redis"}) {
		t.Errorf("without anything: %+v, %v", f, err)
	}
}
