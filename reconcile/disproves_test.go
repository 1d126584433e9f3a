package reconcile

import (
	"testing"

	"github.com/seckill/reconciler/reservation"
)

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
