package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reconcile/changes"
)

func newReportDiff(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "diff [OLD] [NEW]",
		Short: "Tell what changed between two reports",
		Long: `Compares two stored reports: findings that are new, gone or persist, by check, scope and
subject, and scopes whose numbers or verdict changed. A finding is gone only if the later
run looked there again; else it is unclear. Without OLD it is the newest finished run
before NEW with the same mode and selection; without NEW, the latest run.

Exit status: 0 nothing new that is drift, 2 new findings that are drift, 3 the later run
is incomplete or one of the two has no report.`,
		Example: `  reconciler report diff
  reconciler report diff 20260101T030405Z-abcdefgh
  reconciler report diff 20260101T030405Z-abcdefgh latest --output json`,
		Args: func(cmd *cobra.Command, given []string) error {
			if len(given) > 2 {
				return usageError(cmd, fmt.Errorf("%q is one argument too many", given[2]))
			}
			return nil
		},
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, given []string) error {
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			before, after, err := diffRuns(ctx, store, given)
			if err != nil {
				return err
			}
			d := changes.Between(before, after)
			if err := printDiff(out, d); err != nil {
				return err
			}
			return diffVerdict(d)
		})
	}
	return cmd
}

// diffRuns reads the two reports that the arguments name.
func diffRuns(ctx context.Context, store *pgstore.Store, given []string) (before, after *reconcile.Report, err error) {
	name := latest
	if len(given) == 2 {
		name = given[1]
	}
	newer, err := findRun(ctx, store, name)
	if err != nil {
		return nil, nil, err
	}
	if after, err = readReport(ctx, store, newer); err != nil {
		return nil, nil, err
	}
	var older pgstore.StoredRun
	if len(given) > 0 {
		older, err = findRun(ctx, store, given[0])
	} else {
		older, err = store.PreviousRun(ctx, newer)
	}
	if err != nil {
		return nil, nil, err
	}
	before, err = readReport(ctx, store, older)
	return before, after, err
}

// diffVerdict is the exit status of a comparison.
func diffVerdict(d changes.Diff) error {
	if d.New.Verdict == reconcile.VerdictIncomplete {
		return &verdict{exitIncomplete, nil}
	}
	for _, f := range d.Appeared {
		if f.Severity.Drift() {
			return &verdict{exitDrift, nil}
		}
	}
	return nil
}

// diffRows bounds the findings of each kind that people are shown.
const diffRows = 50

func printDiff(out *result, d changes.Diff) error {
	return out.print(d, func() error {
		var rows []table.Row
		left := 0
		for _, part := range []struct {
			name     string
			findings []reconcile.Finding
		}{{"new", d.Appeared}, {"gone", d.Gone}, {"unclear", d.Unclear}, {"persists", d.Persist}} {
			for _, f := range part.findings[:min(len(part.findings), diffRows)] {
				rows = append(rows, table.Row{part.name, f.Severity, f.Check, f.Scope.Reservation().Tag(), f.Subject, f.Message})
			}
			left += max(len(part.findings)-diffRows, 0)
		}
		err := out.table("no finding in either", table.Row{"CHANGE", "SEVERITY", "CHECK", "SCOPE", "SUBJECT", "FINDING"}, rows)
		if left > 0 {
			err = errors.Join(err, out.line("and %d more: see --output json", left))
		}
		return errors.Join(err, printScopeDiffs(out, d), printDiffSum(out, d))
	})
}

func printScopeDiffs(out *result, d changes.Diff) error {
	if len(d.Scopes) == 0 {
		return nil
	}
	var rows []table.Row
	for _, s := range d.Scopes[:min(len(d.Scopes), diffRows)] {
		var numbers []string
		for _, n := range s.Numbers {
			numbers = append(numbers, fmt.Sprintf("%s %s → %s", n.Name, numberOrDash(n.Old), numberOrDash(n.New)))
		}
		rows = append(rows, table.Row{
			s.Reservation().Tag(), s.Change, orDash(string(s.Verdict.Old)) + " → " + orDash(string(s.Verdict.New)), orDash(strings.Join(numbers, ", ")),
		})
	}
	err := errors.Join(out.line(""), out.table("", table.Row{"SCOPE", "CHANGE", "VERDICT", "NUMBERS"}, rows))
	if left := len(d.Scopes) - diffRows; left > 0 {
		err = errors.Join(err, out.line("and %d more: see --output json", left))
	}
	return err
}

func numberOrDash(n *int64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatInt(*n, 10)
}

func printDiffSum(out *result, d changes.Diff) error {
	err := out.line("")
	if len(d.Truncated) > 0 {
		err = errors.Join(err, out.line("The stored reports do not have all findings of %s: the lists are not complete.", strings.Join(d.Truncated, ", ")))
	}
	return errors.Join(err, out.line("%s → %s: %d new, %d gone, %d persist, %d unclear (%s to %s)",
		d.Old.Verdict, d.New.Verdict, len(d.Appeared), len(d.Gone), len(d.Persist), len(d.Unclear), d.Old.RunID, d.New.RunID))
}
