package lua

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reservation"
)

// serverError is an error reply of a server.
type serverError string

func (e serverError) Error() string { return string(e) }
func (serverError) RedisError()     {}

func TestKindOf(t *testing.T) {
	reset := &net.OpError{Op: "read", Err: errors.New("connection reset by peer")}
	refused := &net.OpError{Op: "dial", Err: errors.New("connection refused")}
	cases := []struct {
		err     error
		written bool
		want    kind
		class   Class
	}{
		{serverError("NOSCRIPT No matching script. Please use EVAL."), true, ErrNoScript, ClassNotExecuted},
		{serverError("WRONGDATA seckill:{x}:stock"), true, ErrWrongData, ClassData},
		{serverError("OOM allow-oom flag is not set on the script, can not run it when used memory > 'maxmemory'"), true, ErrOutOfMemory, ClassConfiguration},
		{serverError("CROSSSLOT Keys in request don't hash to the same slot"), true, ErrCrossSlot, ClassConfiguration},
		{serverError("MOVED 1 127.0.0.1:1"), true, ErrRedirected, ClassNotExecuted},
		{serverError("ASK 1 127.0.0.1:1"), true, ErrRedirected, ClassNotExecuted},
		{serverError("TRYAGAIN Multiple keys request during rehashing of slot"), true, ErrTryAgain, ClassNotExecuted},
		{serverError("CLUSTERDOWN The cluster is down"), true, ErrClusterDown, ClassNotExecuted},
		{serverError("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'."), true, ErrMasterDown, ClassNotExecuted},
		{serverError("READONLY You can't write against a read only replica."), true, ErrReadOnly, ClassNotExecuted},
		{serverError("NOREPLICAS Not enough good replicas to write."), true, ErrNotEnoughReplicas, ClassNotExecuted},
		{serverError("MISCONF Errors writing to the AOF file: No space left on device"), true, ErrPersistence, ClassNotExecuted},
		{serverError("LOADING Redis is loading the dataset in memory"), true, ErrLoading, ClassNotExecuted},
		{serverError("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."), true, ErrBusy, ClassNotExecuted},
		{serverError("NOPERM User d has no permissions to run the 'evalsha' command"), true, ErrNoPermission, ClassConfiguration},
		{serverError("NOAUTH Authentication required."), false, ErrNoPermission, ClassConfiguration},
		{serverError("WRONGPASS invalid username-password pair or user is disabled."), false, ErrNoPermission, ClassConfiguration},
		{serverError("ERR max number of clients reached"), false, ErrMaxClients, ClassNotExecuted},
		{serverError("ERR unknown command"), true, ErrRefused, ClassConfiguration},
		{serverError("BUSYGROUP something else"), true, ErrRefused, ClassConfiguration},
		// raised in the middle of a script: writes may have happened before it
		{serverError("ERR The user executing the script can't run this command or subcommand script: ab, on @user_script:9."), true, ErrScriptFailed, ClassUnknown},
		{serverError("NOPERM x script: ab, on @user_script:9."), true, ErrScriptFailed, ClassUnknown},
		{io.EOF, true, ErrOutcomeUnknown, ClassUnknown},
		{reset, true, ErrOutcomeUnknown, ClassUnknown},
		{os.ErrDeadlineExceeded, true, ErrOutcomeUnknown, ClassUnknown},
		{context.DeadlineExceeded, true, ErrOutcomeUnknown, ClassUnknown},
		{context.Canceled, true, ErrOutcomeUnknown, ClassUnknown},
		{errors.New("anything else"), true, ErrOutcomeUnknown, ClassUnknown},
		{refused, true, ErrUnreachable, ClassNotExecuted},
		{fmt.Errorf("wrapped: %w", refused), true, ErrUnreachable, ClassNotExecuted},
		{redis.ErrPoolTimeout, true, ErrUnreachable, ClassNotExecuted},
		{context.DeadlineExceeded, false, ErrUnreachable, ClassNotExecuted},
		{io.EOF, false, ErrUnreachable, ClassNotExecuted},
	}
	for _, c := range cases {
		got := kindOf(c.err, c.written)
		failure := fmt.Errorf("worker: %w", (&call{script: reserve, keys: []string{"k"}}).failure(got, c.err))
		if got != c.want || Classify(failure) != c.class || !errors.Is(failure, c.want) || !errors.Is(failure, c.err) {
			t.Errorf("%v (written %v): got %q (%s), want %q (%s)", c.err, c.written, got.name, Classify(failure), c.want.name, c.class)
		}
		if KindName(failure) != c.want.name {
			t.Errorf("%v: named %q", c.err, KindName(failure))
		}
	}
	if Classify(nil) != ClassNone || Classify(io.EOF) != ClassUnknown || KindName(io.EOF) != "outcome_unknown" {
		t.Error("errors of another origin are not unknown")
	}
}

