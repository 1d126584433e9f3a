package lua_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

func (w *world) reserveArgs() lua.ReserveArgs {
	return lua.ReserveArgs{
		RequestID: request, ReservationID: rid, UserID: user, MessageID: message,
		TTLMS: 60_000, SchemaVersion: 1, NowMS: w.base,
	}
}

func (w *world) reserve(a lua.ReserveArgs) lua.ReserveReply {
	w.Helper()
	return reply(w, func(b *lua.Batch) *lua.Result[lua.ReserveReply] { return b.Reserve(w.scope, a) })
}

func TestReserveAccepted(t *testing.T) {
	onEach(t, func(w *world) {
		w.sale(2, 0)
		same(w, "reply", w.reserve(w.reserveArgs()), lua.ReserveReply{ReservationID: rid, Remaining: 1, Status: "QUEUED"})

		after := w.dump()
		same(w, "stock", after["stock"].(dumped).Content, any(stockOf(1, 1)))
		hash := w.hash(reservation.StatusReserved)
		same(w, "reservation", after["resv:r1"].(dumped).Content, any(with(hash,
			"reserved_at_ms", itoa(w.base), "updated_at_ms", itoa(w.base))))
		sameText(w, "marker", w.text(w.scope.UserKey(user)), rid)
		sameText(w, "send_pending", w.score(reservation.SendPending, rid), w.base)
		sameText(w, "reservation_expiry", w.score(reservation.ReservationExpiry, rid), w.base+60_000)
		sameText(w, "kept result", w.field(w.scope.RequestKey(request), request), "0|r1|1|QUEUED|u1")
		if _, there := after["soldout"]; there {
			w.Error("soldout is set with one unit left")
		}
		w.allExpireAtRetention()

		w.unchanged(func() {
			same(w, "replay", w.reserve(w.reserveArgs()),
				lua.ReserveReply{ReservationID: rid, Remaining: 1, Status: "QUEUED", Replay: true})
		})

		last := w.reserveArgs()
		last.RequestID, last.ReservationID, last.UserID = "q2", otherRID, "u2"
		w.keys = append(w.keys, w.scope.RequestKey("q2"))
		same(w, "last unit", w.reserve(last), lua.ReserveReply{ReservationID: otherRID, Remaining: 0, Status: "QUEUED"})
		sameText(w, "soldout", w.text(w.scope.SoldOutKey()), "1")
		w.allExpireAtRetention()
	})
}

// reserveFault is one thing that is wrong, with its reply. Faults of one group
// cannot be had together.
type reserveFault struct {
	name  string
	group string
	apply func(*world, *lua.ReserveArgs)
	want  lua.ReserveReply
}

func refusal(code lua.ReserveCode, status string, remaining int64) lua.ReserveReply {
	return lua.ReserveReply{Code: code, Status: status, Remaining: remaining}
}

func setField(key func(reservation.Scope) string, name, value string) func(*world, *lua.ReserveArgs) {
	return func(w *world, _ *lua.ReserveArgs) {
		w.Helper()
		w.must(w.client.HSet(w.ctx(), key(w.scope), name, value).Err())
	}
}

func dropField(key func(reservation.Scope) string, name string) func(*world, *lua.ReserveArgs) {
	return func(w *world, _ *lua.ReserveArgs) {
		w.Helper()
		w.must(w.client.HDel(w.ctx(), key(w.scope), name).Err())
	}
}

func kept(value string) func(*world, *lua.ReserveArgs) {
	return func(w *world, _ *lua.ReserveArgs) {
		w.Helper()
		w.setHash(w.scope.RequestKey(request), fields{request: value})
	}
}

