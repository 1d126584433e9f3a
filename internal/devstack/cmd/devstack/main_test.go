package main

import (
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
)

// Only the command that `with` runs has said itself why it failed. A program
// that devstack runs for itself, such as apt-get, is not heard.
func TestReportSaysWhatNobodyElseSaid(t *testing.T) {
	t.Parallel()
	failed := exec.CommandContext(t.Context(), "false").Run()
	if failed == nil {
		t.Fatal("false succeeded")
	}
	for name, c := range map[string]struct {
		err    error
		status int
		said   string
	}{
		"success":                  {nil, 0, ""},
		"command of with":          {statusError(3), 3, ""},
		"program of devstack's":    {fmt.Errorf("install: %w", failed), 1, "devstack: install: exit status 1\n"},
		"no program had any part":  {errors.New("no port"), 1, "devstack: no port\n"},
		"command of with, wrapped": {fmt.Errorf("with: %w", statusError(2)), 2, ""},
	} {
		var stderr strings.Builder
		if status := report(c.err, &stderr); status != c.status || stderr.String() != c.said {
			t.Errorf("%s: status %d and %q, want %d and %q", name, status, stderr.String(), c.status, c.said)
		}
	}
}
