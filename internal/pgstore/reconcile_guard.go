package pgstore

import (
	"context"
	"errors"
	"slices"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// ErrPostgresChanged says that claims may be lost of which Redis shows the
// effects: nothing moves stock until they were made again (protocol §1).
var ErrPostgresChanged = errors.New("PostgreSQL is another one, or went back in time, and what was lost with it has not been fenced again")

// MayMoveStock checks that the order fence is in place and that this is the
// PostgreSQL of the passes before. Errors: [*FenceNotReadyError],
// [ErrPostgresChanged], and those of a read.
func (s *Store) MayMoveStock(ctx context.Context) error {
	if err := s.FenceReady(ctx); err != nil {
		return err
	}
	check, err := s.CheckIdentity(ctx)
	if err != nil {
		return err
	}
	if check.Halted {
		return ErrPostgresChanged
	}
	return nil
}

// Refence claims RELEASED reservations as FENCED again, which counts as no
// release.
func (s *Store) Refence(ctx context.Context, requests []reservation.FenceRequest) ([]reservation.FenceResult, error) {
	return s.Fence(ctx, ReasonRefence, requests)
}

// AfterRelease says whether an unresolved task order_after_release names the
// reservation, or names more than its sample shows.
func (s *Store) AfterRelease(ctx context.Context, ref reconcile.Ref) (bool, error) {
	tag := ref.Scope.Tag()
	tasks, err := s.Tasks(ctx, TaskFilter{States: Unresolved, Kinds: []string{reconcile.CheckOrderAfterRelease}, Scope: &tag})
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(tasks, func(t Task) bool {
		return slices.Contains(t.Sample, ref.ID) || t.Count > int64(len(t.Sample))
	}), nil
}