// reserveFaults are the checks of reserve.lua in the order of spec §4. The
// stock is 10 available, 0 reserved.
var reserveFaults = []reserveFault{
	{
		"bad argument", "", func(_ *world, a *lua.ReserveArgs) { a.TTLMS = 0 },
		refusal(lua.ReserveBadArgument, "BAD_ARGUMENT", -1),
	},
	{
		"wrong type", "", func(w *world, _ *lua.ReserveArgs) { w.spoil(w.scope.SoldOutKey()) },
		refusal(lua.ReserveInvariantViolation, "WRONG_TYPE", -1),
	},

	{
		"another user's request", "kept", kept("0|r9|3|QUEUED|u9"),
		lua.ReserveReply{Code: lua.ReserveRequestIDConflict, Status: "REQUEST_ID_CONFLICT", Remaining: -1, Replay: true},
	},
	{
		"corrupted result", "kept", kept("0|r1|QUEUED|u1"),
		refusal(lua.ReserveInvariantViolation, "CORRUPTED_REQUEST_RESULT", -1),
	},
	{
		"kept result", "kept", kept("13||4|ACTIVITY_NOT_ACTIVE|u1"),
		lua.ReserveReply{Code: lua.ReserveActivityNotActive, Status: "ACTIVITY_NOT_ACTIVE", Remaining: 4, Replay: true},
	},

	{
		"meta incomplete", "", dropField(reservation.Scope.MetaKey, "schema_version"),
		refusal(lua.ReserveConfigMissing, "CONFIG_MISSING", -1),
	},
	{
		"meta of another scope", "", setField(reservation.Scope.MetaKey, "sku_id", "other"),
		refusal(lua.ReserveInvariantViolation, "META_SCOPE_MISMATCH", -1),
	},
	{
		"invalid meta time", "", setField(reservation.Scope.MetaKey, "retention_until_ms", "soon"),
		refusal(lua.ReserveInvariantViolation, "INVALID_META_TIME", -1),
	},

	{"reservation of another request", "hash", func(w *world, _ *lua.ReserveArgs) {
		w.setHash(w.scope.ReservationKey(rid), with(w.hash(reservation.StatusEnqueued), "request_id", "q9"))
	}, refusal(lua.ReserveReservationIDConflict, "RESERVATION_ID_CONFLICT", -1)},
	{"reservation is there", "hash", func(w *world, _ *lua.ReserveArgs) {
		w.setHash(w.scope.ReservationKey(rid), w.hash(reservation.StatusEnqueued))
	}, lua.ReserveReply{ReservationID: rid, Remaining: -1, Status: "ENQUEUED", Replay: true}},

	{
		"user marker", "", func(w *world, _ *lua.ReserveArgs) { w.setText(w.scope.UserKey(user), otherRID) },
		lua.ReserveReply{Code: lua.ReserveUserAlreadyReserved, ReservationID: otherRID, Remaining: 10, Status: "USER_ALREADY_RESERVED"},
	},
	{
		"version", "", setField(reservation.Scope.MetaKey, "version", "8"),
		refusal(lua.ReserveVersionMismatch, "VERSION_MISMATCH", 10),
	},
	{"not started", "time", func(w *world, _ *lua.ReserveArgs) {
		setField(reservation.Scope.MetaKey, "starts_at_ms", itoa(w.base+1))(w, nil)
	}, refusal(lua.ReserveActivityNotStarted, "ACTIVITY_NOT_STARTED", 10)},
	{"ended", "time", func(w *world, _ *lua.ReserveArgs) {
		setField(reservation.Scope.MetaKey, "ends_at_ms", itoa(w.base))(w, nil)
	}, refusal(lua.ReserveActivityEnded, "ACTIVITY_ENDED", 10)},
	{
		"not active", "", setField(reservation.Scope.MetaKey, "state", "PAUSED"),
		refusal(lua.ReserveActivityNotActive, "ACTIVITY_NOT_ACTIVE", 10),
	},

	{
		"stock incomplete", "", dropField(reservation.Scope.StockKey, "reserved"),
		refusal(lua.ReserveConfigMissing, "STOCK_CONFIG_MISSING", -1),
	},
	{
		"stock not a number", "", setField(reservation.Scope.StockKey, "released_total", "none"),
		refusal(lua.ReserveInvariantViolation, "WRONG_TYPE", -1),
	},
	{
		"stock inconsistent", "", setField(reservation.Scope.StockKey, "initial", "11"),
		refusal(lua.ReserveInvariantViolation, "STOCK_INVARIANT_VIOLATION", 10),
	},
	{"sold out", "", func(w *world, _ *lua.ReserveArgs) {
		// initial stays: together with "stock inconsistent" it is 0 + 10 against 11
		w.must(w.client.HSet(w.ctx(), w.scope.StockKey(), "available", 0, "reserved", 10).Err())
	}, refusal(lua.ReserveSoldOut, "SOLD_OUT", 0)},
	{
		"time to live too long", "", func(w *world, a *lua.ReserveArgs) { a.TTLMS = w.until - w.base },
		refusal(lua.ReserveBadArgument, "RESERVATION_TTL_TOO_LONG", 10),
	},
}

