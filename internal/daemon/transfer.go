package daemon

import (
	"context"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/reconciliation"
	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/transfer"
)

// Names of the jobs that move units between buckets.
const (
	JobTransfer  = "transfer"  // drives every transfer to its end
	JobRebalance = "rebalance" // plans transfers to sold-out buckets, if it is enabled
)

// planner is who plans the transfers that nobody asked for.
const planner = "reconciler"

// transfers are the workers that move units between buckets.
type transfers struct {
	worker     *transfer.Worker
	rebalancer *transfer.Rebalancer
}

// newTransfers wires them. Whether a donor can spare its units is what the
// comparison of level 2 says.
func (d *Daemon) newTransfers() transfers {
	drift := &reconcile.Reconciler{Registry: d.Postgres, Stocks: d.Redis, Orders: d.Postgres}
	parts := reconciliation.NewTransfers(d.Redis, d.Postgres, drift, planner)
	parts.Worker.Observe = d.observes
	r := d.cfg.Rebalance
	return transfers{parts.Worker, &transfer.Rebalancer{
		Planner: parts.Planner, Demand: d.Redis, Actor: planner, Observe: d.observes,
		Limits: transfer.Limits{Keep: r.Keep, Share: r.SharePercent, MinUnits: r.MinUnits, MaxUnits: r.MaxUnits, CoolDown: r.CoolDown},
	}}
}

// rebalancing is the job that plans, if it is enabled.
func (d *Daemon) rebalancing() []schedule.Job {
	if !d.cfg.Rebalance.Enabled {
		return nil
	}
	return []schedule.Job{{
		Name: JobRebalance, Schedule: "@every " + d.cfg.Rebalance.Every.String(), Limit: hardLimit(d.cfg.Transfer.PassLimit),
		Quiet: pass.QuietCounts(),
		Run: func(ctx context.Context) (schedule.Result, error) {
			tally, err := d.transfers.rebalancer.Pass(ctx)
			return schedule.Result(tally.Counts()), err
		},
	}}
}
