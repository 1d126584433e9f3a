package lua_test

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// ledger is what the scripts may do to one scope, kept beside it: which
// reservation took and gave units, and the status that each hash shows.
//
// Every reservation has a fate, as the claim in PostgreSQL decides it: only one
// with an order is confirmed and restored, only one without is compensated and
// adopted. Hashes may be lost.
type ledger struct {
	*world
	rt     *rapid.T
	stock  int64
	taken  map[string]int
	given  map[string]int
	status map[string]reservation.Status // "" when the hash is not there
	lost   map[string]bool
}

const (
	ledgerUsers    = 3
	ledgerRequests = 2 // of each user
)

// draw picks one of the reservations that a reserve may make.
func (l *ledger) draw() (id string, a lua.ReserveArgs) {
	u := rapid.IntRange(0, ledgerUsers-1).Draw(l.rt, "user")
	q := rapid.IntRange(0, ledgerRequests-1).Draw(l.rt, "request")
	id = fmt.Sprintf("r%d-%d", u, q)
	return id, lua.ReserveArgs{
		RequestID: fmt.Sprintf("q%d-%d", u, q), ReservationID: id, UserID: fmt.Sprintf("u%d", u),
		MessageID: reservation.MessageID(id), TTLMS: 60_000, SchemaVersion: 1, NowMS: l.base,
	}
}

// ordered says whether the reservation's fate is an order.
func ordered(a lua.ReserveArgs) bool { return a.RequestID[len(a.RequestID)-1] == '0' }

func (l *ledger) statusOf(id string) reservation.Status {
	return reservation.Status(l.field(l.scope.ReservationKey(id), "status"))
}

// expect compares the scope with the ledger after a step that moved the stock
// by delta and the status of id as it did.
func (l *ledger) expect(id string, delta int64, legal func(from, to reservation.Status) bool) {
	l.stock += delta
	snap := reply(l.world, func(b *lua.Batch) *lua.Result[lua.SnapshotReply] { return b.Snapshot(l.scope) })
	held := int64(0)
	for id, n := range l.taken {
		if n > 1 || l.given[id] > n {
			l.rt.Fatalf("S2: %s took %d and gave %d", id, n, l.given[id])
		}
		held += int64(n - l.given[id])
	}
	if snap.Initial != snap.Available+snap.Reserved || snap.Available != l.stock || snap.Reserved != held {
		l.rt.Fatalf("stock %+v, want %d available and %d reserved", snap, l.stock, held)
	}
	from, to := l.status[id], l.statusOf(id)
	if from != to && !legal(from, to) {
		l.rt.Fatalf("%s went from %q to %q", id, from, to)
	}
	l.status[id] = to
	for other, status := range l.status {
		if now := l.statusOf(other); now != status {
			l.rt.Fatalf("%s went from %q to %q in a step of %s", other, status, now, id)
		}
	}
}

func never(reservation.Status, reservation.Status) bool { return false }

func became(want reservation.Status, from ...reservation.Status) func(a, b reservation.Status) bool {
	return func(a, b reservation.Status) bool {
		for _, f := range from {
			if a == f && b == want {
				return true
			}
		}
		return false
	}
}

func (l *ledger) actions() map[string]func(*rapid.T) {
	step := func(do func()) func(*rapid.T) {
		return func(rt *rapid.T) { l.rt = rt; do() }
	}
	return map[string]func(*rapid.T){
		"reserve": step(l.stepReserve), "transition": step(l.stepTransition), "compensate": step(l.stepCompensate),
		"confirm": step(l.stepConfirm), "restore": step(l.stepRestore), "adopt": step(l.stepAdopt),
		"index": step(l.stepIndex), "wait": step(l.stepWait), "mark": step(l.stepMark), "lose": step(l.stepLose),
	}
}

func (l *ledger) stepReserve() {
	id, a := l.draw()
	got := l.reserve(a)
	delta := int64(0)
	if got.Code == lua.ReserveAccepted && !got.Replay {
		l.taken[id]++
		delta = -1
	}
	if got.Code > lua.ReserveSoldOut {
		l.rt.Fatalf("reserve of %s: %+v", id, got)
	}
	l.expect(id, delta, became(reservation.StatusReserved, ""))
}

