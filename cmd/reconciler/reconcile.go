package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/migrations"
	"github.com/seckill/reconciler/reconcile"
)

func newReconcile(a *app) *cobra.Command {
	var checks []string
	var listChecks, deep bool
	var rate int
	cmd := &cobra.Command{
		Use:   "reconcile",
		Short: "Compare the stock in Redis with the orders in PostgreSQL",
		Long: `Compares, and changes nothing: the invariants of each scope, what was allocated with
what its buckets hold, and the reserved units with reservations and orders.

In scopes with drift, and with --deep in all, every order is compared with its
reservation and every reservation with its claim, to name what is behind it.

What contradicts is read again, reconcile.settle later, and counts only if it stands.
A scope whose numbers changed meanwhile is marked as in motion; that is no fault.

Exit status: 0 consistent, 2 drift confirmed, 3 something could not be read or settled,
whether or not there is drift too.`,
		Example: `  reconciler reconcile
  reconciler reconcile --activity 10001 --sku 88001 --output json
  reconciler reconcile --deep
  reconciler reconcile --checks invariant_broken,allocation_mismatch
  reconciler reconcile --list-checks`,
		Args: args(),
	}
	selected := selectorFlags(cmd, false)
	cmd.Flags().StringSliceVar(&checks, "checks", nil, "`ids` of the checks to make (default: all)")
	cmd.Flags().BoolVar(&deep, "deep", false, "compare every order and every reservation of all scopes")
	cmd.Flags().IntVar(&rate, "rate", 20_000, "most `reservations` a second that are read one by one (0: no limit)")
	cmd.Flags().BoolVar(&listChecks, "list-checks", false, "list the checks and end")
	settingFlag(cmd.Flags(), "reconcile.settle", "settle", "`pause` between two rounds")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if listChecks {
			return printChecks(out)
		}
		options := reconcile.Options{Filter: selected.reconcileFilter(), Checks: checks, Deep: deep, Rate: rate}
		if err := options.Validate(); err != nil {
			return usageError(cmd, err)
		}
		loaded, err := a.settings(cmd)
		if err != nil {
			return err
		}
		report, err := reconcileOnce(cmd.Context(), loaded.Config, options)
		if err != nil {
			return err
		}
		if err := printReport(out, report); err != nil {
			return err
		}
		return reportVerdict(report)
	}
	return cmd
}

// reconcileFilter is the selection as a reconciliation takes it.
func (s *selector) reconcileFilter() reconcile.Filter {
	f := s.filter()
	return reconcile.Filter{ActivityID: f.ActivityID, SKUID: f.SKUID, Version: f.Version, Bucket: f.Bucket}
}

// reconcileOnce connects and runs. A source that cannot be reached is a report
// too, which says so.
func reconcileOnce(ctx context.Context, c config.Config, o reconcile.Options) (*reconcile.Report, error) {
	o.Settle, o.Batch = c.Reconcile.Settle, c.Reconcile.Batch
	redisstore.RouteLibraryLog(slog.Default())
	orders, err := pgstore.Open(ctx, pgstore.Config{
		URL: c.Postgres.URL, MaxConns: c.Postgres.MaxConns, ApplicationName: "reconciler reconcile",
		ConnectTimeout: c.Postgres.ConnectTimeout, StatementTimeout: c.Postgres.StatementTimeout,
	})
	if err != nil {
		return nil, err
	}
	defer orders.Close()
	if err := migrations.Check(ctx, orders.Pool()); err != nil {
		if isUnreachable(err) {
			return reconcile.Unreachable(reconcile.SourcePostgres, err), nil
		}
		return nil, err
	}
	clients, err := redisstore.Open(ctx, c.Redis)
	if errors.Is(err, redisstore.ErrUnreachable) {
		return reconcile.Unreachable(reconcile.SourceRedis, err), nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = clients.Close() }() // nothing is in flight
	stocks, err := redisstore.New(clients, c.Redis.CommandTimeout)
	if err != nil {
		return nil, err
	}
	return (&reconcile.Reconciler{Registry: orders, Stocks: stocks, Orders: orders, Members: stocks, Claims: orders}).Run(ctx, o)
}

func reportVerdict(r *reconcile.Report) error {
	switch r.Verdict {
	case reconcile.VerdictConsistent:
		return nil
	case reconcile.VerdictDrift:
		return &verdict{exitDrift, nil}
	default:
		return &verdict{exitIncomplete, nil}
	}
}

