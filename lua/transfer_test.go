package lua_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
)

func transferKey(w *world) string { return w.scope.TransferKey(transfer) }

// marks makes the scope's marker of the transfer.
func marks(leg lua.TransferLeg, amount int64) func(*world) {
	return func(w *world) {
		w.Helper()
		w.setHash(transferKey(w), fields{"leg": string(leg), "amount": itoa(amount), "updated_at_ms": itoa(w.base - 9)})
	}
}

// moved is the state after a leg: the stock, the marker, and soldout at 0.
func moved(leg lua.TransferLeg, amount, available, reserved int64) func(*world, dump) {
	return func(w *world, d dump) {
		d.set(w, "stock", "initial", itoa(available+reserved), "available", itoa(available))
		d.set(w, "transfer:"+transfer, "leg", string(leg), "amount", itoa(amount), "updated_at_ms", itoa(w.base))
		if available == 0 {
			d.value(w, "soldout", "1")
		} else {
			delete(d, "soldout")
		}
	}
}

func units(available, reserved int64) func(*world) {
	return func(w *world) { w.Helper(); w.sale(available, reserved) }
}

// refusing are set-ups that both legs refuse, with the codes that they share.
func refusing() map[string]struct {
	setup              func(*world)
	code               int64
	available, initial int64
} {
	none := lua.Missing
	return map[string]struct {
		setup              func(*world)
		code               int64
		available, initial int64
	}{
		"no meta":          {then(units(9, 1), noKey(metaKey)), 7, 9, 10},
		"no state":         {then(units(9, 1), func(w *world) { w.must(w.client.HDel(w.ctx(), metaKey(w), "state").Err()) }), 7, 9, 10},
		"no stock":         {then(units(9, 1), noKey(stockKey)), 7, none, none},
		"no available":     {then(units(9, 1), func(w *world) { w.must(w.client.HDel(w.ctx(), stockKey(w), "available").Err()) }), 7, none, 10},
		"retention passed": {then(units(9, 1), func(w *world) { w.must(w.client.HSet(w.ctx(), metaKey(w), "retention_until_ms", w.base).Err()) }), 7, 9, 10},
		"broken invariant": {then(units(9, 1), stock("reserved", "2")), 5, 9, 10},
	}
}

func TestTransferOut(t *testing.T) {
	run := func(target int64, mode lua.OutMode) func(*world) any {
		return call((*lua.Batch).TransferOut, func(w *world) lua.TransferOutArgs {
			return lua.TransferOutArgs{TransferID: transfer, Target: target, Mode: mode, NowMS: w.base}
		})
	}
	answer := func(code lua.TransferOutCode, inForce, available, initial int64) lua.TransferReply[lua.TransferOutCode] {
		return lua.TransferReply[lua.TransferOutCode]{Code: code, InForce: inForce, Available: available, Initial: initial}
	}
	out := lua.TransferLegOut
	cases := []scriptCase{
		{"whole", units(9, 1), run(4, lua.OutWhole), answer(0, 4, 5, 6), moved(out, 4, 5, 1)},
		{"whole, the last units", units(4, 1), run(4, lua.OutWhole), answer(0, 4, 0, 1), moved(out, 4, 0, 1)},
		{"whole, short of one", units(3, 1), run(4, lua.OutWhole), answer(2, 0, 3, 4), nil},
		{"whole, of nothing", units(3, 1), run(0, lua.OutWhole), answer(1, 0, 3, 4), nil},
		{"whole, again", then(units(9, 1), marks(out, 4)), run(4, lua.OutWhole), answer(1, 4, 9, 10), nil},
		{"never lowers", then(units(9, 1), marks(out, 4)), run(2, lua.OutWhole), answer(1, 4, 9, 10), nil},
		{"whole, the rest", then(units(9, 1), marks(out, 4)), run(6, lua.OutWhole), answer(0, 6, 7, 8), moved(out, 6, 7, 1)},
		{"whole, short of the rest", then(units(1, 1), marks(out, 4)), run(6, lua.OutWhole), answer(2, 4, 1, 2), nil},
		{"partial", then(units(9, 1), marks(out, 1)), run(4, lua.OutPartial), answer(0, 4, 6, 7), moved(out, 4, 6, 1)},
		{"partial, limited", units(3, 1), run(4, lua.OutPartial), answer(3, 3, 0, 1), moved(out, 3, 0, 1)},
		{"partial, nothing there", units(0, 1), run(4, lua.OutPartial), answer(3, 0, 0, 1), nil},
		{"partial, again", then(units(9, 1), marks(out, 4)), run(4, lua.OutPartial), answer(1, 4, 9, 10), nil},
		{"wrong leg", then(units(9, 1), marks(lua.TransferLegIn, 4)), run(5, lua.OutWhole), answer(4, 4, 9, 10), nil},
		{"paused", then(units(9, 1), func(w *world) { w.must(w.client.HSet(w.ctx(), metaKey(w), "state", "PAUSED").Err()) }), run(4, lua.OutWhole), answer(0, 4, 5, 6), moved(out, 4, 5, 1)},
	}
	for name, c := range refusing() {
		cases = append(cases, scriptCase{name, c.setup, run(4, lua.OutPartial), answer(lua.TransferOutCode(c.code), 0, c.available, c.initial), nil})
	}
	runCases(t, cases)
}

