package pgstore

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// CreateReferenceStock gives a version its row in shop.stock, where the
// reference schema is installed. An adopter's own stock table is the adopter's
// business: then it does nothing. A row that is there is left alone. The login
// is a member of seckill_operator.
func (s *Store) CreateReferenceStock(ctx context.Context, v Version) error {
	return s.write(ctx, "create the version's stock in shop.stock", func(tx pgx.Tx) error {
		var installed bool
		if err := tx.QueryRow(ctx, referenceStock).Scan(&installed); err != nil || !installed {
			return err
		}
		_, err := tx.Exec(ctx, `
			INSERT INTO shop.stock (activity_id, sku_id, activity_version, total) VALUES ($1, $2, $3, $4)
			ON CONFLICT DO NOTHING`, v.ActivityID, v.SKUID, v.Version, v.Total)
		return err
	})
}
