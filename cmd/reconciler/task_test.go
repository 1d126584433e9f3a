package main

import (
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// approvals is a scope with orphans, and the program that approves.
type approvals struct {
	*reconciled
	store *pgstore.Store
	db    *pgxpool.Pool
}

func newApprovals(t *testing.T) *approvals {
	t.Helper()
	stack := stacktest.Shared(t)
	a := &approvals{reconciled: newReconciled(t, stack)}
	a.env = append(a.env, "RECONCILER_MODE=act", "RECONCILER_ROCKETMQ_NAME_SERVERS="+stack.NameServer().Addr())
	var url string
	for _, v := range a.env {
		if value, ok := strings.CutPrefix(v, "RECONCILER_POSTGRES_URL="); ok {
			url = value // the last one counts
		}
	}
	var err error
	if a.store, err = pgstore.Open(t.Context(), pgstore.Config{URL: url}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.store.Close)
	if a.db, err = pgxpool.New(t.Context(), url); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.db.Close)
	return a
}

// orphan makes a reservation whose hash is gone.
func (a *approvals) orphan(n int) string {
	a.t.Helper()
	runner, err := lua.NewRunner(a.redis)
	if err != nil {
		a.t.Fatal(err)
	}
	user, request := fmt.Sprint("u", n), fmt.Sprint("q", n)
	id := reservation.NewID([]byte("secret"), a.scope.ActivityID, a.scope.SKUID, user, request)
	batch := runner.Batch()
	reply := batch.Reserve(a.scope, lua.ReserveArgs{
		RequestID: request, ReservationID: id, UserID: user, TTLMS: time.Minute.Milliseconds(), SchemaVersion: 1, MessageID: reservation.MessageID(id),
	})
	if err := batch.Run(a.t.Context()); err != nil {
		a.t.Fatal(err)
	}
	if r, err := reply.Get(); err != nil || r.Code != lua.ReserveAccepted {
		a.t.Fatalf("reserve: %+v, %v", r, err)
	}
	if err := a.redis.Del(a.t.Context(), a.scope.ReservationKey(id)).Err(); err != nil {
		a.t.Fatal(err)
	}
	return id
}

// task opens the task of the scope's orphans.
func (a *approvals) task() string {
	a.t.Helper()
	tag := a.scope.Tag()
	report := reservation.TaskReport{Kind: reservation.TaskOrphanMember, Scope: tag, Cause: "hash_missing", Count: 1}
	if err := a.store.ReportTasks(a.t.Context(), []reservation.TaskReport{report}); err != nil {
		a.t.Fatal(err)
	}
	tasks, err := a.store.Tasks(a.t.Context(), pgstore.TaskFilter{Scope: &tag, States: pgstore.Unresolved})
	if err != nil || len(tasks) != 1 {
		a.t.Fatalf("%v, %v", tasks, err)
	}
	return strconv.FormatInt(tasks[0].ID, 10)
}

// run runs `reconciler task …`, and wants the status and, in order, the texts
// in its standard output.
func (a *approvals) run(status int, args []string, want ...string) (stdout, stderr string) {
	a.t.Helper()
	cmd := exec.CommandContext(a.t.Context(), "reconciler", append([]string{"task"}, args...)...)
	cmd.Env, cmd.Dir = a.env, a.t.TempDir()
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	got := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		got = exit.ExitCode()
	} else if err != nil {
		a.t.Fatal(err)
	}
	if got != status {
		a.t.Errorf("task %v: status %d, want %d\n%s%s", args, got, status, out.String(), errs.String())
	}
	rest := out.String()
	for _, text := range want {
		_, after, found := strings.Cut(rest, text)
		if !found {
			a.t.Errorf("task %v does not say %q:\n%s%s", args, text, out.String(), errs.String())
		}
		rest = after
	}
	return out.String(), errs.String()
}

func (a *approvals) reserved() string {
	return a.redis.HGet(a.t.Context(), a.scope.StockKey(), "reserved").Val()
}

// What show proposes, approve does, once; without --yes off a terminal, with
// --dry-run and in mode observe it only says so.
func TestTaskApprove(t *testing.T) {
	t.Parallel()
	a := newApprovals(t)
	id := a.orphan(1)
	task := a.task()

	a.run(0, []string{"show", task}, "orphan_member", id, "adopt", "(hash gone)", "NONE", "fence it")
	var shown struct {
		Proposals []view.Proposal `json:"proposals"`
	}
	stdout, _ := a.run(0, []string{"show", task, "--output", "json"})
	wantJSON(t, stdout, &shown)
	if len(shown.Proposals) != 1 || shown.Proposals[0].Action != "adopt" || !shown.Proposals[0].Expected.Indexed {
		t.Errorf("proposals %+v", shown.Proposals)
	}

	by := []string{"approve", task, "--actor", "alice", "--reason", "lost in the failover"}
	for _, more := range [][]string{{"--dry-run"}, {"--dry-run", "--yes"}, nil, {"--yes", "--mode", "observe"}} {
		if len(more) > 1 && more[1] == "--mode" {
			a.env = append(a.env, "RECONCILER_MODE=observe")
			more = more[:1]
		}
		a.run(0, append(by, more...), id, "adopt")
		if a.reserved() != "1" {
			t.Fatalf("%v gave a unit back", more)
		}
	}
	a.env = append(a.env, "RECONCILER_MODE=act")

	var done struct {
		DryRun bool            `json:"dry_run"`
		Tasks  []view.Approval `json:"tasks"`
	}
	stdout, _ = a.run(0, append(by, "--yes", "--output", "json"))
	wantJSON(t, stdout, &done)
	if done.DryRun || len(done.Tasks) != 1 || !done.Tasks[0].Resolved || len(done.Tasks[0].Proposals) != 1 {
		t.Fatalf("%+v", done)
	}
	p := done.Tasks[0].Proposals[0]
	if p.Outcome != "applied" || p.Before.Stock.Reserved != 1 || p.After.Stock.Reserved != 0 || p.After.Status != reservation.StatusReleased {
		t.Errorf("%+v, before %+v, after %+v", p, p.Before, p.After)
	}
	_, stderr := a.run(1, append(by, "--yes"))
	if !strings.Contains(stderr, "was resolved by alice already") {
		t.Errorf("again: %s", stderr)
	}
	if a.reserved() != "0" {
		t.Error("it was given back twice")
	}
}

