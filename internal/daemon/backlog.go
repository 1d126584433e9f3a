package daemon

import (
	"context"
	"errors"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/reservation"
)

// watchBacklog measures how much waits in the indexes, for the metrics. It
// also lets the evidence forget messages that no live version can ask for.
func (d *Daemon) watchBacklog(ctx context.Context) (schedule.Result, error) {
	registered, err := d.Postgres.Scopes(ctx, pgstore.ScopeFilter{Live: true})
	if err != nil {
		return nil, err
	}
	scopes := make([]reservation.Scope, len(registered))
	var oldestStart time.Time
	for i, r := range registered {
		scopes[i] = r.Scope
		if oldestStart.IsZero() || r.StartsAt.Before(oldestStart) {
			oldestStart = r.StartsAt
		}
	}
	var errs []error
	var pending, pendingDue, due int64
	var pendingAge, dueAge time.Duration
	for _, b := range d.Redis.Backlogs(ctx, scopes) {
		if b.Err != nil {
			errs = append(errs, b.Err)
			continue
		}
		pending += b.Pending
		pendingDue += b.PendingDue
		due += b.ExpiryDue
		pendingAge, dueAge = max(pendingAge, b.PendingAge), max(dueAge, b.ExpiryAge)
	}
	d.metrics.SetSendPending(pending, pendingAge)
	d.metrics.SetReservationExpired(due, dueAge)
	d.metrics.SetBacklog(JobScanner, int(pendingDue), pendingAge)
	d.metrics.SetBacklog(JobFencer, int(due), dueAge)
	halted, err := d.haltedScopes(ctx, len(scopes))
	errs = append(errs, err)
	d.metrics.SetHalted(JobCompensator, halted)
	if !oldestStart.IsZero() {
		errs = append(errs, d.Evidence.Forget(ctx, oldestStart.UnixMilli()))
	}
	return nil, errors.Join(errs...)
}

// haltedScopes is in how many scopes nothing is released now: those with a
// release storm, or all of them.
func (d *Daemon) haltedScopes(ctx context.Context, all int) (int, error) {
	halts, err := d.Postgres.Halts(ctx)
	if err != nil {
		return 0, err
	}
	storms := 0
	for _, task := range halts {
		if task.Kind == pgstore.TaskPostgresChanged {
			return all, nil
		}
		storms++
	}
	err = d.Postgres.FenceReady(ctx)
	if _, missing := errors.AsType[*pgstore.FenceNotReadyError](err); missing {
		return all, nil
	}
	return storms, err
}
