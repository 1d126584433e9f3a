package schedule

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/robfig/cron/v3"
)

// stallSlack is how late everything may be on a machine that has other things
// to do, or that stood still for a while.
const stallSlack = 30 * time.Second

// Stalled says what makes no progress any more, one error for each job: a run
// that goes on although its time limit passed as long ago as the limit is long,
// and at least half a minute ago, or one that the schedule should have started
// half a minute ago and did not. A run that fails, is paused or is kept out by
// the gate has ended, which is progress. It is nil before [Scheduler.Start] and
// after [Scheduler.Stop], which has a limit of its own.
//
// Only a defect stalls a job, since its context ended with its limit: whoever
// watches the process should replace it.
func (s *Scheduler) Stalled() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.started || s.stopped {
		return nil
	}
	now := time.Now()
	var errs []error
	for _, e := range s.jobs {
		if late := now.Sub(e.began) - e.job.Limit; e.busy && late > max(e.job.Limit, stallSlack) {
			errs = append(errs, fmt.Errorf("job %s: still running %s after its time limit of %s", e.job.Name, late.Round(time.Second), e.job.Limit))
		}
		if due := e.due.Load(); due != nil && now.Sub(*due) > stallSlack {
			errs = append(errs, fmt.Errorf("job %s: not started, although it has been due for %s", e.job.Name, now.Sub(*due).Round(time.Second)))
		}
	}
	return errors.Join(errs...)
}

// noting is a schedule that notes what it told cron last. Cron asks it right
// when it starts a job, so a note in the past means that cron stands still.
type noting struct {
	cron.Schedule

	due *atomic.Pointer[time.Time]
}

// Next is part of [cron.Schedule]. The note is on the monotonic clock: a step
// of the wall clock makes nothing late.
func (n noting) Next(t time.Time) time.Time {
	next := n.Schedule.Next(t)
	if next.IsZero() { // never again
		n.due.Store(nil)
		return next
	}
	due := time.Now().Add(next.Sub(t))
	n.due.Store(&due)
	return next
}
