package reservation

import (
	"fmt"
	"hash/fnv"
	"regexp"
	"strconv"
)

// MaxNumber is the first integer that a version, a bucket or any number in
// Redis may not reach: Lua's numbers are doubles, exact below 2^53.
const MaxNumber = int64(1) << 53

// RequestShards is the number of request-result hashes of a scope (spec §2).
const RequestShards = 256

// Scope is one stock bucket: the unit that owns a stock counter, a hash tag
// and therefore one Redis slot (spec §2).
type Scope struct {
	ActivityID string
	SKUID      string
	Version    int64
	Bucket     int64
}

// Validate reports the first part of the scope that the contract refuses.
func (s Scope) Validate() error {
	if err := ValidateID(s.ActivityID); err != nil {
		return fmt.Errorf("activity_id: %w", err)
	}
	if err := ValidateID(s.SKUID); err != nil {
		return fmt.Errorf("sku_id: %w", err)
	}
	if s.Version < 0 || s.Version >= MaxNumber {
		return fmt.Errorf("activity_version: %d is not in [0, 2^53)", s.Version)
	}
	if s.Bucket < 0 || s.Bucket >= MaxNumber {
		return fmt.Errorf("bucket_id: %d is not in [0, 2^53)", s.Bucket)
	}
	return nil
}

// Tag is the scope's hash tag without braces: a:…:s:…:v:…:b:….
func (s Scope) Tag() string {
	return "a:" + s.ActivityID + ":s:" + s.SKUID +
		":v:" + strconv.FormatInt(s.Version, 10) + ":b:" + strconv.FormatInt(s.Bucket, 10)
}

// String is the tag: scopes are named in logs, tasks and tables by it.
func (s Scope) String() string { return s.Tag() }

var tagPattern = regexp.MustCompile(`^a:([A-Za-z0-9_-]{1,128}):s:([A-Za-z0-9_-]{1,128}):v:(0|[1-9][0-9]{0,15}):b:(0|[1-9][0-9]{0,15})$`)

// ParseTag is the inverse of [Scope.Tag].
func ParseTag(tag string) (Scope, error) {
	m := tagPattern.FindStringSubmatch(tag)
	if m == nil {
		return Scope{}, fmt.Errorf("%q is not a scope: want a:<activity>:s:<sku>:v:<version>:b:<bucket>", tag)
	}
	s := Scope{ActivityID: m[1], SKUID: m[2]}
	// The pattern admits at most 16 digits, which always fit an int64.
	s.Version, _ = strconv.ParseInt(m[3], 10, 64)
	s.Bucket, _ = strconv.ParseInt(m[4], 10, 64)
	if err := s.Validate(); err != nil {
		return Scope{}, fmt.Errorf("scope %q: %w", tag, err)
	}
	return s, nil
}

// Index names one of the two ZSets through which the daemon finds reservations.
type Index string

// The two indexes of a scope (spec §2).
const (
	// SendPending holds reservations whose message is still to be sent, or
	// whose send has an unknown outcome, by next_retry_at_ms.
	SendPending Index = "send_pending"
	// ReservationExpiry holds undecided reservations by the time of their next
	// check. Being due means "verify", never "release".
	ReservationExpiry Index = "reservation_expiry"
)

func (s Scope) key(suffix string) string { return "seckill:{" + s.Tag() + "}:" + suffix }

// MetaKey is the hash of the scope's state, times and retention.
func (s Scope) MetaKey() string { return s.key("meta") }

// StockKey is the hash of initial, available, reserved and released_total.
func (s Scope) StockKey() string { return s.key("stock") }

// SoldOutKey is the marker that a gateway reads before it runs the script.
func (s Scope) SoldOutKey() string { return s.key("soldout") }

// UserKey holds the reservation id of the user's live reservation.
func (s Scope) UserKey(userID string) string { return s.key("user:" + userID) }

// ReservationKey is the reservation's hash.
func (s Scope) ReservationKey(reservationID string) string { return s.key("resv:" + reservationID) }

// IndexKey is the key of one of the two indexes.
func (s Scope) IndexKey(index Index) string { return s.key(string(index)) }

// TransferKey is the idempotency marker of a cross-bucket transfer leg.
func (s Scope) TransferKey(transferID string) string { return s.key("transfer:" + transferID) }

// RequestShardKey is the shard'th request-result hash, 0 ≤ shard < [RequestShards].
func (s Scope) RequestShardKey(shard int) string { return s.key(fmt.Sprintf("req:%03d", shard)) }

// RequestKey is the request-result hash that holds requestID.
func (s Scope) RequestKey(requestID string) string {
	return s.RequestShardKey(RequestShard(requestID))
}

// EventsChannel is the Pub/Sub channel of sell-out and restock notices.
func (s Scope) EventsChannel() string { return s.key("events") }

// Payloads on a scope's events channel (spec §5).
const (
	NoticeSoldOut   = "soldout"   // from the gateway that took the last unit
	NoticeAvailable = "available" // from the daemon, when units came free
)

// CurrentVersionKey names the activity version in force. Only the control
// plane touches it.
func CurrentVersionKey(activityID string) string {
	return "seckill:activity:" + activityID + ":current_version"
}

// RequestShard is FNV-1a-32(request_id) mod 256 (spec §2).
func RequestShard(requestID string) int {
	h := fnv.New32a()
	_, _ = h.Write([]byte(requestID)) // hash.Hash never returns an error
	return int(h.Sum32() % RequestShards)
}

// BucketOf is the bucket that a user keeps for a whole activity version:
// FNV-1a-64(activity ␀ sku ␀ user) mod buckets, and 0 when buckets ≤ 1.
func BucketOf(activityID, skuID, userID string, buckets int64) int64 {
	if buckets <= 1 {
		return 0
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(activityID + "\x00" + skuID + "\x00" + userID))
	return int64(h.Sum64() % uint64(buckets)) //nolint:gosec // below buckets, an int64
}

// Allocation is the initial stock of each bucket: total/buckets, the first
// total mod buckets get one more (spec §2).
func Allocation(total, buckets int64) []int64 {
	if buckets < 1 {
		buckets = 1
	}
	out := make([]int64, buckets)
	for i := range out {
		out[i] = total / buckets
		if int64(i) < total%buckets {
			out[i]++
		}
	}
	return out
}
