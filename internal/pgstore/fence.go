package pgstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seckill/reconciler/reservation"
)

// ReasonRefence is the reason of a fence that only repeats what a lost claim
// said: the reservation is RELEASED already. It is not a release, so it is not
// counted against max_release.
const ReasonRefence = "release_without_claim"

// FenceNotReadyError says why nothing may be released: the order trigger is not
// in place, or order_evidence cannot be trusted (protocol §1).
type FenceNotReadyError struct{ Problems []string }

func (e *FenceNotReadyError) Error() string {
	return "the order fence is not in place: " + strings.Join(e.Problems, "; ")
}

// fenceRetries bounds how often a page is tried again after a deadlock or a
// serialization failure.
const fenceRetries = 5

// Fence claims the reservations as FENCED and returns, for each request in its
// order, the claim in force: whoever claimed first wins (protocol §1). Known is
// false for one that could not be decided now: a consumer's open transaction
// holds it, or its orders contradict its claim. Ids that order_evidence knows
// already are not fenced and come back as ORDER.
//
// After a lock time-out every id gets a transaction of its own, so that one
// hung consumer holds up no other; deadlocks and serialization failures are
// tried again, at most five times. With an error the results still hold what
// is known to be committed. Errors: [*FenceNotReadyError], [ErrInRecovery],
// [ErrUnavailable].
func (s *Store) Fence(ctx context.Context, reason string, requests []reservation.FenceRequest) ([]reservation.FenceResult, error) {
	results := make([]reservation.FenceResult, len(requests))
	for i, r := range requests {
		results[i].ID = r.ID
	}
	if len(requests) == 0 {
		return results, nil
	}
	known, err := s.fencePage(ctx, reason, requests)
	if sqlState(err) == "55P03" && len(requests) > 1 { // lock_not_available
		known, err = s.fenceOneByOne(ctx, reason, requests)
	}
	for i, r := range requests {
		if result, ok := known[r.ID]; ok {
			results[i] = result
		}
	}
	if sqlState(err) == "55P03" {
		err = nil // the one id is held: not known, and no fault
	}
	return results, fenceError(err)
}

// maxHeld bounds how many held ids a page waits for, half a deadlock_timeout
// each. A batch consumer that hangs holds all of its ids; those behind them are
// not known either then, and asked for again later.
const maxHeld = 8

func (s *Store) fenceOneByOne(ctx context.Context, reason string, requests []reservation.FenceRequest) (map[string]reservation.FenceResult, error) {
	known := make(map[string]reservation.FenceResult, len(requests))
	held := 0
	for _, r := range requests {
		one, err := s.fencePage(ctx, reason, []reservation.FenceRequest{r})
		if sqlState(err) == "55P03" {
			if held++; held == maxHeld {
				return known, nil
			}
			continue
		}
		if err != nil {
			return known, err
		}
		known[r.ID] = one[r.ID]
	}
	return known, nil
}

// fencePage is one call, a transaction of its own, tried again while it is the
// victim of a deadlock or a serialization failure.
func (s *Store) fencePage(ctx context.Context, reason string, requests []reservation.FenceRequest) (map[string]reservation.FenceResult, error) {
	ids, tags := make([]string, len(requests)), make([]string, len(requests))
	for i, r := range requests {
		ids[i], tags[i] = r.ID, r.Scope.Tag()
	}
	for attempt := 1; ; attempt++ {
		known, err := s.fenceOnce(ctx, reason, ids, tags)
		state := sqlState(err)
		if (state != "40001" && state != "40P01") || attempt == fenceRetries {
			return known, err
		}
		pause := time.Duration(10+rand.IntN(40)) * time.Millisecond << attempt //nolint:gosec // jitter
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w (last failure: %w)", ctx.Err(), err)
		case <-time.After(pause):
		}
	}
}

