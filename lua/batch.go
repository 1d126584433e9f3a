package lua

import (
	"errors"
	"strconv"
	"sync/atomic"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// ErrNotRun is the error of a result whose batch was not run.
var ErrNotRun = errors.New("the batch of this call was not run")

// Result is the outcome of one call, to be read after [Batch.Run] returned.
type Result[T any] struct {
	reply T
	err   error
}

// Get returns the reply, or why there is none: a [*CallError], or [ErrNotRun].
func (r *Result[T]) Get() (T, error) { return r.reply, r.err }

// Batch gathers calls. It is not safe for concurrent use and is run once.
type Batch struct {
	runner *Runner
	calls  []*call
	ran    bool
}

// Len is the number of calls in the batch.
func (b *Batch) Len() int { return len(b.calls) }

// call is one script call on its way.
type call struct {
	script *script
	scope  reservation.Scope
	keys   []string
	args   []any // the whole command
	settle func(reply any, err error)

	invalid error // the caller's mistake: it is never sent
	settled bool  // owned by Run's own goroutine
}

// failure types what went wrong with the call.
func (c *call) failure(k kind, cause error) *CallError {
	return &CallError{Script: c.script.name, Scope: c.scope, Key: c.keys[0], Kind: k, Cause: cause}
}

// enqueue adds a call of a script to the batch. parse reads a reply of n
// elements.
func enqueue[T any](
	b *Batch, s *script, scope reservation.Scope, keys []string, argv []any, n int, parse func(*values) T,
) *Result[T] {
	result := &Result[T]{err: ErrNotRun}
	c := &call{script: s, scope: scope, keys: keys}
	c.invalid = scope.Validate()
	c.args = make([]any, 0, 3+len(keys)+len(argv))
	c.args = append(c.args, s.command, s.sha, len(keys))
	for _, key := range keys {
		c.args = append(c.args, key)
	}
	c.args = append(c.args, argv...)
	c.settle = func(reply any, err error) {
		if err != nil {
			result.err = err
			return
		}
		v := newValues(reply, n)
		parsed := parse(v)
		if v.err != nil {
			result.err = c.failure(ErrBadReply, v.err)
			return
		}
		result.reply, result.err = parsed, nil
	}
	b.calls = append(b.calls, c)
	return result
}

// command is a script call on the wire.
//
// The client library repeats a command, or a whole pipeline, whose reply it
// did not get, unless NoRetry says otherwise: see (*baseClient)
// .generalProcessPipelineFrom and .processWithRetry of go-redis 9.23. Args is
// called by the library at one place only, where it writes the command to a
// connection; from then on the outcome may be unknown.
type command struct {
	*redis.Cmd
	written atomic.Bool
}

func (c *command) NoRetry() bool { return true }

func (c *command) Args() []any {
	c.written.Store(true)
	return c.Cmd.Args()
}

func decimal(n int64) string { return strconv.FormatInt(n, 10) }
