package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// ErrNotThere says that Redis holds nothing of a scope that is to be imported.
var ErrNotThere = errors.New("there is no meta and no stock of this scope in Redis")

// Import registers a version that the shop's own tool made: its times, state
// and stock are read from Redis, and every bucket counts as confirmed. Keys
// that break the contract (spec §2) are refused, with everything that is wrong
// with them: once registered, the daemon and the scripts rely on them. Nothing
// in Redis is changed.
func (m *Manager) Import(ctx context.Context, activityID, skuID string, number, buckets int64, actor string) error {
	if err := (reservation.Scope{ActivityID: activityID, SKUID: skuID, Version: number}).Validate(); err != nil {
		return err
	}
	if buckets < 1 || buckets > maxBuckets {
		return fmt.Errorf("buckets: %d is not in [1, %d]", buckets, maxBuckets)
	}
	spec := Spec{ActivityID: activityID, SKUID: skuID, Version: number, Buckets: buckets + 1}
	scopes := spec.Scopes()
	keys, err := m.Redis.ScopeKeys(ctx, scopes)
	if err != nil {
		return err
	}
	if beyond := keys[buckets]; len(beyond.Meta)+len(beyond.Stock) > 0 {
		return fmt.Errorf("import: there is a bucket %d too: say by --buckets how many there are", buckets)
	}
	version := pgstore.Version{ActivityID: activityID, SKUID: skuID, Version: number, Buckets: buckets}
	var found []pgstore.Bucket
	var errs []error
	for i, scope := range scopes[:buckets] {
		b, err := readBucket(scope, keys[i])
		if err == nil && i > 0 && len(found) > 0 && b.times != (times{version.StartsAt, version.EndsAt, version.RetentionUntil}) {
			err = errors.New("its times differ from those of bucket 0: buckets of one version share them")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("import %s: %w", scope, err))
			continue
		}
		version.StartsAt, version.EndsAt, version.RetentionUntil = b.times.starts, b.times.ends, b.times.retention
		version.Total += b.initial
		found = append(found, pgstore.Bucket{ID: scope.Bucket, Initial: b.initial, State: pgstore.ScopeState(b.state), Confirmed: true})
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return m.Registry.RegisterVersion(ctx, version, found, actor)
}

// times are those that the buckets of a version share.
type times struct{ starts, ends, retention time.Time }

// bucket is what is registered of a bucket that somebody else made.
type bucket struct {
	times   times
	state   lua.State
	initial int64
}

// bucketReader collects what is wrong with the keys of one bucket.
type bucketReader struct{ wrong []string }

func (r *bucketReader) wrongf(format string, args ...any) {
	r.wrong = append(r.wrong, fmt.Sprintf(format, args...))
}

// readBucket reads the keys by the contract, or says everything that breaks it.
func readBucket(scope reservation.Scope, keys redisstore.ScopeKeys) (bucket, error) {
	if len(keys.Meta)+len(keys.Stock) == 0 {
		return bucket{}, ErrNotThere
	}
	var r bucketReader
	b := r.meta(scope, keys.Meta)
	b.initial = r.stock(keys.Stock)
	r.expiry("meta", keys.MetaExpiresAtMS, b.times.retention)
	r.expiry("stock", keys.StockExpiresAtMS, b.times.retention)
	if len(r.wrong) > 0 {
		return bucket{}, errors.New(strings.Join(r.wrong, "; "))
	}
	return b, nil
}

func (r *bucketReader) meta(scope reservation.Scope, fields map[string]string) bucket {
	for _, want := range []struct{ name, value string }{
		{"activity_id", scope.ActivityID},
		{"sku_id", scope.SKUID},
		{"version", strconv.FormatInt(scope.Version, 10)},
		{"bucket_id", strconv.FormatInt(scope.Bucket, 10)},
		{"schema_version", strconv.Itoa(schemaVersion)},
	} {
		if got, ok := fields[want.name]; !ok {
			r.wrongf("meta has no %s", want.name)
		} else if got != want.value {
			r.wrongf("meta has %s %.140q, want %q", want.name, got, want.value)
		}
	}
	state := lua.State(fields["state"])
	if !slices.Contains([]lua.State{lua.StatePrepared, lua.StateActive, lua.StatePaused, lua.StateClosed}, state) {
		r.wrongf("meta has state %.140q, want PREPARED, ACTIVE, PAUSED or CLOSED", fields["state"])
	}
	var at [3]time.Time
	complete := true
	for i, name := range []string{"starts_at_ms", "ends_at_ms", "retention_until_ms"} {
		ms, ok := r.number("meta", fields, name)
		at[i], complete = time.UnixMilli(ms), complete && ok
	}
	t := times{at[0], at[1], at[2]}
	if complete && !t.ends.After(t.starts) {
		r.wrongf("meta ends at %s, which is not after its start at %s", t.ends.UTC(), t.starts.UTC())
	}
	if complete && t.retention.Before(t.ends) {
		r.wrongf("meta's retention ends at %s, before the activity at %s", t.retention.UTC(), t.ends.UTC())
	}
	return bucket{times: t, state: state}
}

// stock leaves released_total out: the first release begins it (spec §2).
func (r *bucketReader) stock(fields map[string]string) (initial int64) {
	initial, hasInitial := r.number("stock", fields, "initial")
	available, hasAvailable := r.number("stock", fields, "available")
	reserved, hasReserved := r.number("stock", fields, "reserved")
	if hasInitial && hasAvailable && hasReserved && initial != available+reserved {
		r.wrongf("stock has initial %d, which is not available %d + reserved %d", initial, available, reserved)
	}
	return initial
}

func (r *bucketReader) number(key string, fields map[string]string, name string) (int64, bool) {
	text, ok := fields[name]
	if !ok {
		r.wrongf("%s has no %s", key, name)
		return 0, false
	}
	n, err := reservation.ParseNumber(text)
	if err != nil {
		r.wrongf("%s has %s %.140q, which is no number of the contract", key, name, text)
	}
	return n, err == nil
}

// expiry: all keys of a scope vanish at one time (spec §2). One that goes
// earlier would look like a lost write in the middle of a recovery.
func (r *bucketReader) expiry(key string, expiresAtMS int64, retention time.Time) {
	switch {
	case retention.UnixMilli() == 0: // said already
	case expiresAtMS <= 0:
		r.wrongf("%s has no expiry: give it PEXPIREAT of retention_until_ms", key)
	case expiresAtMS != retention.UnixMilli():
		r.wrongf("%s expires at %s, not at retention_until_ms %s", key, time.UnixMilli(expiresAtMS).UTC(), retention.UTC())
	}
}
