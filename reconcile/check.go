package reconcile

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Severity says what a finding means for a run's verdict: critical and error
// findings are drift, warnings and infos are only reported (interface §7).
type Severity string

// The severities of findings.
const (
	SeverityCritical Severity = "critical"
	SeverityError    Severity = "error"
	SeverityWarning  Severity = "warning"
	SeverityInfo     Severity = "info"
)

// Drift says whether a finding of this severity is drift.
func (s Severity) Drift() bool { return s == SeverityCritical || s == SeverityError }

// RepairKind says who may put a finding right.
type RepairKind string

// The kinds of repair.
const (
	RepairAutomatic RepairKind = "automatic" // by a script that checks its reason again
	RepairManual    RepairKind = "manual"    // by a person
	RepairNone      RepairKind = "none"      // another check names what is to be repaired
)

// RepairState says how far a repair has come.
type RepairState string

// The states of a repair.
const (
	RepairStateNone            RepairState = "none"
	RepairStatePlanned         RepairState = "planned"
	RepairStateDone            RepairState = "done"
	RepairStateFailed          RepairState = "failed"
	RepairStatePendingApproval RepairState = "pending_approval"
)

// The checks that exist. Their names are those of protocol §5.
const (
	CheckConfigMissing      = "config_missing"
	CheckInvariantBroken    = "invariant_broken"
	CheckAllocationMismatch = "allocation_mismatch"
	CheckCountDrift         = "count_drift"
	CheckUnregisteredScope  = "unregistered_scope"
	CheckOversold           = "oversold"
	CheckStateRegressed     = "state_regressed"
	CheckRetentionRisk      = "retention_risk"
	CheckSoldMismatch       = "sold_mismatch"
	CheckEnvironment        = "environment"

	CheckMalformedReservation     = "malformed_reservation"
	CheckLostReservation          = "lost_reservation"
	CheckDeficit                  = "deficit"
	CheckStatusBehind             = "status_behind"
	CheckOrderAfterReleasePending = "order_after_release_pending"
	CheckOrderAfterRelease        = "order_after_release"
	CheckReleaseWithoutClaim      = "release_without_claim"
	CheckOrderCreatedWithoutOrder = "order_created_without_order"
	CheckOrderAfterFence          = "order_after_fence"
	CheckOrderMissing             = "order_missing"
	CheckOrderWithoutClaim        = "order_without_claim"
	CheckDuplicateOrder           = "duplicate_order"
	CheckOrderScopeMismatch       = "order_scope_mismatch"
	CheckUnknownOrderStatus       = "unknown_order_status"
	CheckOrphanMember             = "orphan_member"
	CheckLeakedReservation        = "leaked_reservation"
	CheckUnindexedReservation     = "unindexed_reservation"
	CheckLeftoverMember           = "leftover_member"
	CheckUserMarkerMismatch       = "user_marker_mismatch"
	CheckRequestResultMismatch    = "request_result_mismatch"
	CheckMissingTTL               = "missing_ttl"
	CheckCancelledHoldsStock      = "cancelled_order_holds_stock"
)

// The levels of checks: the cheapest pass that includes one.
const (
	LevelQuick = "quick" // every run
	LevelSet   = "set"   // a run, in scopes with drift; with --deep in all
	LevelDeep  = "deep"  // a run with --deep, or one that names the check
)

// Who raises what [Kinds] lists.
const (
	RaisedByReconcile = "reconcile" // a run looks for it
	RaisedByWorkers   = "worker"    // a worker meets it at its work, and opens a task
)

// Check is one thing that a run may look for.
type Check struct {
	ID       string     `json:"id"`
	Severity Severity   `json:"severity"`
	Source   string     `json:"source"`   // reconcile or worker: who raises it
	Level    string     `json:"level"`    // quick, set or deep: the cheapest pass that includes it; "" where no run looks for it
	Compares string     `json:"compares"` // what with what
	Cost     string     `json:"cost"`     // what it reads
	Repair   RepairKind `json:"repair"`
	Advice   string     `json:"advice"` // what a person does about a finding

	needs   needs
	compare func(*skuReading) []contradiction // nil at LevelSet, where [judge] makes them, and at LevelDeep
}

// needs are the reads that a check rests on, so that a run makes only those
// that its checks call for.
type needs struct {
	config    bool // the fields of meta and stock, one by one
	orders    bool // the orders of each scope, counted
	siblings  bool // the stocks of all buckets of a version
	allOrders bool // the orders of all versions of the SKU, counted
	sold      bool // PostgreSQL's counter of sold units
	transfers bool // the journal of transfers, with the buckets' markers
}

// registry lists the checks, cheapest first. A check is an item of its own: it
// sees a reading and says what contradicts.
var registry = raisedBy(RaisedByReconcile, slices.Concat(quickChecks, transferChecks, setChecks, deepChecks))

func raisedBy(source string, checks []Check) []Check {
	for i := range checks {
		checks[i].Source = source
	}
	return checks
}

