package reconcile

import (
	"testing"

	"github.com/seckill/reconciler/reservation"
)

// Units that nobody holds, and nothing that explains them, are a person's.
func TestUnexplainedDriftAsksForARecount(t *testing.T) {
	t.Parallel()
	at := jsonScope(reservation.Scope{ActivityID: "a", SKUID: "s", Version: 1})
	drift := Finding{Check: CheckCountDrift, Severity: SeverityCritical, Scope: at, Subject: at.Reservation().Tag(), Repair: Repair{Kind: RepairNone}}
	leaked := Finding{Check: CheckLeakedReservation, Severity: SeverityError, Scope: at, Subject: "r", Repair: Repair{Kind: RepairManual}}
	for name, c := range map[string]struct {
		deviation int64
		compared  bool
		findings  []Finding
		want      bool
	}{
		"held by nobody":                      {3, true, []Finding{drift}, true},
		"members were not compared":           {3, false, []Finding{drift}, false},
		"reservations are lost":               {-3, true, []Finding{drift}, false},
		"something else has to be done first": {3, true, []Finding{drift, leaked}, false},
	} {
		r := &Report{Scopes: []ScopeReport{{Scope: at, Deviation: &c.deviation}}, Findings: c.findings, members: map[Scope]bool{at: c.compared}}
		asked := false
		for _, task := range r.Tasks(nil) {
			asked = asked || task.Kind == CheckCountDrift
		}
		if asked != c.want {
			t.Errorf("%s: a task %v, want %v", name, asked, c.want)
		}
	}
}

// A task about a reservation whose hash was released stays while a hash of its
// scope is lost: it may be that one, and restoring it from its request's result
// would take no unit.
func TestALostHashDisprovesNoRelease(t *testing.T) {
	t.Parallel()
	scope := reservation.Scope{ActivityID: "a", SKUID: "s", Version: 1}
	at := jsonScope(scope)
	report := func(findings ...Finding) *Report {
		return &Report{
			Verdict: VerdictDrift, Scopes: []ScopeReport{{Scope: at}}, Findings: findings,
			Summary: map[string]int{CheckOrderAfterRelease: 0, CheckLostReservation: len(findings)},
			members: map[Scope]bool{at: true}, unfiltered: true,
		}
	}
	if r := report(); !r.Disproves(CheckOrderAfterRelease, scope) {
		t.Error("a complete comparison without the finding does not end its task")
	}
	lost := Finding{Check: CheckLostReservation, Scope: at, Repair: Repair{State: RepairStateFailed}}
	if r := report(lost); r.Disproves(CheckOrderAfterRelease, scope) {
		t.Error("the task ends although a hash of the scope is lost")
	}
	elsewhere := lost
	elsewhere.Scope.Bucket = 1
	if r := report(elsewhere); !r.Disproves(CheckOrderAfterRelease, scope) {
		t.Error("a hash that another scope lost keeps the task")
	}
}
