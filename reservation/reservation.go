package reservation

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
)

// Reservation is a reservation's hash in Redis (spec §2). A field that is not
// set is the zero value. Times are milliseconds since 1970 on the clock of the
// scope's own Redis node.
type Reservation struct {
	ID            string
	RequestID     string
	MessageID     string
	ActivityID    string
	SKUID         string
	UserID        string
	Version       int64
	Bucket        int64
	Status        Status
	ReservedAtMS  int64
	ExpiresAtMS   int64
	UpdatedAtMS   int64
	OrderID       string
	ErrorCode     string
	ReleaseReason string
	ReleasedAtMS  int64
	SchemaVersion int64
	RetryCount    int64  // how often it was made to wait
	SendCount     int64  // sends recorded before they were made
	ResendCount   int64  // sends of a message that was proved lost
	LastSentAtMS  int64  // written before each send
	Position      string // mq_position: broker,queueId,queueOffset,offsetMsgId
}

// Scope is the bucket that the reservation's unit was taken from.
func (r Reservation) Scope() Scope {
	return Scope{ActivityID: r.ActivityID, SKUID: r.SKUID, Version: r.Version, Bucket: r.Bucket}
}

// Fields lists the hash fields that [Parse] reads, in a fixed order, so that a
// store can fetch them with one HMGET.
var Fields = []string{
	"reservation_id", "request_id", "message_id", "activity_id", "sku_id", "user_id",
	"activity_version", "bucket_id", "status", "reserved_at_ms", "expires_at_ms", "updated_at_ms",
	"order_id", "error_code", "release_reason", "released_at_ms", "schema_version",
	"retry_count", "send_count", "resend_count", "last_sent_at_ms", "mq_position",
}

// MalformedError says why a hash is not a reservation of its scope: row 0 of [Decide].
type MalformedError struct {
	Cause string // a stable name: tasks are aggregated by it
	Field string // the offending field, when there is one
}

func (e *MalformedError) Error() string {
	if e.Field == "" {
		return e.Cause
	}
	return e.Cause + ": " + e.Field
}

// Parse reads the hash of the member id of scope s. What could be read is
// returned beside a [*MalformedError]. A field is absent until it is set; an
// empty text is absent, an empty number is malformed. A hash that names
// another scope than its key does is malformed too: nothing may be counted
// against either.
func Parse(s Scope, id string, fields map[string]string) (Reservation, error) {
	r := Reservation{
		ID: fields["reservation_id"], RequestID: fields["request_id"], MessageID: fields["message_id"],
		ActivityID: fields["activity_id"], SKUID: fields["sku_id"], UserID: fields["user_id"],
		Status: Status(fields["status"]), OrderID: fields["order_id"], ErrorCode: fields["error_code"],
		ReleaseReason: fields["release_reason"], Position: fields["mq_position"],
	}
	notNumber := readNumbers(&r, fields)
	if fault := cmp.Or(r.checkTexts(id), notNumber, r.checkRest(s, fields)); fault != nil {
		return r, fault
	}
	return r, nil
}

// readNumbers fills in the numbers and reports the first that is none.
func readNumbers(r *Reservation, fields map[string]string) (malformed *MalformedError) {
	for _, n := range []struct {
		field string
		into  *int64
	}{
		{"activity_version", &r.Version},
		{"bucket_id", &r.Bucket},
		{"reserved_at_ms", &r.ReservedAtMS},
		{"expires_at_ms", &r.ExpiresAtMS},
		{"updated_at_ms", &r.UpdatedAtMS},
		{"released_at_ms", &r.ReleasedAtMS},
		{"schema_version", &r.SchemaVersion},
		{"retry_count", &r.RetryCount},
		{"send_count", &r.SendCount},
		{"resend_count", &r.ResendCount},
		{"last_sent_at_ms", &r.LastSentAtMS},
	} {
		text, present := fields[n.field]
		if !present {
			continue
		}
		value, err := ParseNumber(text)
		if err != nil && malformed == nil {
			malformed = &MalformedError{"not_a_number", n.field}
		}
		*n.into = value
	}
	return malformed
}