func (l *ledger) stepTransition() {
	id, a := l.draw()
	target := rapid.SampledFrom(reservation.Statuses).Draw(l.rt, "target")
	if target == reservation.StatusOrderCreated && !ordered(a) {
		return
	}
	from := l.status[id]
	got := reply(l.world, func(b *lua.Batch) *lua.Result[lua.TransitionReply] {
		return b.Transition(l.scope, lua.TransitionArgs{ReservationID: id, Target: target, NextRetryMS: l.base + 1, NowMS: l.base})
	})
	want := lua.TransitionIllegal
	switch {
	case from == "":
		want = lua.TransitionNotFound
	case from == target:
		want = lua.TransitionIdempotent
	case reservation.CanTransition(from, target):
		want = lua.TransitionUpdated
	}
	if got.Code != want || got.Current != from {
		l.rt.Fatalf("%s from %q to %s: %+v, want %s", id, from, target, got, want)
	}
	l.expect(id, 0, reservation.CanTransition)
}

func (l *ledger) stepCompensate() {
	id, a := l.draw()
	if ordered(a) {
		return
	}
	got := reply(l.world, func(b *lua.Batch) *lua.Result[lua.CompensateReply] {
		return b.Compensate(l.scope, lua.CompensateArgs{ReservationID: id, UserID: a.UserID, Reason: "x"})
	})
	delta := int64(0)
	if got.Code == lua.CompensateReleased {
		l.given[id]++
		delta = 1
	}
	if (got.Code == lua.CompensateReleased) != l.status[id].Releasing() || got.Code == lua.CompensateInvariantViolation {
		l.rt.Fatalf("compensate of %s in %q: %+v", id, l.status[id], got)
	}
	l.expect(id, delta, became(reservation.StatusReleased, reservation.StatusRejected, reservation.StatusReleasePending))
}

func (l *ledger) stepConfirm() {
	id, a := l.draw()
	if !ordered(a) {
		return
	}
	got := reply(l.world, func(b *lua.Batch) *lua.Result[lua.ConfirmReply] {
		return b.Confirm(l.scope, lua.ConfirmArgs{ReservationID: id, OrderID: "o" + id})
	})
	if (got.Code == lua.ConfirmConfirmed) != l.status[id].Releasing() {
		l.rt.Fatalf("confirm of %s in %q: %+v", id, l.status[id], got)
	}
	l.expect(id, 0, became(reservation.StatusOrderCreated, reservation.StatusRejected, reservation.StatusReleasePending))
}

func (l *ledger) stepRestore() {
	id, a := l.draw()
	if !ordered(a) {
		return
	}
	mode := rapid.SampledFrom([]lua.RestoreMode{lua.RestoreActive, lua.RestoreCancelled}).Draw(l.rt, "mode")
	got := reply(l.world, func(b *lua.Batch) *lua.Result[lua.RestoreReply] {
		return b.Restore(l.scope, lua.RestoreArgs{
			ReservationID: id, RequestID: a.RequestID, UserID: a.UserID, MessageID: a.MessageID, OrderID: "o" + id,
			ReservedAtMS: l.base, ExpiresAtMS: l.base + 1, SchemaVersion: 1, Mode: mode,
		})
	})
	delta := int64(0)
	if got.Code == lua.RestoreWithUnit {
		l.taken[id]++
		delta = -1
	}
	if exists := l.status[id] != ""; exists != (got.Code == lua.RestoreExists) || got.Code > lua.RestoreNoSibling {
		l.rt.Fatalf("restore of %s in %q: %+v", id, l.status[id], got)
	}
	// a unit that is still deducted is never taken again, and one that is not always is
	if held := l.taken[id] > l.given[id]; l.status[id] == "" && held && l.lost[id] && got.Code != lua.RestoreHashOnly {
		l.rt.Fatalf("restore of %s, whose unit is held: %+v", id, got)
	}
	l.expect(id, delta, became(reservation.StatusOrderCreated, ""))
}

