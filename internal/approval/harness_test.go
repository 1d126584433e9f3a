package approval_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// shop is one scope on real services, with an approver that has the rights of
// an operator, and the hands of the test in Redis and PostgreSQL.
type shop struct {
	t        *testing.T
	scope    reservation.Scope
	config   config.Config
	redis    redis.UniversalClient
	runner   *lua.Runner
	db       *pgxpool.Pool // as the superuser
	daemon   *daemon.Daemon
	approver *approval.Approver
	ids      []string // every reservation made
}

const units = 20

func newShop(t *testing.T, change ...func(*config.Config)) *shop {
	t.Helper()
	stack := stacktest.Shared(t)
	s := &shop{t: t, scope: stacktest.Scope(t)}
	url := stacktest.Database(t, stack)
	c := config.Default()
	c.Mode = config.ModeAct
	c.Redis.Addrs = []string{stack.Redis().Addr()}
	c.Postgres.URL = stacktest.LoginURL(t, stack, url, "seckill_operator")
	c.RocketMQ.NameServers = []string{stack.NameServer().Addr()}
	c.Fencer.Settle = time.Millisecond
	c.Reconcile.Settle = time.Millisecond
	c.Admin.Listen = "127.0.0.1:0"
	for _, f := range change {
		f(&c)
	}
	s.config = c
	s.redis = redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{Addrs: c.Redis.Addrs}))
	t.Cleanup(func() { _ = s.redis.Close() })
	var err error
	if s.runner, err = lua.NewRunner(s.redis); err != nil {
		t.Fatal(err)
	}
	if s.db, err = pgxpool.New(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.db.Close)
	s.daemon = s.open()
	s.approver = s.daemon.Approver()
	s.register()
	return s
}

