package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// Sale is what a gateway has to know of one version of one SKU. None of it
// changes within a version (spec §2).
type Sale struct {
	ActivityID string
	SKUID      string
	Version    int64
	Buckets    int64  // 0 counts as 1
	Secret     []byte // HMAC key of the reservation ids, pinned per activity version
}

// maxBuckets bounds what a gateway keeps in memory for a sale.
const maxBuckets = 4096

func (s Sale) validate() error {
	err := s.scope(0).Validate()
	switch {
	case err != nil:
		return err
	case s.Buckets < 0 || s.Buckets > maxBuckets:
		return fmt.Errorf("%d buckets: want 1 to %d", s.Buckets, maxBuckets)
	case len(s.Secret) == 0:
		return errors.New("there is no secret: reservation ids could be guessed")
	default:
		return nil
	}
}

func (s Sale) scope(bucket int64) reservation.Scope {
	return reservation.Scope{ActivityID: s.ActivityID, SKUID: s.SKUID, Version: s.Version, Bucket: bucket}
}

// ScopeOf is the one bucket that a user has for the whole version.
func (s Sale) ScopeOf(userID string) reservation.Scope {
	return s.scope(reservation.BucketOf(s.ActivityID, s.SKUID, userID, s.Buckets))
}

// ReservationID is the id that a request's reservation has, made or not.
func (s Sale) ReservationID(userID, requestID string) string {
	return reservation.NewID(s.Secret, s.ActivityID, s.SKUID, userID, requestID)
}

// ErrNotOnSale says that a gateway knows of no sale of a SKU.
var ErrNotOnSale = errors.New("not on sale")

// ScopeSource tells a gateway which version of a SKU is on sale now, over how
// many buckets. It is asked for every request and must answer from memory:
// nothing of the hot path reads current_version. An error that is not
// [ErrNotOnSale] means that it cannot tell now.
type ScopeSource interface {
	Sale(activityID, skuID string) (Sale, error)
}

// Catalog is a [ScopeSource] of sales that the gateway was told of, by its
// configuration or its control plane. An activity with several versions sells
// the one that [Catalog.Use] or [Catalog.Refresh] named last; with a single one,
// that. It is safe for concurrent use.
type Catalog struct {
	mu      sync.RWMutex
	sales   map[saleKey]Sale
	current map[string]int64 // by activity
}

type saleKey struct {
	activityID, skuID string
	version           int64
}

// NewCatalog makes a catalog of the sales.
func NewCatalog(sales ...Sale) (*Catalog, error) {
	c := &Catalog{}
	return c, c.Replace(sales...)
}

// Replace makes sales all that is known. Versions that were in force stay so if
// they are among them. With an error nothing is replaced.
func (c *Catalog) Replace(sales ...Sale) error {
	known := make(map[saleKey]Sale, len(sales))
	versions := map[string]map[int64]bool{}
	for _, s := range sales {
		if err := s.validate(); err != nil {
			return fmt.Errorf("sale of %s: %w", s.scope(0), err)
		}
		known[saleKey{s.ActivityID, s.SKUID, s.Version}] = s
		if versions[s.ActivityID] == nil {
			versions[s.ActivityID] = map[int64]bool{}
		}
		versions[s.ActivityID][s.Version] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	current := map[string]int64{}
	for activity, of := range versions {
		if version, ok := c.current[activity]; ok && of[version] {
			current[activity] = version
			continue
		}
		for version := range of {
			if len(of) == 1 {
				current[activity] = version
			}
		}
	}
	c.sales, c.current = known, current
	return nil
}

// Use puts a version of an activity, all its SKUs, in force. One that is not in
// the catalog takes the activity off sale: an old version must not be sold on.
func (c *Catalog) Use(activityID string, version int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.current[activityID] = version
}

// Sale is part of [ScopeSource].
func (c *Catalog) Sale(activityID, skuID string) (Sale, error) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	version, decided := c.current[activityID]
	s, known := c.sales[saleKey{activityID, skuID, version}]
	if !decided || !known {
		return Sale{}, fmt.Errorf("SKU %s of activity %s: %w", skuID, activityID, ErrNotOnSale)
	}
	return s, nil
}

func (c *Catalog) activities() []string {
	c.mu.RLock()
	defer c.mu.RUnlock()
	seen := map[string]bool{}
	var activities []string
	for key := range c.sales {
		if !seen[key.activityID] {
			seen[key.activityID] = true
			activities = append(activities, key.activityID)
		}
	}
	return activities
}

// Refresh reads current_version of every activity in the catalog, which the
// control plane writes last when it creates or rolls a version, and puts it in
// force. What cannot be read stays as it is, and is in the error.
func (c *Catalog) Refresh(ctx context.Context, rdb redis.UniversalClient) error {
	activities := c.activities()
	if len(activities) == 0 {
		return nil
	}
	pipe := rdb.Pipeline()
	reads := make([]*redis.StringCmd, len(activities))
	for i, activity := range activities {
		reads[i] = pipe.Get(ctx, reservation.CurrentVersionKey(activity))
	}
	_, _ = pipe.Exec(ctx) // each command has its own error
	var errs []error
	for i, read := range reads {
		text, err := read.Result()
		if err == nil {
			var version int64
			if version, err = reservation.ParseNumber(text); err == nil {
				c.Use(activities[i], version)
				continue
			}
		}
		errs = append(errs, fmt.Errorf("read %s: %w", reservation.CurrentVersionKey(activities[i]), err))
	}
	return errors.Join(errs...)
}

// Follow refreshes the catalog now and then at every interval until ctx ends.
// failed, which may be nil, is told of what could not be read.
func (c *Catalog) Follow(ctx context.Context, rdb redis.UniversalClient, every time.Duration, failed func(error)) {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		bound, cancel := context.WithTimeout(ctx, every)
		err := c.Refresh(bound, rdb)
		cancel()
		if err != nil && failed != nil && ctx.Err() == nil {
			failed(err)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}
