package rocketmq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"strconv"
	"strings"

	"github.com/apache/rocketmq-client-go/v2/primitive"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/reservation"
)

// Outcome is what is known after a send.
type Outcome = reservation.SendOutcome

// The outcomes of a send.
const (
	Stored      = reservation.SendStored      // acknowledged with full durability
	Refused     = reservation.SendRefused     // for the message's own sake: sending it again cannot help
	Unavailable = reservation.SendUnavailable // not stored, and nothing is wrong with the message: defer
	Unknown     = reservation.SendUnknown     // it may be stored, now or at any later time
)

// Causes of outcomes other than Stored, stable names.
const (
	CauseMessageIllegal     = "message_illegal"       // too large, or properties that the broker does not accept
	CauseInvalidParameter   = "invalid_parameter"     // a name that the broker does not accept
	CauseNameServersDown    = "name_servers_down"     // none answered
	CauseNoRoute            = "no_route"              // the topic has no route, or its broker left
	CauseBrokersUnavailable = "brokers_unavailable"   // every broker failed a moment ago and is given time
	CauseDialFailed         = "dial_failed"           // refused, or no answer to the dial
	CauseBrokerBusy         = "broker_busy"           // code 2, 14 or flow control
	CauseNoPermission       = "no_permission"         // code 16: ACL, or a topic that is not writeable
	CauseTopicMissing       = "topic_missing"         // code 17: the broker does not have the topic
	CauseSenderClosed       = "sender_closed"         //
	CauseNotSent            = "not_sent"              // the context ended while the message waited for its turn
	CauseSendTimeout        = "send_timeout"          //
	CauseConnectionLost     = "connection_lost"       //
	CauseBrokerError        = "broker_error"          // any other code
	CauseStoredWeakly       = "stored_not_replicated" // stored with weaker durability: flush or replica missing
)

// SendResult is the outcome of one message.
type SendResult struct {
	MessageID string
	Outcome   Outcome
	// Position is set only with Stored: `broker,queueId,queueOffset,offsetMsgId`,
	// the reservation's mq_position (spec §2).
	Position string
	Cause    string // stable name; empty with Stored
	Err      error  // nil with Stored
}

// codePattern finds the response code: the library reports it as text only.
var codePattern = regexp.MustCompile(`^CODE: (-?\d+), DESC:`)

// classify turns what the library returned into an outcome (services §2). What
// it does not know is Unknown.
func classify(messageID string, result *primitive.SendResult, err error) SendResult {
	if err == nil {
		return classifyStored(messageID, result)
	}
	outcome, cause := classifyError(err)
	return SendResult{MessageID: messageID, Outcome: outcome, Cause: cause, Err: fmt.Errorf("send %s: %w", messageID, err)}
}

func classifyStored(messageID string, result *primitive.SendResult) SendResult {
	unknown := func(err error) SendResult {
		return SendResult{MessageID: messageID, Outcome: Unknown, Cause: CauseStoredWeakly, Err: fmt.Errorf("send %s: %w", messageID, err)}
	}
	if result == nil {
		return unknown(errors.New("the library returned neither a result nor an error"))
	}
	if result.Status != primitive.SendOK {
		return unknown(fmt.Errorf("stored with weaker durability, send status %d", result.Status))
	}
	r := SendResult{MessageID: messageID, Outcome: Stored}
	if queue := result.MessageQueue; queue != nil {
		// A reply whose position does not make sense is still an acknowledgement.
		position := fmt.Sprintf("%s,%d,%d,%s", queue.BrokerName, queue.QueueId, result.QueueOffset, result.OffsetMsgID)
		if _, err := ParsePosition(position); err == nil {
			r.Position = position
		}
	}
	return r
}

func classifyError(err error) (Outcome, string) {
	text := err.Error()
	if match := codePattern.FindStringSubmatch(text); match != nil {
		code, _ := strconv.Atoi(match[1])
		return classifyCode(code)
	}
	var op *net.OpError
	switch {
	case errors.As(err, &op) && op.Op == "dial":
		return Unavailable, CauseDialFailed
	case strings.Contains(text, "route info not found"):
		return Unavailable, CauseNoRoute
	case strings.Contains(text, "producer not started"), strings.Contains(text, "service close is not running"):
		return Unavailable, CauseSenderClosed
	case strings.Contains(text, "request timeout"), errors.Is(err, context.DeadlineExceeded):
		return Unknown, CauseSendTimeout
	default:
		return Unknown, CauseConnectionLost
	}
}

func classifyCode(code int) (Outcome, string) {
	switch code {
	case remoting.MessageIllegal:
		return Refused, CauseMessageIllegal
	case remoting.InvalidParameter:
		return Refused, CauseInvalidParameter
	case remoting.SystemBusy, remoting.ServiceNotAvailable, remoting.FlowControl:
		return Unavailable, CauseBrokerBusy
	case remoting.NoPermission:
		return Unavailable, CauseNoPermission
	case remoting.TopicNotExist:
		return Unavailable, CauseTopicMissing
	default:
		return Unknown, CauseBrokerError
	}
}

// Position is where an acknowledged send was stored.
type Position struct {
	Broker      string
	Queue       int32
	Offset      int64  // in the queue
	OffsetMsgID string // hex: the broker's address, port and commit-log offset
}

// String is the position as mq_position holds it.
func (p Position) String() string {
	return fmt.Sprintf("%s,%d,%d,%s", p.Broker, p.Queue, p.Offset, p.OffsetMsgID)
}

// LogOffset is the commit-log offset, the last 16 hex digits of OffsetMsgID.
func (p Position) LogOffset() (int64, error) {
	if n := len(p.OffsetMsgID); n != 32 && n != 56 { // IPv4 or IPv6
		return 0, fmt.Errorf("offset message id %.80q has %d digits", p.OffsetMsgID, n)
	}
	offset, err := strconv.ParseInt(p.OffsetMsgID[len(p.OffsetMsgID)-16:], 16, 64)
	if err != nil || offset < 0 {
		return 0, fmt.Errorf("offset message id %.80q holds no commit-log offset", p.OffsetMsgID)
	}
	return offset, nil
}

// ParsePosition reads an mq_position. An error means that the position is of
// no use, so that the sweep decides.
func ParsePosition(s string) (Position, error) {
	parts := strings.Split(s, ",")
	if len(parts) != 4 || parts[0] == "" {
		return Position{}, fmt.Errorf("position %.200q is not broker,queueId,queueOffset,offsetMsgId", s)
	}
	queue, err := strconv.ParseInt(parts[1], 10, 32)
	if err != nil || queue < 0 {
		return Position{}, fmt.Errorf("position %.200q has no queue id", s)
	}
	offset, err := strconv.ParseInt(parts[2], 10, 64)
	if err != nil || offset < 0 {
		return Position{}, fmt.Errorf("position %.200q has no queue offset", s)
	}
	p := Position{parts[0], int32(queue), offset, parts[3]}
	if _, err := p.LogOffset(); err != nil {
		return Position{}, fmt.Errorf("position %.200q: %w", s, err)
	}
	return p, nil
}
