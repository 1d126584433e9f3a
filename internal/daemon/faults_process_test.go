//go:build slow

package daemon_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/upstream"
)

// binary builds the daemon as it is shipped.
func binary(t *testing.T) string {
	t.Helper()
	root, err := devstack.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "reconciler")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", path, "./cmd/reconciler")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the daemon: %v\n%s", err, out)
	}
	return path
}

// environment are the sale's settings as a process gets them.
func (s *sale) environment() []string {
	env := []string{}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "RECONCILER_") {
			env = append(env, kv)
		}
	}
	for _, setting := range (config.Loaded{Config: s.config}).Settings() {
		if setting.Value != "" { // the defaults of these are empty
			env = append(env, "RECONCILER_"+strings.ToUpper(strings.ReplaceAll(setting.Key, ".", "_"))+"="+setting.Value)
		}
	}
	return env
}

// process is the daemon's program.
type process struct {
	t   *testing.T
	cmd *exec.Cmd

	mu     sync.Mutex
	stderr []string
	ended  chan struct{}
	err    error
}

// run starts the program. It is killed with the test, if it has not ended.
func (s *sale) start(path string, args ...string) *process {
	s.t.Helper()
	p := &process{t: s.t, ended: make(chan struct{})}
	p.cmd = exec.CommandContext(context.WithoutCancel(s.t.Context()), path, args...)
	p.cmd.Dir = filepath.Dir(path) // no config.yaml there
	p.cmd.Env = s.environment()
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.cmd.StderrPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	go p.read(out)
	s.t.Cleanup(func() {
		p.signal(syscall.SIGKILL)
		<-p.ended
		if s.t.Failed() {
			p.mu.Lock()
			defer p.mu.Unlock()
			s.t.Logf("end of the log of %s:\n%s", strings.Join(p.cmd.Args[1:], " "), strings.Join(p.stderr[max(0, len(p.stderr)-15):], "\n"))
		}
	})
	return p
}

func (p *process) read(out io.Reader) {
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		p.mu.Lock()
		p.stderr = append(p.stderr, fmt.Sprintf("%.400s", lines.Text()))
		p.mu.Unlock()
	}
	p.err = p.cmd.Wait()
	close(p.ended)
}

// awaitLog waits for n lines that have the text in them.
func (p *process) awaitLog(n int, text string) {
	p.t.Helper()
	for end := time.Now().Add(time.Minute); p.logged(text) < n; time.Sleep(5 * time.Millisecond) {
		select {
		case <-p.ended:
			p.t.Fatalf("the daemon ended before it logged %q: %v", text, p.err)
		default:
		}
		if time.Now().After(end) {
			p.t.Fatalf("the daemon has not logged %q %d times", text, n)
		}
	}
}