// An unexpected shape is an error of the call, never a panic and never a code.
func TestBadReplies(t *testing.T) {
	replies := []any{
		"OK", int64(0),
		[]any{},
		[]any{int64(0)},
		[]any{"0", "r1", int64(1), "QUEUED", int64(0)},
		[]any{int64(77), "r1", int64(1), "QUEUED", int64(0)},
		[]any{int64(0), int64(5), int64(1), "QUEUED", int64(0)},
		[]any{int64(0), "r1", "1", "QUEUED", int64(0)},
		[]any{int64(0), "r1", int64(1), nil, int64(0)},
		[]any{int64(0), "r1", int64(1), "QUEUED", int64(2)},
		[]any{int64(0), "r1", int64(-2), "QUEUED", int64(0)},
		[]any{int64(0), "r1", int64(1), "QUEUED", int64(0), "more"},
		map[any]any{"a": 1},
		[]any{int64(0), errors.New("nested"), int64(1), "QUEUED", int64(0)},
	}
	scope := reservation.Scope{ActivityID: "a", SKUID: "s"}
	for _, reply := range replies {
		b := &Batch{}
		got := b.Reserve(scope, ReserveArgs{})
		b.calls[0].settle(reply, nil)
		if r, err := got.Get(); !errors.Is(err, ErrBadReply) || r != (ReserveReply{}) || Classify(err) != ClassUnknown {
			t.Errorf("%v: %+v, %v", reply, r, err)
		}
	}
	b := &Batch{}
	snap := b.Snapshot(scope)
	b.calls[0].settle([]any{
		int64(1), "ACTIVE", "", int64(1), int64(1), int64(-3), "", int64(0), "", int64(0), "",
	}, nil)
	if _, err := snap.Get(); !errors.Is(err, ErrBadReply) {
		t.Errorf("a negative number: %v", err)
	}
}

// Every code has a name of its own, the one of spec §4.
func TestCodeNames(t *testing.T) {
	for _, pair := range [][2]string{
		{ReserveAccepted.String(), "ACCEPTED"},
		{ReserveBadArgument.String(), "BAD_ARGUMENT"},
		{TransitionIllegal.String(), "ILLEGAL_TRANSITION"},
		{CompensateIDConflict.String(), "RESERVATION_ID_CONFLICT"},
		{RecordSendStatusChanged.String(), "STATUS_CHANGED"},
		{DeferNoMemberOrNotLater.String(), "NO_MEMBER_OR_NOT_LATER"},
		{ConfirmNotConfirmable.String(), "NOT_CONFIRMABLE"},
		{ReindexTerminal.String(), "TERMINAL"},
		{UnindexNotTerminal.String(), "NOT_TERMINAL"},
		{MarkUserMarkerChanged.String(), "MARKER_CHANGED"},
		{RestoreDeficit.String(), "DEFICIT"},
		{AdoptOrphanRequestMismatch.String(), "REQUEST_MISMATCH"},
		{ProvisionPartial.String(), "PARTIAL"},
		{SetStateChanged.String(), "CHANGED"},
		{ReserveCode(99).String(), "UNKNOWN_CODE"},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is named %s", pair[1], pair[0])
		}
	}
}

// Flags decide what runs when memory is full and what may run on a replica.
func TestScriptFlags(t *testing.T) {
	entries, err := files.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	flags := map[string]string{
		"compensate": " flags=allow-oom", "transition": " flags=allow-oom", "confirm": " flags=allow-oom",
		"defer": " flags=allow-oom", "record_send": " flags=allow-oom", "unindex": " flags=allow-oom",
		"snapshot": " flags=no-writes", "transfer_read": " flags=no-writes",
	}
	for _, entry := range entries {
		name := strings.TrimSuffix(entry.Name(), ".lua")
		first, _, _ := strings.Cut(load(name).source, "\n")
		if first != "#!lua"+flags[name] {
			t.Errorf("%s begins with %q", entry.Name(), first)
		}
		if _, err := os.Stat(name + ".go"); err != nil {
			t.Errorf("%s has no wrapper of its name: %v", entry.Name(), err)
		}
	}
	if len(entries) < 15 {
		t.Errorf("%d scripts", len(entries))
	}
}

