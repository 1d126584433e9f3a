package client

import (
	"testing"
	"time"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

func TestMarker(t *testing.T) {
	t.Parallel()
	var m marker
	at := func(ms int) time.Duration { return time.Duration(ms) * time.Millisecond }
	want := func(ms int, v verdict) {
		t.Helper()
		if got := m.look(at(ms)); got != v {
			t.Errorf("at %d ms: %d, want %d", ms, got, v)
		}
	}
	want(1, ask)
	m.set(at(1000), maxMarkerTTL, 0)
	want(1001, rejected)
	want(1199, rejected) // 200 ms at least
	want(1401, recheck)  // 400 ms at most
	want(1402, rejected) // one asks for all
	want(1501, recheck)  // whose answer never came: the next one, within 500 ms
	m.set(at(1510), maxMarkerTTL, 0)
	want(1511, rejected)
	if stood := m.clear(at(1600)); stood != at(600) {
		t.Errorf("it stood for %s", stood)
	}
	want(1601, ask)
	if stood := m.clear(at(1700)); stood != 0 {
		t.Errorf("no marker stood for %s", stood)
	}
	epoch := m.epoch.Load()
	m.epoch.Add(1)
	m.set(at(2000), maxMarkerTTL, epoch)
	want(2001, ask) // units came free after the question
}

func TestBreaker(t *testing.T) {
	t.Parallel()
	var b breaker
	start := time.Now()
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	want := func(s int, admitted, probe bool) {
		t.Helper()
		if a, p, _ := b.admit(at(s)); a != admitted || p != probe {
			t.Errorf("at %d s: admitted %t as probe %t, want %t, %t", s, a, p, admitted, probe)
		}
	}
	want(0, true, false)
	if !b.trip(at(0), "x", 10*time.Second, false) {
		t.Error("it was open before")
	}
	if b.trip(at(1), "y", 10*time.Second, false) {
		t.Error("a request that was under way opened it again")
	}
	want(9, false, false)
	want(10, true, true)
	want(11, false, false) // one probe at a time
	b.trip(at(12), "z", 10*time.Second, true)
	want(21, false, false)
	want(22, true, true)
	b.answered(at(23), false, 0) // proved nothing: the next one
	want(23, true, true)
	b.answered(at(24), true, 0)
	want(24, true, false)
}

func TestCounters(t *testing.T) {
	t.Parallel()
	s := newScopeState(reservation.Scope{ActivityID: "a", SKUID: "s"})
	if got := s.stats(0); got.Available != lua.Missing || got.LuaP99 != 0 || got.PerSecond != 0 {
		t.Errorf("at first: %+v", got)
	}
	second := func(n, requests int) {
		for range requests {
			s.seen(time.Duration(n) * time.Second)
		}
	}
	rate := func(n int, want float64) {
		t.Helper()
		if got := s.stats(time.Duration(n) * time.Second).PerSecond; got != want {
			t.Errorf("at %d s: %v, want %v", n, got, want)
		}
	}
	second(1, 30)
	rate(2, 30)
	second(2, 10)
	rate(2, 30) // the last full second
	rate(3, 10)
	rate(4, 0)
	second(9, 5)
	rate(9, 0)
	for range 99 {
		s.took(700 * time.Microsecond)
	}
	s.took(35 * time.Millisecond)
	if got := s.p99(); got != time.Millisecond {
		t.Errorf("p99 of 99 fast ones of 100 is %s", got)
	}
	s.took(time.Hour)
	if got := s.p99(); got != 40*time.Millisecond {
		t.Errorf("p99 is %s", got)
	}
}
