// Package rocketmq is the RocketMQ side of the daemon: it sends order messages
// and gathers M, the evidence of protocol §2, for those that were sent.
//
// [Sender] wraps the producer of the official client library. Its results tell
// apart what protocol §3 row 9 needs apart: stored, refused for the message's
// own sake, not sent because RocketMQ is unavailable, and unknown. A send that
// timed out can be stored at any later time, so unknown never becomes "not sent".
//
// [Evidence] speaks RocketMQ's remoting protocol itself (package remoting),
// since no client library offers the admin and read requests that evidence
// rests on. How it concludes is told at [Evidence.Gather]; whatever could not be
// read, or not completely, is UNKNOWN with a stable cause.
//
// Times named …MS are milliseconds since 1970. Those of reservations are on the
// clock of their Redis node, those of records on their broker's; the sweep
// margin bridges the two, and a broker whose clock is further off than half the
// margin makes the evidence UNKNOWN.
package rocketmq
