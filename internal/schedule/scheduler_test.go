package schedule

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// record keeps what a scheduler reports.
type record struct {
	mu       sync.Mutex
	started  int
	finished []Run
	skipped  []error
}

func (r *record) JobStarted(Run) { r.mu.Lock(); defer r.mu.Unlock(); r.started++ }
func (r *record) JobFinished(run Run) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.finished = append(r.finished, run)
}

func (r *record) JobSkipped(_ string, reason error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.skipped = append(r.skipped, reason)
}

func (r *record) outcomes() []Outcome {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []Outcome
	for _, run := range r.finished {
		out = append(out, run.Outcome)
	}
	return out
}

// quiet is a logger for tests that do not look at the log.
func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func add(t *testing.T, s *Scheduler, jobs ...Job) {
	t.Helper()
	for _, j := range jobs {
		if j.Limit == 0 {
			j.Limit = time.Hour
		}
		if err := s.Add(j); err != nil {
			t.Fatal(err)
		}
	}
}

func start(t *testing.T, s *Scheduler) {
	t.Helper()
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
}

func stop(t *testing.T, s *Scheduler) {
	t.Helper()
	if err := s.Stop(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestPanicDoesNotKillTheJob: the job panics in its first tick, and the third
// still runs. A panic must neither end the process nor keep the overlap guard.
func TestPanicDoesNotKillTheJob(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		rec := &record{}
		s := New(Options{Logger: slog.New(slog.NewTextHandler(&log, nil)), Recorder: rec})
		n := 0
		add(t, s, Job{Name: "scanner", Schedule: "@every 1s", Run: func(context.Context) (Result, error) {
			n++
			if n == 1 {
				panic("broken")
			}
			return Result{"sent": 1}, nil
		}})
		start(t, s)
		time.Sleep(2500 * time.Millisecond) // ticks at 0, 1 and 2 s
		stop(t, s)
		if diff := cmp.Diff([]Outcome{Panicked, Succeeded, Succeeded}, rec.outcomes()); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		for _, want := range []string{"job failed", "panic: broken", "stack=", "TestPanicDoesNotKillTheJob"} {
			if !strings.Contains(log.String(), want) {
				t.Errorf("log lacks %q:\n%s", want, log.String())
			}
		}
	})
}

func TestOverlapIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := &record{}
		s := New(Options{Logger: quiet(), Recorder: rec})
		var at, most atomic.Int32
		add(t, s, Job{Name: "fencer", Schedule: "@every 1s", Run: func(context.Context) (Result, error) {
			most.Store(max(most.Load(), at.Add(1)))
			time.Sleep(2500 * time.Millisecond)
			at.Add(-1)
			return nil, nil
		}})
		start(t, s)
		time.Sleep(1500 * time.Millisecond) // the run of 0 s is going on, the tick of 1 s was skipped
		if _, err := s.Run(t.Context(), "fencer"); !errors.Is(err, ErrAlreadyRunning) {
			t.Errorf("by hand during a run: %v, want %v", err, ErrAlreadyRunning)
		}
		if st := s.Jobs()[0]; !st.Running {
			t.Error("the job is not shown as running")
		}
		time.Sleep(1200 * time.Millisecond) // 2.7 s: the first run has ended
		go func() {
			time.Sleep(400 * time.Millisecond) // 3.1 s: the run by hand is going on
			rec.mu.Lock()
			defer rec.mu.Unlock()
			if last := rec.skipped[len(rec.skipped)-1]; !errors.Is(last, ErrAlreadyRunning) || len(rec.skipped) != 3 {
				t.Errorf("skipped: %v, want those of 1, 2 and 3 s", rec.skipped)
			}
		}()
		run, err := s.Run(t.Context(), "fencer")
		if err != nil || !run.Manual {
			t.Errorf("by hand between runs: %+v, %v", run, err)
		}
		stop(t, s)
		if most.Load() != 1 {
			t.Errorf("%d runs at once", most.Load())
		}
	})
}

func TestStopCancelsAndWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := &record{}
		s := New(Options{Logger: quiet(), Recorder: rec})
		slow := func(ctx context.Context) (Result, error) {
			<-ctx.Done()
			time.Sleep(3 * time.Second) // brings its page to an end
			return Result{"done": 5}, ctx.Err()
		}
		add(t, s,
			Job{Name: "scanner", Schedule: "@every 1m", Run: slow},
			Job{Name: "by-hand", Schedule: "@every 10h", Run: slow})
		start(t, s)
		manual := make(chan error, 1)
		go func() {
			_, err := s.Run(context.Background(), "by-hand")
			manual <- err
		}()
		time.Sleep(time.Second)

		short, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		err := s.Stop(short)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "scanner, by-hand") {
			t.Errorf("a stop that may not wait long enough: %v", err)
		}
		begin := time.Now()
		stop(t, s)
		if waited := time.Since(begin); waited != 2*time.Second {
			t.Errorf("waited %s for the runs to end, want 2s", waited)
		}
		stop(t, s) // a third time
		if err := <-manual; !errors.Is(err, context.Canceled) {
			t.Errorf("run by hand: %v", err)
		}
		if diff := cmp.Diff([]Outcome{Cancelled, Cancelled}, rec.outcomes()); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
		if rec.finished[0].Items["done"] != 5 {
			t.Errorf("what a cancelled run did is lost: %v", rec.finished[0])
		}
		if _, err := s.Run(t.Context(), "scanner"); !errors.Is(err, ErrStopped) {
			t.Errorf("run after the stop: %v", err)
		}
		if err := s.Start(); !errors.Is(err, ErrStopped) {
			t.Errorf("start after the stop: %v", err)
		}
	})
}

func TestLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Logger: quiet()})
		add(t, s, Job{
			Name: "fencer", Schedule: "@every 1h", Limit: 30 * time.Second,
			Run: func(ctx context.Context) (Result, error) { <-ctx.Done(); return nil, ctx.Err() },
		})
		run, err := s.Run(t.Context(), "fencer")
		if run.Outcome != TimedOut || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%+v, %v", run, err)
		}
		if took := run.Finished.Sub(run.Started); took != 30*time.Second {
			t.Errorf("took %s", took)
		}
		stop(t, s)
	})
}

// TestManualCaller: the caller's cancellation ends a run by hand, and a panic
// or an error in it reaches the caller.
func TestManualCaller(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Logger: quiet()})
		boom := errors.New("boom")
		add(t, s,
			Job{Name: "waits", Schedule: "@every 1h", Run: func(ctx context.Context) (Result, error) { <-ctx.Done(); return nil, ctx.Err() }},
			Job{Name: "fails", Schedule: "@every 1h", Run: func(context.Context) (Result, error) { return Result{"half": 1}, boom }},
			Job{Name: "panics", Schedule: "@every 1h", Run: func(context.Context) (Result, error) { panic(boom) }})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if run, err := s.Run(ctx, "waits"); err == nil || run.Outcome != TimedOut {
			t.Errorf("waits: %+v, %v", run, err)
		}
		if run, err := s.Run(t.Context(), "fails"); !errors.Is(err, boom) || run.Outcome != Failed || run.Items["half"] != 1 {
			t.Errorf("fails: %+v, %v", run, err)
		}
		if run, err := s.Run(t.Context(), "panics"); err == nil || run.Outcome != Panicked {
			t.Errorf("panics: %+v, %v", run, err)
		}
		if _, err := s.Run(t.Context(), "absent"); !errors.Is(err, ErrUnknownJob) {
			t.Errorf("absent: %v", err)
		}
		stop(t, s)
	})
}

func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Logger: quiet()})
		n := 0
		add(t, s, Job{Name: "scanner", Schedule: "@every 1s", Run: func(context.Context) (Result, error) { n++; return nil, nil }})
		if err := s.Pause("scanner"); err != nil {
			t.Fatal(err)
		}
		start(t, s)
		time.Sleep(5500 * time.Millisecond)
		synctest.Wait()
		if n != 0 || !s.Jobs()[0].Paused {
			t.Errorf("%d runs while paused", n)
		}
		if _, err := s.Run(t.Context(), "scanner"); err != nil || n != 1 {
			t.Errorf("by hand while paused: %v, %d runs", err, n)
		}
		if err := s.Resume("scanner"); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if n != 4 {
			t.Errorf("%d runs, want 4", n)
		}
		for _, err := range []error{s.Pause("x"), s.Resume("x")} {
			if !errors.Is(err, ErrUnknownJob) {
				t.Error(err)
			}
		}
		stop(t, s)
	})
}

// gate refuses with err, or lets one in and counts those who left.
type gate struct {
	mu      sync.Mutex
	err     error
	in, out int
}

func (g *gate) set(err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.err = err
}

func (g *gate) Enter(context.Context, string, bool) (func(), error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil {
		return nil, g.err
	}
	g.in++
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.out++
	}, nil
}

func TestGate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, rec := &gate{err: ErrAlreadyRunning}, &record{}
		s := New(Options{Logger: quiet(), Gate: g, Recorder: rec})
		n := 0
		add(t, s, Job{Name: "scanner", Schedule: "@every 1s", Run: func(context.Context) (Result, error) { n++; panic("x") }})
		if _, err := s.Run(t.Context(), "scanner"); !errors.Is(err, ErrAlreadyRunning) || n != 0 {
			t.Errorf("by hand while another process runs it: %v, %d runs", err, n)
		}
		start(t, s)
		time.Sleep(100 * time.Millisecond)
		g.set(errors.New("database unreachable"))
		time.Sleep(time.Second)
		g.set(nil)
		time.Sleep(time.Second)
		stop(t, s)
		if n != 1 || g.in != 1 || g.out != 1 {
			t.Errorf("%d runs, gate entered %d and left %d times, want 1 each", n, g.in, g.out)
		}
		if len(rec.skipped) != 2 {
			t.Errorf("skipped %v, want two", rec.skipped)
		}
	})
}

func TestStaggeredStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Options{Logger: quiet()})
		begin := time.Now()
		var mu sync.Mutex
		got := map[string][]time.Duration{}
		for _, name := range []string{"a", "b", "c"} {
			add(t, s, Job{Name: name, Schedule: "@every 300ms", Run: func(context.Context) (Result, error) {
				mu.Lock()
				defer mu.Unlock()
				got[name] = append(got[name], time.Since(begin))
				return nil, nil
			}})
		}
		start(t, s)
		time.Sleep(550 * time.Millisecond)
		if next := s.Jobs()[1].Next; next.Sub(begin) != 700*time.Millisecond {
			t.Errorf("next run of b at %s, want 700ms", next.Sub(begin))
		}
		stop(t, s)
		ms := time.Millisecond
		want := map[string][]time.Duration{"a": {0, 300 * ms}, "b": {100 * ms, 400 * ms}, "c": {200 * ms, 500 * ms}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	})
}

// TestCronFields: six fields beginning with the second, in UTC.
func TestCronFields(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // begins at 2000-01-01 00:00:00 UTC
		s := New(Options{Logger: quiet()})
		var at []time.Time
		add(t, s, Job{Name: "nightly", Schedule: "30 15 3 * * *", Run: func(context.Context) (Result, error) {
			at = append(at, time.Now().UTC())
			return nil, nil
		}})
		start(t, s)
		time.Sleep(28 * time.Hour)
		stop(t, s)
		want := []time.Time{
			time.Date(2000, 1, 1, 3, 15, 30, 0, time.UTC), time.Date(2000, 1, 2, 3, 15, 30, 0, time.UTC),
		}
		if diff := cmp.Diff(want, at); diff != "" {
			t.Errorf("-want +got:\n%s", diff)
		}
	})
}

func TestAddRefuses(t *testing.T) {
	ok := Job{Name: "a", Schedule: "@every 1s", Limit: time.Second, Run: func(context.Context) (Result, error) { return nil, nil }}
	s := New(Options{Logger: quiet()})
	add(t, s, ok)
	for name, change := range map[string]func(*Job){
		"twice":          func(*Job) {},
		"no name":        func(j *Job) { j.Name = "" },
		"no run":         func(j *Job) { j.Name, j.Run = "b", nil },
		"no limit":       func(j *Job) { j.Name, j.Limit = "b", 0 },
		"five fields":    func(j *Job) { j.Name, j.Schedule = "b", "15 3 * * *" },
		"not a schedule": func(j *Job) { j.Name, j.Schedule = "b", "often" },
		"no duration":    func(j *Job) { j.Name, j.Schedule = "b", "@every now" },
		"too often":      func(j *Job) { j.Name, j.Schedule = "b", "@every 1ms" },
	} {
		j := ok
		change(&j)
		if err := s.Add(j); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	start(t, s)
	defer stop(t, s)
	start(t, s) // again: does nothing
	ok.Name = "late"
	if err := s.Add(ok); err == nil {
		t.Error("a job added after the start is accepted")
	}
}

// TestLifecycleStress starts, stops and uses schedulers from many goroutines.
func TestLifecycleStress(t *testing.T) {
	for round := range 100 {
		s := New(Options{Logger: quiet()})
		var active atomic.Int32
		for _, name := range []string{"a", "b"} {
			add(t, s, Job{Name: name, Schedule: "@every 10ms", Run: func(ctx context.Context) (Result, error) {
				if active.Add(1) > 2 {
					t.Error("a job overlaps itself")
				}
				defer active.Add(-1)
				select {
				case <-ctx.Done():
				case <-time.After(time.Duration(rand.IntN(3)) * time.Millisecond):
				}
				return nil, ctx.Err()
			}})
		}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() { _ = s.Start() })
			wg.Go(func() { _, _ = s.Run(context.Background(), "a") })
			wg.Go(func() { s.Jobs() })
			if round%2 == 0 {
				wg.Go(func() { stop(t, s) })
			}
		}
		wg.Wait()
		stop(t, s)
		if n := active.Load(); n != 0 {
			t.Fatalf("round %d: %d runs after the stop", round, n)
		}
	}
}

func TestResult(t *testing.T) {
	r := Result{"sent": 3, "deferred": 2, "failed": 0}
	if got := r.String(); got != "deferred=2 sent=3" {
		t.Errorf("String: %q", got)
	}
	if got := r.LogValue().String(); got != "[deferred=2 sent=3]" {
		t.Errorf("LogValue: %q", got)
	}
	quiet := []string{"deferred"}
	if !r.changed(quiet) || (Result{"failed": 0}).changed(nil) || Result(nil).changed(nil) || (Result{"deferred": 2}).changed(quiet) {
		t.Error("changed: want true for what was sent alone")
	}
}
