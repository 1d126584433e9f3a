package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

func TestFenceThenOrderAndOrderThenFence(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	consumer := connect(t, db.as(t, "seckill_consumer"))
	if err := order(t.Context(), consumer, db.scope, "ordered"); err != nil {
		t.Fatal(err)
	}
	exec(t, consumer, `SELECT seckill.claim_reservation('claimed')`)
	exec(t, consumer, `SELECT seckill.reject_reservation('rejected', 'no_stock')`)

	want := []reservation.FenceResult{
		{ID: "ordered", Known: true, Outcome: reservation.OutcomeOrder, OrderID: "o-ordered"},
		{ID: "fresh", Known: true, Won: true, Outcome: reservation.OutcomeFenced},
		{ID: "claimed", Known: true, Outcome: reservation.OutcomeOrder},
		{ID: "rejected", Known: true, Outcome: reservation.OutcomeRejected},
	}
	ids := []string{"ordered", "fresh", "claimed", "rejected"}
	got, err := db.store.Fence(t.Context(), "message_lost", requests(db.scope, ids...))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("first fence (-want +got):\n%s", diff)
	}
	want[1].Won = false // the second time it is there already
	if got, err = db.store.Fence(t.Context(), "message_lost", requests(db.scope, ids...)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("second fence (-want +got):\n%s", diff)
	}
	if err := order(t.Context(), consumer, db.scope, "fresh"); state(err) != "SK001" {
		t.Errorf("order after the fence: %v, want SK001", err)
	}
}

// An order that was there before the trigger has no claim: the evidence view
// keeps it from being fenced. Beside a claim that excludes it nothing is known.
func TestFenceSparesWhatTheEvidenceKnows(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	super := connect(t, db.url)
	if _, err := db.store.Fence(t.Context(), "x", requests(db.scope, "contradictory")); err != nil {
		t.Fatal(err)
	}
	exec(t, super, `ALTER TABLE shop.orders DISABLE TRIGGER USER`)
	for _, id := range []string{"legacy", "contradictory"} {
		if err := order(t.Context(), super, db.scope, id); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"insert", "update", "change"} {
		exec(t, super, `ALTER TABLE shop.orders ENABLE ALWAYS TRIGGER zzz_seckill_order_`+name)
	}
	got, err := db.store.Fence(t.Context(), "x", requests(db.scope, "legacy", "contradictory"))
	if err != nil {
		t.Fatal(err)
	}
	want := []reservation.FenceResult{
		{ID: "legacy", Known: true, Outcome: reservation.OutcomeOrder, OrderID: "o-legacy"},
		{ID: "contradictory", OrderID: "o-contradictory"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
	records, err := db.store.Records(t.Context(), []string{"legacy", "contradictory"})
	if err != nil {
		t.Fatal(err)
	}
	if e := reservation.ClassifyOrders(db.scope, "u-legacy", records["legacy"]); e.State != reservation.OrderExists || e.Cause != reservation.CauseOrderWithoutClaim {
		t.Errorf("legacy order: %+v", e)
	}
	if e := reservation.ClassifyOrders(db.scope, "u-contradictory", records["contradictory"]); e.Cause != reservation.CauseOrderAfterFence {
		t.Errorf("order beside a fence: %+v", e)
	}
}

// Order and fence at the same moment, with both kinds of consumer, savepoints,
// roll-backs and commits in either order: exactly one wins, and both sides know
// which.
func TestRacesOfOrderAndFence(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	const races, seed = 300, 20260
	t.Logf("seed %d", seed)
	config, err := pgxpool.ParseConfig(db.as(t, "seckill_consumer"))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 4
	consumers, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer consumers.Close()

	type outcome struct {
		created bool
		refused bool
		result  reservation.FenceResult
	}
	outcomes := make([]outcome, races)
	slots := make(chan struct{}, 4)
	var group sync.WaitGroup
	for i := range races {
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			id := fmt.Sprintf("r%03d", i)
			var both sync.WaitGroup
			before, after := time.Duration(random.IntN(1500))*time.Microsecond, time.Duration(random.IntN(1500))*time.Microsecond
			early, rollback := random.IntN(3) == 0, random.IntN(10) == 0
			fenceAt := time.Duration(random.IntN(3000)) * time.Microsecond
			both.Go(func() {
				err := pgx.BeginFunc(t.Context(), consumers, func(tx pgx.Tx) error {
					time.Sleep(before)
					if early {
						var claimed string
						if err := tx.QueryRow(t.Context(), `SELECT outcome FROM seckill.claim_reservation($1, NULL, $2)`, id, db.scope.Tag()).Scan(&claimed); err != nil {
							return err
						}
						if claimed != "ORDER" {
							return errRefused
						}
					}
					if err := order(t.Context(), tx, db.scope, id); err != nil {
						return err
					}
					time.Sleep(after)
					if rollback {
						return errRolledBack
					}
					return nil
				})
				outcomes[i].created = err == nil
				outcomes[i].refused = state(err) == "SK001" || errors.Is(err, errRefused)
				if err != nil && !outcomes[i].refused && !errors.Is(err, errRolledBack) {
					t.Errorf("%s: the consumer failed: %v", id, err)
				}
			})
			both.Go(func() {
				time.Sleep(fenceAt)
				results, err := db.store.Fence(t.Context(), "race", requests(db.scope, id))
				if err != nil || !results[0].Known {
					t.Errorf("%s: fence: %+v, %v", id, results, err)
				}
				outcomes[i].result = results[0]
			})
			both.Wait()
		})
	}
	group.Wait()

	ids := make([]string, races)
	for i := range ids {
		ids[i] = fmt.Sprintf("r%03d", i)
	}
	records, err := db.store.Records(t.Context(), ids)
	if err != nil {
		t.Fatal(err)
	}
	wins := map[string]int{}
	for i, id := range ids {
		o, r := outcomes[i], records[id]
		evidence := reservation.ClassifyOrders(db.scope, "u-"+id, r)
		switch {
		case o.created && !o.result.Won && o.result.Outcome == reservation.OutcomeOrder && evidence.State == reservation.OrderExists && evidence.Cause == "":
			wins["order"]++
		case !o.created && o.result.Won && o.result.Outcome == reservation.OutcomeFenced && evidence.State == reservation.OrderFenced:
			wins["fence"]++
		default:
			t.Errorf("%s: %+v, evidence %+v", id, o, evidence)
		}
	}
	t.Logf("won: %v", wins)
	if wins["order"] < 20 || wins["fence"] < 20 {
		t.Errorf("won: %v; the races were none", wins)
	}
}

