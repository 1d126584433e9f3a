package lua_test

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// script is one case of a script other than reserve.
type scriptCase struct {
	name   string
	setup  func(*world)
	run    func(*world) any
	want   any
	writes func(*world, dump) // turns the state before into the one after; nil: nothing is written
}

// call makes a run of one call that must not fail.
func call[A, R any](add func(*lua.Batch, reservation.Scope, A) *lua.Result[R], args func(*world) A) func(*world) any {
	return func(w *world) any {
		w.Helper()
		return reply(w, func(b *lua.Batch) *lua.Result[R] { return add(b, w.scope, args(w)) })
	}
}

func runCases(t *testing.T, cases []scriptCase) {
	t.Helper()
	onEach(t, func(w *world) {
		for _, c := range cases {
			w.Run(c.name, func(t *testing.T) {
				w := w.on(t)
				c.setup(w)
				want := w.dump()
				if diff := cmp.Diff(c.want, c.run(w)); diff != "" {
					w.Errorf("reply (-want +got):\n%s", diff)
				}
				if c.writes != nil {
					c.writes(w, want)
				}
				if diff := cmp.Diff(want, w.dump()); diff != "" {
					w.Errorf("state after (-want +got):\n%s", diff)
				}
			})
		}
	})
}

func in(status reservation.Status) func(*world) {
	return func(w *world) { w.Helper(); w.reserved(status) }
}

func nothing(*world) {}

// then adds to a set-up.
func then(setups ...func(*world)) func(*world) {
	return func(w *world) {
		w.Helper()
		for _, setup := range setups {
			setup(w)
		}
	}
}

func resv(pairs ...string) func(*world) {
	return func(w *world) {
		w.Helper()
		for i := 0; i < len(pairs); i += 2 {
			w.must(w.client.HSet(w.ctx(), w.scope.ReservationKey(rid), pairs[i], pairs[i+1]).Err())
		}
	}
}

func stock(pairs ...string) func(*world) {
	return func(w *world) {
		w.Helper()
		for i := 0; i < len(pairs); i += 2 {
			w.must(w.client.HSet(w.ctx(), w.scope.StockKey(), pairs[i], pairs[i+1]).Err())
		}
	}
}

func noKey(key func(*world) string) func(*world) {
	return func(w *world) { w.Helper(); w.must(w.client.Del(w.ctx(), key(w)).Err()) }
}

func hashKey(w *world) string   { return w.scope.ReservationKey(rid) }
func stockKey(w *world) string  { return w.scope.StockKey() }
func metaKey(w *world) string   { return w.scope.MetaKey() }
func markerKey(w *world) string { return w.scope.UserKey(user) }
func shardKey(w *world) string  { return w.scope.RequestKey(request) }
func pendingKey(w *world) string {
	return w.scope.IndexKey(reservation.SendPending)
}

func expiryKey(w *world) string {
	return w.scope.IndexKey(reservation.ReservationExpiry)
}

// set changes fields of a hash in a dump, or makes it.
func (d dump) set(w *world, key string, pairs ...string) {
	h := dumped{Type: "hash", ExpireAt: w.until, Content: fields{}}
	if there, ok := d[key]; ok {
		h = there.(dumped)
	}
	h.Content = with(h.Content.(fields), pairs...)
	d[key] = h
}

// members replaces an index in a dump; none removes it.
func (d dump) members(w *world, index reservation.Index, members ...redis.Z) {
	if len(members) == 0 {
		delete(d, string(index))
		return
	}
	d[string(index)] = dumped{Type: "zset", ExpireAt: w.until, Content: members}
}

func (d dump) value(w *world, key, value string) {
	d[key] = dumped{Type: "string", ExpireAt: w.until, Content: value}
}

func member(score int64) redis.Z { return redis.Z{Member: rid, Score: float64(score)} }

const resvKey = "resv:" + rid

