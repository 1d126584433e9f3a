package view

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
)

// Job is a job in JSON.
type Job struct {
	Name           string          `json:"name"`
	Paused         bool            `json:"paused"`
	PausedBy       string          `json:"paused_by"`
	RunRequestedAt *time.Time      `json:"run_requested_at"`
	RunRequestedBy string          `json:"run_requested_by"`
	LastStartedAt  *time.Time      `json:"last_started_at"`
	LastFinishedAt *time.Time      `json:"last_finished_at"`
	LastSuccessAt  *time.Time      `json:"last_success_at"`
	LastResult     json.RawMessage `json:"last_result"`
	LastError      string          `json:"last_error"`
}

// OfJob is a job as the registry has it.
func OfJob(j pgstore.Job) Job {
	v := Job{
		Name: j.Name, Paused: j.Paused, PausedBy: j.PausedBy,
		RunRequestedAt: OrNull(j.RunRequestedAt), RunRequestedBy: j.RunRequestedBy,
		LastStartedAt: OrNull(j.LastStartedAt), LastFinishedAt: OrNull(j.LastFinishedAt),
		LastSuccessAt: OrNull(j.LastSuccessAt), LastResult: j.LastResult, LastError: j.LastError,
	}
	if len(v.LastResult) == 0 {
		v.LastResult = json.RawMessage("null")
	}
	return v
}

// Counts writes a result's counts that are not zero, such as "released=3 seen=10".
func Counts(result json.RawMessage) string {
	var values map[string]any
	if err := json.Unmarshal(result, &values); err != nil {
		return ""
	}
	var parts []string
	for name, v := range values {
		if n, ok := v.(float64); ok && n != 0 {
			parts = append(parts, fmt.Sprintf("%s=%.0f", name, n))
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}
