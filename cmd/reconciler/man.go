package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// newMan writes the manual for packages. People have it from their package, or
// ask --help.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:     "man DIR",
		Short:   "Write the manual pages of all commands into a directory",
		Example: "  reconciler man /usr/local/share/man/man8",
		Args:    args("DIR"),
		Hidden:  true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil { //nolint:gosec // a manual is for everybody
				return fmt.Errorf("write the manual: %w", err)
			}
			root := cmd.Root()
			asForAnybody(root)
			header := &doc.GenManHeader{Section: "8", Manual: "Seckill reconciler", Source: "reconciler " + readBuild().Version}
			if err := doc.GenManTree(root, header, args[0]); err != nil {
				return fmt.Errorf("write the manual: %w", err)
			}
			return nil
		},
	}
}

// asForAnybody takes what belongs to this machine out of the help: the date, and
// the login that --actor defaults to.
func asForAnybody(cmd *cobra.Command) {
	cmd.DisableAutoGenTag = true
	if actor := cmd.Flags().Lookup("actor"); actor != nil {
		actor.DefValue = "your login"
	}
	for _, child := range cmd.Commands() {
		asForAnybody(child)
	}
}
