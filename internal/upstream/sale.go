package upstream

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/reservation"
)

// Sale sells an activity to a crowd: every user clicks once, in pages, and what
// is accepted is delivered under its fault.
type Sale struct {
	Gateway *Gateway
	Users   int // their ids are u-1 … u-<Users>
	Faults  Faults
	Delays  Delays

	Page        int     // requests in one round trip; default 64
	Concurrency int     // pages at once; default 4
	Rate        float64 // requests per second; 0: as fast as it goes

	// Outage stops a broker for a while in the middle; nil: never.
	Outage *Outage
	// Rollback takes one scope back to an earlier state; nil: never.
	Rollback *Rollback

	ledger Ledger
	// paging is held by pages until they are delivered. A rollback waits for them,
	// so that it is known which of them it undid.
	paging sync.RWMutex
	mu     sync.Mutex
	tally  Tally
}

// Tally counts what the gateway answered.
type Tally struct {
	Requests int            `json:"requests"`
	Accepted int            `json:"accepted"`
	Unknown  int            `json:"unknown_outcome"` // the gateway failed closed
	Failed   int            `json:"failed"`
	Codes    map[string]int `json:"codes"` // of reserve.lua, by name
}

// Outage is a stop of a broker: it is killed, as a crash would, when the share
// of the requests has been made, and started again after a while.
type Outage struct {
	Broker interface {
		Kill() error
		Start(ctx context.Context) error
	}
	At  float64 // share of the requests, 0 to 1
	For time.Duration

	over atomic.Bool
}

// Over says whether the broker was stopped and runs again.
func (o *Outage) Over() bool { return o.over.Load() }

// Ledger is every reservation so far.
func (s *Sale) Ledger() *Ledger { return &s.ledger }

// Tally is what was answered so far.
func (s *Sale) Tally() Tally {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.tally
	t.Codes = make(map[string]int, len(s.tally.Codes))
	maps.Copy(t.Codes, s.tally.Codes)
	return t
}

// Run makes all requests and returns when everything is done, what the faults
// put off included. Failures of Redis and RocketMQ on the way are what the
// daemon is there for: they are counted, and those of notes and late sends are
// returned together, but nothing stops for them. Only the end of ctx does.
func (s *Sale) Run(ctx context.Context) error {
	var faults deferred
	var background sync.WaitGroup
	limiter := rate.NewLimiter(rate.Inf, 0)
	page := orDefault(s.Page, 64)
	if s.Rate > 0 {
		limiter = rate.NewLimiter(rate.Limit(s.Rate), page)
	}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(orDefault(s.Concurrency, 4))
	outage, rollback := s.Outage, s.Rollback
	made := 0
	for users := range slices.Chunk(s.users(), page) {
		if err := limiter.WaitN(gctx, len(users)); err != nil {
			break
		}
		made += len(users)
		done := float64(made) / float64(s.Users)
		if outage != nil && done >= outage.At {
			o := outage
			outage = nil
			background.Go(func() { faults.note(o.run(ctx)) })
		}
		if rollback != nil {
			rollback.advance(ctx, s, done)
		}
		g.Go(func() error { return s.sell(gctx, ctx, users, &faults, &background) })
	}
	err := g.Wait()
	background.Wait()
	if rollback != nil {
		faults.note(rollback.err)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("sale of %s abandoned: %w", s.Gateway.Activity.ActivityID, context.Cause(ctx))
	}
	return errors.Join(err, faults.err())
}

func (s *Sale) users() []Request {
	requests := make([]Request, s.Users)
	for i := range requests {
		requests[i] = Request{UserID: fmt.Sprintf("u-%d", i+1), RequestID: fmt.Sprintf("q-%s-%d", s.Gateway.Activity.ActivityID, i+1)}
	}
	return requests
}

// sell handles one page. Late work outlives the page and runs under the sale's
// own context.
func (s *Sale) sell(ctx, saleCtx context.Context, users []Request, faults *deferred, background *sync.WaitGroup) error {
	s.paging.RLock()
	defer s.paging.RUnlock()
	accepted := s.reserve(ctx, users)
	later, err := s.Gateway.DeliverAll(ctx, s.Faults, s.Delays, accepted)
	faults.note(err)
	for _, l := range later {
		background.Go(func() {
			timer := time.NewTimer(l.After)
			defer timer.Stop()
			select {
			case <-timer.C:
				faults.note(l.Do(saleCtx))
			case <-saleCtx.Done():
			}
		})
	}
	return ctx.Err()
}

// reserve makes the requests of one page and returns what is to be delivered.
func (s *Sale) reserve(ctx context.Context, users []Request) []reservation.Reservation {
	answers := s.Gateway.Reserve(ctx, users)
	var accepted []reservation.Reservation
	for _, a := range answers {
		if a.Accepted() {
			accepted = append(accepted, a.Reservation)
		}
	}
	s.ledger.add(accepted, s.Faults)
	s.count(answers)
	return accepted
}

func (s *Sale) count(answers []Answer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tally.Codes == nil {
		s.tally.Codes = map[string]int{}
	}
	for _, a := range answers {
		s.tally.Requests++
		busy, isBusy := errors.AsType[*client.BusyError](a.Err)
		switch {
		case isBusy && busy.OutcomeUnknown:
			s.tally.Unknown++
		case a.Err != nil:
			s.tally.Failed++
		default:
			s.tally.Codes[a.Reply.Code.String()]++
			if a.Accepted() {
				s.tally.Accepted++
			}
		}
	}
}

// deferred gathers the errors that do not stop a sale.
type deferred struct {
	mu   sync.Mutex
	errs []error
	more int
}

// maxErrors bounds the errors kept: during an outage every page has one.
const maxErrors = 20

func (d *deferred) note(err error) {
	if err == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.errs) == maxErrors {
		d.more++
		return
	}
	d.errs = append(d.errs, err)
}

func (d *deferred) err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	err := errors.Join(d.errs...)
	if d.more > 0 {
		err = fmt.Errorf("%w\nand %d more", err, d.more)
	}
	return err
}

func (o *Outage) run(ctx context.Context) error {
	if err := o.Broker.Kill(); err != nil {
		return fmt.Errorf("stop the broker: %w", err)
	}
	timer := time.NewTimer(o.For)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	// Also when the sale is abandoned: the broker is not ours to leave dead.
	if err := o.Broker.Start(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("start the broker again: %w", err)
	}
	o.over.Store(true)
	return nil
}
