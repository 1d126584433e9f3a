package admin

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/observe"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve starts a server on a free port and stops it with the test.
func serve(t *testing.T, opts Options) *Server {
	t.Helper()
	opts.Listen = "127.0.0.1:0"
	opts.Logger = slog.New(slog.DiscardHandler)
	s := New(opts)
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return s
}

// get requests path, under a Host header if host is not empty.
func get(t *testing.T, s *Server, method, path, host string) (int, string, http.Header) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.Addr()+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	if host != "" {
		req.Host = host
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body), resp.Header
}

func TestPages(t *testing.T) {
	m := observe.NewMetrics("v1")
	s := serve(t, Options{Metrics: m.Handler()})
	for _, tt := range []struct {
		method, path string
		status       int
		contains     string
	}{
		{http.MethodGet, "/healthz", 200, "ok\n"},
		{http.MethodHead, "/healthz", 200, ""},
		{http.MethodPost, "/healthz", 405, ""},
		{http.MethodGet, "/readyz", 200, `"ready": true`},
		{http.MethodGet, "/metrics", 200, `seckill_build_info{version="v1"} 1`},
		{http.MethodGet, "/metrics", 200, "go_goroutines"},
		{http.MethodGet, "/", 404, ""},
		{http.MethodGet, "/debug/pprof/", 404, ""},
	} {
		status, body, header := get(t, s, tt.method, tt.path, "")
		if status != tt.status || !strings.Contains(body, tt.contains) {
			t.Errorf("%s %s: %d %q, want %d with %q", tt.method, tt.path, status, body, tt.status, tt.contains)
		}
		if header.Get("X-Content-Type-Options") != "nosniff" || header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: headers %v", tt.path, header)
		}
	}
}

// TestForeignNames: a name that an attacker's DNS points to 127.0.0.1 is refused.
func TestForeignNames(t *testing.T) {
	s := serve(t, Options{AllowedHosts: []string{"ops.example"}})
	for host, want := range map[string]int{
		"":                        200, // 127.0.0.1:port
		"127.0.0.1":               200,
		"[::1]:80":                200,
		"localhost":               200,
		"LOCALHOST:8642":          200,
		"localhost.":              200,
		"ops.example:443":         200,
		"Ops.Example":             200,
		"evil.example":            421,
		"evil.example:8642":       421,
		"localhost.evil.example":  421,
		"ops.example.evil":        421,
		"127.0.0.1.evil.example":  421,
		"127.0.0.1:80@evil":       421,
		"xn--localhost":           421,
		"169.254.169.254.nip.io.": 421,
	} {
		if status, body, _ := get(t, s, http.MethodGet, "/healthz", host); status != want {
			t.Errorf("Host %q: %d %s, want %d", host, status, body, want)
		}
	}
	// HTTP/1.0 without a name at all.
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "GET /metrics HTTP/1.0\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if line, _ := bufio.NewReader(conn).ReadString('\n'); !strings.Contains(line, "421") {
		t.Errorf("no Host: %q", line)
	}
}

func TestListenOnlyOnLoopback(t *testing.T) {
	for _, listen := range []string{"0.0.0.0:0", ":0", "[::]:0"} {
		s := New(Options{Listen: listen})
		if err := s.Start(t.Context()); err == nil || !strings.Contains(err.Error(), "admin.allow_remote") {
			t.Errorf("%s: %v", listen, err)
		}
		if s.Addr() != "" {
			t.Errorf("%s: listens all the same", listen)
		}
	}
	for _, opts := range []Options{{Listen: "localhost:0"}, {Listen: ":0", AllowRemote: true}} {
		s := New(opts)
		if err := s.Start(t.Context()); err != nil {
			t.Errorf("%s: %v", opts.Listen, err)
		}
		if err := s.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := New(Options{Listen: "127.0.0.1:http-nope"}).Start(t.Context()); err == nil {
		t.Error("a bad port is accepted")
	}
	taken := serve(t, Options{})
	if err := New(Options{Listen: taken.Addr()}).Start(t.Context()); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a taken port: %v", err)
	}
}

