// Package observe is what the reconciler tells about itself: its log, the names
// of the fields in it, the hash that stands for a user, and its metrics
// (spec §7).
package observe

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"

	"github.com/seckill/reconciler/reservation"
)

// Fields of key log lines (spec §7). A raw user id, a password or a token is
// never a field's value.
const (
	FieldRequestID         = "request_id"
	FieldReservationID     = "reservation_id"
	FieldMessageID         = "message_id"
	FieldActivityID        = "activity_id"
	FieldSKUID             = "sku_id"
	FieldUserIDHash        = "user_id_hash"
	FieldActivityVersion   = "activity_version"
	FieldBucketID          = "bucket_id"
	FieldRedisSlot         = "redis_slot"
	FieldLuaCode           = "lua_code"
	FieldReservationStatus = "reservation_status"
	FieldRedisNode         = "redis_node"
	FieldLatencyMS         = "latency_ms"
	FieldRetryCount        = "retry_count"
	FieldTraceID           = "trace_id"
)

// ParseLevel reads debug, info, warn or error.
func ParseLevel(level string) (slog.Level, error) {
	var least slog.Level
	if err := least.UnmarshalText([]byte(level)); err != nil {
		return 0, fmt.Errorf("log level %q: want debug, info, warn or error", level)
	}
	return least, nil
}

// NewLogger writes to w as "text" or as "json", lines of the given level and
// above; a [slog.LevelVar] can be changed while it writes. Times are UTC.
func NewLogger(w io.Writer, format string, level slog.Leveler) (*slog.Logger, error) {
	opts := &slog.HandlerOptions{Level: level, ReplaceAttr: utc}
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	default:
		return nil, fmt.Errorf("log format %q: want text or json", format)
	}
}

// utc makes lines of hosts in several time zones comparable.
func utc(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 && a.Key == slog.TimeKey && a.Value.Kind() == slog.KindTime {
		a.Value = slog.TimeValue(a.Value.Time().UTC())
	}
	return a
}

// Scope is a scope's four fields.
func Scope(s reservation.Scope) slog.Attr {
	return slog.GroupAttrs("", // inlined by every handler
		slog.String(FieldActivityID, s.ActivityID),
		slog.String(FieldSKUID, s.SKUID),
		slog.Int64(FieldActivityVersion, s.Version),
		slog.Int64(FieldBucketID, s.Bucket),
	)
}

// Slot is the Redis Cluster slot of a scope's keys: CRC-16/XMODEM of the tag,
// modulo 16384.
func Slot(s reservation.Scope) int {
	var crc uint16
	for _, b := range []byte(s.Tag()) {
		crc ^= uint16(b) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc % 16384)
}

// UserHasher makes the hash that stands for a user in logs and reports: the
// same user has the same hash under one key, and without the key nobody can
// tell the user, not even by trying all ids.
type UserHasher struct{ key []byte }

// NewUserHasher hashes under key (observe.user_hash_key), or under one of its
// own if key is empty.
func NewUserHasher(key string) UserHasher {
	if key != "" {
		return UserHasher{key: []byte(key)}
	}
	drawn := make([]byte, sha256.Size)
	_, _ = rand.Read(drawn) // never fails (it ends the process instead)
	return UserHasher{key: drawn}
}

// Hash is HMAC-SHA256(key, userID), shortened to 128 bits, as 32 hex digits.
func (h UserHasher) Hash(userID string) string {
	mac := hmac.New(sha256.New, h.key)
	_, _ = mac.Write([]byte(userID)) // hash.Hash never returns an error
	return hex.EncodeToString(mac.Sum(nil)[:16])
}

// User is the field that names a user in the log.
func (h UserHasher) User(userID string) slog.Attr {
	return slog.String(FieldUserIDHash, h.Hash(userID))
}
