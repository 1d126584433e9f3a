//go:build slow

package deploy

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack"
)

// A minimal Debian 12 with systemd, and what checks packages and scripts. Its
// directory in the cache has another name when another one is wanted.
const (
	suite     = "bookworm"
	base      = "systemd,systemd-sysv,procps"
	debianDir = "debian-" + suite + "-1"
)

// bootLimit bounds what the machine does as a whole, commandLimit one command in it.
const (
	bootLimit    = 2 * time.Minute
	commandLimit = 3 * time.Minute
)

// root returns the directory of the Debian, which is fetched once.
func root(ctx context.Context) (string, error) {
	cache, err := devstack.DefaultCache()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, debianDir)
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := installDebootstrap(ctx); err != nil {
		return "", err
	}
	fresh := dir + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return "", err
	}
	if err := os.MkdirAll(fresh, 0o755); err != nil {
		return "", err
	}
	steps := [][]string{
		append([]string{"debootstrap", "--variant=minbase", "--include=" + base, suite, fresh}, mirror(ctx)...),
		// debootstrap does not know virtual packages, which lintian needs.
		{"chroot", fresh, "apt-get", "-q", "update"},
		{
			"chroot", fresh, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q", "-o", "Dpkg::Options::=--force-unsafe-io",
			"install", "--no-install-recommends", "lintian", "shellcheck",
		},
		{"chroot", fresh, "apt-get", "clean"},
	}
	for _, step := range steps {
		if err := host(ctx, step...); err != nil {
			return "", err
		}
	}
	return dir, os.Rename(fresh, dir)
}

// mirror is where this machine has its packages from; none: debootstrap's own.
func mirror(ctx context.Context) []string {
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(REPO_URI)",
		"Created-By: Packages", "Release: "+suite, "Component: main").Output()
	uri, _, found := strings.Cut(string(out), "\n")
	if err != nil || !found {
		return nil
	}
	return []string{uri}
}

func installDebootstrap(ctx context.Context) error {
	if _, err := exec.LookPath("debootstrap"); err == nil {
		return nil
	}
	install := []string{"env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q", "install", "--no-install-recommends", "debootstrap"}
	if host(ctx, install...) == nil {
		return nil
	}
	return errors.Join(host(ctx, "apt-get", "-q", "update"), host(ctx, install...))
}

// host runs a command outside the machine; its output is part of the error.
func host(ctx context.Context, command ...string) error {
	out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput()
	if err != nil {
		out = out[max(0, len(out)-4000):]
		return fmt.Errorf("%s: %w\n%s", strings.Join(command, " "), err, out)
	}
	return nil
}

// machine is a Debian that systemd has booted in namespaces; it shares the
// network with us, so that the services of the tests are on its loopback.
type machine struct {
	t   *testing.T
	dir string // its root directory, from outside
	pid string // of its process 1, outside
}

// boot boots a copy of the Debian, and ends it with the test.
func boot(t *testing.T, debian string) *machine {
	t.Helper()
	m := &machine{t: t, dir: filepath.Join(t.TempDir(), "root")}
	if err := host(t.Context(), "cp", "-a", "--reflink=auto", debian, m.dir); err != nil {
		t.Fatal(err)
	}
	script, err := filepath.Abs("testdata/boot.sh")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(script, m.dir)
	stdin, err := cmd.StdinPipe() // it lives as long as this is open, so not longer than we do
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var console console
	cmd.Stderr = &console
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close()
		_, _ = io.Copy(io.Discard, stdout)
		if err := cmd.Wait(); err != nil {
			t.Errorf("the end of the machine: %v", err)
		}
		if t.Failed() {
			t.Logf("the machine's console:\n%s", console.String())
		}
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		t.Fatalf("the machine does not boot: %v\n%s", err, console.String())
	}
	m.pid = strings.TrimSpace(line)
	m.await("boot", bootLimit, func() (string, bool) {
		state, _ := m.try("systemctl", "is-system-running")
		return state, strings.TrimSpace(state) == "running"
	})
	return m
}

// console keeps what process 1 says.
type console struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (c *console) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text.Write(p)
}

func (c *console) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.text.String()
}

// try runs a command in the machine, as root, and returns what it printed on
// both streams.
func (m *machine) try(command ...string) (string, error) {
	// Not the test's own context: cleanups run commands too.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.t.Context()), commandLimit)
	defer cancel()
	args := append([]string{
		"--target", m.pid, "--mount", "--uts", "--ipc", "--pid", "--cgroup", "--root", "--wd", "--",
		"env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", "DEBIAN_FRONTEND=noninteractive",
	}, command...)
	out, err := exec.CommandContext(ctx, "nsenter", args...).CombinedOutput()
	return string(out), err
}

// run is a command that must succeed.
func (m *machine) run(command ...string) string {
	m.t.Helper()
	out, err := m.try(command...)
	if err != nil {
		m.t.Fatalf("%s: %v\n%s\n%s", strings.Join(command, " "), err, out, m.journal())
	}
	return out
}

// fails is a command that must fail.
func (m *machine) fails(command ...string) string {
	m.t.Helper()
	out, err := m.try(command...)
	if err == nil {
		m.t.Fatalf("%s succeeded:\n%s", strings.Join(command, " "), out)
	}
	return out
}

// write writes a file of the machine.
func (m *machine) write(path, text string, mode os.FileMode) {
	m.t.Helper()
	name := filepath.Join(m.dir, path)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		m.t.Fatal(err)
	}
	file, err := os.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, mode) // keeps the owner of one that exists
	if err != nil {
		m.t.Fatal(err)
	}
	if _, err := file.WriteString(text); err != nil {
		m.t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) exists(path string) bool {
	_, err := os.Lstat(filepath.Join(m.dir, path))
	return err == nil
}

// property is what systemd says of the service.
func (m *machine) property(name string) string {
	m.t.Helper()
	return strings.TrimSpace(m.run("systemctl", "show", "--value", "--property", name, "reconciler.service"))
}

// journal is the end of what the services have logged.
func (m *machine) journal() string {
	out, _ := m.try("journalctl", "--no-pager", "--lines", "60", "--output", "short-precise")
	return out
}

// await asks until the answer is as wished.
func (m *machine) await(what string, limit time.Duration, ask func() (string, bool)) {
	m.t.Helper()
	for end := time.Now().Add(limit); ; time.Sleep(100 * time.Millisecond) {
		answer, ok := ask()
		if ok {
			return
		}
		if time.Now().After(end) {
			m.t.Fatalf("%s: still %q after %s\n%s", what, strings.TrimSpace(answer), limit, m.journal())
		}
	}
}

// awaitProperty waits until the service's property has the wanted value.
func (m *machine) awaitProperty(name, want string) {
	m.t.Helper()
	m.await(name, bootLimit, func() (string, bool) {
		got := m.property(name)
		return got, got == want
	})
}