func TestTransition(t *testing.T) {
	to := func(target reservation.Status, more ...func(*world, *lua.TransitionArgs)) func(*world) any {
		return call((*lua.Batch).Transition, func(w *world) lua.TransitionArgs {
			a := lua.TransitionArgs{ReservationID: rid, Target: target, NextRetryMS: w.base + 5000, NowMS: w.base}
			for _, change := range more {
				change(w, &a)
			}
			return a
		})
	}
	answer := func(code lua.TransitionCode, current, target reservation.Status) lua.TransitionReply {
		return lua.TransitionReply{Code: code, Current: current, Target: target}
	}
	ids := func(messageID, orderID string) func(*world, *lua.TransitionArgs) {
		return func(_ *world, a *lua.TransitionArgs) { a.MessageID, a.OrderID = messageID, orderID }
	}
	updated := func(target reservation.Status) func(*world, dump) {
		return func(w *world, d dump) { d.set(w, resvKey, "status", string(target), "updated_at_ms", itoa(w.base)) }
	}
	reserved, unknown, enqueued := reservation.StatusReserved, reservation.StatusSendUnknown, reservation.StatusEnqueued
	rejected, pending := reservation.StatusRejected, reservation.StatusReleasePending
	created := reservation.StatusOrderCreated

	cases := []scriptCase{
		{"to SEND_UNKNOWN", in(reserved), to(unknown), answer(0, reserved, unknown), func(w *world, d dump) {
			updated(unknown)(w, d)
			d.members(w, reservation.SendPending, member(w.base+5000))
		}},
		{"to ENQUEUED with position", in(reserved), to(enqueued, func(_ *world, a *lua.TransitionArgs) {
			a.Position, a.MessageID = "b,1,2,id", message
		}), answer(0, reserved, enqueued), func(w *world, d dump) {
			updated(enqueued)(w, d)
			d.set(w, resvKey, "mq_position", "b,1,2,id")
			d.members(w, reservation.SendPending)
		}},
		{
			"to ORDER_CREATED", then(in(enqueued), func(w *world) { w.setMember(reservation.SendPending, rid, 5) }),
			to(created, ids("", "o1")), answer(0, enqueued, created), func(w *world, d dump) {
				updated(created)(w, d)
				d.set(w, resvKey, "order_id", "o1")
				d.members(w, reservation.SendPending)
				d.members(w, reservation.ReservationExpiry)
			},
		},
		{
			"to REJECTED", in(enqueued), to(rejected, func(_ *world, a *lua.TransitionArgs) { a.ErrorCode = "NO_STOCK" }),
			answer(0, enqueued, rejected), func(w *world, d dump) {
				updated(rejected)(w, d)
				d.set(w, resvKey, "error_code", "NO_STOCK")
				d.members(w, reservation.ReservationExpiry, member(w.base))
			},
		},
		{
			"to RELEASE_PENDING puts a lost member back", then(in(reserved), noKey(expiryKey)), to(pending),
			answer(0, reserved, pending), func(w *world, d dump) {
				updated(pending)(w, d)
				d.members(w, reservation.SendPending)
				d.members(w, reservation.ReservationExpiry, member(w.base))
			},
		},
		{
			"SEND_UNKNOWN again moves the retry forward", in(unknown), to(unknown, ids("other", "other")),
			answer(1, unknown, unknown), func(w *world, d dump) {
				d.members(w, reservation.SendPending, member(w.base+5000))
			},
		},
		{
			"SEND_UNKNOWN again never moves it back", in(unknown),
			to(unknown, func(w *world, a *lua.TransitionArgs) { a.NextRetryMS = w.base - 1 }), answer(1, unknown, unknown), nil,
		},
		{
			"SEND_UNKNOWN again puts a lost member back", then(in(unknown), noKey(pendingKey)), to(unknown),
			answer(1, unknown, unknown), func(w *world, d dump) {
				d.members(w, reservation.SendPending, member(w.base+5000))
			},
		},
		{"idempotent writes nothing", in(enqueued), to(enqueued, func(_ *world, a *lua.TransitionArgs) {
			a.Position, a.OrderID, a.MessageID, a.ErrorCode = "b,9,9,id", "o9", "other", "E"
		}), answer(1, enqueued, enqueued), nil},
		{"missing", nothing, to(enqueued), answer(2, "", enqueued), nil},
		{"missing comes before illegal", nothing, to("NONSENSE"), answer(2, "", "NONSENSE"), nil},
		{
			"another reservation in the hash, before same status", then(in(enqueued), resv("reservation_id", "r9")),
			to(enqueued), answer(4, enqueued, enqueued), nil,
		},
		{"illegal comes before other ids", in(created), to(enqueued, ids("other", "other")), answer(3, created, enqueued), nil},
		{"another message", in(reserved), to(enqueued, ids("other", "")), answer(4, reserved, enqueued), nil},
		{"another order", then(in(enqueued), resv("order_id", "o1")), to(created, ids("", "o2")), answer(4, enqueued, created), nil},
		{
			"the same order", then(in(enqueued), resv("order_id", "o1")), to(created, ids(message, "o1")),
			answer(0, enqueued, created), func(w *world, d dump) {
				updated(created)(w, d)
				d.members(w, reservation.ReservationExpiry)
			},
		},
		{"unknown target", in(reserved), to("NONSENSE"), answer(3, reserved, "NONSENSE"), nil},
		{"unknown status", then(in(reserved), resv("status", "NONSENSE")), to(enqueued), answer(3, "NONSENSE", enqueued), nil},
	}
	// every pair of statuses against the state machine of package reservation
	for _, from := range reservation.Statuses {
		for _, target := range reservation.Statuses {
			if from == target || reservation.CanTransition(from, target) {
				continue
			}
			cases = append(cases, scriptCase{
				"illegal " + string(from) + " to " + string(target), in(from), to(target),
				answer(3, from, target), nil,
			})
		}
	}
	runCases(t, cases)
	t.Run("every legal pair", func(t *testing.T) {
		onEach(t, func(w *world) {
			for _, from := range reservation.Statuses {
				for _, target := range reservation.Statuses {
					if !reservation.CanTransition(from, target) {
						continue
					}
					w := w.fresh()
					w.reserved(from)
					same[any](w, string(from)+" to "+string(target), to(target)(w), answer(0, from, target))
					sameText(w, "status", w.field(hashKey(w), "status"), target)
					w.allExpireAtRetention()
				}
			}
		})
	})
}

