// Package schedule runs the workers: each is one job under robfig/cron that
// never overlaps itself, survives its own panics, ends within a time limit and
// can also be run by hand (protocol §4).
//
// Every run, scheduled or by hand, goes through the same steps:
//
//	pause → gate → overlap guard → time limit → recovery → the job
//
// Recovery is the innermost step: a panic ends one run with an error and gives
// back everything that the outer steps hold, so that the next tick runs.
package schedule

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/robfig/cron/v3"
)

// Job is one worker.
type Job struct {
	// Name is the job's name in commands, logs and metrics.
	Name string
	// Schedule is "@every 300ms", or six cron fields beginning with the second,
	// in UTC; see [ParseSchedule].
	Schedule string
	// Limit is the longest time of one run; its context ends then.
	Limit time.Duration
	// Quiet names items that alone are not worth a line in the log: what was
	// looked at and still waits.
	Quiet []string
	// Run does one pass. It returns soon after its context ends, and what it has
	// done so far even when it fails.
	Run func(ctx context.Context) (Result, error)
}

func (j Job) validate() error {
	switch {
	case j.Name == "":
		return errors.New("a job has no name")
	case j.Run == nil:
		return fmt.Errorf("job %s: has nothing to run", j.Name)
	case j.Limit <= 0:
		return fmt.Errorf("job %s: limit %s is not above 0", j.Name, j.Limit)
	}
	return nil
}

// Result is what one run did: how many items met which fate.
type Result map[string]int

// changed says whether the run did anything but the quiet items.
func (r Result) changed(quiet []string) bool {
	for name, n := range r {
		if n != 0 && !slices.Contains(quiet, name) {
			return true
		}
	}
	return false
}

// LogValue renders the counts that are not zero, by name.
func (r Result) LogValue() slog.Value {
	var attrs []slog.Attr
	for _, name := range slices.Sorted(maps.Keys(r)) {
		if r[name] != 0 {
			attrs = append(attrs, slog.Int(name, r[name]))
		}
	}
	return slog.GroupValue(attrs...)
}

// String is the counts that are not zero, such as "deferred=2 sent=10".
func (r Result) String() string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(r)) {
		if r[name] != 0 {
			parts = append(parts, fmt.Sprintf("%s=%d", name, r[name]))
		}
	}
	return strings.Join(parts, " ")
}

// Outcome is how a run ended.
type Outcome string

// The outcomes.
const (
	Succeeded Outcome = "success"
	Failed    Outcome = "error"
	Panicked  Outcome = "panic"
	TimedOut  Outcome = "timeout"   // failed after its time limit
	Cancelled Outcome = "cancelled" // failed because the scheduler or the caller stopped it
)

// Run is one run of a job.
type Run struct {
	Job      string
	Manual   bool // by hand rather than by the schedule
	Started  time.Time
	Finished time.Time // zero while it is running
	Outcome  Outcome
	Items    Result
	Err      error  // nil exactly when Outcome is Succeeded
	Changed  bool   // it did something that is worth a line in the log
	TraceID  string // of its trace; empty if it was not traced
}

// Reasons for which a run does not take place.
var (
	ErrUnknownJob     = errors.New("there is no such job")
	ErrAlreadyRunning = errors.New("already running")
	ErrPaused         = errors.New("paused")
	ErrStopped        = errors.New("the scheduler has been stopped")
)

// every is a fixed pause, of any length: cron's own has whole seconds only. The
// first run comes after a delay of its own. Only cron's goroutine calls Next.
type every struct {
	pause   time.Duration
	first   time.Duration
	started bool
}

func (e *every) Next(t time.Time) time.Time {
	if !e.started {
		e.started = true
		return t.Add(e.first)
	}
	return t.Add(e.pause)
}

var parser = cron.NewParser(cron.Second | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)

// ParseSchedule reads "@every <duration>" (of 10 ms or more), a descriptor such
// as "@hourly", or six cron fields beginning with the second.
func ParseSchedule(spec string) (cron.Schedule, error) {
	if text, ok := strings.CutPrefix(spec, "@every "); ok {
		pause, err := time.ParseDuration(strings.TrimSpace(text))
		if err != nil {
			return nil, fmt.Errorf("schedule %q: want @every and a duration such as 300ms: %w", spec, err)
		}
		if pause < 10*time.Millisecond {
			return nil, fmt.Errorf("schedule %q: shorter than 10ms", spec)
		}
		return &every{pause: pause, first: pause}, nil
	}
	s, err := parser.Parse(spec)
	if err != nil {
		return nil, fmt.Errorf("schedule %q: %w", spec, err)
	}
	return s, nil
}
