package schedule

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/robfig/cron/v3"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/trace"
)

// Recorder observes runs. Its methods are called from the run's goroutine and
// return at once.
type Recorder interface {
	JobStarted(run Run)
	JobFinished(run Run)
	// JobSkipped reports a scheduled run that did not take place.
	JobSkipped(job string, reason error)
}

// Gate decides outside this process whether a run may take place: another
// process may be running the job, or a person may have paused it.
type Gate interface {
	// Enter returns a function that gives back what the run holds, or an error
	// that says why it may not run: [ErrAlreadyRunning], [ErrPaused], or that
	// the question could not be answered, which also means no.
	Enter(ctx context.Context, job string, manual bool) (leave func(), err error)
}

// Options is what a [Scheduler] needs. All are optional.
type Options struct {
	Logger   *slog.Logger // nil: [slog.Default]
	Recorder Recorder
	Gate     Gate
}

// Scheduler holds the jobs. It goes once from new to started to stopped; jobs
// can be run by hand before it is started, which is how a single pass is made.
type Scheduler struct {
	opts   Options
	cron   *cron.Cron
	base   context.Context //nolint:containedctx // the scheduler's life, to which every run is bound
	cancel context.CancelFunc

	mu      sync.Mutex
	jobs    []*entry
	started bool
	stopped bool
	running sync.WaitGroup // grows only under mu and while not stopped
}

// entry is one job and its state, which Scheduler.mu guards.
type entry struct {
	job    Job
	when   cron.Schedule
	id     cron.EntryID
	paused bool
	busy   bool
	began  time.Time // of the run that is going on
	last   *Run
	due    atomic.Pointer[time.Time] // when cron is to start it next; not guarded by mu
}

// New returns a scheduler without jobs.
func New(opts Options) *Scheduler {
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	base, cancel := context.WithCancel(context.Background())
	return &Scheduler{
		opts:   opts,
		cron:   cron.New(cron.WithLocation(time.UTC), cron.WithLogger(cron.DiscardLogger)),
		base:   base,
		cancel: cancel,
	}
}

// Add registers a job. It fails after [Scheduler.Start], for a second job of
// the same name and for a schedule that cannot be read.
func (s *Scheduler) Add(job Job) error {
	if err := job.validate(); err != nil {
		return err
	}
	when, err := ParseSchedule(job.Schedule)
	if err != nil {
		return fmt.Errorf("job %s: %w", job.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.started || s.stopped {
		return fmt.Errorf("job %s: added after the scheduler was started", job.Name)
	}
	if s.find(job.Name) != nil {
		return fmt.Errorf("job %s: added twice", job.Name)
	}
	s.jobs = append(s.jobs, &entry{job: job, when: when})
	return nil
}

// find returns the named job or nil; the caller holds mu.
func (s *Scheduler) find(name string) *entry {
	i := slices.IndexFunc(s.jobs, func(e *entry) bool { return e.job.Name == name })
	if i < 0 {
		return nil
	}
	return s.jobs[i]
}

// Start begins to run the jobs and returns at once. The first runs of jobs with
// a fixed pause are spread over that pause, the first job's comes at once. A
// second call does nothing; after [Scheduler.Stop] it fails.
func (s *Scheduler) Start() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return ErrStopped
	}
	if s.started {
		return nil
	}
	s.started = true
	for i, e := range s.jobs {
		if ev, ok := e.when.(*every); ok {
			ev.first = ev.pause * time.Duration(i) / time.Duration(len(s.jobs))
		}
		e.id = s.cron.Schedule(noting{e.when, &e.due}, cron.FuncJob(func() { s.tick(e) }))
	}
	s.cron.Start()
	return nil
}

// Stop ends all runs through their contexts, waits for them until ctx ends, and
// says which are still going on then. It may be called at any time and again.
func (s *Scheduler) Stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	s.cancel()
	ticks := s.cron.Stop()

	done := make(chan struct{})
	go func() {
		defer close(done)
		<-ticks.Done()   // scheduled runs, their last log line included
		s.running.Wait() // runs by hand
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("stop jobs: still running: %s: %w", strings.Join(s.busy(), ", "), context.Cause(ctx))
	}
}

func (s *Scheduler) busy() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for _, e := range s.jobs {
		if e.busy {
			names = append(names, e.job.Name)
		}
	}
	return names
}

// Run runs a job now, in the caller's goroutine, and returns what it did. The
// error says why it did not run, or is that of the run. A paused job can be run
// by hand; a running one cannot ([ErrAlreadyRunning]).
func (s *Scheduler) Run(ctx context.Context, name string) (Run, error) {
	s.mu.Lock()
	e := s.find(name)
	s.mu.Unlock()
	if e == nil {
		return Run{}, fmt.Errorf("job %s: %w", name, ErrUnknownJob)
	}
	run, err := s.try(ctx, e, true)
	if err != nil {
		return Run{}, fmt.Errorf("job %s: %w", name, err)
	}
	return run, run.Err
}

// Pause keeps a job from being run by the schedule; a run that is going on ends
// as usual.
func (s *Scheduler) Pause(name string) error { return s.setPaused(name, true) }

// Resume undoes [Scheduler.Pause].
func (s *Scheduler) Resume(name string) error { return s.setPaused(name, false) }

