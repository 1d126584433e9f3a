package pgstore

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/internal/pgstore/claims"
	"github.com/seckill/reconciler/internal/probe"
)

// Examine asks how PostgreSQL is set up: what the promises rest on (protocol
// §1 and §2). It changes nothing. url is that of the lease, whose session must
// be one of its own; topic is the order topic.
func (s *Store) Examine(ctx context.Context, url, topic string, connectTimeout time.Duration) probe.Postgres {
	var p probe.Postgres
	if p.Err = s.pool.QueryRow(ctx, `SHOW server_version`).Scan(&p.Version); p.Err != nil {
		p.Err = failed("reach PostgreSQL", p.Err)
		return p
	}
	p.Settings, p.SettingsErr = s.Server(ctx)
	began := time.Now()
	at, err := s.ServerTime(ctx)
	p.ClockErr, p.ClockError = err, time.Since(began)/2
	p.Clock = at.Sub(began.Add(p.ClockError))
	err = s.FenceReady(ctx)
	if notReady, ok := errors.AsType[*FenceNotReadyError](err); ok {
		p.FenceProblems, err = notReady.Problems, nil
	}
	p.FenceErr = err
	p.Scans, p.ScansErr = s.tableScans(ctx)
	err = checkPooler(ctx, url, connectTimeout)
	p.TransactionPooler = errors.Is(err, ErrTransactionPooler)
	if !p.TransactionPooler {
		p.PoolerErr = err
	}
	p.Brokers, p.BrokersErr = s.knownBrokers(ctx, topic)
	return p
}

func (s *Store) knownBrokers(ctx context.Context, topic string) ([]string, error) {
	queues, err := s.ExpectedQueues(ctx)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, q := range queues {
		if q.Topic == topic {
			names = append(names, q.Broker)
		}
	}
	return names, nil
}

// checkPooler finds out whether the URL leads to a session of its own.
func checkPooler(ctx context.Context, url string, connectTimeout time.Duration) error {
	const action = "look for a pooler"
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return fmt.Errorf("parse the PostgreSQL URL: %w", err)
	}
	config.ConnectTimeout = connectTimeout
	config.RuntimeParams["application_name"] = "reconciler-doctor"
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return failed(action, err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }() // nothing was written
	return failed(action, refuseTransactionPooler(ctx, conn, config))
}

// examined are the evidence queries whose plans are looked at, by what they
// are for.
var examined = []struct {
	name, sql string
	args      []any
}{
	{"claims and orders of a page", claims.RecordsSQL, []any{[]string{"a", "b"}}},
	{"a page of a SKU's orders", orderPageSQL, []any{"a", "s", "", 1000}},
	{"fences of the window", `
		SELECT count(*) FROM seckill.reservation_claim WHERE outcome = 'FENCED' AND activity_id = $1 AND sku_id = $2
		AND activity_version = $3 AND bucket_id = $4 AND claimed_at > clock_timestamp() - interval '10 minutes'`, []any{"a", "s", 1, 0}},
}

// tableScans are the tables that the evidence queries read whole. The pool's
// sessions avoid that wherever an index serves, however small the table.
func (s *Store) tableScans(ctx context.Context) ([]probe.TableScan, error) {
	var found []probe.TableScan
	for _, q := range examined {
		action := "explain the query for " + q.name
		var text []byte
		if err := s.pool.QueryRow(ctx, "EXPLAIN (FORMAT JSON) "+q.sql, q.args...).Scan(&text); err != nil {
			return nil, failed(action, err)
		}
		var plans []struct {
			Plan planNode `json:"Plan"`
		}
		if err := json.Unmarshal(text, &plans); err != nil {
			return nil, fmt.Errorf("read the plan of the query for %s: %w", q.name, err)
		}
		var tables []string
		for _, plan := range plans {
			for _, read := range plan.Plan.reads() {
				table, whole, err := s.readsWhole(ctx, read)
				if err != nil {
					return nil, failed(action, err)
				}
				if whole {
					tables = append(tables, table)
				}
			}
		}
		slices.Sort(tables)
		for _, table := range slices.Compact(tables) {
			found = append(found, probe.TableScan{Query: q.name, Table: table})
		}
	}
	return found, nil
}

// readsWhole says whether a node reads its table from one end to the other:
// without an index, or through one whose first column is not asked for.
func (s *Store) readsWhole(ctx context.Context, n planNode) (table string, whole bool, err error) {
	if n.Index == "" {
		return n.Relation, true, nil
	}
	var first string
	err = s.pool.QueryRow(ctx, `
		SELECT t.relname, coalesce(nullif(a.attname, 'expr'), '')
		FROM pg_class AS x JOIN pg_index AS i ON i.indexrelid = x.oid JOIN pg_class AS t ON t.oid = i.indrelid
		     JOIN pg_attribute AS a ON a.attrelid = x.oid AND a.attnum = 1
		WHERE x.relname = $1 LIMIT 1`, n.Index).Scan(&table, &first)
	return table, !strings.Contains(n.Cond, first), err
}

// planNode is a node of a plan as EXPLAIN (FORMAT JSON) writes it.
type planNode struct {
	Type     string     `json:"Node Type"`
	Relation string     `json:"Relation Name"`
	Index    string     `json:"Index Name"`
	Cond     string     `json:"Index Cond"`
	Plans    []planNode `json:"Plans"`
}

// reads are the node and those below that read a table or an index.
func (n planNode) reads() []planNode {
	var found []planNode
	if n.Index != "" || n.Type == "Seq Scan" {
		found = append(found, n)
	}
	for _, child := range n.Plans {
		found = append(found, child.reads()...)
	}
	return found
}
