package reconcile_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reconcile"
)

// between does something at the start of a round, before the registry is read.
type between struct {
	reconcile.Registry
	round   int
	atRound map[int]func()
}

func (b *between) SKUs(ctx context.Context, activityID, skuID string) ([]reconcile.SKU, error) {
	b.round++
	if do := b.atRound[b.round]; do != nil {
		do()
	}
	return b.Registry.SKUs(ctx, activityID, skuID)
}

// beforeOrders does something when the orders are to be read, once.
type beforeOrders struct {
	reconcile.Orders
	do func()
}

func (b *beforeOrders) Freeze(ctx context.Context) (reconcile.Frozen, error) {
	if b.do != nil {
		b.do()
		b.do = nil
	}
	return b.Orders.Freeze(ctx)
}

// Whatever goes away, and whenever: the run is incomplete, and names no fault
// that it could not confirm.
func TestServicesGoAway(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true})
	s := newSale(t, stack, []string{stack.Redis().Addr()}, 2)
	sold(t, s)
	s.leak(s.scopes[1], 1)
	s.want(s.run(s.options()), "drift", "count_drift 1", "b0 +0", "b1 +1")

	run := func(r *reconcile.Reconciler) *reconcile.Report {
		t.Helper()
		report, err := r.Run(t.Context(), s.options())
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	do := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}

	t.Run("PostgreSQL before the second round", func(t *testing.T) {
		s.t = t
		r := s.reconciler()
		r.Registry = &between{Registry: s.orders, atRound: map[int]func(){2: func() { do(stack.Postgres().Kill()) }}}
		got := run(r)
		s.want(got, "incomplete", "postgres all", "b0 ?", "b1 ?")
		do(stack.Postgres().Start(t.Context()))
	})
	t.Run("PostgreSQL after the registry was read", func(t *testing.T) {
		s.t = t
		r := s.reconciler()
		registry := &between{Registry: s.orders, atRound: map[int]func(){2: func() { do(stack.Postgres().Start(t.Context())) }}}
		r.Registry = registry
		r.Orders = &beforeOrders{Orders: s.orders, do: func() { do(stack.Postgres().Kill()) }}
		// The second round reads again what the first could not, and the third
		// confirms what the second found.
		s.want(run(r), "drift", "count_drift 1", "b0 +0", "b1 +1")
		if registry.round != 3 {
			t.Errorf("%d rounds, want 3", registry.round)
		}
	})
	t.Run("Redis is a replica", func(t *testing.T) {
		s.t = t
		s.do("replicaof", "127.0.0.1", "1") // as in a failover that is under way
		defer s.do("replicaof", "no", "one")
		for name, o := range map[string]reconcile.Options{"quick": s.options(), "deep, with repairs": s.repairing(0)} {
			got := s.run(o)
			s.want(got, "incomplete", "redis 0", "redis 1", "b0 ?", "b1 ?")
			if len(got.Incomplete) == 0 || !strings.Contains(got.Incomplete[0].Reason, "replica") {
				t.Errorf("%s: %+v", name, got.Incomplete)
			}
		}
	})
	t.Run("Redis before the second round", func(t *testing.T) {
		s.t = t
		r := s.reconciler()
		r.Registry = &between{Registry: s.orders, atRound: map[int]func(){2: func() { do(stack.Redis().Kill()) }}}
		got := run(r)
		s.want(got, "incomplete", "redis 1", "b0 +0", "b1 ?")
	})
	t.Run("Redis from the start", func(t *testing.T) {
		s.t = t
		got := s.run(s.options())
		s.want(got, "incomplete", "redis 0", "redis 1", "b0 ?", "b1 ?")
		for _, row := range got.Scopes {
			if row.Redis != nil || row.Postgres != nil {
				t.Errorf("numbers of what was not read: %+v", row)
			}
		}
	})
	t.Run("Redis comes back empty", func(t *testing.T) {
		s.t = t
		entries, err := os.ReadDir(stack.Redis().Dir())
		do(err)
		for _, e := range entries {
			if strings.Contains(e.Name(), "dump") || strings.Contains(e.Name(), "appendonly") {
				do(os.RemoveAll(filepath.Join(stack.Redis().Dir(), e.Name())))
			}
		}
		do(stack.Redis().Start(t.Context()))
		got := s.run(s.options())
		s.want(got, "incomplete", "config_missing 0", "config_missing 1", "redis 0", "redis 1", "b0 ?", "b1 ?")
		missing := got.Findings[0].Evidence.Redis["missing"]
		if diff := cmp.Diff([]string{"meta", "stock"}, missing); diff != "" {
			t.Error(diff)
		}
	})
}

// afterPages does something once a set pass has read some pages of orders.
type afterPages struct {
	reconcile.Claims
	pages int
	do    func()
}

func (a *afterPages) OrderPage(ctx context.Context, activityID, skuID, after string, limit int) ([]string, error) {
	if a.pages--; a.pages == 0 {
		a.do()
	}
	return a.Claims.OrderPage(ctx, activityID, skuID, after, limit)
}

// Redis that goes away, comes back empty or refuses writes in the middle of a
// deep pass: no flood of what is lost, and nothing called done
// that is not.
func TestRedisGoesAwayInADeepPass(t *testing.T) {
	// A closed pool whose server was away notices within a second.
	t.Cleanup(func() { time.Sleep(1100 * time.Millisecond) })
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true})
	s := newSale(t, stack, []string{stack.Redis().Addr()}, 2)
	all := settled(t, s)
	s.order(all[30])
	run := func(o reconcile.Options, do func()) *reconcile.Report {
		t.Helper()
		r := s.reconciler()
		r.Claims = &afterPages{s.orders, 2, do}
		o.Batch = 10
		report, err := r.Run(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		return report
	}
	t.Run("refuses writes", func(t *testing.T) {
		s.t = t
		r := run(s.repairing(0), func() {
			s.do("config", "set", "min-replicas-to-write", 1)
		})
		wantStates(t, r, reconcile.VerdictDrift, map[string]int{"status_behind failed": 1})
		s.do("config", "set", "min-replicas-to-write", 0)
	})
	t.Run("empty", func(t *testing.T) {
		s.t = t
		s.want(run(s.deep(), func() { s.do("flushall") }), "incomplete", "redis 0", "redis 1", "b0 ?", "b1 ?")
	})
	t.Run("gone", func(t *testing.T) {
		s = newSale(t, stack, []string{stack.Redis().Addr()}, 2)
		s.order(settled(t, s)[30])
		s.want(run(s.repairing(0), func() {
			if err := stack.Redis().Kill(); err != nil {
				t.Fatal(err)
			}
		}), "incomplete", "redis 0", "redis 1", "b0 ?", "b1 ?")
		if err := stack.Redis().Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.want(s.run(s.repairing(0)), "incomplete", "config_missing 0", "config_missing 1", "redis 0", "redis 1", "b0 ?", "b1 ?")
	})
}