func (s *Store) fenceOnce(ctx context.Context, reason string, ids, tags []string) (map[string]reservation.FenceResult, error) {
	rows, err := s.pool.Query(ctx,
		`SELECT reservation_id, coalesce(outcome, ''), coalesce(order_id, ''), won FROM seckill.fence_reservations($1, $2, $3)`, ids, reason, tags)
	if err != nil {
		return nil, err
	}
	results, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (reservation.FenceResult, error) {
		var r reservation.FenceResult
		err := row.Scan(&r.ID, &r.Outcome, &r.OrderID, &r.Won)
		r.Known = r.Outcome != ""
		return r, err
	})
	if err != nil {
		return nil, err
	}
	known := make(map[string]reservation.FenceResult, len(results))
	for _, r := range results {
		known[r.ID] = r
	}
	return known, nil
}

// fenceError turns what the function raises into typed errors.
func fenceError(err error) error {
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch refused.Code {
		case stateFenceNotReady:
			var problems []string
			if json.Unmarshal([]byte(refused.Detail), &problems) != nil {
				problems = []string{refused.Message}
			}
			return fmt.Errorf("fence reservations: %w", &FenceNotReadyError{problems})
		case stateNoEvidence:
			return fmt.Errorf("fence reservations: %w", &FenceNotReadyError{[]string{refused.Message}})
		}
	}
	return failed("fence reservations", err)
}

// FenceReady checks what Fence checks again for itself: that the order trigger
// is in place and enabled on every order table, that their back-fill is done
// and that order_evidence reads nothing else. It returns a
// [*FenceNotReadyError] with every problem, or [ErrInRecovery].
func (s *Store) FenceReady(ctx context.Context) error {
	const action = "check the order fence"
	var recovering bool
	if err := s.pool.QueryRow(ctx, `SELECT pg_is_in_recovery()`).Scan(&recovering); err != nil {
		return failed(action, err)
	}
	if recovering {
		return failed(action, ErrInRecovery)
	}
	problems, err := collect(ctx, s, action, pgx.RowTo[string], `SELECT problem FROM seckill.fence_problems() AS problem`)
	if err != nil {
		return err
	}
	if len(problems) > 0 {
		return &FenceNotReadyError{problems}
	}
	return nil
}

// DaemonFences counts, for each scope, the claims that were fenced in the last
// window by the server's clock, and since the scope's last release_storm task
// was decided: the use of max_release (protocol §3). Fences with
// [ReasonRefence] are no releases and do not count.
func (s *Store) DaemonFences(ctx context.Context, scopes []reservation.Scope, window time.Duration) (map[reservation.Scope]int64, error) {
	const action = "count the fences of the window"
	parts := splitScopes(scopes)
	rows, err := s.pool.Query(ctx, `
		SELECT s.activity_id, s.sku_id, s.activity_version, s.bucket_id,
		       (SELECT count(*) FROM seckill.reservation_claim AS c
		        WHERE c.outcome = 'FENCED' AND c.activity_id = s.activity_id AND c.sku_id = s.sku_id
		          AND c.activity_version = s.activity_version AND c.bucket_id = s.bucket_id
		          AND c.claimed_at > greatest(clock_timestamp() - $5 * interval '1 microsecond',
		              (SELECT max(t.decided_at) FROM seckill.manual_task AS t
		               WHERE t.kind = $6 AND t.scope = s.tag AND t.state IN ('rejected', 'resolved')))
		          AND c.reason IS DISTINCT FROM $7)
		FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $8::text[])
		     AS s (activity_id, sku_id, activity_version, bucket_id, tag)`,
		parts.activities, parts.skus, parts.versions, parts.buckets, window.Microseconds(), TaskReleaseStorm, ReasonRefence, parts.tags)
	if err != nil {
		return nil, failed(action, err)
	}
	counts := make(map[reservation.Scope]int64, len(scopes))
	var scope reservation.Scope
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&scope.ActivityID, &scope.SKUID, &scope.Version, &scope.Bucket, &n}, func() error {
		counts[scope] = n
		return nil
	})
	return counts, failed(action, err)
}
