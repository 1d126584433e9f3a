package daemon_test

import (
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// The wire to Redis fails in every way, again and again, in the middle of sends
// and releases: scripts run whose replies nobody gets. Each unit still comes
// back once, and everything ends as it should.
func TestRepliesOfRedisAreLost(t *testing.T) {
	t.Parallel()
	random := seeded(t)
	s := newSale(t, stacktest.Shared(t), hurried, func(c *config.Config) {
		c.Redis.CommandTimeout = 200 * time.Millisecond
		c.Scanner.Batch, c.Fencer.Batch, c.Compensator.Batch = 8, 8, 8
	})
	wire := s.proxy(s.stack.Redis().Addr())
	daemon := s.serveThrough(func(c *config.Config) { c.Redis.Addrs = []string{wire.Addr()} })
	daemon.awaitLog(1, logHolding)
	s.subscribe(upstream.Subscription{}, nil)
	var released, ordered []string
	unknown := func() int { return daemon.log.mentions("outcome unknown") }
	for round := 0; round < 30 || unknown() == 0; round++ {
		if round == 200 {
			t.Fatal("no fault came in the middle of a script: the test proved nothing")
		}
		for range 4 {
			released = append(released, s.lost(), s.expired("ENQUEUED", "REJECTED"))
			ordered = append(ordered, s.expired(), s.expired("SEND_UNKNOWN"))
		}
		fault := []faultproxy.Faults{
			{DropReplies: true}, {CutAfter: 1 + random.IntN(4000)}, {Stall: true}, {Refuse: true}, {},
		}[random.IntN(5)]
		wire.Set(fault)
		if random.IntN(3) == 0 {
			wire.Reset()
		}
		time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond)
		wire.Set(faultproxy.Faults{})
		time.Sleep(time.Duration(random.IntN(150)) * time.Millisecond)
	}
	s.settles(2 * time.Minute)
	if err := s.is("RELEASED", released...); err != nil {
		t.Error(err)
	}
	if err := s.is("ORDER_CREATED", ordered...); err != nil {
		t.Error(err)
	}
	t.Logf("%d passes had scripts of unknown outcome", unknown())
	daemon.end()
}

// The wire to PostgreSQL breaks in the middle of fences: whether they were
// committed is unknown, and asking again tells.
func TestRepliesOfPostgresAreLost(t *testing.T) {
	t.Parallel()
	random := seeded(t)
	s := newSale(t, stacktest.Shared(t), hurried, func(c *config.Config) {
		c.Lease.TTL = 300 * time.Millisecond
		c.Scanner.Batch, c.Fencer.Batch, c.Compensator.Batch = 4, 4, 4
	})
	wire := s.proxy(s.stack.Postgres().Addr())
	daemon := s.serveThrough(func(c *config.Config) { c.Postgres.URL = withHost(t, c.Postgres.URL, wire.Addr()) })
	var due []string
	cut := 0 // fences that were committed, and that the daemon has no answer of
	for round := 0; round < 10 || cut == 0; round++ {
		if round == 60 {
			t.Fatal("no cut came in the middle of a fence: the test proved nothing")
		}
		for range 12 {
			due = append(due, s.lost())
		}
		daemon.awaitLog(1+len(daemon.log.when(logLost)), logHolding)
		time.Sleep(time.Duration(random.IntN(250)) * time.Millisecond)
		wire.Set(faultproxy.Faults{DropReplies: true})
		time.Sleep(time.Duration(random.IntN(30)) * time.Millisecond)
		wire.Reset()
		wire.Set(faultproxy.Faults{})
		daemon.awaitLog(len(daemon.log.when(logHolding)), logLost)
		all, err := s.census()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range all {
			if e.status == "ENQUEUED" && e.claim == reservation.OutcomeFenced {
				cut++
			}
		}
	}
	t.Logf("%d fences of unknown outcome", cut)
	s.settles(2 * time.Minute)
	if err := s.is("RELEASED", due...); err != nil {
		t.Error(err)
	}
	daemon.end()
}