func TestCompensate(t *testing.T) {
	run := call((*lua.Batch).Compensate, func(w *world) lua.CompensateArgs {
		return lua.CompensateArgs{ReservationID: rid, UserID: user, Reason: "fenced", NowMS: w.base}
	})
	answer := func(code lua.CompensateCode, available int64, marker bool, status reservation.Status) lua.CompensateReply {
		return lua.CompensateReply{Code: code, Available: available, MarkerDeleted: marker, Status: status}
	}
	rejected, pending, released := reservation.StatusRejected, reservation.StatusReleasePending, reservation.StatusReleased
	gone := func(marker bool) func(*world, dump) {
		return func(w *world, d dump) {
			d.set(w, resvKey, "status", "RELEASED", "release_reason", "fenced",
				"released_at_ms", itoa(w.base), "updated_at_ms", itoa(w.base))
			d.set(w, "stock", "available", "10", "reserved", "0", "released_total", "1")
			d.members(w, reservation.SendPending)
			d.members(w, reservation.ReservationExpiry)
			delete(d, "soldout")
			if marker {
				delete(d, "user:u1")
			}
		}
	}
	soldOut := func(w *world) { w.setText(w.scope.SoldOutKey(), "1") }
	leftover := func(w *world) { w.setMember(reservation.SendPending, rid, 1) }
	runCases(t, []scriptCase{
		{"RELEASE_PENDING", then(in(pending), soldOut, leftover), run, answer(0, 10, true, released), gone(true)},
		{"REJECTED", in(rejected), run, answer(0, 10, true, released), gone(true)},
		{"without released_total", then(in(pending), func(w *world) {
			w.must(w.client.HDel(w.ctx(), stockKey(w), "released_total").Err())
		}), run, answer(0, 10, true, released), gone(true)},
		{
			"the marker names another reservation", then(in(pending), func(w *world) { w.setText(markerKey(w), otherRID) }),
			run, answer(0, 10, false, released), gone(false),
		},
		{"without marker", then(in(pending), noKey(markerKey)), run, answer(0, 10, false, released), gone(false)},
		{"again", in(released), run, answer(1, 9, false, released), nil},
		{"missing adds no stock", then(in(pending), noKey(hashKey)), run, answer(2, 9, false, ""), nil},
		{"missing without stock", nothing, run, answer(2, lua.Missing, false, ""), nil},
		{"RESERVED", in(reservation.StatusReserved), run, answer(3, 9, false, reservation.StatusReserved), nil},
		{"SEND_UNKNOWN", in(reservation.StatusSendUnknown), run, answer(3, 9, false, reservation.StatusSendUnknown), nil},
		{"ENQUEUED", in(reservation.StatusEnqueued), run, answer(3, 9, false, reservation.StatusEnqueued), nil},
		{"ORDER_CREATED", in(reservation.StatusOrderCreated), run, answer(3, 9, false, reservation.StatusOrderCreated), nil},
		{
			"no status", then(in(pending), func(w *world) { w.must(w.client.HDel(w.ctx(), hashKey(w), "status").Err()) }),
			run, answer(3, 9, false, ""), nil,
		},
		{"nothing reserved", then(in(pending), stock("reserved", "0", "initial", "9")), run, answer(4, 9, false, pending), nil},
		{"invariant broken", then(in(pending), stock("initial", "11")), run, answer(4, 9, false, pending), nil},
		{"stock gone", then(in(pending), noKey(stockKey)), run, answer(4, lua.Missing, false, pending), nil},
		{"another reservation", then(in(pending), resv("reservation_id", "r9")), run, answer(5, 9, false, pending), nil},
		{"another user's marker", then(in(pending), resv("user_id", "u2")), run, answer(5, 9, false, pending), nil},
		{"a user whose name ends alike", then(in(pending), resv("user_id", "uu1")), run, answer(5, 9, false, pending), nil},
		{"no user", then(in(pending), resv("user_id", "")), run, answer(5, 9, false, pending), nil},
		{"conflict comes before released", then(in(released), resv("user_id", "u2")), run, answer(5, 9, false, released), nil},
	})
}

