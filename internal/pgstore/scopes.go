package pgstore

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reservation"
)

// ScopeState is the registry's view of meta.state (spec §2).
type ScopeState string

// The states of a scope.
const (
	ScopePrepared ScopeState = "PREPARED"
	ScopeActive   ScopeState = "ACTIVE"
	ScopePaused   ScopeState = "PAUSED"
	ScopeClosed   ScopeState = "CLOSED"
)

// Version is one activity version of one SKU, and what was allocated to it.
type Version struct {
	ActivityID     string
	SKUID          string
	Version        int64
	Total          int64 // units over all buckets
	Buckets        int64 // never changes within a version
	StartsAt       time.Time
	EndsAt         time.Time
	RetentionUntil time.Time
}

// Bucket is what is registered of one bucket of a [Version].
type Bucket struct {
	ID        int64
	Initial   int64
	State     ScopeState
	Confirmed bool // Redis holds it: from now on missing keys are config_missing
}

// RegisteredScope is a row of the registry.
type RegisteredScope struct {
	Scope          reservation.Scope
	Initial        int64
	State          ScopeState
	StartsAt       time.Time
	EndsAt         time.Time
	RetentionUntil time.Time
	ConfirmedAt    time.Time // zero: never seen in Redis
	Hold           *Hold     // nil: workers may change it
	Total          int64     // of the whole version
	Buckets        int64     // of the whole version
	CreatedAt      time.Time
	UpdatedAt      time.Time
}

// Hold keeps every worker from changing a scope.
type Hold struct {
	By     string
	Reason string
	At     time.Time
}

// VersionDiffersError says that a version is registered with other values: a
// version is never changed in place (spec §2).
type VersionDiffersError struct {
	Version Version
	Bucket  int64 // −1: the version as a whole
}

func (e *VersionDiffersError) Error() string {
	v := e.Version
	if e.Bucket < 0 {
		return fmt.Sprintf("version a:%s:s:%s:v:%d is registered with another total or number of buckets: use a new version",
			v.ActivityID, v.SKUID, v.Version)
	}
	return fmt.Sprintf("scope %s is registered with another initial stock or other times: use a new version",
		reservation.Scope{ActivityID: v.ActivityID, SKUID: v.SKUID, Version: v.Version, Bucket: e.Bucket})
}

// RegisterVersion creates a version with the given buckets, all or nothing, and
// notes it in the audit trail. Repeating it is no error; a bucket that is
// confirmed now stays confirmed. Values that differ from the registered ones
// are a [*VersionDiffersError]; the state of a registered bucket is left alone.
func (s *Store) RegisterVersion(ctx context.Context, v Version, buckets []Bucket, actor string) error {
	return s.write(ctx, "register the version", func(tx pgx.Tx) error {
		return registerVersion(ctx, tx, v, buckets, actor)
	})
}

func registerVersion(ctx context.Context, tx pgx.Tx, v Version, buckets []Bucket, actor string) error {
	tag, err := tx.Exec(ctx, `
			INSERT INTO seckill.scope_allocation (activity_id, sku_id, activity_version, total, buckets, created_by)
			VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING`,
		v.ActivityID, v.SKUID, v.Version, v.Total, v.Buckets, actor)
	if err != nil {
		return err
	}
	created := tag.RowsAffected() == 1
	var same bool
	err = tx.QueryRow(ctx, `
			SELECT total = $4 AND buckets = $5 FROM seckill.scope_allocation
			WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`,
		v.ActivityID, v.SKUID, v.Version, v.Total, v.Buckets).Scan(&same)
	if err != nil {
		return err
	}
	if !same {
		return &VersionDiffersError{v, -1}
	}
	for _, b := range buckets {
		if err := registerBucket(ctx, tx, v, b); err != nil {
			return err
		}
	}
	if !created {
		return nil
	}
	return addAudit(ctx, tx, AuditEntry{
		Actor: actor, Action: "version_registered", Subject: fmt.Sprintf("a:%s:s:%s:v:%d", v.ActivityID, v.SKUID, v.Version),
		Detail: map[string]any{"total": v.Total, "buckets": v.Buckets},
	})
}

