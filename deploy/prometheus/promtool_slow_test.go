//go:build slow

package prometheus_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/seckill/reconciler/internal/devstack"
)

// promtool is $PROMTOOL, or the program of Debian's package prometheus, which
// is unpacked into the cache and not installed.
func promtool(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("PROMTOOL"); path != "" {
		return path
	}
	cache, err := devstack.DefaultCache()
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(cache, "prometheus")
	path := filepath.Join(dir, "usr", "bin", "promtool")
	if _, err := os.Stat(path); err == nil {
		return path
	}
	fresh, err := os.MkdirTemp(cache, "prometheus-") //nolint:usetesting // a rename needs the same file system
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(fresh) }()
	run(t, fresh, "sh", "-c", `apt-get download prometheus >&2 && dpkg-deb -x prometheus_*.deb unpacked`)
	if err := os.Rename(filepath.Join(fresh, "unpacked"), dir); err != nil && !os.IsExist(err) {
		if _, there := os.Stat(path); there != nil { // another test was not faster
			t.Fatal(err)
		}
	}
	return path
}

func run(t *testing.T, dir, name string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v\n%s", name, args, err, out)
	}
}

// TestSlowPromtool lets Prometheus's own tool check the rules, run their test,
// and read each expression of the dashboard.
func TestSlowPromtool(t *testing.T) {
	tool := promtool(t)
	run(t, ".", tool, "check", "rules", "alerts.yaml")
	run(t, ".", tool, "test", "rules", "alerts.test.yaml")
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	if err := os.WriteFile(file, asRules(t), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, ".", tool, "check", "rules", file)
}
