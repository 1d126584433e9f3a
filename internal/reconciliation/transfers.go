package reconciliation

import (
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/transfer"
)

// Transfers is what moves units between buckets over the given connections.
type Transfers struct {
	Planner *transfer.Planner
	Worker  *transfer.Worker
	Filler  *transfer.Filler
}

// NewTransfers puts the worker and the planner together. What says whether a
// donor can spare its units is the comparison of level 2.
func NewTransfers(redis *redisstore.Store, postgres *pgstore.Store, drift transfer.Drift, actor string) Transfers {
	planner := &transfer.Planner{Journal: postgres, Stocks: redis, Drift: drift}
	worker := &transfer.Worker{Journal: postgres, Stocks: redis, Drift: drift, Tasks: postgres}
	return Transfers{planner, worker, &transfer.Filler{Planner: planner, Worker: worker, Actor: actor}}
}

// addTransfers lets a reconciler see transfers, and its repairs finish and plan
// them.
func addTransfers(r *reconcile.Reconciler, redis *redisstore.Store, postgres *pgstore.Store) *reconcile.Reconciler {
	r.Transfers = &transfer.Reader{Journal: postgres, Stocks: redis}
	r.Mover = NewTransfers(redis, postgres, r, "reconciler").Filler
	return r
}
