package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/reservation"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"reconciler": main})
}

// TestScripts runs the command lines of testdata/script that need no service.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata/script", RequireExplicitExec: true, Cmds: scriptCommands})
}

// TestServiceScripts runs those that need PostgreSQL. Each script has a
// database of its own: $RECONCILER_POSTGRES_URL, migrated and without entries,
// or, for scripts named fresh*, without even a schema. $OPERATOR_URL and
// $DAEMON_URL are its URLs for roles that have no more rights than these.
// $REDIS_ADDRS is a Redis, of which $ACTIVITY is the script's own.
func TestServiceScripts(t *testing.T) {
	stack := stacktest.Shared(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata/services", RequireExplicitExec: true, Cmds: scriptCommands,
		Setup: func(env *testscript.Env) error {
			url := stacktest.Database(t, stack)
			if strings.HasPrefix(filepath.Base(env.WorkDir), "script-fresh") {
				if err := dropSchemas(t.Context(), url); err != nil {
					return err
				}
			} else {
				if err := seed(t.Context(), url); err != nil {
					return err
				}
				if err := storeRuns(t.Context(), url); err != nil {
					return err
				}
				env.Setenv("OPERATOR_URL", stacktest.LoginURL(t, stack, url, "seckill_operator"))
				env.Setenv("DAEMON_URL", stacktest.LoginURL(t, stack, url, "seckill_daemon"))
			}
			env.Setenv("RECONCILER_POSTGRES_URL", url)
			env.Setenv("REDIS_ADDRS", stack.Redis().Addr())
			env.Setenv("ACTIVITY", stacktest.Scope(t).ActivityID)
			return nil
		},
	})
}

func dropSchemas(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, "DROP SCHEMA shop CASCADE; DROP SCHEMA seckill CASCADE")
	return err
}

// seed registers what the commands show and change: two buckets of one
// version, a task for one of them and one for all, and two brokers.
func seed(ctx context.Context, url string) error {
	store, err := pgstore.Open(ctx, pgstore.Config{URL: url})
	if err != nil {
		return err
	}
	defer store.Close()
	now := time.Now().UTC().Truncate(time.Second)
	err = store.RegisterVersion(ctx, pgstore.Version{
		ActivityID: "10001", SKUID: "88001", Version: 7, Total: 5, Buckets: 2,
		StartsAt: now, EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(24 * time.Hour),
	}, []pgstore.Bucket{{ID: 0, Initial: 3, State: pgstore.ScopeActive, Confirmed: true}, {ID: 1, Initial: 2}}, "test")
	if err != nil {
		return err
	}
	err = store.ReportTasks(ctx, []reservation.TaskReport{
		{Kind: "release_storm", Scope: "a:10001:s:88001:v:7:b:0", Cause: "max_release", Count: 25, Sample: []string{"rid1", "rid2"}},
		{Kind: "send_blocked", Cause: "no_route", Count: 3},
	})
	if err != nil {
		return err
	}
	return store.RecordQueues(ctx, []pgstore.ExpectedQueue{
		{Broker: "broker-a", Topic: "seckill-order", Queues: 8}, {Broker: "broker-b", Topic: "seckill-order", Queues: 4},
	})
}

var scriptCommands = map[string]func(ts *testscript.TestScript, neg bool, args []string){
	// status N program … runs a program that must end with status N.
	"status": func(ts *testscript.TestScript, _ bool, args []string) {
		err := ts.Exec(args[1], args[2:]...)
		got := 0
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			got = exit.ExitCode()
		} else if err != nil {
			ts.Fatalf("%v", err)
		}
		if strconv.Itoa(got) != args[0] {
			ts.Fatalf("status %d, want %s", got, args[0])
		}
	},
	// json checks that standard output is one JSON value and nothing else.
	"json": func(ts *testscript.TestScript, _ bool, _ []string) {
		dec := json.NewDecoder(strings.NewReader(ts.ReadFile("stdout")))
		var value any
		ts.Check(dec.Decode(&value))
		if err := dec.Decode(&value); !errors.Is(err, io.EOF) {
			ts.Fatalf("standard output goes on after the JSON: %v", err)
		}
	},
}

