package devstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"
)

// kind says how a service is known to serve.
type kind string

const (
	kindRedis      kind = "redis"
	kindNode       kind = "redis-node"
	kindPostgres   kind = "postgres"
	kindNameServer kind = "name-server"
	kindBroker     kind = "broker"
)

// startLimit bounds the wait for one service. A broker takes 6–11 s on two
// idle cores; the rest is room for a busy machine.
const startLimit = 90 * time.Second

// record is what the state file keeps of a service.
type record struct {
	Name    string   `json:"name"`
	Kind    kind     `json:"kind"`
	Port    int      `json:"port"`
	Dir     string   `json:"dir"`
	Version string   `json:"version"`
	Launch  launch   `json:"launch"`
	Process identity `json:"process"`
}

// Service is one server process of a stack. Its methods may be called from
// several goroutines.
type Service struct {
	stack *Stack

	mu     sync.Mutex
	rec    record
	reaped chan struct{} // closed when our own child was collected; nil if it is not ours
}

// Name is unique in its stack: redis, redis-floor, cluster-0 … cluster-5,
// cluster-floor-0 …, sentinel-redis-0 and -1, sentinel-0 … sentinel-2, postgres,
// name-server, broker-0 ….
func (s *Service) Name() string { return s.rec.Name }

// Port is the service's TCP port on 127.0.0.1.
func (s *Service) Port() int { return s.rec.Port }

// Addr is host:port. It stays the same over restarts.
func (s *Service) Addr() string { return address(s.rec.Port) }

// Dir holds the service's data and configuration.
func (s *Service) Dir() string { return s.rec.Dir }

// Version is the server's own version, such as 8.2.3.
func (s *Service) Version() string { return s.rec.Version }

// LogFile has what the service printed.
func (s *Service) LogFile() string { return s.rec.Launch.Log }

func (s *Service) snapshot() record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec
}

// PID is the process id of the last start.
func (s *Service) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Process.PID
}

// Alive reports whether the process that was started last still runs, paused
// or not.
func (s *Service) Alive() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Process.alive()
}

// Kill ends the process with SIGKILL, as a crash would, and returns when it is
// gone. Its data stays. It is no error if it was already dead.
func (s *Service) Kill() error {
	if err := s.stack.mayBreak(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kill()
}

func (s *Service) kill() error {
	if err := s.rec.Process.kill(); err != nil {
		return fmt.Errorf("kill %s: %w", s.rec.Name, err)
	}
	if s.reaped != nil {
		<-s.reaped
	}
	return nil
}

// Pause suspends the process (SIGSTOP): connections stay open and nothing is
// answered, like a host that hangs.
func (s *Service) Pause() error { return s.signalTree(syscall.SIGSTOP) }

// Resume ends a Pause.
func (s *Service) Resume() error { return s.signalTree(syscall.SIGCONT) }

func (s *Service) signalTree(sig syscall.Signal) error {
	if err := s.stack.mayBreak(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.rec.Process.alive() {
		return fmt.Errorf("send %s to %s: it is not running", sig, s.rec.Name)
	}
	tree, err := s.rec.Process.freeze()
	if err == nil {
		err = signalAll(tree, sig)
	}
	if err == nil && sig == syscall.SIGSTOP {
		err = awaitStop(tree)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", s.rec.Name, err)
	}
	return nil
}

// Restart kills the service if it runs, starts it again on the same port and
// data and returns when it serves.
func (s *Service) Restart(ctx context.Context) error {
	if err := s.Kill(); err != nil {
		return err
	}
	return s.Start(ctx)
}

// Start starts a service that is dead and returns when it serves. One that
// runs is left alone, resumed if it was paused.
func (s *Service) Start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	if err := s.launch(ctx); err != nil {
		return err
	}
	if err := s.stack.save(); err != nil {
		return err
	}
	if err := s.waitReady(ctx); err != nil {
		return err
	}
	if s.rec.Kind == kindNameServer {
		return s.stack.registerBrokers(ctx)
	}
	return nil
}

// launch gets a process running, without waiting until it serves.
func (s *Service) launch(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.rec.Process.alive() {
		if !s.rec.Process.stopped() {
			return nil
		}
		tree, err := s.rec.Process.freeze()
		if err != nil {
			return err
		}
		return signalAll(tree, syscall.SIGCONT)
	}
	if err := waitPortFree(ctx, s.rec.Port); err != nil {
		return fmt.Errorf("start %s: %w", s.rec.Name, err)
	}
	if err := s.stack.start(s); err != nil {
		return fmt.Errorf("start %s: %w", s.rec.Name, err)
	}
	return nil
}

// waitPortFree gives the kernel a moment to close the sockets of a process that
// has just died, and refuses a port that a stranger has.
func waitPortFree(ctx context.Context, port int) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	return poll(ctx, func(context.Context) error {
		if portIsFree(port) {
			return nil
		}
		return fmt.Errorf("port %d is used by another program: end it, or take the stack down and up again for other ports", port)
	})
}

// waitReady returns when the service answers as a client needs it, or as soon
// as its process has ended.
func (s *Service) waitReady(ctx context.Context) error {
	err := poll(ctx, func(ctx context.Context) error {
		if !s.Alive() {
			return permanent(errors.New("it ended while starting"))
		}
		return s.ready(ctx)
	})
	if err != nil {
		return fmt.Errorf("wait for %s on %s: %w\nend of %s:\n%s", s.rec.Name, s.Addr(), err, s.LogFile(), s.LogTail())
	}
	return nil
}

func (s *Service) ready(ctx context.Context) error {
	switch s.rec.Kind {
	case kindRedis, kindNode:
		return pingRedis(ctx, s.Addr())
	case kindPostgres:
		return pingPostgres(ctx, postgresURL(s.Addr(), superuser, superuser))
	case kindNameServer:
		return s.stack.nameServerReady(ctx)
	case kindBroker:
		return s.stack.brokerReady(ctx, s)
	default:
		return permanent(fmt.Errorf("unknown kind of service %q", s.rec.Kind))
	}
}

// permanentError ends a poll at once.
type permanentError struct{ error }

func (e permanentError) Unwrap() error { return e.error }

func permanent(err error) error { return permanentError{err} }

// pollInterval is the pause between two questions, tryLimit bounds one.
const (
	pollInterval = 40 * time.Millisecond
	tryLimit     = 2 * time.Second
)

// poll repeats try until it returns nil or a permanent error, or until ctx
// ends: then it returns the last error of try.
func poll(ctx context.Context, try func(context.Context) error) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		once, cancel := context.WithTimeout(ctx, tryLimit)
		err := try(once)
		cancel()
		if _, end := errors.AsType[permanentError](err); err == nil || end {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (last: %w)", ctx.Err(), err)
		case <-ticker.C:
		}
	}
}

func pingTCP(ctx context.Context, addr string) error {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	return conn.Close()
}

// LogTail is the end of what the service printed, for error messages.
func (s *Service) LogTail() string {
	raw, err := os.ReadFile(s.LogFile())
	if err != nil {
		return "(no log: " + err.Error() + ")"
	}
	const keep = 2000
	return string(bytes.TrimSpace(raw[max(0, len(raw)-keep):]))
}
