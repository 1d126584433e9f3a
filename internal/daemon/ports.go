package daemon

import (
	"context"
	"errors"
	"time"

	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// scopes is the registry in PostgreSQL, with what Redis has of it.
type scopes struct {
	registry *pgstore.Store
	redis    *redisstore.Store
	identity *identity
}

// Workable is part of [pass.Scopes]. CLOSED versions are workable until their
// retention (protocol §4). A scope that was never confirmed, or whose retention
// has passed by the clock of its own node, is not missing: it is left out. One
// whose node does not answer is in the list, so that reading it says why. It
// is the first call of every pass, and compares PostgreSQL's identity with the
// last one's (protocol §1).
func (s scopes) Workable(ctx context.Context) (pass.Workable, error) {
	if _, err := s.identity.check(ctx); err != nil {
		return pass.Workable{}, err
	}
	registered, err := s.registry.Scopes(ctx, pgstore.ScopeFilter{Live: true, NotHeld: true})
	if err != nil {
		return pass.Workable{}, err
	}
	names := make([]reservation.Scope, len(registered))
	for i, r := range registered {
		names[i] = r.Scope
	}
	var w pass.Workable
	for i, snapshot := range s.redis.Snapshots(ctx, names) {
		switch {
		case snapshot.Err != nil || snapshot.Configured():
			w.Scopes = append(w.Scopes, names[i])
		case !registered[i].ConfirmedAt.IsZero() && snapshot.TimeMS < registered[i].RetentionUntil.UnixMilli():
			w.Missing = append(w.Missing, names[i])
		}
	}
	return w, nil
}

// Held is part of [pass.Scopes].
func (s scopes) Held(ctx context.Context) (map[reservation.Scope]bool, error) {
	held, err := s.registry.HeldScopes(ctx)
	if err != nil {
		return nil, err
	}
	names := make(map[reservation.Scope]bool, len(held))
	for _, scope := range held {
		names[scope] = true
	}
	return names, nil
}

// stock is the scopes' reserved units as the gate asks for them.
type stock struct{ redis *redisstore.Store }

// Reserved is part of [fencer.Stock].
func (s stock) Reserved(ctx context.Context, scopes []reservation.Scope) []fencer.Reserved {
	reserved := make([]fencer.Reserved, len(scopes))
	for i, snapshot := range s.redis.Snapshots(ctx, scopes) {
		r := fencer.Reserved{Units: snapshot.Reserved, Err: snapshot.Err}
		if r.Err == nil && !snapshot.Configured() {
			r.Err = redisstore.ErrNoStock
		}
		r.Broken = errors.Is(r.Err, redisstore.ErrNoStock) || r.Err != nil && lua.Classify(r.Err) == lua.ClassData
		reserved[i] = r
	}
	return reserved
}

// claims is PostgreSQL as the workers ask it.
type claims struct {
	*pgstore.Store
	identity *identity
	metrics  *observe.Metrics
}

// ReadyToRelease is part of [fencer.ClaimStore].
func (c claims) ReadyToRelease(ctx context.Context) error {
	if err := c.FenceReady(ctx); err != nil {
		return notReady(err)
	}
	halted, err := c.identity.check(ctx)
	if err != nil {
		return err
	}
	if halted {
		return &fencer.NotReadyError{
			Kind: fencer.TaskPostgresChanged,
			Err:  errors.New("PostgreSQL is another one, or went back in time: claims may be lost that Redis shows the effects of"),
		}
	}
	return nil
}

// Fence is part of [fencer.ClaimStore].
func (c claims) Fence(ctx context.Context, reason string, requests []reservation.FenceRequest) ([]reservation.FenceResult, error) {
	results, err := c.Store.Fence(ctx, reason, requests)
	return results, notReady(err)
}

// Refence is part of [fencer.Refencing].
func (c claims) Refence(ctx context.Context, requests []reservation.FenceRequest) ([]reservation.FenceResult, error) {
	results, err := c.Store.Fence(ctx, pgstore.ReasonRefence, requests)
	return results, notReady(err)
}

// ChangedTasks is part of [fencer.ChangedPostgres].
func (c claims) ChangedTasks(ctx context.Context) ([]int64, error) {
	tasks, err := c.Tasks(ctx, pgstore.TaskFilter{Kinds: []string{pgstore.TaskPostgresChanged}, States: pgstore.Unresolved})
	ids := make([]int64, len(tasks))
	for i, task := range tasks {
		ids[i] = task.ID
	}
	return ids, err
}

// ReleaseUse is part of [fencer.ClaimStore].
func (c claims) ReleaseUse(ctx context.Context, scopes []reservation.Scope, window time.Duration) (map[reservation.Scope]fencer.ReleaseUse, error) {
	fenced, err := c.DaemonFences(ctx, scopes, window)
	if err != nil {
		return nil, err
	}
	halts, err := c.Tasks(ctx, pgstore.TaskFilter{Kinds: []string{fencer.TaskReleaseStorm}, States: pgstore.Unresolved})
	if err != nil {
		return nil, err
	}
	halted := map[string]bool{}
	for _, task := range halts {
		halted[task.Scope] = true
	}
	use := make(map[reservation.Scope]fencer.ReleaseUse, len(scopes))
	for _, s := range scopes {
		use[s] = fencer.ReleaseUse{Fenced: fenced[s], Halted: halted[s.Tag()]}
	}
	return use, nil
}

// notReady names the halt behind an error of the store.
func notReady(err error) error {
	if _, ok := errors.AsType[*pgstore.FenceNotReadyError](err); ok {
		return &fencer.NotReadyError{Kind: fencer.TaskFenceNotReady, Err: err}
	}
	return err
}

// messageSender is RocketMQ as the dispatcher sends through it.
type messageSender struct{ *rocketmq.Sender }

// Send is part of [scanner.Sender].
func (s messageSender) Send(ctx context.Context, reservations []reservation.Reservation) []reservation.SendResult {
	results := make([]reservation.SendResult, len(reservations))
	outgoing := make([]rocketmq.Outgoing, 0, len(reservations))
	at := make([]int, 0, len(reservations))
	for i, r := range reservations {
		body, err := reservation.NewOrderMessage(r).Marshal()
		if err != nil {
			results[i] = reservation.SendResult{Outcome: reservation.SendRefused, Cause: "message_illegal", Err: err}
			continue
		}
		outgoing = append(outgoing, rocketmq.Outgoing{MessageID: r.MessageID, Body: body})
		at = append(at, i)
	}
	for k, sent := range s.Sender.Send(ctx, outgoing) {
		results[at[k]] = reservation.SendResult{
			Outcome: sent.Outcome, Position: sent.Position, Cause: sent.Cause, Err: sent.Err,
		}
	}
	return results
}

// queueRegistry keeps the queues that were ever seen in PostgreSQL.
type queueRegistry struct{ store *pgstore.Store }

// Record is part of [rocketmq.QueueRegistry].
func (q queueRegistry) Record(ctx context.Context, queues []rocketmq.ExpectedQueue) error {
	seen := make([]pgstore.ExpectedQueue, len(queues))
	for i, k := range queues {
		seen[i] = pgstore.ExpectedQueue{Broker: k.Broker, Topic: k.Topic, Queues: int(k.Queues)}
	}
	return q.store.RecordQueues(ctx, seen)
}

// Forgotten is part of [rocketmq.QueueRegistry].
func (q queueRegistry) Forgotten(ctx context.Context) ([]string, error) {
	return q.store.ForgottenBrokers(ctx)
}

// Expected is part of [rocketmq.QueueRegistry].
func (q queueRegistry) Expected(ctx context.Context, topic string) ([]rocketmq.ExpectedQueue, error) {
	all, err := q.store.ExpectedQueues(ctx)
	if err != nil {
		return nil, err
	}
	var expected []rocketmq.ExpectedQueue
	for _, k := range all {
		if k.Topic == topic {
			expected = append(expected, rocketmq.ExpectedQueue{Broker: k.Broker, Topic: k.Topic, Queues: int32(k.Queues)}) //nolint:gosec // a count of queues
		}
	}
	return expected, nil
}