func printChecks(out *result) error {
	checks := reconcile.Checks()
	rows := make([]table.Row, 0, len(checks))
	for _, c := range checks {
		rows = append(rows, table.Row{c.ID, c.Severity, c.Level, c.Repair, c.Compares, c.Cost})
	}
	return out.print(struct {
		Schema int               `json:"schema"`
		Checks []reconcile.Check `json:"checks"`
	}{1, checks}, func() error {
		return out.table("no checks", table.Row{"CHECK", "SEVERITY", "LEVEL", "REPAIR", "COMPARES", "READS"}, rows)
	})
}

func printReport(out *result, r *reconcile.Report) error {
	return out.print(r, func() error {
		rows := make([]table.Row, 0, len(r.Scopes))
		for _, s := range r.Scopes {
			rows = append(rows, scopeRow(s))
		}
		none := "no scope is registered"
		if r.Verdict != reconcile.VerdictConsistent {
			none = "no scope could be read"
		}
		header := table.Row{
			"SCOPE", "INITIAL", "AVAILABLE", "RESERVED", "RELEASED", "PENDING", "EXPIRY", "ACTIVE", "CANCELLED", "DEVIATION", "VERDICT",
		}
		if err := out.table(none, header, rows); err != nil {
			return err
		}
		return errors.Join(printFindings(out, r), printIncomplete(out, r), printSum(out, r))
	})
}

// scopeRow is a scope as people read it; "-" stands for what was not read.
func scopeRow(s reconcile.ScopeReport) table.Row {
	row := table.Row{s.Reservation().Tag()}
	redis := s.Redis
	if redis == nil {
		redis = &reconcile.RedisCount{}
	}
	orders := []*int64{nil, nil}
	if s.Postgres != nil {
		orders = []*int64{&s.Postgres.Active, &s.Postgres.Cancelled}
	}
	for _, n := range append([]*int64{
		redis.Initial, redis.Available, redis.Reserved, redis.ReleasedTotal, redis.SendPending, redis.ReservationExpiry,
	}, orders...) {
		row = append(row, numberOrDash(n, "%d"))
	}
	text := string(s.Verdict)
	if s.InMotion {
		text += ", in motion"
	}
	return append(row, numberOrDash(s.Deviation, "%+d"), text)
}

func numberOrDash(n *int64, format string) string {
	if n == nil {
		return "-"
	}
	return fmt.Sprintf(format, *n)
}

// shownRows bounds what people are shown of a list; programs get all of it.
const shownRows = 50

func printFindings(out *result, r *reconcile.Report) error {
	if len(r.Findings) == 0 {
		return nil
	}
	var rows []table.Row
	for _, f := range r.Findings[:min(len(r.Findings), shownRows)] {
		rows = append(rows, table.Row{f.Severity, f.Check, f.Subject, f.Rounds, f.Message + "; " + f.Repair.Detail})
	}
	return errors.Join(
		out.line(""),
		out.table("", table.Row{"SEVERITY", "CHECK", "SUBJECT", "ROUNDS", "FINDING"}, rows),
		printRest(out, len(r.Findings)))
}

func printIncomplete(out *result, r *reconcile.Report) error {
	if len(r.Incomplete) == 0 {
		return nil
	}
	var rows []table.Row
	for _, i := range r.Incomplete[:min(len(r.Incomplete), shownRows)] {
		scope := "all"
		if i.Scope != nil {
			scope = i.Scope.Reservation().Tag()
		}
		rows = append(rows, table.Row{i.Source, scope, i.Reason})
	}
	return errors.Join(
		out.line(""),
		out.table("", table.Row{"INCOMPLETE", "SCOPE", "WHY"}, rows),
		printRest(out, len(r.Incomplete)))
}

func printRest(out *result, n int) error {
	if n <= shownRows {
		return nil
	}
	return out.line("and %d more: see --output json", n-shownRows)
}

func printSum(out *result, r *reconcile.Report) error {
	return errors.Join(out.line(""), out.line("%s: %s, %s, %d incomplete (%s)", r.Verdict,
		count(len(r.Scopes), "scope"), count(len(r.Findings), "finding"), len(r.Incomplete),
		r.FinishedAt.Sub(r.StartedAt).Round(time.Millisecond)))
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
