package console

import (
	"context"
	"net/http"
	"time"

	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/reservation"
)

// overviewData is the first page: whether everything is well, and if not, where
// to look.
type overviewData struct {
	Lease    pgstore.LeaseHolder
	Halts    []view.Task
	NotReady string // why the order fence holds releases back
	Tasks    []view.Task
	Versions []versionRow
	Jobs     []jobRow
	Runs     []runRow
	Problems []string // what could not be read
}

// versionRow is one version of one SKU, over its buckets.
type versionRow struct {
	ActivityID, SKUID string
	Version           int64
	State             string // of all buckets, or "mixed"
	Held              bool
	Buckets           []bucketRow
	Available         int64
	Reserved          int64
	Initial           int64
	Pending           int64
	PendingAge        float64 // seconds; of the oldest that is due
	Due               int64
	DueAge            float64
	Unreadable        bool
	EndsAt            time.Time
}

// bucketRow is one bucket with its live numbers.
type bucketRow struct {
	view.LiveScope

	PendingAge float64
	Due        int64
	DueAge     float64
}

func (c *Console) overview(w http.ResponseWriter, r *http.Request) error {
	ctx, d := r.Context(), c.Daemon
	var data overviewData
	var err error
	if data.Lease, err = d.Postgres.LeaseHolder(ctx, pgstore.LeaseDaemon); err != nil {
		return err
	}
	if data.Tasks, err = c.openTasks(ctx); err != nil {
		return err
	}
	halts, err := d.Postgres.Halts(ctx)
	if err != nil {
		return err
	}
	for _, t := range halts {
		data.Halts = append(data.Halts, view.OfTask(t))
	}
	if err := d.Postgres.FenceReady(ctx); err != nil {
		data.NotReady = err.Error()
	}
	if data.Versions, data.Problems, err = c.versions(ctx, pgstore.ScopeFilter{Live: true}); err != nil {
		return err
	}
	if data.Jobs, err = c.jobRows(ctx); err != nil {
		return err
	}
	if data.Runs, err = c.runRows(ctx, pgstore.RunFilter{Limit: shownRuns}); err != nil {
		return err
	}
	c.render(w, r, http.StatusOK, "overview", data)
	return nil
}

const shownRuns = 5

func (c *Console) openTasks(ctx context.Context) ([]view.Task, error) {
	tasks, err := c.Daemon.Postgres.Tasks(ctx, pgstore.TaskFilter{States: pgstore.Unresolved})
	if err != nil {
		return nil, err
	}
	views := make([]view.Task, len(tasks))
	for i, t := range tasks {
		views[i] = view.OfTask(t)
	}
	return views, nil
}

// versions reads the live numbers of the selected scopes, and what of them
// could not be read.
func (c *Console) versions(ctx context.Context, filter pgstore.ScopeFilter) (rows []versionRow, problems []string, err error) {
	registered, err := c.Daemon.Postgres.Scopes(ctx, filter)
	if err != nil {
		return nil, nil, err
	}
	scopes := make([]reservation.Scope, len(registered))
	for i, s := range registered {
		scopes[i] = s.Scope
	}
	snapshots, backlogs := c.Daemon.Redis.Snapshots(ctx, scopes), c.Daemon.Redis.Backlogs(ctx, scopes)
	for i, s := range registered {
		bucket := bucketRow{LiveScope: view.OfLiveScope(s, snapshots[i])}
		bucket.waits(backlogs[i])
		if bucket.Error != "" {
			problems = append(problems, s.Scope.Tag()+": "+bucket.Error)
		}
		if n := len(rows); n == 0 || !rows[n-1].is(s.Scope) {
			rows = append(rows, versionRow{ActivityID: s.Scope.ActivityID, SKUID: s.Scope.SKUID, Version: s.Scope.Version, EndsAt: s.EndsAt})
		}
		rows[len(rows)-1].add(bucket)
	}
	return rows, problems, nil
}

func (b *bucketRow) waits(backlog redisstore.Backlog) {
	if backlog.Err != nil {
		b.Redis, b.Error = nil, "unreadable: "+backlog.Err.Error()
		return
	}
	b.PendingAge, b.Due, b.DueAge = backlog.PendingAge.Seconds(), backlog.ExpiryDue, backlog.ExpiryAge.Seconds()
}

func (v *versionRow) is(s reservation.Scope) bool {
	return v.ActivityID == s.ActivityID && v.SKUID == s.SKUID && v.Version == s.Version
}

func (v *versionRow) add(b bucketRow) {
	v.Buckets = append(v.Buckets, b)
	v.Held = v.Held || b.Hold != nil
	if b.Redis == nil {
		v.Unreadable = true
		return
	}
	if v.State == "" {
		v.State = b.Redis.State
	} else if v.State != b.Redis.State {
		v.State = "mixed"
	}
	v.Initial += b.Redis.Initial
	v.Available += b.Redis.Available
	v.Reserved += b.Redis.Reserved
	v.Pending += b.Redis.SendPending
	v.Due += b.Due
	v.PendingAge, v.DueAge = max(v.PendingAge, b.PendingAge), max(v.DueAge, b.DueAge)
}

// jobRow is a job with what its last run came to.
type jobRow struct {
	view.Job

	State  string // scheduled, paused, requested or off
	Off    string // the setting that keeps it off
	Result string
	Late   bool       // the last run that ended failed
	Next   *time.Time // nil: paused, or another instance works
}

func (c *Console) jobRows(ctx context.Context) ([]jobRow, error) {
	jobs, err := daemon.ListJobs(ctx, c.Daemon.Postgres)
	if err != nil {
		return nil, err
	}
	next, settings := c.Daemon.NextRuns(), c.Daemon.Config()
	rows := make([]jobRow, len(jobs))
	for i, j := range jobs {
		rows[i] = jobRow{Job: view.OfJob(j), State: "scheduled", Result: view.Counts(j.LastResult), Late: j.LastError != ""}
		if at := next[j.Name]; !j.Paused {
			rows[i].Next = view.OrNull(at)
		}
		switch rows[i].Off = daemon.OffBy(settings, j.Name); {
		case rows[i].Off != "":
			rows[i].State = "off"
		case j.Paused:
			rows[i].State = "paused"
		case !j.RunRequestedAt.IsZero():
			rows[i].State = "requested"
		}
	}
	return rows, nil
}
