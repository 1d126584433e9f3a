package main

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// terminal is the program on a terminal: standard input and error are one,
// standard output is a file's.
type terminal struct {
	t      *testing.T
	pty    *os.File
	cmd    *exec.Cmd
	stdout strings.Builder
	read   sync.WaitGroup

	mu    sync.Mutex
	shown strings.Builder
}

func (r *reconciled) onTerminal(args ...string) *terminal {
	r.t.Helper()
	own, theirs, err := pty.Open()
	if err != nil {
		r.t.Fatal(err)
	}
	x := &terminal{t: r.t, pty: own, cmd: exec.CommandContext(r.t.Context(), "reconciler", append([]string{"reconcile"}, args...)...)}
	if err := pty.Setsize(own, &pty.Winsize{Rows: 24, Cols: 100}); err != nil {
		r.t.Fatal(err)
	}
	x.cmd.Env, x.cmd.Dir = append(slices.Clone(r.env), "TERM=xterm"), r.t.TempDir()
	x.cmd.Stdin, x.cmd.Stderr, x.cmd.Stdout = theirs, theirs, &x.stdout
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := x.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	_ = theirs.Close() // the program has its own
	x.read.Go(func() {
		page := make([]byte, 1024)
		for {
			n, err := own.Read(page)
			x.mu.Lock()
			x.shown.Write(page[:n])
			x.mu.Unlock()
			if err != nil { // EIO: the program has closed it
				return
			}
		}
	})
	return x
}

func (x *terminal) screen() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.shown.String()
}

// awaits waits until the terminal shows a text.
func (x *terminal) awaits(text string) {
	x.t.Helper()
	for end := time.Now().Add(time.Minute); !strings.Contains(x.screen(), text); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			x.t.Fatalf("the terminal does not show %q:\n%q", text, x.screen())
		}
	}
}

func (x *terminal) types(text string) {
	x.t.Helper()
	if _, err := io.WriteString(x.pty, text); err != nil {
		x.t.Fatal(err)
	}
}

// ends waits for the end of the program, and gives its status and report.
func (x *terminal) ends() (status int, report reconcile.Report) {
	x.t.Helper()
	err := x.cmd.Wait()
	exit, failed := errors.AsType[*exec.ExitError](err)
	if err != nil && !failed {
		x.t.Fatal(err)
	}
	if failed {
		status = exit.ExitCode()
	}
	x.read.Wait()
	_ = x.pty.Close()
	wantJSON(x.t, x.stdout.String(), &report)
	return status, report
}

// repairOf is how the repair of a reservation stands.
func repairOf(r reconcile.Report, id string) reconcile.RepairState {
	for _, f := range r.Findings {
		if f.Subject == id {
			return f.Repair.State
		}
	}
	return ""
}

// On a terminal a bar shows how far a deep pass is, and a person is asked before
// anything is repaired. Standard output stays one document.
func TestReconcileOnATerminal(t *testing.T) {
	t.Parallel()
	r := newReconciled(t, stacktest.Shared(t))
	r.env = append(r.env, "RECONCILER_MODE=act")
	id := r.order("u1")
	args := []string{"--deep", "--repair", "--output", "json"}
	status := func() reservation.Status {
		return reservation.Status(r.redis.HGet(t.Context(), r.scope.ReservationKey(id), "status").Val())
	}
	for answer, want := range map[string]int{"n\n": exitDrift, "\n": exitDrift, "\x03": exitDrift} { // ^C is a no
		x := r.onTerminal(args...)
		x.awaits("1 repair planned. Make them? [y/N] ")
		x.types(answer)
		got, report := x.ends()
		if got != want || repairOf(report, id) != reconcile.RepairStatePlanned || status() != reservation.StatusReserved {
			t.Errorf("%q: status %d, %s\n%q\n%+v", answer, got, status(), x.screen(), report)
		}
		if !strings.Contains(x.screen(), "comparing") {
			t.Errorf("no bar was shown: %q", x.screen())
		}
	}
	x := r.onTerminal(args...)
	x.awaits("[y/N] ")
	x.types("y\n")
	if got, report := x.ends(); got != exitDone || repairOf(report, id) != reconcile.RepairStateDone || status() != reservation.StatusOrderCreated {
		t.Errorf("yes: status %d, %s\n%q\n%+v", got, status(), x.screen(), report)
	}
	var actor string
	if err := r.db.QueryRow(t.Context(), `SELECT actor FROM seckill.audit_log WHERE action = 'repair_ended' AND subject = $1`, id).Scan(&actor); err != nil || actor != loginName() {
		t.Errorf("in the audit trail: %q, %v", actor, err)
	}
}
