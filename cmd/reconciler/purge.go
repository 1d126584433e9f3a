package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/retention"
	"github.com/seckill/reconciler/internal/view"
)

func newPurge(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "purge",
		Short: "Delete what has been kept for long enough",
		Long: `Deletes what the settings purge.* and reconcile.retention no longer keep: claims of closed
versions past their retention, the journal of their transfers, decided tasks, reports,
the samples behind the charts, and jobs that do not run any more. A claim whose order exists stays, as does what is undecided
or under way. In mode observe claims and the journal stay.

--plan says what would go and deletes nothing. Otherwise it asks on a terminal, unless
--yes is given; without a terminal it needs --yes.`,
		Example: `  reconciler purge --plan
  reconciler purge --yes --reason "nightly"`,
		Args: args(),
	}
	var plan, yes bool
	cmd.Flags().BoolVar(&plan, "plan", false, "say what would be deleted, and delete nothing")
	cmd.Flags().BoolVar(&yes, "yes", false, "delete without asking")
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if plan && yes {
			return usageError(cmd, errors.New("--plan deletes nothing: leave out --yes"))
		}
		loaded, err := a.settings(cmd)
		if err != nil {
			return err
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			return a.purge(ctx, store, retention.PolicyOf(loaded.Config), out, *by, plan, yes)
		})
	}
	return cmd
}

// purge plans, asks and deletes.
func (a *app) purge(ctx context.Context, store *pgstore.Store, policy retention.Policy, out *result, by act, plan, yes bool) error {
	if !plan && yes {
		done, err := retention.Apply(ctx, store, policy, retention.By{Actor: by.actor, Reason: by.reason})
		return errors.Join(printPurge(out, done, true), err)
	}
	amounts, err := retention.Plan(ctx, store, policy)
	if err != nil || plan {
		return errors.Join(printPurge(out, amounts, false), err)
	}
	if !isTerminal(a.stdin) || !isTerminal(a.stderr) {
		return errors.Join(printPurge(out, amounts, false),
			errors.New("nothing was deleted: this is the plan. Add --yes to delete without being asked"))
	}
	total := int64(0)
	for _, amount := range amounts {
		if amount.Skipped == "" {
			total += amount.Count
			_, _ = fmt.Fprintf(a.stderr, "%s: %d\n", amount.Kind, amount.Count)
		}
	}
	if !a.agreed(ctx, fmt.Sprintf("Delete these %d?", total)) {
		return errors.New("nothing was deleted")
	}
	return a.purge(ctx, store, policy, out, by, false, true)
}

// purgeView is one kind in JSON. Of what was deleted there are no times.
type purgeView struct {
	Kind    string     `json:"kind"`
	Keep    string     `json:"keep"` // how long it is kept; "" for ever
	Count   int64      `json:"count"`
	Oldest  *time.Time `json:"oldest"`
	Newest  *time.Time `json:"newest"`
	Skipped string     `json:"skipped"` // why nothing of it is deleted, or empty
}

func printPurge(out *result, amounts []retention.Amount, deleted bool) error {
	views := make([]purgeView, 0, len(amounts))
	rows := make([]table.Row, 0, len(amounts))
	header := table.Row{"KIND", "KEPT", "WOULD GO", "OLDEST", "NEWEST", "NOTE"}
	if deleted {
		header = table.Row{"KIND", "KEPT", "DELETED", "NOTE"}
	}
	for _, amount := range amounts {
		keep := ""
		if amount.Keep > 0 {
			keep = config.FormatDuration(amount.Keep)
		}
		views = append(views, purgeView{string(amount.Kind), keep, amount.Count, view.OrNull(amount.Oldest), view.OrNull(amount.Newest), amount.Skipped})
		row := table.Row{amount.Kind, orDash(keep), amount.Count}
		if !deleted {
			row = append(row, stamp(amount.Oldest), stamp(amount.Newest))
		}
		rows = append(rows, append(row, orDash(amount.Skipped)))
	}
	return out.print(struct {
		Schema  int         `json:"schema"`
		Deleted bool        `json:"deleted"`
		Kinds   []purgeView `json:"kinds"`
	}{1, deleted, views}, func() error { return out.table("nothing", header, rows) })
}
