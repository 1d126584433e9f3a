package lifecycle_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/seckill/reconciler/internal/lifecycle"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// second is another SKU of the bench's activity, with fewer units.
func (b bench) second() lifecycle.Spec {
	s := b.spec
	s.SKUID += "-second"
	s.Total, s.Buckets = 40, 2
	return s
}

// sell makes orders of so many users in shop.stock and shop.orders.
func (b bench) sell(spec lifecycle.Spec, users int) {
	b.t.Helper()
	for i := range users {
		name := fmt.Sprintf("%s-%d", spec.SKUID, i)
		b.exec(`INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
			VALUES ($1, $1, $1, $2, $3, $4, 0, $1)`, name, spec.ActivityID, spec.SKUID, spec.Version)
	}
	b.exec(`UPDATE shop.stock SET sold = sold + $4 WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`,
		spec.ActivityID, spec.SKUID, spec.Version, users)
}

func (b bench) exec(sql string, args ...any) {
	b.t.Helper()
	if _, err := b.owner.Exec(b.t.Context(), sql, args...); err != nil {
		b.t.Fatal(err)
	}
}

// stock is total and sold of a version in shop.stock.
func (b bench) stock(spec lifecycle.Spec, version int64) (total, sold int64) {
	b.t.Helper()
	err := b.owner.QueryRow(b.t.Context(), `SELECT total, sold FROM shop.stock WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`,
		spec.ActivityID, spec.SKUID, version).Scan(&total, &sold)
	if err != nil {
		b.t.Fatal(err)
	}
	return total, sold
}

func (b bench) current() string {
	b.t.Helper()
	return b.redis.Get(b.t.Context(), reservation.CurrentVersionKey(b.spec.ActivityID)).Val()
}

