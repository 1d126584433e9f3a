package daemon

import (
	"context"
	"time"

	"github.com/seckill/reconciler/internal/retention"
	"github.com/seckill/reconciler/internal/schedule"
)

// JobPurge deletes what the settings no longer keep (protocol §4).
const JobPurge = "purge"

// purgeLimit bounds one run; what is left goes in the next.
const purgeLimit = time.Hour

// purging is the job that purges, unless the settings leave that to people.
func (d *Daemon) purging() []schedule.Job {
	if d.cfg.Purge.Schedule == "" {
		return nil
	}
	return []schedule.Job{{Name: JobPurge, Schedule: d.cfg.Purge.Schedule, Limit: purgeLimit, Run: d.purge}}
}

func (d *Daemon) purge(ctx context.Context) (schedule.Result, error) {
	policy := retention.PolicyOf(d.cfg)
	policy.Act = policy.Act && !d.observes
	amounts, err := retention.Apply(ctx, d.Postgres, policy, retention.By{Actor: actor, Reason: "purge.schedule"})
	result := schedule.Result{}
	for _, a := range amounts {
		result[string(a.Kind)] = int(a.Count)
	}
	return result, err
}