func TestRecordSend(t *testing.T) {
	run := func(kind lua.SendKind, expected reservation.Status, position string) func(*world) any {
		return call((*lua.Batch).RecordSend, func(w *world) lua.RecordSendArgs {
			return lua.RecordSendArgs{ReservationID: rid, Expected: expected, Kind: kind, Position: position, NowMS: w.base}
		})
	}
	answer := func(code lua.RecordSendCode, sends, resends int64) lua.RecordSendReply {
		return lua.RecordSendReply{Code: code, SendCount: sends, ResendCount: resends}
	}
	reserved, enqueued := reservation.StatusReserved, reservation.StatusEnqueued
	runCases(t, []scriptCase{
		{"first send", in(reserved), run(lua.SendFirst, reserved, ""), answer(0, 1, 0), func(w *world, d dump) {
			d.set(w, resvKey, "last_sent_at_ms", itoa(w.base), "send_count", "1")
		}},
		{
			"third send", then(in(reserved), resv("send_count", "2", "last_sent_at_ms", "5")), run(lua.SendFirst, reserved, ""),
			answer(0, 3, 0), func(w *world, d dump) {
				d.set(w, resvKey, "last_sent_at_ms", itoa(w.base), "send_count", "3")
			},
		},
		{
			"resend", then(in(enqueued), resv("send_count", "1", "resend_count", "1")), run(lua.SendAgain, enqueued, ""),
			answer(0, 1, 2), func(w *world, d dump) {
				d.set(w, resvKey, "last_sent_at_ms", itoa(w.base), "resend_count", "2")
			},
		},
		{
			"the last attempt never moves back", then(in(reserved), resv("last_sent_at_ms", "9007199254740000")),
			run(lua.SendFirst, reserved, ""), answer(0, 1, 0), func(w *world, d dump) { d.set(w, resvKey, "send_count", "1") },
		},
		{
			"stored", then(in(enqueued), resv("send_count", "1")), run(lua.SendStored, enqueued, "b,0,7,id"), answer(0, 1, 0),
			func(w *world, d dump) { d.set(w, resvKey, "mq_position", "b,0,7,id") },
		},
		{"missing", nothing, run(lua.SendFirst, reserved, ""), answer(2, 0, 0), nil},
		{"status changed", in(enqueued), run(lua.SendFirst, reserved, ""), answer(3, 0, 0), nil},
		{
			"another reservation comes first", then(in(enqueued), resv("reservation_id", "r9", "send_count", "4")),
			run(lua.SendFirst, reserved, ""), answer(4, 4, 0), nil,
		},
	})
}

