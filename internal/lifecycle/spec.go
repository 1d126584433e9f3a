package lifecycle

import (
	"errors"
	"fmt"
	"time"

	"github.com/seckill/reconciler/reservation"
)

// Spec describes an activity version of one SKU.
type Spec struct {
	ActivityID string
	SKUID      string
	Version    int64
	Total      int64
	Buckets    int64
	StartsAt   time.Time
	EndsAt     time.Time
	Retention  time.Duration // after EndsAt
	AllowSmall bool          // permit fewer than MinPerBucket units in a bucket

	// The times were given relative to now: a version that was begun keeps its
	// own, so that the same words complete it.
	StartsRelative bool
	EndsRelative   bool
}

// String names the version.
func (s Spec) String() string {
	return fmt.Sprintf("a:%s:s:%s:v:%d", s.ActivityID, s.SKUID, s.Version)
}

// Scopes are the version's buckets.
func (s Spec) Scopes() []reservation.Scope {
	scopes := make([]reservation.Scope, s.Buckets)
	for i := range scopes {
		scopes[i] = reservation.Scope{ActivityID: s.ActivityID, SKUID: s.SKUID, Version: s.Version, Bucket: int64(i)}
	}
	return scopes
}

// Validate reports everything that is wrong with the description.
func (s Spec) Validate() error {
	var errs []error
	wrong := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if err := (reservation.Scope{ActivityID: s.ActivityID, SKUID: s.SKUID, Version: s.Version}).Validate(); err != nil {
		errs = append(errs, err)
	}
	if s.Total < 0 || s.Total >= reservation.MaxNumber {
		wrong("total: %d is not in [0, 2^53)", s.Total)
	}
	if s.Buckets < 1 || s.Buckets > maxBuckets {
		wrong("buckets: %d is not in [1, %d]", s.Buckets, maxBuckets)
	} else if s.Buckets > 1 && s.Total/s.Buckets < MinPerBucket && !s.AllowSmall {
		wrong("buckets: %d units in %d buckets leave fewer than %d each, and users of an empty bucket are turned away while others have units: use fewer buckets, or --allow-small",
			s.Total, s.Buckets, MinPerBucket)
	}
	if !s.EndsAt.After(s.StartsAt) {
		wrong("ends: %s is not after the start %s", s.EndsAt.Format(time.RFC3339), s.StartsAt.Format(time.RFC3339))
	}
	if s.Retention <= 0 {
		wrong("retention: %s is not positive", s.Retention)
	}
	return errors.Join(errs...)
}

// maxBuckets is far beyond what a measured slot limit ever asks for.
const maxBuckets = 1024
