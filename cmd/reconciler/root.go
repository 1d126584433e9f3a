package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
)

// app is what the commands of one invocation share: the streams and the global
// flags. What a command needs beyond them it gets from wiring.go.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	configFile     string
	level          slog.LevelVar // of the log
	current        config.Loaded // of the command that runs, once it has read its settings
}

// newRoot registers every command that is built.
func newRoot(a *app) *cobra.Command {
	root := group("reconciler", "Finish what a flash sale left half done",
		`Drives stuck Redis reservations of a flash sale to an order or to a release,
exactly once, and compares Redis with PostgreSQL.

Exit status: 0 done or consistent, 1 error, 2 drift confirmed, 3 incomplete
evidence or an unreachable dependency, 4 another run holds the lock.`)
	root.Example = "  reconciler config check\n  reconciler --config /etc/reconciler/config.yaml migrate status"
	root.SilenceErrors = true
	root.SilenceUsage = true
	root.SetFlagErrorFunc(usageError)

	flags := root.PersistentFlags()
	flags.StringVar(&a.configFile, "config", "", "configuration `file` (default config.yaml, then /etc/reconciler/config.yaml)")
	settingFlag(root.PersistentFlags(), "log.level", "log-level", "least `level` that is logged: debug, info, warn, error")
	settingFlag(root.PersistentFlags(), "log.format", "log-format", "log lines as `text|json`")

	root.AddCommand(
		newRun(a),
		newStatus(a),
		newShow(a),
		newVersion(a),
		newConfig(a),
		newMigrate(a),
		newScope(a),
		newReconcile(a),
		newTransfer(a),
		newRebalance(a),
		newReport(a),
		newPurge(a),
		newTask(a),
		newJob(a),
		newBroker(a),
		newDoctor(a),
		newDemo(a),
		newMan(),
	)
	return root
}

// group is a command that only holds others.
func group(use, short, long string, children ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:   use,
		Short: short,
		Long:  long,
		Args:  cobra.ArbitraryArgs, // named below, with suggestions
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usageError(cmd, errors.New("a command is missing"))
			}
			text := fmt.Sprintf("unknown command %q", args[0])
			if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
				text += "; did you mean " + strings.Join(near, " or ") + "?"
			}
			return usageError(cmd, errors.New(text))
		},
	}
	cmd.SuggestionsMinimumDistance = 2
	cmd.AddCommand(children...)
	return cmd
}

// usageError adds where help is to be had.
func usageError(cmd *cobra.Command, err error) error {
	return fmt.Errorf("%w\nsee %s --help", err, cmd.CommandPath())
}

// args checks the number of arguments and names what is missing.
func args(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, got []string) error {
		if len(got) < len(names) {
			return usageError(cmd, fmt.Errorf("%s is missing", names[len(got)]))
		}
		if len(got) > len(names) {
			return usageError(cmd, fmt.Errorf("%q is one argument too many", got[len(names)]))
		}
		return nil
	}
}
