package pgstore

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/reservation"
)

// AuditEntry is one act of a person, or of the daemon in a person's stead. The
// database role and the time are added by the server; nobody can change or
// delete an entry. It holds no raw user id.
type AuditEntry struct {
	Actor   string // the person, as the command was told
	Action  string // a stable name
	Scope   string // a tag, or empty
	Subject string // a reservation, task, broker or job, or empty
	Reason  string
	Detail  map[string]any
}

// Audit adds an entry to the audit trail. What this package changes for a
// person it notes itself, in the same transaction.
func (s *Store) Audit(ctx context.Context, e AuditEntry) error {
	return s.write(ctx, "write the audit trail", func(tx pgx.Tx) error { return addAudit(ctx, tx, e) })
}

func addAudit(ctx context.Context, tx pgx.Tx, e AuditEntry) error {
	if e.Detail == nil {
		e.Detail = map[string]any{}
	}
	detail, err := json.Marshal(e.Detail)
	if err != nil {
		return fmt.Errorf("encode the audit detail of %s: %w", e.Action, err)
	}
	_, err = tx.Exec(ctx, `
		INSERT INTO seckill.audit_log (actor, action, scope, subject, reason, detail) VALUES ($1, $2, $3, $4, $5, $6)`,
		e.Actor, e.Action, e.Scope, e.Subject, e.Reason, detail)
	return err
}

// auditScopes adds the entry once for each scope.
func auditScopes(ctx context.Context, tx pgx.Tx, scopes []reservation.Scope, e AuditEntry) error {
	for _, scope := range scopes {
		e.Scope = scope.Tag()
		if err := addAudit(ctx, tx, e); err != nil {
			return err
		}
	}
	return nil
}
