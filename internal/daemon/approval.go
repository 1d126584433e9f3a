package daemon

import "github.com/seckill/reconciler/internal/approval"

// Approver carries out what a person approves, over the daemon's connections
// and through the workers' gate, with its budget and its halts.
func (d *Daemon) Approver() *approval.Approver {
	c := d.inForce()
	return &approval.Approver{
		Redis: d.Redis, Postgres: d.Postgres, Messages: d.Evidence, Policy: c.Policy(), Settle: c.Reconcile.Settle, Observe: d.observes,
		Gate: d.gate, // the workers' own: they count and fence one at a time
	}
}
