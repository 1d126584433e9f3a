package service

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sent is a notifier and what it sent, one message an entry.
type sent struct {
	*Notifier

	messages []string
	log      bytes.Buffer
}

func recorded() *sent {
	s := &sent{}
	s.Notifier = &Notifier{
		log: slog.New(slog.NewTextHandler(&s.log, nil)),
		send: func(state string) error {
			s.messages = append(s.messages, state)
			return nil
		},
	}
	return s
}

func (s *sent) want(t *testing.T, messages ...string) {
	t.Helper()
	if diff := cmp.Diff(messages, s.messages); diff != "" {
		t.Errorf("sent (-want +got):\n%s", diff)
	}
	s.messages = nil
}

func TestStates(t *testing.T) {
	s := recorded()
	s.Status("waiting for the lease")
	s.Ready("working,\nREADY=0 mode act") // a line break must not begin another variable
	s.want(t, "STATUS=waiting for the lease", "READY=1\nSTATUS=working, READY=0 mode act")

	s.Reload(func() {
		if len(s.messages) != 1 || !strings.HasPrefix(s.messages[0], "RELOADING=1\nMONOTONIC_USEC=") || !strings.HasSuffix(s.messages[0], "\nSTATUS=reloading") {
			t.Errorf("during the reload: %q", s.messages)
		}
		s.messages = nil
	})
	s.want(t, "READY=1\nSTATUS=working, READY=0 mode act")

	s.Stopping(33 * time.Second)
	s.Ready("working") // a late one: the lease came while the service stops
	s.Reload(func() {})
	s.want(t, "STOPPING=1\nEXTEND_TIMEOUT_USEC=33000000\nSTATUS=stopping")
}

func TestReloadBeforeReadyIsSilent(t *testing.T) {
	s := recorded()
	done := false
	s.Reload(func() { done = true })
	s.want(t)
	if !done {
		t.Error("nothing was reloaded")
	}
}

func TestWatchFeedsOnlyWhileThereIsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := recorded()
		var stalled atomic.Bool
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			s.Watch(ctx, 30*time.Second, func() error {
				if stalled.Load() {
					return errors.New("job fencer: still running")
				}
				return nil
			})
		}()
		time.Sleep(29 * time.Second)
		synctest.Wait()
		s.want(t, "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1") // at 0, 10 and 20 s

		stalled.Store(true)
		time.Sleep(time.Minute)
		synctest.Wait()
		s.want(t)
		if n := strings.Count(s.log.String(), "job fencer: still running"); n != 1 {
			t.Errorf("the stall is logged %d times:\n%s", n, s.log.String())
		}
		stalled.Store(false)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		s.want(t, "WATCHDOG=1")
		stop()
		<-done
	})
}

func TestWatchWithoutWatchdogLogs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := recorded()
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		s.Watch(ctx, 0, func() error { return errors.New("job fencer: still running") })
		s.want(t)
		if n := strings.Count(s.log.String(), "nobody watches it"); n != 1 {
			t.Errorf("the stall is logged %d times:\n%s", n, s.log.String())
		}
	})
}

// The messages reach the socket that the environment names; without one nothing
// happens.
func TestSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var log bytes.Buffer
	n := New(slog.New(slog.NewTextHandler(&log, nil)))

	t.Setenv("NOTIFY_SOCKET", "")
	n.Status("to nobody")
	t.Setenv("NOTIFY_SOCKET", path)
	n.Ready("working")
	if err := l.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	buffer := make([]byte, 4096)
	size, err := l.Read(buffer)
	if got := string(buffer[:size]); err != nil || got != "READY=1\nSTATUS=working" {
		t.Errorf("received %q, %v", got, err)
	}
	if log.Len() > 0 {
		t.Errorf("logged %s", log.String())
	}
	t.Setenv("NOTIFY_SOCKET", path+".gone")
	n.Status("to nobody")
	if !strings.Contains(log.String(), "could not be told") {
		t.Errorf("a lost message is not logged: %s", log.String())
	}
}

func TestWatchdogInterval(t *testing.T) {
	t.Setenv("WATCHDOG_PID", "")
	for value, want := range map[string]time.Duration{"": 0, "30000000": 30 * time.Second} {
		t.Setenv("WATCHDOG_USEC", value)
		if got, err := WatchdogInterval(); err != nil || got != want {
			t.Errorf("WATCHDOG_USEC=%q: %s, %v", value, got, err)
		}
	}
	t.Setenv("WATCHDOG_USEC", "soon")
	if _, err := WatchdogInterval(); err == nil {
		t.Error("WATCHDOG_USEC=soon: accepted")
	}
}
