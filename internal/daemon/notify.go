package daemon

import (
	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/notify"
	"github.com/seckill/reconciler/internal/pgstore"
)

// newNotifier tells the webhook of new tasks; nil if there is none. What it has
// delivered it knows for as long as the process lives, whoever has the lease.
func (d *Daemon) newNotifier() *notify.Notifier {
	w := d.cfg.Notify.Webhook
	if w.URL == "" {
		return nil
	}
	return notify.New(notify.Options{
		URL: w.URL, Secret: w.Secret, Timeout: w.Timeout, Every: w.Every, Tasks: d.comparison.postgres,
		Halts: []string{pgstore.TaskReleaseStorm, pgstore.TaskPostgresChanged, fencer.TaskFenceNotReady},
		Log:   d.log, Delivered: d.metrics.WebhookAnswered,
	})
}
