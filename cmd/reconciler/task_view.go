package main

import (
	"strconv"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/seckill/reconciler/internal/approval"
)

// proposalView is a proposal in JSON, with what became of it once it was approved.
type proposalView struct {
	ReservationID string           `json:"reservation_id"`
	Action        string           `json:"action"`
	Does          string           `json:"does"`
	Why           string           `json:"why,omitempty"` // why there is no action
	Expected      approval.World   `json:"expected"`
	Outcome       string           `json:"outcome,omitempty"`
	Detail        string           `json:"detail,omitempty"`
	Before        *approval.Values `json:"before,omitempty"`
	After         *approval.Values `json:"after,omitempty"`
}

func viewProposal(p approval.Proposal) proposalView {
	return proposalView{ReservationID: p.ID, Action: string(p.Action), Does: p.Does, Why: p.Why, Expected: p.Expected}
}

func viewProposals(proposals []approval.Proposal) []proposalView {
	views := make([]proposalView, len(proposals))
	for i, p := range proposals {
		views[i] = viewProposal(p)
	}
	return views
}

// reportView is an approval of one task in JSON.
type reportView struct {
	Task      taskView       `json:"task"`
	Proposals []proposalView `json:"proposals"`
	Truncated bool           `json:"truncated"` // more reservations stand behind the task
	Unclear   int            `json:"unclear"`   // for want of evidence
	Resolved  bool           `json:"resolved"`  // nothing is left behind the task
}

func viewReport(r approval.Report, dryRun bool) reportView {
	v := reportView{
		Task: viewTask(r.Plan.Task), Proposals: []proposalView{},
		Truncated: r.Plan.Truncated, Unclear: r.Plan.Unclear, Resolved: r.Resolved,
	}
	for _, one := range r.Results {
		p := viewProposal(one.Proposal)
		if !dryRun {
			p.Outcome, p.Detail, p.Before, p.After = string(one.Outcome), one.Detail, &one.Before, &one.After
		}
		v.Proposals = append(v.Proposals, p)
	}
	return v
}

// printReports prints what was done, or with dryRun what would be.
func printReports(out *result, reports []approval.Report, dryRun bool) error {
	views := make([]reportView, len(reports))
	for i, r := range reports {
		views[i] = viewReport(r, dryRun)
	}
	return out.print(struct {
		Schema int          `json:"schema"`
		DryRun bool         `json:"dry_run"`
		Tasks  []reportView `json:"tasks"`
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
	if w.Status == "" {
		return "(hash gone)"
	}
	return string(w.Status)
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
