// Package admin is the daemon's HTTP server: health, readiness and metrics
// (interface §6).
//
// It listens on a loopback address unless told otherwise, and answers only to
// names that are its own: a web page in an operator's browser cannot read it
// through a name that was rebound to 127.0.0.1. Health and metrics are for
// everybody who reaches it; what [Auth] guards asks for a token.
package admin

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// Limits of the server: what one client may hold up or send.
const (
	readHeaderTimeout = 5 * time.Second
	readTimeout       = 15 * time.Second
	writeTimeout      = 60 * time.Second
	idleTimeout       = 60 * time.Second
	maxHeaderBytes    = 16 << 10
	maxBodyBytes      = 1 << 20
)

// Options is what a [Server] serves.
type Options struct {
	// Listen is host:port; port 0 takes a free one.
	Listen string
	// AllowRemote permits an address that other machines reach.
	AllowRemote bool
	// AllowedHosts are names in the Host header beside localhost and IP addresses.
	AllowedHosts []string
	// CheckTimeout bounds one readiness check; 0 means 2 s.
	CheckTimeout time.Duration
	// Checks are the dependencies that /readyz asks.
	Checks []Check
	// Lease says how the lease stands; nil: there is none.
	Lease func() Lease
	// Metrics serves /metrics.
	Metrics http.Handler
	// TLS encrypts all of it; nil: none.
	TLS *tls.Config
	// Logger gets what goes wrong with connections; nil: [slog.Default].
	Logger *slog.Logger
}

// Server serves until it is stopped. It is started and stopped once.
type Server struct {
	opts Options
	mux  *http.ServeMux
	http *http.Server
	done chan struct{} // closed when serving has ended

	mu       sync.Mutex
	listener net.Listener
	stopped  bool
}

// New returns a server that does not listen yet.
func New(opts Options) *Server {
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	if opts.CheckTimeout <= 0 {
		opts.CheckTimeout = 2 * time.Second
	}
	s := &Server{opts: opts, mux: http.NewServeMux(), done: make(chan struct{})}
	s.mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("ok\n")) // the client may be gone
	})
	s.mux.Handle("GET /readyz", newReadiness(opts))
	if opts.Metrics != nil {
		s.mux.Handle("GET /metrics", opts.Metrics)
	}
	s.http = &http.Server{
		Handler:           s.guard(http.MaxBytesHandler(s.mux, maxBodyBytes)),
		ReadHeaderTimeout: readHeaderTimeout,
		ReadTimeout:       readTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(opts.Logger.Handler(), slog.LevelWarn),
	}
	return s
}

// Handle adds a page, with a pattern of [http.ServeMux], before the start.
func (s *Server) Handle(pattern string, h http.Handler) { s.mux.Handle(pattern, h) }

// Start listens and returns; requests are served from then on. It refuses an
// address that other machines reach unless that is allowed.
func (s *Server) Start(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped || s.listener != nil {
		return errors.New("admin server: started twice or after its stop")
	}
	addr, err := net.ResolveTCPAddr("tcp", s.opts.Listen)
	if err != nil {
		return fmt.Errorf("admin server: listen on %q: %w", s.opts.Listen, err)
	}
	if !s.opts.AllowRemote && !addr.IP.IsLoopback() {
		return fmt.Errorf("admin server: %q can be reached from other machines: "+
			"use a loopback address, or set admin.allow_remote", s.opts.Listen)
	}
	var lc net.ListenConfig
	s.listener, err = lc.Listen(ctx, "tcp", addr.String())
	if err != nil {
		return fmt.Errorf("admin server: %w", err)
	}
	if s.opts.TLS != nil {
		s.listener = tls.NewListener(s.listener, s.opts.TLS)
	}
	go func(l net.Listener) {
		defer close(s.done)
		if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			s.opts.Logger.Error("admin server has ended", "error", err)
		}
	}(s.listener)
	return nil
}

// Addr is the address listened on, "" before the start.
func (s *Server) Addr() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listener == nil {
		return ""
	}
	return s.listener.Addr().String()
}

// Stop lets requests end until ctx ends, then cuts them off. It may be called
// at any time and again.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	s.stopped = true
	started := s.listener != nil
	s.mu.Unlock()
	if !started {
		return nil
	}
	err := s.http.Shutdown(ctx)
	if err != nil {
		_ = s.http.Close() // the listener is closed already, and so are the connections then
		err = fmt.Errorf("stop the admin server: requests were cut off: %w", err)
	}
	<-s.done
	return err
}

// guard refuses requests under foreign names and sets the headers that every
// answer has.
func (s *Server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Cache-Control", "no-store")
		if !s.isOwnName(r.Host) {
			http.Error(w, "this name is not served here: use localhost, an IP address or a name of admin.allowed_hosts",
				http.StatusMisdirectedRequest)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// isOwnName: an IP address cannot be rebound, a name can.
func (s *Server) isOwnName(hostport string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "localhost" {
		return true
	}
	if _, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil {
		return true
	}
	return slices.ContainsFunc(s.opts.AllowedHosts, func(own string) bool { return strings.EqualFold(own, host) })
}
