package reservation

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// IDLength is the length of a reservation_id.
const IDLength = 26

var (
	idPattern        = regexp.MustCompile(`^[A-Za-z0-9_-]{1,128}$`)
	messageIDPattern = regexp.MustCompile(`^[A-Za-z0-9_:-]{1,128}$`)
)

// ErrInvalidID says that a string is not an identifier of the contract.
var ErrInvalidID = errors.New("identifiers are 1 to 128 of A-Z a-z 0-9 _ -")

// ValidateID checks an identifier: it becomes part of Redis keys and of
// |-separated values, so nothing else may pass (spec §2).
func ValidateID(id string) error {
	if !idPattern.MatchString(id) {
		return fmt.Errorf("%.140q: %w", id, ErrInvalidID)
	}
	return nil
}

// ValidateMessageID is [ValidateID] for message ids, which also contain ':'.
func ValidateMessageID(id string) error {
	if !messageIDPattern.MatchString(id) {
		return fmt.Errorf("%.140q: %w (message ids also :)", id, ErrInvalidID)
	}
	return nil
}

// NewID derives the reservation_id of a request: the same request always gets
// the same id, so that asking again after an unknown outcome is safe. secret is
// pinned per activity version.
func NewID(secret []byte, activityID, skuID, userID, requestID string) string {
	mac := hmac.New(sha256.New, secret)
	_, _ = mac.Write([]byte(activityID + "\x00" + skuID + "\x00" + userID + "\x00" + requestID))
	sum := base32.StdEncoding.WithPadding(base32.NoPadding).EncodeToString(mac.Sum(nil))
	return strings.ToLower(sum)[:IDLength]
}

// MessageID is the key of the reservation's order message. It never changes,
// however often the message is sent.
func MessageID(reservationID string) string { return "reserve-order:" + reservationID + ":v1" }
