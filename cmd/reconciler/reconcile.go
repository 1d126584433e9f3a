package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/reconciliation"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/reportfile"
	"github.com/seckill/reconciler/migrations"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reconcile/render"
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
	noStore    bool
	resume     bool
	actor      string
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

Each run is stored. A deep one that was cut off, by a signal or a crash, is continued
by --resume with the same selection. A signal ends a run after the page under way,
with a report of what was done by then; a second one ends the process at once.

Exit status: 0 consistent, 2 drift confirmed, 3 something could not be read or settled,
whether or not there is drift too, 4 another run of --deep or --repair is at work.`,
		Example: `  reconciler reconcile
  reconciler reconcile --activity 10001 --sku 88001 --output json
  reconciler reconcile --deep --output markdown
  reconciler reconcile --deep --wait 10m
  reconciler reconcile --deep --repair --yes --max-repairs 100
  reconciler reconcile --deep --resume
  reconciler reconcile --checks invariant_broken,allocation_mismatch
  reconciler reconcile --list-checks`,
		Args: args(),
	}
	selected := selectorFlags(cmd, false)
	flags := cmd.Flags()
	flags.StringSliceVar(&given.checks, "checks", nil, "`ids` of the checks to make (default: all)")
	flags.BoolVar(&given.listChecks, "list-checks", false, "list the checks and end")
	flags.BoolVar(&given.deep, "deep", false, "compare every order and every reservation of all scopes")
	flags.IntVar(&given.rate, "rate", config.Default().Reconcile.Rate, "most `reservations` a second that are read one by one (0: no limit)")
	flags.BoolVar(&given.resume, "resume", false, "continue the --deep run of the same selection that was cut off")
	flags.StringVar(&given.actor, "actor", loginName(), "who repairs, for the audit trail")
	flags.BoolVar(&given.repair, "repair", false, "put right what is provably safe")
	flags.BoolVar(&given.yes, "yes", false, "repair without asking")
	flags.IntVar(&given.maxRepairs, "max-repairs", 0, "most `repairs` of one run (0: no limit)")
	flags.DurationVar(&given.wait, "wait", 0, "`duration` to wait for another run of --deep or --repair")
	settingFlag(flags, "reconcile.settle", "settle", "`pause` between two rounds")
	flags.BoolVar(&given.noStore, "no-store", false, "keep the report out of PostgreSQL and reconcile.report_dir")
	out := reportFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if given.listChecks {
			return printChecks(cmd, out)
		}
		options := reconcile.Options{Filter: selected.reconcileFilter(), Checks: given.checks, Deep: given.deep, Rate: given.rate}
		if err := errors.Join(options.Validate(), given.validate()); err != nil {
			return usageError(cmd, err)
		}
		loaded, err := a.settings(cmd)
		if err != nil {
			return err
		}
		if !flags.Changed("rate") {
			options.Rate = loaded.Config.Reconcile.Rate
		}
		report, err := a.reconcile(cmd.Context(), loaded.Config, options, given)
		if err != nil {
			return err
		}
		if err := render.Write(a.stdout, out.format.value, report); err != nil {
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
	case f.resume && !f.deep:
		return errors.New("--resume is for --deep: other runs begin anew in no time")
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
	o.Settle, o.Batch, o.StuckAfter = c.Reconcile.Settle, c.Reconcile.Batch, c.Transfer.StuckAfter
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
	runner := reconciliation.Runner{
		Store: orders, Holder: lockHolder(), Log: slog.Default(),
		Locks:   reconciliation.LockOptions{URL: c.Postgres.URL, ConnectTimeout: c.Postgres.ConnectTimeout},
		Archive: reportfile.Archive(c.Reconcile.ReportDir),
	}
	clients, err := redisstore.Open(ctx, c.Redis)
	if isUnreachable(err) {
		return stored(runner.Unreachable(ctx, reconciliation.Request{Options: o, NoStore: given.noStore}, reconcile.SourceRedis, err)), nil
	}
	if err != nil {
		return nil, err
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
		o.Repair = &reconcile.RepairOptions{
			Actor: given.actor, Max: given.maxRepairs, Policy: c.Policy(), FillDeficit: c.Transfer.FillDeficit == config.FillAuto,
			Approve: func(planned int) bool {
				progress.end()
				return a.approveRepairs(ctx, planned, given.yes, c.Mode)
			},
		}
	}
	runner.Reconciler = reconciliation.Reconciler(stocks, orders)
	outcome, err := runner.Run(ctx, reconciliation.Request{
		Options: o, Resume: given.resume, Wait: given.wait, LockRepairs: true, NoStore: given.noStore,
		Tasks: given.repair, Actor: given.actor, EscalateAfter: c.Fencer.EscalateAfter,
	})
	if err != nil {
		return unreachable(reconcile.SourcePostgres, err)
	}
	return stored(outcome), nil
}

// stored is the report of an outcome; that it could not be stored is only a
// warning.
func stored(o reconciliation.Outcome) *reconcile.Report {
	if o.NotStored != nil {
		slog.Warn("the report is not stored, or its tasks are not up to date", "run_id", o.Report.RunID, "error", o.NotStored)
	}
	return o.Report
}

// unreachable is the report of a source that cannot be reached; other errors
// stay errors.
func unreachable(source string, err error) (*reconcile.Report, error) {
	if isUnreachable(err) {
		return reconcile.Unreachable(source, err), nil
	}
	return nil, err
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
// a terminal a person is asked, and elsewhere they stay a plan. A signal is a no.
func (a *app) approveRepairs(ctx context.Context, planned int, yes bool, mode string) bool {
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
	return a.agreed(ctx, count(planned, "repair")+" planned. Make them?")
}

// agreed asks a person. No answer is a no, and so is a signal.
func (a *app) agreed(ctx context.Context, question string) bool {
	_, _ = fmt.Fprintf(a.stderr, "%s [y/N] ", question)
	answers := make(chan string, 1)
	go func() { // it ends with the process, if nobody answers
		answer, _ := bufio.NewReader(a.stdin).ReadString('\n') // no answer is a no
		answers <- strings.ToLower(strings.TrimSpace(answer))
	}()
	select {
	case answer := <-answers:
		return answer == "y" || answer == "yes"
	case <-ctx.Done():
		_, _ = fmt.Fprintln(a.stderr)
		return false
	}
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

func printChecks(cmd *cobra.Command, out *result) error {
	if f := out.format.value; f != render.FormatTable && f != render.FormatJSON {
		return usageError(cmd, fmt.Errorf("checks are listed as %s or %s, not as %s", render.FormatTable, render.FormatJSON, f))
	}
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

// count is a number with its noun.
func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
