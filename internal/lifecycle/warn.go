package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
)

const (
	// reservationTTL is a reservation's usual time until expiry (spec §2).
	reservationTTL = 15 * time.Minute
	// shortRetention leaves little time for an outage, a backlog and a repair.
	shortRetention = 24 * time.Hour
	// fewPerBucket and manyBuckets are choices to think about twice.
	fewPerBucket = 100
	manyBuckets  = 64
)

// Warnings says what is allowed and still likely a mistake. It reads the
// registry alone.
func (m *Manager) Warnings(ctx context.Context, specs []Spec) ([]string, error) {
	var warnings []string
	for _, s := range specs {
		for _, w := range s.doubts(time.Now()) {
			warnings = append(warnings, fmt.Sprintf("%s: %s", s, w))
		}
	}
	for _, group := range byActivity(specs) {
		left, err := m.leftBehind(ctx, group)
		if err != nil {
			return nil, err
		}
		warnings = append(warnings, left...)
	}
	return warnings, nil
}

// doubts are those about one description.
func (s Spec) doubts(now time.Time) []string {
	var out []string
	doubt := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	switch {
	case s.Retention <= reservationTTL:
		doubt("keys are kept for %s after the end, no longer than a reservation lasts (%s): the last reservations of the sale are refused", s.Retention, reservationTTL)
	case s.Retention < shortRetention:
		doubt("keys are kept for %s after the end: what an outage or a backlog leaves undecided for longer is lost to repair", s.Retention)
	}
	if !s.EndsAt.After(now) {
		doubt("it ended already, at %s: nothing will be sold", s.EndsAt.UTC().Format(time.RFC3339))
	}
	if s.Total == 0 {
		doubt("it has no units")
	}
	if s.Buckets > 1 && s.Total/s.Buckets < fewPerBucket {
		doubt("%d units in %d buckets: some buckets sell out long before others, and their users are turned away; one bucket is right until a slot is measured to be the limit", s.Total, s.Buckets)
	}
	if s.Buckets > manyBuckets {
		doubt("%d buckets: each is read in every pass; few sales need more than 32", s.Buckets)
	}
	return out
}

// leftBehind warns of SKUs of an activity that have no part in its new current
// version: gateways look for them under a version that they do not have.
func (m *Manager) leftBehind(ctx context.Context, specs []Spec) ([]string, error) {
	activity := specs[0].ActivityID
	registered, err := m.Registry.Scopes(ctx, pgstore.ScopeFilter{ActivityID: activity, Live: true})
	if err != nil {
		return nil, err
	}
	newest := slices.MaxFunc(specs, func(a, b Spec) int { return int(a.Version - b.Version) }).Version
	has := map[string]bool{}
	for _, s := range specs {
		has[s.SKUID] = has[s.SKUID] || s.Version == newest
	}
	open := map[string]int64{}
	for _, r := range registered {
		has[r.Scope.SKUID] = has[r.Scope.SKUID] || r.Scope.Version >= newest
		if r.State != pgstore.ScopeClosed {
			open[r.Scope.SKUID] = max(open[r.Scope.SKUID], r.Scope.Version)
		}
	}
	var out []string
	for sku, version := range open {
		switch {
		case !has[sku]:
			out = append(out, fmt.Sprintf("activity %s: SKU %s is open in version %d and has none in %d, where gateways look from now on: create it there too, or use `reconciler scope roll`",
				activity, sku, version, newest))
		case version < newest:
			out = append(out, fmt.Sprintf("activity %s: version %d of SKU %s is still open beside %d: its units can be sold twice unless it is closed; `reconciler scope roll` moves what is left",
				activity, version, sku, newest))
		}
	}
	slices.SortFunc(out, strings.Compare)
	return out, nil
}
