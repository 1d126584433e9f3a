package view

import (
	"strconv"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
)

// Task is a task in JSON.
type Task struct {
	ID          string     `json:"id"`
	Kind        string     `json:"kind"`
	Scope       string     `json:"scope"` // a tag, or empty for the whole installation
	Cause       string     `json:"cause"`
	State       string     `json:"state"`
	Count       int64      `json:"count"`
	Occurrences int64      `json:"occurrences"`
	Sample      []string   `json:"sample"`
	FirstSeenAt time.Time  `json:"first_seen_at"`
	LastSeenAt  time.Time  `json:"last_seen_at"`
	DecidedAt   *time.Time `json:"decided_at"`
	DecidedBy   string     `json:"decided_by"`
	Decision    string     `json:"decision"`
}

// OfTask is a task.
func OfTask(t pgstore.Task) Task {
	return Task{
		ID: strconv.FormatInt(t.ID, 10), Kind: t.Kind, Scope: t.Scope, Cause: t.Cause, State: string(t.State),
		Count: t.Count, Occurrences: t.Occurrences, Sample: NonNil(t.Sample),
		FirstSeenAt: t.FirstSeenAt, LastSeenAt: t.LastSeenAt,
		DecidedAt: OrNull(t.DecidedAt), DecidedBy: t.DecidedBy, Decision: t.Decision,
	}
}
