// Package transfer moves units of stock between the buckets of one version,
// and drives every such move to its end (protocol §4, transfer).
//
// # Why it takes more than two idempotent calls
//
// The buckets are in two slots, and no script covers both. Either slot may be
// rolled back by a failover to any earlier write, a stale instance may run a leg
// at any later time, and both legs may be run again. A transfer that remembers
// "OUT done, IN done" and closes its row then loses units or has them twice: what
// it noted is not what the slots hold.
//
// Here each slot remembers how many units it moved, in the marker transfer:<id>,
// changed together with the stock by one script. Targets are absolute, so that a
// leg that is run again, or late, moves nothing twice. And no row is closed for
// good: whatever a failover took back shows as a pair of markers that are not
// equal, and is made equal again.
//
//	           journal row committed first, then OUT whole
//	PLANNED ─────────────────────────────────────────────▶ OUT
//	   │  │                                              out > in
//	   │  └─ the donor has too few units: CANCELLED          │
//	   └──── cancel, while no OUT was seen: CANCELLED        │ IN raise to out
//	                                                         ▼
//	   ┌──────────────── a failover undid a leg ────────── DONE
//	   ▼                                                 out = in
//	out > in:  IN raise to out                               ▲
//	in > out:  OUT partial towards in, then IN lower to out ─┘
//
// A row says what was seen last; the markers say what is. [Next] decides from
// the markers alone what is to be done, and every round reads them anew.
//
// # What holds
//
// Σ initial over the buckets − allocated = Σ (in − out) over the pairs, read from
// the markers. Each script keeps the two sides of its own slot equal, so the sum
// holds whatever the moment at which each slot is read, as long as stock and
// markers of one slot are read together. While it does not hold somebody else
// changed the stock: nothing is moved and a person is asked (transfer_conflict).
//
// Units between the legs are sellable nowhere. Units that are in both buckets, in
// after the donor's slot was rolled back, are taken back from the donor first and
// from the receiver if it has none; what was sold by then is waited for.
//
// # Who plans
//
// A person (`reconciler transfer create`), a reconciliation that finds an order
// for which its bucket has no unit left (FillDeficit), and the rebalancer, which
// gives sold-out buckets that are still asked for a share of what others have
// left. No OUT is planned from a bucket whose reservations are fewer than the
// orders and reservations that need them: its units are needed there.
package transfer
