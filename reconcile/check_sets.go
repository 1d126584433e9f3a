package reconcile

// costs of the set checks, which share their reads.
const (
	costBoth    = "all orders of the SKU, all reservations that the request shards and indexes name: hash, indexes, marker, request result, claim and order of each"
	costScanned = "the same reads"
)

// setChecks look at each member: every order against its reservation, every
// reservation that Redis names against its claim. All of them share one pass,
// so that choosing fewer saves nothing.
var setChecks = []Check{
	{
		ID: CheckMalformedReservation, Severity: SeverityError, Level: LevelSet,
		Compares: "each reservation's hash with the contract",
		Cost:     costBoth, Repair: RepairManual,
		Advice: "find out who wrote it: the daemon leaves it alone until it is put right or removed",
	},
	{
		ID: CheckLostReservation, Severity: SeverityCritical, Level: LevelSet,
		Compares: "each order with the hash of its reservation, which is gone",
		Cost:     costScanned, Repair: RepairAutomatic,
		Advice: "restore it from the order: --repair",
	},
	{
		ID: CheckDeficit, Severity: SeverityCritical, Level: LevelSet,
		Compares: "a lost reservation that takes a unit with the units that are left: none",
		Cost:     "found by the restore of a lost reservation", Repair: RepairAutomatic,
		Advice: "PostgreSQL sold more than Redis has: it is restored as soon as a unit comes free, by the next --repair",
	},
	{
		ID: CheckStatusBehind, Severity: SeverityError, Level: LevelSet,
		Compares: "the status of each undecided reservation with its claim and order, which are final",
		Cost:     costScanned, Repair: RepairAutomatic,
		Advice: "advance it, or finish its release: --repair, or the daemon does it once it is due",
	},
	{
		ID: CheckOrderAfterReleasePending, Severity: SeverityError, Level: LevelSet,
		Compares: "each reservation that is to be released with its order",
		Cost:     costScanned, Repair: RepairAutomatic,
		Advice: "confirm it: --repair, unless fencer.confirm is manual",
	},
	{
		ID: CheckOrderAfterRelease, Severity: SeverityCritical, Level: LevelSet,
		Compares: "each RELEASED reservation with active orders",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "its unit may be sold twice: cancel the order, or take a unit for it once a person has approved",
	},
	{
		ID: CheckReleaseWithoutClaim, Severity: SeverityError, Level: LevelSet,
		Compares: "each RELEASED reservation with its claim, which is gone",
		Cost:     costScanned, Repair: RepairAutomatic,
		Advice: "fence it again: --repair; where an order was faster it becomes order_after_release",
	},
	{
		ID: CheckOrderCreatedWithoutOrder, Severity: SeverityCritical, Level: LevelSet,
		Compares: "each ORDER_CREATED reservation with its order",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "find out what became of the order before the unit is sold again",
	},
	{
		ID: CheckOrderAfterFence, Severity: SeverityCritical, Level: LevelSet,
		Compares: "each claim FENCED or REJECTED with orders",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "the order trigger was not in place: install it again, then cancel the order or keep it by hand",
	},
	{
		ID: CheckOrderMissing, Severity: SeverityError, Level: LevelSet,
		Compares: "each claim ORDER with its order, in versions that are not CLOSED",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "an order row was deleted: restore it, or find out why",
	},
	{
		ID: CheckOrderWithoutClaim, Severity: SeverityError, Level: LevelSet,
		Compares: "each order with its claim",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "it was created past the order trigger: see to the trigger, then back-fill the table again (seckill.restart_backfill, seckill.backfill_order_fence)",
	},
	{
		ID: CheckDuplicateOrder, Severity: SeverityCritical, Level: LevelSet,
		Compares: "the order ids of each reservation in orders, claim and Redis",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "one of the orders is wrong: cancel it",
	},
	{
		ID: CheckOrderScopeMismatch, Severity: SeverityCritical, Level: LevelSet,
		Compares: "activity, SKU, version, bucket and user of each order and claim with its reservation's",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "find out which is right: nothing is decided until then",
	},
	{
		ID: CheckUnknownOrderStatus, Severity: SeverityError, Level: LevelSet,
		Compares: "the status of each order with those that order_evidence maps",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "map the status in the view, see `reconciler migrate evidence`",
	},
	{
		ID: CheckOrphanMember, Severity: SeverityError, Level: LevelSet,
		Compares: "each index member with its hash, which is gone, and with orders: it has none",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "its unit is held by nobody: approve its adoption, and it is released like any other",
	},
	{
		ID: CheckLeakedReservation, Severity: SeverityError, Level: LevelSet,
		Compares: "each accepted request with its reservation's hash, indexes and orders: all are gone",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "approve its fence, so that no order can come for it any more, then the recount of the paused scope, which gives its unit back",
	},
	{
		ID: CheckUnindexedReservation, Severity: SeverityError, Level: LevelSet,
		Compares: "each undecided reservation with the indexes that its status calls for",
		Cost:     costScanned, Repair: RepairAutomatic,
		Advice: "no worker finds it: put it back with --repair",
	},
	{
		ID: CheckLeftoverMember, Severity: SeverityError, Level: LevelSet,
		Compares: "each decided reservation with the indexes, which still hold it",
		Cost:     costScanned, Repair: RepairAutomatic,
		Advice: "drop it: --repair, or the daemon does it once it is due",
	},
	{
		ID: CheckUserMarkerMismatch, Severity: SeverityError, Level: LevelSet,
		Compares: "each reservation with the marker of its user",
		Cost:     costScanned, Repair: RepairAutomatic,
		Advice: "set it: --repair does where the evidence says which reservation is the user's",
	},
	{
		ID: CheckRequestResultMismatch, Severity: SeverityError, Level: LevelSet,
		Compares: "each reservation with the result of its request, each result with the contract",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "a client that asks again may get a wrong answer: no unit is concerned",
	},
	{
		ID: CheckMissingTTL, Severity: SeverityError, Level: LevelSet,
		Compares: "the expiry of each hash, and of the scope's own keys, with its retention",
		Cost:     costScanned, Repair: RepairManual,
		Advice: "give the key the scope's retention: PEXPIREAT <key> <retention_until_ms>",
	},
	{
		ID: CheckCancelledHoldsStock, Severity: SeverityInfo, Level: LevelSet,
		Compares: "each cancelled order with its reservation, which holds a unit",
		Cost:     costScanned, Repair: RepairNone,
		Advice: "its unit is not sold again in this version",
	},
}
