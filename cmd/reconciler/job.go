package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/view"
)

// jobNames are the jobs of the daemon.
var jobNames = daemon.JobNames()

func newJob(a *app) *cobra.Command {
	cmd := group("job", "See, pause and run the daemon's jobs",
		`The jobs are
  `+strings.Join(jobNames, "\n  ")+`
A pause outlasts a restart of the daemon. A run by hand is made by the daemon that holds the lease.`,
		newJobList(a), newJobPause(a), newJobResume(a), newJobRun(a))
	cmd.Example = "  reconciler job list"
	return cmd
}

func newJobList(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the jobs with their last run",
		Example: "  reconciler job list --output json",
		Args:    args(),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			jobs, err := daemon.ListJobs(ctx, store)
			if err != nil {
				return err
			}
			return printJobs(out, jobs, a.current.Config)
		})
	}
	return cmd
}

func printJobs(out *result, jobs []pgstore.Job, c config.Config) error {
	views := make([]view.Job, 0, len(jobs))
	rows := make([]table.Row, 0, len(jobs))
	for _, j := range jobs {
		views = append(views, view.OfJob(j))
		rows = append(rows, table.Row{j.Name, jobState(j, c), stamp(j.LastFinishedAt), stamp(j.LastSuccessAt), orDash(view.Counts(j.LastResult)), orDash(firstLine(j.LastError))})
	}
	return out.print(struct {
		Schema int        `json:"schema"`
		Jobs   []view.Job `json:"jobs"`
	}{1, views}, func() error {
		return out.table("no jobs", table.Row{"JOB", "STATE", "LAST RUN", "LAST SUCCESS", "RESULT", "ERROR"}, rows)
	})
}

func jobState(j pgstore.Job, c config.Config) string {
	switch off := daemon.OffBy(c, j.Name); {
	case off != "":
		return "off: " + off
	case j.Paused:
		return "paused by " + j.PausedBy
	case !j.RunRequestedAt.IsZero():
		return "run requested"
	default:
		return "scheduled"
	}
}

func firstLine(s string) string {
	line, _, more := strings.Cut(s, "\n")
	if more {
		line += " …"
	}
	return line
}

func newJobPause(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "pause NAME",
		Short:   "Keep a job from being run by the schedule, also after a restart",
		Example: `  reconciler job pause fencer --reason "consumer is being replaced"`,
	}
	return jobChange(a, cmd, (*pgstore.Store).PauseJob)
}

func newJobResume(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "resume NAME",
		Short:   "Let a paused job run again",
		Example: "  reconciler job resume fencer",
	}
	return jobChange(a, cmd, (*pgstore.Store).ResumeJob)
}

// jobChange completes a command that changes one job and shows it.
func jobChange(a *app, cmd *cobra.Command, change func(s *pgstore.Store, ctx context.Context, name, actor, reason string) error) *cobra.Command {
	cmd.Args = args("NAME")
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := checkJobName(cmd, args[0]); err != nil {
			return err
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			if err := change(store, ctx, args[0], by.actor, by.reason); err != nil {
				return err
			}
			return printJob(ctx, store, out, args[0])
		})
	}
	return cmd
}

func newJobRun(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "run NAME",
		Short: "Ask the daemon to run a job now",
		Long: `Asks the daemon that holds the lease to run a job now, besides its schedule, and
also if it is paused. With --wait it waits for the run and shows it; the exit
status is 1 if the run failed, 3 if it did not end in time or no daemon runs.`,
		Example: `  reconciler job run scanner
  reconciler job run fencer --wait 30s`,
		Args: args("NAME"),
	}
	var wait time.Duration
	cmd.Flags().DurationVar(&wait, "wait", 0, "wait so long for the end of the run")
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := checkJobName(cmd, args[0]); err != nil {
			return err
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			return requestRun(ctx, store, out, args[0], by.actor, wait)
		})
	}
	return cmd
}

func requestRun(ctx context.Context, store *pgstore.Store, out *result, name, actor string, wait time.Duration) error {
	if off := daemon.OffBy(out.a.current.Config, name); off != "" {
		return fmt.Errorf("the job %s does not run: %s", name, off)
	}
	holder, err := store.LeaseHolder(ctx, pgstore.LeaseDaemon)
	if err != nil {
		return err
	}
	if !holder.Held {
		return &verdict{exitIncomplete, errors.New("no daemon is running that could run the job: start `reconciler run`, or use `reconciler run --once`")}
	}
	before, err := findJob(ctx, store, name)
	if err != nil {
		return err
	}
	if err := store.RequestRun(ctx, name, actor); err != nil {
		return err
	}
	if wait > 0 {
		if err := awaitRun(ctx, store, name, before.LastFinishedAt, wait); err != nil {
			return err
		}
	}
	if err := printJob(ctx, store, out, name); err != nil {
		return err
	}
	if wait <= 0 {
		return nil
	}
	after, err := findJob(ctx, store, name)
	if err == nil && after.LastError != "" {
		err = &verdict{exitFailed, fmt.Errorf("the run of %s failed: %s", name, after.LastError)}
	}
	return err
}

// pollEvery is the pause between two looks at a run that is waited for.
const pollEvery = 200 * time.Millisecond

// awaitRun waits until the request was taken and a run ended after before.
func awaitRun(ctx context.Context, store *pgstore.Store, name string, before time.Time, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		job, err := findJob(ctx, store, name)
		if ctx.Err() == nil && err != nil {
			return err
		}
		if err == nil && job.RunRequestedAt.IsZero() && job.LastFinishedAt.After(before) {
			return nil
		}
		select {
		case <-ctx.Done():
			return &verdict{exitIncomplete, fmt.Errorf("the run of %s did not end within %s", name, limit)}
		case <-tick.C:
		}
	}
}

func findJob(ctx context.Context, store *pgstore.Store, name string) (pgstore.Job, error) {
	jobs, err := daemon.ListJobs(ctx, store)
	if err != nil {
		return pgstore.Job{}, err
	}
	i := slices.IndexFunc(jobs, func(j pgstore.Job) bool { return j.Name == name })
	return jobs[i], nil // checkJobName has seen to it that it is there
}

func printJob(ctx context.Context, store *pgstore.Store, out *result, name string) error {
	job, err := findJob(ctx, store, name)
	if err != nil {
		return err
	}
	return printJobs(out, []pgstore.Job{job}, out.a.current.Config)
}

func checkJobName(cmd *cobra.Command, name string) error {
	if !slices.Contains(jobNames, name) {
		return usageError(cmd, fmt.Errorf("there is no job %q; the jobs are %s", name, strings.Join(jobNames, ", ")))
	}
	return nil
}
