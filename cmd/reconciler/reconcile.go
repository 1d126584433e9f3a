package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/migrations"
	"github.com/seckill/reconciler/reconcile"
)

// reconcileFlags are what the command line says of a reconciliation beyond the
// settings.
type reconcileFlags struct {
	checks     []string
	listChecks bool
	deep       bool
	rate       int
	repair     bool
	yes        bool
	maxRepairs int
	wait       time.Duration
}

func newReconcile(a *app) *cobra.Command {
	var given reconcileFlags
	cmd := &cobra.Command{
		Use:   "reconcile",
		Short: "Compare the stock in Redis with the orders in PostgreSQL",
		Long: `Compares the invariants of each scope, what was allocated with what its buckets
hold, and the reserved units with reservations and orders. In scopes with drift,
and with --deep in all, every order is compared with its reservation and every
reservation with its claim, to name what is behind it.

What contradicts is read again, reconcile.settle later, and counts only if it stands.
A scope whose numbers changed meanwhile is marked as in motion; that is no fault.

Nothing is changed without --repair, which puts right what is provably safe: it
asks on a terminal, and elsewhere only plans unless --yes is given. The report is
then of the state after the repairs.

Exit status: 0 consistent, 2 drift confirmed, 3 something could not be read or settled,
whether or not there is drift too, 4 another run of --deep or --repair is at work.`,
		Example: `  reconciler reconcile
  reconciler reconcile --activity 10001 --sku 88001 --output json
  reconciler reconcile --deep --wait 10m
  reconciler reconcile --deep --repair --yes --max-repairs 100
  reconciler reconcile --checks invariant_broken,allocation_mismatch
  reconciler reconcile --list-checks`,
		Args: args(),
	}
	selected := selectorFlags(cmd, false)
	flags := cmd.Flags()
	flags.StringSliceVar(&given.checks, "checks", nil, "`ids` of the checks to make (default: all)")
	flags.BoolVar(&given.listChecks, "list-checks", false, "list the checks and end")
	flags.BoolVar(&given.deep, "deep", false, "compare every order and every reservation of all scopes")
	flags.IntVar(&given.rate, "rate", 20_000, "most `reservations` a second that are read one by one (0: no limit)")
	flags.BoolVar(&given.repair, "repair", false, "put right what is provably safe")
	flags.BoolVar(&given.yes, "yes", false, "repair without asking")
	flags.IntVar(&given.maxRepairs, "max-repairs", 0, "most `repairs` of one run (0: no limit)")
	flags.DurationVar(&given.wait, "wait", 0, "how `long` to wait for another run of --deep or --repair")
	settingFlag(flags, "reconcile.settle", "settle", "`pause` between two rounds")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if given.listChecks {
			return printChecks(out)
		}
		options := reconcile.Options{Filter: selected.reconcileFilter(), Checks: given.checks, Deep: given.deep, Rate: given.rate}
		if err := errors.Join(options.Validate(), given.validate()); err != nil {
			return usageError(cmd, err)
		}
		loaded, err := a.settings(cmd)
		if err != nil {
			return err
		}
		report, err := a.reconcile(cmd.Context(), loaded.Config, options, given)
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

func (f reconcileFlags) validate() error {
	switch {
	case !f.repair && (f.yes || f.maxRepairs != 0):
		return errors.New("--yes and --max-repairs are for --repair")
	case f.maxRepairs < 0:
		return fmt.Errorf("--max-repairs %d is negative", f.maxRepairs)
	case f.rate < 0:
		return fmt.Errorf("--rate %d is negative", f.rate)
	case f.wait != 0 && !f.deep && !f.repair:
		return errors.New("--wait is for --deep and --repair: other runs take no lock")
	default:
		return nil
	}
}

// reconcileFilter is the selection as a reconciliation takes it.
func (s *selector) reconcileFilter() reconcile.Filter {
	f := s.filter()
	return reconcile.Filter{ActivityID: f.ActivityID, SKUID: f.SKUID, Version: f.Version, Bucket: f.Bucket}
}

// reconcile connects and runs. A source that cannot be reached is a report
// too, which says so.
func (a *app) reconcile(ctx context.Context, c config.Config, o reconcile.Options, given reconcileFlags) (*reconcile.Report, error) {
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
		return unreachable(reconcile.SourcePostgres, err)
	}
	locks, err := given.lock(ctx, c.Postgres, orders, o.Filter)
	if err != nil {
		return unreachable(reconcile.SourcePostgres, err)
	}
	if locks != nil {
		defer func() { _ = locks.Release() }() // the end of the process ends them too
	}
	clients, err := redisstore.Open(ctx, c.Redis)
	if err != nil {
		return unreachable(reconcile.SourceRedis, err)
	}
	defer func() { _ = clients.Close() }() // nothing is in flight
	stocks, err := redisstore.New(clients, c.Redis.CommandTimeout)
	if err != nil {
		return nil, err
	}
	progress := a.newProgress()
	defer progress.end()
	o.Progress = progress.report()
	if given.repair {
		o.Repair = &reconcile.RepairOptions{Max: given.maxRepairs, Policy: c.Policy(), Approve: func(planned int) bool {
			progress.end()
			return a.approveRepairs(planned, given.yes, c.Mode)
		}}
	}
	return (&reconcile.Reconciler{
		Registry: orders, Stocks: stocks, Orders: orders, Members: stocks, Claims: orders, Mender: stocks,
		Guard: pgstore.RepairGuard{Store: orders, Sighted: stocks.Sighting}, Trail: orders, Nodes: stocks, Server: orders,
	}).Run(ctx, o)
}