func TestReady(t *testing.T) {
	var redisDown atomic.Bool
	lease := Lease{State: LeaseWaiting, Holder: "other", Since: time.Unix(0, 0).UTC()}
	var state atomic.Pointer[Lease]
	state.Store(&lease)
	s := serve(t, Options{
		Checks: []Check{
			{"redis", func(context.Context) error {
				if redisDown.Load() {
					return errors.New("connection refused")
				}
				return nil
			}},
			{"postgres", func(context.Context) error { return nil }},
		},
		Lease: func() Lease { return *state.Load() },
	})
	ask := func(wantStatus int) readiness {
		t.Helper()
		status, body, header := get(t, s, http.MethodGet, "/readyz", "")
		if status != wantStatus || header.Get("Content-Type") != "application/json" {
			t.Errorf("status %d %v, want %d", status, header, wantStatus)
		}
		var r readiness
		if err := json.Unmarshal([]byte(body), &r); err != nil {
			t.Fatal(err)
		}
		for name, d := range r.Checks {
			d.LatencyMS = 0
			r.Checks[name] = d
		}
		return r
	}
	ok := dependency{OK: true}
	want := readiness{Ready: true, Lease: &lease, Checks: map[string]dependency{"redis": ok, "postgres": ok}}
	if diff := cmp.Diff(want, ask(200)); diff != "" {
		t.Errorf("ready (-want +got):\n%s", diff)
	}
	redisDown.Store(true)
	want.Ready, want.Checks["redis"] = false, dependency{Error: "connection refused"}
	if diff := cmp.Diff(want, ask(503)); diff != "" {
		t.Errorf("Redis down (-want +got):\n%s", diff)
	}
	redisDown.Store(false)
	state.Store(&Lease{State: LeaseLost})
	if got := ask(503); got.Ready || got.Lease.State != LeaseLost {
		t.Errorf("lease lost: %+v", got)
	}
	state.Store(&Lease{State: LeaseHeld})
	ask(200)
}

// TestSlowChecks: checks run side by side, none longer than the limit, and one
// that hangs for ever is started only once.
func TestSlowChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var starts atomic.Int32
		h := newReadiness(Options{
			CheckTimeout: 2 * time.Second,
			Checks: []Check{
				{"hangs", func(context.Context) error { starts.Add(1); <-release; return nil }},
				{"slow", func(context.Context) error { time.Sleep(1500 * time.Millisecond); return nil }},
				{"obedient", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }},
				{"panics", func(context.Context) error { panic("x") }},
			},
		})
		begin := time.Now()
		for range 3 {
			r := h.ask(t.Context())
			if r.Ready || r.Checks["hangs"].OK || !r.Checks["slow"].OK || r.Checks["obedient"].OK {
				t.Errorf("got %+v", r)
			}
			if !strings.Contains(r.Checks["panics"].Error, "panicked: x") {
				t.Errorf("panics: %+v", r.Checks["panics"])
			}
		}
		if took := time.Since(begin); took != 6*time.Second {
			t.Errorf("three times took %s, want 6s", took)
		}
		if n := starts.Load(); n != 1 {
			t.Errorf("the check that hangs was started %d times", n)
		}
		close(release)
	})
}

func TestStop(t *testing.T) {
	entered, leave := make(chan struct{}), make(chan struct{})
	s := New(Options{Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler)})
	s.Handle("GET /slow", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		select {
		case <-leave:
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(w, "done")
	}))
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Start(t.Context()); err == nil {
		t.Error("a second start is accepted")
	}
	cut := make(chan error, 1)
	go func() {
		req, _ := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://"+s.Addr()+"/slow", nil)
		tr := &http.Transport{DisableKeepAlives: true}
		resp, err := tr.RoundTrip(req)
		if err == nil {
			resp.Body.Close()
		}
		cut <- err
	}()
	<-entered
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := s.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stop during a request that does not end: %v", err)
	}
	if err := <-cut; err == nil {
		t.Error("the request was not cut off")
	}
	close(leave)
	if err := s.Stop(context.Background()); err != nil {
		t.Errorf("second stop: %v", err)
	}
	if err := s.Start(t.Context()); err == nil {
		t.Error("a start after the stop is accepted")
	}
	if err := New(Options{}).Stop(context.Background()); err != nil {
		t.Errorf("stop without a start: %v", err)
	}
}

func TestLimits(t *testing.T) {
	s := New(Options{Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler)})
	s.Handle("POST /echo", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.ReadAll(r.Body); err != nil {
			http.Error(w, "too large", http.StatusRequestEntityTooLarge)
		}
	}))
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Stop(context.Background()) }()
	send := func(bodyBytes, headerBytes int) int {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.Addr()+"/echo",
			strings.NewReader(strings.Repeat("x", bodyBytes)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-Long", strings.Repeat("y", headerBytes))
		tr := &http.Transport{DisableKeepAlives: true}
		resp, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return resp.StatusCode
	}
	if got := send(maxBodyBytes, 1000); got != 200 {
		t.Errorf("body at the limit: %d", got)
	}
	if got := send(maxBodyBytes+1, 1000); got != 413 {
		t.Errorf("body above the limit: %d", got)
	}
	if got := send(10, maxHeaderBytes+8<<10); got != 431 {
		t.Errorf("header above the limit: %d", got)
	}
}
