package main

import (
	"strconv"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/view"
)

// printReports prints what was done, or with dryRun what would be.
func printReports(out *result, reports []approval.Report, dryRun bool) error {
	views := make([]view.Approval, len(reports))
	for i, r := range reports {
		views[i] = view.OfApproval(r, dryRun)
	}
	return out.print(struct {
		Schema int             `json:"schema"`
		DryRun bool            `json:"dry_run"`
		Tasks  []view.Approval `json:"tasks"`
	}{1, dryRun, views}, func() error {
		if len(reports) == 0 {
			return out.line("no tasks")
		}
		for _, r := range reports {
			if err := out.line("task %d, %s of %s", r.Plan.Task.ID, r.Plan.Task.Kind, orAll(r.Plan.Task.Scope)); err != nil {
				return err
			}
			if err := printApproval(out, r, dryRun); err != nil {
				return err
			}
		}
		return nil
	})
}

func printApproval(out *result, r approval.Report, dryRun bool) error {
	if dryRun {
		return printPlan(out.line, r.Plan)
	}
	rows := make([]table.Row, len(r.Results))
	for i, one := range r.Results {
		rows[i] = table.Row{one.ID, one.Action, one.Outcome, statusOf(one.Before.World), statusOf(one.After.World), orDash(one.Detail)}
	}
	if err := out.table("no reservation stands behind it", table.Row{"RESERVATION", "ACTION", "OUTCOME", "BEFORE", "AFTER", "DETAIL"}, rows); err != nil {
		return err
	}
	if r.Resolved {
		return out.line("nothing is left behind the task: it is resolved")
	}
	return nil
}

// printPlan prints the proposals, and how many reservations it says nothing of.
func printPlan(line func(format string, args ...any) error, plan approval.Plan) error {
	rows := make([]table.Row, len(plan.Proposals))
	for i, p := range plan.Proposals {
		what := p.Does
		if p.Action == approval.None {
			what = p.Why
		}
		rows[i] = table.Row{p.ID, p.Action, statusOf(p.Expected), p.Expected.Orders, orDash(p.Expected.OrderID), what}
	}
	if err := tableTo(line, "no reservation stands behind it", table.Row{"RESERVATION", "PROPOSED", "STATUS", "ORDERS", "ORDER", "WHAT IT DOES"}, rows); err != nil {
		return err
	}
	if plan.Truncated {
		if err := line("more reservations stand behind it: --max is %d", plan.Selection.Max); err != nil {
			return err
		}
	}
	if plan.Unclear > 0 {
		return line("%s more may stand behind it: evidence is missing", strconv.Itoa(plan.Unclear))
	}
	return nil
}

// statusOf is the status as people read it.
func statusOf(w approval.World) string {
	if w.Recount != nil { // of a scope
		return w.Recount.State
	}
	if w.Status == "" {
		return "(hash gone)"
	}
	return string(w.Status)
}
