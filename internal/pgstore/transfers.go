package pgstore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// Versions lists the registered versions within their retention, each with its
// buckets and all of its transfers.
func (s *Store) Versions(ctx context.Context, f transfer.Filter) ([]transfer.Version, error) {
	const action = "list the versions for transfers"
	rows, err := s.pool.Query(ctx, `
		SELECT a.activity_id, a.sku_id, a.activity_version, a.total, a.buckets, s.starts_at, s.ends_at, clock_timestamp(),
		       s.bucket_id, s.initial, s.state, s.held_at IS NOT NULL
		FROM seckill.scope_allocation AS a JOIN seckill.scope AS s USING (activity_id, sku_id, activity_version)
		WHERE ($1 = '' OR a.activity_id = $1) AND ($2 = '' OR a.sku_id = $2) AND ($3::bigint IS NULL OR a.activity_version = $3)
		  AND s.retention_until > clock_timestamp() + $4 AND (NOT $5 OR a.buckets > 1)
		  AND (NOT $6 OR EXISTS (SELECT FROM seckill.bucket_transfer AS t
		       WHERE (t.activity_id, t.sku_id, t.activity_version) = (a.activity_id, a.sku_id, a.activity_version)))
		ORDER BY a.activity_id, a.sku_id, a.activity_version, s.bucket_id`,
		f.ActivityID, f.SKUID, f.Version, retentionMargin, f.Several, f.Journalled)
	if err != nil {
		return nil, failed(action, err)
	}
	var versions []transfer.Version
	at := map[transfer.Key]int{}
	var v transfer.Version
	var b transfer.Bucket
	_, err = pgx.ForEachRow(rows, []any{
		&v.Key.ActivityID, &v.Key.SKUID, &v.Key.Version, &v.Allocated, &v.Count, &v.StartsAt, &v.EndsAt, &v.ReadAt, &b.ID, &b.Initial, &b.State, &b.Held,
	}, func() error {
		i, known := at[v.Key]
		if !known {
			i = len(versions)
			at[v.Key] = i
			versions = append(versions, v)
		}
		versions[i].Buckets = append(versions[i].Buckets, b)
		return nil
	})
	if err != nil || len(versions) == 0 {
		return nil, failed(action, err)
	}
	transfers, err := s.Transfers(ctx, TransferFilter{ActivityID: f.ActivityID, SKUID: f.SKUID, Version: f.Version})
	if err != nil {
		return nil, err
	}
	slices.Reverse(transfers)
	for _, t := range transfers {
		if i, live := at[t.Key]; live {
			versions[i].Transfers = append(versions[i].Transfers, t)
		}
	}
	return versions, nil
}

// TransferFilter selects rows of the journal; what is not set selects all.
type TransferFilter struct {
	ID         string
	ActivityID string
	SKUID      string
	Version    *int64
	Open       bool // only those of which something is still to be done, as far as the journal knows
	Limit      int  // 0: no limit
}

// Transfers lists rows of the journal, the newest first.
func (s *Store) Transfers(ctx context.Context, f TransferFilter) ([]transfer.Transfer, error) {
	return collect(ctx, s, "read the journal of transfers", scanTransfer, `
		SELECT transfer_id, activity_id, sku_id, activity_version, donor_bucket, receiver_bucket, amount, state, reason, created_by, created_at, updated_at
		FROM seckill.bucket_transfer
		WHERE ($1 = '' OR transfer_id = $1) AND ($2 = '' OR activity_id = $2) AND ($3 = '' OR sku_id = $3)
		  AND ($4::bigint IS NULL OR activity_version = $4) AND (NOT $5 OR state IN ('PLANNED', 'OUT'))
		ORDER BY created_at DESC, transfer_id DESC LIMIT nullif($6, 0)`,
		f.ID, f.ActivityID, f.SKUID, f.Version, f.Open, f.Limit)
}

// Transfer is one row of the journal, or [ErrNotFound].
func (s *Store) Transfer(ctx context.Context, id string) (transfer.Transfer, error) {
	found, err := s.Transfers(ctx, TransferFilter{ID: id})
	if err == nil && (id == "" || len(found) != 1) {
		err = fmt.Errorf("transfer %s: %w", id, ErrNotFound)
	}
	if err != nil {
		return transfer.Transfer{}, err
	}
	return found[0], nil
}