func (b bench) reserve(spec lifecycle.Spec, user string) lua.ReserveReply {
	b.t.Helper()
	scope := spec.Scopes()[0]
	batch := b.Redis.Writer().Batch()
	r := batch.Reserve(scope, lua.ReserveArgs{
		RequestID: "q-" + user, ReservationID: "r-" + user, UserID: user,
		TTLMS: time.Minute.Milliseconds(), SchemaVersion: 1, MessageID: reservation.MessageID("r-" + user),
	})
	if err := batch.Run(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	reply, err := r.Get()
	if err != nil {
		b.t.Fatal(err)
	}
	return reply
}

func TestRollMovesWhatIsLeft(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	second := b.second()
	if err := b.CreateAll(t.Context(), []lifecycle.Spec{b.spec, second}, "test", nil); err != nil {
		t.Fatal(err)
	}
	b.sell(b.spec, 5)
	b.sell(second, 33)
	rolled, err := b.Roll(t.Context(), lifecycle.Roll{ActivityID: b.spec.ActivityID}, "test", "wrong price")
	if err != nil {
		t.Fatal(err)
	}
	want := []lifecycle.RolledSKU{
		{SKUID: b.spec.SKUID, From: 7, To: 8, Sold: 5, Left: 996, Buckets: 4, Open: true},
		{SKUID: second.SKUID, From: 7, To: 8, Sold: 33, Left: 7, Buckets: 1, Open: true}, // too few for two
	}
	if diff := cmp.Diff(want, rolled); diff != "" {
		t.Error(diff)
	}
	// A late order of the old version finds no stock.
	for _, c := range []struct {
		spec               lifecycle.Spec
		version            int64
		wantTotal, wantSol int64
	}{{b.spec, 7, 5, 5}, {b.spec, 8, 996, 0}, {second, 7, 33, 33}, {second, 8, 7, 0}} {
		if total, sold := b.stock(c.spec, c.version); total != c.wantTotal || sold != c.wantSol {
			t.Errorf("shop.stock of %s version %d: total %d, sold %d; want %d, %d", c.spec.SKUID, c.version, total, sold, c.wantTotal, c.wantSol)
		}
	}
	if got := b.current(); got != "8" {
		t.Errorf("current version %q, want 8", got)
	}
	if reply := b.reserve(b.spec, "late"); reply.Code != lua.ReserveActivityNotActive {
		t.Errorf("the old version answers %s, want ACTIVITY_NOT_ACTIVE", reply.Code)
	}
	next := b.spec
	next.Version = 8
	if reply := b.reserve(next, "new"); reply.Code != lua.ReserveAccepted {
		t.Errorf("the new version answers %s, want ACCEPTED", reply.Code)
	}
	// Once more is another version.
	again, err := b.Roll(t.Context(), lifecycle.Roll{ActivityID: b.spec.ActivityID, Buckets: 2}, "test", "")
	if err != nil || again[0].To != 9 || again[0].Left != 996 || again[0].Buckets != 2 {
		t.Errorf("rolled again: %+v, %v; want version 9 with 996 units in 2 buckets", again, err)
	}
}

// A roll that died goes on, wherever it was: nothing is moved twice.
func TestRollGoesOn(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	b.sell(b.spec, 5)
	r := lifecycle.Roll{ActivityID: b.spec.ActivityID, Prepare: true}
	prepared, err := b.Roll(t.Context(), r, "test", "")
	if err != nil {
		t.Fatal(err)
	}
	if got := b.current(); got != "7" {
		t.Errorf("current version %q while the new one is prepared, want 7", got)
	}
	// As if it had died before a bucket was written.
	next := b.spec
	next.Version = 8
	lost := next.Scopes()[2]
	b.redis.Del(t.Context(), lost.MetaKey())
	b.redis.Del(t.Context(), lost.StockKey())
	b.exec(`UPDATE seckill.scope SET confirmed_at = NULL WHERE activity_id = $1 AND activity_version = 8 AND bucket_id = 2`, b.spec.ActivityID)
	r.Prepare = false
	rolled, err := b.Roll(t.Context(), r, "test", "")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(prepared, rolled, cmpopts.IgnoreFields(lifecycle.RolledSKU{}, "Open")); diff != "" || prepared[0].Open || !rolled[0].Open {
		t.Errorf("what was prepared and what was rolled differ: %s", diff)
	}
	if total, _ := b.stock(b.spec, 8); total != 996 || b.current() != "8" {
		t.Errorf("new version: total %d, current version %q; want 996 and 8", total, b.current())
	}
}

// Where the stock table is the adopter's, what is left is known only when all is
// decided and nothing is missing.
func TestRollWaitsForAnAdoptersOrders(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	b.exec(`DROP SCHEMA shop CASCADE`)
	if reply := b.reserve(b.spec, "buyer"); reply.Code != lua.ReserveAccepted {
		t.Fatalf("reserve: %s", reply.Code)
	}
	proof := errors.New("not consistent")
	var told int64
	r := lifecycle.Roll{
		ActivityID: b.spec.ActivityID, Wait: time.Millisecond,
		Consistent: func(context.Context, string, string, int64) error { return proof },
		Undecided:  func(left int64) { told = left },
	}
	if _, err := b.Roll(t.Context(), r, "test", ""); !errors.Is(err, lifecycle.ErrUndecided) || told != 2 {
		t.Errorf("with an undecided reservation: %v, told of %d; want ErrUndecided and its 2 places", err, told)
	}
	scope := b.spec.Scopes()[0]
	batch := b.Redis.Writer().Batch()
	for _, target := range []reservation.Status{reservation.StatusEnqueued, reservation.StatusOrderCreated} {
		batch.Transition(scope, lua.TransitionArgs{ReservationID: "r-buyer", Target: target, MessageID: reservation.MessageID("r-buyer")})
	}
	if err := batch.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.Wait = time.Minute
	if _, err := b.Roll(t.Context(), r, "test", ""); !errors.Is(err, proof) {
		t.Errorf("without the proof: %v, want it refused", err)
	}
	proof = nil
	rolled, err := b.Roll(t.Context(), r, "test", "")
	if err != nil || len(rolled) != 1 || rolled[0].Left != 1000 || rolled[0].Sold != 1 || rolled[0].Open {
		t.Errorf("rolled %+v, %v; want 1000 left and 1 sold, and not open: the new version has no row yet", rolled, err)
	}
	// A late message could still make an order of the old version.
	if _, err := b.Roll(t.Context(), r, "test", ""); !errors.Is(err, lifecycle.ErrNotCapped) {
		t.Errorf("with an old version that may still sell: %v, want ErrNotCapped", err)
	}
	b.exec(`CREATE TABLE public.laden (a text, s text, v bigint, total bigint, sold bigint)`)
	b.exec(`INSERT INTO public.laden VALUES ($1, $2, 7, 1001, 1)`, b.spec.ActivityID, b.spec.SKUID)
	b.exec(`CREATE VIEW seckill.stock_evidence AS SELECT a AS activity_id, s AS sku_id, v AS activity_version, total, sold FROM public.laden`)
	b.exec(`GRANT SELECT ON seckill.stock_evidence TO seckill_operator`)
	r.OldCapped = true // a word does not outweigh what the table says
	if _, err := b.Roll(t.Context(), r, "test", ""); !errors.Is(err, lifecycle.ErrNotCapped) {
		t.Errorf("with an old row that has 1,000 units: %v, want ErrNotCapped", err)
	}
	b.exec(`UPDATE public.laden SET total = sold`)
	if rolled, err = b.Roll(t.Context(), r, "test", ""); err != nil || !rolled[0].Open {
		t.Errorf("once the old version is capped: %+v, %v", rolled, err)
	}
	b.wantAllStates(8, pgstore.ScopeActive)
}

func (b bench) wantAllStates(version int64, want pgstore.ScopeState) {
	b.t.Helper()
	found, err := b.Registry.Scopes(b.t.Context(), pgstore.ScopeFilter{ActivityID: b.spec.ActivityID, Version: &version})
	if err != nil {
		b.t.Fatal(err)
	}
	for _, f := range found {
		if f.State != want {
			b.t.Errorf("%s is %s, want %s", f.Scope, f.State, want)
		}
	}
	if len(found) == 0 {
		b.t.Errorf("no scope of version %d", version)
	}
}

// Orders that the counter does not know would be sold again.
func TestRollBelievesNoCounterAlone(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	b.sell(b.spec, 5)
	b.exec(`UPDATE shop.stock SET sold = 3 WHERE activity_id = $1`, b.spec.ActivityID)
	if _, err := b.Roll(t.Context(), lifecycle.Roll{ActivityID: b.spec.ActivityID}, "test", ""); err == nil || !strings.Contains(err.Error(), "sold_mismatch") {
		t.Errorf("with a counter of 3 and 5 orders: %v", err)
	}
	if found, _ := b.Registry.Scopes(t.Context(), pgstore.ScopeFilter{ActivityID: b.spec.ActivityID}); len(found) != 4 {
		t.Errorf("%d scopes are registered, want those of the old version alone", len(found))
	}
}

// Another roll of the activity steps aside, and none goes back.
func TestOneRollAtATime(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	unlock, err := b.Registry.LockRoll(t.Context(), b.spec.ActivityID)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Roll(t.Context(), lifecycle.Roll{ActivityID: b.spec.ActivityID}, "test", ""); !errors.Is(err, pgstore.ErrRolling) {
		t.Errorf("beside another roll: %v, want ErrRolling", err)
	}
	unlock()
	if _, err := b.Roll(t.Context(), lifecycle.Roll{ActivityID: b.spec.ActivityID, To: 9}, "test", ""); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Roll(t.Context(), lifecycle.Roll{ActivityID: b.spec.ActivityID, To: 8}, "test", ""); err == nil || !strings.Contains(err.Error(), "newer than 8") {
		t.Errorf("back to 8 after 9: %v", err)
	}
}

func TestRollRefuses(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	if _, err := b.Roll(t.Context(), lifecycle.Roll{ActivityID: "nobody"}, "test", ""); err == nil {
		t.Error("an unknown activity was rolled")
	}
	newer := b.spec
	newer.Version = 8
	if err := b.Create(t.Context(), newer, "test"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Roll(t.Context(), lifecycle.Roll{ActivityID: b.spec.ActivityID}, "test", ""); err == nil || !strings.Contains(err.Error(), "close it first") {
		t.Errorf("with an older version still open: %v", err)
	}
	b.wantAllStates(8, pgstore.ScopeActive) // and nothing was closed
	if err := b.Change(t.Context(), b.spec.Scopes(), lua.StateClosed, "test", ""); err != nil {
		t.Fatal(err)
	}
	past := lifecycle.Instant{At: time.Now().Add(-time.Hour)}
	if _, err := b.Roll(t.Context(), lifecycle.Roll{ActivityID: b.spec.ActivityID, Ends: &past}, "test", ""); err == nil {
		t.Error("rolled to a version that ends before it starts")
	}
}

func TestCreateAll(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	second := b.second()
	wrong := second
	wrong.Total = -1
	if err := b.CreateAll(t.Context(), []lifecycle.Spec{b.spec, wrong}, "test", nil); err == nil {
		t.Error("a wrong description among them was accepted")
	}
	if found, _ := b.Registry.Scopes(t.Context(), pgstore.ScopeFilter{ActivityID: b.spec.ActivityID}); len(found) != 0 {
		t.Errorf("%d scopes were registered beside a wrong description", len(found))
	}
	if err := b.CreateAll(t.Context(), []lifecycle.Spec{b.spec, b.spec}, "test", nil); err == nil {
		t.Error("a version that is described twice was accepted")
	}
	// One activity that fails holds up no other, and its current version stays.
	taken := lifecycle.Spec{
		ActivityID: b.spec.ActivityID + "-b", SKUID: "s", Version: 1, Total: 5, Buckets: 1,
		StartsAt: b.spec.StartsAt, EndsAt: b.spec.EndsAt, Retention: time.Hour,
	}
	if err := b.redis.HSet(t.Context(), taken.Scopes()[0].StockKey(), "initial", "5").Err(); err != nil {
		t.Fatal(err)
	}
	var done []string
	err := b.CreateAll(t.Context(), []lifecycle.Spec{taken, b.spec, second}, "test", func(s lifecycle.Spec) { done = append(done, s.SKUID) })
	if err == nil || !strings.Contains(err.Error(), taken.ActivityID) {
		t.Errorf("keys that somebody else made: %v, want an error that names the activity", err)
	}
	if diff := cmp.Diff([]string{b.spec.SKUID, second.SKUID}, done); diff != "" {
		t.Error(diff)
	}
	if got := b.redis.Exists(t.Context(), reservation.CurrentVersionKey(taken.ActivityID)).Val(); got != 0 || b.current() != "7" {
		t.Errorf("current versions: of the failed activity %d, of the other %q; want none and 7", got, b.current())
	}
}

func TestWarnings(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	warn := func(change func(*lifecycle.Spec)) string {
		spec := b.spec
		change(&spec)
		warnings, err := b.Warnings(t.Context(), []lifecycle.Spec{spec})
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(warnings, "\n")
	}
	fine := func(s *lifecycle.Spec) { s.Retention = 7 * 24 * time.Hour }
	if got := warn(fine); got != "" {
		t.Errorf("warned of a usual choice: %s", got)
	}
	for want, change := range map[string]func(*lifecycle.Spec){
		"the last reservations of the sale are refused": func(s *lifecycle.Spec) { s.Retention = 5 * time.Minute },
		"is lost to repair":                             func(s *lifecycle.Spec) { s.Retention = time.Hour },
		"it ended already":                              func(s *lifecycle.Spec) { s.EndsAt = time.Now().Add(-time.Minute) },
		"10 units in 2 buckets":                         func(s *lifecycle.Spec) { s.Total, s.Buckets = 10, 2 },
		"128 buckets":                                   func(s *lifecycle.Spec) { s.Total, s.Buckets = 1_000_000, 128 },
		"it has no units":                               func(s *lifecycle.Spec) { s.Total, s.Buckets = 0, 1 },
		"sold twice unless it is closed":                func(s *lifecycle.Spec) { s.Version = 8 },
		"create it there too":                           func(s *lifecycle.Spec) { s.Version, s.SKUID = 8, "another" },
	} {
		if got := warn(change); !strings.Contains(got, want) {
			t.Errorf("got %q, want a warning with %q", got, want)
		}
	}
}

func TestAwaitDurability(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.create()
	nodes := map[string]bool{}
	for _, d := range b.Redis.AwaitDurability(t.Context(), b.spec.Scopes(), 1, false, 10*time.Second) {
		if d.Err != nil || d.Replicas < 1 {
			t.Errorf("%s: %d replicas, %v; each master of the test cluster has one", d.Node, d.Replicas, d.Err)
		}
		nodes[d.Node] = true
	}
	if len(nodes) < 2 {
		t.Errorf("asked %v: four buckets are on several masters, each asked once", nodes)
	}
	until := b.redis.PExpireTime(t.Context(), b.spec.Scopes()[0].MetaKey()).Val()
	if want := b.spec.EndsAt.Add(b.spec.Retention).UnixMilli(); until.Milliseconds() != want {
		t.Errorf("meta expires at %d, want %d still", until.Milliseconds(), want)
	}
	for _, d := range b.Redis.AwaitDurability(t.Context(), b.spec.Scopes()[:1], 9, false, 50*time.Millisecond) {
		if d.Err != nil || d.Replicas >= 9 {
			t.Errorf("of nine replicas %d confirmed, %v; want what there is, and no error", d.Replicas, d.Err)
		}
	}
}