func (l *ledger) stepAdopt() {
	id, a := l.draw()
	if ordered(a) {
		return
	}
	got := reply(l.world, func(b *lua.Batch) *lua.Result[lua.AdoptOrphanReply] {
		return b.AdoptOrphan(l.scope, lua.AdoptOrphanArgs{
			ReservationID: id, RequestID: a.RequestID, UserID: a.UserID, MessageID: a.MessageID, SchemaVersion: 1,
		})
	})
	if got.Code == lua.AdoptOrphanAdopted && !l.lost[id] {
		l.rt.Fatalf("%s was adopted without having been lost", id)
	}
	l.expect(id, 0, became(reservation.StatusReleasePending, ""))
}

func (l *ledger) stepIndex() {
	id, _ := l.draw()
	reply(l.world, func(b *lua.Batch) *lua.Result[lua.ReindexReply] {
		b.Unindex(l.scope, lua.UnindexArgs{ReservationID: id})
		return b.Reindex(l.scope, lua.ReindexArgs{ReservationID: id})
	})
	l.expect(id, 0, never)
	status := l.status[id]
	if status == "" {
		return
	}
	inPending := l.score(reservation.SendPending, id) != "none"
	inExpiry := l.score(reservation.ReservationExpiry, id) != "none"
	if inPending != status.Unsent() || inExpiry == status.Terminal() {
		l.rt.Fatalf("%s in %s: pending %v, expiry %v", id, status, inPending, inExpiry)
	}
}

func (l *ledger) stepWait() {
	id, _ := l.draw()
	expected := rapid.SampledFrom([]reservation.Status{l.status[id], lua.DeferHashUnread, reservation.StatusEnqueued}).Draw(l.rt, "expected")
	index := rapid.SampledFrom([]reservation.Index{reservation.SendPending, reservation.ReservationExpiry}).Draw(l.rt, "index")
	before := l.score(index, id)
	reply(l.world, func(b *lua.Batch) *lua.Result[lua.DeferReply] {
		b.RecordSend(l.scope, lua.RecordSendArgs{ReservationID: id, Expected: expected, Kind: lua.SendFirst})
		return b.Defer(l.scope, lua.DeferArgs{ReservationID: id, Index: index, Expected: expected, NextMS: l.base + 100})
	})
	if after := l.score(index, id); (before == "none") != (after == "none") {
		l.rt.Fatalf("a wait took %s of %s from %s to %s", id, index, before, after)
	}
	l.expect(id, 0, never)
}

func (l *ledger) stepMark() {
	id, a := l.draw()
	seen := l.text(l.scope.UserKey(a.UserID))
	got := reply(l.world, func(b *lua.Batch) *lua.Result[lua.MarkUserReply] {
		return b.MarkUser(l.scope, lua.MarkUserArgs{ReservationID: id, UserID: a.UserID, Seen: ""})
	})
	if seen != "" && got.Marker != seen {
		l.rt.Fatalf("a marker %s was replaced from none: %+v", seen, got)
	}
	l.expect(id, 0, never)
}

// stepLose loses a hash that is not decided: a released one keeps its request
// field, which would count as a sibling (spec §4 ⚑, the caller's rule).
func (l *ledger) stepLose() {
	id, _ := l.draw()
	if l.status[id] == reservation.StatusReleased || l.status[id] == "" {
		return
	}
	l.must(l.client.Del(l.ctx(), l.scope.ReservationKey(id)).Err())
	l.lost[id] = true
	l.expect(id, 0, func(_, to reservation.Status) bool { return to == "" })
}

// Whatever order the scripts run in: the invariant, S2 and the legal
// transitions hold.
func TestAnyOrderOfScriptsKeepsTheInvariants(t *testing.T) {
	shared := stacktest.Shared(t)
	for _, svc := range []struct{ name, addr string }{
		{"8", shared.Redis().Addr()}, {"7.0", shared.RedisFloor().Addr()},
	} {
		t.Run(svc.name, func(t *testing.T) {
			t.Parallel()
			base := newWorld(t, newClient(t, false, svc.addr))
			rapid.Check(t, func(rt *rapid.T) {
				l := &ledger{
					world: base.fresh(), rt: rt, taken: map[string]int{}, given: map[string]int{},
					status: map[string]reservation.Status{}, lost: map[string]bool{},
				}
				l.stock = rapid.Int64Range(1, 4).Draw(rt, "stock")
				l.sale(l.stock, 0)
				rt.Repeat(l.actions())
			})
		})
	}
}