func TestTransferIn(t *testing.T) {
	run := func(target int64, mode lua.InMode) func(*world) any {
		return call((*lua.Batch).TransferIn, func(w *world) lua.TransferInArgs {
			return lua.TransferInArgs{TransferID: transfer, Target: target, Mode: mode, NowMS: w.base}
		})
	}
	answer := func(code lua.TransferInCode, inForce, available, initial int64) lua.TransferReply[lua.TransferInCode] {
		return lua.TransferReply[lua.TransferInCode]{Code: code, InForce: inForce, Available: available, Initial: initial}
	}
	in := lua.TransferLegIn
	soldOut := func(w *world) { w.setText(soldOutKey(w), "1") }
	cases := []scriptCase{
		{"raise", units(9, 1), run(4, lua.InRaise), answer(0, 4, 13, 14), moved(in, 4, 13, 1)},
		{"raise, sold out", then(units(0, 1), soldOut), run(4, lua.InRaise), answer(0, 4, 4, 5), moved(in, 4, 4, 1)},
		{"raise, again", then(units(9, 1), marks(in, 4)), run(4, lua.InRaise), answer(1, 4, 9, 10), nil},
		{"a raise never lowers", then(units(9, 1), marks(in, 4)), run(2, lua.InRaise), answer(1, 4, 9, 10), nil},
		{"raise, the rest", then(units(9, 1), marks(in, 4)), run(6, lua.InRaise), answer(0, 6, 11, 12), moved(in, 6, 11, 1)},
		{"lower", then(units(9, 1), marks(in, 4)), run(1, lua.InLower), answer(0, 1, 6, 7), moved(in, 1, 6, 1)},
		{"lower to nothing", then(units(4, 1), marks(in, 4)), run(0, lua.InLower), answer(0, 0, 0, 1), moved(in, 0, 0, 1)},
		{"lower, limited", then(units(2, 1), marks(in, 4)), run(0, lua.InLower), answer(3, 2, 0, 1), moved(in, 2, 0, 1)},
		{"lower, nothing there", then(units(0, 1), marks(in, 4)), run(0, lua.InLower), answer(3, 4, 0, 1), nil},
		{"a lower never raises", then(units(9, 1), marks(in, 4)), run(6, lua.InLower), answer(1, 4, 9, 10), nil},
		{"lower, without a marker", units(9, 1), run(0, lua.InLower), answer(1, 0, 9, 10), nil},
		{"wrong leg", then(units(9, 1), marks(lua.TransferLegOut, 4)), run(5, lua.InRaise), answer(4, 4, 9, 10), nil},
		{"too many units", units(1, 9007199254740990), run(5, lua.InRaise), answer(5, 0, 1, 9007199254740991), nil},
	}
	for name, c := range refusing() {
		cases = append(cases, scriptCase{name, c.setup, run(4, lua.InRaise), answer(lua.TransferInCode(c.code), 0, c.available, c.initial), nil})
	}
	runCases(t, cases)
}

func TestTransferRead(t *testing.T) {
	onEach(t, func(w *world) {
		read := func(ids ...string) lua.TransferReadReply {
			got := reply(w, func(b *lua.Batch) *lua.Result[lua.TransferReadReply] { return b.TransferRead(w.scope, ids) })
			if got.TimeMS < w.base-5000 {
				w.Errorf("time %d", got.TimeMS)
			}
			got.TimeMS = 0
			return got
		}
		none := lua.TransferMarker{UpdatedAtMS: lua.Missing}
		w.unchanged(func() {
			same(w, "an empty scope", read(), lua.TransferReadReply{
				RetentionUntilMS: lua.Missing, Initial: lua.Missing, Available: lua.Missing, Reserved: lua.Missing, Markers: []lua.TransferMarker{},
			})
		})
		w.sale(9, 1)
		marks(lua.TransferLegIn, 4)(w)
		w.unchanged(func() {
			same(w, "a scope", read("t0", transfer), lua.TransferReadReply{
				State: lua.StateActive, RetentionUntilMS: w.until, Initial: 10, Available: 9, Reserved: 1,
				Markers: []lua.TransferMarker{none, {Leg: lua.TransferLegIn, Amount: 4, UpdatedAtMS: w.base - 9}},
			})
		})
		for _, spoil := range []func(*world){
			func(w *world) { w.spoil(transferKey(w)) },
			func(w *world) { w.setHash(transferKey(w), fields{"leg": "in", "amount": "-1", "updated_at_ms": "1"}) },
			func(w *world) { w.setHash(transferKey(w), fields{"leg": "both", "amount": "1", "updated_at_ms": "1"}) },
			func(w *world) { w.setHash(transferKey(w), fields{"leg": "out", "amount": "1"}) },
		} {
			spoil(w)
			w.refuses(subject{script: "transfer_read", run: func(w *world) (any, error) {
				return one(w, func(b *lua.Batch) *lua.Result[lua.TransferReadReply] {
					return b.TransferRead(w.scope, []string{transfer})
				})
			}}, transferKey(w), "a marker that is none")
		}
	})
}

