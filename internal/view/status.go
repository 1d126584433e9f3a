package view

import (
	"time"

	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/pass"
)

// Status is a status in JSON.
type Status struct {
	Schema     int            `json:"schema"`
	Lease      Lease          `json:"lease"`
	Scopes     []Backlog      `json:"scopes"`
	Waiting    []pass.Counted `json:"waiting"`
	Looked     int            `json:"looked_at"`
	Truncated  bool           `json:"truncated"`
	Halts      []Task         `json:"halts"`
	NotReady   string         `json:"fence_not_ready"` // why the order fence holds releases back, or empty
	OpenTasks  int            `json:"open_tasks"`
	Jobs       []Job          `json:"jobs"`
	Incomplete []string       `json:"incomplete"`
}

// Lease is who works.
type Lease struct {
	Held        bool       `json:"held"`
	Holder      string     `json:"holder"`
	AcquiredAt  *time.Time `json:"acquired_at"`
	HeartbeatAt *time.Time `json:"heartbeat_at"`
}

// Backlog is what waits in a scope.
type Backlog struct {
	Scope             string  `json:"scope"`
	SendPending       int64   `json:"send_pending"`
	SendOldestSeconds float64 `json:"send_pending_oldest_seconds"`
	Due               int64   `json:"due"`
	DueOldestSeconds  float64 `json:"due_oldest_seconds"`
	Error             string  `json:"error,omitempty"`
}

// OfStatus is how the installation stands.
func OfStatus(s daemon.Status) Status {
	v := Status{
		Schema: 1, Waiting: NonNil(s.Waiting), Looked: s.Looked, Truncated: s.Truncated, OpenTasks: len(s.Tasks), NotReady: s.NotReady,
		Incomplete: NonNil(s.Incomplete), Scopes: []Backlog{}, Halts: []Task{}, Jobs: []Job{},
		Lease: Lease{s.Lease.Held, s.Lease.Holder, OrNull(s.Lease.AcquiredAt), OrNull(s.Lease.HeartbeatAt)},
	}
	for _, b := range s.Backlogs {
		row := Backlog{
			Scope: b.Scope.Tag(), SendPending: b.Pending, SendOldestSeconds: b.PendingAge.Seconds(),
			Due: b.ExpiryDue, DueOldestSeconds: b.ExpiryAge.Seconds(),
		}
		if b.Err != nil {
			row = Backlog{Scope: b.Scope.Tag(), Error: b.Err.Error()}
		}
		v.Scopes = append(v.Scopes, row)
	}
	for _, t := range s.Halts {
		v.Halts = append(v.Halts, OfTask(t))
	}
	for _, j := range s.Jobs {
		v.Jobs = append(v.Jobs, OfJob(j))
	}
	return v
}
