package reservation

// MessageQuery asks RocketMQ for the message of one reservation (protocol §2).
type MessageQuery struct {
	MessageID    string
	ReservedAtMS int64  // no copy was stored before it
	Sends        int64  // sends on record: a position counts only if there was one
	Position     string // mq_position of the acknowledged send, or empty
}

// MessageQuery is the query for the reservation's message.
func (r Reservation) MessageQuery() MessageQuery {
	return MessageQuery{
		MessageID: r.MessageID, ReservedAtMS: r.ReservedAtMS,
		Sends: r.SendCount + r.ResendCount, Position: r.Position,
	}
}

// SendOutcome is what is known of a send when it returns.
type SendOutcome string

// The outcomes of a send. The zero value counts as [SendUnknown].
const (
	SendStored      SendOutcome = "stored"      // acknowledged, on disk as the broker is set up
	SendRefused     SendOutcome = "refused"     // the message itself: too large, illegal. Never stored
	SendUnavailable SendOutcome = "unavailable" // no route, busy, dial refused. Never stored
	SendUnknown     SendOutcome = "unknown"     // time-out, lost connection: may be stored at any later time
)

// SendResult is what became of one send.
type SendResult struct {
	Outcome  SendOutcome
	Position string // stored: broker,queueId,queueOffset,offsetMsgId
	Cause    string // otherwise: a stable name, counted and shown
	Err      error
}
