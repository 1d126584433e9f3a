package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Roll describes how an activity goes on under a new version (protocol §4).
// What is not set is as in the version before.
type Roll struct {
	ActivityID string
	To         int64    // the new version; 0: the one after the newest, or the one that was begun
	Starts     *Instant // nil: now
	Ends       *Instant
	Retention  time.Duration // after the end
	Buckets    int64         // 0: as many as before, or fewer where few units are left
	Prepare    bool          // stop when everything is PREPARED
	// OldCapped is a person's word that an adopter's stock table sells nothing of
	// the old version any more, where seckill.stock_evidence does not tell.
	OldCapped bool

	// Wait bounds the wait for the reservations of the old version to be
	// decided, where the stock table is the adopter's; 0 is no bound.
	Wait time.Duration
	// Consistent proves that nothing of a version is lost or leaked, or says
	// what is.
	Consistent func(ctx context.Context, activityID, skuID string, version int64) error
	// Undecided is told how many reservations are waited for; it may be nil.
	Undecided func(left int64)
}

// RolledSKU is what became of one SKU.
type RolledSKU struct {
	SKUID   string
	From    int64
	To      int64
	Sold    int64 // units of the old version that stay sold
	Left    int64 // units of the new version
	Buckets int64 // of the new version
	Open    bool  // false: it is prepared, and opened by another call
}

// ErrUndecided says that reservations of the old version were not decided in
// time. Nothing is undone: the old version stays closed, and rolling again goes
// on from there.
var ErrUndecided = errors.New("reservations of the old version are still undecided")

// Roll ends the version in force of every SKU of an activity and begins a new
// one with the units that are left, without selling one twice. Running it again
// after a crash goes on where it stopped.
//
// Redis is closed first, so that nothing is reserved any more. Where the stock
// table is ours, one transaction then caps the old row at what was sold: late
// orders of the old version find no stock. An adopter's table cannot be capped,
// so there every reservation of the old version must have been decided.
func (m *Manager) Roll(ctx context.Context, r Roll, actor, reason string) ([]RolledSKU, error) {
	registered, err := m.Registry.Scopes(ctx, pgstore.ScopeFilter{ActivityID: r.ActivityID, Live: true})
	if err != nil {
		return nil, err
	}
	unlock, err := m.Registry.LockRoll(ctx, r.ActivityID)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if r.To, err = m.nextVersion(ctx, r, registered); err != nil {
		return nil, err
	}
	old, err := lastVersions(registered, r.To)
	if err != nil {
		return nil, err
	}
	var closing []reservation.Scope
	for _, version := range old {
		closing = append(closing, bucketsOf(version)...)
	}
	if err := m.Change(ctx, closing, lua.StateClosed, actor, reason); err != nil {
		return nil, fmt.Errorf("close the old version: %w", err)
	}
	steps := make([]pgstore.RollStep, len(old))
	for i, version := range old {
		steps[i] = pgstore.RollStep{
			ActivityID: version.ActivityID, SKUID: version.SKUID, From: version.Version, To: r.To,
			Registration: func(left int64) (pgstore.Version, []pgstore.Bucket) { return r.successor(version, left).registration() },
		}
	}
	rolled, err := m.moveStock(ctx, r, old, steps, actor, reason)
	if err != nil {
		return nil, err
	}
	if r.Prepare, err = m.mustPrepare(ctx, r, registered, old); err != nil {
		return nil, err
	}
	return m.begin(ctx, r, old, rolled, actor)
}

// mustPrepare says whether the new version is to stay closed. Where the stock
// table is the adopter's, a message that is late enough could still make an order
// of the old version, and the new one has no row yet: it is opened only by a second
// call, and only once the old version's row sells nothing more.
func (m *Manager) mustPrepare(ctx context.Context, r Roll, before []pgstore.RegisteredScope, old []pgstore.Version) (bool, error) {
	ours, err := m.Registry.HasReferenceStock(ctx)
	if err != nil || ours || r.Prepare {
		return r.Prepare, err
	}
	if !slices.ContainsFunc(before, func(s pgstore.RegisteredScope) bool { return s.Scope.Version == r.To }) {
		return true, nil
	}
	for _, v := range old {
		capped, known, err := m.Registry.StockCapped(ctx, v.ActivityID, v.SKUID, v.Version)
		switch {
		case err != nil:
			return true, err
		case known && !capped, !known && !r.OldCapped:
			return true, fmt.Errorf("%w: SKU %s, version %d", ErrNotCapped, v.SKUID, v.Version)
		}
	}
	return false, nil
}

