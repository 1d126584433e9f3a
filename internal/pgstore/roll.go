package pgstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// RollStep is one SKU's part in rolling an activity to a new version.
type RollStep struct {
	ActivityID string
	SKUID      string
	From       int64 // the version that ends
	To         int64 // the one that begins
	// Registration describes the new version when so many units are left.
	Registration func(left int64) (Version, []Bucket)
}

// Rolled is what became of a [RollStep].
type Rolled struct {
	Sold int64 // units of the old version that are sold
	Left int64 // units of the new version
}

// ErrNoStockRow says that the reference schema has no stock of a version.
var ErrNoStockRow = errors.New("shop.stock has no row of this version")

// referenceStock says that shop.stock is what orders deduct from: it is there,
// and the orders that count are those of the same schema.
const referenceStock = `SELECT to_regclass('shop.stock') IS NOT NULL AND seckill.evidence_is_shipped()`

// HasReferenceStock says whether the stock table is that of the reference schema.
// Otherwise it is the adopter's.
func (s *Store) HasReferenceStock(ctx context.Context) (bool, error) {
	var ours bool
	err := s.pool.QueryRow(ctx, referenceStock).Scan(&ours)
	return ours, failed("look for the reference schema", err)
}

// StockCapped says whether a version of an adopter's stock table can sell nothing
// more: its total is what was sold. known is false where no row of
// seckill.stock_evidence tells.
func (s *Store) StockCapped(ctx context.Context, activityID, skuID string, version int64) (capped, known bool, err error) {
	const action = "read the stock of the old version"
	if err := s.pool.QueryRow(ctx, `SELECT to_regclass('seckill.stock_evidence') IS NOT NULL`).Scan(&known); err != nil || !known {
		return false, false, failed(action, err)
	}
	err = s.pool.QueryRow(ctx, `SELECT total <= sold FROM seckill.stock_evidence
		WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`, activityID, skuID, version).Scan(&capped)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, false, nil
	}
	return capped, true, failed(action, err)
}

// ErrRolling says that somebody else rolls the activity now.
var ErrRolling = errors.New("the activity is being rolled by somebody else")

// LockRoll lets one roll of an activity work at a time, by a lock as runs have it
// ([LockRuns]). unlock ends it; so does the loss of its connection.
func (s *Store) LockRoll(ctx context.Context, activityID string) (unlock func(), err error) {
	locks, err := LockRuns(ctx, RunLockOptions{URL: s.pool.Config().ConnString(), Names: []string{"roll:" + activityID}, Holder: "scope roll"})
	if _, locked := errors.AsType[*RunLockedError](err); locked {
		return nil, fmt.Errorf("activity %s: %w", activityID, ErrRolling)
	}
	if err != nil {
		return nil, err
	}
	return func() { _ = locks.Release() }, nil // the server lets go of it with the connection
}

// RollReferenceStock ends the old versions in shop.stock and begins the new
// ones, in one transaction (protocol §4): each old row is locked and its total
// becomes what was sold, so that late orders of the old version find no stock;
// the new version gets the difference, here and in the registry. A step whose
// new version is registered already is left as it is.
func (s *Store) RollReferenceStock(ctx context.Context, steps []RollStep, actor, reason string) ([]Rolled, error) {
	var all []Rolled
	err := s.write(ctx, "roll the stock", func(tx pgx.Tx) error {
		all = nil
		for _, step := range steps {
			rolled, err := rollStock(ctx, tx, step, actor, reason)
			if err != nil {
				return fmt.Errorf("SKU %s from version %d to %d: %w", step.SKUID, step.From, step.To, err)
			}
			all = append(all, rolled)
		}
		return nil
	})
	return all, err
}

// coversOrders refuses a counter of sold units that is below the active orders:
// the difference to the total would be sold again. The row is locked, so that no
// order of the version comes in between.
func coversOrders(ctx context.Context, tx pgx.Tx, step RollStep, sold int64) error {
	var active int64
	err := tx.QueryRow(ctx, `SELECT count(*) FROM seckill.order_evidence
		WHERE activity_id = $1 AND sku_id = $2 AND coalesce(activity_version, $3) = $3 AND active IS NOT FALSE`,
		step.ActivityID, step.SKUID, step.From).Scan(&active)
	if err != nil {
		return err
	}
	if active > sold {
		return fmt.Errorf("shop.stock has sold %d, and there are %d orders: put the counter right first (sold_mismatch in `reconciler reconcile`)", sold, active)
	}
	return nil
}

func rollStock(ctx context.Context, tx pgx.Tx, step RollStep, actor, reason string) (Rolled, error) {
	var total, sold int64
	err := tx.QueryRow(ctx, `SELECT total, sold FROM shop.stock
		WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3 FOR UPDATE`,
		step.ActivityID, step.SKUID, step.From).Scan(&total, &sold)
	if errors.Is(err, pgx.ErrNoRows) {
		return Rolled{}, ErrNoStockRow
	}
	if err != nil {
		return Rolled{}, err
	}
	if err := coversOrders(ctx, tx, step, sold); err != nil {
		return Rolled{}, err
	}
	var begun int64
	err = tx.QueryRow(ctx, `SELECT total FROM seckill.scope_allocation
		WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`,
		step.ActivityID, step.SKUID, step.To).Scan(&begun)
	if err == nil {
		return Rolled{Sold: sold, Left: begun}, nil
	}
	if !errors.Is(err, pgx.ErrNoRows) {
		return Rolled{}, err
	}
	version, buckets := step.Registration(total - sold)
	if _, err := tx.Exec(ctx, `UPDATE shop.stock SET total = sold
		WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`,
		step.ActivityID, step.SKUID, step.From); err != nil {
		return Rolled{}, err
	}
	if _, err := tx.Exec(ctx, `INSERT INTO shop.stock (activity_id, sku_id, activity_version, total) VALUES ($1, $2, $3, $4)`,
		version.ActivityID, version.SKUID, version.Version, version.Total); err != nil {
		return Rolled{}, fmt.Errorf("there is stock of the new version that nobody registered: %w", err)
	}
	if err := registerVersion(ctx, tx, version, buckets, actor); err != nil {
		return Rolled{}, err
	}
	return Rolled{Sold: sold, Left: version.Total}, addAudit(ctx, tx, AuditEntry{
		Actor: actor, Action: "version_rolled", Reason: reason, Subject: fmt.Sprintf("a:%s:s:%s:v:%d", step.ActivityID, step.SKUID, step.From),
		Detail: map[string]any{"to": step.To, "total_before": total, "sold": sold, "left": version.Total},
	})
}
