package daemon

import (
	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/approval"
)

// Approver carries out what a person approves, over the daemon's connections
// and through a gate with the same budget and the same halts.
func (d *Daemon) Approver() *approval.Approver {
	known := &identity{postgres: d.Postgres, redis: d.Redis, observes: d.observes, log: d.log}
	m := d.cfg.Fencer.MaxRelease
	return &approval.Approver{
		Redis: d.Redis, Postgres: d.Postgres, Messages: d.Evidence, Policy: d.cfg.Policy(), Settle: d.cfg.Reconcile.Settle, Observe: d.observes,
		Gate: &fencer.Gate{
			Claims: claims{Store: d.Postgres, identity: known, metrics: d.metrics}, Stock: stock{d.Redis}, Tasks: d.Postgres,
			Max: fencer.MaxRelease{Percent: m.Percent, Min: m.Min, Window: m.Window},
		},
	}
}
