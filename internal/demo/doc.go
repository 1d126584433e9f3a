// Package demo runs a whole flash sale on real services, breaks it in every way
// that package upstream knows, lets the daemon repair it, and checks by itself
// what became of it.
//
// The daemon is a process of its own, started from the same binary as anybody
// would start it, and killed once in the middle. One bucket goes back to an
// earlier write, as a failover does that loses the newest ones, and is repaired
// by `reconcile --repair` at the end. The check ([Look] and
// [State.Check]) reads Redis and PostgreSQL directly and shares no code with the
// daemon beyond the names of keys: it would find the daemon out.
package demo