func registerBucket(ctx context.Context, tx pgx.Tx, v Version, b Bucket) error {
	if b.State == "" {
		b.State = ScopePrepared
	}
	_, err := tx.Exec(ctx, `
		INSERT INTO seckill.scope AS s (activity_id, sku_id, activity_version, bucket_id, initial, state,
		                                starts_at, ends_at, retention_until, confirmed_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, CASE WHEN $10 THEN clock_timestamp() END)
		ON CONFLICT (activity_id, sku_id, activity_version, bucket_id) DO UPDATE
		SET confirmed_at = excluded.confirmed_at, updated_at = clock_timestamp()
		WHERE s.confirmed_at IS NULL AND excluded.confirmed_at IS NOT NULL`,
		v.ActivityID, v.SKUID, v.Version, b.ID, b.Initial, b.State, v.StartsAt, v.EndsAt, v.RetentionUntil, b.Confirmed)
	if err != nil {
		return err
	}
	var same bool
	err = tx.QueryRow(ctx, `
		SELECT initial = $5 AND starts_at = $6 AND ends_at = $7 AND retention_until = $8 FROM seckill.scope
		WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3 AND bucket_id = $4`,
		v.ActivityID, v.SKUID, v.Version, b.ID, b.Initial, v.StartsAt, v.EndsAt, v.RetentionUntil).Scan(&same)
	if err != nil {
		return err
	}
	if !same {
		return &VersionDiffersError{v, b.ID}
	}
	return nil
}

// ScopeFilter selects scopes; what is not set selects all.
type ScopeFilter struct {
	ActivityID string
	SKUID      string
	Version    *int64
	Bucket     *int64
	States     []ScopeState
	Live       bool // not past the retention, by the server's clock
	NotHeld    bool
}

const scopeColumns = `s.activity_id, s.sku_id, s.activity_version, s.bucket_id, s.initial, s.state,
	s.starts_at, s.ends_at, s.retention_until, s.confirmed_at, s.held_by, s.held_reason, s.held_at,
	a.total, a.buckets, s.created_at, s.updated_at`

// Scopes lists the registered scopes in the order of their names.
func (s *Store) Scopes(ctx context.Context, f ScopeFilter) ([]RegisteredScope, error) {
	return collect(ctx, s, "list the registered scopes", scanScope, `
		SELECT `+scopeColumns+`
		FROM seckill.scope AS s JOIN seckill.scope_allocation AS a USING (activity_id, sku_id, activity_version)
		WHERE ($1 = '' OR s.activity_id = $1) AND ($2 = '' OR s.sku_id = $2)
		  AND ($3::bigint IS NULL OR s.activity_version = $3) AND ($4::bigint IS NULL OR s.bucket_id = $4)
		  AND (cardinality($5::text[]) = 0 OR s.state = ANY ($5))
		  AND (NOT $6 OR s.retention_until > clock_timestamp()) AND (NOT $7 OR s.held_at IS NULL)
		ORDER BY s.activity_id, s.sku_id, s.activity_version, s.bucket_id`,
		f.ActivityID, f.SKUID, f.Version, f.Bucket, append([]ScopeState{}, f.States...), f.Live, f.NotHeld)
}

// HeldScopes lists the scopes that a person holds.
func (s *Store) HeldScopes(ctx context.Context) ([]reservation.Scope, error) {
	return collect(ctx, s, "list the held scopes", func(row pgx.CollectableRow) (reservation.Scope, error) {
		var scope reservation.Scope
		err := row.Scan(&scope.ActivityID, &scope.SKUID, &scope.Version, &scope.Bucket)
		return scope, err
	}, `SELECT activity_id, sku_id, activity_version, bucket_id FROM seckill.scope WHERE held_at IS NOT NULL`)
}

// Scope is one registered scope, or [ErrNotFound].
func (s *Store) Scope(ctx context.Context, scope reservation.Scope) (RegisteredScope, error) {
	found, err := s.Scopes(ctx, ScopeFilter{
		ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: &scope.Version, Bucket: &scope.Bucket,
	})
	if err != nil {
		return RegisteredScope{}, err
	}
	if len(found) == 0 {
		return RegisteredScope{}, fmt.Errorf("scope %s: %w", scope, ErrNotFound)
	}
	return found[0], nil
}

func scanScope(row pgx.CollectableRow) (RegisteredScope, error) {
	var r RegisteredScope
	var confirmedAt, heldAt *time.Time
	var heldBy, heldReason *string
	err := row.Scan(&r.Scope.ActivityID, &r.Scope.SKUID, &r.Scope.Version, &r.Scope.Bucket, &r.Initial, &r.State,
		&r.StartsAt, &r.EndsAt, &r.RetentionUntil, &confirmedAt, &heldBy, &heldReason, &heldAt,
		&r.Total, &r.Buckets, &r.CreatedAt, &r.UpdatedAt)
	r.StartsAt, r.EndsAt, r.RetentionUntil = r.StartsAt.UTC(), r.EndsAt.UTC(), r.RetentionUntil.UTC()
	r.CreatedAt, r.UpdatedAt, r.ConfirmedAt = r.CreatedAt.UTC(), r.UpdatedAt.UTC(), moment(confirmedAt)
	if heldAt != nil {
		r.Hold = &Hold{By: text(heldBy), Reason: text(heldReason), At: moment(heldAt)}
	}
	return r, err
}

