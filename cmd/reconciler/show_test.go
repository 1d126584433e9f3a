package main

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// TestShow runs the three commands on real services: words in the table, the
// same in JSON, no raw user id anywhere, and exit status 3 for what is silent.
func TestShow(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	r := newReconciled(t, stack)
	topic, group := stacktest.Topic(t, stack, 2)
	r.env = append(r.env, "RECONCILER_ROCKETMQ_NAME_SERVERS="+stack.NameServer().Addr(),
		"RECONCILER_ROCKETMQ_TOPIC="+topic, "RECONCILER_ROCKETMQ_CONSUMER_GROUP="+group, "RECONCILER_MODE=act")
	const user = "a-user-nobody-may-see"
	id := reservation.NewID([]byte("s"), r.scope.ActivityID, r.scope.SKUID, user, "q-1")
	runner, err := lua.NewRunner(r.redis)
	if err != nil {
		t.Fatal(err)
	}
	batch := runner.Batch()
	batch.Reserve(r.scope, lua.ReserveArgs{
		RequestID: "q-1", ReservationID: id, UserID: user, TTLMS: time.Hour.Milliseconds(), SchemaVersion: 1, MessageID: reservation.MessageID(id),
	})
	batch.Transition(r.scope, lua.TransitionArgs{ReservationID: id, Target: reservation.StatusEnqueued})
	if err := batch.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	run := func(want int, args ...string) string {
		t.Helper()
		var stdout, stderr strings.Builder
		for deadline := time.Now().Add(90 * time.Second); ; {
			cmd := exec.CommandContext(t.Context(), "reconciler", args...)
			cmd.Env, cmd.Dir = r.env, t.TempDir()
			stdout.Reset()
			stderr.Reset()
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			err := cmd.Run()
			if cmd.ProcessState != nil && cmd.ProcessState.ExitCode() == want {
				break
			}
			// A busy broker may not answer in time.
			if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() != exitIncomplete || time.Now().After(deadline) {
				t.Fatalf("%v: %v, want status %d\n%s%s", args, err, want, &stdout, &stderr)
			}
		}
		if all := stdout.String() + stderr.String(); strings.Contains(all, user) {
			t.Errorf("%v shows a user id:\n%s", args, all)
		}
		return stdout.String()
	}
	for _, args := range [][]string{{"reservation", id}, {"request", "q-1"}, {"user", user}} {
		text := run(0, append([]string{"show"}, args...)...)
		for _, want := range []string{id, "ENQUEUED", "row 10 of the decision table", "waits and looks again", "fencer", "no daemon holds the lease"} {
			if !strings.Contains(text, want) {
				t.Errorf("show %v does not say %q:\n%s", args, want, text)
			}
		}
	}
	var one view.Explanation
	decode(t, run(0, "show", "reservation", id, "--output", "json"), &one)
	if one.ReservationID != id || one.Scope != r.scope.Tag() || one.Redis == nil || one.Decision == nil || one.Decision.Row != "10" || one.Next.At == nil {
		t.Errorf("%+v", one)
	}
	var request view.RequestFinding
	decode(t, run(0, "show", "request", "q-1", "--activity", r.scope.ActivityID, "--output", "json"), &request)
	if len(request.Results) != 1 || request.Results[0].Status != "QUEUED" || len(request.Reservations) != 1 {
		t.Errorf("%+v", request)
	}
	var found view.UserFinding
	decode(t, run(0, "show", "user", user, "-o", "json"), &found)
	if len(found.Markers) != 1 || found.Markers[0].ReservationID != id || len(found.UserIDHash) != 32 {
		t.Errorf("%+v", found)
	}
	run(1, "show", "reservation", "nothing")
	run(1, "show", "request", "nothing")
	run(1, "show", "user", "nobody")
	run(1, "show", "reservation", id, "--scope", "nonsense")

	env := r.env
	for setting, source := range map[string]string{
		"RECONCILER_REDIS_ADDRS=127.0.0.1:1": "redis", "RECONCILER_POSTGRES_URL=postgres://x@127.0.0.1:1/x": "postgres",
		"RECONCILER_ROCKETMQ_NAME_SERVERS=127.0.0.1:1": "rocketmq",
	} {
		r.env = append(slices.Clip(env), setting)
		text := run(3, "show", "reservation", id, "--scope", r.scope.Tag())
		if !strings.Contains(text, "DID NOT ANSWER") || !strings.Contains(text, source) {
			t.Errorf("%s away:\n%s", source, text)
		}
	}
}

func decode(t *testing.T, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Errorf("%v\n%s", fmt.Errorf("decode: %w", err), text)
	}
}
