package reconcile

import (
	"fmt"
	"slices"
)

// taskKinds are the kinds of tasks that are no checks: a worker meets them at
// its work, or they are a part of a check. Together with the checks they are
// every kind that the program raises; a test holds the code to that.
var taskKinds = []Check{
	{
		ID: "send_blocked", Severity: SeverityError, Source: RaisedByWorkers, Repair: RepairNone,
		Compares: "scanner: RocketMQ takes no message (no route, busy, flow control, connection refused)",
		Advice:   "bring the broker or its route back: what waits is sent then, without limit, and nothing is released for it",
	},
	{
		ID: "send_refused", Severity: SeverityError, Source: RaisedByWorkers, Repair: RepairManual,
		Compares: "scanner: RocketMQ refuses the message itself (too large, illegal)",
		Advice:   "see topic and message size limits, then resolve the task; the reservation waits",
	},
	{
		ID: "evidence_stuck", Severity: SeverityError, Source: RaisedByWorkers, Repair: RepairManual,
		Compares: "fencer: an expired reservation whose message cannot be found out about for fencer.escalate_after",
		Advice:   "bring the missing broker or queue back, or `broker forget` it; or settle one reservation by `task approve ID --reservation …`",
	},
	{
		ID: "dead_letter", Severity: SeverityError, Source: RaisedByWorkers, Repair: RepairManual,
		Compares: "fencer: an expired reservation whose message is in the dead-letter queue",
		Advice:   "let the consumer have the message again, or approve the release; it is released after fencer.dead_letter_after",
	},
	{
		ID: "release_storm", Severity: SeverityCritical, Source: RaisedByWorkers, Repair: RepairManual,
		Compares: "gate: the releases of a scope with fencer.max_release",
		Advice:   "releases of the scope are halted: see that consumer group and topic are the right ones, then resolve the task",
	},
	{
		ID: "postgres_changed", Severity: SeverityCritical, Source: RaisedByWorkers, Repair: RepairNone,
		Compares: "every pass: identity, timeline and WAL position of PostgreSQL with those of the passes before",
		Advice:   "all releases are halted until the job refence has fenced every RELEASED reservation again: it ends the task",
	},
	{
		ID: "fence_not_ready", Severity: SeverityCritical, Source: RaisedByWorkers, Repair: RepairManual,
		Compares: "gate: every order table with the order trigger that it needs",
		Advice:   "all releases are halted: install the order fence on the table that the task names, see `reconciler doctor` or docs/adopting.md",
	},
	{
		ID: taskRestoreImpossible, Severity: SeverityCritical, Source: RaisedByReconcile, Repair: RepairManual,
		Compares: "lost_reservation: an order that names no user or no request, so that its reservation cannot be rebuilt",
		Advice:   "fill in user_id and request_id in order_evidence, and run --repair again",
	},
}

// Kinds lists every kind of task or finding that the program raises: the
// checks of [Checks], then what workers raise.
func Kinds() []Check { return slices.Concat(registry, taskKinds) }

// Kind finds a kind by its id.
func Kind(id string) (Check, bool) {
	all := Kinds()
	i := slices.IndexFunc(all, func(c Check) bool { return c.ID == id })
	if i < 0 {
		return Check{}, false
	}
	return all[i], true
}

// NotACheckError says that a name is a kind of task, and not a check.
type NotACheckError struct{ Kind Check }

func (e *NotACheckError) Error() string {
	if e.Kind.Source == RaisedByWorkers {
		return fmt.Sprintf("%s is no check of a run: the daemon's workers raise it at their work; see `reconciler task list --kind %s`", e.Kind.ID, e.Kind.ID)
	}
	return fmt.Sprintf("%s is no check of its own: it is found as a part of another one (%s); see `reconciler task list --kind %s`", e.Kind.ID, e.Kind.Compares, e.Kind.ID)
}