// unreachable is the report of a source that cannot be reached; other errors
// stay errors.
func unreachable(source string, err error) (*reconcile.Report, error) {
	if isUnreachable(err) {
		return reconcile.Unreachable(source, err), nil
	}
	return nil, err
}

// lock takes the locks of the run's modes, one for each activity (protocol §5).
// Other runs take none.
func (f reconcileFlags) lock(ctx context.Context, c config.Postgres, registry reconcile.Registry, filter reconcile.Filter) (*pgstore.RunLocks, error) {
	if !f.deep && !f.repair {
		return nil, nil
	}
	skus, err := registry.SKUs(ctx, filter.ActivityID, filter.SKUID)
	if err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, sku := range skus {
		if f.deep {
			names["deep:"+sku.ActivityID] = true
		}
		if f.repair {
			names["repair:"+sku.ActivityID] = true
		}
	}
	return pgstore.LockRuns(ctx, pgstore.RunLockOptions{
		URL: c.URL, Names: slices.Collect(maps.Keys(names)), Holder: lockHolder(), Wait: f.wait, ConnectTimeout: c.ConnectTimeout,
	})
}

// lockHolder is this process as others are told of it.
func lockHolder() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return fmt.Sprintf("%s:%d", host, os.Getpid())
}

// approveRepairs decides whether the planned repairs are made: with --yes they are, on
// a terminal a person is asked, and elsewhere they stay a plan.
func (a *app) approveRepairs(planned int, yes bool, mode string) bool {
	switch {
	case mode != config.ModeAct:
		_, _ = fmt.Fprintf(a.stderr, "%s planned, none made: mode is %s. Set it to act to let repairs change anything.\n", count(planned, "repair"), mode)
		return false
	case yes:
		return true
	case !isTerminal(a.stderr) || !isTerminal(a.stdin):
		_, _ = fmt.Fprintf(a.stderr, "%s planned, none made: add --yes to make them.\n", count(planned, "repair"))
		return false
	}
	_, _ = fmt.Fprintf(a.stderr, "%s planned. Make them? [y/N] ", count(planned, "repair"))
	answer, _ := bufio.NewReader(a.stdin).ReadString('\n') // no answer is a no
	answer = strings.ToLower(strings.TrimSpace(answer))
	return answer == "y" || answer == "yes"
}

// progress is a bar on standard error while a set pass is under way.
type progress struct {
	stderr io.Writer
	shown  bool
	bar    *progressbar.ProgressBar
}

// newProgress shows nothing unless standard error is a terminal.
func (a *app) newProgress() *progress {
	return &progress{stderr: a.stderr, shown: isTerminal(a.stderr)}
}

// report is what a run calls; nil when nothing is shown.
func (p *progress) report() func(done, expected int64) {
	if !p.shown {
		return nil
	}
	return func(done, expected int64) {
		if p.bar == nil {
			p.bar = progressbar.NewOptions64(expected,
				progressbar.OptionSetWriter(p.stderr), progressbar.OptionSetDescription("comparing"),
				progressbar.OptionShowCount(), progressbar.OptionShowIts(), progressbar.OptionSetItsString("reservations"),
				progressbar.OptionSetPredictTime(true), progressbar.OptionFullWidth(),
				progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
		}
		p.bar.ChangeMax64(max(expected, done+1)) // it ends by end alone
		_ = p.bar.Set64(done)                    // only a terminal that is gone
	}
}

// end removes the bar; the next report begins another.
func (p *progress) end() {
	if p.bar != nil {
		_ = p.bar.Clear() // only a terminal that is gone
		p.bar = nil
	}
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
	checks := reconcile.Kinds()
	rows := make([]table.Row, 0, len(checks))
	for _, c := range checks {
		rows = append(rows, table.Row{c.ID, c.Severity, c.Source, orDash(c.Level), c.Repair, c.Compares, orDash(c.Cost), c.Advice})
	}
	return out.print(struct {
		Schema int               `json:"schema"`
		Checks []reconcile.Check `json:"checks"`
	}{1, checks}, func() error {
		return out.table("no checks", table.Row{"CHECK", "SEVERITY", "SOURCE", "LEVEL", "REPAIR", "COMPARES", "READS", "ADVICE"}, rows)
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
		rows = append(rows, table.Row{f.Severity, f.Check, f.Subject, f.Rounds, f.Message + "; " + f.Repair.Detail, repairState(f.Repair)})
	}
	return errors.Join(
		out.line(""),
		out.table("", table.Row{"SEVERITY", "CHECK", "SUBJECT", "ROUNDS", "FINDING", "REPAIR"}, rows),
		printRest(out, len(r.Findings)))
}

// repairState is what became of a repair, or "-" where none was asked for.
func repairState(r reconcile.Repair) string {
	if r.State == reconcile.RepairStateNone {
		return "-"
	}
	return string(r.State)
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
	repaired := 0
	for _, f := range r.Findings {
		if f.Repair.State == reconcile.RepairStateDone {
			repaired++
		}
	}
	findings := count(len(r.Findings)-repaired, "finding")
	if repaired > 0 {
		findings += fmt.Sprintf(", %d repaired", repaired)
	}
	return errors.Join(out.line(""), out.line("%s: %s, %s, %d incomplete (%s)", r.Verdict,
		count(len(r.Scopes), "scope"), findings, len(r.Incomplete),
		r.FinishedAt.Sub(r.StartedAt).Round(time.Millisecond)))
}

// count is a number with its noun.
func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
