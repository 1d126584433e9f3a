package devstack

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// startStranger starts a process that no stack knows.
func startStranger(t *testing.T) identity {
	t.Helper()
	cmd := exec.Command("sleep", "300")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	id, err := identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestARecycledPIDIsNeverSignalled(t *testing.T) {
	stranger := startStranger(t)
	for name, recorded := range map[string]identity{
		"started at another time": {PID: stranger.PID, Start: stranger.Start - 1, Boot: stranger.Boot},
		"of another boot":         {PID: stranger.PID, Start: stranger.Start, Boot: "another"},
	} {
		if recorded.alive() {
			t.Errorf("%s: taken for the process of that pid now", name)
		}
		if err := recorded.kill(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !stranger.alive() || stranger.stopped() {
			t.Fatalf("%s: the stranger was signalled", name)
		}
	}
	if err := stranger.kill(); err != nil || stranger.alive() {
		t.Errorf("the right identity: %v, alive %v", err, stranger.alive())
	}
}

// A signal takes effect when its process runs next. Who pauses a service and
// then looks at it must not see it running.
func TestAFrozenProcessHasStopped(t *testing.T) {
	stranger := startStranger(t)
	for range 50 {
		if _, err := stranger.freeze(); err != nil {
			t.Fatal(err)
		}
		if !stranger.stopped() {
			t.Fatal("frozen, and running still")
		}
		if err := stranger.signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNobodyIsNotAlive(t *testing.T) {
	if (identity{}).alive() {
		t.Error("the zero identity is alive")
	}
	if _, err := readStat(os.Getpid()); err != nil {
		t.Error(err)
	}
}

func TestPortBlocksDoNotOverlap(t *testing.T) {
	var a, b ports
	defer a.release()
	defer b.release()
	seen := map[int]bool{}
	for range 2 * blockSize {
		for _, p := range []*ports{&a, &b} {
			port, err := p.take(1)
			if err != nil {
				t.Fatal(err)
			}
			if seen[port] {
				t.Fatalf("port %d was given twice", port)
			}
			seen[port] = true
		}
	}
}

func TestAStrangersPortIsNotTaken(t *testing.T) {
	var p ports
	defer p.release()
	base, err := p.take(blockSize)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := listen(base + blockSize - 1)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	if blockIsFree(base) {
		t.Error("a block with a port in use counts as free")
	}
}
