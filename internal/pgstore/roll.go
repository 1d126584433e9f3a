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

// HasReferenceStock says whether the reference schema is installed. Without it
// the stock table is the adopter's.
func (s *Store) HasReferenceStock(ctx context.Context) (bool, error) {
	var installed bool
	err := s.pool.QueryRow(ctx, `SELECT to_regclass('shop.stock') IS NOT NULL`).Scan(&installed)
	return installed, failed("look for the reference schema", err)
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
