package pgstore

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// ExpectedQueue is a topic's queues on one broker, as they were ever seen. A
// sweep that lacks one is UNKNOWN until the broker is forgotten (services §3).
type ExpectedQueue struct {
	Broker string
	Topic  string
	Queues int // the most seen; their ids are 0 … Queues−1
}

// RecordQueues remembers what a route shows. A smaller number than before
// changes nothing: the queues that are missing now may hold messages.
func (s *Store) RecordQueues(ctx context.Context, seen []ExpectedQueue) error {
	if len(seen) == 0 {
		return nil
	}
	brokers, topics, queues := make([]string, len(seen)), make([]string, len(seen)), make([]int, len(seen))
	for i, q := range seen {
		brokers[i], topics[i], queues[i] = q.Broker, q.Topic, q.Queues
	}
	return s.write(ctx, "remember queues", func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `
			INSERT INTO seckill.expected_queue AS e (broker, topic, queues)
			SELECT broker, topic, max(queues) FROM unnest($1::text[], $2::text[], $3::integer[]) AS u (broker, topic, queues)
			GROUP BY broker, topic ORDER BY broker, topic
			ON CONFLICT (broker, topic) DO UPDATE
			SET queues = greatest(e.queues, excluded.queues), last_seen_at = clock_timestamp()`, brokers, topics, queues)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `DELETE FROM seckill.forgotten_broker WHERE broker = ANY ($1)`, brokers)
		return err
	})
}

// ExpectedQueues lists all that were ever seen and not forgotten.
func (s *Store) ExpectedQueues(ctx context.Context) ([]ExpectedQueue, error) {
	return collect(ctx, s, "list the expected queues", pgx.RowToStructByPos[ExpectedQueue],
		`SELECT broker, topic, queues FROM seckill.expected_queue ORDER BY broker, topic`)
}

// ForgottenBrokers are those that a person said will not come back, and that
// were not seen since.
func (s *Store) ForgottenBrokers(ctx context.Context) ([]string, error) {
	return collect(ctx, s, "list the forgotten brokers", pgx.RowTo[string], `SELECT broker FROM seckill.forgotten_broker ORDER BY broker`)
}

// ForgetBroker drops a broker that will not come back: messages that only it
// holds count as lost from now on. With actor and reason in the audit trail. It
// may be one that only positions name: it was gone before the daemon first
// looked. [ErrNotFound]: it is forgotten already. Needs seckill_operator.
func (s *Store) ForgetBroker(ctx context.Context, broker, actor, reason string) error {
	return s.write(ctx, "forget broker "+broker, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `DELETE FROM seckill.expected_queue WHERE broker = $1 RETURNING topic`, broker)
		if err != nil {
			return err
		}
		topics, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, `INSERT INTO seckill.forgotten_broker (broker, forgotten_by) VALUES ($1, $2) ON CONFLICT DO NOTHING`, broker, actor)
		if err != nil {
			return err
		}
		if len(topics) == 0 && tag.RowsAffected() == 0 {
			return fmt.Errorf("broker %s is forgotten already: %w", broker, ErrNotFound)
		}
		return addAudit(ctx, tx, AuditEntry{
			Actor: actor, Action: "broker_forgotten", Subject: broker, Reason: reason, Detail: map[string]any{"topics": topics},
		})
	})
}
