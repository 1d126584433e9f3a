package daemon

import (
	"context"
	"time"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/reservation"
)

// Status is how the whole installation stands, read live. What could not be
// read is in Incomplete and in no number.
type Status struct {
	Lease      pgstore.LeaseHolder
	Jobs       []pgstore.Job
	Halts      []pgstore.Task // open tasks that hold back releases
	NotReady   string         // why the order fence holds them back; empty: it does not
	Tasks      []pgstore.Task // all open tasks
	Backlogs   []redisstore.Backlog
	Waiting    []pass.Counted // undecided reservations by row, verb and cause
	Looked     int            // reservations that Waiting counts
	Truncated  bool           // there are more than it looked at
	Incomplete []string
}

// Status reads the state of everything. It looks at no more than most
// undecided reservations, and decides what it sees without acting on it.
func (d *Daemon) Status(ctx context.Context, most int) (Status, error) {
	var s Status
	var err error
	if s.Lease, err = d.Postgres.LeaseHolder(ctx, pgstore.LeaseDaemon); err != nil {
		return s, err
	}
	if s.Jobs, err = d.Postgres.Jobs(ctx); err != nil {
		return s, err
	}
	if s.Tasks, err = d.Postgres.Tasks(ctx, pgstore.TaskFilter{States: pgstore.Unresolved}); err != nil {
		return s, err
	}
	if s.Halts, err = d.Postgres.Halts(ctx); err != nil {
		return s, err
	}
	if err = d.Postgres.FenceReady(ctx); err != nil {
		s.NotReady = err.Error()
	}
	registered, err := d.Postgres.Scopes(ctx, pgstore.ScopeFilter{Live: true})
	if err != nil {
		return s, err
	}
	scopes := make([]reservation.Scope, len(registered))
	for i, r := range registered {
		scopes[i] = r.Scope
	}
	s.Backlogs = d.Redis.Backlogs(ctx, scopes)
	for _, b := range s.Backlogs {
		if b.Err != nil {
			s.Incomplete = append(s.Incomplete, b.Err.Error())
		}
	}
	d.countWaiting(ctx, scopes, most, &s)
	return s, nil
}

// countWaiting decides every member of reservation_expiry, due or not: each
// undecided reservation is in it.
func (d *Daemon) countWaiting(ctx context.Context, scopes []reservation.Scope, most int, s *Status) {
	walk := pass.Walk{Index: reservation.ReservationExpiry, All: true}
	tally := pass.NewTally()
	limits := pass.Limits{Batch: d.cfg.Fencer.Batch, Items: most, Time: statusLimit}
	walk.Each(ctx, d.Redis, scopes, limits, tally, func(ctx context.Context, pages []reservation.Page) {
		for _, in := range d.fencer.Inputs(ctx, pages, tally) {
			pass.Decide(in, reservation.ReservationExpiry, tally)
		}
	})
	if err := tally.Err(); err != nil {
		s.Incomplete = append(s.Incomplete, err.Error())
	}
	s.Waiting, s.Looked = tally.Sorted(), tally.Seen
	s.Truncated = !tally.Complete && tally.Seen >= most
}

const statusLimit = 20 * time.Second