func scanTransfer(row pgx.CollectableRow) (transfer.Transfer, error) {
	var t transfer.Transfer
	err := row.Scan(&t.ID, &t.Key.ActivityID, &t.Key.SKUID, &t.Key.Version, &t.Donor, &t.Receiver, &t.Amount, &t.State,
		&t.Reason, &t.CreatedBy, &t.CreatedAt, &t.UpdatedAt)
	t.CreatedAt, t.UpdatedAt = t.CreatedAt.UTC(), t.UpdatedAt.UTC()
	return t, err
}

// CreateTransfers puts transfers into the journal, all or none, each with an
// entry in the audit trail. Once it returns they are durable, and their first
// leg may be run (protocol §4).
func (s *Store) CreateTransfers(ctx context.Context, transfers []transfer.Transfer) error {
	return s.write(ctx, "journal transfers", func(tx pgx.Tx) error {
		for _, t := range transfers {
			_, err := tx.Exec(ctx, `
				INSERT INTO seckill.bucket_transfer (transfer_id, activity_id, sku_id, activity_version, donor_bucket, receiver_bucket,
				                                     amount, state, reason, created_by)
				VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`,
				t.ID, t.Key.ActivityID, t.Key.SKUID, t.Key.Version, t.Donor, t.Receiver, t.Amount, t.State, t.Reason, t.CreatedBy)
			if err != nil {
				return err
			}
			err = addAudit(ctx, tx, AuditEntry{
				Actor: t.CreatedBy, Action: "transfer_planned", Scope: t.DonorScope().Tag(), Subject: t.ID, Reason: t.Reason,
				Detail: map[string]any{"receiver": t.ReceiverScope().Tag(), "amount": t.Amount},
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// NoteTransfers makes the changes whose rows still are in the state that they
// come from; the others are another instance's by now.
func (s *Store) NoteTransfers(ctx context.Context, changes []transfer.Change) error {
	var ids, from, to, notes []string
	for _, c := range changes {
		ids, from, to, notes = append(ids, c.ID), append(from, string(c.From)), append(to, string(c.To)), append(notes, c.Note)
	}
	return s.write(ctx, "note the state of transfers", func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			UPDATE seckill.bucket_transfer AS t
			SET state = c.next, updated_at = clock_timestamp(),
			    reason = CASE WHEN c.note = '' OR right(t.reason, length(c.note)) = c.note THEN t.reason
			                  WHEN t.reason = '' THEN c.note ELSE t.reason || '; ' || c.note END
			FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) AS c (id, before, next, note)
			WHERE t.transfer_id = c.id AND t.state = c.before`, ids, from, to, notes)
		return err
	})
}

// CancelTransfer notes that a transfer is not to be begun, with actor and reason
// in the audit trail. [transfer.ErrMoved]: its OUT was seen already.
// [ErrNotFound]: no such transfer. One that is cancelled already is no error.
func (s *Store) CancelTransfer(ctx context.Context, id, actor, reason string) error {
	return s.write(ctx, "cancel a transfer", func(tx pgx.Tx) error {
		var donor reservation.Scope
		err := tx.QueryRow(ctx, `
			UPDATE seckill.bucket_transfer SET state = 'CANCELLED', updated_at = clock_timestamp() WHERE transfer_id = $1 AND state = 'PLANNED'
			RETURNING activity_id, sku_id, activity_version, donor_bucket`, id).
			Scan(&donor.ActivityID, &donor.SKUID, &donor.Version, &donor.Bucket)
		if errors.Is(err, pgx.ErrNoRows) {
			return notCancelled(ctx, tx, id)
		}
		if err != nil {
			return err
		}
		return addAudit(ctx, tx, AuditEntry{Actor: actor, Action: "transfer_cancelled", Scope: donor.Tag(), Subject: id, Reason: reason})
	})
}

func notCancelled(ctx context.Context, tx pgx.Tx, id string) error {
	var state transfer.State
	err := tx.QueryRow(ctx, `SELECT state FROM seckill.bucket_transfer WHERE transfer_id = $1`, id).Scan(&state)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return fmt.Errorf("transfer %s: %w", id, ErrNotFound)
	case err != nil:
		return err
	case state == transfer.Cancelled:
		return nil
	default:
		return transfer.ErrMoved
	}
}