// Random legs on one bucket against what they mean: initial and marker always
// move together, a target is reached once, and nothing falls below zero.
func TestTransferLegsProperty(t *testing.T) {
	target := stacktest.RedisTargets(t)[0]
	w := newWorld(t, newClient(t, target.Cluster, target.Addrs...))
	rapid.Check(t, func(rt *rapid.T) {
		l := &legs{world: w.fresh(), rt: rt, available: rapid.Int64Range(0, 6).Draw(rt, "available"), reserved: 2}
		l.sale(l.available, l.reserved)
		out := rapid.Bool().Draw(rt, "out")
		rt.Repeat(map[string]func(*rapid.T){
			"sell": func(rt *rapid.T) { l.rt = rt; l.sell() },
			"move": func(rt *rapid.T) {
				l.rt = rt
				to, second := rapid.Int64Range(0, 6).Draw(rt, "target"), rapid.Bool().Draw(rt, "partial or lower")
				if out {
					l.out(to, second)
				} else {
					l.in(to, second)
				}
			},
		})
	})
}

// legs is what one bucket and one marker hold, kept beside them.
type legs struct {
	*world
	rt                         *rapid.T
	available, reserved, moved int64
}

func (l *legs) sell() {
	if l.available == 0 {
		return
	}
	l.available--
	l.reserved++
	l.setHash(l.scope.StockKey(), stockOf(l.available, l.reserved))
}

func (l *legs) out(to int64, partial bool) {
	mode, before := lua.OutWhole, l.moved
	code := lua.TransferOutAlready
	if partial {
		mode = lua.OutPartial
	}
	switch needed := to - l.moved; {
	case needed <= 0:
	case needed <= l.available:
		l.moved, code = to, lua.TransferOutTaken
	case partial:
		l.moved, code = l.moved+l.available, lua.TransferOutLimited
	default:
		code = lua.TransferOutInsufficient
	}
	l.available -= l.moved - before
	got := reply(l.world, func(b *lua.Batch) *lua.Result[lua.TransferReply[lua.TransferOutCode]] {
		return b.TransferOut(l.scope, lua.TransferOutArgs{TransferID: transfer, Target: to, Mode: mode})
	})
	l.expect(got, lua.TransferReply[lua.TransferOutCode]{Code: code, InForce: l.moved, Available: l.available, Initial: l.available + l.reserved}, before)
}

func (l *legs) in(to int64, lower bool) {
	mode, before := lua.InRaise, l.moved
	code := lua.TransferInAlready
	if lower {
		mode = lua.InLower
	}
	switch {
	case !lower && to > l.moved, lower && to < l.moved && l.moved-to <= l.available:
		l.moved, code = to, lua.TransferInMoved
	case lower && to < l.moved:
		l.moved, code = l.moved-l.available, lua.TransferInLimited
	}
	l.available += l.moved - before
	got := reply(l.world, func(b *lua.Batch) *lua.Result[lua.TransferReply[lua.TransferInCode]] {
		return b.TransferIn(l.scope, lua.TransferInArgs{TransferID: transfer, Target: to, Mode: mode})
	})
	l.expect(got, lua.TransferReply[lua.TransferInCode]{Code: code, InForce: l.moved, Available: l.available, Initial: l.available + l.reserved}, before)
}

// expect compares a reply and what the bucket shows with what they should be.
func (l *legs) expect(got, want any, before int64) {
	if diff := cmp.Diff(want, got); diff != "" {
		l.rt.Fatalf("reply (-want +got):\n%s", diff)
	}
	read := reply(l.world, func(b *lua.Batch) *lua.Result[lua.TransferReadReply] {
		return b.TransferRead(l.scope, []string{transfer})
	})
	if read.Initial != l.available+l.reserved || read.Available != l.available || read.Reserved != l.reserved || read.Markers[0].Amount != l.moved {
		l.rt.Fatalf("the bucket shows %+v, want %d available, %d reserved, %d moved", read, l.available, l.reserved, l.moved)
	}
	if empty := l.text(soldOutKey(l.world)) == "1"; l.moved != before && empty != (l.available == 0) {
		l.rt.Fatalf("soldout is %v with %d available", empty, l.available)
	}
}
