// Package probe is what the probes of Redis, PostgreSQL and RocketMQ read: data
// and what can be computed from it, without any I/O.
//
// The adapters fill it in (redisstore, pgstore, rocketmq), the daemon exports
// it as metrics, and package doctor judges it: one place reads each thing, and
// one judges it. No probe uses KEYS, SCAN or MONITOR, resets anything, or takes
// a time that grows with the data (spec §6).
package probe