func (s *Scheduler) setPaused(name string, paused bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.find(name)
	if e == nil {
		return fmt.Errorf("job %s: %w", name, ErrUnknownJob)
	}
	e.paused = paused
	return nil
}

// Status is what is known of a job.
type Status struct {
	Name     string
	Schedule string
	Limit    time.Duration
	Paused   bool
	Running  bool
	Next     time.Time // zero while the scheduler is not started
	Last     *Run      // the last run that ended, nil if there is none
}

// Jobs lists all jobs in the order in which they were added.
func (s *Scheduler) Jobs() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Status, 0, len(s.jobs))
	for _, e := range s.jobs {
		st := Status{
			Name: e.job.Name, Schedule: e.job.Schedule, Limit: e.job.Limit,
			Paused: e.paused, Running: e.busy, Last: e.last,
		}
		if s.started && !s.stopped {
			st.Next = s.cron.Entry(e.id).Next
		}
		out = append(out, st)
	}
	return out
}

// tick is a scheduled run. Nobody waits for its error, so it is logged.
func (s *Scheduler) tick(e *entry) {
	run, err := s.try(s.base, e, false)
	log := s.opts.Logger.With("job", e.job.Name)
	switch {
	case errors.Is(err, ErrStopped):
		return
	case errors.Is(err, ErrAlreadyRunning), errors.Is(err, ErrPaused):
		log.Debug("job skipped", "reason", err)
	case err != nil:
		log.Warn("job not run", "error", err)
	default:
		logRun(log, run)
	}
	if err != nil && s.opts.Recorder != nil {
		s.opts.Recorder.JobSkipped(e.job.Name, err)
	}
}

func logRun(log *slog.Logger, run Run) {
	attrs := []any{"latency_ms", run.Finished.Sub(run.Started).Milliseconds(), "items", run.Items}
	if run.TraceID != "" {
		attrs = append(attrs, "trace_id", run.TraceID)
	}
	switch {
	case run.Outcome == Cancelled:
		log.Info("job cancelled", attrs...)
	case run.Err != nil:
		attrs = append(attrs, "outcome", string(run.Outcome), "error", run.Err)
		if p, ok := errors.AsType[*panicError](run.Err); ok {
			attrs = append(attrs, "stack", string(p.stack))
		}
		log.Error("job failed", attrs...)
	case run.Changed:
		log.Info("job done", attrs...)
	default:
		log.Debug("job done", attrs...)
	}
}

// try runs the job if it may: the steps of the package comment.
func (s *Scheduler) try(ctx context.Context, e *entry, manual bool) (Run, error) {
	if err := s.acquire(e, manual); err != nil {
		return Run{}, err
	}
	defer s.release(e)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	detach := context.AfterFunc(s.base, cancel) // a run by hand ends with the scheduler, too
	defer detach()
	ctx, cancelLimit := context.WithTimeout(ctx, e.job.Limit)
	defer cancelLimit()

	if s.opts.Gate != nil {
		leave, err := s.opts.Gate.Enter(ctx, e.job.Name, manual)
		if err != nil {
			return Run{}, err
		}
		defer leave()
	}
	run := Run{Job: e.job.Name, Manual: manual, Started: time.Now()}
	if s.opts.Recorder != nil {
		s.opts.Recorder.JobStarted(run)
	}
	ctx, span := otel.Tracer(tracerName).Start(ctx, "job "+e.job.Name, trace.WithNewRoot())
	run.TraceID = traceID(span)
	run.Items, run.Err = recovered(ctx, e.job.Run)
	run.Finished = time.Now()
	run.Outcome, run.Changed = outcome(ctx, run.Err), run.Items.changed(e.job.Quiet)
	endSpan(span, run)
	s.mu.Lock()
	e.last = &run
	s.mu.Unlock()
	if s.opts.Recorder != nil {
		s.opts.Recorder.JobFinished(run)
	}
	return run, nil
}

// acquire takes the job for one run, or says why it may not run.
func (s *Scheduler) acquire(e *entry, manual bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.stopped:
		return ErrStopped
	case e.paused && !manual:
		return ErrPaused
	case e.busy:
		return ErrAlreadyRunning
	}
	e.busy, e.began = true, time.Now()
	s.running.Add(1)
	return nil
}

func (s *Scheduler) release(e *entry) {
	s.mu.Lock()
	e.busy = false
	s.mu.Unlock()
	s.running.Done()
}

// outcome classifies a run's error by the state of its context.
func outcome(ctx context.Context, err error) Outcome {
	_, panicked := errors.AsType[*panicError](err)
	switch {
	case err == nil:
		return Succeeded
	case panicked:
		return Panicked
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return TimedOut
	case ctx.Err() != nil:
		return Cancelled
	default:
		return Failed
	}
}

// panicError is what a panic in a job becomes.
type panicError struct {
	value any
	stack []byte
}

func (p *panicError) Error() string { return fmt.Sprintf("panic: %v", p.value) }

func recovered(ctx context.Context, run func(context.Context) (Result, error)) (items Result, err error) {
	defer func() {
		if v := recover(); v != nil {
			items, err = nil, &panicError{value: v, stack: debug.Stack()}
		}
	}()
	return run(ctx)
}