func TestDefer(t *testing.T) {
	run := func(index reservation.Index, expected reservation.Status, ahead int64) func(*world) any {
		return call((*lua.Batch).Defer, func(w *world) lua.DeferArgs {
			return lua.DeferArgs{ReservationID: rid, Index: index, Expected: expected, NextMS: w.base + ahead}
		})
	}
	answer := func(code lua.DeferCode, count int64, status reservation.Status) lua.DeferReply {
		return lua.DeferReply{Code: code, RetryCount: count, Status: status}
	}
	reserved, enqueued := reservation.StatusReserved, reservation.StatusEnqueued
	pending, expiry := reservation.SendPending, reservation.ReservationExpiry
	moved := func(index reservation.Index, to int64, count string) func(*world, dump) {
		return func(w *world, d dump) {
			d.members(w, index, member(w.base+to))
			if count != "" {
				d.set(w, resvKey, "retry_count", count)
			}
		}
	}
	runCases(t, []scriptCase{
		{"moves and counts", in(reserved), run(pending, reserved, 700), answer(0, 1, reserved), moved(pending, 700, "1")},
		{
			"counts on", then(in(enqueued), resv("retry_count", "41")), run(expiry, enqueued, 70_000), answer(0, 42, enqueued),
			moved(expiry, 70_000, "42"),
		},
		{"not later", then(in(enqueued), resv("retry_count", "3")), run(expiry, enqueued, 60_000), answer(1, 3, enqueued), nil},
		{"never back", in(enqueued), run(expiry, enqueued, 10), answer(1, 0, enqueued), nil},
		{"no member is not added", in(enqueued), run(pending, enqueued, 700), answer(1, 0, enqueued), nil},
		{"status changed", in(enqueued), run(expiry, reserved, 70_000), answer(3, 0, enqueued), nil},
		{"status changed comes before no member", in(enqueued), run(pending, reserved, 700), answer(3, 0, enqueued), nil},
		{"hash gone", then(in(enqueued), noKey(hashKey)), run(expiry, enqueued, 70_000), answer(3, 0, ""), nil},
		{
			"orphan", then(in(enqueued), noKey(hashKey)), run(expiry, lua.DeferHashMissing, 70_000), answer(0, 0, ""),
			moved(expiry, 70_000, ""),
		},
		{"no orphan after all", in(enqueued), run(expiry, lua.DeferHashMissing, 70_000), answer(3, 0, enqueued), nil},
		{"hash without status is no orphan", then(in(enqueued), func(w *world) {
			w.must(w.client.HDel(w.ctx(), hashKey(w), "status").Err())
		}), run(expiry, lua.DeferHashMissing, 70_000), answer(3, 0, ""), nil},
		{
			"unread", then(in(enqueued), resv("retry_count", "x")), run(expiry, lua.DeferHashUnread, 70_000), answer(0, 0, ""),
			moved(expiry, 70_000, ""),
		},
		{
			"unread, of the wrong type", then(in(enqueued), func(w *world) { w.spoil(hashKey(w)) }),
			run(expiry, lua.DeferHashUnread, 70_000), answer(0, 0, ""), moved(expiry, 70_000, ""),
		},
		{"nothing there", nothing, run(expiry, lua.DeferHashMissing, 700), answer(1, 0, ""), nil},
	})
}

