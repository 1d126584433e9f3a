package lua_test

import (
	"errors"
	"testing"

	"github.com/seckill/reconciler/lua"
)

// stopped is a sale of 10 units that is paused, and whose invariant is broken.
func stopped(pairs ...string) func(*world) {
	return func(w *world) {
		w.setHash(w.scope.MetaKey(), with(w.meta(), "state", "PAUSED"))
		w.setHash(w.scope.StockKey(), with(fields{"initial": "10", "available": "7", "reserved": "1", "released_total": "4"}, pairs...))
	}
}

func recountArgs(w *world) lua.RecountArgs {
	return lua.RecountArgs{
		Seen:    lua.StockText{Initial: "10", Available: "7", Reserved: "1", ReleasedTotal: "4"},
		Initial: 10, Available: 8, Reserved: 2, ReleasedTotal: 4, NowMS: w.base,
	}
}

func TestRecount(t *testing.T) {
	run := func(more ...func(*world, *lua.RecountArgs)) func(*world) any {
		return call((*lua.Batch).Recount, func(w *world) lua.RecountArgs {
			a := recountArgs(w)
			for _, change := range more {
				change(w, &a)
			}
			return a
		})
	}
	answer := func(code lua.RecountCode, initial, available, reserved int64) lua.RecountReply {
		return lua.RecountReply{Code: code, Initial: initial, Available: available, Reserved: reserved}
	}
	seen := func(s lua.StockText) func(*world, *lua.RecountArgs) {
		return func(_ *world, a *lua.RecountArgs) { a.Seen = s }
	}
	shall := func(initial, available, reserved int64) func(*world, *lua.RecountArgs) {
		return func(_ *world, a *lua.RecountArgs) { a.Initial, a.Available, a.Reserved = initial, available, reserved }
	}
	state := func(s string) func(*world) {
		return func(w *world) { w.must(w.client.HSet(w.ctx(), metaKey(w), "state", s).Err()) }
	}
	lacks := func(key func(*world) string, field string) func(*world) {
		return func(w *world) { w.must(w.client.HDel(w.ctx(), key(w), field).Err()) }
	}
	soldOut := func(w *world) { w.setText(soldOutKey(w), "1") }
	becomes := func(initial, available, reserved, released string) func(*world, dump) {
		return func(w *world, d dump) {
			d.set(w, "stock", "initial", initial, "available", available, "reserved", reserved, "released_total", released)
			if available == "0" {
				d.value(w, "soldout", "1")
			} else {
				delete(d, "soldout")
			}
		}
	}
	right := becomes("10", "8", "2", "4")
	already := stopped("available", "8", "reserved", "2")
	runCases(t, []scriptCase{
		{"recounted", stopped(), run(), answer(0, 10, 8, 2), right},
		{"CLOSED", then(stopped(), state("CLOSED")), run(), answer(0, 10, 8, 2), right},
		{"soldout ends", then(stopped(), soldOut), run(), answer(0, 10, 8, 2), right},
		{"sold out", stopped(), run(shall(2, 0, 2)), answer(0, 2, 0, 2), becomes("2", "0", "2", "4")},
		{
			"negative", stopped("available", "-3"), run(seen(lua.StockText{Initial: "10", Available: "-3", Reserved: "1", ReleasedTotal: "4"})),
			answer(0, 10, 8, 2), right,
		},
		{
			"no number", stopped("reserved", "many"), run(seen(lua.StockText{Initial: "10", Available: "7", Reserved: "many", ReleasedTotal: "4"})),
			answer(0, 10, 8, 2), right,
		},
		{
			"nothing was ever released", then(stopped(), lacks(stockKey, "released_total")),
			run(seen(lua.StockText{Initial: "10", Available: "7", Reserved: "1"})), answer(0, 10, 8, 2), right,
		},
		{"already", already, run(), answer(1, 10, 8, 2), nil},
		{"already, whatever was seen", already, run(seen(lua.StockText{})), answer(1, 10, 8, 2), nil},
		{
			"already, and soldout lies", then(already, soldOut),
			run(seen(lua.StockText{Initial: "10", Available: "8", Reserved: "2", ReleasedTotal: "4"})), answer(0, 10, 8, 2), right,
		},
		{"already, soldout lies, and something else was seen", then(already, soldOut), run(), answer(5, 10, 8, 2), nil},

		{"ACTIVE", then(stopped(), state("ACTIVE")), run(), answer(3, 10, 7, 1), nil},
		{"PREPARED", then(stopped(), state("PREPARED")), run(), answer(3, 10, 7, 1), nil},
		{"changed", stopped("available", "6"), run(), answer(5, 10, 6, 1), nil},
		{"changed to no number", stopped("available", "x"), run(), answer(5, 10, lua.Missing, 1), nil},
		{"the same number in another text", stopped("available", "07"), run(), answer(5, 10, 7, 1), nil},
		{"released_total came", stopped(), run(seen(lua.StockText{Initial: "10", Available: "7", Reserved: "1"})), answer(5, 10, 7, 1), nil},
		{"bad sum", stopped(), run(shall(10, 8, 3)), answer(6, 10, 7, 1), nil},
		{"meta gone", then(stopped(), noKey(metaKey)), run(), answer(7, 10, 7, 1), nil},
		{"no state", then(stopped(), lacks(metaKey, "state")), run(), answer(7, 10, 7, 1), nil},
		{"stock gone", then(stopped(), noKey(stockKey)), run(), answer(7, lua.Missing, lua.Missing, lua.Missing), nil},
		{"stock incomplete", then(stopped(), lacks(stockKey, "reserved")), run(), answer(7, 10, 7, lua.Missing), nil},
		{"retention passed", stopped(), run(func(w *world, a *lua.RecountArgs) { a.NowMS = w.until }), answer(7, 10, 7, 1), nil},
	})
}

