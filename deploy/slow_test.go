//go:build slow

package deploy

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
)

// The two packages: one that is installed first, and one to upgrade to.
const (
	first  = "0.1.0"
	second = "0.2.0"
)

// prepared is what is made once for all tests.
type prepared struct {
	debian   string            // the root directory
	packages map[string]string // version → file
}

// prepare makes the packages while the Debian is fetched.
func prepare(t *testing.T) prepared {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test boots a Debian in namespaces of its own and needs root: sudo make test-package")
	}
	p := prepared{packages: map[string]string{}}
	group, ctx := errgroup.WithContext(t.Context())
	group.Go(func() (err error) {
		p.debian, err = root(ctx)
		return err
	})
	group.Go(func() error {
		for _, version := range []string{first, second} {
			file, err := buildPackage(ctx, version)
			if err != nil {
				return err
			}
			p.packages[version] = file
		}
		return nil
	})
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	return p
}

// buildPackage is make package, without what an outer make has set.
func buildPackage(ctx context.Context, version string) (string, error) {
	module, err := devstack.ModuleRoot()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, "make", "package", "VERSION="+version)
	cmd.Dir = module
	for _, variable := range os.Environ() {
		if name, _, _ := strings.Cut(variable, "="); name != "MAKEFLAGS" && name != "MFLAGS" && name != "MAKELEVEL" && name != "MAKEOVERRIDES" {
			cmd.Env = append(cmd.Env, variable)
		}
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("make package: %w\n%s%s", err, out, stderr.String())
	}
	return filepath.Join(module, strings.TrimSpace(string(out))), nil
}

// TestSlowPackage follows one machine from the installation of the package to its
// purge. Redis, PostgreSQL and RocketMQ are the shared ones of the tests.
func TestSlowPackage(t *testing.T) {
	p := prepare(t)
	m := boot(t, p.debian)
	for version, file := range p.packages {
		if err := host(t.Context(), "cp", file, filepath.Join(m.dir, "root", version+".deb")); err != nil {
			t.Fatal(err)
		}
	}
	steps := []struct {
		name string
		do   func(*machine, *site)
	}{
		{"scripts", checkScripts},
		{"lintian", func(m *machine, _ *site) {
			m.run("lintian", "--allow-root", "--fail-on", "error,warning", "/root/"+first+".deb")
		}},
		{"install", install},
		{"units", checkUnits},
		{"stand by, then work", startBehindAnother},
		{"runs by hand", runByHand},
		{"reload", reload},
		{"watchdog", wedge},
		{"stop", stop},
		{"upgrade", upgrade},
		{"remove", remove},
		{"purge", purge},
	}
	s := newSite(t)
	for _, step := range steps {
		ok := t.Run(step.name, func(t *testing.T) {
			outer := m.t
			m.t = t
			defer func() { m.t = outer }()
			step.do(m, s)
		})
		if !ok {
			return // the next steps rest on this one
		}
	}
}

// site is what the daemon is configured for.
type site struct {
	database string // for the superuser
	login    string // for the daemon
	config   string
}

func newSite(t *testing.T) *site {
	t.Helper()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	database := stacktest.Database(t, stack)
	return &site{
		database: database,
		login:    stacktest.LoginURL(t, stack, database, "seckill_daemon", "seckill_operator"),
		// Without the URL, which is a credential; nobody listens on that port.
		config: fmt.Sprintf(`mode: observe
redis: {addrs: [%q]}
postgres: {url: "postgres://127.0.0.1:1/nowhere"}
rocketmq: {name_servers: [%q], topic: %q, consumer_group: %q}
admin: {listen: "127.0.0.1:0"}
lease: {ttl: 2s}
`, stack.Redis().Addr(), stack.NameServer().Addr(), topic, group),
	}
}

// checkScripts is shellcheck over every shell script that we ship or run.
func checkScripts(m *machine, _ *site) {
	var names []string
	err := filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			switch entry.Name() {
			case ".git", ".run", ".bin", "dist", "node_modules":
				return fs.SkipDir
			}
			return nil
		}
		if !entry.Type().IsRegular() {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil || !shell.Match(text) {
			return err
		}
		name := "/root/scripts/" + strings.ReplaceAll(strings.TrimPrefix(path, "../"), "/", "_")
		m.write(name, string(text), 0o644)
		names = append(names, name)
		return nil
	})
	if err != nil {
		m.t.Fatal(err)
	}
	if len(names) < 6 {
		m.t.Errorf("only %d scripts were found: %q", len(names), names)
	}
	m.run(append([]string{"shellcheck"}, names...)...)
}

var shell = regexp.MustCompile(`\A#!(/usr)?/bin/(env )?(ba)?sh\b`)

