package lifecycle_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/lifecycle"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

type bench struct {
	*lifecycle.Manager
	t     *testing.T
	redis redis.UniversalClient
	owner *pgxpool.Pool // of the database
	spec  lifecycle.Spec
}

// newBench is a manager on a Redis cluster, where buckets are on several
// nodes, with the least rights in PostgreSQL.
func newBench(t *testing.T) bench {
	t.Helper()
	stack := stacktest.Shared(t)
	database := stacktest.Database(t, stack)
	owner, err := pgxpool.New(t.Context(), database)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(owner.Close)
	url := stacktest.LoginURL(t, stack, database, "seckill_operator")
	registry, err := pgstore.Open(t.Context(), pgstore.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(registry.Close)
	clients, err := redisstore.Open(t.Context(), config.Redis{
		Addrs: stack.Cluster().Addrs(), Mode: config.RedisAuto, DialTimeout: time.Second, CommandTimeout: 5 * time.Second, PoolSize: 4,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = clients.Close() })
	store, err := redisstore.New(clients, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	scope := stacktest.Scope(t)
	now := time.Now()
	return bench{
		Manager: &lifecycle.Manager{Redis: store, Registry: registry}, t: t, redis: clients.Reading, owner: owner,
		spec: lifecycle.Spec{
			ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: 7, Total: 1001, Buckets: 4,
			StartsAt: now, EndsAt: now.Add(time.Hour), Retention: time.Hour,
		},
	}
}

func (b bench) create() {
	b.t.Helper()
	if err := b.Create(b.t.Context(), b.spec, "test"); err != nil {
		b.t.Fatal(err)
	}
}

// states are the buckets' states in Redis and in the registry.
func (b bench) states() (inRedis []lua.State, registered []pgstore.ScopeState) {
	b.t.Helper()
	for _, s := range b.Redis.Snapshots(b.t.Context(), b.spec.Scopes()) {
		if s.Err != nil {
			b.t.Fatal(s.Err)
		}
		inRedis = append(inRedis, s.State)
	}
	found, err := b.Registry.Scopes(b.t.Context(), pgstore.ScopeFilter{ActivityID: b.spec.ActivityID})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, f := range found {
		registered = append(registered, f.State)
	}
	return inRedis, registered
}

func (b bench) wantStates(states ...lua.State) {
	b.t.Helper()
	inRedis, registered := b.states()
	var alike []pgstore.ScopeState
	for _, s := range states {
		alike = append(alike, pgstore.ScopeState(s))
	}
	if diff := cmp.Diff(states, inRedis); diff != "" {
		b.t.Errorf("Redis: %s", diff)
	}
	if diff := cmp.Diff(alike, registered); diff != "" {
		b.t.Errorf("registry: %s", diff)
	}
}

func TestCreate(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	b.wantStates("ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE")
	var initial []int64
	for _, s := range b.Redis.Snapshots(t.Context(), b.spec.Scopes()) {
		initial = append(initial, s.Initial)
		if s.Available != s.Initial || s.Reserved != 0 {
			t.Errorf("a fresh bucket has %+v", s.SnapshotReply)
		}
	}
	if diff := cmp.Diff([]int64{251, 250, 250, 250}, initial); diff != "" {
		t.Error(diff)
	}
	key := reservation.CurrentVersionKey(b.spec.ActivityID)
	if got := b.redis.Get(t.Context(), key).Val(); got != "7" {
		t.Errorf("current version %q, want 7", got)
	}
	if ttl := b.redis.PTTL(t.Context(), key).Val(); ttl < 30*24*time.Hour || ttl > 31*24*time.Hour {
		t.Errorf("current version is kept for %s, want 30 days beyond the end", ttl)
	}
	for _, scope := range b.spec.Scopes() {
		if ttl := b.redis.PTTL(t.Context(), scope.StockKey()).Val(); ttl < 119*time.Minute || ttl > 120*time.Minute {
			t.Errorf("%s expires in %s, want at the retention", scope.StockKey(), ttl)
		}
	}
}

func TestCreateCompletesWhatWasBegun(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	scopes := b.spec.Scopes()
	b.create()
	// As if the first run had died: bucket 2 registered but never written and
	// confirmed, bucket 3 written and not yet opened.
	b.redis.Del(t.Context(), scopes[2].MetaKey())
	b.redis.Del(t.Context(), scopes[2].StockKey())
	b.redis.HSet(t.Context(), scopes[3].MetaKey(), "state", "PREPARED")
	if _, err := b.Registry.Pool().Exec(t.Context(), `UPDATE seckill.scope SET confirmed_at = NULL WHERE activity_id = $1 AND bucket_id = 2`, b.spec.ActivityID); err != nil {
		t.Fatal(err)
	}
	b.create()
	b.wantStates("ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE")
}

func TestCreateNeverRefillsAConfirmedBucket(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	lost := b.spec.Scopes()[1]
	b.redis.Del(t.Context(), lost.StockKey())
	b.redis.Del(t.Context(), lost.MetaKey())
	var missing *lifecycle.ConfigMissingError
	if err := b.Create(t.Context(), b.spec, "test"); !errors.As(err, &missing) || len(missing.Scopes) != 1 || missing.Scopes[0] != lost {
		t.Errorf("got %v, want config_missing of %s", err, lost)
	}
	if n := b.redis.Exists(t.Context(), lost.StockKey()).Val(); n != 0 {
		t.Error("the lost stock was filled again: its sold units would be sold twice")
	}
}

func TestCreateDoesNotResumeWhatIsPaused(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	if err := b.Change(t.Context(), b.spec.Scopes()[:1], lua.StatePaused, "test", ""); err != nil {
		t.Fatal(err)
	}
	b.create()
	b.wantStates("PAUSED", "ACTIVE", "ACTIVE", "ACTIVE")
}

func TestCreateRefusesOtherValues(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	for name, change := range map[string]func(*lifecycle.Spec){
		"total":   func(s *lifecycle.Spec) { s.Total++ },
		"buckets": func(s *lifecycle.Spec) { s.Buckets++ },
		"end":     func(s *lifecycle.Spec) { s.EndsAt = s.EndsAt.Add(time.Second) },
	} {
		spec := b.spec
		change(&spec)
		var differs *pgstore.VersionDiffersError
		if err := b.Create(t.Context(), spec, "test"); !errors.As(err, &differs) {
			t.Errorf("another %s: %v, want VersionDiffersError", name, err)
		}
	}
	for name, change := range map[string]func(*lifecycle.Spec){
		"no units per bucket": func(s *lifecycle.Spec) { s.Total = 10; s.Buckets = 32 },
		"ends before start":   func(s *lifecycle.Spec) { s.EndsAt = s.StartsAt },
		"no retention":        func(s *lifecycle.Spec) { s.Retention = 0 },
		"id with a brace":     func(s *lifecycle.Spec) { s.SKUID = "{x}" },
		"negative total":      func(s *lifecycle.Spec) { s.Total = -1 },
		"no bucket":           func(s *lifecycle.Spec) { s.Buckets = 0 },
	} {
		spec := b.spec
		spec.Version = 8
		change(&spec)
		if err := b.Create(t.Context(), spec, "test"); err == nil {
			t.Errorf("%s: created", name)
		}
	}
}

func TestCurrentVersionNeverGoesBack(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	old := b
	old.spec.Version = 6
	old.create()
	if got := b.redis.Get(t.Context(), reservation.CurrentVersionKey(b.spec.ActivityID)).Val(); got != "7" {
		t.Errorf("current version %q after creating an older one, want 7", got)
	}
}

func TestChange(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	scopes := b.spec.Scopes()
	change := func(target lua.State, scopes ...reservation.Scope) error {
		return b.Change(t.Context(), scopes, target, "test", "why")
	}
	if err := change(lua.StatePaused, scopes[:2]...); err != nil {
		t.Fatal(err)
	}
	b.wantStates("PAUSED", "PAUSED", "ACTIVE", "ACTIVE")
	if err := change(lua.StatePaused, scopes...); err != nil {
		t.Errorf("pausing what is paused: %v", err)
	}
	if err := change(lua.StateClosed, scopes[0]); err != nil {
		t.Fatal(err)
	}
	if err := change(lua.StateActive, scopes...); err == nil {
		t.Error("a closed scope was opened again")
	}
	b.wantStates("CLOSED", "PAUSED", "PAUSED", "PAUSED") // all or none
	b.redis.Del(t.Context(), scopes[3].MetaKey())
	var missing *lifecycle.ConfigMissingError
	if err := change(lua.StateActive, scopes[3]); !errors.As(err, &missing) {
		t.Errorf("without meta: %v, want config_missing", err)
	}
}

func TestImport(t *testing.T) {
	t.Parallel()
	shop := newBench(t)
	shop.create() // the shop's own tool, with a registry of its own
	b := newBench(t)
	b.spec = shop.spec
	spec := b.spec
	if err := b.Import(t.Context(), spec.ActivityID, spec.SKUID, spec.Version, 3, "test"); err == nil {
		t.Error("3 of 4 buckets were imported: the units of the last would be nobody's")
	}
	if err := b.Import(t.Context(), spec.ActivityID, spec.SKUID, spec.Version, 4, "test"); err != nil {
		t.Fatal(err)
	}
	b.wantStates("ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE")
	found, err := b.Registry.Scopes(t.Context(), pgstore.ScopeFilter{ActivityID: spec.ActivityID})
	if err != nil {
		t.Fatal(err)
	}
	if f := found[0]; f.Total != 1001 || f.Buckets != 4 || f.Initial != 251 || f.ConfirmedAt.IsZero() || !f.EndsAt.Equal(spec.EndsAt.Truncate(time.Millisecond)) {
		t.Errorf("imported as %+v", f)
	}
	if err := b.Import(t.Context(), spec.ActivityID, spec.SKUID, spec.Version, 4, "test"); err != nil {
		t.Errorf("importing twice: %v", err)
	}
	if err := b.Import(t.Context(), spec.ActivityID, spec.SKUID, 99, 1, "test"); !errors.Is(err, lifecycle.ErrNotThere) {
		t.Errorf("importing nothing: %v, want ErrNotThere", err)
	}
}
