package approval

import (
	"fmt"
	"slices"
	"strings"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// scopeFlags select a scope on the command line.
func scopeFlags(s reservation.Scope) string {
	return fmt.Sprintf("--activity %s --sku %s --version %d --bucket %d", s.ActivityID, s.SKUID, s.Version, s.Bucket)
}

// explained are the kinds of which each reservation is shown with its evidence
// and with the step that a person takes: no action on them is provably safe.
var explained = []string{
	"restore_impossible", reconcile.CheckDeficit, reconcile.CheckOrderCreatedWithoutOrder, reconcile.CheckOrderAfterFence,
	reconcile.CheckOrderMissing, reconcile.CheckOrderWithoutClaim, reconcile.CheckDuplicateOrder, reconcile.CheckOrderScopeMismatch,
	reconcile.CheckUnknownOrderStatus, reconcile.CheckMalformedReservation, reconcile.CheckUserMarkerMismatch,
}

// steps says what a person does about a reservation behind a task of one of
// the kinds that are explained.
func (s subject) steps(kind string) string {
	flags := scopeFlags(s.Scope)
	repair := fmt.Sprintf("`reconciler reconcile %s --repair`", flags)
	var orders []string
	for _, o := range s.record.Orders {
		orders = append(orders, o.OrderID)
	}
	slices.Sort(orders)
	named := "order " + strings.Join(orders, ", ")
	switch kind {
	case "restore_impossible":
		return named + " names no user or no request: fill in user_id and request_id of reservation " + s.ID + " in order_evidence, then run " + repair
	case reconcile.CheckDeficit:
		return named + " needs a unit, and none is left: it is restored by " + repair + " once one comes free; or cancel it in the shop"
	case reconcile.CheckOrderCreatedWithoutOrder:
		return fmt.Sprintf("Redis has order %s, PostgreSQL has none: restore the row of reservation %s in the shop's orders from its backup or its log; "+
			"if there never was one, keep the unit reserved, and resolve this with the reason", orNone(s.Reservation.OrderID), s.ID)
	case reconcile.CheckOrderAfterFence:
		return fmt.Sprintf("%s was created although the claim is FENCED or REJECTED, so its unit may be sold twice: see `reconciler doctor` for the order trigger, "+
			"then cancel or delete it in the shop; a claim is final and is never changed", named)
	case reconcile.CheckOrderMissing:
		return fmt.Sprintf("the claim names order %s, and the shop has none: restore its row; if it was archived, let order_evidence show the archive", orNone(s.orders.OrderID))
	case reconcile.CheckOrderWithoutClaim:
		return named + " was created past the order trigger: see `reconciler doctor` for the trigger, then run `SELECT seckill.restart_backfill(…)` and `CALL seckill.backfill_order_fence(…)` for its table: they make the claim"
	case reconcile.CheckDuplicateOrder:
		return fmt.Sprintf("%s stand for one reservation, and Redis has %s: cancel all but one in the shop", named, orNone(s.Reservation.OrderID))
	case reconcile.CheckOrderScopeMismatch:
		return named + " or its claim names another activity, SKU, version, bucket or user than the reservation: find out which is right, and put the order right"
	case reconcile.CheckUnknownOrderStatus:
		return named + " has a status that order_evidence does not map: map it with `reconciler migrate evidence FILE`"
	case reconcile.CheckMalformedReservation:
		why := "it is well-formed now"
		if s.Malformed != nil {
			why = s.Malformed.Error()
		}
		return fmt.Sprintf("%s: see `reconciler show reservation %s`, find out who wrote it, and put the field right in Redis, or delete the hash and decide it as an orphan_member", why, s.ID)
	case reconcile.CheckUserMarkerMismatch:
		return "find out which reservation is the user's, see `reconciler show reservation " + s.ID + "`: no script moves or removes a marker without proof"
	default:
		return ""
	}
}

// scopeSteps are the exact steps for kinds that concern a scope as a whole;
// "" where the kind's own advice says it all.
func scopeSteps(kind string, scope reservation.Scope) string {
	flags := scopeFlags(scope)
	switch kind {
	case reconcile.CheckOversold:
		return fmt.Sprintf("more orders are active than the version has units: cancel orders in the shop until `reconciler reconcile --activity %s --sku %s --version %d` is consistent; no unit is taken back by itself",
			scope.ActivityID, scope.SKUID, scope.Version)
	case reconcile.CheckStateRegressed:
		return fmt.Sprintf("a failover undid the scope's state: run `reconciler scope pause %s`, or `reconciler scope close` with the same flags, again", flags)
	case reconcile.CheckAllocationMismatch:
		return fmt.Sprintf("compare `reconciler scope show %s` with what was allocated; a bucket whose stock was changed by hand is recounted: approve its task %s, or pause it and look at count_drift",
			flags, reconcile.CheckInvariantBroken)
	case reconcile.CheckSoldMismatch:
		return fmt.Sprintf("in one transaction that locks the counter's row, set it to the number of active orders of activity %s, SKU %s, version %d, then run `reconciler reconcile %s --checks sold_mismatch`",
			scope.ActivityID, scope.SKUID, scope.Version, flags)
	case reconcile.CheckUnregisteredScope:
		return "register it with `reconciler scope import`, or find out who sells under it"
	default:
		return ""
	}
}
