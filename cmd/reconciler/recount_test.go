package main

import (
	"strings"
	"testing"

	"github.com/seckill/reconciler/reservation"
)

// From the finding to exit status 0: a broken invariant is found, makes a task,
// is not touched while the scope sells, and is recounted once it is paused.
func TestRecountFromFindingToExitZero(t *testing.T) {
	t.Parallel()
	a := newApprovals(t)
	a.order("u1")
	a.order("u2")
	if err := a.redis.HSet(t.Context(), a.scope.StockKey(), "available", 3).Err(); err != nil {
		t.Fatal(err)
	}
	run := func(want int, args ...string) string {
		t.Helper()
		status, stdout, stderr := a.program(args...)
		if status != want {
			t.Fatalf("%v: status %d, want %d\n%s%s", args, status, want, stdout, stderr)
		}
		return stdout
	}
	if out := run(exitDrift, "reconcile"); !strings.Contains(out, "invariant_broken") {
		t.Fatalf("reconcile says\n%s", out)
	}
	// As the daemon does for each finding that needs a person.
	report := reservation.TaskReport{Kind: "invariant_broken", Scope: a.scope.Tag(), Cause: "sum", Count: 1}
	if err := a.store.ReportTasks(t.Context(), []reservation.TaskReport{report}); err != nil {
		t.Fatal(err)
	}
	if out := run(exitDone, "task", "show", "1"); !strings.Contains(out, "scope pause") {
		t.Fatalf("show says\n%s", out)
	}
	approve := []string{"task", "approve", "--kind", "invariant_broken", "--scope", a.scope.Tag(), "--actor", "alice", "--reason", "hand edit", "--yes"}
	if out := run(exitFailed, approve...); !strings.Contains(out, "scope pause") {
		t.Fatalf("while it sells:\n%s", out)
	}
	flags := []string{"--activity", a.scope.ActivityID, "--sku", a.scope.SKUID, "--version", "1"}
	run(exitDone, append([]string{"scope", "pause"}, flags...)...)
	if out := run(exitDone, approve...); !strings.Contains(out, "applied") || !strings.Contains(out, "it is resolved") {
		t.Fatalf("approve says\n%s", out)
	}
	run(exitDone, append([]string{"scope", "resume"}, flags...)...)
	run(exitDone, "reconcile")
	if got := a.reserved(); got != "2" {
		t.Errorf("%s units are reserved", got)
	}
}
