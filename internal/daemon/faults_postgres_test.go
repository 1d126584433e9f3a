//go:build slow

package daemon_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// PostgreSQL crashes, or hangs, with every kind of reservation stuck: nothing is
// released and no status moves in Redis, all work stops. When it is back the running daemon
// gets its lease again and finishes.
func TestSlowPostgresAway(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	server, program := stack.Postgres(), binary(t)
	for name, fault := range map[string]struct {
		begin func() error
		end   func() error
	}{
		"crashes": {server.Kill, func() error { return server.Start(context.WithoutCancel(t.Context())) }},
		"hangs":   {server.Pause, server.Resume},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSale(t, stack, hurried, func(c *config.Config) { c.Scanner.SendGrace = time.Hour })
			byKind := map[string][]string{} // nothing is due before the fault
			for _, k := range everyKind {
				id := s.reserve(time.Hour)
				s.redis.ZAddXX(t.Context(), s.scope.IndexKey(reservation.SendPending), z(id, float64(time.Now().Add(time.Hour).UnixMilli())))
				if k.prepare != nil {
					k.prepare(s, id)
				}
				byKind[k.kind] = []string{id}
			}
			daemon := s.serve()
			daemon.awaitLog(1, logHolding)
			began := time.Now()
			t.Cleanup(func() {
				if err := fault.end(); err != nil {
					t.Error(err)
				}
			})
			if err := fault.begin(); err != nil {
				t.Fatal(err)
			}
			for _, k := range everyKind {
				s.walk(byKind[k.kind][0], k.walk...)
				s.age(byKind[k.kind][0], 2*time.Hour)
			}
			before, stock := s.statuses(byKind), s.stock()
			daemon.awaitLog(1, logLost)
			t.Logf("all work had stopped %s after the fault", daemon.log.when(logLost)[0].Sub(began).Round(time.Millisecond))
			if status := s.start(program, "run", "--once", "--mode", "act").wait(time.Minute); status != 3 {
				t.Errorf("run --once: exit status %d, want 3", status)
			}
			time.Sleep(5 * time.Second)
			if diff := cmp.Diff(before, s.statuses(byKind)); diff != "" {
				t.Errorf("statuses moved without PostgreSQL: %s", diff)
			}
			if diff := cmp.Diff(stock, s.stock()); diff != "" {
				t.Errorf("stock moved without PostgreSQL: %s", diff)
			}

			if err := fault.end(); err != nil {
				t.Fatal(err)
			}
			daemon.awaitLog(2, logHolding)
			s.subscribe(upstream.Subscription{}, nil)
			s.settles(2 * time.Minute)
			s.wantEnds(byKind)
			daemon.end()
		})
	}
}

// age makes a reservation of one hour as old as given, and due.
func (s *sale) age(id string, old time.Duration) {
	s.t.Helper()
	then := time.Now().Add(-old)
	pipe := s.redis.Pipeline()
	pipe.HSet(s.t.Context(), s.scope.ReservationKey(id), "reserved_at_ms", then.UnixMilli(), "expires_at_ms", then.Add(time.Hour).UnixMilli())
	for _, index := range []reservation.Index{reservation.SendPending, reservation.ReservationExpiry} {
		pipe.ZAddXX(s.t.Context(), s.scope.IndexKey(index), z(id, float64(then.UnixMilli())))
	}
	if _, err := pipe.Exec(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

// A daemon whose PostgreSQL hangs in the middle of its work can still be stopped.
func TestSlowStopWhilePostgresHangs(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	s := newSale(t, stack, hurried)
	for range 20 {
		s.lost()
	}
	daemon := s.serve()
	daemon.awaitLog(1, logHolding)
	if err := stack.Postgres().Pause(); err != nil {
		t.Fatal(err)
	}
	if took := daemon.end(); took > s.config.Run.StopTimeout {
		t.Errorf("the stop took %s", took)
	} else {
		t.Logf("the stop took %s", took)
	}
	if err := stack.Postgres().Resume(); err != nil {
		t.Fatal(err)
	}
	s.serve()
	s.settles(time.Minute)
}

// PostgreSQL crashes again and again in the middle of releases, so that nobody
// knows which fences were committed.
func TestSlowPostgresCrashesDuringReleases(t *testing.T) {
	const crashes, due = 8, 400
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	s := newSale(t, stack, hurried, func(c *config.Config) { c.Fencer.Batch, c.Compensator.Batch = 4, 4 })
	random := seeded(t)
	for range due {
		s.lost()
	}
	daemon := s.serve()
	midway := 0
	for i := range crashes {
		daemon.awaitLog(i+1, logHolding)
		time.Sleep(time.Duration(random.IntN(1000)) * time.Millisecond)
		if err := stack.Postgres().Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		released := s.stock()[3]
		t.Logf("crash %d: %d released", i+1, released)
		if released > 0 && released < due {
			midway++
		}
	}
	if midway == 0 {
		t.Error("no crash came in the middle of the releases")
	}
	s.settles(2 * time.Minute)
	if stock := s.stock(); stock[3] != due {
		t.Errorf("stock %v, want %d released", stock, due)
	}
	daemon.end()
}