func TestConfirm(t *testing.T) {
	run := func(order string) func(*world) any {
		return call((*lua.Batch).Confirm, func(w *world) lua.ConfirmArgs {
			return lua.ConfirmArgs{ReservationID: rid, OrderID: order, NowMS: w.base}
		})
	}
	answer := func(code lua.ConfirmCode, status reservation.Status) lua.ConfirmReply {
		return lua.ConfirmReply{Code: code, Status: status}
	}
	created := reservation.StatusOrderCreated
	confirmed := func(w *world, d dump) {
		d.set(w, resvKey, "status", string(created), "order_id", "o1", "updated_at_ms", itoa(w.base))
		d.members(w, reservation.SendPending)
		d.members(w, reservation.ReservationExpiry)
	}
	leftover := func(w *world) { w.setMember(reservation.SendPending, rid, 1) }
	cases := []scriptCase{
		{"RELEASE_PENDING", then(in(reservation.StatusReleasePending), leftover), run("o1"), answer(0, created), confirmed},
		{"REJECTED", in(reservation.StatusRejected), run("o1"), answer(0, created), confirmed},
		{"order already stored", then(in(reservation.StatusRejected), resv("order_id", "o1")), run("o1"), answer(0, created), confirmed},
		{"order unknown", then(in(reservation.StatusRejected), resv("order_id", "o1")), run(""), answer(0, created), confirmed},
		{"again", then(in(created), resv("order_id", "o1")), run("o1"), answer(1, created), nil},
		{"again, order unknown", then(in(created), resv("order_id", "o1")), run(""), answer(1, created), nil},
		{"again with another order", then(in(created), resv("order_id", "o1")), run("o2"), answer(4, created), nil},
		{
			"another order", then(in(reservation.StatusRejected), resv("order_id", "o1")), run("o2"),
			answer(4, reservation.StatusRejected), nil,
		},
		{
			"another reservation", then(in(reservation.StatusRejected), resv("reservation_id", "r9")), run("o1"),
			answer(4, reservation.StatusRejected), nil,
		},
		{"missing", nothing, run("o1"), answer(2, ""), nil},
	}
	for _, status := range []reservation.Status{
		reservation.StatusReserved, reservation.StatusSendUnknown, reservation.StatusEnqueued, reservation.StatusReleased,
	} {
		cases = append(cases, scriptCase{string(status), in(status), run("o1"), answer(3, status), nil})
	}
	runCases(t, cases)
}

func TestReindex(t *testing.T) {
	run := call((*lua.Batch).Reindex, func(w *world) lua.ReindexArgs {
		return lua.ReindexArgs{ReservationID: rid, NowMS: w.base + 7}
	})
	answer := func(code lua.ReindexCode, status reservation.Status, added int64) lua.ReindexReply {
		return lua.ReindexReply{Code: code, Status: status, Added: added}
	}
	lost := then(noKey(pendingKey), noKey(expiryKey))
	cases := []scriptCase{
		{"missing", nothing, run, answer(2, "", 0), nil},
		{
			"another reservation", then(in(reservation.StatusEnqueued), lost, resv("reservation_id", "r9")), run,
			answer(4, reservation.StatusEnqueued, 0), nil,
		},
		{
			"one of two", then(in(reservation.StatusReserved), noKey(expiryKey)), run, answer(0, reservation.StatusReserved, 1),
			func(w *world, d dump) { d.members(w, reservation.ReservationExpiry, member(w.base+60_000)) },
		},
	}
	for _, status := range reservation.Statuses {
		if status.Terminal() {
			cases = append(cases, scriptCase{string(status), then(in(status), lost), run, answer(3, status, 0), nil})
			continue
		}
		cases = append(cases, scriptCase{string(status) + " indexed", in(status), run, answer(1, status, 0), nil})
		added := int64(1)
		if status.Unsent() {
			added = 2
		}
		cases = append(cases, scriptCase{
			string(status) + " lost", then(in(status), lost), run, answer(0, status, added),
			func(w *world, d dump) {
				due := w.base + 60_000
				if status.Releasing() {
					due = w.base + 7
				}
				d.members(w, reservation.ReservationExpiry, member(due))
				if status.Unsent() {
					d.members(w, reservation.SendPending, member(w.base+7))
				}
			},
		})
	}
	runCases(t, cases)
}

