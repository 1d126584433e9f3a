package transfer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/seckill/reconciler/reservation"
)

// Reasons of transfers that the daemon plans.
const (
	ReasonDeficit   = "deficit"   // an order's bucket has no unit left for it
	ReasonRebalance = "rebalance" // a sold-out bucket is still asked for
)

// MostPerBucket bounds the transfers of one bucket in one version, since each
// pass reads the markers of all of them.
const MostPerBucket = 1000

// Request asks for units to be moved.
type Request struct {
	Key      Key
	Donor    int64
	Receiver int64
	Amount   int64
	Reason   string
	Actor    string // who asks, for the journal and the audit trail
}

// RefusedError says why a transfer is not planned.
type RefusedError struct {
	Request Request
	Why     string
}

func (e *RefusedError) Error() string {
	r := e.Request
	return fmt.Sprintf("%d units are not moved from bucket %d to bucket %d of a:%s:s:%s:v:%d: %s",
		r.Amount, r.Donor, r.Receiver, r.Key.ActivityID, r.Key.SKUID, r.Key.Version, e.Why)
}

// Planner puts transfers into the journal. It moves nothing.
type Planner struct {
	Journal Journal
	Stocks  Stocks
	Drift   Drift
}

// Plan journals the transfer that is asked for. What it returns besides are
// warnings. A [*RefusedError] says that nothing was journalled, and why.
func (p *Planner) Plan(ctx context.Context, r Request) (Transfer, []string, error) {
	t, warnings, err := p.Propose(ctx, r)
	if err != nil {
		return Transfer{}, nil, err
	}
	if err := p.Journal.CreateTransfers(ctx, []Transfer{t}); err != nil {
		return Transfer{}, nil, err
	}
	return t, warnings, nil
}

// Propose is Plan without the journal: it makes every check and changes nothing.
func (p *Planner) Propose(ctx context.Context, r Request) (Transfer, []string, error) {
	books, err := p.open(ctx, r)
	if err != nil {
		return Transfer{}, nil, err
	}
	if err := r.check(books); err != nil {
		return Transfer{}, nil, err
	}
	if err := p.spares(ctx, r); err != nil {
		return Transfer{}, nil, err
	}
	var warnings []string
	if left := books.Buckets[r.Donor].Available; r.Amount > left {
		warnings = append(warnings, fmt.Sprintf("bucket %d has %d units available: unless more come free before the transfer begins, it is cancelled", r.Donor, left))
	}
	return r.transfer(), warnings, nil
}

// transfer is the row of the request.
func (r Request) transfer() Transfer {
	now := time.Now().UTC()
	return Transfer{
		ID: NewID(), Key: r.Key, Donor: r.Donor, Receiver: r.Receiver, Amount: r.Amount,
		State: Planned, Reason: r.Reason, CreatedBy: r.Actor, CreatedAt: now, UpdatedAt: now,
	}
}

func (r Request) refuse(format string, args ...any) error {
	return &RefusedError{r, fmt.Sprintf(format, args...)}
}

// open reads the books that the request is about.
func (p *Planner) open(ctx context.Context, r Request) (Books, error) {
	versions, err := p.Journal.Versions(ctx, FilterOf(r.Key))
	if err != nil {
		return Books{}, err
	}
	if len(versions) != 1 {
		return Books{}, r.refuse("no such version is registered, or its retention is over: see `reconciler scope list`")
	}
	return Reader{p.Journal, p.Stocks}.Books(ctx, versions)[0], nil
}

// check says whether the transfer may be planned, as far as the books tell.
func (r Request) check(b Books) error {
	switch {
	case b.Version.Count < 2:
		return r.refuse("the version has one bucket")
	case r.Donor == r.Receiver:
		return r.refuse("donor and receiver are one bucket")
	case r.Amount < 1 || r.Amount >= reservation.MaxNumber:
		return r.refuse("the amount is not a number of units")
	}
	for _, side := range []struct {
		bucket int64
		name   string
	}{{r.Donor, "the donor"}, {r.Receiver, "the receiver"}} {
		reading, there := b.Buckets[side.bucket]
		registered, transfers := b.bucket(side.bucket)
		switch {
		case !there:
			return r.refuse("%s is not a bucket of the version, which has %d", side.name, b.Version.Count)
		case registered.Held:
			return r.refuse("a person holds %s", side.name)
		case transfers >= MostPerBucket:
			return r.refuse("%s has %d transfers in this version already, and every pass reads all of them", side.name, transfers)
		case reading.Err == nil && reading.State != "" && !sells(reading.State):
			return r.refuse("%s is %s: only ACTIVE and PAUSED buckets take part", side.name, reading.State)
		}
	}
	if err := b.Check(); err != nil {
		return err
	}
	if b.Difference() != 0 {
		return r.refuse("%v: %d units, %+d in transit, %d allocated; run `reconciler reconcile` first",
			errSum, b.Initial(), b.InTransit(), b.Version.Allocated)
	}
	return nil
}

// bucket finds what is registered of a bucket, and counts its transfers.
func (b Books) bucket(id int64) (registered Bucket, transfers int) {
	for _, one := range b.Version.Buckets {
		if one.ID == id {
			registered = one
		}
	}
	for _, t := range b.Version.Transfers {
		if t.Donor == id || t.Receiver == id {
			transfers++
		}
	}
	return registered, transfers
}

// spares says whether the donor's own orders need its units.
func (p *Planner) spares(ctx context.Context, r Request) error {
	d := p.Drift.Deviations(ctx, []reservation.Scope{r.Key.Scope(r.Donor)})[0]
	switch {
	case d.Err != nil:
		return fmt.Errorf("whether the donor's own orders need its units is not known: %w", d.Err)
	case d.Units < 0:
		return r.refuse("the donor has lost %d reservations, whose units it needs: run `reconciler reconcile --repair` first", -d.Units)
	default:
		return nil
	}
}

// ErrMoved says that a transfer cannot be cancelled any more.
var ErrMoved = errors.New("units have left the donor's bucket: a transfer is stopped only before that; move them back by another one")

// Cancellable says whether a transfer may be cancelled: no OUT was seen, by the
// journal and by the markers as they are now.
func Cancellable(p Pair) error {
	switch {
	case p.Transfer.State == Cancelled:
		return nil
	case p.Transfer.State != Planned, p.Out().Amount > 0, p.In().Amount > 0:
		return ErrMoved
	default:
		return nil
	}
}
