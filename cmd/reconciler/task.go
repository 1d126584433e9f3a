package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/view"
)

func newTask(a *app) *cobra.Command {
	cmd := group("task", "See, approve and end the tasks that wait for a person",
		`A task asks for a person: one per kind, scope and cause, however many
reservations stand behind it. show proposes what could be done for each of
them, approve does it. An open release_storm task is itself the halt
of its scope's releases: resolving it lets them go on.`,
		newTaskList(a), newTaskShow(a), newTaskApprove(a), newTaskReject(a), newTaskResolve(a))
	cmd.Example = "  reconciler task list"
	return cmd
}

func newTaskList(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the tasks that still stand, the one seen last first",
		Example: `  reconciler task list
  reconciler task list --kind release_storm --output json
  reconciler task list --all`,
		Args: args(),
	}
	var (
		filter pgstore.TaskFilter
		all    bool
	)
	cmd.Flags().StringSliceVar(&filter.Kinds, "kind", nil, "only tasks of these `kinds`")
	cmd.Flags().BoolVar(&all, "all", false, "also those that were rejected or resolved")
	cmd.Flags().IntVar(&filter.Limit, "limit", 0, "at most so many (0: no limit)")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !all {
			filter.States = pgstore.Unresolved
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			tasks, err := store.Tasks(ctx, filter)
			if err != nil {
				return err
			}
			return printTasks(out, tasks)
		})
	}
	return cmd
}

func printTasks(out *result, tasks []pgstore.Task) error {
	views := make([]view.Task, 0, len(tasks))
	rows := make([]table.Row, 0, len(tasks))
	for _, t := range tasks {
		views = append(views, view.OfTask(t))
		rows = append(rows, table.Row{t.ID, t.Kind, orAll(t.Scope), t.Cause, t.Count, t.State, stamp(t.FirstSeenAt), stamp(t.LastSeenAt)})
	}
	return out.print(struct {
		Schema int         `json:"schema"`
		Tasks  []view.Task `json:"tasks"`
	}{1, views}, func() error {
		return out.table("no tasks", table.Row{"ID", "KIND", "SCOPE", "CAUSE", "COUNT", "STATE", "FIRST SEEN", "LAST SEEN"}, rows)
	})
}

func newTaskShow(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show one task and what could be approved for its reservations",
		Long: `Shows a task. For the kinds that can be approved it looks for the reservations behind
the task in Redis and PostgreSQL, and proposes an action for each with the state that
it rests on. The proposals are kept: approve carries out what was shown, and leaves
alone what has moved since. Nothing else is changed.`,
		Example: `  reconciler task show 12
  reconciler task show 12 --reservation uekb4ncu7j4dst4xyjqugyamc3 --output json`,
		Args: args("ID"),
	}
	sel := selectionFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := taskID(cmd, args[0])
		if err != nil {
			return err
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			t, err := store.Task(ctx, id)
			if err != nil {
				return err
			}
			if err := approval.Check(t, *sel); err != nil {
				return printTask(out, t, approval.Plan{}, err)
			}
			plan, err := a.propose(cmd, t, *sel)
			return errors.Join(printTask(out, t, plan, err), err)
		})
	}
	return cmd
}

// propose looks for the reservations behind the task, and keeps what it proposes.
func (a *app) propose(cmd *cobra.Command, t pgstore.Task, sel approval.Selection) (plan approval.Plan, err error) {
	loaded, err := a.settings(cmd)
	if err != nil {
		return plan, err
	}
	err = openDaemon(cmd.Context(), daemon.Options{Config: loaded.Config, DryRun: true}, func(ctx context.Context, d *daemon.Daemon) error {
		approver := d.Approver()
		if plan, err = approver.Propose(ctx, t, sel); err != nil {
			return err
		}
		return approver.Keep(ctx, plan)
	})
	return plan, err
}

// printTask prints the task with its proposals; why says why there are none.
func printTask(out *result, t pgstore.Task, plan approval.Plan, why error) error {
	return out.print(view.OfProposed(t, plan, why), func() error {
		rows := []table.Row{
			{"ID", t.ID},
			{"KIND", t.Kind},
			{"SCOPE", orAll(t.Scope)},
			{"CAUSE", t.Cause},
			{"STATE", t.State},
			{"COUNT", fmt.Sprintf("%d, reported %d times", t.Count, t.Occurrences)},
			{"FIRST SEEN", stamp(t.FirstSeenAt)},
			{"LAST SEEN", stamp(t.LastSeenAt)},
		}
		if t.DecidedBy != "" {
			rows = append(rows, table.Row{"DECIDED", stamp(t.DecidedAt) + " by " + t.DecidedBy}, table.Row{"DECISION", orDash(t.Decision)})
		}
		rows = append(rows, table.Row{"SAMPLE", orDash(strings.Join(t.Sample, "\n"))})
		if why != nil && !isDecided(why) {
			rows = append(rows, table.Row{"PROPOSED", "nothing: " + why.Error()})
		}
		if err := out.table("", nil, rows); err != nil || why != nil {
			return err
		}
		if err := out.line(""); err != nil {
			return err
		}
		return printPlan(out.line, plan)
	})
}

func isDecided(err error) bool {
	_, decided := errors.AsType[*pgstore.TaskDecidedError](err)
	return decided
}

func newTaskReject(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reject ID",
		Short: "End a task without doing what it proposes",
		Long: `Ends a task: nothing is done for its reservations. If the cause is still there, a
later pass opens another task. A halt is not rejected: it is resolved or stays.`,
		Example: `  reconciler task reject 12 --reason "the data is from a load test"`,
		Args:    args("ID"),
	}
	endTask(a, cmd, true, (*pgstore.Store).RejectTask)
	return cmd
}

func newTaskResolve(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "resolve ID",
		Short: "End a task: what it asked for is done",
		Long: `Ends a task. If it is release_storm, the scope's releases go on with another budget. If
the cause is still there, a later pass opens another task. postgres_changed does not end
by hand: the daemon's job refence ends it once the claims that were lost are set again.`,
		Example: `  reconciler task resolve 12 --reason "consumer group corrected"`,
		Args:    args("ID"),
	}
	endTask(a, cmd, false, (*pgstore.Store).ResolveTask)
	return cmd
}

// endTask makes cmd end a task.
func endTask(a *app, cmd *cobra.Command, needsReason bool, end func(*pgstore.Store, context.Context, int64, string, string) error) {
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := taskID(cmd, args[0])
		if err != nil {
			return err
		}
		if needsReason {
			if err := by.checkReason(cmd); err != nil {
				return err
			}
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			if err := end(store, ctx, id, by.actor, by.reason); err != nil {
				return err
			}
			t, err := store.Task(ctx, id)
			if err != nil {
				return err
			}
			return printTask(out, t, approval.Plan{}, approval.Check(t, approval.Selection{}))
		})
	}
}

// checkReason refuses an act without a name or a reason.
func (by act) checkReason(cmd *cobra.Command) error {
	if strings.TrimSpace(by.actor) == "" || strings.TrimSpace(by.reason) == "" {
		return usageError(cmd, errors.New("--actor and --reason are needed: both go into the audit trail"))
	}
	return nil
}

func taskID(cmd *cobra.Command, text string) (int64, error) {
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil || id <= 0 {
		return 0, usageError(cmd, fmt.Errorf("%q is not the number of a task", text))
	}
	return id, nil
}

// orAll names the scope of what concerns the whole installation.
func orAll(scope string) string {
	if scope == "" {
		return "(all)"
	}
	return scope
}