func TestExitStatus(t *testing.T) {
	wrapped := func(err error) error { return fmt.Errorf("list tasks: %w", err) }
	for _, tt := range []struct {
		err  error
		want int
	}{
		{nil, 0},
		{errors.New("x"), 1},
		{wrapped(&verdict{exitDrift, nil}), 2},
		{wrapped(&verdict{exitLocked, errors.New("locked")}), 4},
		{&verdict{exitFailed, &net.OpError{Op: "dial"}}, 1},
		{wrapped(&pgconn.ConnectError{}), 3},
		{wrapped(&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}), 3},
		{wrapped(context.DeadlineExceeded), 3},
		{wrapped(io.ErrUnexpectedEOF), 3},
		{errors.Join(errors.New("x"), &net.OpError{Op: "read"}), 3},
		{wrapped(&pgconn.PgError{Code: "57P03"}), 3}, // starting up
		{wrapped(&pgconn.PgError{Code: "28P01"}), 1}, // wrong password
		{wrapped(&pgconn.PgError{Code: "42501"}), 1}, // missing right
		{&os.PathError{Op: "open", Err: syscall.ENOENT}, 1},
		{context.Canceled, 1},
		{wrapped(pgstore.ErrUnavailable), 3},
		{wrapped(pgstore.ErrInRecovery), 3},
		{wrapped(redisstore.ErrUnreachable), 3},
		{wrapped(&pgstore.LeaseHeldError{}), 4},
	} {
		if got := exitStatus(tt.err); got != tt.want {
			t.Errorf("%v: status %d, want %d", tt.err, got, tt.want)
		}
	}
}

// ours lists the commands that are the project's own, without cobra's.
func ours(cmd *cobra.Command) []*cobra.Command {
	out := []*cobra.Command{cmd}
	for _, child := range cmd.Commands() {
		if child.Name() != "help" && child.Name() != "completion" {
			out = append(out, ours(child)...)
		}
	}
	return out
}

// words splits a command line, quotes and all.
var words = regexp.MustCompile(`"[^"]*"|\S+`)

// TestHelp: every command says what it does and shows examples that are valid
// command lines of it.
func TestHelp(t *testing.T) {
	for _, cmd := range ours(newRoot(&app{})) {
		path := cmd.CommandPath()
		if cmd.Short == "" {
			t.Errorf("%s: no description", path)
		}
		if cmd.Example == "" {
			t.Errorf("%s: no example", path)
		}
		own := cmd.HasSubCommands()
		for line := range strings.Lines(strings.ReplaceAll(cmd.Example, "\\\n", " ")) {
			line, _, _ = strings.Cut(line, "   #")
			words := words.FindAllString(line, -1)
			for len(words) > 0 && strings.Contains(words[0], "=") {
				words = words[1:] // a variable before the command
			}
			if len(words) == 0 || words[0] != "reconciler" {
				t.Errorf("%s: example %q is not a command line", path, line)
				continue
			}
			root := newRoot(&app{}) // flags keep their values
			found, rest, err := root.Find(words[1:])
			if err == nil {
				err = found.ParseFlags(rest)
			}
			if err == nil {
				err = found.ValidateArgs(found.Flags().Args())
			}
			if err == nil {
				err = found.ValidateRequiredFlags()
			}
			if err != nil || found.HasSubCommands() {
				t.Errorf("%s: example %q is not valid: %v", path, strings.TrimSpace(line), err)
			}
			own = own || found.CommandPath() == path
		}
		if !own {
			t.Errorf("%s: no example of the command itself", path)
		}
	}
}

// run executes a command line in this process.
func run(t *testing.T, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = execute(t.Context(), args, strings.NewReader(""), &out, &errs)
	return status, out.String(), errs.String()
}

// wantJSON checks that standard output is one JSON value and nothing else, and
// decodes it.
func wantJSON(t *testing.T, stdout string, into any) {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(stdout))
	if err := dec.Decode(into); err != nil {
		t.Fatalf("standard output is not JSON: %v\n%s", err, stdout)
	}
	if rest, _ := io.ReadAll(dec.Buffered()); strings.TrimSpace(string(rest)) != "" {
		t.Errorf("standard output goes on after the JSON: %s", rest)
	}
}

func TestConfigShowJSON(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("RECONCILER_REDIS_PASSWORD", "hunter2")
	t.Setenv("RECONCILER_POSTGRES_URL", "postgres://u:hunter2@db/s")
	status, stdout, stderr := run(t, "config", "show", "--output", "json", "--log-level", "debug")
	if status != 0 || stderr != "" {
		t.Fatalf("status %d: %s", status, stderr)
	}
	var got struct {
		Schema   int
		File     string
		Settings []struct{ Key, Value, Origin string }
	}
	wantJSON(t, stdout, &got)
	if got.Schema != 1 || got.File != "" || strings.Contains(stdout, "hunter2") {
		t.Errorf("got %s", stdout)
	}
	origins := map[string]string{}
	for _, s := range got.Settings {
		if s.Origin != "" {
			origins[s.Key] = s.Origin
		}
	}
	want := "map[log.level:--log-level postgres.url:RECONCILER_POSTGRES_URL redis.password:RECONCILER_REDIS_PASSWORD]"
	if fmt.Sprint(origins) != want {
		t.Errorf("origins %v, want %s", origins, want)
	}
}
