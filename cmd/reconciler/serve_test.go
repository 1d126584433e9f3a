package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
)

// manager is the service manager's end of the socket.
type manager struct {
	t      *testing.T
	socket *net.UnixConn
	feeds  int
}

func newManager(t *testing.T) *manager {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "300000")
	t.Setenv("WATCHDOG_PID", "")
	return &manager{t: t, socket: socket}
}

// await reads messages until one has all the texts in it, and counts how often
// the watchdog was fed meanwhile.
func (m *manager) await(texts ...string) string {
	m.t.Helper()
	if err := m.socket.SetReadDeadline(time.Now().Add(2 * time.Minute)); err != nil {
		m.t.Fatal(err)
	}
	buffer := make([]byte, 4096)
	var seen []string
	for {
		n, err := m.socket.Read(buffer)
		if err != nil {
			m.t.Fatalf("no message with %q: %v; there were %q", texts, err, seen)
		}
		message := string(buffer[:n])
		if message == "WATCHDOG=1" {
			m.feeds++
			if len(texts) == 1 && texts[0] == message {
				return message
			}
			continue
		}
		seen = append(seen, message)
		missing := false
		for _, text := range texts {
			missing = missing || !strings.Contains(message, text)
		}
		if !missing {
			return message
		}
	}
}

// output is a stream that a running command writes to.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// TestServeTellsTheServiceManager follows one process: it stands by, works,
// reloads what it can, refuses a broken file, and stops.
func TestServeTellsTheServiceManager(t *testing.T) {
	stack := stacktest.Shared(t)
	url := stacktest.Database(t, stack)
	topic, group := stacktest.Topic(t, stack, 2)
	file := filepath.Join(t.TempDir(), "config.yaml")
	configure := func(more string) {
		t.Helper()
		text := fmt.Sprintf("redis: {addrs: [%q]}\npostgres: {url: %q}\nrocketmq: {name_servers: [%q], topic: %s, consumer_group: %s}\nadmin: {listen: \"\"}\n%s",
			stack.Redis().Addr(), url, stack.NameServer().Addr(), topic, group, more)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	configure("")
	other, err := pgstore.AcquireLease(t.Context(), pgstore.LeaseOptions{URL: url, Holder: "other-host/7"})
	if err != nil {
		t.Fatal(err)
	}
	m := newManager(t)
	var log output
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan int, 1)
	go func() { ended <- execute(ctx, []string{"run", "--config", file}, nil, &log, &log) }()
	defer func() {
		stop()
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", log.String())
		}
	}()

	m.await("READY=1", "STATUS=standing by, mode observe: other-host/7 holds the lease")
	m.await("WATCHDOG=1")
	if err := other.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.await("READY=1", "STATUS=working, mode observe")
	m.await("WATCHDOG=1")

	hangup := func() {
		t.Helper()
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		m.await("RELOADING=1", "MONOTONIC_USEC=")
		m.await("READY=1", "STATUS=working, mode observe")
	}
	configure("log: {level: debug}\nmode: act\nfencer: {settle: 20s}\nlease: {ttl: 9s}\n")
	hangup()
	for _, want := range []string{`changed="[fencer.settle log.level]"`, `settings="[mode lease.ttl]"`} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log of the reload lacks %s", want)
		}
	}
	m.await("WATCHDOG=1")
	for end := time.Now().Add(time.Minute); !strings.Contains(log.String(), "level=DEBUG"); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the level of the log has not changed")
		}
	}
	configure("fencer: {settle: soon}\n")
	hangup()
	if !strings.Contains(log.String(), "reload refused") || !strings.Contains(log.String(), "fencer.settle: want a duration") {
		t.Error("the log does not say that and why the reload was refused")
	}

	stop()
	m.await("STOPPING=1", "EXTEND_TIMEOUT_USEC=", "STATUS=stopping")
	select {
	case status := <-ended:
		if status != 0 {
			t.Errorf("exit status %d", status)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("the daemon does not end")
	}
}