// ConfirmScopes notes that Redis holds the buckets: from now on missing keys
// are config_missing and are never filled again (protocol §4). A scope that is
// not registered is [ErrNotFound], and none is confirmed.
func (s *Store) ConfirmScopes(ctx context.Context, scopes []reservation.Scope) error {
	return s.write(ctx, "confirm scopes", func(tx pgx.Tx) error {
		return updateScopes(ctx, tx, scopes, `confirmed_at = coalesce(s.confirmed_at, clock_timestamp())`)
	})
}

// SetScopeState notes the state that Redis has now, with actor and reason in
// the audit trail. A scope that is not registered is [ErrNotFound], and none
// is changed.
func (s *Store) SetScopeState(ctx context.Context, scopes []reservation.Scope, state ScopeState, actor, reason string) error {
	return s.write(ctx, "note the state of scopes", func(tx pgx.Tx) error {
		if err := updateScopes(ctx, tx, scopes, `state = $6`, state); err != nil {
			return err
		}
		return auditScopes(ctx, tx, scopes, AuditEntry{
			Actor: actor, Action: "scope_state", Reason: reason, Detail: map[string]any{"state": state},
		})
	})
}

// HoldScopes keeps every worker from changing the scopes. Actor and reason are
// kept with the scope and in the audit trail; a hold that is there already is
// replaced. [ErrNotFound]: one is not registered, and none is held.
func (s *Store) HoldScopes(ctx context.Context, scopes []reservation.Scope, actor, reason string) error {
	return s.write(ctx, "hold scopes", func(tx pgx.Tx) error {
		if err := updateScopes(ctx, tx, scopes, `held_at = clock_timestamp(), held_by = $6, held_reason = $7`, actor, reason); err != nil {
			return err
		}
		return auditScopes(ctx, tx, scopes, AuditEntry{Actor: actor, Action: "scope_hold", Reason: reason})
	})
}

// UnholdScopes is the end of [Store.HoldScopes].
func (s *Store) UnholdScopes(ctx context.Context, scopes []reservation.Scope, actor, reason string) error {
	return s.write(ctx, "let go of scopes", func(tx pgx.Tx) error {
		if err := updateScopes(ctx, tx, scopes, `held_at = NULL, held_by = NULL, held_reason = NULL`); err != nil {
			return err
		}
		return auditScopes(ctx, tx, scopes, AuditEntry{Actor: actor, Action: "scope_unhold", Reason: reason})
	})
}

// updateScopes changes all of the scopes or, when one is missing, fails. The
// assignments may use parameters from $6 on.
func updateScopes(ctx context.Context, tx pgx.Tx, scopes []reservation.Scope, assignments string, args ...any) error {
	parts := splitScopes(scopes)
	rows, err := tx.Query(ctx, `
		WITH changed AS (
			UPDATE seckill.scope AS s SET `+assignments+`, updated_at = clock_timestamp()
			FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[]) AS w (activity_id, sku_id, activity_version, bucket_id)
			WHERE (s.activity_id, s.sku_id, s.activity_version, s.bucket_id) =
			      (w.activity_id, w.sku_id, w.activity_version, w.bucket_id)
			RETURNING format('a:%s:s:%s:v:%s:b:%s', s.activity_id, s.sku_id, s.activity_version, s.bucket_id) AS tag
		)
		SELECT tag FROM unnest($5::text[]) AS t (tag) WHERE tag NOT IN (SELECT tag FROM changed) ORDER BY tag`,
		append([]any{parts.activities, parts.skus, parts.versions, parts.buckets, parts.tags}, args...)...)
	if err != nil {
		return err
	}
	missing, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	if len(missing) > 0 {
		return fmt.Errorf("scope %s: %w", missing[0], ErrNotFound)
	}
	return nil
}

// scopeParts are scopes as arrays, for unnest.
type scopeParts struct {
	activities, skus, tags []string
	versions, buckets      []int64
}

func splitScopes(scopes []reservation.Scope) scopeParts {
	p := scopeParts{activities: []string{}, skus: []string{}, tags: []string{}, versions: []int64{}, buckets: []int64{}}
	for _, s := range scopes {
		p.activities, p.skus, p.tags = append(p.activities, s.ActivityID), append(p.skus, s.SKUID), append(p.tags, s.Tag())
		p.versions, p.buckets = append(p.versions, s.Version), append(p.buckets, s.Bucket)
	}
	return p
}
