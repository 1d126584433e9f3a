package lua_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

func diffOf(a, b dump) string { return cmp.Diff(a, b) }

func (w *world) expireAt(key string, at int64) {
	w.Helper()
	w.must(w.client.PExpireAt(w.ctx(), key, time.UnixMilli(at)).Err())
}

func (w *world) expiryOf(key string) int64 {
	w.Helper()
	at, err := w.client.PExpireTime(w.ctx(), key).Result()
	w.must(err)
	if at < 0 {
		return int64(at) // -1: never, -2: no such key
	}
	return at.Milliseconds()
}

// A script without meta gives a key that it creates the hash's expiry, and
// leaves the expiry of one that has its own (spec §2).
func TestCreatedKeysInheritTheHashsExpiry(t *testing.T) {
	transition := func(target reservation.Status) func(*world) (any, error) {
		return try((*lua.Batch).Transition, func(w *world) lua.TransitionArgs {
			return lua.TransitionArgs{ReservationID: rid, Target: target, NextRetryMS: w.base + 5, NowMS: w.base}
		})
	}
	reindex := try((*lua.Batch).Reindex, func(w *world) lua.ReindexArgs { return lua.ReindexArgs{ReservationID: rid, NowMS: w.base} })
	mark := try((*lua.Batch).MarkUser, func(*world) lua.MarkUserArgs { return lua.MarkUserArgs{ReservationID: rid, UserID: user} })
	markOver := try((*lua.Batch).MarkUser, func(*world) lua.MarkUserArgs {
		return lua.MarkUserArgs{ReservationID: rid, UserID: user, Seen: otherRID}
	})
	otherMember := func(index reservation.Index) func(*world) {
		return func(w *world) { w.setMember(index, otherRID, 1) }
	}
	cases := []struct {
		name   string
		status reservation.Status
		run    func(*world) (any, error)
		key    func(*world) string
		other  func(*world) // makes the key without the script's own entry
	}{
		{"to SEND_UNKNOWN", reservation.StatusReserved, transition(reservation.StatusSendUnknown), pendingKey, otherMember(reservation.SendPending)},
		{"SEND_UNKNOWN again", reservation.StatusSendUnknown, transition(reservation.StatusSendUnknown), pendingKey, otherMember(reservation.SendPending)},
		{"to RELEASE_PENDING", reservation.StatusEnqueued, transition(reservation.StatusReleasePending), expiryKey, otherMember(reservation.ReservationExpiry)},
		{"to REJECTED", reservation.StatusEnqueued, transition(reservation.StatusRejected), expiryKey, otherMember(reservation.ReservationExpiry)},
		{"reindex pending", reservation.StatusReserved, reindex, pendingKey, otherMember(reservation.SendPending)},
		{"reindex expiry", reservation.StatusEnqueued, reindex, expiryKey, otherMember(reservation.ReservationExpiry)},
		{"mark_user", reservation.StatusEnqueued, mark, markerKey, nil},
		{"mark_user over another", reservation.StatusOrderCreated, markOver, markerKey, func(w *world) { w.setText(markerKey(w), otherRID) }},
	}
	onEach(t, func(w *world) {
		for _, c := range cases {
			w.Run(c.name, func(t *testing.T) {
				at := func(hashExpires bool, prepare func(*world)) int64 {
					w := w.on(t)
					w.reserved(c.status)
					w.must(w.client.Del(w.ctx(), c.key(w)).Err())
					if hashExpires {
						w.expireAt(hashKey(w), w.until-5000)
					} else {
						w.must(w.client.Persist(w.ctx(), hashKey(w)).Err())
					}
					prepare(w)
					_, err := c.run(w)
					w.must(err)
					return w.expiryOf(c.key(w)) - w.until
				}
				never := -1 - w.until
				if c.name != "mark_user over another" {
					sameText(w, "created", at(true, nothing), -5000)
					sameText(w, "created beside a hash without expiry", at(false, nothing), never)
				}
				if c.other != nil {
					sameText(w, "there with its own expiry", at(true, c.other), 0)
					sameText(w, "there without expiry", at(true, func(w *world) {
						c.other(w)
						w.must(w.client.Persist(w.ctx(), c.key(w)).Err())
					}), -5000)
					sameText(w, "neither has one", at(false, func(w *world) {
						c.other(w)
						w.must(w.client.Persist(w.ctx(), c.key(w)).Err())
					}), never)
				}
			})
		}
	})
}

// A script with meta gives every key that it creates or overwrites meta's
// retention: absolute, so that no retry extends it.
func TestWrittenKeysExpireAtRetention(t *testing.T) {
	early := func(keys ...func(*world) string) func(*world) {
		return func(w *world) {
			for _, key := range keys {
				w.expireAt(key(w), w.until-9000)
			}
		}
	}
	byName := map[string]subject{}
	for _, s := range subjects() {
		byName[s.script] = s
	}
	others := func(w *world) {
		w.setMember(reservation.SendPending, otherRID, 1)
		w.setMember(reservation.ReservationExpiry, otherRID, 1)
		w.setHash(shardKey(w), fields{"q0": "0|r0|1|QUEUED|u0"})
	}
	cases := []struct {
		script string
		setup  func(*world)
		keys   []func(*world) string
	}{
		{"reserve", then(others, early(pendingKey, expiryKey, shardKey)), []func(*world) string{
			markerKey, hashKey, pendingKey, expiryKey, shardKey,
		}},
		{
			"restore", then(others, early(shardKey), func(w *world) { w.setText(markerKey(w), otherRID) }, early(markerKey)),
			[]func(*world) string{hashKey, shardKey, markerKey},
		},
		{"adopt_orphan", early(expiryKey), []func(*world) string{hashKey, expiryKey}},
		{"provision", nothing, []func(*world) string{metaKey, stockKey}},
		{"transfer_out", early(transferKey), []func(*world) string{transferKey}},
		{"transfer_in", early(transferKey), []func(*world) string{transferKey}},
		{"recount", early(stockKey), []func(*world) string{stockKey}},
	}
	onEach(t, func(w *world) {
		for _, c := range cases {
			w := w.fresh()
			s := byName[c.script]
			s.setup(w)
			c.setup(w)
			_, err := s.run(w)
			w.must(err)
			for _, key := range c.keys {
				sameText(w, c.script+": "+key(w), w.expiryOf(key(w)), w.until)
			}
		}
	})
}
