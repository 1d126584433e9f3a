package pgstore

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Proposal is what a person was shown for one reservation behind a task: the
// action, and the state of the world that it rests on.
type Proposal struct {
	ReservationID string          `json:"reservation_id"`
	Action        string          `json:"action"`
	Expected      json.RawMessage `json:"expected"`
	ProposedAt    time.Time       `json:"-"`
}

// SaveProposals keeps the proposals of a task; a newer one for a reservation
// takes the place of the older.
func (s *Store) SaveProposals(ctx context.Context, task int64, proposals []Proposal) error {
	if len(proposals) == 0 {
		return nil
	}
	rows, err := json.Marshal(proposals)
	if err != nil {
		return fmt.Errorf("encode the proposals of task %d: %w", task, err)
	}
	return s.write(ctx, "keep proposals", func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO seckill.task_proposal (task_id, reservation_id, action, expected)
			SELECT $1, p.reservation_id, p.action, p.expected
			FROM jsonb_to_recordset($2::jsonb) AS p (reservation_id text, action text, expected jsonb)
			ORDER BY p.reservation_id
			ON CONFLICT (task_id, reservation_id) DO UPDATE SET
				action = excluded.action, expected = excluded.expected, proposed_at = clock_timestamp()`, task, rows)
		return err
	})
}

// Proposals are those that were kept for the reservations of a task.
func (s *Store) Proposals(ctx context.Context, task int64, reservationIDs []string) ([]Proposal, error) {
	return collect(ctx, s, "read proposals", func(row pgx.CollectableRow) (Proposal, error) {
		var p Proposal
		err := row.Scan(&p.ReservationID, &p.Action, &p.Expected, &p.ProposedAt)
		return p, err
	}, `SELECT reservation_id, action, expected, proposed_at FROM seckill.task_proposal
	    WHERE task_id = $1 AND reservation_id = ANY ($2) ORDER BY reservation_id`, task, reservationIDs)
}

// ProposedIDs are the reservations for which a task has proposals, at most so
// many.
func (s *Store) ProposedIDs(ctx context.Context, task int64, most int) ([]string, error) {
	return collect(ctx, s, "read proposals", pgx.RowTo[string],
		`SELECT reservation_id FROM seckill.task_proposal WHERE task_id = $1 ORDER BY reservation_id LIMIT $2`, task, most)
}

// DropProposals forgets what was carried out.
func (s *Store) DropProposals(ctx context.Context, task int64, reservationIDs []string) error {
	return s.write(ctx, "drop proposals", func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `DELETE FROM seckill.task_proposal WHERE task_id = $1 AND reservation_id = ANY ($2)`, task, reservationIDs)
		return err
	})
}

// AuditEach adds all entries to the audit trail, or none.
func (s *Store) AuditEach(ctx context.Context, entries []AuditEntry) error {
	if len(entries) == 0 {
		return nil
	}
	return s.write(ctx, "write the audit trail", func(tx pgx.Tx) error {
		for _, e := range entries {
			if err := addAudit(ctx, tx, e); err != nil {
				return err
			}
		}
		return nil
	})
}
