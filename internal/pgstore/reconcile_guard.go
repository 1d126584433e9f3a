package pgstore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// ErrPostgresChanged says that claims may be lost of which Redis shows the
// effects: nothing moves stock until they were made again (protocol §1).
var ErrPostgresChanged = errors.New("PostgreSQL is another one, or went back in time, and what was lost with it has not been fenced again")

// RepairGuard says what repairs of a reconciliation may change.
type RepairGuard struct {
	*Store
	// Sighted is the identity of the server of that name that was kept outside
	// PostgreSQL, encoded; "" for none. A restored volume has forgotten its own.
	Sighted func(ctx context.Context, server string) (string, error)
}

// MayMoveStock checks that the order fence is in place and that this is the
// PostgreSQL of the passes before. Errors: [*FenceNotReadyError],
// [ErrPostgresChanged], and those of a read: a sighting that is not to be had
// is no reason to go on.
func (g RepairGuard) MayMoveStock(ctx context.Context) error {
	if err := g.FenceReady(ctx); err != nil {
		return err
	}
	var before []Identity
	name, err := g.ServerName(ctx)
	if err != nil {
		return err
	}
	sighting, err := g.Sighted(ctx, name)
	if err != nil {
		return fmt.Errorf("read the last sighting of PostgreSQL: %w", err)
	}
	if sighting != "" {
		seen, err := ParseIdentity(sighting)
		if err != nil {
			return fmt.Errorf("read the last sighting of PostgreSQL: %w", err)
		}
		before = append(before, seen)
	}
	check, err := g.CheckIdentity(ctx, before...)
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
func (g RepairGuard) Refence(ctx context.Context, requests []reservation.FenceRequest) ([]reservation.FenceResult, error) {
	return g.Fence(ctx, ReasonRefence, requests)
}

// AfterRelease says whether an unresolved task order_after_release names the
// reservation, or names more than its sample shows.
func (g RepairGuard) AfterRelease(ctx context.Context, ref reconcile.Ref) (bool, error) {
	tag := ref.Scope.Tag()
	tasks, err := g.Tasks(ctx, TaskFilter{States: Unresolved, Kinds: []string{reconcile.CheckOrderAfterRelease}, Scope: &tag})
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(tasks, func(t Task) bool {
		return slices.Contains(t.Sample, ref.ID) || t.Count > int64(len(t.Sample))
	}), nil
}