// isFinal says whether the reply is kept for its request_id.
func isFinal(r lua.ReserveReply) bool {
	return !r.Replay && (r.Code == lua.ReserveAccepted || r.Code >= lua.ReserveUserAlreadyReserved && r.Code <= lua.ReserveSoldOut)
}

// expectReserve runs reserve and checks the reply and everything it wrote.
func (w *world) expectReserve(a lua.ReserveArgs, want lua.ReserveReply) {
	w.Helper()
	before := w.dump()
	got := w.reserve(a)
	same(w, "reply", got, want)
	rebuilt := want.Code == lua.ReserveAccepted && want.Replay
	if isFinal(want) || rebuilt {
		kept := itoa(int64(want.Code)) + "|" + want.ReservationID + "|" + itoa(want.Remaining) + "|" + want.Status + "|" + user
		shard := w.scope.RequestKey(request)
		suffix := shard[len("seckill:{"+w.scope.Tag()+"}:"):]
		before[suffix] = dumped{Type: "hash", ExpireAt: w.until, Content: fields{request: kept}}
	}
	if want.Code == lua.ReserveSoldOut && !want.Replay {
		before["soldout"] = dumped{Type: "string", ExpireAt: w.until, Content: "1"}
	}
	if diff := cmp.Diff(before, w.dump()); diff != "" {
		w.Errorf("unexpected writes (-want +got):\n%s", diff)
	}
}

// Each check alone, and each pair of checks: the earlier one answers.
func TestReserveOrderOfChecks(t *testing.T) {
	onEach(t, func(w *world) {
		for i, first := range reserveFaults {
			w.Run(first.name, func(t *testing.T) {
				w := w.on(t)
				w.sale(10, 0)
				a := w.reserveArgs()
				first.apply(w, &a)
				w.expectReserve(a, first.want)
				if isFinal(first.want) {
					again := first.want
					again.Replay = true
					w.unchanged(func() { same(w, "replay", w.reserve(a), again) })
				}
			})
			for _, second := range reserveFaults[i+1:] {
				if first.group != "" && first.group == second.group {
					continue
				}
				w.Run(first.name+" before "+second.name, func(t *testing.T) {
					w := w.on(t)
					w.sale(10, 0)
					a := w.reserveArgs()
					second.apply(w, &a)
					first.apply(w, &a)
					want := first.want
					want.Remaining = remainingUnder(first, second)
					w.expectReserve(a, want)
				})
			}
		}
	})
}

// remainingUnder is first's `remaining` when second also holds: the available
// of codes 10 to 14 is read from whatever the stock says.
func remainingUnder(first, second reserveFault) int64 {
	if first.want.Remaining == 10 && second.name == "sold out" {
		return 0
	}
	return first.want.Remaining
}

func TestReserveArguments(t *testing.T) {
	long := make([]byte, 129)
	for i := range long {
		long[i] = 'a'
	}
	bad := map[string]func(*lua.ReserveArgs){
		"request empty":        func(a *lua.ReserveArgs) { a.RequestID = "" },
		"request with |":       func(a *lua.ReserveArgs) { a.RequestID = "q|1" },
		"request too long":     func(a *lua.ReserveArgs) { a.RequestID = string(long) },
		"reservation with {":   func(a *lua.ReserveArgs) { a.ReservationID = "r{1" },
		"reservation with :":   func(a *lua.ReserveArgs) { a.ReservationID = "r:1" },
		"user with space":      func(a *lua.ReserveArgs) { a.UserID = "u 1" },
		"user beyond ASCII":    func(a *lua.ReserveArgs) { a.UserID = "ü" },
		"message with }":       func(a *lua.ReserveArgs) { a.MessageID = "m}" },
		"message empty":        func(a *lua.ReserveArgs) { a.MessageID = "" },
		"negative ttl":         func(a *lua.ReserveArgs) { a.TTLMS = -1 },
		"ttl at 2^53":          func(a *lua.ReserveArgs) { a.TTLMS = reservation.MaxNumber },
		"negative schema":      func(a *lua.ReserveArgs) { a.SchemaVersion = -1 },
		"negative now":         func(a *lua.ReserveArgs) { a.NowMS = -5 },
		"now at 2^53":          func(a *lua.ReserveArgs) { a.NowMS = reservation.MaxNumber },
		"request with newline": func(a *lua.ReserveArgs) { a.RequestID = "q\n" },
	}
	onEach(t, func(w *world) {
		w.sale(10, 0)
		for name, spoil := range bad {
			a := w.reserveArgs()
			spoil(&a)
			w.unchanged(func() {
				if got := w.reserve(a); got != refusal(lua.ReserveBadArgument, "BAD_ARGUMENT", -1) {
					w.Errorf("%s: %+v", name, got)
				}
			})
		}
	})
}