// raw is a call of a source that is no script of the package.
func raw(b *Batch, source string, keys []string, argv ...any) *Result[int64] {
	s := &script{name: "raw", source: source, sha: scriptSHA(source), command: "evalsha"}
	return enqueue(b, s, reservation.Scope{ActivityID: "a", SKUID: "s"}, keys, argv, 1, func(v *values) int64 { return v.integer(0) })
}

func TestCrossSlot(t *testing.T) {
	for _, target := range stacktest.RedisTargets(t) {
		if !target.Cluster {
			continue
		}
		runner, err := NewRunner(target.Client(t))
		if err != nil {
			t.Fatal(err)
		}
		b := runner.Batch()
		got := raw(b, "return {1}", []string{"seckill:{a}:x", "seckill:{b}:x"})
		good := raw(b, "return {1}", []string{"seckill:{a}:x", "seckill:{a}:y"})
		if err := b.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := got.Get(); !errors.Is(err, ErrCrossSlot) || Classify(err) != ClassConfiguration {
			t.Errorf("%s: %v", target.Name, err)
		}
		if n, err := good.Get(); n != 1 || err != nil {
			t.Errorf("%s: a bad call spoils its neighbour: %d, %v", target.Name, n, err)
		}
	}
}

// An error inside a script may come after writes: its outcome is unknown.
func TestErrorInsideAScript(t *testing.T) {
	for _, target := range stacktest.RedisTargets(t) {
		client := target.Client(t)
		runner, err := NewRunner(client)
		if err != nil {
			t.Fatal(err)
		}
		key := stacktest.Scope(t).StockKey()
		b := runner.Batch()
		got := raw(b, "redis.call('SET', KEYS[1], 'x', 'PX', 60000) return {redis.call('HGET', KEYS[1], 'f')}", []string{key})
		if err := b.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := got.Get(); !errors.Is(err, ErrScriptFailed) || Classify(err) != ClassUnknown {
			t.Errorf("%s: %v", target.Name, err)
		}
		if client.Get(t.Context(), key).Val() != "x" {
			t.Errorf("%s: the write before the error is not there: the class rests on it", target.Name)
		}
	}
}

// deafConn loses the reply of a script: the connection ends once the server has
// answered.
type deafConn struct {
	net.Conn
	deaf, lost atomic.Bool
}

func (c *deafConn) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("evalsha")) {
		c.deaf.Store(true)
	}
	return c.Conn.Write(p)
}

func (c *deafConn) Read(p []byte) (int, error) {
	if c.lost.Load() {
		return 0, io.EOF
	}
	n, err := c.Conn.Read(p)
	if c.deaf.Load() {
		c.lost.Store(true)
		return 0, io.EOF
	}
	return n, err
}

// Even on a client that repeats by default, our command is executed once. An
// ordinary one is executed four times: that is what this package is there for.
func TestNoRetryIsHonouredByTheLibrary(t *testing.T) {
	target := stacktest.RedisTargets(t)[0]
	direct := target.Client(t)
	repeating := redis.NewClient(&redis.Options{
		Addr: target.Addrs[0], ContextTimeoutEnabled: true, MaxRetries: 3, MinRetryBackoff: -1,
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			var d net.Dialer
			conn, err := d.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return &deafConn{Conn: conn}, nil
		},
	})
	defer func() { _ = repeating.Close() }()
	if _, err := NewRunner(repeating); !errors.Is(err, ErrUnsafeClient) {
		t.Fatalf("a client that repeats is accepted: %v", err)
	}
	source := "return {redis.call('INCR', KEYS[1])}"
	if err := direct.ScriptLoad(t.Context(), source).Err(); err != nil {
		t.Fatal(err)
	}
	executed := func(run func(key string)) int64 {
		key := stacktest.Scope(t).StockKey()
		defer direct.Del(t.Context(), key)
		run(key)
		n, err := direct.Get(t.Context(), key).Int64()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}

	ours := executed(func(key string) {
		runner := &Runner{single: repeating, pipeline: 10, inFlight: 1, nodes: map[string]*node{}}
		b := runner.Batch()
		got := raw(b, source, []string{key})
		if err := b.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := got.Get(); !errors.Is(err, ErrOutcomeUnknown) || !errors.Is(err, io.EOF) {
			t.Errorf("got %v", err)
		}
	})
	plain := executed(func(key string) {
		pipe := repeating.Pipeline()
		pipe.EvalSha(t.Context(), scriptSHA(source), []string{key})
		_, _ = pipe.Exec(t.Context())
	})
	if ours != 1 || plain != 4 {
		t.Errorf("our command was executed %d times, want 1; an ordinary one %d times, want 4", ours, plain)
	}
}