func TestUnindex(t *testing.T) {
	run := call((*lua.Batch).Unindex, func(*world) lua.UnindexArgs { return lua.UnindexArgs{ReservationID: rid} })
	answer := func(code lua.UnindexCode, status reservation.Status, removed int64) lua.UnindexReply {
		return lua.UnindexReply{Code: code, Status: status, Removed: removed}
	}
	both := func(w *world) {
		w.setMember(reservation.SendPending, rid, 1)
		w.setMember(reservation.ReservationExpiry, rid, 1)
	}
	cases := []scriptCase{
		{"missing", both, run, answer(2, "", 0), nil},
		{
			"another reservation", then(in(reservation.StatusReleased), both, resv("reservation_id", "r9")), run,
			answer(4, reservation.StatusReleased, 0), nil,
		},
		{"others stay", then(in(reservation.StatusReleased), both, func(w *world) {
			w.setMember(reservation.SendPending, otherRID, 3)
		}), run, answer(0, reservation.StatusReleased, 2), func(w *world, d dump) {
			d.members(w, reservation.ReservationExpiry)
			d.members(w, reservation.SendPending, redis.Z{Member: otherRID, Score: 3})
		}},
	}
	for _, status := range reservation.Statuses {
		if !status.Terminal() {
			cases = append(cases, scriptCase{string(status), then(in(status), both), run, answer(3, status, 0), nil})
			continue
		}
		cases = append(cases,
			scriptCase{string(status) + " indexed", then(in(status), both), run, answer(0, status, 2), func(w *world, d dump) {
				d.members(w, reservation.SendPending)
				d.members(w, reservation.ReservationExpiry)
			}},
			scriptCase{string(status) + " not indexed", in(status), run, answer(1, status, 0), nil})
	}
	runCases(t, cases)
}

func TestSnapshot(t *testing.T) {
	onEach(t, func(w *world) {
		shot := func(w *world) lua.SnapshotReply {
			w.Helper()
			var got lua.SnapshotReply
			w.unchanged(func() {
				got = reply(w, func(b *lua.Batch) *lua.Result[lua.SnapshotReply] { return b.Snapshot(w.scope) })
			})
			now, err := w.client.(redis.Cmdable).Time(w.ctx()).Result()
			w.must(err)
			if d := now.UnixMilli() - got.TimeMS; d < 0 || d > 60_000 {
				w.Errorf("time_ms is %d ms before TIME", d)
			}
			got.TimeMS = 0
			return got
		}
		none := lua.Missing
		same(w, "empty", shot(w), lua.SnapshotReply{
			RetentionUntilMS: none, Initial: none, Available: none, Reserved: none, ReleasedTotal: none,
			PendingOldestMS: none, ExpiryOldestMS: none,
		})
		w.reserved(reservation.StatusReserved)
		w.setMember(reservation.SendPending, otherRID, w.base-9)
		same(w, "a sale", shot(w), lua.SnapshotReply{
			State: lua.StateActive, RetentionUntilMS: w.until, Initial: 10, Available: 9, Reserved: 1,
			Pending: 2, PendingOldestMS: w.base - 9, Expiry: 1, ExpiryOldestMS: w.base + 60_000,
		})
		w.must(w.client.HDel(w.ctx(), stockKey(w), "released_total").Err())
		sameText(w, "released_total", shot(w).ReleasedTotal, none)
		// A score that no script writes counts as the nearest time.
		odd := func(index reservation.Index, score float64) {
			w.must(w.client.ZAdd(w.ctx(), w.scope.IndexKey(index), redis.Z{Score: score, Member: "odd"}).Err())
		}
		odd(reservation.SendPending, -1.5)
		odd(reservation.ReservationExpiry, math.Inf(-1))
		sameText(w, "negative score", shot(w).PendingOldestMS, 0)
		sameText(w, "infinite score", shot(w).ExpiryOldestMS, 0)
	})
}
