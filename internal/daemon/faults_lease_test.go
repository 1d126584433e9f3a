package daemon_test

import (
	"errors"
	"net/url"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reservation"
)

func (s *sale) proxy(addr string) *faultproxy.Proxy {
	s.t.Helper()
	proxy, err := faultproxy.Start(addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(proxy.Close)
	return proxy
}

// serveThrough is [sale.serve] with other settings for this daemon alone.
func (s *sale) serveThrough(change func(*config.Config)) *service {
	s.t.Helper()
	kept := s.config
	change(&s.config)
	defer func() { s.config = kept }()
	return s.serve()
}

// withHost is the same database at another address.
func withHost(t *testing.T, databaseURL, addr string) string {
	t.Helper()
	u, err := url.Parse(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = addr
	return u.String()
}

// The session that holds the lease is killed again and again, in the middle of
// passes that a slow Redis makes long. Each time the holder's work has ended
// before the other daemon begins.
func TestWorkEndsBeforeTheLeasePassesOn(t *testing.T) {
	t.Parallel()
	const rounds = 4
	s := newSale(t, stacktest.Shared(t), hurried, func(c *config.Config) {
		c.Scanner.Batch, c.Fencer.Batch, c.Compensator.Batch = 4, 4, 4
	})
	slow := s.proxy(s.stack.Redis().Addr())
	slow.Set(faultproxy.Faults{Delay: 50 * time.Millisecond})
	var due []string
	for range 120 {
		due = append(due, s.lost(), s.expired("ENQUEUED", "REJECTED"), s.expired("RELEASE_PENDING"))
	}
	through := func(c *config.Config) { c.Redis.Addrs = []string{slow.Addr()} }
	first := s.serveThrough(through)
	first.awaitLog(1, logHolding)
	second := s.serveThrough(through)

	holder, waiter := first, second
	for round := range rounds {
		time.Sleep(300 * time.Millisecond)
		had, gets := len(holder.log.when(logLost)), len(waiter.log.when(logHolding))
		s.exec(`SELECT pg_terminate_backend(backend_pid) FROM seckill.lease WHERE name = 'daemon'`)
		holder.awaitLog(had+1, logLost)
		waiter.awaitLog(gets+1, logHolding)
		ended, began := holder.log.when(logLost)[had], waiter.log.when(logHolding)[gets]
		t.Logf("round %d: work ended %s before the next holder's began", round, began.Sub(ended).Round(time.Millisecond))
		if !ended.Before(began) {
			t.Errorf("round %d: the old holder's work ended at %s, the new one's began at %s", round, ended, began)
		}
		if s.is(reservation.StatusReleased, due...) == nil {
			t.Fatal("all work was done too early to be interrupted")
		}
		holder, waiter = waiter, holder
	}
	slow.Set(faultproxy.Faults{})
	s.settles(2 * time.Minute)
	first.end()
	second.end()
}

// PostgreSQL does not answer the holder any more, and no connection breaks: it
// stops by itself before its lease runs out. Only when the server has given its
// session up can another one begin.
func TestHolderThatHearsNothingStops(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), hurried)
	wire := s.proxy(s.stack.Postgres().Addr())
	var due []string
	for range 60 {
		due = append(due, s.lost())
	}
	cutOff := s.serveThrough(func(c *config.Config) {
		c.Postgres.URL = withHost(t, c.Postgres.URL, wire.Addr())
		c.Fencer.Batch = 4
	})
	cutOff.awaitLog(1, logHolding)
	successor := s.serve()
	wire.Set(faultproxy.Faults{Stall: true})
	cutOff.awaitLog(1, logLost)
	s.throughout(2*s.config.Lease.TTL, func() error {
		if n := len(successor.log.when(logHolding)); n != 0 {
			return errors.New("the successor works while the server still keeps the holder's session")
		}
		return nil
	})
	wire.Reset() // the server notices at last
	successor.awaitLog(1, logHolding)
	if ended, began := cutOff.log.when(logLost)[0], successor.log.when(logHolding)[0]; !ended.Before(began) {
		t.Errorf("the old holder's work ended at %s, the new one's began at %s", ended, began)
	}
	s.settles(2 * time.Minute)
	if err := s.is(reservation.StatusReleased, due...); err != nil {
		t.Error(err)
	}
	if took := cutOff.end(); took > s.config.Run.StopTimeout {
		t.Errorf("a daemon that cannot reach PostgreSQL took %s to stop", took)
	}
	successor.end()
}
