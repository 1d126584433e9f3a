// Package service is the daemon's side of a service manager's protocol
// (sd_notify(3)): systemd starts it with Type=notify and learns from it when it
// is ready, what it is doing, that it reloads and that it stops.
//
// While it makes progress it feeds systemd's watchdog (WatchdogSec=). One that
// does not is ended by systemd with SIGABRT, which leaves the stacks of all
// goroutines in the log, and is started anew; a standby takes over meanwhile.
//
//	          READY            RELOADING … READY
//	start ────────▶ ready ◀────────────────────▶ reloading
//	                  │ WATCHDOG, STATUS
//	                  ▼ STOPPING
//	               stopping
//
// Without a service manager, that is without NOTIFY_SOCKET, nothing is sent.
package service

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
)

// Notifier talks to the service manager that started the process. Its methods
// return at once and may be called from any goroutine. A message that cannot be
// sent is logged: the work goes on without it.
type Notifier struct {
	log  *slog.Logger
	send func(state string) error

	mu       sync.Mutex // makes the order of messages that of the calls
	ready    bool
	stopping bool
	status   string
}

// New talks to the service manager that the environment names, if there is one.
func New(log *slog.Logger) *Notifier {
	return &Notifier{log: log, send: func(state string) error {
		_, err := daemon.SdNotify(false, state) // false: no service manager
		return err
	}}
}

// Ready says that the service works, or stands by to work, and what it does.
func (n *Notifier) Ready(status string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ready, n.status = true, status
	n.tell(daemon.SdNotifyReady, statusLine(status))
}

// Status says what the service does now. Whether it is ready does not change.
func (n *Notifier) Status(status string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.status = status
	n.tell(statusLine(status))
}

// Stopping says that the service ends within limit, however short the manager's
// own limit for a stop (TimeoutStopSec=) is.
func (n *Notifier) Stopping(limit time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tell(daemon.SdNotifyStopping, fmt.Sprintf("EXTEND_TIMEOUT_USEC=%d", limit.Microseconds()), statusLine("stopping"))
	n.stopping = true
}

// Reload tells that the service reloads while do runs. It goes on as it was
// then, also if do failed: what that was belongs into the log. A service that is
// not ready yet reloads in silence, since its READY would come too early.
func (n *Notifier) Reload(do func()) {
	n.mu.Lock()
	announced := n.ready
	if announced {
		n.tell(daemon.SdNotifyReloading, strings.TrimSpace(daemon.SdNotifyMonotonicUsec()), statusLine("reloading"))
	}
	n.mu.Unlock()
	do()
	if announced {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.tell(daemon.SdNotifyReady, statusLine(n.status))
	}
}

// WatchdogInterval is how long the service manager waits for a sign of life,
// 0 if it does not wait for any.
func WatchdogInterval() (time.Duration, error) {
	interval, err := daemon.SdWatchdogEnabled(false)
	if err != nil {
		return 0, fmt.Errorf("read the service manager's watchdog interval: %w", err)
	}
	return interval, nil
}

// feedsPerInterval leaves room for a feed that is late, and for one that is lost.
const feedsPerInterval = 3

// Watch feeds the watchdog until ctx ends, for as long as stalled reports
// nothing. What it reports is logged once, when it begins. An interval of 0
// feeds none: then what stalls is only logged.
func (n *Notifier) Watch(ctx context.Context, interval time.Duration, stalled func() error) {
	pause := unwatchedPause
	if interval > 0 {
		pause = interval / feedsPerInterval
	}
	ticker := time.NewTicker(pause)
	defer ticker.Stop()
	was := false
	for {
		err := stalled()
		switch {
		case err == nil && interval > 0:
			n.feed()
		case err != nil && !was && interval > 0:
			n.log.Error("no progress: the service manager's watchdog is not fed and will restart this process", "error", err)
		case err != nil && !was:
			n.log.Error("no progress: this process should be restarted, and nobody watches it", "error", err)
		}
		was = err != nil
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// unwatchedPause is how often progress is looked at where nobody waits for it.
const unwatchedPause = 15 * time.Second

func (n *Notifier) feed() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.tell(daemon.SdNotifyWatchdog)
}

// tell sends one message, unless the service stops: the manager would take what
// comes late for the state of a service that goes on. The caller holds mu.
func (n *Notifier) tell(lines ...string) {
	if n.stopping {
		return
	}
	if err := n.send(strings.Join(lines, "\n")); err != nil {
		n.log.Warn("the service manager could not be told", "message", lines[0], "error", err)
	}
}

// statusLine is one line: a line break would begin another variable.
func statusLine(status string) string {
	return "STATUS=" + strings.Join(strings.Fields(status), " ")
}
