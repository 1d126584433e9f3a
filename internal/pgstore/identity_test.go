package pgstore_test

import (
	"errors"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/migrations"
)

func checkIdentity(t *testing.T, store *pgstore.Store, elsewhere ...pgstore.Identity) pgstore.IdentityCheck {
	t.Helper()
	check, err := store.CheckIdentity(t.Context(), elsewhere...)
	if err != nil {
		t.Fatal(err)
	}
	return check
}

func TestIdentityOfOneServer(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	consumer := connect(t, db.as(t, "seckill_consumer"))
	var before pgstore.Identity
	for i, id := range []string{"r1", "r2", "r3"} {
		check := checkIdentity(t, db.store)
		if check.Changed != "" || check.Halted {
			t.Errorf("check %d: %+v", i, check)
		}
		if now := check.Identity; now.SystemIdentifier == 0 || now.Timeline < 1 || now.WALPosition == 0 || now.WALPosition < before.WALPosition {
			t.Errorf("identity %v after %v", now, before)
		}
		before = check.Identity
		if err := order(t.Context(), consumer, db.scope, id); err != nil {
			t.Fatal(err)
		}
	}
	other := db.open(t, "seckill_daemon") // another process, or this one after a restart
	if check := checkIdentity(t, other, before); check.Changed != "" || check.Halted || check.Identity.WALPosition <= before.WALPosition {
		t.Errorf("by another process: %+v", check)
	}
}

func TestIdentityThatChanged(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]string{
		"system_identifier_changed": `UPDATE seckill.server_identity SET system_identifier = system_identifier - 1`,
		"timeline_changed":          `UPDATE seckill.server_identity SET timeline = timeline + 1`,
		"wal_position_went_back":    `UPDATE seckill.server_identity SET wal_position = 'FFFF/0'`,
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			checkIdentity(t, db.store)
			exec(t, connect(t, db.url), change)
			store := db.open(t, "seckill_daemon")
			if check := checkIdentity(t, store); check.Changed != want || !check.Halted {
				t.Errorf("first check: %+v, want %s and a halt", check, want)
			}
			if check := checkIdentity(t, store); check.Changed != "" || !check.Halted {
				t.Errorf("second check: %+v, want no change more, but the halt", check)
			}
			halts, err := store.Halts(t.Context())
			if err != nil || len(halts) != 1 || halts[0].Kind != pgstore.TaskPostgresChanged || halts[0].Cause != want || len(halts[0].Sample) != 2 {
				t.Fatalf("halts: %+v, %v", halts, err)
			}
			if err := store.ResolveTask(t.Context(), halts[0].ID, "ann", "never mind"); !errors.Is(err, pgstore.ErrNotLiftedByHand) {
				t.Errorf("lifted by hand: %v, want ErrNotLiftedByHand", err)
			}
			if check := checkIdentity(t, store); check.Changed != "" || !check.Halted {
				t.Errorf("after it was to be lifted by hand: %+v, want the halt still", check)
			}
		})
	}
}

// A volume that is restored takes its own row back with it: what this process,
// or somebody else, saw shows the change.
func TestIdentityOfARestoredVolume(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	seen := checkIdentity(t, db.store).Identity
	seen.WALPosition += 1 << 30
	if check := checkIdentity(t, db.open(t, "seckill_daemon"), seen); check.Changed != "wal_position_went_back" || !check.Halted {
		t.Errorf("seen elsewhere: %+v", check)
	}
}

// A real standby: nothing can be fenced on it, and its promotion is seen by
// the first check, though nothing else about it differs.
func TestStandbyAndPromotion(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Postgres: true})
	super := stack.PostgresURL("postgres", "postgres")
	if _, err := migrations.Up(t.Context(), super, migrations.Options{WithReference: true}); err != nil {
		t.Fatal(err)
	}
	primary := open(t, pgstore.Config{URL: stacktest.LoginURL(t, stack, super, "seckill_daemon")})
	before := checkIdentity(t, primary)
	scope := stacktest.Scope(t)
	if results, err := primary.Fence(t.Context(), "x", requests(scope, "r1")); err != nil || !results[0].Won {
		t.Fatalf("fence on the primary: %+v, %v", results, err)
	}

	service, err := stack.StartStandby(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	standby := open(t, pgstore.Config{URL: "postgres://test_seckill_daemon@" + service.Addr() + "/postgres?sslmode=disable"})
	if results, err := standby.Fence(t.Context(), "x", requests(scope, "r2")); !errors.Is(err, pgstore.ErrInRecovery) || results[0].Known {
		t.Errorf("fence on the standby: %+v, %v", results, err)
	}
	if err := standby.FenceReady(t.Context()); !errors.Is(err, pgstore.ErrInRecovery) {
		t.Errorf("FenceReady on the standby: %v", err)
	}
	if _, err := standby.CheckIdentity(t.Context()); !errors.Is(err, pgstore.ErrInRecovery) {
		t.Errorf("CheckIdentity on the standby: %v", err)
	}

	if err := stack.PromoteStandby(t.Context()); err != nil {
		t.Fatal(err)
	}
	check := checkIdentity(t, standby)
	if check.Changed != "timeline_changed" || !check.Halted || check.Identity.Timeline != before.Identity.Timeline+1 ||
		check.Identity.SystemIdentifier != before.Identity.SystemIdentifier {
		t.Errorf("after the promotion: %+v, before %+v", check, before)
	}
	results, err := standby.Fence(t.Context(), "x", requests(scope, "r1", "r2"))
	if err != nil || results[0].Won || !results[1].Won {
		t.Errorf("fence on the new primary: %+v, %v", results, err)
	}
}

func TestServerTime(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	first, err := db.store.ServerTime(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	second, err := db.store.ServerTime(t.Context())
	if err != nil || !second.After(first) || first.Location() != time.UTC {
		t.Errorf("%v after %v, %v", second, first, err)
	}
}
