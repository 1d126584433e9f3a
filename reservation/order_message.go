package reservation

import (
	"encoding/json"
	"fmt"
)

// orderSchemaVersion is the body's schema_version.
const orderSchemaVersion = 1

// OrderMessage is the body of an order message (interface §3): ids are strings,
// versions, buckets and times numbers. Gateway and daemon send the same body
// for the same reservation.
type OrderMessage struct {
	SchemaVersion   int    `json:"schema_version"`
	MessageID       string `json:"message_id"`
	ReservationID   string `json:"reservation_id"`
	RequestID       string `json:"request_id"`
	ActivityID      string `json:"activity_id"`
	SKUID           string `json:"sku_id"`
	UserID          string `json:"user_id"`
	ActivityVersion int64  `json:"activity_version"`
	BucketID        int64  `json:"bucket_id"`
	ReservedAtMS    int64  `json:"reserved_at_ms"`
}

// NewOrderMessage is the order message of a reservation.
func NewOrderMessage(r Reservation) OrderMessage {
	return OrderMessage{
		SchemaVersion: orderSchemaVersion, MessageID: r.MessageID, ReservationID: r.ID, RequestID: r.RequestID,
		ActivityID: r.ActivityID, SKUID: r.SKUID, UserID: r.UserID,
		ActivityVersion: r.Version, BucketID: r.Bucket, ReservedAtMS: r.ReservedAtMS,
	}
}

// Scope is the bucket that the message's unit was taken from.
func (m OrderMessage) Scope() Scope {
	return Scope{ActivityID: m.ActivityID, SKUID: m.SKUID, Version: m.ActivityVersion, Bucket: m.BucketID}
}

// Marshal is the body as it is sent.
func (m OrderMessage) Marshal() ([]byte, error) {
	body, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode order message %s: %w", m.MessageID, err)
	}
	return body, nil
}

// ParseOrderMessage reads a body. It fails if it is not JSON of this shape, is
// of a newer schema, or names no reservation; unknown fields are ignored.
func ParseOrderMessage(body []byte) (OrderMessage, error) {
	var m OrderMessage
	if err := json.Unmarshal(body, &m); err != nil {
		return OrderMessage{}, fmt.Errorf("decode order message: %w", err)
	}
	if m.SchemaVersion != orderSchemaVersion {
		return OrderMessage{}, fmt.Errorf("order message has schema_version %d, %d is understood", m.SchemaVersion, orderSchemaVersion)
	}
	if err := ValidateID(m.ReservationID); err != nil {
		return OrderMessage{}, fmt.Errorf("order message's reservation_id: %w", err)
	}
	if m.MessageID != MessageID(m.ReservationID) {
		return OrderMessage{}, fmt.Errorf("order message of %s has message_id %.140q", m.ReservationID, m.MessageID)
	}
	return m, nil
}