var (
	errRefused    = errors.New("refused by the early claim")
	errRolledBack = errors.New("rolled back")
)

// One hung consumer holds up its own reservation and no other.
func TestAHungConsumerHoldsUpNoPage(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	consumer := connect(t, db.as(t, "seckill_consumer"))
	tx, err := consumer.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := order(t.Context(), tx, db.scope, "r25"); err != nil {
		t.Fatal(err)
	}
	ids := make([]string, 50)
	for i := range ids {
		ids[i] = fmt.Sprintf("r%02d", i)
	}
	results, err := db.store.Fence(t.Context(), "x", requests(db.scope, ids...))
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range results {
		want := reservation.FenceResult{ID: ids[i], Known: true, Won: true, Outcome: reservation.OutcomeFenced}
		if i == 25 {
			want = reservation.FenceResult{ID: ids[i]}
		}
		if r != want {
			t.Errorf("%+v, want %+v", r, want)
		}
	}
	if results, err = db.store.Fence(t.Context(), "x", requests(db.scope, "r25")); err != nil || results[0].Known {
		t.Errorf("alone: %+v, %v; want not known", results, err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatalf("the consumer was made the victim: %v", err)
	}
	if results, err = db.store.Fence(t.Context(), "x", requests(db.scope, "r25")); err != nil || results[0].Outcome != reservation.OutcomeOrder {
		t.Errorf("after its commit: %+v, %v", results, err)
	}
}

// A consumer that inserts a batch in another order than the fence's: the fence
// yields, and no consumer is ever the victim, however late it closes the cycle
// (after its own deadlock check, PostgreSQL would make the consumer the victim).
func TestTheFenceYieldsInADeadlock(t *testing.T) {
	t.Parallel()
	for name, pause := range map[string]time.Duration{"at once": 0, "after the fence's deadlock check": 1200 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			consumer := connect(t, db.as(t, "seckill_consumer"))
			super := connect(t, db.url)
			tx, err := consumer.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := order(t.Context(), tx, db.scope, "b"); err != nil {
				t.Fatal(err)
			}
			fenced := make(chan []reservation.FenceResult, 1)
			go func() {
				results, err := db.store.Fence(t.Context(), "x", requests(db.scope, "b", "a"))
				if err != nil {
					t.Errorf("fence: %v", err)
				}
				fenced <- results
			}()
			for waiting := false; !waiting; { // it has a, and waits for b
				if err := super.QueryRow(t.Context(), `SELECT count(*) > 0 FROM pg_stat_activity, pg_sleep(0.005)
					WHERE wait_event_type = 'Lock' AND query LIKE '%fence_reservations%' AND pid <> pg_backend_pid() AND datname = current_database()`).Scan(&waiting); err != nil {
					t.Fatal(err)
				}
			}
			time.Sleep(pause)
			err = order(t.Context(), tx, db.scope, "a")
			if err == nil {
				err = tx.Commit(t.Context())
			} else {
				_ = tx.Rollback(t.Context())
			}
			if err != nil && state(err) != "SK001" {
				t.Errorf("the consumer: %v; want success, or a fence that came first", err)
			}
			for _, r := range <-fenced {
				if err == nil && r.Known && r.Outcome != reservation.OutcomeOrder {
					t.Errorf("%+v beside the consumer's order", r)
				}
			}
		})
	}
}

