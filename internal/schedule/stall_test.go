package schedule

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// A run that outlasts its limit is cut off by its context. One that does not
// listen is a defect, and so is a cron that starts nothing.
func TestStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Logger: quiet()})
		wedged, end := make(chan struct{}), make(chan struct{})
		first := sync.OnceFunc(func() { close(wedged) })
		add(t, s,
			Job{Name: "good", Schedule: "@every 1s", Limit: time.Second, Run: func(ctx context.Context) (Result, error) {
				<-ctx.Done() // takes all the time that it may
				return nil, ctx.Err()
			}},
			Job{Name: "wedged", Schedule: "@every 1s", Limit: time.Minute, Run: func(context.Context) (Result, error) {
				first()
				<-end
				return nil, nil
			}},
			Job{Name: "nightly", Schedule: "0 0 3 * * *", Limit: time.Minute, Run: func(context.Context) (Result, error) { return nil, nil }},
		)
		progress := func(when string) {
			t.Helper()
			if err := s.Stalled(); err != nil {
				t.Errorf("%s: %v", when, err)
			}
		}
		progress("before the start")
		start(t, s)
		<-wedged
		began := time.Now()
		progress("at the start")
		time.Sleep(time.Until(began.Add(2*time.Minute - time.Second)))
		progress("before twice the limit")
		time.Sleep(2 * time.Second)
		err := s.Stalled()
		if err == nil || !strings.Contains(err.Error(), "job wedged: still running 1m1s after its time limit of 1m0s") || strings.Contains(err.Error(), "good") {
			t.Errorf("after twice the limit: %v", err)
		}
		close(end)
		synctest.Wait()
		time.Sleep(time.Minute)
		progress("when the run has ended")
		stop(t, s)
		progress("after the stop")
	})
}

func TestStalledCron(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Logger: quiet()})
		add(t, s, Job{Name: "scanner", Schedule: "@every 1s", Run: func(context.Context) (Result, error) { return nil, nil }})
		start(t, s)
		time.Sleep(10 * time.Second)
		if err := s.Stalled(); err != nil {
			t.Errorf("while it ticks: %v", err)
		}
		<-s.cron.Stop().Done() // stands for a cron that hangs
		time.Sleep(stallSlack)
		if err := s.Stalled(); err != nil {
			t.Errorf("within the slack: %v", err)
		}
		time.Sleep(2 * time.Second)
		if err := s.Stalled(); err == nil || !strings.Contains(err.Error(), "job scanner: not started") {
			t.Errorf("cron does not tick, Stalled says %v", err)
		}
		stop(t, s)
	})
}
