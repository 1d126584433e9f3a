// Package client is how a gateway and an order consumer keep the data contract
// of a flash sale without writing it again.
//
// # Gateway
//
//	request ─▶ Reserve ─▶ accepted ─▶ Result.Message ─▶ your producer ─▶ MarkEnqueued
//	             │                                          └─ time-out ─▶ MarkSendUnknown
//	             ├─▶ codes 10–15: an answer, final for its request_id
//	             └─▶ an error: fail closed, [ResponseTo] says what to tell the user
//
// [Gateway.Reserve] runs reserve.lua once, with ids that follow from the
// request alone. When its reply is lost, the unit may be taken: it asks once
// more with the same ids, then gives up with a [*BusyError]. The user asks again
// with the same request_id and finds the one reservation; if the user never
// does, the daemon finds it. Nothing here takes a unit back.
//
// What goes wrong between Reserve and the end is the daemon's: a gateway may
// crash at any point. So it never releases, never tries a second bucket, and
// never reads a time-out as "not done" (spec §5).
//
// # Consumer
//
// In this order, for each message:
//
//	m, err := client.ParseMessage(body)      // malformed: do not acknowledge
//	begin
//	claim, err := consumer.Claim(ctx, tx, m, orderID)
//	  claim.Won          insert the order, deduct the stock, commit
//	  claim.Ordered()    roll back: the order claim.OrderID is there
//	  claim.Excluded()   roll back: no order may be created any more
//	  no stock           roll back, then consumer.Reject in a transaction of its own
//	consumer.MarkOrderCreated or consumer.MarkRejected, after the commit
//	acknowledge
//
// PostgreSQL decides and Redis follows. A crash between the commit and the mark
// is repaired by the daemon; a mark that meets a reservation further on is
// benign. The trigger of install_order_fence stays the last defence: see
// [ClaimError] for the errors that it raises.
//
// # Redis clients
//
// go-redis repeats a script whose reply was lost up to three times by default.
// [NewGateway] and [NewConsumer] refuse such a client with [lua.ErrUnsafeClient];
// [RedisOptions] sets what they demand.
package client
