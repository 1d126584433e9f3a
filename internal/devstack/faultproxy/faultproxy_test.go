package faultproxy_test

import (
	"bufio"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/devstack/faultproxy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long something that has to happen may take, and briefly how
// long something that must not happen is watched for.
const (
	patience = 20 * time.Second
	briefly  = 100 * time.Millisecond
)

// echoServer answers each line with itself and counts lines.
type echoServer struct {
	addr  string
	lines atomic.Int64
}

func startEcho(t *testing.T) *echoServer {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	s := &echoServer{addr: ln.Addr().String()}
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go s.serve(conn)
		}
	}()
	return s
}

func (s *echoServer) serve(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	r := bufio.NewReader(conn)
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			return
		}
		s.lines.Add(1)
		if _, err := io.WriteString(conn, line); err != nil {
			return
		}
	}
}

func startProxy(t *testing.T) (*faultproxy.Proxy, *echoServer) {
	t.Helper()
	echo := startEcho(t)
	p, err := faultproxy.Start(echo.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p, echo
}

func dial(t *testing.T, p *faultproxy.Proxy) net.Conn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", p.Addr(), patience)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func send(t *testing.T, conn net.Conn, line string) {
	t.Helper()
	if _, err := io.WriteString(conn, line+"\n"); err != nil {
		t.Fatal(err)
	}
}

// receive reads what comes within limit, up to a line's end.
func receive(conn net.Conn, limit time.Duration) (string, error) {
	_ = conn.SetReadDeadline(time.Now().Add(limit))
	line, err := bufio.NewReader(conn).ReadString('\n')
	return strings.TrimSuffix(line, "\n"), err
}

func wantEcho(t *testing.T, conn net.Conn, line string) {
	t.Helper()
	send(t, conn, line)
	if got, err := receive(conn, patience); err != nil || got != line {
		t.Fatalf("got %q, %v, want %q", got, err, line)
	}
}

func TestForwardsWithoutFaults(t *testing.T) {
	p, _ := startProxy(t)
	conn := dial(t, p)
	wantEcho(t, conn, "hello")
	wantEcho(t, conn, strings.Repeat("x", 200_000))
	if got := p.Conns(); got != 1 {
		t.Errorf("%d connections, want 1", got)
	}
}

func TestClientsEndOfStreamLetsTheAnswerThrough(t *testing.T) {
	p, _ := startProxy(t)
	conn := dial(t, p)
	send(t, conn, "last")
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := receive(conn, patience); err != nil || got != "last" {
		t.Fatalf("got %q, %v", got, err)
	}
}

func TestStallHoldsTrafficUntilItEnds(t *testing.T) {
	p, echo := startProxy(t)
	conn := dial(t, p)
	wantEcho(t, conn, "before")
	p.Set(faultproxy.Faults{Stall: true})
	send(t, conn, "held")
	if got, err := receive(conn, briefly); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("got %q, %v through a stalled proxy", got, err)
	}
	if got := echo.lines.Load(); got != 1 {
		t.Fatalf("the server saw %d lines, want 1", got)
	}
	p.Set(faultproxy.Faults{})
	if got, err := receive(conn, patience); err != nil || got != "held" {
		t.Fatalf("after the stall: %q, %v", got, err)
	}
}

func TestDropRepliesStillDeliversRequests(t *testing.T) {
	p, echo := startProxy(t)
	conn := dial(t, p)
	p.Set(faultproxy.Faults{DropReplies: true})
	send(t, conn, "lost")
	if got, err := receive(conn, briefly); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("got %q, %v", got, err)
	}
	for end := time.Now().Add(patience); echo.lines.Load() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the request did not reach the server")
		}
	}
	p.Set(faultproxy.Faults{})
	wantEcho(t, conn, "after") // the dropped answer does not come late
}

func TestCutAfterExactlySoManyBytes(t *testing.T) {
	p, _ := startProxy(t)
	conn := dial(t, p)
	wantEcho(t, conn, "counted from the fault on")
	p.Set(faultproxy.Faults{CutAfter: 4})
	send(t, conn, "abcdefgh")
	_ = conn.SetReadDeadline(time.Now().Add(patience))
	var got []byte
	buf := make([]byte, 16)
	for {
		n, err := conn.Read(buf)
		got = append(got, buf[:n]...)
		if err != nil {
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("ended by %v, want a reset", err)
			}
			break
		}
	}
	if string(got) != "abcd" {
		t.Errorf("got %q, want abcd", got)
	}
}

func TestRefuseResetsNewConnectionsOnly(t *testing.T) {
	p, _ := startProxy(t)
	old := dial(t, p)
	wantEcho(t, old, "old")
	p.Set(faultproxy.Faults{Refuse: true})
	if err := newConnection(p); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("new connection: %v, want a reset", err)
	}
	wantEcho(t, old, "still there")
}

func TestResetEndsOpenConnections(t *testing.T) {
	p, _ := startProxy(t)
	conn := dial(t, p)
	wantEcho(t, conn, "x")
	p.Reset()
	if _, err := receive(conn, patience); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	wantEcho(t, dial(t, p), "a new one works")
}

func TestDelayAndRateTakeTheirTime(t *testing.T) {
	p, _ := startProxy(t)
	conn := dial(t, p)
	for name, f := range map[string]faultproxy.Faults{
		"delay": {Delay: briefly},
		"rate":  {BytesPerSecond: 50}, // 5 bytes and the line's end: 120 ms
	} {
		p.Set(f)
		start := time.Now()
		wantEcho(t, conn, "12345")
		if took := time.Since(start); took < briefly {
			t.Errorf("%s: %s, want at least %s", name, took, briefly)
		}
	}
}

func TestDeadTargetResets(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = ln.Close()
	p, err := faultproxy.Start(ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	if err := newConnection(p); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
}

// newConnection is how a connection that gets no answer ends: while it is made
// or after, for the kernel accepts before the proxy resets.
func newConnection(p *faultproxy.Proxy) error {
	conn, err := net.DialTimeout("tcp", p.Addr(), patience)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_, err = receive(conn, patience)
	return err
}

func TestCloseEndsAStalledConnection(t *testing.T) {
	p, _ := startProxy(t)
	conn := dial(t, p)
	wantEcho(t, conn, "x")
	p.Set(faultproxy.Faults{Stall: true})
	send(t, conn, "held")
	p.Close()
	p.Close() // twice is harmless
	if _, err := receive(conn, patience); err == nil {
		t.Error("the connection outlived its proxy")
	}
}
