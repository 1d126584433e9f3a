package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/pgstore"
)

func newTask(a *app) *cobra.Command {
	cmd := group("task", "See and end the tasks that wait for a person",
		`A task asks for a person: one per kind, scope and cause, however many
reservations stand behind it. An open release_storm or postgres_changed task is
itself the halt of releases: resolving it lets them go on.`,
		newTaskList(a), newTaskShow(a), newTaskResolve(a))
	cmd.Example = "  reconciler task list"
	return cmd
}

// taskView is a task in JSON.
type taskView struct {
	ID          string     `json:"id"`
	Kind        string     `json:"kind"`
	Scope       string     `json:"scope"` // a tag, or empty for the whole installation
	Cause       string     `json:"cause"`
	State       string     `json:"state"`
	Count       int64      `json:"count"`
	Occurrences int64      `json:"occurrences"`
	Sample      []string   `json:"sample"`
	FirstSeenAt time.Time  `json:"first_seen_at"`
	LastSeenAt  time.Time  `json:"last_seen_at"`
	DecidedAt   *time.Time `json:"decided_at"`
	DecidedBy   string     `json:"decided_by"`
	Decision    string     `json:"decision"`
}

func viewTask(t pgstore.Task) taskView {
	return taskView{
		ID: strconv.FormatInt(t.ID, 10), Kind: t.Kind, Scope: t.Scope, Cause: t.Cause, State: string(t.State),
		Count: t.Count, Occurrences: t.Occurrences, Sample: nonNil(t.Sample),
		FirstSeenAt: t.FirstSeenAt, LastSeenAt: t.LastSeenAt,
		DecidedAt: orNull(t.DecidedAt), DecidedBy: t.DecidedBy, Decision: t.Decision,
	}
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
	views := make([]taskView, 0, len(tasks))
	rows := make([]table.Row, 0, len(tasks))
	for _, t := range tasks {
		views = append(views, viewTask(t))
		rows = append(rows, table.Row{t.ID, t.Kind, orAll(t.Scope), t.Cause, t.Count, t.State, stamp(t.FirstSeenAt), stamp(t.LastSeenAt)})
	}
	return out.print(struct {
		Schema int        `json:"schema"`
		Tasks  []taskView `json:"tasks"`
	}{1, views}, func() error {
		return out.table("no tasks", table.Row{"ID", "KIND", "SCOPE", "CAUSE", "COUNT", "STATE", "FIRST SEEN", "LAST SEEN"}, rows)
	})
}

func newTaskShow(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "show ID",
		Short:   "Show one task with some of its reservations",
		Example: "  reconciler task show 12",
		Args:    args("ID"),
	}
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
			return printTask(out, t)
		})
	}
	return cmd
}

func printTask(out *result, t pgstore.Task) error {
	return out.print(struct {
		Schema int      `json:"schema"`
		Task   taskView `json:"task"`
	}{1, viewTask(t)}, func() error {
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
		return out.table("", nil, rows)
	})
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
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id, err := taskID(cmd, args[0])
		if err != nil {
			return err
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			if err := store.ResolveTask(ctx, id, by.actor, by.reason); err != nil {
				return err
			}
			t, err := store.Task(ctx, id)
			if err != nil {
				return err
			}
			return printTask(out, t)
		})
	}
	return cmd
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
