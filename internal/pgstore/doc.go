// Package pgstore keeps what the daemon needs in PostgreSQL: it reads claims
// and orders (P of protocol §2), fences reservations (§1), and holds the scope
// registry, tasks, jobs, expected queues, the audit trail and the lease. All
// SQL of the daemon is here or in package migrations; the store decides
// nothing.
//
// Every call is bounded by its context. Reads take pages. A failed call says
// nothing about any item of its page (S3): errors.Is(err, [ErrUnavailable])
// tells a server that cannot be reached, or did not answer in time, from a
// fault of ours.
//
// Rights: the pool's login is a member of seckill_daemon or, for what a person
// decides, of seckill_operator. Each method says which it needs when the
// daemon's are not enough. Writes commit with synchronous_commit on, or
// remote_apply where the server is set so: what Redis already shows must not
// be undone by a crash.
package pgstore
