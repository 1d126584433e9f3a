package console

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"github.com/seckill/reconciler/internal/admin"
	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/reservation"
)

// actorOf is the person behind a change, as the audit trail names them.
func actorOf(r *http.Request) string { return admin.CallerOf(r.Context()).Actor }

// taskRow is a task with the page of its version, if it has one.
type taskRow struct {
	view.Task

	ScopePath string
}

func (c *Console) taskRows(ctx context.Context, filter pgstore.TaskFilter) ([]taskRow, error) {
	tasks, err := c.Daemon.Postgres.Tasks(ctx, filter)
	if err != nil {
		return nil, err
	}
	rows := make([]taskRow, len(tasks))
	for i, t := range tasks {
		rows[i] = taskRow{Task: view.OfTask(t), ScopePath: pathOfTag(t.Scope)}
	}
	return rows, nil
}

func pathOfTag(tag string) string {
	scope, err := reservation.ParseTag(tag)
	if err != nil {
		return ""
	}
	return versionPath(scope.ActivityID, scope.SKUID, scope.Version)
}

func (c *Console) tasks(w http.ResponseWriter, r *http.Request) error {
	filter := pgstore.TaskFilter{States: pgstore.Unresolved}
	all := r.URL.Query().Get("all") != ""
	if all {
		filter.States = nil
	}
	rows, err := c.taskRows(r.Context(), filter)
	if err != nil {
		return err
	}
	c.render(w, r, http.StatusOK, "tasks", map[string]any{"Tasks": rows, "All": all})
	return nil
}

// taskData is a task with what is proposed for it.
type taskData struct {
	taskRow

	Open        bool
	Proposals   []view.Proposal
	Actions     int // proposals that do something
	Truncated   bool
	Unclear     int
	NotProposed string // why nothing is
	Fingerprint string // of what is shown, see [Console.approve]
}

func (c *Console) task(w http.ResponseWriter, r *http.Request) error {
	t, err := c.findTask(r)
	if err != nil {
		return err
	}
	data := taskData{taskRow: taskRow{Task: view.OfTask(t), ScopePath: pathOfTag(t.Scope)}}
	data.Open = t.State == pgstore.TaskOpen || t.State == pgstore.TaskApproved
	if data.Open {
		plan, err := c.Daemon.Approver().Propose(r.Context(), t, approval.Selection{})
		if err != nil {
			data.NotProposed = err.Error()
		} else if err := data.take(plan); err != nil {
			return err
		}
	}
	c.render(w, r, http.StatusOK, "task", data)
	return nil
}

func (d *taskData) take(plan approval.Plan) error {
	d.Proposals, d.Truncated, d.Unclear = view.OfProposals(plan.Proposals), plan.Truncated, plan.Unclear
	for _, p := range plan.Proposals {
		if p.Action != approval.None {
			d.Actions++
		}
	}
	var err error
	d.Fingerprint, err = fingerprint(plan)
	return err
}

// fingerprint stands for everything that a plan proposes and rests on.
func fingerprint(plan approval.Plan) (string, error) {
	text, err := json.Marshal(view.OfProposals(plan.Proposals))
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), nil
}

func (c *Console) findTask(r *http.Request) (pgstore.Task, error) {
	id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
	if err != nil {
		return pgstore.Task{}, failedWith(http.StatusNotFound, "%q is no task's number", r.PathValue("id"))
	}
	return c.Daemon.Postgres.Task(r.Context(), id)
}

// decideTask approves, rejects or resolves a task and shows what came of it.
func (c *Console) decideTask(w http.ResponseWriter, r *http.Request) error {
	t, report, err := c.decide(r)
	if err != nil {
		return err
	}
	if report == nil {
		return seeOther(w, r, "/tasks", r.PostFormValue("action"))
	}
	c.render(w, r, http.StatusOK, "approved", map[string]any{
		"Task": taskRow{Task: view.OfTask(t), ScopePath: pathOfTag(t.Scope)}, "Report": view.OfApproval(*report, false),
	})
	return nil
}

// decide does what the form says. The report is of an approval.
func (c *Console) decide(r *http.Request) (pgstore.Task, *approval.Report, error) {
	t, err := c.findTask(r)
	if err != nil {
		return t, nil, err
	}
	actor, reason := actorOf(r), r.PostFormValue("reason")
	if reason == "" {
		return t, nil, failedWith(http.StatusBadRequest, "say why: the reason goes into the audit trail")
	}
	switch action := r.PostFormValue("action"); action {
	case "approve":
		report, err := c.approve(r.Context(), t, r.PostFormValue("fingerprint"), approval.Act{Actor: actor, Reason: reason})
		return t, report, err
	case "reject":
		return t, nil, c.Daemon.Postgres.RejectTask(r.Context(), t.ID, actor, reason)
	case "resolve":
		return t, nil, c.Daemon.Postgres.ResolveTask(r.Context(), t.ID, actor, reason)
	default:
		return t, nil, failedWith(http.StatusBadRequest, "%q is no decision: approve, reject or resolve", action)
	}
}

// approve carries out what the person saw. Where another thing would be
// proposed by now, nothing is done and they look again; whatever changes after
// that is met by the approval's own checks.
func (c *Console) approve(ctx context.Context, t pgstore.Task, seen string, by approval.Act) (*approval.Report, error) {
	approver := c.Daemon.Approver()
	if approver.Observe {
		return nil, failedWith(http.StatusConflict, "mode is observe: nothing is carried out")
	}
	plan, err := approver.Propose(ctx, t, approval.Selection{})
	if no, ok := errors.AsType[*approval.NoActionError](err); ok {
		return nil, failedWith(http.StatusConflict, "%w", no)
	}
	if err != nil {
		return nil, err
	}
	now, err := fingerprint(plan)
	if err != nil {
		return nil, err
	}
	if now != seen {
		return nil, failedWith(http.StatusConflict, "what would be done is no longer what you were shown: load the task again and look at it")
	}
	// This very plan, and none that another person kept meanwhile.
	report, err := approver.Apply(ctx, plan, by)
	if err != nil {
		return nil, err
	}
	return &report, nil
}
