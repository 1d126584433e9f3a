package view

import (
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
)

// Scope is a registered scope in JSON.
type Scope struct {
	ActivityID      string     `json:"activity_id"`
	SKUID           string     `json:"sku_id"`
	ActivityVersion int64      `json:"activity_version"`
	BucketID        int64      `json:"bucket_id"`
	State           string     `json:"state"` // as the registry has it
	Initial         int64      `json:"initial"`
	Total           int64      `json:"total"`   // of the whole version
	Buckets         int64      `json:"buckets"` // of the whole version
	StartsAt        time.Time  `json:"starts_at"`
	EndsAt          time.Time  `json:"ends_at"`
	RetentionUntil  time.Time  `json:"retention_until"`
	ConfirmedAt     *time.Time `json:"confirmed_at"`
	Hold            *Hold      `json:"hold"`
}

// Hold keeps workers from a scope.
type Hold struct {
	By     string    `json:"by"`
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
}

// OfScope is a registered scope.
func OfScope(r pgstore.RegisteredScope) Scope {
	v := Scope{
		ActivityID: r.Scope.ActivityID, SKUID: r.Scope.SKUID, ActivityVersion: r.Scope.Version, BucketID: r.Scope.Bucket,
		State: string(r.State), Initial: r.Initial, Total: r.Total, Buckets: r.Buckets,
		StartsAt: r.StartsAt, EndsAt: r.EndsAt, RetentionUntil: r.RetentionUntil, ConfirmedAt: OrNull(r.ConfirmedAt),
	}
	if r.Hold != nil {
		v.Hold = &Hold{By: r.Hold.By, Reason: r.Hold.Reason, At: r.Hold.At}
	}
	return v
}

// LiveScope is a scope with its numbers in Redis.
type LiveScope struct {
	Scope
	Redis *ScopeNumbers `json:"redis"` // null: see error
	Error string        `json:"error,omitempty"`
}

// ScopeNumbers are the live numbers of a scope.
type ScopeNumbers struct {
	State             string `json:"state"`
	Initial           int64  `json:"initial"`
	Available         int64  `json:"available"`
	Reserved          int64  `json:"reserved"`
	ReleasedTotal     int64  `json:"released_total"`
	SendPending       int64  `json:"send_pending"`
	ReservationExpiry int64  `json:"reservation_expiry"`
}

// OfLiveScope is a registered scope with what Redis says of it, or why it says
// nothing.
func OfLiveScope(r pgstore.RegisteredScope, s redisstore.Snapshot) LiveScope {
	v := LiveScope{Scope: OfScope(r)}
	switch {
	case s.Err != nil:
		v.Error = "unreadable: " + s.Err.Error()
	case s.State == "" || s.Available == lua.Missing:
		v.Error = "config_missing: Redis holds no complete meta and stock"
	default:
		v.Redis = &ScopeNumbers{
			State: string(s.State), Initial: s.Initial, Available: s.Available, Reserved: s.Reserved,
			ReleasedTotal: max(s.ReleasedTotal, 0), SendPending: s.Pending, ReservationExpiry: s.Expiry,
		}
	}
	return v
}
