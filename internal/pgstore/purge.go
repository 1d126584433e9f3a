package pgstore

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// PurgeKind is one kind of what is deleted in time (protocol §4).
type PurgeKind string

// The kinds, and the age that counts: of a claim since it was made, of a task
// since it was decided, of a report since its run began, of a transfer since
// its version's retention ended, of a job since its last run, of a sample since
// it was taken.
const (
	PurgeClaims    PurgeKind = "claims"
	PurgeTasks     PurgeKind = "tasks"
	PurgeReports   PurgeKind = "reports"
	PurgeTransfers PurgeKind = "transfers"
	PurgeJobs      PurgeKind = "jobs"
	PurgeSamples   PurgeKind = "samples"
)

// Purgeable is what of a kind may be deleted.
type Purgeable struct {
	Count  int64
	Oldest time.Time // zero without any
	Newest time.Time
}

// add counts what another page has.
func (p *Purgeable) add(count int64, oldest, newest *time.Time) {
	p.Count += count
	if oldest != nil && (p.Oldest.IsZero() || oldest.Before(p.Oldest)) {
		p.Oldest = oldest.UTC()
	}
	if newest != nil && newest.After(p.Newest) {
		p.Newest = newest.UTC()
	}
}

// purgeRule says which rows of a table may go; $1 is how long they are kept,
// by the server's clock.
type purgeRule struct {
	table, key string
	at         string // the time that is shown
	where      string
	share      int // the part of a batch that one statement deletes: rows may have many others behind them
}

var purgeRules = map[PurgeKind]purgeRule{
	// Their proposals go with them.
	PurgeTasks: {"seckill.manual_task", "id", "decided_at", `
		t.state IN ('rejected', 'resolved') AND t.decided_at < clock_timestamp() - $1::interval`, 1},
	// Their findings go with them. The newest finished one of each mode and
	// selection stays: the next one is compared with it.
	PurgeReports: {"seckill.reconcile_run", "run_id", "started_at", `
		t.started_at < clock_timestamp() - $1::interval AND CASE WHEN t.verdict IS NULL
			THEN t.seen_at < clock_timestamp() - $1::interval
			ELSE EXISTS (SELECT FROM seckill.reconcile_run AS n
			             WHERE n.verdict IS NOT NULL AND n.mode = t.mode AND n.selection = t.selection
			               AND (n.started_at, n.run_id) > (t.started_at, t.run_id)) END`, 100},
	// Until the version's retention has passed its markers in Redis are there,
	// and a failover may open a pair again (protocol §4).
	PurgeTransfers: {"seckill.bucket_transfer", "transfer_id", "updated_at", `
		t.state IN ('DONE', 'CANCELLED') AND NOT EXISTS (SELECT FROM seckill.scope AS s
			WHERE (s.activity_id, s.sku_id, s.activity_version) = (t.activity_id, t.sku_id, t.activity_version)
			  AND (s.state <> 'CLOSED' OR s.retention_until >= clock_timestamp() - $1::interval))`, 1},
	PurgeSamples: {"seckill.version_sample", "id", "at", `t.at < clock_timestamp() - $1::interval`, 1},
	PurgeJobs: {"seckill.job", "name", "last_finished_at", `
		NOT t.paused AND t.run_requested_at IS NULL AND t.last_finished_at < clock_timestamp() - $1::interval`, 1},
}

// PlanPurge counts what of a kind is older than keep and may be deleted.
// Nothing is changed. Claims are looked at in pages of batch.
func (s *Store) PlanPurge(ctx context.Context, kind PurgeKind, keep time.Duration, batch int) (Purgeable, error) {
	action := "plan to purge " + string(kind)
	var p Purgeable
	if kind == PurgeClaims {
		position := new(string)
		for position != nil {
			var examined, count int64
			var oldest, newest *time.Time
			err := s.pool.QueryRow(ctx, `SELECT examined, purgeable, oldest, newest, "position"
				FROM seckill.plan_claims(clock_timestamp() - $1::interval, $2, $3)`, keep, *position, batch).
				Scan(&examined, &count, &oldest, &newest, &position)
			if err != nil {
				return p, failed(action, err)
			}
			p.add(count, oldest, newest)
		}
		return p, nil
	}
	rule, err := ruleOf(kind)
	if err != nil {
		return p, err
	}
	var count int64
	var oldest, newest *time.Time
	err = s.pool.QueryRow(ctx, fmt.Sprintf(`SELECT count(*), min(t.%[1]s), max(t.%[1]s) FROM %[2]s AS t WHERE %[3]s`, rule.at, rule.table, rule.where), keep).
		Scan(&count, &oldest, &newest)
	p.add(count, oldest, newest)
	return p, failed(action, err)
}

// ruleOf finds the rule of a kind.
func ruleOf(kind PurgeKind) (purgeRule, error) {
	rule, known := purgeRules[kind]
	if !known {
		return rule, fmt.Errorf("there is nothing of kind %q to purge", kind)
	}
	return rule, nil
}

// PurgePage deletes one batch of a kind, in one transaction: position is "" at
// first, then what the call before returned, until next is "".
func (s *Store) PurgePage(ctx context.Context, kind PurgeKind, keep time.Duration, batch int, position string) (deleted int64, next string, err error) {
	action := "purge " + string(kind)
	if kind == PurgeClaims {
		var examined int64
		var end *string
		err = s.write(ctx, action, func(tx pgx.Tx) error {
			return tx.QueryRow(ctx, `SELECT examined, purged, "position" FROM seckill.purge_claims(clock_timestamp() - $1::interval, $2, $3)`,
				keep, position, batch).Scan(&examined, &deleted, &end)
		})
		return deleted, text(end), err
	}
	rule, err := ruleOf(kind)
	if err != nil {
		return 0, "", err
	}
	batch = max(batch/rule.share, 1)
	err = s.write(ctx, action, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, fmt.Sprintf(`DELETE FROM %[1]s WHERE %[2]s IN (SELECT t.%[2]s FROM %[1]s AS t WHERE %[3]s LIMIT $2)`,
			rule.table, rule.key, rule.where), keep, batch)
		deleted = tag.RowsAffected()
		return err
	})
	if err == nil && deleted == int64(batch) {
		next = "more" // what is left is found by the rule alone
	}
	return deleted, next, err
}
