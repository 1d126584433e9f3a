package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/pgstore"
)

// selectionFlags adds --reservation and --max.
func selectionFlags(cmd *cobra.Command) *approval.Selection {
	var sel approval.Selection
	cmd.Flags().StringVar(&sel.Reservation, "reservation", "", "only this `id`")
	cmd.Flags().IntVar(&sel.Max, "max", approval.DefaultMax, "at most so many reservations")
	return &sel
}

// approveFlags are what approve was told.
type approveFlags struct {
	sel         *approval.Selection
	by          *act
	kind, scope string
	yes, dryRun bool
}

func newTaskApprove(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "approve [ID]",
		Short: "Carry out what is proposed for a task's reservations",
		Long: `Carries out the action that task show proposes for each reservation behind a task, or
behind all tasks of a kind: at most --max in all. Redis and PostgreSQL are read again,
every script checks its reason once more, and units are given back only through the
fence. Where the world is no longer what was shown, nothing is done, what moved is
said, and the new proposal waits for another approval. The task is resolved once
nothing is left behind it. Each reservation leaves its values before and after, with
actor and reason, in the audit trail.

It asks before it begins, unless --yes. Without a terminal and without --yes, with
--dry-run, and in mode observe it prints what it would do.

Exit status: 0 all carried out, 1 something was not, 3 a dependency cannot be reached.`,
		Example: `  reconciler task approve 12 --actor alice --reason "the gateway lost them in the failover"
  reconciler task approve 15 --reservation uekb4ncu7j4dst4xyjqugyamc3 --reason "consumer is gone" --yes
  reconciler task approve --kind orphan_member --scope a:10001:s:88001:v:7:b:0 --max 50 --reason "failover" --dry-run`,
	}
	f := approveFlags{sel: selectionFlags(cmd), by: actFlags(cmd)}
	cmd.Flags().StringVar(&f.kind, "kind", "", "all tasks of this `kind`, in the place of an ID")
	cmd.Flags().StringVar(&f.scope, "scope", "", "with --kind: only the task of this scope, a `tag`")
	cmd.Flags().BoolVar(&f.yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&f.dryRun, "dry-run", false, "print what would be done, change nothing")
	out := outputFlag(a, cmd)
	cmd.Args = func(cmd *cobra.Command, got []string) error {
		if len(got) == 0 && f.kind != "" {
			return nil
		}
		return args("ID")(cmd, got)
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := f.check(cmd, args)
		if err != nil {
			return err
		}
		return a.withDaemon(cmd, f.dryRun, func(ctx context.Context, d *daemon.Daemon) error {
			return a.approveTasks(ctx, d, out, f, id)
		})
	}
	return cmd
}

// check refuses what does not fit together, before anything is connected.
func (f approveFlags) check(cmd *cobra.Command, args []string) (id int64, err error) {
	switch {
	case len(args) == 1 && f.kind != "":
		return 0, usageError(cmd, errors.New("an ID and --kind exclude each other"))
	case len(args) == 1 && f.scope != "":
		return 0, usageError(cmd, errors.New("--scope goes with --kind"))
	case f.kind != "" && f.sel.Reservation != "":
		return 0, usageError(cmd, errors.New("--reservation goes with the ID of a task"))
	case f.sel.Max <= 0:
		return 0, usageError(cmd, errors.New("--max must be above 0"))
	}
	if len(args) == 1 {
		if id, err = taskID(cmd, args[0]); err != nil {
			return 0, err
		}
	}
	return id, f.by.checkReason(cmd)
}

// approveTasks plans, asks, and carries out.
func (a *app) approveTasks(ctx context.Context, d *daemon.Daemon, out *result, f approveFlags, id int64) error {
	approver := d.Approver()
	plans, unplanned := plansFor(ctx, d.Postgres, approver, f, id)
	if len(plans) == 0 && unplanned != nil {
		return unplanned
	}
	var actions int
	reports := make([]approval.Report, len(plans))
	for i, plan := range plans {
		reports[i].Plan = plan
		for _, p := range plan.Proposals {
			if p.Action != approval.None {
				actions++
			}
			reports[i].Results = append(reports[i].Results, approval.Result{Proposal: p})
		}
	}
	ask := !f.yes && isTerminal(a.stdin)
	if approver.Observe || !f.yes && !ask {
		if !f.dryRun {
			fmt.Fprintln(a.stderr, "nothing is carried out: mode is observe, or there is neither a terminal nor --yes")
		}
		return errors.Join(printReports(out, reports, true), unplanned)
	}
	if ask && actions > 0 && !a.confirmed(ctx, plans, actions) {
		return errors.New("nothing was carried out")
	}
	return errors.Join(carryOut(ctx, approver, out, plans, approval.Act{Actor: f.by.actor, Reason: f.by.reason}), unplanned)
}

// plansFor makes the plans of the tasks that were named, with what was shown of
// them before. One that cannot be planned holds up no other: the error is of
// those alone.
func plansFor(ctx context.Context, store *pgstore.Store, approver *approval.Approver, f approveFlags, id int64) ([]approval.Plan, error) {
	var tasks []pgstore.Task
	if f.kind == "" {
		t, err := store.Task(ctx, id)
		if err != nil {
			return nil, err
		}
		tasks = []pgstore.Task{t}
	} else {
		filter := pgstore.TaskFilter{Kinds: []string{f.kind}, States: pgstore.Unresolved}
		if f.scope != "" {
			filter.Scope = &f.scope
		}
		var err error
		if tasks, err = store.Tasks(ctx, filter); err != nil {
			return nil, err
		}
	}
	var plans []approval.Plan
	var errs []error
	sel := *f.sel
	for _, t := range tasks {
		if sel.Max <= 0 {
			break
		}
		plan, err := approver.Propose(ctx, t, sel)
		if err == nil {
			plan, err = approver.Recall(ctx, plan)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("task %d: %w", t.ID, err))
			continue
		}
		sel.Max -= len(plan.Proposals)
		plans = append(plans, plan)
	}
	return plans, errors.Join(errs...)
}

// confirmed shows the plans and asks.
func (a *app) confirmed(ctx context.Context, plans []approval.Plan, actions int) bool {
	line := func(format string, args ...any) error {
		_, err := fmt.Fprintf(a.stderr, format+"\n", args...)
		return err
	}
	for _, plan := range plans {
		if err := errors.Join(line("task %d, %s of %s", plan.Task.ID, plan.Task.Kind, plan.Task.Scope), printPlan(line, plan)); err != nil {
			return false // who cannot read it cannot approve it
		}
	}
	return a.agreed(ctx, fmt.Sprintf("Carry out these %d?", actions))
}

// carryOut applies the plans, one after another, and prints what became of them.
func carryOut(ctx context.Context, approver *approval.Approver, out *result, plans []approval.Plan, by approval.Act) error {
	var reports []approval.Report
	var errs []error
	for _, plan := range plans {
		report, err := approver.Apply(ctx, plan, by)
		reports = append(reports, report)
		if err != nil {
			errs = append(errs, fmt.Errorf("task %d: %w", plan.Task.ID, err))
		}
	}
	var open, all int
	for _, report := range reports {
		counts := report.Counts()
		all += len(report.Plan.Proposals)
		open += len(report.Plan.Proposals) - counts[approval.Applied] - counts[approval.Already]
	}
	if open > 0 && len(errs) == 0 {
		errs = append(errs, &verdict{exitFailed, fmt.Errorf("%d of %d were not carried out", open, all)})
	}
	return errors.Join(append([]error{printReports(out, reports, false)}, errs...)...)
}
