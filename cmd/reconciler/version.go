package main

import (
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/migrations"
)

// version is set when a release is built, by -ldflags -X.
var version string

// build is what a binary knows of itself.
type build struct {
	Version  string `json:"version"`
	Commit   string `json:"commit,omitempty"`
	Modified bool   `json:"modified,omitempty"` // built with changes that were not committed
	Go       string `json:"go"`
	Schema   int64  `json:"schema_version"` // of PostgreSQL schema seckill
}

func newVersion(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this binary",
		Example: "  reconciler version\n  reconciler version --output json",
		Args:    args(),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		b := readBuild()
		return out.print(b, func() error {
			return out.line("reconciler %s (%s, schema %d)", b.Version, b.Go, b.Schema)
		})
	}
	return cmd
}

// readBuild takes what the linker was told and what the toolchain recorded.
func readBuild() build {
	b := build{Version: version, Go: runtime.Version(), Schema: migrations.Latest()}
	if info, ok := debug.ReadBuildInfo(); ok {
		if b.Version == "" {
			b.Version = info.Main.Version
		}
		for _, s := range info.Settings {
			switch s.Key {
			case "vcs.revision":
				b.Commit = s.Value
			case "vcs.modified":
				b.Modified = s.Value == "true"
			}
		}
	}
	if b.Version == "" {
		b.Version = "(devel)"
	}
	return b
}