// checkTexts checks the status and the ids that every effect needs.
func (r Reservation) checkTexts(id string) *MalformedError {
	if !r.Status.Known() {
		return &MalformedError{"unknown_status", "status"}
	}
	if r.ID != id {
		return &MalformedError{"id_mismatch", "reservation_id"}
	}
	// An id of other characters cannot be asked for in PostgreSQL, and would
	// take the evidence of its whole page with it.
	if ValidateID(id) != nil {
		return &MalformedError{"invalid_id", "reservation_id"}
	}
	for _, required := range []struct{ field, value string }{
		{"user_id", r.UserID}, {"request_id", r.RequestID}, {"message_id", r.MessageID},
	} {
		if required.value == "" {
			return &MalformedError{"missing_field", required.field}
		}
	}
	// The evidence of another reservation's message would say nothing of this one.
	if r.MessageID != MessageID(id) {
		return &MalformedError{"message_mismatch", "message_id"}
	}
	return nil
}

// checkRest checks the expiry, and that the hash names the scope of its key.
func (r Reservation) checkRest(s Scope, fields map[string]string) *MalformedError {
	_, hasVersion := fields["activity_version"]
	_, hasBucket := fields["bucket_id"]
	switch {
	case r.ExpiresAtMS == 0 && !r.Status.Terminal():
		return &MalformedError{"missing_field", "expires_at_ms"}
	case r.ActivityID != "" && r.ActivityID != s.ActivityID:
		return &MalformedError{"scope_mismatch", "activity_id"}
	case r.SKUID != "" && r.SKUID != s.SKUID:
		return &MalformedError{"scope_mismatch", "sku_id"}
	case hasVersion && r.Version != s.Version:
		return &MalformedError{"scope_mismatch", "activity_version"}
	case hasBucket && r.Bucket != s.Bucket:
		return &MalformedError{"scope_mismatch", "bucket_id"}
	default:
		return nil
	}
}

// ParseNumber reads a number as the scripts do: decimal digits alone, below 2^53.
func ParseNumber(text string) (int64, error) {
	if text == "" {
		return 0, errors.New("empty number")
	}
	for _, c := range []byte(text) {
		if c < '0' || c > '9' {
			return 0, fmt.Errorf("%.40q is not a number", text)
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n >= MaxNumber {
		return 0, fmt.Errorf("%.40q is not below 2^53", text)
	}
	return n, nil
}

// LastAttemptMS is the latest time at which a send of the message may have
// begun (protocol §2): an absence counts only once settle has passed since.
func (r Reservation) LastAttemptMS() int64 {
	last := max(r.LastSentAtMS, r.ReservedAtMS)
	if r.Status == StatusSendUnknown || r.Status == StatusEnqueued {
		last = max(last, r.UpdatedAtMS)
	}
	return last
}

// Member is one reservation as a worker met it: what its scope's indexes and
// its hash showed in one round trip.
type Member struct {
	Scope       Scope
	ID          string // the member of the index, the reservation_id it stands for
	Missing     bool   // the hash is gone
	Reservation Reservation
	Malformed   *MalformedError // nil when the hash is well-formed

	InPending      bool // in send_pending
	PendingScoreMS int64
	InExpiry       bool // in reservation_expiry
	ExpiryScoreMS  int64
}

// NewMember builds a Member from the raw hash; an empty hash is a missing one.
func NewMember(s Scope, id string, fields map[string]string) Member {
	m := Member{Scope: s, ID: id}
	if len(fields) == 0 {
		m.Missing = true
		return m
	}
	r, err := Parse(s, id, fields)
	m.Reservation = r
	if malformed, ok := err.(*MalformedError); ok { //nolint:errorlint // Parse returns no other, unwrapped
		m.Malformed = malformed
	}
	return m
}
