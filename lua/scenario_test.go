package lua_test

import (
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// atOnce sends n calls from many batches that run side by side, and returns
// every reply.
func atOnce[R any](w *world, n int, add func(b *lua.Batch, i int) *lua.Result[R]) []R {
	w.Helper()
	const clients = 8
	replies, errs := make([]R, n), make([]error, n)
	begin := time.Now()
	var all sync.WaitGroup
	for c := range clients {
		all.Go(func() {
			const page = 1000
			for from := c; from < n; from += clients * page {
				b := w.runner.Batch()
				results := map[int]*lua.Result[R]{}
				for i := from; i < min(n, from+clients*page); i += clients {
					results[i] = add(b, i)
				}
				if err := b.Run(w.ctx()); err != nil {
					w.Error(err)
					return
				}
				for i, result := range results {
					replies[i], errs[i] = result.Get()
				}
			}
		})
	}
	all.Wait()
	for i, err := range errs {
		if err != nil {
			w.Fatalf("call %d: %v", i, err)
		}
	}
	w.Logf("%d calls in %v, %.0f/s", n, time.Since(begin).Round(time.Millisecond), float64(n)/time.Since(begin).Seconds())
	return replies
}

// counted counts the replies by their code.
func counted(replies []lua.ReserveReply) map[lua.ReserveCode]int {
	out := map[lua.ReserveCode]int{}
	for _, r := range replies {
		out[r.Code]++
	}
	return out
}

// forget removes what a scenario left in the shared Redis.
func (w *world) forget() {
	w.Helper()
	pipe := w.client.Pipeline()
	for shard := range reservation.RequestShards {
		pipe.Unlink(w.ctx(), w.scope.RequestShardKey(shard))
	}
	for _, key := range w.keys {
		pipe.Unlink(w.ctx(), key)
	}
	_, err := pipe.Exec(w.ctx())
	w.must(err)
}

// The scenarios 1 to 4 of spec §8, at full size.

func TestScenario1OneUnitForManyUsers(t *testing.T) {
	onEach(t, func(w *world) {
		const users = 100_000
		w.sale(1, 0)
		replies := atOnce(w, users, func(b *lua.Batch, i int) *lua.Result[lua.ReserveReply] {
			return b.Reserve(w.scope, w.numbered(i))
		})
		want := map[lua.ReserveCode]int{lua.ReserveAccepted: 1, lua.ReserveSoldOut: users - 1}
		if got := counted(replies); !maps.Equal(got, want) {
			w.Errorf("got %v, want %v", got, want)
		}
		same(w, "stock", w.dump()["stock"].(dumped).Content, any(stockOf(0, 1)))
		sameText(w, "soldout", w.text(soldOutKey(w)), "1")
		w.forget()
	})
}

func TestScenario2OneRequestManyTimes(t *testing.T) {
	onEach(t, func(w *world) {
		const times = 100_000
		w.sale(10, 0)
		replies := atOnce(w, times, func(b *lua.Batch, _ int) *lua.Result[lua.ReserveReply] {
			return b.Reserve(w.scope, w.reserveArgs())
		})
		first := 0
		for i, r := range replies {
			if r.Code != lua.ReserveAccepted || r.ReservationID != rid || r.Remaining != 9 {
				w.Fatalf("reply %d: %+v", i, r)
			}
			if !r.Replay {
				first++
			}
		}
		sameText(w, "reservations made", first, 1)
		same(w, "stock", w.dump()["stock"].(dumped).Content, any(stockOf(9, 1)))
		w.forget()
	})
}

func TestScenario3OneUserManyRequests(t *testing.T) {
	onEach(t, func(w *world) {
		const requests = 10_000
		w.sale(100, 0)
		replies := atOnce(w, requests, func(b *lua.Batch, i int) *lua.Result[lua.ReserveReply] {
			a := w.numbered(i)
			a.UserID = user
			return b.Reserve(w.scope, a)
		})
		want := map[lua.ReserveCode]int{lua.ReserveAccepted: 1, lua.ReserveUserAlreadyReserved: requests - 1}
		if got := counted(replies); !maps.Equal(got, want) {
			w.Errorf("got %v, want %v", got, want)
		}
		winner := w.text(markerKey(w))
		for i, r := range replies {
			if r.ReservationID != winner {
				w.Fatalf("reply %d names %s, the user's marker %s", i, r.ReservationID, winner)
			}
		}
		same(w, "stock", w.dump()["stock"].(dumped).Content, any(stockOf(99, 1)))
		w.forget()
	})
}

func TestScenario4OneReservationManyCompensations(t *testing.T) {
	onEach(t, func(w *world) {
		const times = 10_000
		w.reserved(reservation.StatusReleasePending)
		replies := atOnce(w, times, func(b *lua.Batch, _ int) *lua.Result[lua.CompensateReply] {
			return b.Compensate(w.scope, lua.CompensateArgs{ReservationID: rid, UserID: user, Reason: "fenced"})
		})
		codes := map[lua.CompensateCode]int{}
		for _, r := range replies {
			codes[r.Code]++
			if r.Available != 10 || r.Status != reservation.StatusReleased {
				w.Fatalf("got %+v", r)
			}
		}
		want := map[lua.CompensateCode]int{lua.CompensateReleased: 1, lua.CompensateAlreadyReleased: times - 1}
		if !maps.Equal(codes, want) {
			w.Errorf("got %v, want %v", codes, want)
		}
		same(w, "stock", w.dump()["stock"].(dumped).Content, any(with(stockOf(10, 0), "released_total", "1")))
		w.forget()
	})
}

// Many reservations of one scope, each taken back by several compensators at
// once: every unit comes back once.
func TestEveryUnitComesBackOnce(t *testing.T) {
	onEach(t, func(w *world) {
		const units = 500
		w.sale(units, 0)
		atOnce(w, units, func(b *lua.Batch, i int) *lua.Result[lua.ReserveReply] { return b.Reserve(w.scope, w.numbered(i)) })
		atOnce(w, units, func(b *lua.Batch, i int) *lua.Result[lua.TransitionReply] {
			return b.Transition(w.scope, lua.TransitionArgs{
				ReservationID: fmt.Sprintf("r%d", i), Target: reservation.StatusReleasePending,
			})
		})
		atOnce(w, 4*units, func(b *lua.Batch, i int) *lua.Result[lua.CompensateReply] {
			i %= units
			return b.Compensate(w.scope, lua.CompensateArgs{ReservationID: fmt.Sprintf("r%d", i), UserID: fmt.Sprintf("u%d", i)})
		})
		after := w.dump()
		same(w, "stock", after["stock"].(dumped).Content, any(with(stockOf(units, 0), "released_total", itoa(units))))
		for _, gone := range []string{"send_pending", "reservation_expiry", "soldout"} {
			if _, there := after[gone]; there {
				w.Errorf("%s is still there", gone)
			}
		}
		w.forget()
	})
}