// A retention that has passed on the server's clock is refused even when now_ms
// says otherwise: PEXPIREAT into the past would delete the key.
func TestReserveNeverExpiresIntoThePast(t *testing.T) {
	onEach(t, func(w *world) {
		w.sale(10, 0)
		for name, set := range map[string]fields{
			"starts after ends":       {"starts_at_ms": itoa(w.until - 60_000)},
			"ends after retention":    {"ends_at_ms": itoa(w.until + 1)},
			"retention passed":        {"starts_at_ms": "1", "ends_at_ms": "2000", "retention_until_ms": "3000"},
			"empty time":              {"starts_at_ms": " "},
			"fraction":                {"ends_at_ms": itoa(w.base) + ".5"},
			"2^53":                    {"retention_until_ms": "9007199254740992"},
			"exponent":                {"retention_until_ms": "1e15"},
			"hexadecimal":             {"starts_at_ms": "0x10"},
			"sign":                    {"starts_at_ms": "+10"},
			"number with a line feed": {"starts_at_ms": "10\n"},
		} {
			w.setHash(w.scope.MetaKey(), w.meta())
			w.must(w.client.HSet(w.ctx(), w.scope.MetaKey(), set).Err())
			for _, now := range []int64{0, 1500, w.base} {
				a := w.reserveArgs()
				a.NowMS = now
				w.unchanged(func() {
					if got := w.reserve(a); got != refusal(lua.ReserveInvariantViolation, "INVALID_META_TIME", -1) {
						w.Errorf("%s at %d: %+v", name, now, got)
					}
				})
			}
		}
	})
}

func TestReserveKeptResults(t *testing.T) {
	corrupted := []string{
		"", "0", "0|r1|1|QUEUED|u1|x", "0||1|QUEUED|u1", "11|r1|1|X|u1", "16||1|X|u1", "9||1|X|u1",
		"x|r1|1|QUEUED|u1", "0|r1||QUEUED|u1", "0|r1|-2|QUEUED|u1", "0|r1|1.5|QUEUED|u1", "0|r1|1|queued|u1",
		"0|r{1|1|QUEUED|u1", "-0|r1|1|QUEUED|u1",
	}
	onEach(t, func(w *world) {
		w.sale(10, 0)
		for _, value := range corrupted {
			w.setHash(w.scope.RequestKey(request), fields{request: value})
			w.unchanged(func() {
				got := w.reserve(w.reserveArgs())
				want := refusal(lua.ReserveInvariantViolation, "CORRUPTED_REQUEST_RESULT", -1)
				if got != want {
					w.Errorf("%q: %+v", value, got)
				}
			})
		}
	})
}

// Codes 10 to 14 come before the stock is checked: what is no number is -1.
func TestReserveRemainingWithoutStock(t *testing.T) {
	onEach(t, func(w *world) {
		for _, stock := range []fields{nil, {"available": "-1"}, {"available": "many"}} {
			w := w.fresh()
			w.setHash(w.scope.MetaKey(), with(w.meta(), "state", "PREPARED"))
			w.setHash(w.scope.StockKey(), stock)
			w.expectReserve(w.reserveArgs(), refusal(lua.ReserveActivityNotActive, "ACTIVITY_NOT_ACTIVE", -1))
			same(w, "replay", w.reserve(w.reserveArgs()), lua.ReserveReply{
				Code: lua.ReserveActivityNotActive, Status: "ACTIVITY_NOT_ACTIVE", Remaining: -1, Replay: true,
			})
		}
	})
}
