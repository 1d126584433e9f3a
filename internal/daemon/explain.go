package daemon

import (
	"context"
	"fmt"
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

// Explanation is everything that is known of one reservation, and what the
// daemon would do with it now.
type Explanation struct {
	Input    reservation.Input
	Action   reservation.Action
	Record   reservation.Record
	Messages reservation.MessageEvidence // read for every status that has a message
	Held     bool                        // no worker touches its scope
}

// ErrNoReservation says that neither Redis nor PostgreSQL knows an id.
var ErrNoReservation = fmt.Errorf("no such reservation in any registered scope: %w", pgstore.ErrNotFound)

// Explain finds the reservation among the registered scopes and gathers its
// evidence as the fencer would.
func (d *Daemon) Explain(ctx context.Context, id string) (Explanation, error) {
	if err := reservation.ValidateID(id); err != nil {
		return Explanation{}, err
	}
	registered, err := d.Postgres.Scopes(ctx, pgstore.ScopeFilter{Live: true})
	if err != nil {
		return Explanation{}, err
	}
	records, err := d.Postgres.Records(ctx, []string{id})
	if err != nil {
		return Explanation{}, err
	}
	e := Explanation{Record: records[id]}
	member, held, err := d.find(ctx, id, registered, e.Record)
	if err != nil {
		return Explanation{}, err
	}
	e.Held = held
	now, err := d.Redis.Now(ctx, member.Scope)
	if err != nil {
		return Explanation{}, err
	}
	e.Input = reservation.Input{
		Member: member, NowMS: now, Policy: d.cfg.Policy(),
		Orders: reservation.ClassifyOrders(member.Scope, member.Reservation.UserID, e.Record),
	}
	if member.Reservation.MessageID != "" {
		query := member.Reservation.MessageQuery()
		e.Messages = d.Evidence.Gather(ctx, now, []reservation.MessageQuery{query})[query.MessageID]
	}
	e.Input.Messages = e.Messages
	e.Action = reservation.Decide(e.Input)
	return e, nil
}

// find looks for the reservation in Redis, in the scopes that are registered.
// One that only PostgreSQL knows is a member of its scope without a hash.
func (d *Daemon) find(ctx context.Context, id string, registered []pgstore.RegisteredScope, record reservation.Record) (reservation.Member, bool, error) {
	refs := make([]redisstore.Ref, len(registered))
	for i, r := range registered {
		refs[i] = redisstore.Ref{Scope: r.Scope, ID: id}
	}
	var named *reservation.Member
	var held bool
	for i, reply := range d.Redis.Members(ctx, refs) {
		if reply.Err != nil {
			return reservation.Member{}, false, reply.Err
		}
		m := reply.Member
		isHeld := registered[i].Hold != nil
		if !m.Missing || m.InPending || m.InExpiry {
			return m, isHeld, nil
		}
		if recordNames(record, m.Scope) {
			named, held = &m, isHeld
		}
	}
	if named == nil {
		return reservation.Member{}, false, ErrNoReservation
	}
	return *named, held, nil
}

// recordNames says whether claim or order name the scope.
func recordNames(record reservation.Record, s reservation.Scope) bool {
	if c := record.Claim; c != nil && c.ActivityID == s.ActivityID && c.SKUID == s.SKUID && c.Version == s.Version && c.Bucket == s.Bucket {
		return true
	}
	for _, o := range record.Orders {
		if o.ActivityID == s.ActivityID && o.SKUID == s.SKUID && o.Version == s.Version && o.Bucket == s.Bucket {
			return true
		}
	}
	return false
}
