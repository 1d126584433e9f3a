package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// daemon is `reconciler run` as a process, and what it has told so far.
type daemon struct {
	binary string
	config string // path of its configuration file
	dir    string // working directory
	log    string // path of its log file
	addr   string // of its admin server

	process *exec.Cmd
	ended   chan struct{} // closed when the process is gone
	endErr  error         // how it ended, once ended is closed

	mu    sync.Mutex
	past  map[sample]float64 // of lives that are over
	now   map[sample]float64 // of this life, as last read
	lives int
}

// sample is one counter of /metrics.
type sample struct{ name, a, b string }

// command runs another command of the same binary, with the same settings.
func (d *daemon) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, d.binary, //nolint:gosec // this program itself, with the demo's own arguments
		append([]string{"--config", d.config}, args...)...)
	cmd.Dir = d.dir
	// The caller's own settings must not leak into the demo.
	for _, variable := range os.Environ() {
		if !strings.HasPrefix(variable, "RECONCILER_") {
			cmd.Env = append(cmd.Env, variable)
		}
	}
	return cmd
}

// run runs a command to its end.
func (d *daemon) run(ctx context.Context, args ...string) error {
	if out, err := d.command(ctx, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("reconciler %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

// reconcile runs a reconciliation and reads its report. Drift that is left is
// no error.
func (d *daemon) reconcile(ctx context.Context, args ...string) (RepairPass, error) {
	cmd := d.command(ctx, args...)
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.Output()
	const drift, incomplete = 2, 3 // exit statuses with a report
	status, ended := errors.AsType[*exec.ExitError](err)
	if err != nil && (!ended || (status.ExitCode() != drift && status.ExitCode() != incomplete)) {
		return RepairPass{}, fmt.Errorf("reconciler %s: %w\n%s", strings.Join(args, " "), err, log.String())
	}
	var report struct {
		Verdict  string `json:"verdict"`
		Findings []struct {
			Check    string `json:"check"`
			Severity string `json:"severity"`
			Repair   struct {
				State string `json:"state"`
			} `json:"repair"`
		} `json:"findings"`
	}
	if err := json.Unmarshal(out, &report); err != nil {
		return RepairPass{}, fmt.Errorf("read the report of a reconciliation: %w", err)
	}
	pass := RepairPass{Verdict: report.Verdict, Repaired: map[string]int{}, Standing: map[string]int{}}
	for _, f := range report.Findings {
		switch {
		case f.Repair.State == "done":
			pass.Repaired[f.Check]++
		case f.Severity == "critical" || f.Severity == "error":
			pass.Standing[f.Check]++
		}
	}
	pass.Deficits = pass.Standing["deficit"]
	return pass, nil
}

// start starts the daemon. It dies with this process: the kernel sees to it,
// for as long as the thread that started it lives, which is why that is kept.
func (d *daemon) start() error {
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the daemon's log: %w", err)
	}
	d.process = d.command(context.Background(), "run") // ended by stop or kill
	d.process.Stdout, d.process.Stderr = log, log
	d.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	d.ended = make(chan struct{})
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer func() { _ = log.Close() }() // the process has its own copy
		err := d.process.Start()
		started <- err
		if err == nil {
			d.endErr = d.process.Wait()
			close(d.ended)
		}
	}()
	if err := <-started; err != nil {
		return fmt.Errorf("start the daemon: %w", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lives++
	return nil
}

const (
	readyLimit = 30 * time.Second
	stopLimit  = 30 * time.Second
)

// await waits until the daemon works: it holds the lease and reaches everything.
func (d *daemon) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	ticker := time.NewTicker(100 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := d.get(ctx, "/readyz", func(io.Reader) error { return nil })
		if err == nil {
			return nil
		}
		select {
		case <-ticker.C:
		case <-d.ended:
			return fmt.Errorf("the daemon ended while starting: %w; see %s", d.endErr, d.log)
		case <-ctx.Done():
			return fmt.Errorf("the daemon does not get ready: %w; see %s", err, d.log)
		}
	}
}

// kill ends the daemon as a crash would, and returns when it is gone.
func (d *daemon) kill() error {
	d.read(context.Background()) // what it counted is gone with it
	if err := d.process.Process.Kill(); err != nil {
		return fmt.Errorf("kill the daemon: %w", err)
	}
	<-d.ended
	d.mu.Lock()
	defer d.mu.Unlock()
	for s, value := range d.now {
		d.past[s] += value
	}
	clear(d.now)
	return nil
}

// stop ends the daemon as its operator would; it has to end cleanly.
func (d *daemon) stop() error {
	d.read(context.Background())
	if err := d.process.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop the daemon: %w", err)
	}
	select {
	case <-d.ended:
		if d.endErr != nil {
			return fmt.Errorf("the daemon did not stop cleanly: %w; see %s", d.endErr, d.log)
		}
		return nil
	case <-time.After(stopLimit):
		return errors.Join(fmt.Errorf("the daemon did not stop within %s; see %s", stopLimit, d.log), d.process.Process.Kill())
	}
}

// alive says whether the process runs.
func (d *daemon) alive() bool {
	if d.ended == nil {
		return false
	}
	select {
	case <-d.ended:
		return false
	default:
		return true
	}
}

func (d *daemon) get(ctx context.Context, path string, take func(io.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+d.addr+path, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }() // read to its end, or given up
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10)) // only for the message
		return fmt.Errorf("%s: %s: %s", path, response.Status, strings.TrimSpace(string(text)))
	}
	return take(response.Body)
}

// Metrics of the daemon that the demo shows.
const (
	metricDecisions = "seckill_decisions_total"
	metricItems     = "seckill_job_items_total"
)

// shownMetrics has the labels that each is shown by.
var shownMetrics = map[string][2]string{
	metricDecisions: {"row", "verb"},
	metricItems:     {"worker", "result"},
}

// read reads /metrics. A daemon that does not answer leaves what was read before.
func (d *daemon) read(ctx context.Context) {
	_ = d.get(ctx, "/metrics", func(body io.Reader) error {
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(body)
		if err != nil {
			return err
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		for name, labels := range shownMetrics {
			for _, m := range families[name].GetMetric() {
				d.now[sample{name, label(m, labels[0]), label(m, labels[1])}] = m.GetCounter().GetValue()
			}
		}
		return nil
	})
}

func label(m *dto.Metric, name string) string {
	for _, pair := range m.GetLabel() {
		if pair.GetName() == name {
			return pair.GetValue()
		}
	}
	return ""
}

// counters are the sums over all lives of the daemon.
func (d *daemon) counters() map[sample]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	sums := maps.Clone(d.past)
	for s, value := range d.now {
		sums[s] += value
	}
	counts := make(map[sample]int, len(sums))
	for s, value := range sums {
		counts[s] = int(value)
	}
	return counts
}

// freeAddr is a loopback address that nobody listens on.
func freeAddr(ctx context.Context) (string, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	addr := listener.Addr().String()
	return addr, listener.Close()
}

// newDaemon prepares a daemon of the given binary and settings.
func newDaemon(binary, dir, addr string) *daemon {
	return &daemon{
		binary: binary, dir: dir, addr: addr,
		config: filepath.Join(dir, configFile), log: filepath.Join(dir, "daemon.log"),
		past: map[sample]float64{}, now: map[sample]float64{},
	}
}