func TestFenceIsTriedAgain(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"40001", "40P01"} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			super := connect(t, db.url)
			// Fails as often as the sequence is below the number.
			install := func(failures int) {
				exec(t, super, `DROP TRIGGER IF EXISTS fail ON seckill.reservation_claim; DROP SEQUENCE IF EXISTS failures; CREATE SEQUENCE failures;
					GRANT USAGE ON SEQUENCE failures TO PUBLIC`)
				exec(t, super, fmt.Sprintf(`CREATE OR REPLACE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF nextval('public.failures') <= %d THEN RAISE EXCEPTION 'injected' USING ERRCODE = '%s'; END IF; RETURN NEW; END $$`, failures, code))
				exec(t, super, `CREATE TRIGGER fail BEFORE INSERT ON seckill.reservation_claim FOR EACH ROW EXECUTE FUNCTION public.fail()`)
			}
			install(4)
			results, err := db.store.Fence(t.Context(), "x", requests(db.scope, "r1"))
			if err != nil || !results[0].Won {
				t.Errorf("after four failures: %+v, %v", results, err)
			}
			install(1000)
			results, err = db.store.Fence(t.Context(), "x", requests(db.scope, "r2"))
			if state(err) != code || results[0].Known {
				t.Errorf("for ever: %+v, %v; want a bounded number of tries", results, err)
			}
		})
	}
}

func TestFenceRefusesOtherIsolation(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable, pgx.ReadUncommitted} {
		conn := connect(t, db.as(t, "seckill_daemon"))
		tx, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), `SELECT seckill.fence_reservations('{r1}', 'x', NULL)`); state(err) != "SK012" {
			t.Errorf("%s: %v, want SK012", level, err)
		}
		_ = tx.Rollback(t.Context())
	}
	// A role's default does not get in the way of the store.
	store := open(t, pgstore.Config{URL: withParameter(t, db.as(t, "seckill_daemon"), "options",
		"-c default_transaction_isolation=serializable -c synchronous_commit=off")})
	results, err := store.Fence(t.Context(), "x", requests(db.scope, "r1"))
	if err != nil || !results[0].Won {
		t.Errorf("with a serializable default: %+v, %v", results, err)
	}
}

