package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/seckill/reconciler/internal/demo"
)

func newDemo(a *app) *cobra.Command {
	o := demo.Default()
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Break a whole flash sale on real services and watch the daemon repair it",
		Long: `Starts Redis, PostgreSQL and RocketMQ of its own, installing what is missing, sells an
activity to a crowd while everything goes wrong that can, and lets the daemon, a process
of its own that is killed once in the middle, bring every reservation to an order or back
into stock. What came of it is counted independently of the daemon, in Redis and in
PostgreSQL, and left in report.md and report.json. The services end with the demo.

Exit status: 0 every promise was kept, 2 one was broken, 1 the demo itself failed.`,
		Example: "  reconciler demo\n  reconciler demo --users 3000 --units 1000 --seed 7",
		Args:    args(),
	}
	f := cmd.Flags()
	f.StringVar(&o.Dir, "dir", o.Dir, "`directory` for services, settings, logs and reports")
	f.IntVar(&o.Users, "users", o.Users, "`number` of users, each of whom tries once")
	f.Int64Var(&o.Units, "units", o.Units, "`number` of units to sell")
	f.Int64Var(&o.Buckets, "buckets", o.Buckets, "`number` of stock buckets")
	f.Float64Var(&o.Rate, "rate", o.Rate, "`requests` per second")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "`number` from which follows what goes wrong with whom")
	f.Float64Var(&o.Share, "share", o.Share, "`part` of the reservations that each fault befalls, 0 to 0.066")
	f.DurationVar(&o.Limit, "limit", o.Limit, "`time` that the recovery may take")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := o.Validate(); err != nil {
			return usageError(cmd, err)
		}
		var err error
		if o.Binary, err = os.Executable(); err != nil {
			return fmt.Errorf("find this program: %w", err)
		}
		plain := os.Getenv("NO_COLOR") != ""
		o.Progress, o.Terminal = a.stderr, isTerminal(a.stderr)
		o.Colour = o.Terminal && !plain
		report, err := demo.Run(cmd.Context(), o)
		err = errors.Join(err, report.Save(o.Dir))
		printErr := out.print(report, func() error {
			return out.line("%s\nreport: %s", report.Text(isTerminal(a.stdout) && !plain), filepath.Join(o.Dir, "report.md"))
		})
		if err := errors.Join(err, printErr); err != nil {
			return err
		}
		if report.Verdict != demo.Kept {
			return &verdict{status: exitDrift, err: errors.New("a promise was broken: see the report")}
		}
		return nil
	}
	return cmd
}

// isTerminal says whether a stream is a terminal.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
