// Package deploy holds what installs the reconciler: units of systemd, the Debian
// package and the containers. It has only tests.
package deploy

import (
	"bufio"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
)

// unit reads a unit file: section → lines, in their order.
func unit(t *testing.T, name string) map[string][]string {
	t.Helper()
	f, err := os.Open("systemd/" + name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sections, section := map[string][]string{}, ""
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := strings.TrimSpace(lines.Text())
		switch {
		case line == "" || line[0] == '#':
		case line[0] == '[':
			section = line
		default:
			sections[section] = append(sections[section], line)
		}
	}
	return sections
}

// value is what a unit's [Service] sets a name to.
func value(t *testing.T, lines []string, name string) string {
	t.Helper()
	for _, line := range lines {
		if v, ok := strings.CutPrefix(line, name+"="); ok {
			return v
		}
	}
	t.Fatalf("no %s= in %q", name, lines)
	return ""
}

// Runs by hand may do no more than the daemon.
func TestUnitsHaveTheSameSandbox(t *testing.T) {
	sandbox := func(name string) []string {
		lines := unit(t, name)["[Service]"]
		at := slices.Index(lines, "User=reconciler")
		if at < 0 {
			t.Fatalf("%s does not run as its user", name)
		}
		return lines[at:]
	}
	if diff := cmp.Diff(sandbox("reconciler.service"), sandbox("reconciler@.service")); diff != "" {
		t.Errorf("-reconciler.service +reconciler@.service\n%s", diff)
	}
}

func TestStopFitsTheUnit(t *testing.T) {
	for _, name := range []string{"reconciler.service", "reconciler@.service"} {
		limit, err := time.ParseDuration(value(t, unit(t, name)["[Service]"], "TimeoutStopSec"))
		if err != nil {
			t.Fatal(err)
		}
		if need := daemon.StopLimit(config.Default()); limit <= need {
			t.Errorf("%s: TimeoutStopSec=%s, and a stop may take %s", name, limit, need)
		}
	}
}

func TestExampleNamesSettings(t *testing.T) {
	text, err := os.ReadFile("systemd/credentials.conf")
	if err != nil {
		t.Fatal(err)
	}
	secret := t.TempDir() + "/secret"
	if err := os.WriteFile(secret, []byte("postgres://u:p@127.0.0.1/d"), 0o600); err != nil {
		t.Fatal(err)
	}
	environ := []string{"RECONCILER_ROCKETMQ_ACCESS_KEY=key"}
	for line := range strings.Lines(strings.ReplaceAll(string(text), "\n#", "\n")) {
		if name, ok := strings.CutPrefix(line, "Environment="); ok {
			name, _, _ = strings.Cut(name, "=")
			environ = append(environ, name+"="+secret)
		}
	}
	if len(environ) != 4 {
		t.Errorf("%d secrets in the example, not 3", len(environ)-1)
	}
	if _, err := config.Load(config.Options{File: "../config.yaml", Environ: environ}); err != nil {
		t.Error(err)
	}
}