func install(m *machine, _ *site) {
	m.run("dpkg", "--install", "/root/"+first+".deb")
	if out := m.run("reconciler", "version"); !strings.HasPrefix(out, "reconciler "+first+" ") {
		m.t.Errorf("version: %s", out)
	}
	if got := m.run("stat", "--format", "%U:%G %a", "/etc/reconciler/config.yaml"); got != "root:reconciler 640\n" {
		m.t.Errorf("config.yaml is %s", got)
	}
	if out, _ := m.try("systemctl", "is-enabled", "reconciler"); out != "disabled\n" {
		m.t.Errorf("the service is %s after the installation", out)
	}
	if got := m.property("ActiveState"); got != "inactive" {
		m.t.Errorf("the service is %s after the installation", got)
	}
	m.run("runuser", "-u", "reconciler", "--", "reconciler", "--config", "/etc/reconciler/config.yaml", "config", "check")
	m.run("bash", "-n", "/usr/share/bash-completion/completions/reconciler")
	for _, page := range []string{"reconciler", "reconciler-run", "reconciler-reconcile", "reconciler-task-approve"} {
		m.run("gzip", "--test", "/usr/share/man/man8/"+page+".8.gz")
	}
}

// checkUnits has systemd's own view of the units: no complaint, and a sandbox
// that leaves an exposure of 1.3 of 10 at most.
func checkUnits(m *machine, _ *site) {
	out := m.run("systemd-analyze", "verify", "--man=no", "/lib/systemd/system/reconciler.service", "/lib/systemd/system/reconciler@quick.service")
	if out != "" {
		m.t.Errorf("systemd-analyze verify: %s", out) // it succeeds with unknown settings
	}
	for _, name := range []string{"reconciler.service", "reconciler@.service"} {
		m.run("systemd-analyze", "security", "--no-pager", "--offline=yes", "--threshold=13", "/lib/systemd/system/"+name)
	}
}

// startBehindAnother configures the service and starts it while another instance
// works: it is ready as a standby, and works when that one has gone.
func startBehindAnother(m *machine, s *site) {
	lease, err := pgstore.AcquireLease(m.t.Context(), pgstore.LeaseOptions{URL: s.database, Holder: "another-host/1"})
	if err != nil {
		m.t.Fatal(err)
	}
	m.write("/etc/reconciler/config.yaml", s.config, 0o640)
	m.write("/etc/reconciler/credentials/postgres_url", s.login, 0o600)
	for _, unit := range []string{"reconciler.service.d", "reconciler@.service.d"} {
		m.run("install", "-D", "-m", "644", "/usr/share/doc/reconciler/examples/credentials.conf", "/etc/systemd/system/"+unit+"/credentials.conf")
	}
	m.run("systemctl", "daemon-reload")
	m.run("systemctl", "enable", "--now", "reconciler") // returns when it is ready
	if got := m.property("ActiveState"); got != "active" {
		m.t.Errorf("%s after the start", got)
	}
	m.awaitProperty("StatusText", "standing by, mode observe: another-host/1 holds the lease")
	if err := lease.Release(m.t.Context()); err != nil {
		m.t.Fatal(err)
	}
	m.awaitProperty("StatusText", "working, mode observe")
	if got := m.run("ps", "--no-headers", "-o", "user", "-p", m.property("MainPID")); strings.TrimSpace(got) != "reconci+" && strings.TrimSpace(got) != "reconciler" {
		m.t.Errorf("it runs as %s", got)
	}
}

func runByHand(m *machine, _ *site) {
	m.run("systemctl", "start", "reconciler@quick")
	if log := m.run("journalctl", "--no-pager", "--unit", "reconciler@quick"); !strings.Contains(log, "consistent") {
		m.t.Errorf("no result in the journal:\n%s", log)
	}
	m.fails("systemctl", "start", "reconciler@once") // the daemon has the lease
	if got := m.run("systemctl", "show", "--value", "--property", "ExecMainStatus", "reconciler@once"); got != "4\n" {
		m.t.Errorf("exit status %s beside the daemon, want 4", got)
	}
	m.fails("systemctl", "start", "reconciler@nightly") // there is no such file
	m.write("/etc/reconciler/runs/nightly.conf", "RUN=status --output json\n", 0o644)
	m.run("systemctl", "start", "reconciler@nightly")
}

func reload(m *machine, s *site) {
	pid := m.property("MainPID")
	m.write("/etc/reconciler/config.yaml", s.config+"log: {level: debug}\nrun: {stop_timeout: 21s}\n", 0o640)
	m.run("systemctl", "reload", "reconciler")
	m.await("the log of the reload", bootLimit, func() (string, bool) {
		log := m.run("journalctl", "--no-pager", "--unit", "reconciler", "--lines", "100")
		return log, strings.Contains(log, "msg=reloaded changed=[log.level]") &&
			strings.Contains(log, "need a restart\" settings=[run.stop_timeout]") && strings.Contains(log, "level=DEBUG")
	})
	m.awaitProperty("ActiveState", "active")
	m.awaitProperty("StatusText", "working, mode observe")
	if got := m.property("MainPID"); got != pid {
		m.t.Errorf("process %s has become %s", pid, got)
	}
}

