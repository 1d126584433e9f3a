// Package pass holds what a pass of every worker has in common: a tally of
// what was decided and done, tasks aggregated by cause, and the walk over the
// due members of many scopes, bounded and fair.
package pass
