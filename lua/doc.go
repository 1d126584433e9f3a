// Package lua holds the Redis scripts of the data contract (spec §4), one .lua
// file each, and runs them: typed arguments, typed replies, typed errors.
//
// A script is atomic on its one node. What reaches it is another matter, and
// that is what [Runner] is for:
//
//   - Calls are gathered in a [Batch] and sent in pipelines, one after another
//     per node and side by side over nodes. A node that stalls holds up nobody
//     else, and nothing outlasts the context.
//   - Each call is executed at most once per [Batch.Run]. The client library
//     would run a script again when its reply is lost; here that is the typed
//     error [ErrOutcomeUnknown], and the caller asks again with the same ids.
//     Only calls that were certainly not executed (NOSCRIPT, MOVED, ASK) are
//     sent again, a bounded number of times.
//   - One failed call fails itself alone. [Batch.Run] has an error only when
//     the batch as a whole could not be run.
//
// Calls of one scope are executed in the order in which they were added, but
// for those that had to be sent again: they may come after later ones. Every
// script checks the state that it starts from, so the worst of that is a
// business code, and the next pass.
//
// Times are milliseconds since 1970 on the clock of the scope's node; NowMS 0
// means that clock, and any other value is for tests.
package lua
