package daemon

import (
	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/approval"
)

// Approver carries out what a person approves, over the daemon's connections
// and through a gate with the same budget and the same halts.
func (d *Daemon) Approver() *approval.Approver {
	known := &identity{postgres: d.Postgres, redis: d.Redis, observes: d.observes, log: d.log}
	c := d.inForce()
	return &approval.Approver{
		Redis: d.Redis, Postgres: d.Postgres, Messages: d.Evidence, Policy: c.Policy(), Settle: c.Reconcile.Settle, Observe: d.observes,
		Gate: &fencer.Gate{
			Claims: claims{Store: d.Postgres, identity: known, metrics: d.metrics}, Stock: stock{d.Redis}, Tasks: d.Postgres,
			Max: maxRelease(c),
		},
	}
}
