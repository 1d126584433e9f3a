package migrations

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// evidenceColumns are the columns of order_evidence (protocol §2) with the
// types that an adopter's SELECT is cast to.
var evidenceColumns = []struct{ name, typ string }{
	{"reservation_id", "text"},
	{"order_id", "text"},
	{"request_id", "text"},
	{"activity_id", "text"},
	{"sku_id", "text"},
	{"activity_version", "bigint"},
	{"bucket_id", "bigint"},
	{"user_id", "text"},
	{"active", "boolean"},
	{"created_at", "timestamptz"},
}

// EvidenceError says why a SELECT cannot become order_evidence.
type EvidenceError struct{ Reason string }

func (e *EvidenceError) Error() string { return "install the evidence view: " + e.Reason }

// EvidenceResult is what [InstallEvidence] found out about the installed view.
type EvidenceResult struct {
	// Problems lists what still stops releases, such as a table behind the
	// view that has no order fence; empty when nothing does.
	Problems []string `json:"problems"`
}

// InstallEvidence makes query, one SELECT with the view's columns, the view
// seckill.order_evidence (protocol §2): it drops the view in force, creates the
// new one with every column cast to its type, gives it to the owner of schema
// seckill and grants SELECT to the daemon and the operator, all in one
// transaction. A [*EvidenceError] names what is wrong with the query: more
// than one statement, a missing column, a view with security_invoker behind
// it, a table that the owner may not read. version and bucket may be NULL.
//
// The role of url owns schema seckill, or is a superuser.
func InstallEvidence(ctx context.Context, url, query string) (EvidenceResult, error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return EvidenceResult{}, fmt.Errorf("connect to PostgreSQL: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var result EvidenceResult
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		result, err = installEvidence(ctx, tx, query)
		return err
	})
	return result, err
}

func installEvidence(ctx context.Context, tx pgx.Tx, query string) (EvidenceResult, error) {
	definition, err := canonicalQuery(ctx, tx, query)
	if err != nil {
		return EvidenceResult{}, err
	}
	casts := make([]string, 0, len(evidenceColumns))
	for _, c := range evidenceColumns {
		casts = append(casts, fmt.Sprintf("orders.%s::%s AS %[1]s", c.name, c.typ))
	}
	var owner string
	if err := tx.QueryRow(ctx, `SELECT quote_ident(pg_get_userbyid(nspowner)) FROM pg_namespace WHERE nspname = 'seckill'`).Scan(&owner); err != nil {
		return EvidenceResult{}, fmt.Errorf("find the owner of schema seckill: %w", err)
	}
	for _, step := range []struct{ what, sql string }{
		{"drop the view in force", `DROP VIEW IF EXISTS seckill.order_evidence`},
		{"create the view", `CREATE VIEW seckill.order_evidence AS SELECT ` + strings.Join(casts, ", ") + ` FROM (` + definition + `) AS orders`},
		{"give the view to the schema's owner", `ALTER VIEW seckill.order_evidence OWNER TO ` + owner},
		{"grant SELECT on the view", `GRANT SELECT ON seckill.order_evidence TO seckill_daemon, seckill_operator`},
		{"mark the view as the adopter's", `COMMENT ON VIEW seckill.order_evidence IS 'installed by reconciler migrate evidence'`},
		{"read the view with its owner's rights", `SELECT 1 FROM seckill.order_evidence LIMIT 0`},
		{"record the change", `INSERT INTO seckill.audit_log (actor, action, detail)
			SELECT session_user, 'evidence_installed', jsonb_build_object('hash', seckill.evidence_hash())`},
	} {
		if _, err := tx.Exec(ctx, step.sql); err != nil {
			return EvidenceResult{}, evidenceFailure(step.what, err)
		}
	}
	return checkEvidence(ctx, tx)
}

// canonicalQuery lets PostgreSQL parse query as the body of a view and prints
// it back: without comments or a semicolon, every name qualified. The extended
// protocol takes one statement only.
func canonicalQuery(ctx context.Context, tx pgx.Tx, query string) (string, error) {
	if _, err := tx.Prepare(ctx, "", query); err != nil {
		return "", evidenceFailure("read the query, which must be one SELECT", err)
	}
	if _, err := tx.Exec(ctx, "CREATE VIEW seckill.order_evidence_new AS\n"+query, pgx.QueryExecModeExec); err != nil {
		return "", evidenceFailure("read the query as a view, which must be one SELECT", err)
	}
	rows, err := tx.Query(ctx, `SELECT attname FROM pg_attribute
		WHERE attrelid = 'seckill.order_evidence_new'::regclass AND attnum > 0`)
	if err != nil {
		return "", fmt.Errorf("read the query's columns: %w", err)
	}
	have, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return "", fmt.Errorf("read the query's columns: %w", err)
	}
	var missing []string
	for _, c := range evidenceColumns {
		if !slices.Contains(have, c.name) {
			missing = append(missing, c.name)
		}
	}
	if len(missing) > 0 {
		return "", &EvidenceError{"the query lacks the columns " + strings.Join(missing, ", ")}
	}
	var definition string
	if err := tx.QueryRow(ctx, `SELECT pg_get_viewdef('seckill.order_evidence_new'::regclass)
		FROM set_config('search_path', '', true)`).Scan(&definition); err != nil {
		return "", fmt.Errorf("read the query back: %w", err)
	}
	if _, err := tx.Exec(ctx, `DROP VIEW seckill.order_evidence_new`); err != nil {
		return "", fmt.Errorf("drop the probe view: %w", err)
	}
	return strings.TrimSuffix(strings.TrimSpace(definition), ";"), nil
}

// checkEvidence refuses what can be put right only by another query, and
// reports what can be put right later.
func checkEvidence(ctx context.Context, tx pgx.Tx) (EvidenceResult, error) {
	rows, err := tx.Query(ctx, `SELECT problem FROM seckill.evidence_problems() AS problem`)
	if err != nil {
		return EvidenceResult{}, fmt.Errorf("check the view: %w", err)
	}
	problems, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return EvidenceResult{}, fmt.Errorf("check the view: %w", err)
	}
	for _, p := range problems {
		if strings.Contains(p, "security_invoker") || strings.Contains(p, "reads the function") {
			return EvidenceResult{}, &EvidenceError{p}
		}
	}
	return EvidenceResult{Problems: problems}, nil
}

// evidenceFailure tells a query that PostgreSQL refuses from a server that
// cannot be reached.
func evidenceFailure(what string, err error) error {
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok {
		reason := what + ": " + refused.Message
		if refused.Hint != "" {
			reason += " (" + refused.Hint + ")"
		}
		return &EvidenceError{reason}
	}
	return fmt.Errorf("%s: %w", what, err)
}
