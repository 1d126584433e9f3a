package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/reconcile/render"
)

func newRun(a *app) *cobra.Command {
	var once, dryRun bool
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the daemon, or one pass of it",
		Long: `Runs the workers until it is told to stop (SIGTERM, SIGINT; a second one ends it at
once). One instance works at a time: another one waits for the lease. SIGHUP reloads the
settings that a running daemon can take over; the log names those that need a restart.

With --once it runs one pass of every worker, compares both sides as reconcile does, and
exits: 0 done and consistent, 2 drift confirmed, 3 a decision or the comparison rested on
evidence that could not be read, 4 another instance holds the lease.

In mode observe, the default, and with --dry-run everything is decided, counted and
reported, and nothing is changed.`,
		Example: "  reconciler run\n  reconciler run --once --dry-run --output json",
		Args:    args(),
	}
	cmd.Flags().BoolVar(&once, "once", false, "one pass of every worker, then exit with the verdict")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "decide and report, change nothing")
	settingFlag(cmd.Flags(), "mode", "mode", "`observe|act`")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !once {
			return a.serve(cmd, dryRun)
		}
		return a.withDaemon(cmd, dryRun, func(ctx context.Context, d *daemon.Daemon) error { return runOnce(ctx, d, out) })
	}
	return cmd
}

// withDaemon runs do with the daemon put together as configured.
func (a *app) withDaemon(cmd *cobra.Command, dryRun bool, do func(context.Context, *daemon.Daemon) error) error {
	loaded, err := a.settings(cmd)
	if err != nil {
		return err
	}
	return openDaemon(cmd.Context(), daemon.Options{Config: loaded.Config, DryRun: dryRun}, do)
}

// openDaemon runs do with a daemon that logs, counts and traces as this process does.
func openDaemon(ctx context.Context, o daemon.Options, do func(context.Context, *daemon.Daemon) error) error {
	c := o.Config
	version := readBuild().Version
	stopTracing, err := observe.StartTracing(ctx, observe.Tracing{
		Endpoint: c.Tracing.Endpoint, Authorization: c.Tracing.Authorization, Sample: c.Tracing.Sample,
		Timeout: c.Tracing.Timeout, Version: version,
	})
	if err != nil {
		return err
	}
	defer func() {
		ending, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
		defer cancel()
		if err := stopTracing(ending); err != nil {
			slog.Warn("the last traces were not exported", "error", err)
		}
	}()
	o.Logger, o.Metrics = slog.Default(), observe.NewMetrics(version)
	d, err := daemon.Open(ctx, o)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
		defer cancel()
		d.Close(closing)
	}()
	return do(ctx, d)
}

const closeLimit = daemon.CloseLimit

func runOnce(ctx context.Context, d *daemon.Daemon, out *result) error {
	lease, err := d.Acquire(ctx)
	if errors.Is(err, pgstore.ErrLeaseHeld) {
		return &verdict{exitLocked, fmt.Errorf("another instance is working: %w", err)}
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-lease.Lost():
			cancel()
		case <-ctx.Done():
		}
	}()
	v := d.Once(ctx)
	release, cancelRelease := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
	defer cancelRelease()
	err = lease.Release(release)
	err = errors.Join(printVerdict(out, v), err)
	if err != nil {
		return err
	}
	if v.Incomplete {
		return &verdict{exitIncomplete, v.Err()}
	}
	if v.Drift {
		return &verdict{exitDrift, nil}
	}
	return nil
}

func printVerdict(out *result, v daemon.Verdict) error {
	var rows []table.Row
	for _, job := range v.Jobs {
		for _, d := range job.Decisions {
			rows = append(rows, table.Row{job.Job, pass.RowName(d.Row), string(d.Verb), d.Cause, d.Count})
		}
	}
	return out.print(struct {
		Schema int `json:"schema"`
		daemon.Verdict
	}{1, v}, func() error {
		if err := out.table("nothing was due", table.Row{"WORKER", "ROW", "DOES", "CAUSE", "COUNT"}, rows); err != nil {
			return err
		}
		for _, job := range v.Jobs {
			if err := out.line("%s: %s", job.Job, orDash(schedule.Result(job.Counts).String())); err != nil {
				return err
			}
		}
		if r := v.Reconciliation; r != nil {
			return errors.Join(out.line(""), render.Write(out.a.stdout, render.FormatTable, r))
		}
		return nil
	})
}