// wedge stops the process as a kernel would that gives it no time. systemd must
// notice that the watchdog is not fed, end it and start another one.
func wedge(m *machine, _ *site) {
	m.write("/etc/systemd/system/reconciler.service.d/hurry.conf", "[Service]\nWatchdogSec=6s\nTimeoutAbortSec=2s\n", 0o644)
	m.run("systemctl", "daemon-reload")
	m.run("systemctl", "restart", "reconciler")
	m.awaitProperty("StatusText", "working, mode observe")
	pid, restarts := m.property("MainPID"), m.property("NRestarts")
	time.Sleep(10 * time.Second) // longer than the watchdog waits: it is fed
	if got := m.property("MainPID"); got != pid {
		m.t.Fatalf("process %s did its work, and was replaced by %s\n%s", pid, got, m.journal())
	}
	m.run("kill", "-STOP", pid)
	m.await("another process", bootLimit, func() (string, bool) {
		got := m.property("MainPID")
		return got, got != pid && got != "0" && m.property("NRestarts") != restarts
	})
	m.awaitProperty("StatusText", "working, mode observe")
	if log := m.run("journalctl", "--no-pager", "--unit", "reconciler"); !strings.Contains(log, "Watchdog timeout") {
		m.t.Error("the journal does not tell of the watchdog")
	}
	m.run("rm", "/etc/systemd/system/reconciler.service.d/hurry.conf")
	m.run("systemctl", "daemon-reload")
}

// stop ends it in order: by itself, not by systemd's time limit.
func stop(m *machine, s *site) {
	m.run("systemctl", "restart", "reconciler")
	m.awaitProperty("StatusText", "working, mode observe")
	m.run("systemctl", "stop", "reconciler")
	if result, status := m.property("Result"), m.property("ExecMainStatus"); result != "success" || status != "0" {
		m.t.Errorf("it ended with %s, status %s", result, status)
	}
	// A lease that was given back is to be had at once.
	lease, err := pgstore.AcquireLease(m.t.Context(), pgstore.LeaseOptions{URL: s.database, Holder: "another-host/1"})
	if err != nil {
		m.t.Fatal(err)
	}
	if err := lease.Release(m.t.Context()); err != nil {
		m.t.Error(err)
	}
}

func upgrade(m *machine, s *site) {
	m.write("/etc/reconciler/config.yaml", s.config+"# edited by hand\n", 0o640)
	m.run("systemctl", "start", "reconciler")
	pid := m.property("MainPID")
	m.run("dpkg", "--install", "/root/"+second+".deb")
	m.await("another process", bootLimit, func() (string, bool) {
		got := m.property("MainPID")
		return got, got != pid && got != "0"
	})
	m.awaitProperty("StatusText", "working, mode observe")
	if out := m.run("/proc/"+m.property("MainPID")+"/exe", "version"); !strings.HasPrefix(out, "reconciler "+second+" ") {
		m.t.Errorf("running: %s", out)
	}
	if text := m.run("cat", "/etc/reconciler/config.yaml"); !strings.Contains(text, "# edited by hand") {
		m.t.Errorf("the edited configuration was replaced:\n%s", text)
	}
	if got := m.run("stat", "--format", "%U:%G %a", "/etc/reconciler/config.yaml"); got != "root:reconciler 640\n" {
		m.t.Errorf("config.yaml is %s", got)
	}
}

func remove(m *machine, _ *site) {
	m.run("dpkg", "--remove", "reconciler")
	if out, err := m.try("pgrep", "-x", "reconciler"); err == nil {
		m.t.Errorf("still running: %s", out)
	}
	for path, want := range map[string]bool{
		"/etc/reconciler/config.yaml":                                    true,
		"/etc/reconciler/credentials/postgres_url":                       true,
		"/etc/reconciler/runs/nightly.conf":                              true,
		"/var/lib/reconciler":                                            true,
		"/usr/bin/reconciler":                                            false,
		"/lib/systemd/system/reconciler.service":                         false,
		"/etc/systemd/system/multi-user.target.wants/reconciler.service": false,
		"/usr/share/bash-completion/completions/reconciler":              false,
	} {
		if got := m.exists(path); got != want {
			m.t.Errorf("%s: exists: %t", path, got)
		}
	}
}

func purge(m *machine, _ *site) {
	m.run("dpkg", "--purge", "reconciler")
	for _, path := range []string{"/etc/reconciler", "/var/lib/reconciler"} {
		if m.exists(path) {
			m.t.Errorf("%s is left: %s", path, m.run("find", path))
		}
	}
	if out, _ := m.try("dpkg", "--list", "reconciler"); strings.Contains(out, "\nii") || strings.Contains(out, "\nrc") {
		m.t.Errorf("the package is left: %s", out)
	}
}

// TestSlowComposeFile has the file read by the library that docker compose reads
// it with. No image is run: there is no engine here.
func TestSlowComposeFile(t *testing.T) {
	const validator = "github.com/compose-spec/compose-go/v2/cmd@v2.16.2"
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	if err := host(ctx, "go", "run", validator, "compose.yaml"); err != nil {
		t.Error(err)
	}
	broken := filepath.Join(t.TempDir(), "compose.yaml")
	if err := os.WriteFile(broken, []byte("services: {redis: {imagine: redis:8}}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if host(ctx, "go", "run", validator, broken) == nil {
		t.Error("a broken file is not noticed")
	}
}