// ErrNotCapped says that an adopter's stock table could still sell units of the
// old version, which the new one has now.
var ErrNotCapped = errors.New("the old version's row in your stock table may still sell: set its total to what is sold, in the transaction that gives the new version its row; " +
	"then open it, with --old-stock-capped where no view seckill.stock_evidence tells")

// nextVersion is the version to roll to. A newer one than the version in force
// is one that was begun.
func (m *Manager) nextVersion(ctx context.Context, r Roll, registered []pgstore.RegisteredScope) (int64, error) {
	if len(registered) == 0 {
		return 0, fmt.Errorf("activity %s has no registered scope within its retention", r.ActivityID)
	}
	if r.To != 0 {
		return r.To, nil
	}
	newest := slices.MaxFunc(registered, func(a, b pgstore.RegisteredScope) int { return int(a.Scope.Version - b.Scope.Version) }).Scope.Version
	current, known, err := m.Redis.CurrentVersion(ctx, r.ActivityID)
	switch {
	case err != nil:
		return 0, err
	case !known:
		return 0, fmt.Errorf("activity %s has no current version in Redis: say by --version which one begins", r.ActivityID)
	case newest > current:
		return newest, nil
	default:
		return newest + 1, nil
	}
}

// lastVersions are the versions that end: the last one of each SKU before the
// new one. Older ones must have ended.
func lastVersions(registered []pgstore.RegisteredScope, to int64) ([]pgstore.Version, error) {
	last := map[string]pgstore.Version{}
	for _, r := range registered {
		if v := r.Scope.Version; v < to && (last[r.Scope.SKUID].SKUID == "" || v > last[r.Scope.SKUID].Version) {
			last[r.Scope.SKUID] = pgstore.Version{
				ActivityID: r.Scope.ActivityID, SKUID: r.Scope.SKUID, Version: v, Total: r.Total, Buckets: r.Buckets,
				StartsAt: r.StartsAt, EndsAt: r.EndsAt, RetentionUntil: r.RetentionUntil,
			}
		}
	}
	for _, r := range registered {
		if r.Scope.Version > to {
			return nil, fmt.Errorf("SKU %s has version %d already, which is newer than %d", r.Scope.SKUID, r.Scope.Version, to)
		}
		if v, of := r.Scope.Version, last[r.Scope.SKUID]; v < of.Version && r.State != pgstore.ScopeClosed {
			return nil, fmt.Errorf("version %d of SKU %s is %s beside version %d: close it first, its units are not moved", v, r.Scope.SKUID, r.State, of.Version)
		}
	}
	if len(last) == 0 {
		return nil, fmt.Errorf("no SKU has a version before %d", to)
	}
	versions := make([]pgstore.Version, 0, len(last))
	for _, v := range last {
		versions = append(versions, v)
	}
	// The order in which rows are locked.
	slices.SortFunc(versions, func(a, b pgstore.Version) int { return strings.Compare(a.SKUID, b.SKUID) })
	return versions, nil
}

// successor describes the version after old, of the units that are left.
func (r Roll) successor(old pgstore.Version, left int64) Spec {
	s := Spec{
		ActivityID: old.ActivityID, SKUID: old.SKUID, Version: r.To, Total: left, Buckets: r.Buckets,
		StartsAt: time.Now(), EndsAt: old.EndsAt, Retention: old.RetentionUntil.Sub(old.EndsAt), AllowSmall: true,
	}
	if r.Starts != nil {
		s.StartsAt = r.Starts.At
	}
	if r.Ends != nil {
		s.EndsAt = r.Ends.At
	}
	if r.Retention > 0 {
		s.Retention = r.Retention
	}
	if s.Buckets == 0 {
		s.Buckets = max(1, min(old.Buckets, left/MinPerBucket))
	}
	return s
}