// Two operators with the same proposal: one of them recounts, and the other
// learns that it is so; a third with an older proposal changes nothing.
func TestRecountOnce(t *testing.T) {
	onEach(t, func(w *world) {
		stopped()(w)
		recount := func(a lua.RecountArgs) lua.RecountCode {
			return reply(w, func(b *lua.Batch) *lua.Result[lua.RecountReply] { return b.Recount(w.scope, a) }).Code
		}
		same(w, "the first", recount(recountArgs(w)), lua.RecountDone)
		w.unchanged(func() { same(w, "the second", recount(recountArgs(w)), lua.RecountAlready) })
		other := recountArgs(w)
		other.Available, other.Reserved = 9, 1
		w.unchanged(func() { same(w, "an older one", recount(other), lua.RecountChanged) })
	})
}

// Arguments that the typed wrapper lets through.
func TestRecountArguments(t *testing.T) {
	onEach(t, func(w *world) {
		stopped()(w)
		for argument, spoil := range map[string]func(*lua.RecountArgs){
			"ARGV[5]": func(a *lua.RecountArgs) { a.Initial = -1 },
			"ARGV[6]": func(a *lua.RecountArgs) { a.Available = 1 << 53 },
			"ARGV[7]": func(a *lua.RecountArgs) { a.Reserved = -2 },
			"ARGV[8]": func(a *lua.RecountArgs) { a.ReleasedTotal = -1 },
			"ARGV[9]": func(a *lua.RecountArgs) { a.NowMS = -1 },
		} {
			w.unchanged(func() {
				a := recountArgs(w)
				spoil(&a)
				_, err := one(w, func(b *lua.Batch) *lua.Result[lua.RecountReply] { return b.Recount(w.scope, a) })
				var failure *lua.CallError
				if !errors.Is(err, lua.ErrWrongData) || !errors.As(err, &failure) || failure.Key != argument {
					w.Errorf("%s: %v", argument, err)
				}
			})
		}
	})
}
