package daemon_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
)

// The daemon purges by itself only when it was told to, and says so in the audit
// trail.
func TestPurgeBySchedule(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), hurried, func(c *config.Config) { c.Purge.Schedule, c.Purge.TasksAfter = "@every 100ms", time.Hour })
	s.exec(`INSERT INTO seckill.manual_task (kind, cause, count, state, decided_at) VALUES
		('send_blocked', 'old', 1, 'resolved', clock_timestamp() - interval '2 hours'), ('send_blocked', 'new', 1, 'resolved', clock_timestamp())`)
	service := s.serve()
	s.eventually(time.Minute, func() error {
		var left, audited int
		err := s.db.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM seckill.manual_task WHERE kind = 'send_blocked'),
			(SELECT count(*) FROM seckill.audit_log WHERE actor = 'reconciler' AND action = 'purge_ended')`).Scan(&left, &audited)
		if err == nil && (left != 1 || audited == 0) {
			err = errors.New("the old task is still there, or nobody says that it went")
		}
		return err
	})
	service.end()
	if !slices.Contains(daemon.JobNames(), daemon.JobPurge) {
		t.Errorf("the job %s is in no list", daemon.JobPurge)
	}
}
