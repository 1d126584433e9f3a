package lua_test

import (
	"testing"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

func TestMarkUser(t *testing.T) {
	run := func(seen string) func(*world) any {
		return call((*lua.Batch).MarkUser, func(*world) lua.MarkUserArgs {
			return lua.MarkUserArgs{ReservationID: rid, UserID: user, Seen: seen}
		})
	}
	answer := func(code lua.MarkUserCode, marker string) lua.MarkUserReply {
		return lua.MarkUserReply{Code: code, Marker: marker}
	}
	marked := func(w *world, d dump) { d.value(w, "user:u1", rid) }
	names := func(id string) func(*world) { return func(w *world) { w.setText(markerKey(w), id) } }
	created, released := reservation.StatusOrderCreated, reservation.StatusReleased
	cases := []scriptCase{
		{"from another", then(in(created), names(otherRID)), run(otherRID), answer(0, rid), marked},
		{
			"from another, not ORDER_CREATED", then(in(reservation.StatusEnqueued), names(otherRID)), run(otherRID),
			answer(3, otherRID), nil,
		},
		{"changed", then(in(created), names(otherRID)), run(""), answer(5, otherRID), nil},
		{"changed to none", then(in(created), noKey(markerKey)), run(otherRID), answer(5, ""), nil},
		{"missing", names(otherRID), run(otherRID), answer(2, otherRID), nil},
		{"RELEASED", then(in(released), noKey(markerKey)), run(""), answer(3, ""), nil},
		{"unknown status", then(in(created), noKey(markerKey), resv("status", "NONSENSE")), run(""), answer(3, ""), nil},
		{"another reservation", then(in(created), noKey(markerKey), resv("reservation_id", "r9")), run(""), answer(4, ""), nil},
		{"another user", then(in(created), noKey(markerKey), resv("user_id", "u2")), run(""), answer(4, ""), nil},
		{"no user", then(in(created), noKey(markerKey), resv("user_id", "")), run(""), answer(4, ""), nil},
	}
	for _, status := range reservation.Statuses {
		if status == released {
			continue
		}
		cases = append(cases,
			scriptCase{string(status) + " without marker", then(in(status), noKey(markerKey)), run(""), answer(0, rid), marked},
			scriptCase{string(status) + " with it", in(status), run(""), answer(1, rid), nil})
	}
	runCases(t, cases)
}

func TestRestore(t *testing.T) {
	run := func(mode lua.RestoreMode, more ...func(*world, *lua.RestoreArgs)) func(*world) any {
		return call((*lua.Batch).Restore, func(w *world) lua.RestoreArgs {
			a := lua.RestoreArgs{
				ReservationID: rid, RequestID: request, UserID: user, MessageID: message, OrderID: "o1",
				ReservedAtMS: w.base - 500, ExpiresAtMS: w.base + 60_000, SchemaVersion: 1, Mode: mode, NowMS: w.base,
			}
			for _, change := range more {
				change(w, &a)
			}
			return a
		})
	}
	answer := func(code lua.RestoreCode, previous string, available int64, status reservation.Status) lua.RestoreReply {
		return lua.RestoreReply{Code: code, PreviousMarker: previous, Available: available, Status: status}
	}
	created := reservation.StatusOrderCreated
	sale := func(w *world) { w.sale(9, 1) }
	marks := func(id string) func(*world) { return func(w *world) { w.setText(markerKey(w), id) } }
	keeps := func(value string) func(*world) {
		return func(w *world) { w.setHash(shardKey(w), fields{request: value}) }
	}
	restoredHash := func(w *world, d dump) {
		d.set(w, resvKey, flat(with(w.hash(created), "order_id", "o1", "updated_at_ms", itoa(w.base)))...)
	}
	keptResult := func(w *world, d dump) { d.set(w, shard(w), request, "0|r1|-1|ORDER_CREATED|u1") }
	hashOnly := func(w *world, d dump) {
		restoredHash(w, d)
		keptResult(w, d)
		d.members(w, reservation.SendPending)
		d.members(w, reservation.ReservationExpiry)
	}
	unit := func(available, reserved string) func(*world, dump) {
		return func(w *world, d dump) {
			restoredHash(w, d)
			keptResult(w, d)
			d.set(w, "stock", "available", available, "reserved", reserved)
			d.value(w, "user:u1", rid)
			if available == "0" {
				d.value(w, "soldout", "1")
			}
		}
	}
	foreign := "0|r9|3|QUEUED|u9"
	pending := func(w *world) { w.setMember(reservation.SendPending, rid, w.base) }
	expiry := func(w *world) { w.setMember(reservation.ReservationExpiry, rid, w.base) }
	released := func(w *world) {
		w.reserved(reservation.StatusReleased)
		w.must(w.client.Del(w.ctx(), markerKey(w)).Err())
	}
	operated := func(available, reserved string) func(*world, dump) {
		return func(w *world, d dump) {
			d.set(w, resvKey, "status", "ORDER_CREATED", "order_id", "o1", "updated_at_ms", itoa(w.base))
			keptResult(w, d)
			d.set(w, "stock", "available", available, "reserved", reserved)
			d.value(w, "user:u1", rid)
		}
	}
	expired := func(w *world) {
		w.must(w.client.HSet(w.ctx(), metaKey(w), "retention_until_ms", itoa(w.base)).Err())
	}

	runCases(t, []scriptCase{
		// the whole reserve was lost
		{"with unit", sale, run(lua.RestoreActive), answer(0, "", 8, created), unit("8", "2")},
		{"with the last unit", func(w *world) { w.sale(1, 9) }, run(lua.RestoreActive), answer(0, "", 0, created), unit("0", "10")},
		{"marker of another is replaced", then(sale, marks(otherRID)), run(lua.RestoreActive), answer(0, otherRID, 8, created), unit("8", "2")},
		{
			"another user's request field stays", then(sale, keeps(foreign)), run(lua.RestoreActive), answer(0, "", 8, created),
			func(w *world, d dump) {
				unit("8", "2")(w, d)
				d.set(w, shard(w), request, foreign)
			},
		},
		{
			"own request field that is no sibling is replaced", then(sale, keeps("15||0|SOLD_OUT|u1")), run(lua.RestoreActive),
			answer(0, "", 8, created), unit("8", "2"),
		},
		{
			"own field, other rid, is replaced", then(sale, keeps("0|r9|3|QUEUED|u1")), run(lua.RestoreActive),
			answer(0, "", 8, created), unit("8", "2"),
		},
		{"deficit", func(w *world) { w.sale(0, 10) }, run(lua.RestoreActive), answer(3, "", 0, ""), nil},
		{"invariant", then(sale, stock("initial", "11")), run(lua.RestoreActive), answer(5, "", 9, ""), nil},
		{
			"invariant comes before deficit", func(w *world) { w.sale(0, 10); stock("initial", "11")(w) }, run(lua.RestoreActive),
			answer(5, "", 0, ""), nil,
		},

		// a sibling proves the deduction
		{"marker", then(sale, marks(rid)), run(lua.RestoreActive), answer(2, rid, 9, created), hashOnly},
		{"request field", then(sale, keeps("0|r1|4|QUEUED|u1")), run(lua.RestoreActive), answer(2, "", 9, created), hashOnly},
		{
			"request field under another user", then(sale, keeps("0|r1|4|QUEUED|u9")), run(lua.RestoreActive), answer(2, "", 9, created),
			func(w *world, d dump) {
				hashOnly(w, d)
				d.set(w, shard(w), request, "0|r1|4|QUEUED|u9")
			},
		},
		{"send_pending", then(sale, pending), run(lua.RestoreActive), answer(2, "", 9, created), hashOnly},
		{"reservation_expiry", then(sale, expiry), run(lua.RestoreActive), answer(2, "", 9, created), hashOnly},
		{
			"all of them, nothing available", then(func(w *world) { w.sale(0, 10) }, pending, expiry, marks(rid)),
			run(lua.RestoreActive), answer(2, rid, 0, created), hashOnly,
		},

		// cancelled: never a unit
		{"cancelled with sibling", then(sale, expiry), run(lua.RestoreCancelled), answer(2, "", 9, created), hashOnly},
		{"cancelled without", sale, run(lua.RestoreCancelled), answer(4, "", 9, ""), nil},
		{
			"cancelled, code 10 is no sibling", then(sale, keeps("10|r1|4|USER_ALREADY_RESERVED|u1")), run(lua.RestoreCancelled),
			answer(4, "", 9, ""), nil,
		},

		// there already
		{"exists", in(reservation.StatusEnqueued), run(lua.RestoreActive), answer(1, rid, 9, reservation.StatusEnqueued), nil},
		{"exists, RELEASED", released, run(lua.RestoreActive), answer(1, "", 9, reservation.StatusReleased), nil},
		{"exists for another user", then(in(created), resv("user_id", "u9")), run(lua.RestoreActive), answer(6, rid, 9, created), nil},
		{
			"exists for another request", then(in(created), resv("request_id", "q9")), run(lua.RestoreCancelled),
			answer(6, rid, 9, created), nil,
		},
		{"exists under another id", then(in(created), resv("reservation_id", "r9")), run(lua.RestoreActive), answer(6, rid, 9, created), nil},
		{
			"meta of another scope", then(sale, func(w *world) { w.must(w.client.HSet(w.ctx(), metaKey(w), "bucket_id", 3).Err()) }),
			run(lua.RestoreActive), answer(6, "", 9, ""), nil,
		},

		// refused
		{"meta gone", then(sale, noKey(metaKey)), run(lua.RestoreActive), answer(7, "", 9, ""), nil},
		{"stock gone", then(sale, noKey(stockKey), marks(rid)), run(lua.RestoreActive), answer(7, rid, lua.Missing, ""), nil},
		{"retention passed", then(sale, expired), run(lua.RestoreActive), answer(7, "", 9, ""), nil},
		{
			"retention passed by now_ms", sale, run(lua.RestoreActive, func(w *world, a *lua.RestoreArgs) { a.NowMS = w.until }),
			answer(7, "", 9, ""), nil,
		},

		// operator
		{"operator", released, run(lua.RestoreOperator), answer(0, "", 8, created), operated("8", "2")},
		{
			"operator asks no sibling", then(released, marks(rid), pending), run(lua.RestoreOperator), answer(0, rid, 8, created),
			operated("8", "2"),
		},
		{
			"operator, deficit", then(released, stock("available", "0", "reserved", "10")), run(lua.RestoreOperator),
			answer(3, "", 0, reservation.StatusReleased), nil,
		},
		{
			"operator, invariant", then(released, stock("initial", "99")), run(lua.RestoreOperator),
			answer(5, "", 9, reservation.StatusReleased), nil,
		},
		{
			"operator, another order stored", then(released, resv("order_id", "o9")), run(lua.RestoreOperator),
			answer(6, "", 9, reservation.StatusReleased), nil,
		},
		{"operator, not released", in(created), run(lua.RestoreOperator), answer(1, rid, 9, created), nil},
		{"operator, hash gone", then(sale, marks(rid)), run(lua.RestoreOperator), answer(7, rid, 9, ""), nil},
	})
}

func shard(w *world) string { return shardKey(w)[len("seckill:{"+w.scope.Tag()+"}:"):] }

func flat(f fields) []string {
	var out []string
	for name, value := range f {
		out = append(out, name, value)
	}
	return out
}

func TestAdoptOrphan(t *testing.T) {
	run := func(more ...func(*world, *lua.AdoptOrphanArgs)) func(*world) any {
		return call((*lua.Batch).AdoptOrphan, func(w *world) lua.AdoptOrphanArgs {
			a := lua.AdoptOrphanArgs{
				ReservationID: rid, RequestID: request, UserID: user, MessageID: message, SchemaVersion: 1, NowMS: w.base,
			}
			for _, change := range more {
				change(w, &a)
			}
			return a
		})
	}
	answer := func(code lua.AdoptOrphanCode, status reservation.Status) lua.AdoptOrphanReply {
		return lua.AdoptOrphanReply{Code: code, Status: status}
	}
	orphan := then(in(reservation.StatusReserved), noKey(hashKey))
	adopted := func(w *world, d dump) {
		d.set(w, resvKey, flat(with(w.hash(reservation.StatusReleasePending), "reserved_at_ms", itoa(w.base),
			"expires_at_ms", itoa(w.base), "updated_at_ms", itoa(w.base)))...)
		d.members(w, reservation.SendPending)
		d.members(w, reservation.ReservationExpiry, member(w.base))
	}
	keeps := func(value string) func(*world) {
		return func(w *world) { w.setHash(shardKey(w), fields{request: value}) }
	}
	pending := reservation.StatusReleasePending
	runCases(t, []scriptCase{
		{"adopted", orphan, run(), answer(0, pending), adopted},
		{"by send_pending alone", then(orphan, noKey(expiryKey)), run(), answer(0, pending), adopted},
		{"by reservation_expiry alone", then(orphan, noKey(pendingKey)), run(), answer(0, pending), adopted},
		{"hash exists", in(reservation.StatusEnqueued), run(), answer(1, reservation.StatusEnqueued), nil},
		{"no member", then(orphan, noKey(pendingKey), noKey(expiryKey)), run(), answer(2, ""), nil},
		{"no request field", then(orphan, noKey(shardKey)), run(), answer(3, ""), nil},
		{"another user", then(orphan, keeps("0|r1|9|QUEUED|u9")), run(), answer(3, ""), nil},
		{"another reservation", then(orphan, keeps("0|r9|9|QUEUED|u1")), run(), answer(3, ""), nil},
		{"another code", then(orphan, keeps("10|r1|9|USER_ALREADY_RESERVED|u1")), run(), answer(3, ""), nil},
		{"corrupted field", then(orphan, keeps("0|r1|u1")), run(), answer(3, ""), nil},
		{"meta gone", then(orphan, noKey(metaKey)), run(), answer(7, ""), nil},
		{"meta of another scope", then(orphan, func(w *world) {
			w.must(w.client.HSet(w.ctx(), metaKey(w), "version", 99).Err())
		}), run(), answer(7, ""), nil},
		{"no retention", then(orphan, func(w *world) {
			w.must(w.client.HDel(w.ctx(), metaKey(w), "retention_until_ms").Err())
		}), run(), answer(7, ""), nil},
		{"retention passed", orphan, run(func(w *world, a *lua.AdoptOrphanArgs) { a.NowMS = w.until }), answer(7, ""), nil},
	})
}

func (w *world) provisionArgs() lua.ProvisionArgs {
	return lua.ProvisionArgs{
		State: lua.StatePrepared, StartsAtMS: w.base - 1000, EndsAtMS: w.until - 60_000, RetentionUntilMS: w.until,
		SchemaVersion: 1, Initial: 10, NowMS: w.base,
	}
}

func TestProvision(t *testing.T) {
	run := func(more ...func(*world, *lua.ProvisionArgs)) func(*world) any {
		return call((*lua.Batch).Provision, func(w *world) lua.ProvisionArgs {
			a := w.provisionArgs()
			for _, change := range more {
				change(w, &a)
			}
			return a
		})
	}
	answer := func(code lua.ProvisionCode) lua.ProvisionReply { return lua.ProvisionReply{Code: code} }
	prepared := func(w *world) {
		w.sale(4, 6)
		w.must(w.client.HSet(w.ctx(), metaKey(w), "state", "PREPARED").Err())
	}
	differs := func(name, field, value string) scriptCase {
		return scriptCase{"other " + name, then(prepared, func(w *world) {
			w.must(w.client.HSet(w.ctx(), metaKey(w), field, value).Err())
		}), run(), answer(2), nil}
	}
	runCases(t, []scriptCase{
		{"created", nothing, run(), answer(0), func(w *world, d dump) {
			d.set(w, "meta", flat(with(w.meta(), "state", "PREPARED"))...)
			d.set(w, "stock", flat(stockOf(10, 0))...)
		}},
		{"nothing to sell", nothing, run(func(_ *world, a *lua.ProvisionArgs) { a.Initial = 0 }), answer(0), func(w *world, d dump) {
			d.set(w, "meta", flat(with(w.meta(), "state", "PREPARED"))...)
			d.set(w, "stock", flat(stockOf(0, 0))...)
		}},
		{"same, whatever the stock", prepared, run(func(_ *world, a *lua.ProvisionArgs) { a.Initial = 77 }), answer(1), nil},
		differs("activity", "activity_id", "x"), differs("sku", "sku_id", "x"), differs("bucket", "bucket_id", "5"),
		differs("version", "version", "5"), differs("state", "state", "ACTIVE"), differs("start", "starts_at_ms", "5"),
		differs("end", "ends_at_ms", "5"), differs("retention", "retention_until_ms", "5"), differs("schema", "schema_version", "2"),
		{"stock gone", then(prepared, noKey(stockKey)), run(), answer(3), nil},
		{"meta gone", then(prepared, noKey(metaKey)), run(), answer(3), nil},
		{"retention passed", nothing, run(func(_ *world, a *lua.ProvisionArgs) {
			a.StartsAtMS, a.EndsAtMS, a.RetentionUntilMS, a.NowMS = 1, 2, 3, 1
		}), answer(7), nil},
		{"retention passed by now_ms", nothing, run(func(w *world, a *lua.ProvisionArgs) { a.NowMS = w.until }), answer(7), nil},
	})
}

func TestSetState(t *testing.T) {
	states := []lua.State{lua.StatePrepared, lua.StateActive, lua.StatePaused, lua.StateClosed, "NONSENSE"}
	legal := map[[2]lua.State]bool{
		{lua.StatePrepared, lua.StateActive}: true, {lua.StatePrepared, lua.StateClosed}: true,
		{lua.StateActive, lua.StatePaused}: true, {lua.StatePaused, lua.StateActive}: true,
		{lua.StateActive, lua.StateClosed}: true, {lua.StatePaused, lua.StateClosed}: true,
	}
	run := func(expected, target lua.State) func(*world) any {
		return call((*lua.Batch).SetState, func(*world) lua.SetStateArgs { return lua.SetStateArgs{Expected: expected, Target: target} })
	}
	is := func(state lua.State) func(*world) {
		return func(w *world) {
			w.sale(9, 1)
			w.must(w.client.HSet(w.ctx(), metaKey(w), "state", string(state)).Err())
		}
	}
	answer := func(code lua.SetStateCode, state lua.State) lua.SetStateReply {
		return lua.SetStateReply{Code: code, State: state}
	}
	cases := []scriptCase{
		{"meta gone", nothing, run(lua.StateActive, lua.StatePaused), answer(2, ""), nil},
		{
			"no state", then(is("X"), func(w *world) { w.must(w.client.HDel(w.ctx(), metaKey(w), "state").Err()) }),
			run("", lua.StatePaused), answer(2, ""), nil,
		},
		{"changed", is(lua.StateClosed), run(lua.StateActive, lua.StatePaused), answer(5, lua.StateClosed), nil},
		{"already, whatever was expected", is(lua.StatePaused), run(lua.StateClosed, lua.StatePaused), answer(1, lua.StatePaused), nil},
	}
	for _, from := range states {
		for _, to := range states {
			name := string(from) + " to " + string(to)
			switch {
			case from == to:
				cases = append(cases, scriptCase{name, is(from), run(from, to), answer(1, from), nil})
			case legal[[2]lua.State{from, to}]:
				cases = append(cases, scriptCase{name, is(from), run(from, to), answer(0, to), func(w *world, d dump) {
					d.set(w, "meta", "state", string(to))
				}})
			default:
				cases = append(cases, scriptCase{name, is(from), run(from, to), answer(3, from), nil})
			}
		}
	}
	runCases(t, cases)
}
