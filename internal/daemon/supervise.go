package daemon

import (
	"time"

	"github.com/seckill/reconciler/fencer"
	"github.com/seckill/reconciler/internal/config"
)

// Supervisor is what started the daemon and watches it, such as systemd. Its
// methods return at once.
type Supervisor interface {
	// Ready says that the daemon works, or stands by for the instance that does.
	Ready(status string)
	// Status says what it does now; whether it is ready does not change.
	Status(status string)
	// Stopping says that it ends, which takes limit at most.
	Stopping(limit time.Duration)
}

// nobody is the supervisor of a daemon that none watches.
type nobody struct{}

func (nobody) Ready(string)           {}
func (nobody) Status(string)          {}
func (nobody) Stopping(time.Duration) {}

func orNobody(s Supervisor) Supervisor {
	if s == nil {
		return nobody{}
	}
	return s
}

// CloseLimit is the time that [Daemon.Close] should be given.
const CloseLimit = 5 * time.Second

// StopLimit is how long a stop takes at most: the passes, the lease, the HTTP
// server, the connections and the last traces, one after the other.
func StopLimit(c config.Config) time.Duration {
	return c.Run.StopTimeout + releaseLimit + adminStopLimit + 2*CloseLimit
}

// Stalled says which jobs make no progress any more, nil while all do. An
// instance that stands by has nothing to do, and that it does in time.
func (d *Daemon) Stalled() error {
	if s := d.working.Load(); s != nil {
		return s.Stalled()
	}
	return nil
}

// NextRuns is when the jobs of this instance run next, by name; none while it
// stands by.
func (d *Daemon) NextRuns() map[string]time.Time {
	next := map[string]time.Time{}
	if s := d.working.Load(); s != nil {
		for _, job := range s.Jobs() {
			next[job.Name] = job.Next.UTC()
		}
	}
	return next
}

// Reload takes over from c what can change while the daemon runs, for passes
// and sends that begin from now on. It lists the paths of what it took over, and
// of what differs from the settings in force and needs a restart.
//
// How long refused messages are remembered stays as it was at the start.
func (d *Daemon) Reload(c config.Config) (taken, restart []string) {
	d.reloading.Lock()
	defer d.reloading.Unlock()
	d.live, taken, restart = d.live.Reload(c)
	d.setPolicy(d.live)
	d.gate.SetMax(maxRelease(d.live))
	d.sender.SetRate(d.live.RocketMQ.SendRate)
	return taken, restart
}

// inForce is the settings with what reloads took over.
func (d *Daemon) inForce() config.Config {
	d.reloading.Lock()
	defer d.reloading.Unlock()
	return d.live
}

func (d *Daemon) setPolicy(c config.Config) {
	policy := c.Policy()
	d.policies.Store(&policy)
}

func maxRelease(c config.Config) fencer.MaxRelease {
	m := c.Fencer.MaxRelease
	return fencer.MaxRelease{Percent: m.Percent, Min: m.Min, Window: m.Window}
}