// moveStock registers the new versions with what is left of the old ones.
func (m *Manager) moveStock(ctx context.Context, r Roll, old []pgstore.Version, steps []pgstore.RollStep, actor, reason string) ([]pgstore.Rolled, error) {
	for _, v := range old {
		if err := r.successor(v, v.Total).Validate(); err != nil {
			return nil, err
		}
	}
	ours, err := m.Registry.HasReferenceStock(ctx)
	if err != nil {
		return nil, err
	}
	if ours {
		return m.Registry.RollReferenceStock(ctx, steps, actor, reason)
	}
	if err := m.awaitDecided(ctx, r, old); err != nil {
		return nil, err
	}
	rolled := make([]pgstore.Rolled, len(steps))
	for i, step := range steps {
		if err := r.Consistent(ctx, step.ActivityID, step.SKUID, step.From); err != nil {
			return nil, fmt.Errorf("what is left of version %d of SKU %s cannot be said: %w", step.From, step.SKUID, err)
		}
		begun, err := m.registered(ctx, pgstore.Version{ActivityID: step.ActivityID, SKUID: step.SKUID, Version: step.To})
		if err != nil {
			return nil, err
		}
		if len(begun) > 0 {
			rolled[i] = pgstore.Rolled{Sold: old[i].Total - begun[0].Total, Left: begun[0].Total}
			continue
		}
		left, err := m.available(ctx, old[i])
		if err != nil {
			return nil, err
		}
		version, buckets := step.Registration(left)
		if err := m.Registry.RegisterVersion(ctx, version, buckets, actor); err != nil {
			return nil, err
		}
		rolled[i] = pgstore.Rolled{Sold: old[i].Total - left, Left: left}
	}
	return rolled, nil
}

// lookAgain is the pause between two looks at what is undecided.
const lookAgain = 500 * time.Millisecond

// awaitDecided waits until no reservation of the versions is undecided.
func (m *Manager) awaitDecided(ctx context.Context, r Roll, versions []pgstore.Version) error {
	bounded := ctx
	if r.Wait > 0 {
		var cancel context.CancelFunc
		bounded, cancel = context.WithTimeout(ctx, r.Wait)
		defer cancel()
	}
	var scopes []reservation.Scope
	for _, v := range versions {
		scopes = append(scopes, bucketsOf(v)...)
	}
	for {
		var undecided int64
		for _, s := range m.Redis.Snapshots(ctx, scopes) {
			if s.Err != nil {
				return s.Err
			}
			undecided += s.Pending + s.Expiry
		}
		if undecided == 0 {
			return nil
		}
		if r.Undecided != nil {
			r.Undecided(undecided)
		}
		select {
		case <-bounded.Done():
			if err := ctx.Err(); err != nil {
				return err
			}
			return fmt.Errorf("%w: the indexes hold %d; let the daemon settle them, then roll again", ErrUndecided, undecided)
		case <-time.After(lookAgain):
		}
	}
}

// available is what is left of a version in Redis.
func (m *Manager) available(ctx context.Context, v pgstore.Version) (int64, error) {
	var left int64
	scopes := bucketsOf(v)
	for i, s := range m.Redis.Snapshots(ctx, scopes) {
		switch {
		case s.Err != nil:
			return 0, s.Err
		case !s.Configured():
			return 0, &ConfigMissingError{[]reservation.Scope{scopes[i]}}
		}
		left += s.Available
	}
	return left, nil
}

// begin opens the new versions as they are registered, and makes them current.
func (m *Manager) begin(ctx context.Context, r Roll, old []pgstore.Version, rolled []pgstore.Rolled, actor string) ([]RolledSKU, error) {
	out := make([]RolledSKU, len(old))
	var last pgstore.Version
	for i, v := range old {
		found, err := m.registered(ctx, pgstore.Version{ActivityID: v.ActivityID, SKUID: v.SKUID, Version: r.To})
		if err != nil {
			return nil, err
		}
		if len(found) == 0 {
			return nil, fmt.Errorf("version %d of SKU %s is not registered", r.To, v.SKUID)
		}
		next := pgstore.Version{
			ActivityID: v.ActivityID, SKUID: v.SKUID, Version: r.To, Buckets: found[0].Buckets, EndsAt: found[0].EndsAt,
		}
		if err := m.provision(ctx, next); err != nil {
			return nil, err
		}
		if last.SKUID == "" || next.EndsAt.After(last.EndsAt) {
			last = next
		}
		out[i] = RolledSKU{SKUID: v.SKUID, From: v.Version, To: r.To, Sold: rolled[i].Sold, Left: rolled[i].Left, Buckets: next.Buckets, Open: !r.Prepare}
		if r.Prepare {
			continue
		}
		if err := m.activate(ctx, bucketsOf(next), actor); err != nil {
			return nil, err
		}
	}
	if r.Prepare {
		return out, nil
	}
	return out, m.setCurrent(ctx, last)
}
