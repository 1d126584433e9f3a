// Package remoting speaks RocketMQ's remoting protocol, as far as the daemon
// needs it: the admin and read requests of services §3, which the official
// client library does not offer.
//
// A frame is
//
//	4 B length of the rest | 1 B serialize type (0 = JSON) | 3 B header length | JSON header | body
//
// A [Peer] is one server (name server or broker). It dials when it is first
// needed, again after a connection is lost, and carries any number of requests
// at once on one connection; replies are matched by their opaque number.
//
// Whatever arrives is untrusted: a frame that is too long, not JSON, or whose
// lengths do not add up closes the connection with [ErrProtocol], and memory is
// only taken for bytes that have arrived. Every call is bounded by its context
// and by Options.CallTimeout.
//
// Errors: [*CodeError] is the server's own refusal. [ErrProtocol] is a server
// that does not keep to the protocol. [ErrLost] is a connection that broke with
// the request under way: the request may have been carried out. An error of
// dialling wraps a [net.OpError] whose Op is "dial": nothing was sent. A
// time-out wraps [context.DeadlineExceeded].
package remoting
