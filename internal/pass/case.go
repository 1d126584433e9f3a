package pass

import (
	"context"
	"fmt"
	"time"

	"github.com/seckill/reconciler/reservation"
)

// Case is a member with its decision.
type Case struct {
	Input  reservation.Input
	Action reservation.Action
	Index  reservation.Index // the index through which it was found
}

// Member is the case's reservation.
func (c Case) Member() reservation.Member { return c.Input.Member }

// Effects are the script calls of the decision.
func (c Case) Effects() []reservation.Effect {
	return c.Action.Effects(c.Input.Member, c.Index, c.Input.Orders)
}

// Decide makes a case of the input and notes it in the tally.
func Decide(in reservation.Input, index reservation.Index, tally *Tally) Case {
	c := Case{Input: in, Action: reservation.Decide(in), Index: index}
	tally.Decided(in.Member, c.Action, RestsOnUnknown(in, c.Action))
	return c
}

// Claims is the order side as the workers read it: claim and orders of each
// reservation in one statement. Ids without either are absent from the map; an
// error says nothing about any of them.
type Claims interface {
	Records(ctx context.Context, ids []string) (map[string]reservation.Record, error)
}

// Evidence is P of protocol §2 for the members of some pages.
type Evidence struct {
	records map[string]reservation.Record
	cause   string // why nothing is known
}

// ReadOrders reads P for the ids. A failed read makes it UNKNOWN for all of
// them, which no decision rests a release on (S3).
func ReadOrders(ctx context.Context, claims Claims, ids []string, tally *Tally) Evidence {
	if len(ids) == 0 {
		return Evidence{}
	}
	records, err := claims.Records(ctx, ids)
	if err != nil {
		tally.Failed(fmt.Errorf("read claims and orders of %d reservations: %w", len(ids), err))
		return Evidence{cause: "orders_unreadable"}
	}
	return Evidence{records: records}
}

// Of is P for one member.
func (e Evidence) Of(m reservation.Member) reservation.OrderEvidence {
	if e.cause != "" {
		return reservation.UnknownOrders(e.cause)
	}
	return reservation.ClassifyOrders(m.Scope, m.Reservation.UserID, e.records[m.ID])
}

// Scopes lists the scopes that workers may touch.
type Scopes interface {
	Workable(ctx context.Context) (Workable, error)
	// Held are the scopes that a person holds now: no worker changes them.
	Held(ctx context.Context) (map[reservation.Scope]bool, error)
}

// Workable are the registered scopes that are not past their retention and not
// held.
type Workable struct {
	Scopes []reservation.Scope
	// Missing are those of which Redis has lost meta or stock. Whatever else it
	// shows of them is not to be believed: an empty Redis is not an idle one.
	Missing []reservation.Scope
}

// TaskConfigMissing asks a person about a scope whose meta or stock is gone
// from Redis: nothing fills them in again (protocol §4).
const TaskConfigMissing = "config_missing"

// ListScopes lists the scopes of a pass. Those that Redis has lost make the
// pass incomplete (interface §7), and the others go on.
func ListScopes(ctx context.Context, scopes Scopes, tally *Tally) ([]reservation.Scope, error) {
	workable, err := scopes.Workable(ctx)
	if err != nil {
		return nil, fmt.Errorf("list scopes: %w", err)
	}
	for _, s := range workable.Missing {
		tally.Task(s, TaskConfigMissing, "redis_lost_it", "")
		tally.Failed(fmt.Errorf("scope %s: Redis has lost its meta or stock: nothing is done in it, see `reconciler reconcile`", s))
	}
	return workable.Scopes, nil
}

// Tasks takes what a person is asked for.
type Tasks interface {
	ReportTasks(ctx context.Context, reports []reservation.TaskReport) error
}

// Finish reports the tally's tasks. It is given time even when the pass has
// none left, since a task that is lost is a person not asked.
func Finish(ctx context.Context, tasks Tasks, tally *Tally) {
	reports := tally.Tasks()
	if len(reports) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reportTimeout)
	defer cancel()
	if err := tasks.ReportTasks(ctx, reports); err != nil {
		tally.Failed(fmt.Errorf("report %d tasks: %w", len(reports), err))
	}
}

const reportTimeout = 5 * time.Second
