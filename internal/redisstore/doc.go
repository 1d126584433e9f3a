// Package redisstore is the daemon's side of Redis: connections, pages of the
// indexes with the reservations they name, and the effects of decisions as
// pipelined script calls.
//
// It decides nothing: it tells workers what the scopes hold and carries out
// what they decided. Scripts that change anything run at most once per
// attempt, on a client of their own that never repeats a command; reads have
// their own pool, so that a scan never waits behind a change, nor the gateway's
// traffic behind either (spec §6).
package redisstore