func (s *shop) open() *daemon.Daemon {
	s.t.Helper()
	d, err := daemon.Open(s.t.Context(), daemon.Options{
		Config: s.config, Logger: slog.New(slog.DiscardHandler), Metrics: observe.NewMetrics("test"),
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { d.Close(context.WithoutCancel(s.t.Context())) })
	return d
}

func (s *shop) register() {
	s.t.Helper()
	now := time.Now().Truncate(time.Millisecond)
	v := pgstore.Version{
		ActivityID: s.scope.ActivityID, SKUID: s.scope.SKUID, Version: s.scope.Version, Total: units, Buckets: 1,
		StartsAt: now.Add(-time.Minute), EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(2 * time.Hour),
	}
	bucket := pgstore.Bucket{ID: 0, Initial: units, State: pgstore.ScopeActive, Confirmed: true}
	if err := s.daemon.Postgres.RegisterVersion(s.t.Context(), v, []pgstore.Bucket{bucket}, "test"); err != nil {
		s.t.Fatal(err)
	}
	s.exec(`INSERT INTO shop.stock (activity_id, sku_id, activity_version, total) VALUES ($1, $2, $3, $4)`,
		s.scope.ActivityID, s.scope.SKUID, s.scope.Version, units)
	b := s.runner.Batch()
	r := b.Provision(s.scope, lua.ProvisionArgs{
		State: lua.StateActive, StartsAtMS: v.StartsAt.UnixMilli(), EndsAtMS: v.EndsAt.UnixMilli(),
		RetentionUntilMS: v.RetentionUntil.UnixMilli(), SchemaVersion: 1, Initial: units,
	})
	s.run(b)
	if reply, err := r.Get(); err != nil || reply.Code != lua.ProvisionCreated {
		s.t.Fatalf("provision: %+v, %v", reply, err)
	}
}

func (s *shop) run(b *lua.Batch) {
	s.t.Helper()
	if err := b.Run(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

func (s *shop) exec(sql string, args ...any) {
	s.t.Helper()
	if _, err := s.db.Exec(s.t.Context(), sql, args...); err != nil {
		s.t.Fatalf("%s: %v", sql, err)
	}
}

// reserve makes a reservation that has expired, and walks it along the statuses.
func (s *shop) reserve(walk ...reservation.Status) string {
	s.t.Helper()
	n := len(s.ids)
	user, request := fmt.Sprint("u", n), fmt.Sprint("q", n)
	id := reservation.NewID([]byte("secret"), s.scope.ActivityID, s.scope.SKUID, user, request)
	b := s.runner.Batch()
	r := b.Reserve(s.scope, lua.ReserveArgs{
		RequestID: request, ReservationID: id, UserID: user, TTLMS: 1, SchemaVersion: 1, MessageID: reservation.MessageID(id),
	})
	s.run(b)
	if reply, err := r.Get(); err != nil || reply.Code != lua.ReserveAccepted {
		s.t.Fatalf("reserve: %+v, %v", reply, err)
	}
	for _, to := range walk {
		s.transition(id, to)
	}
	s.ids = append(s.ids, id)
	time.Sleep(5 * time.Millisecond) // it has expired, and settled, by Redis TIME
	return id
}

func (s *shop) transition(id string, to reservation.Status) {
	s.t.Helper()
	b := s.runner.Batch()
	r := b.Transition(s.scope, lua.TransitionArgs{ReservationID: id, Target: to})
	s.run(b)
	if reply, err := r.Get(); err != nil || reply.Code != lua.TransitionUpdated {
		s.t.Fatalf("transition of %s to %s: %+v, %v", id, to, reply, err)
	}
}

// release gives a reservation's unit back without any claim, as if PostgreSQL
// had lost it.
func (s *shop) release(id string) {
	s.t.Helper()
	b := s.runner.Batch()
	r := b.Compensate(s.scope, lua.CompensateArgs{ReservationID: id, UserID: s.hash(id)["user_id"], Reason: "test"})
	s.run(b)
	if reply, err := r.Get(); err != nil || reply.Code != lua.CompensateReleased {
		s.t.Fatalf("compensate %s: %+v, %v", id, reply, err)
	}
}

// orphan deletes the hash of a reservation and returns what was in it.
func (s *shop) orphan(id string) map[string]string {
	s.t.Helper()
	h := s.hash(id)
	if err := s.redis.Del(s.t.Context(), s.scope.ReservationKey(id)).Err(); err != nil {
		s.t.Fatal(err)
	}
	return h
}

func (s *shop) hash(id string) map[string]string {
	s.t.Helper()
	h, err := s.redis.HGetAll(s.t.Context(), s.scope.ReservationKey(id)).Result()
	if err != nil {
		s.t.Fatal(err)
	}
	return h
}

func (s *shop) wantStatus(id string, want reservation.Status) {
	s.t.Helper()
	if got := reservation.Status(s.hash(id)["status"]); got != want {
		s.t.Errorf("%s is %q, want %q", id, got, want)
	}
}

// order creates the reservation's order as an unmodified consumer does.
func (s *shop) order(id string) error {
	n := -1
	for i, one := range s.ids {
		if one == id {
			n = i
		}
	}
	_, err := s.db.Exec(s.t.Context(), `
		INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8)`,
		"o-"+id, id, fmt.Sprint("q", n), s.scope.ActivityID, s.scope.SKUID, s.scope.Version, s.scope.Bucket, fmt.Sprint("u", n))
	return err
}

func (s *shop) mustOrder(id string) {
	s.t.Helper()
	if err := s.order(id); err != nil {
		s.t.Fatal(err)
	}
}

func (s *shop) claim(id string) reservation.Outcome {
	s.t.Helper()
	var outcome reservation.Outcome
	err := s.db.QueryRow(s.t.Context(), `SELECT outcome FROM seckill.reservation_claim WHERE reservation_id = $1`, id).Scan(&outcome)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		s.t.Fatal(err)
	}
	return outcome
}

// stock is available, reserved and released_total.
func (s *shop) stock() [3]int64 {
	s.t.Helper()
	snapshot := s.daemon.Redis.Snapshots(s.t.Context(), []reservation.Scope{s.scope})[0]
	if snapshot.Err != nil || snapshot.Initial != snapshot.Available+snapshot.Reserved {
		s.t.Fatalf("stock %+v", snapshot)
	}
	return [3]int64{snapshot.Available, snapshot.Reserved, max(snapshot.ReleasedTotal, 0)}
}

func (s *shop) wantStock(available, reserved, released int64) {
	s.t.Helper()
	if diff := cmp.Diff([3]int64{available, reserved, released}, s.stock()); diff != "" {
		s.t.Errorf("stock: available, reserved, released_total:\n%s", diff)
	}
}

// keepsPromises checks S1, and S2 for the reservations that were ever made.
// Each status holds one unit, but for RELEASED.
func (s *shop) keepsPromises() {
	s.t.Helper()
	var held int64
	for _, id := range s.ids {
		if reservation.Status(s.hash(id)["status"]) != reservation.StatusReleased {
			held++
		} else if c := s.claim(id); c != reservation.OutcomeFenced && c != reservation.OutcomeRejected {
			s.t.Errorf("S1: %s is RELEASED and its claim is %q", id, c)
		}
	}
	if got := s.stock()[1]; got != held {
		s.t.Errorf("S2: %d units are reserved, and %d reservations hold one", got, held)
	}
}

// task opens a task of the kind for the scope.
func (s *shop) task(kind string) pgstore.Task {
	s.t.Helper()
	report := reservation.TaskReport{Kind: kind, Scope: s.scope.Tag(), Cause: "test", Count: 1}
	if err := s.daemon.Postgres.ReportTasks(s.t.Context(), []reservation.TaskReport{report}); err != nil {
		s.t.Fatal(err)
	}
	tag := s.scope.Tag()
	tasks, err := s.daemon.Postgres.Tasks(s.t.Context(), pgstore.TaskFilter{Kinds: []string{kind}, Scope: &tag, States: pgstore.Unresolved})
	if err != nil || len(tasks) != 1 {
		s.t.Fatalf("tasks %v, %v", tasks, err)
	}
	return tasks[0]
}

func (s *shop) state(t pgstore.Task) pgstore.TaskState {
	s.t.Helper()
	now, err := s.daemon.Postgres.Task(s.t.Context(), t.ID)
	if err != nil {
		s.t.Fatal(err)
	}
	return now.State
}

// show is `task show`: the plan, kept.
func (s *shop) show(t pgstore.Task, sel approval.Selection) approval.Plan {
	s.t.Helper()
	plan, err := s.approver.Propose(s.t.Context(), t, sel)
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.approver.Keep(s.t.Context(), plan); err != nil {
		s.t.Fatal(err)
	}
	return plan
}

var alice = approval.Act{Actor: "alice", Reason: "looked at it"}

// approve is `task approve`, with what was shown before.
func (s *shop) approve(t pgstore.Task, sel approval.Selection) (approval.Report, error) {
	s.t.Helper()
	plan, err := s.approver.Propose(s.t.Context(), t, sel)
	if err != nil {
		return approval.Report{}, err
	}
	if plan, err = s.approver.Recall(s.t.Context(), plan); err != nil {
		s.t.Fatal(err)
	}
	return s.approver.Apply(s.t.Context(), plan, alice)
}

func (s *shop) mustApprove(t pgstore.Task, sel approval.Selection) approval.Report {
	s.t.Helper()
	report, err := s.approve(t, sel)
	if err != nil {
		s.t.Fatal(err)
	}
	return report
}

// wantOutcomes checks how often each outcome came.
func wantOutcomes(t *testing.T, report approval.Report, want map[approval.Outcome]int) {
	t.Helper()
	if diff := cmp.Diff(want, report.Counts()); diff != "" {
		t.Errorf("outcomes:\n%s\n%+v", diff, report.Results)
	}
}

// audited lists actor, action, reason, and before and after of status and
// reserved units, of the audit rows of a reservation.
func (s *shop) audited(id string) []string {
	s.t.Helper()
	rows, err := s.db.Query(s.t.Context(), `
		SELECT concat_ws(' ', actor, action, reason, detail->>'action', detail->>'outcome',
		       coalesce(nullif(detail#>>'{before,status}', ''), 'gone'), detail#>>'{before,stock,reserved}',
		       detail#>>'{after,status}', detail#>>'{after,stock,reserved}')
		FROM seckill.audit_log WHERE subject = $1 ORDER BY id`, id)
	if err != nil {
		s.t.Fatal(err)
	}
	entries, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		s.t.Fatal(err)
	}
	return entries
}
