package pgstore_test

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// database is a test's own database with schema shop, and a scope in it.
type database struct {
	url   string // of the superuser
	scope reservation.Scope
	store *pgstore.Store // logged in as a member of seckill_daemon, with no other right
}

func newDatabase(t *testing.T) database {
	t.Helper()
	db := database{url: stacktest.Database(t, stacktest.Shared(t)), scope: stacktest.Scope(t)}
	db.store = db.open(t, "seckill_daemon")
	return db
}

// as is the URL for a login that is a member of the group role.
func (db database) as(t *testing.T, group string) string {
	t.Helper()
	return stacktest.LoginURL(t, stacktest.Shared(t), db.url, group)
}

func (db database) open(t *testing.T, group string) *pgstore.Store {
	t.Helper()
	return open(t, pgstore.Config{URL: db.as(t, group), ApplicationName: t.Name()})
}

func open(t *testing.T, c pgstore.Config) *pgstore.Store {
	t.Helper()
	store, err := pgstore.Open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	return store
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func exec(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// order inserts into shop.orders as an order consumer does.
func order(ctx context.Context, db interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}, s reservation.Scope, id string,
) error {
	_, err := db.Exec(ctx, `INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		VALUES ('o-' || $1, $1, 'q-' || $1, $2, $3, $4, $5, 'u-' || $1)`, id, s.ActivityID, s.SKUID, s.Version, s.Bucket)
	return err
}

func state(err error) string {
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok {
		return refused.Code
	}
	return ""
}

func requests(s reservation.Scope, ids ...string) []reservation.FenceRequest {
	all := make([]reservation.FenceRequest, len(ids))
	for i, id := range ids {
		all[i] = reservation.FenceRequest{ID: id, Scope: s}
	}
	return all
}

func TestRecordsOfTheReferenceShop(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	consumer := connect(t, db.as(t, "seckill_consumer"))
	for _, id := range []string{"ordered", "cancelled"} {
		if err := order(t.Context(), consumer, db.scope, id); err != nil {
			t.Fatal(err)
		}
	}
	exec(t, consumer, `UPDATE shop.orders SET status = 'CANCELLED' WHERE reservation_id = 'cancelled'`)
	exec(t, consumer, `SELECT seckill.reject_reservation('rejected', 'no_stock', $1)`, db.scope.Tag())
	if _, err := db.store.Fence(t.Context(), "message_lost", requests(db.scope, "fenced")); err != nil {
		t.Fatal(err)
	}

	records, err := db.store.Records(t.Context(), []string{"ordered", "cancelled", "rejected", "fenced", "unknown", "ordered"})
	if err != nil {
		t.Fatal(err)
	}
	if len(records) != 4 {
		t.Errorf("got %d records, want 4: an id with neither claim nor order is absent", len(records))
	}
	got := map[string]reservation.OrderEvidence{}
	for _, id := range []string{"ordered", "cancelled", "rejected", "fenced", "unknown"} {
		got[id] = reservation.ClassifyOrders(db.scope, "u-"+id, records[id])
	}
	want := map[string]reservation.OrderEvidence{
		"ordered":   {State: reservation.OrderExists, OrderID: "o-ordered", Active: true},
		"cancelled": {State: reservation.OrderExists, OrderID: "o-cancelled"},
		"rejected":  {State: reservation.OrderRejected, Reason: "no_stock"},
		"fenced":    {State: reservation.OrderFenced, Reason: "message_lost"},
		"unknown":   {State: reservation.OrderNone},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("evidence (-want +got):\n%s", diff)
	}

	claim := *records["ordered"].Claim
	wantClaim := reservation.Claim{
		Outcome: reservation.OutcomeOrder, ActivityID: db.scope.ActivityID, SKUID: db.scope.SKUID,
		Version: db.scope.Version, Bucket: db.scope.Bucket, UserID: "u-ordered", OrderID: "o-ordered", ClaimedBy: "test_seckill_consumer",
	}
	if diff := cmp.Diff(wantClaim, claim, cmpopts.IgnoreFields(claim, "ClaimedAt")); diff != "" {
		t.Errorf("claim of an order (-want +got):\n%s", diff)
	}
	if since := time.Since(claim.ClaimedAt); since < -time.Minute || since > time.Minute {
		t.Errorf("claimed %v ago", since)
	}
}

func TestPostgresThatCannotBeReachedIsUnavailable(t *testing.T) {
	t.Parallel()
	store := open(t, pgstore.Config{URL: "postgres://nobody@127.0.0.1:1/none?sslmode=disable"})
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := store.Records(ctx, []string{"r"}); !errors.Is(err, pgstore.ErrUnavailable) {
		t.Errorf("Records: %v, want ErrUnavailable", err)
	}
	results, err := store.Fence(ctx, "x", requests(reservation.Scope{ActivityID: "a", SKUID: "s"}, "r"))
	if !errors.Is(err, pgstore.ErrUnavailable) || len(results) != 1 || results[0].Known {
		t.Errorf("Fence: %+v, %v; want one unknown result and ErrUnavailable", results, err)
	}
	if err := store.FenceReady(ctx); !errors.Is(err, pgstore.ErrUnavailable) {
		t.Errorf("FenceReady: %v, want ErrUnavailable", err)
	}
}

// A table that a lock holds back must not hold a worker for ever.
func TestCallsEndWithTheirContext(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	super := connect(t, db.url)
	exec(t, super, `BEGIN; LOCK TABLE seckill.reservation_claim IN ACCESS EXCLUSIVE MODE`)
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := db.store.Records(ctx, []string{"r"}); !errors.Is(err, pgstore.ErrUnavailable) {
		t.Errorf("Records: %v, want ErrUnavailable", err)
	}
	exec(t, super, `ROLLBACK`)
	if _, err := db.store.Records(t.Context(), []string{"r"}); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}

// withParameter adds a parameter to a connection URL.
func withParameter(t *testing.T, raw, key, value string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set(key, value)
	u.RawQuery = strings.ReplaceAll(q.Encode(), "+", "%20")
	return u.String()
}

// A server that hangs after it has accepted a connection keeps no command
// waiting for ever, and a context still ends a call at once.
func TestAHangingServerIsGivenUp(t *testing.T) {
	t.Parallel()
	target, err := url.Parse(stacktest.Database(t, stacktest.Shared(t)))
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := faultproxy.Start(target.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	target.Host = proxy.Addr()
	store := open(t, pgstore.Config{URL: target.String(), StatementTimeout: 100 * time.Millisecond})
	if err := store.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	proxy.Set(faultproxy.Faults{Stall: true})
	if err := store.Ping(t.Context()); !errors.Is(err, pgstore.ErrUnavailable) {
		t.Errorf("a hanging server: %v, want ErrUnavailable", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	began := time.Now()
	if err := store.Ping(ctx); err == nil || time.Since(began) > time.Second {
		t.Errorf("a call that was cancelled: %v after %s", err, time.Since(began))
	}
	proxy.Set(faultproxy.Faults{})
	if err := store.Ping(t.Context()); err != nil {
		t.Errorf("after the hang: %v", err)
	}
}
