//go:build slow

package daemon_test

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/reconciliation"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// soak is how long the hot scope is watched: make soak takes ten minutes. The
// rate is one that the order consumer of a small machine keeps up with: beyond it
// only the backlog would grow, and with it every deep pass.
var (
	soak     = flag.Duration("soak", time.Minute, "how long a hot scope is sold and reconciled")
	soakRate = flag.Float64("soak-rate", 1000, "requests per second")
)

// hot is one scope under the full load of a gateway and an order consumer, with
// the daemon at work and both kinds of passes beside it.
type hot struct {
	*sale
	reconciler *reconcile.Reconciler
	selling    *upstream.Sale
}

const hotUnits = 10_000_000

func newHot(t *testing.T) *hot {
	t.Helper()
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	h := &hot{sale: newSale(t, stack, hurried, func(c *config.Config) {
		c.Fencer.Every, c.Lease.TTL = time.Second, 10*time.Second
		c.Fencer.MaxRelease.Min = hotUnits
		c.Scanner.SendGrace = 5 * time.Minute // see noted: nor may the daemon's own send be overtaken
	})}
	h.redis.HSet(t.Context(), h.scope.StockKey(), "initial", hotUnits, "available", hotUnits)
	h.exec(`UPDATE seckill.scope_allocation SET total = $1`, hotUnits)
	h.exec(`UPDATE seckill.scope SET initial = $1`, hotUnits)
	h.exec(`UPDATE shop.stock SET total = $1`, hotUnits)

	clients, err := redisstore.Open(t.Context(), h.config.Redis)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = clients.Close() })
	redis, err := redisstore.New(clients, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	postgres, err := pgstore.Open(t.Context(), pgstore.Config{URL: h.config.Postgres.URL, MaxConns: 8, StatementTimeout: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(postgres.Close)
	h.reconciler = reconciliation.Reconciler(redis, postgres)
	h.reconciler.Nodes, h.reconciler.Server = nil, nil // the test's servers are as they are
	return h
}

// sell lets everybody in; a few of their requests are refused by the shop or sent
// twice.
func (h *hot) sell() (stop func() error) {
	c := h.config.RocketMQ
	sender, err := rocketmq.NewSender(rocketmq.Config{
		NameServers: c.NameServers, Topic: c.Topic, ConsumerGroup: c.ConsumerGroup, ConsumerProtocol: rocketmq.ProtocolRemoting,
		DialTimeout: c.DialTimeout, RequestTimeout: c.RequestTimeout, SendTimeout: c.SendTimeout,
		SendRate: 1e6, SendConcurrency: c.SendConcurrency, SweepMargin: c.SweepMargin, MaxSweepMessages: c.MaxSweepMessages,
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		h.t.Fatal(err)
	}
	faults := upstream.Evenly(1, 0.05, upstream.RejectClaimed, upstream.Duplicate)
	h.subscribe(upstream.Subscription{}, func(id string) upstream.Fault {
		h.noted(id)
		return faults.Of(id)
	})
	h.selling = &upstream.Sale{
		Gateway: &upstream.Gateway{
			Activity: upstream.Activity{ActivityID: h.scope.ActivityID, SKUID: h.scope.SKUID, Version: h.scope.Version, Buckets: 1, Total: hotUnits},
			Secret:   []byte("secret"), TTL: 15 * time.Minute, Redis: h.redis, Sender: sender, Timeout: 10 * time.Second,
		},
		Users: 5_000_000, Faults: faults, Rate: *soakRate,
	}
	ctx, cancel := context.WithCancel(h.t.Context())
	var sale sync.WaitGroup
	var failed error
	sale.Go(func() {
		if err := h.selling.Run(ctx); !errors.Is(err, context.Canceled) {
			failed = err
		}
	})
	return func() error {
		cancel()
		sale.Wait()
		closing, stop := context.WithTimeout(context.WithoutCancel(h.t.Context()), 20*time.Second)
		defer stop()
		return errors.Join(failed, sender.Close(closing))
	}
}

// noted waits until the gateway has noted that it sent the message. An order
// that overtakes the note is no motion: Redis stays behind until the
// reservation's expiry, and status_behind rightly says so.
func (h *hot) noted(id string) {
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if h.redis.HGet(h.t.Context(), h.scope.ReservationKey(id), "status").Val() != string(reservation.StatusReserved) {
			return
		}
	}
}

// watch runs one kind of pass every second, or one after the other, until ctx
// ends. judge is told of each report and of when its pass began.
func (h *hot) watch(ctx context.Context, deep bool, judge func(began time.Time, r *reconcile.Report)) (runs int) {
	for ctx.Err() == nil {
		began := time.Now()
		r, err := h.reconciler.Run(context.WithoutCancel(ctx), reconcile.Options{Settle: 5 * time.Second, Deep: deep})
		if err != nil {
			h.t.Error(err)
			return runs
		}
		judge(began, r)
		runs++
		select {
		case <-ctx.Done():
		case <-time.After(time.Until(began.Add(time.Second))):
		}
	}
	return runs
}

// A hot scope under full load is reconciled all the while: nothing is ever
// found that is only in motion, and a real fault in the midst of it is found by
// the first deep pass that begins after it, in two rounds.
func TestSlowHotScope(t *testing.T) {
	h := newHot(t)
	h.serve()
	stop := h.sell()
	h.eventually(2*time.Minute, func() error {
		if h.selling.Ledger().Len() == 0 || h.stock()[2] == 0 {
			return errors.New("nothing is sold yet")
		}
		return nil
	})
	var fault, made atomic.Int64 // when it was begun and done, in nanoseconds; 0: not yet
	var lost atomic.Value        // the reservation
	var found, moving atomic.Int64
	judge := func(deep bool) func(time.Time, *reconcile.Report) {
		return func(began time.Time, r *reconcile.Report) {
			at := fault.Load()
			if r.Scopes[0].InMotion {
				moving.Add(1)
			}
			for _, f := range r.Findings {
				own := at > 0 && (f.Subject == lost.Load() && f.Check == reconcile.CheckLostReservation || f.Check == reconcile.CheckCountDrift)
				if f.Severity.Drift() && !own {
					t.Errorf("a finding that is none: %+v", f)
				}
				if deep && own && f.Check == reconcile.CheckLostReservation {
					found.Add(1)
					if f.Rounds != 2 {
						t.Errorf("it took %d rounds", f.Rounds)
					}
				}
			}
			if at == 0 && r.Verdict != reconcile.VerdictConsistent {
				t.Errorf("%s: %+v", r.Verdict, r.Incomplete)
			}
			if done := made.Load(); deep && done > 0 && began.UnixNano() > done && r.Summary[reconcile.CheckLostReservation] != 1 {
				t.Errorf("the fault of %v before was not found: %+v", began.Sub(time.Unix(0, done)), r)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var watching sync.WaitGroup
	var quick, deep int
	watching.Go(func() { quick = h.watch(ctx, false, judge(false)) })
	watching.Go(func() { deep = h.watch(ctx, true, judge(true)) })

	time.Sleep(*soak)
	lost.Store(h.ordered())
	id, _ := lost.Load().(string)
	fault.Store(time.Now().UnixNano())
	h.undo(id)
	made.Store(time.Now().UnixNano())
	h.eventually(5*time.Minute, func() error {
		if found.Load() == 0 {
			return errors.New("the fault is not found")
		}
		return nil
	})
	cancel()
	watching.Wait()
	if err := stop(); err != nil {
		t.Error(err)
	}
	stock := h.stock()
	if moving.Load() == 0 || stock[3] == 0 {
		t.Errorf("%d passes met a scope in motion, %d units were given back: that is no hot scope", moving.Load(), stock[3])
	}
	t.Logf("%v: %d quick and %d deep passes, %d of them in motion; %d reservations, %d released", *soak, quick, deep,
		moving.Load(), h.selling.Ledger().Len(), stock[3])
}