var quickChecks = []Check{
	{
		ID: CheckConfigMissing, Severity: SeverityCritical, Level: LevelQuick,
		Compares: "the registry with the keys meta and stock of each confirmed scope",
		Cost:     "two HMGET a scope",
		Repair:   RepairManual,
		Advice:   "the keys are never filled again: find out what removed them, and restore Redis or close the version",
		needs:    needs{config: true}, compare: missingConfig,
	},
	{
		ID: CheckInvariantBroken, Severity: SeverityCritical, Level: LevelQuick,
		Compares: "initial with available + reserved of each scope, none of them negative",
		Cost:     "one script call a scope",
		Repair:   RepairManual,
		Advice:   "pause the scope and recount it: every script refuses its stock until then",
		needs:    needs{}, compare: brokenInvariant,
	},
	{
		ID: CheckAllocationMismatch, Severity: SeverityCritical, Level: LevelQuick,
		Compares: "the units allocated to a version with the initial stocks of its buckets and what is in transit",
		Cost:     "one script call a bucket",
		Repair:   RepairManual,
		Advice:   "compare the bucket's initial stock with its registration before anything is sold on",
		needs:    needs{siblings: true, transfers: true}, compare: mismatchedAllocation,
	},
	{
		ID: CheckCountDrift, Severity: SeverityCritical, Level: LevelQuick,
		Compares: "reserved with the undecided reservations in Redis and the orders in PostgreSQL",
		Cost:     "two script calls a scope, the pages of reservation_expiry, a count of the SKU's orders, its cancelled orders",
		Repair:   RepairNone,
		Advice:   "above zero units are reserved by nobody, below zero reservations are lost: the set checks name them",
		needs:    needs{orders: true}, compare: countDrift,
	},
	{
		ID: CheckUnregisteredScope, Severity: SeverityError, Level: LevelQuick,
		Compares: "the registry with the versions and buckets that orders of a registered SKU name",
		Cost:     "a count of the SKU's orders",
		Repair:   RepairManual,
		Advice:   "register it with `reconciler scope import`, or find out who sells under a version that was never created",
		needs:    needs{allOrders: true}, compare: unregisteredScopes,
	},
	{
		ID: CheckOversold, Severity: SeverityCritical, Level: LevelQuick,
		Compares: "the active orders of a version with the units allocated to it, where all its buckets are selected",
		Cost:     "the counts of count_drift",
		Repair:   RepairManual,
		Advice:   "more was sold than there is: cancel orders, or allocate more in a new version",
		needs:    needs{orders: true}, compare: oversoldVersions,
	},
	{
		ID: CheckStateRegressed, Severity: SeverityError, Level: LevelQuick,
		Compares: "the state of each scope in the registry with that in Redis",
		Cost:     "one script call a scope",
		Repair:   RepairManual,
		Advice:   "a failover undid the change: pause or close the scope again",
		needs:    needs{}, compare: regressedStates,
	},
	{
		ID: CheckRetentionRisk, Severity: SeverityWarning, Level: LevelQuick,
		Compares: "the end of each scope's retention with what is undecided in it",
		Cost:     "one script call a scope",
		Repair:   RepairManual,
		Advice:   "decide what is left before the keys expire: see `reconciler status` for what it waits for",
		needs:    needs{}, compare: retentionRisks,
	},
	{
		ID: CheckSoldMismatch, Severity: SeverityError, Level: LevelQuick,
		Compares: "PostgreSQL's counter of a version's sold units with its orders, where the view seckill.stock_evidence says where the counter is",
		Cost:     "the counts of count_drift, and the version's row of the counter, in one snapshot",
		Repair:   RepairManual,
		Advice:   "the order side created or removed orders without its counter: put the counter right in one transaction that locks its row",
		needs:    needs{orders: true, sold: true}, compare: mismatchedSold,
	},
}

// deepChecks are made once a run, and not for each scope.
var deepChecks = []Check{
	{
		ID: CheckEnvironment, Severity: SeverityWarning, Level: LevelDeep,
		Compares: "the settings of each Redis server that takes writes, and of PostgreSQL, with what the promises rest on",
		Cost:     "INFO, ACL WHOAMI and ACL GETUSER on each server, one row of PostgreSQL",
		Repair:   RepairManual,
		Advice:   "see the finding: it names the setting and the remedy",
	},
}

// Checks lists the checks, in the order in which they run.
func Checks() []Check { return slices.Clone(registry) }

// ErrUnknownCheck says that a name is not a check's.
var ErrUnknownCheck = errors.New("unknown check")

// selectChecks finds checks by name; no names are all checks. A deficit is
// found by way of a lost reservation.
func selectChecks(names []string) ([]Check, error) {
	if len(names) == 0 {
		return Checks(), nil
	}
	var known []string
	for _, c := range registry {
		known = append(known, c.ID)
	}
	for _, name := range names {
		if slices.Contains(known, name) {
			continue
		}
		if i := slices.IndexFunc(taskKinds, func(c Check) bool { return c.ID == name }); i >= 0 {
			return nil, &NotACheckError{taskKinds[i]}
		}
		return nil, fmt.Errorf("%w %q: there are %s", ErrUnknownCheck, name, strings.Join(known, ", "))
	}
	if slices.Contains(names, CheckDeficit) {
		names = append(slices.Clone(names), CheckLostReservation)
	}
	return slices.DeleteFunc(Checks(), func(c Check) bool { return !slices.Contains(names, c.ID) }), nil
}

// union is what the checks need together.
func union(checks []Check) needs {
	var n needs
	for _, c := range checks {
		n.config = n.config || c.needs.config
		n.orders = n.orders || c.needs.orders
		n.siblings = n.siblings || c.needs.siblings
		n.allOrders = n.allOrders || c.needs.allOrders
		n.sold = n.sold || c.needs.sold
		n.transfers = n.transfers || c.needs.transfers
	}
	return n
}