// A consumer whose snapshot is older than the fence is told to try again, and
// learns of the fence then; it never creates the order.
func TestFenceAgainstAnOldSnapshot(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		for _, early := range []bool{false, true} {
			db := newDatabase(t)
			consumer := connect(t, db.as(t, "seckill_consumer"))
			tx, err := consumer.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), `SELECT FROM shop.stock`); err != nil { // takes the snapshot
				t.Fatal(err)
			}
			if results, err := db.store.Fence(t.Context(), "x", requests(db.scope, "r1")); err != nil || !results[0].Won {
				t.Fatalf("fence: %+v, %v", results, err)
			}
			if early {
				_, err = tx.Exec(t.Context(), `SELECT seckill.claim_reservation('r1')`)
			} else {
				err = order(t.Context(), tx, db.scope, "r1")
			}
			if state(err) != "40001" {
				t.Errorf("%s, early claim %v: %v; want 40001", level, early, err)
			}
			_ = tx.Rollback(t.Context())
			if err := order(t.Context(), consumer, db.scope, "r1"); state(err) != "SK001" {
				t.Errorf("tried again: %v; want SK001", err)
			}
		}
	}
}

// A fence that waits for a consumer sees its order once it has committed: it
// reads the winner in a second statement.
func TestFenceSeesWhoCommitsWhileItWaits(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	consumer, super := connect(t, db.as(t, "seckill_consumer")), connect(t, db.url)
	// Long enough that the fence certainly still waits when the order commits.
	exec(t, super, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = %L', current_database(), '60s'); END $$`)
	store := db.open(t, "seckill_daemon")
	tx, err := consumer.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := order(t.Context(), tx, db.scope, "r1"); err != nil {
		t.Fatal(err)
	}
	fenced := make(chan []reservation.FenceResult, 1)
	go func() {
		results, err := store.Fence(t.Context(), "x", requests(db.scope, "r1", "r2"))
		if err != nil {
			t.Errorf("fence: %v", err)
		}
		fenced <- results
	}()
	for waiting := false; !waiting; {
		if err := super.QueryRow(t.Context(), `SELECT count(*) > 0 FROM pg_stat_activity, pg_sleep(0.005)
			WHERE wait_event_type = 'Lock' AND query LIKE '%fence_reservations%' AND pid <> pg_backend_pid() AND datname = current_database()`).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []reservation.FenceResult{
		{ID: "r1", Known: true, Outcome: reservation.OutcomeOrder, OrderID: "o-r1"},
		{ID: "r2", Known: true, Won: true, Outcome: reservation.OutcomeFenced},
	}
	if diff := cmp.Diff(want, <-fenced); diff != "" {
		t.Errorf("results (-want +got):\n%s", diff)
	}
}

func TestFenceLeavesTheSessionAsItWas(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	conn := connect(t, db.as(t, "seckill_daemon"))
	exec(t, conn, `SET lock_timeout = '7s'`)
	show := func() (value string) {
		if err := conn.QueryRow(t.Context(), `SHOW lock_timeout`).Scan(&value); err != nil {
			t.Fatal(err)
		}
		return value
	}
	exec(t, conn, `SELECT seckill.fence_reservations('{r1}', 'x', NULL)`)
	if got := show(); got != "7s" {
		t.Errorf("lock_timeout after the fence: %s", got)
	}
	exec(t, conn, `BEGIN; SELECT seckill.fence_reservations('{r2}', 'x', NULL)`)
	if got := show(); got != "7s" {
		t.Errorf("lock_timeout in the fence's transaction: %s", got)
	}
}

func TestFenceNotReady(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	super := connect(t, db.url)
	if err := db.store.FenceReady(t.Context()); err != nil {
		t.Fatalf("before: %v", err)
	}
	exec(t, super, `ALTER TABLE shop.orders DISABLE TRIGGER USER; CREATE TABLE shop.more () INHERITS (shop.orders)`)
	for name, check := range map[string]func() error{
		"FenceReady": func() error { return db.store.FenceReady(t.Context()) },
		"Fence": func() error {
			results, err := db.store.Fence(t.Context(), "x", requests(db.scope, "r1"))
			if results[0].Known {
				t.Errorf("fenced all the same: %+v", results)
			}
			return err
		},
	} {
		err := check()
		notReady, ok := errors.AsType[*pgstore.FenceNotReadyError](err)
		if !ok || len(notReady.Problems) != 6 {
			t.Errorf("%s: %v; want six problems", name, err)
		}
	}
	if err := order(t.Context(), super, db.scope, "r1"); err != nil {
		t.Errorf("r1 was fenced: %v", err)
	}
}

func TestEvidenceThatIsNotInstalled(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	super := connect(t, db.url)
	exec(t, super, `SELECT seckill.ship_evidence('SELECT reservation_id, order_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id, active, created_at FROM seckill.no_evidence()')`)
	if _, err := db.store.Records(t.Context(), []string{"r1"}); err == nil || !strings.Contains(err.Error(), "no view over the orders") {
		t.Errorf("Records: %v", err)
	}
	if err := db.store.FenceReady(t.Context()); !errors.As(err, new(*pgstore.FenceNotReadyError)) {
		t.Errorf("FenceReady: %v", err)
	}
}

func TestDaemonFences(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	other := db.scope
	other.Bucket++
	fence := func(s reservation.Scope, reason string, ids ...string) {
		t.Helper()
		if _, err := db.store.Fence(t.Context(), reason, requests(s, ids...)); err != nil {
			t.Fatal(err)
		}
	}
	count := func(window time.Duration) map[reservation.Scope]int64 {
		t.Helper()
		counts, err := db.store.DaemonFences(t.Context(), []reservation.Scope{db.scope, other}, window)
		if err != nil {
			t.Fatal(err)
		}
		return counts
	}
	fence(db.scope, "message_lost", "r1", "r2", "r3")
	fence(other, "dead_letter", "r4")
	fence(db.scope, pgstore.ReasonRefence, "r5", "r6")
	exec(t, connect(t, db.as(t, "seckill_consumer")), `SELECT seckill.reject_reservation('r7', 'no_stock', $1)`, db.scope.Tag())
	exec(t, connect(t, db.url), `INSERT INTO seckill.reservation_claim (reservation_id, outcome, activity_id, sku_id, activity_version, bucket_id, claimed_at)
		VALUES ('old', 'FENCED', $1, $2, $3, $4, now() - interval '1 hour')`, db.scope.ActivityID, db.scope.SKUID, db.scope.Version, db.scope.Bucket)
	if diff := cmp.Diff(map[reservation.Scope]int64{db.scope: 3, other: 1}, count(10*time.Minute)); diff != "" {
		t.Errorf("in ten minutes (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[reservation.Scope]int64{db.scope: 4, other: 1}, count(2*time.Hour)); diff != "" {
		t.Errorf("in two hours (-want +got):\n%s", diff)
	}
	// A person lifts the scope's halt: its budget begins anew.
	report := reservation.TaskReport{Kind: pgstore.TaskReleaseStorm, Scope: db.scope.Tag(), Cause: "max_release", Count: 1}
	if err := db.store.ReportTasks(t.Context(), []reservation.TaskReport{report}); err != nil {
		t.Fatal(err)
	}
	halts, err := db.store.Halts(t.Context())
	if err != nil || len(halts) != 1 || halts[0].Scope != db.scope.Tag() {
		t.Fatalf("halts: %+v, %v", halts, err)
	}
	if err := db.store.ResolveTask(t.Context(), halts[0].ID, "ann", "the group is right"); err != nil {
		t.Fatal(err)
	}
	fence(db.scope, "message_lost", "r8")
	if diff := cmp.Diff(map[reservation.Scope]int64{db.scope: 1, other: 1}, count(10*time.Minute)); diff != "" {
		t.Errorf("after the halt (-want +got):\n%s", diff)
	}
}

// A large page: ids in any order, some twice.
func TestFenceOfALargePage(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	var all []reservation.FenceRequest
	for i := range 2000 {
		all = append(all, requests(db.scope, fmt.Sprintf("r%d", (i*7919)%1500))...)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	results, err := db.store.Fence(ctx, "x", all)
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(results, func(r reservation.FenceResult) bool { return !r.Known || !r.Won }); i >= 0 {
		t.Errorf("%+v", results[i])
	}
	counts, err := db.store.DaemonFences(ctx, []reservation.Scope{db.scope}, time.Hour)
	if err != nil || counts[db.scope] != 1500 {
		t.Errorf("%v claims, %v; want 1500", counts, err)
	}
}
