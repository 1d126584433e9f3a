// Package reconcile compares what Redis says of a flash sale's stock with what
// PostgreSQL says of its orders (protocol §5). It changes nothing, unless repairs
// are approved.
//
// # What is compared
//
// Level 1, the invariant: initial = available + reserved in each scope, and the
// initial stocks of all buckets sum up to what was allocated. Level 2, the
// count: with E the members of reservation_expiry and O the orders that hold a
// unit (active ones, and cancelled ones whose reservation exists and is not
// RELEASED),
//
//	deviation = reserved − |E ∪ O| = reserved − (|E| + |O| − |E ∩ O|)
//
// Above zero, units are reserved by nobody (under-selling). Below zero,
// reservations are lost (overselling).
//
// Level 3, the sets: every order against its reservation, and every reservation
// that the request shards or the indexes name against its claim. All of it is
// one kind of read: a reservation's hash, its places in the indexes, its user's
// marker and its request's result, then its claim and orders in one statement.
// A pure function names what contradicts in that. The walk keeps nothing but
// what is suspicious, so its memory does not grow with the sale.
//
// # Data in motion
//
// The two sides cannot be read at one instant, and E is read in pages. What
// makes the comparison exact all the same: let F = reserved − |E|. Both are
// read in one script call, and neither a reservation nor a release changes F,
// since each moves both by one; only a reservation that leaves E as
// ORDER_CREATED does. And deviation = F − |O outside E|.
//
// A reading takes F at instant A, then fixes a snapshot of PostgreSQL at T,
// then reads the pages of E, then takes F again at B. O and its part in E are
// matched in the snapshot T. An order of T whose reservation left E before A is
// in F(A); one that leaves after B is met in E; one that leaves between may be
// met or not, and F(B) − F(A) says how many there are. Nothing that was ordered
// after T is in F(A), since T comes after A. So the deviation lies in
//
//	[ F(A) − |O outside E|, F(B) − |O outside E| ]
//
// which is a single number when no order was finished meanwhile, whatever the
// traffic of reservations and releases. A reading that left a range is made
// again, and the ranges are intersected. A scope whose numbers changed is
// in_motion; it contradicts only if its range excludes zero.
//
// # Rounds
//
// A contradiction becomes a finding only if it stands again in a later round,
// settle apart, read from both sides and from the registry anew. What differs
// in every round and never goes away is neither: the scope is incomplete.
// What could not be read is incomplete, never zero and never an empty scope.
//
// In a set pass a contradiction belongs to a member and has a cause, such as the
// pair of statuses. The rounds after the walk read exactly the suspicious
// members again, Redis and PostgreSQL. A reservation in motion has moved on by
// then: its statuses only go forward, so the same contradiction does not come
// back.
//
// # Repairs
//
// A repair reads its member again, makes sure that it is the same finding, and
// runs one script that checks its reason again. Releases are finished before
// reservations are restored, so that there are units to take. Afterwards
// everything is read again, and the report is of the state then.
package reconcile
