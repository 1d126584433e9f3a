package lua

import "github.com/seckill/reconciler/reservation"

var recordSend = load("record_send")

// RecordSendCode is the code of a reply of record_send.lua.
type RecordSendCode int64

// The codes of record_send.lua (spec §4).
const (
	RecordSendRecorded      RecordSendCode = 0
	RecordSendNotFound      RecordSendCode = 2
	RecordSendStatusChanged RecordSendCode = 3
	RecordSendIDConflict    RecordSendCode = 4
)

var recordSendCodes = map[RecordSendCode]string{
	RecordSendRecorded: "RECORDED", RecordSendNotFound: "NOT_FOUND",
	RecordSendStatusChanged: "STATUS_CHANGED", RecordSendIDConflict: "ID_CONFLICT",
}

func (c RecordSendCode) String() string { return codeText(recordSendCodes, c) }

// SendKind says what record_send.lua writes down.
type SendKind string

// The kinds of record_send.lua.
const (
	SendFirst  SendKind = "send"   // before a send: send_count + 1, last_sent_at_ms
	SendAgain  SendKind = "resend" // before a resend of a lost message: resend_count + 1, last_sent_at_ms
	SendStored SendKind = "stored" // after it: mq_position
)

// RecordSendArgs are the arguments of record_send.lua.
type RecordSendArgs struct {
	ReservationID string
	Expected      reservation.Status
	Kind          SendKind
	Position      string // mq_position, for SendStored alone
	NowMS         int64
}

// RecordSendReply is the reply of record_send.lua.
type RecordSendReply struct {
	Code        RecordSendCode
	SendCount   int64
	ResendCount int64
}

// RecordSend writes a send attempt down before it is made, and its position after.
func (b *Batch) RecordSend(scope reservation.Scope, a RecordSendArgs) *Result[RecordSendReply] {
	keys := []string{scope.ReservationKey(a.ReservationID)}
	argv := []any{a.ReservationID, string(a.Expected), string(a.Kind), a.Position, decimal(a.NowMS)}
	return enqueue(b, recordSend, scope, keys, argv, 3, func(v *values) RecordSendReply {
		return RecordSendReply{Code: code(v, recordSendCodes), SendCount: v.count(1), ResendCount: v.count(2)}
	})
}
