package view

import (
	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/pgstore"
)

// Proposal is a proposal in JSON, with what became of it once it was approved.
type Proposal struct {
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

// OfProposal is a proposal that nobody has decided.
func OfProposal(p approval.Proposal) Proposal {
	return Proposal{ReservationID: p.ID, Action: string(p.Action), Does: p.Does, Why: p.Why, Expected: p.Expected}
}

// OfProposals are proposals that nobody has decided.
func OfProposals(proposals []approval.Proposal) []Proposal {
	views := make([]Proposal, len(proposals))
	for i, p := range proposals {
		views[i] = OfProposal(p)
	}
	return views
}

// Approval is an approval of one task in JSON.
type Approval struct {
	Task      Task       `json:"task"`
	Proposals []Proposal `json:"proposals"`
	Truncated bool       `json:"truncated"` // more reservations stand behind the task
	Unclear   int        `json:"unclear"`   // for want of evidence
	Resolved  bool       `json:"resolved"`  // nothing is left behind the task
}

// OfApproval is what became of an approval, or with dryRun what would.
func OfApproval(r approval.Report, dryRun bool) Approval {
	v := Approval{
		Task: OfTask(r.Plan.Task), Proposals: []Proposal{},
		Truncated: r.Plan.Truncated, Unclear: r.Plan.Unclear, Resolved: r.Resolved,
	}
	for _, one := range r.Results {
		p := OfProposal(one.Proposal)
		if !dryRun {
			p.Outcome, p.Detail, p.Before, p.After = string(one.Outcome), one.Detail, &one.Before, &one.After
		}
		v.Proposals = append(v.Proposals, p)
	}
	return v
}

// Proposed is a task in JSON, with what is proposed for it.
type Proposed struct {
	Schema      int        `json:"schema"`
	Task        Task       `json:"task"`
	Proposals   []Proposal `json:"proposals"`
	Truncated   bool       `json:"truncated"` // more reservations stand behind it
	Unclear     int        `json:"unclear"`   // for want of evidence
	NotProposed string     `json:"not_proposed,omitempty"`
	Fingerprint string     `json:"fingerprint,omitempty"` // goes into an approval over HTTP
}

// OfProposed is a task with its plan, or why there is none.
func OfProposed(t pgstore.Task, plan approval.Plan, why error) Proposed {
	v := Proposed{Schema: 1, Task: OfTask(t), Proposals: OfProposals(plan.Proposals), Truncated: plan.Truncated, Unclear: plan.Unclear}
	if why != nil {
		v.NotProposed = why.Error()
	}
	return v
}