// What moved since it was shown is not carried out, and said.
func TestTaskApproveAfterTheWorldMoved(t *testing.T) {
	t.Parallel()
	a := newApprovals(t)
	id := a.orphan(1)
	task := a.task()
	a.run(0, []string{"show", task}, "adopt")
	if _, err := a.store.Fence(t.Context(), "test", []reservation.FenceRequest{{ID: id, Scope: a.scope}}); err != nil {
		t.Fatal(err)
	}
	_, stderr := a.run(1, []string{"approve", task, "--reason", "r", "--yes"}, "moved", "claim was none, is FENCED")
	if !strings.Contains(stderr, "1 of 1 were not carried out") || a.reserved() != "1" {
		t.Errorf("%s; reserved %s", stderr, a.reserved())
	}
	a.run(0, []string{"approve", task, "--reason", "r", "--yes"}, "applied", "RELEASED", "it is resolved")
}

// In bulk, by kind and scope, bounded.
func TestTaskApproveInBulk(t *testing.T) {
	t.Parallel()
	a := newApprovals(t)
	for n := range 3 {
		a.orphan(n)
	}
	task := a.task()
	bulk := []string{"approve", "--kind", "orphan_member", "--scope", a.scope.Tag(), "--max", "2", "--reason", "r", "--yes"}
	a.run(0, bulk, "applied", "applied")
	if a.reserved() != "1" {
		t.Errorf("%s reserved, want 1 left", a.reserved())
	}
	a.run(0, bulk, "applied", "it is resolved")
	a.run(0, bulk, "no tasks")
	a.run(0, []string{"approve", "--kind", "orphan_member", "--scope", "a:1:s:1:v:1:b:0", "--reason", "r", "--yes"}, "no tasks")
	a.run(0, []string{"show", task}, "resolved")
	var rows int
	if err := a.db.QueryRow(t.Context(), `SELECT count(*) FROM seckill.audit_log WHERE action = 'repair_ended' AND detail->>'outcome' = 'applied'`).Scan(&rows); err != nil || rows != 3 {
		t.Errorf("%d audit rows, want 3 (%v)", rows, err)
	}
}

// Only a clear yes is one, and what is asked about is shown before.
func TestTaskApproveAsks(t *testing.T) {
	plans := []approval.Plan{{
		Task:      pgstore.Task{ID: 7, Kind: reservation.TaskOrphanMember, Scope: "a:1:s:1:v:1:b:0"},
		Proposals: []approval.Proposal{{ID: "rid1", Action: approval.Adopt, Does: "fence it"}},
	}}
	for answer, want := range map[string]bool{"y\n": true, "YES\n": true, "yes": true, "\n": false, "": false, "n\n": false, "yesterday\n": false} {
		var asked strings.Builder
		a := &app{stdin: strings.NewReader(answer), stderr: &asked}
		if got := a.confirmed(t.Context(), plans, 1); got != want {
			t.Errorf("%q is taken as %t", answer, got)
		}
		for _, text := range []string{"task 7, orphan_member of a:1:s:1:v:1:b:0", "rid1", "fence it", "Carry out these 1? [y/N]"} {
			if !strings.Contains(asked.String(), text) {
				t.Errorf("it does not show %q:\n%s", text, asked.String())
			}
		}
	}
}

// A reason is asked for before anything is connected, and flags that exclude
// each other are.
func TestTaskApproveUsage(t *testing.T) {
	t.Parallel()
	a := newApprovals(t)
	for want, args := range map[string][]string{
		"--actor and --reason are needed": {"approve", "1"},
		"an ID and --kind exclude":        {"approve", "1", "--kind", "dead_letter", "--reason", "r"},
		"ID is missing":                   {"approve"},
		"--max must be above 0":           {"approve", "1", "--max", "0", "--reason", "r"},
		"--reservation goes with the ID":  {"approve", "--kind", "evidence_stuck", "--reservation", "x", "--reason", "r"},
		"task 99: not found":              {"approve", "99", "--reason", "r", "--yes"},
		"reconciler task reject --help":   {"reject", "1"},
		"is not the number of a task":     {"approve", "x", "--reason", "r"},
	} {
		if _, stderr := a.run(1, args); !strings.Contains(stderr, want) {
			t.Errorf("task %v: %q, want %q", args, stderr, want)
		}
	}
	task := a.task()
	a.run(0, []string{"reject", task, "--actor", "bob", "--reason", "load test"}, "rejected", "bob", "load test")
}