func (p *process) logged(text string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, line := range p.stderr {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

func (p *process) signal(sig syscall.Signal) {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("send %s: %v", sig, err)
	}
}

// kill ends the process as a crash does.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}

// wait returns the exit status.
func (p *process) wait(within time.Duration) int {
	p.t.Helper()
	select {
	case <-p.ended:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(within):
		p.t.Fatalf("%s has not ended within %s", strings.Join(p.cmd.Args[1:], " "), within)
		return -1
	}
}

// wave makes some reservations of every kind, stuck and due.
func (s *sale) wave(byKind map[string][]string, each int) {
	s.t.Helper()
	for _, k := range everyKind {
		for range each {
			byKind[k.kind] = append(byKind[k.kind], s.stuckOne(k, time.Millisecond))
		}
	}
}

// The daemon's program is killed 50 times at random moments while it recovers
// hundreds of reservations that are stuck in every way: they end as they do in
// a run that nobody disturbs.
func TestSlowKilledFiftyTimes(t *testing.T) {
	const kills = 50
	program := binary(t)
	random := seeded(t)
	settings := func(c *config.Config) {
		hurried(c)
		c.Lease.TTL = 300 * time.Millisecond
		c.Scanner.Batch, c.Fencer.Batch, c.Compensator.Batch = 8, 8, 8
	}
	sold := func() (s *sale, byKind map[string][]string, consume func()) {
		s = newSale(t, stacktest.Shared(t), settings)
		sent := s.sendAll(20)
		byKind = map[string][]string{"sent, dropped by the consumer": sent[:10], "sent": sent[10:]}
		return s, byKind, func() { s.subscribe(upstream.Subscription{}, dropping(sent[:10])) }
	}

	calm, calmKinds, consume := sold()
	for range kills {
		calm.wave(calmKinds, 1)
	}
	consume()
	undisturbed := calm.start(program, "run", "--mode", "act")
	calm.settles(3 * time.Minute)
	undisturbed.signal(syscall.SIGTERM)
	if status := undisturbed.wait(time.Minute); status != 0 {
		t.Errorf("exit status %d after SIGTERM", status)
	}
	calm.wantEnds(calmKinds)

	s, byKind, consume := sold()
	inWork := 0
	for i := range kills {
		s.wave(byKind, 1)
		if i == kills/2 {
			consume()
		}
		before := s.statuses(byKind)
		p := s.start(program, "run", "--mode", "act")
		p.awaitLog(1, logHolding)
		time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
		p.kill()
		if s.settled() != nil && !cmp.Equal(before, s.statuses(byKind)) {
			inWork++
		}
	}
	t.Logf("%d of %d killed lives had moved something and left something", inWork, kills)
	if inWork < kills/5 {
		t.Errorf("only %d of %d kills came in the middle of work", inWork, kills)
	}
	last := s.start(program, "run", "--mode", "act")
	s.settles(3 * time.Minute)
	s.wantEnds(byKind)
	if diff := cmp.Diff(calm.ends(calmKinds), s.ends(byKind)); diff != "" {
		t.Errorf("ends of the undisturbed and the killed run differ: %s", diff)
	}
	if diff := cmp.Diff(calm.stock(), s.stock()); diff != "" {
		t.Errorf("stocks differ: %s", diff)
	}
	last.signal(syscall.SIGTERM)
	if status := last.wait(time.Minute); status != 0 {
		t.Errorf("exit status %d after SIGTERM", status)
	}
}

// SIGTERM in the middle of passes: the daemon ends with 0 within seconds, gives
// its lease back, and leaves nothing half done that the next one does not finish.
func TestSlowStoppedInTheMiddle(t *testing.T) {
	const stops = 15
	program := binary(t)
	random := seeded(t)
	s := newSale(t, stacktest.Shared(t), hurried, func(c *config.Config) {
		c.Lease.TTL = time.Minute // nobody can wait for it to run out
		c.Scanner.Batch, c.Fencer.Batch, c.Compensator.Batch = 8, 8, 8
	})
	byKind := map[string][]string{}
	var slowest time.Duration
	for range stops {
		s.wave(byKind, 1)
		p := s.start(program, "run", "--mode", "act")
		p.awaitLog(1, logHolding)
		time.Sleep(time.Duration(random.IntN(300)) * time.Millisecond)
		began := time.Now()
		p.signal(syscall.SIGTERM)
		if status := p.wait(time.Minute); status != 0 {
			t.Errorf("exit status %d after SIGTERM", status)
		}
		slowest = max(slowest, time.Since(began))
		var released bool
		if err := s.db.QueryRow(t.Context(), `SELECT released_at IS NOT NULL FROM seckill.lease WHERE name = 'daemon'`).Scan(&released); err != nil || !released {
			t.Errorf("the lease was not given back (%v)", err)
		}
		s.keepsPromises()
	}
	t.Logf("the slowest stop took %s", slowest)
	if slowest > 10*time.Second {
		t.Errorf("a stop took %s", slowest)
	}
	s.subscribe(upstream.Subscription{}, nil)
	s.start(program, "run", "--mode", "act")
	s.settles(2 * time.Minute)
	s.wantEnds(byKind)
}

// A daemon is suspended in the middle of its work, for longer than its lease
// lasts; another one takes over and finishes. When the first one goes on, with
// what it read before, nothing happens twice.
func TestSlowSuspendedBeyondItsLease(t *testing.T) {
	const rounds = 6
	program := binary(t)
	random := seeded(t)
	s := newSale(t, stacktest.Shared(t), hurried, func(c *config.Config) {
		c.Scanner.Batch, c.Fencer.Batch, c.Compensator.Batch = 8, 8, 8
	})
	s.subscribe(upstream.Subscription{}, nil)
	byKind := map[string][]string{}
	interrupted := 0
	for range rounds {
		s.wave(byKind, 3)
		before := s.statuses(byKind)
		first := s.start(program, "run", "--mode", "act")
		first.awaitLog(1, logHolding)
		time.Sleep(time.Duration(random.IntN(150)) * time.Millisecond)
		first.signal(syscall.SIGSTOP)
		if s.settled() != nil && !cmp.Equal(before, s.statuses(byKind)) {
			interrupted++
		}
		// Its session still has the lock: a suspended process keeps its connection.
		second := s.start(program, "run", "--mode", "act")
		second.awaitLog(1, "waiting for the lease")
		time.Sleep(2 * s.config.Lease.TTL)
		if second.logged(logHolding) != 0 {
			t.Fatal("a second daemon works while the first one has the lock")
		}
		s.exec(`SELECT pg_terminate_backend(backend_pid) FROM seckill.lease WHERE name = 'daemon'`)
		second.awaitLog(1, logHolding)
		time.Sleep(time.Duration(random.IntN(500)) * time.Millisecond)
		first.signal(syscall.SIGCONT)
		first.awaitLog(1, logLost)
		s.settles(2 * time.Minute)
		for _, p := range []*process{first, second} {
			p.signal(syscall.SIGTERM)
			if status := p.wait(time.Minute); status != 0 {
				t.Errorf("exit status %d after SIGTERM", status)
			}
		}
		if first.logged(logHolding) > 1 {
			t.Error("the first daemon got the lease again while the second one had it")
		}
	}
	s.wantEnds(byKind)
	s.keepsPromises()
	t.Logf("%d of %d daemons were suspended in the middle of work", interrupted, rounds)
}

// `run --once` ends with 4 while another instance works, and with 0 when it has
// the lease and all evidence.
func TestSlowOnceBesideADaemon(t *testing.T) {
	program := binary(t)
	s := newSale(t, stacktest.Shared(t), hurried)
	byKind := map[string][]string{}
	s.wave(byKind, 1)
	before := maps.Clone(s.statuses(byKind))
	held := s.open()
	lease, err := held.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if status := s.start(program, "run", "--once", "--mode", "act").wait(time.Minute); status != 4 {
		t.Errorf("exit status %d beside a holder of the lease, want 4", status)
	}
	if diff := cmp.Diff(before, s.statuses(byKind)); diff != "" {
		t.Errorf("run --once worked without the lease: %s", diff)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	due() // what was sent a moment ago is not settled: that would be 3
	if status := s.start(program, "run", "--once", "--mode", "act").wait(time.Minute); status != 0 {
		t.Errorf("exit status %d with the lease, want 0", status)
	}
	if cmp.Equal(before, s.statuses(byKind)) {
		t.Error("run --once with the lease did nothing")
	}
	s.keepsPromises()
}
