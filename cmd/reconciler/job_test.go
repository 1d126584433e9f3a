package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/view"
)

// runningDaemon holds the lease as a daemon does and answers requests for runs
// with the given error text, or not at all.
func runningDaemon(t *testing.T, url string, answers bool, failure string) {
	t.Helper()
	lease, err := pgstore.AcquireLease(t.Context(), pgstore.LeaseOptions{URL: url, Holder: "test"})
	if err != nil {
		t.Fatal(err)
	}
	store, err := pgstore.Open(t.Context(), pgstore.Config{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for tick := time.NewTicker(20 * time.Millisecond); answers; {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			names, _ := store.TakeRunRequests(ctx) // the next tick asks again
			for _, name := range names {
				now := time.Now()
				err := store.RecordJob(ctx, pgstore.JobRun{
					Name: name, StartedAt: now, FinishedAt: now, Result: map[string]int{"sent": 3}, Error: failure,
				})
				if err != nil {
					t.Error(err)
				}
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		store.Close()
		if err := lease.Release(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

func TestJobRun(t *testing.T) {
	stack := stacktest.Shared(t)
	for name, tt := range map[string]struct {
		answers bool
		failure string
		args    []string
		status  int
		stderr  string
		sent    int // in the last result shown
	}{
		"request only": {args: nil, status: 0},
		"waits":        {answers: true, args: []string{"--wait", "1m"}, status: 0, sent: 3},
		"run fails":    {answers: true, failure: "redis is gone", args: []string{"--wait", "1m"}, status: 1, stderr: "the run of scanner failed: redis is gone", sent: 3},
		"no answer":    {args: []string{"--wait", "300ms"}, status: 3, stderr: "did not end within 300ms", sent: -1},
	} {
		t.Run(name, func(t *testing.T) {
			url := stacktest.Database(t, stack)
			t.Setenv("RECONCILER_POSTGRES_URL", url)
			runningDaemon(t, url, tt.answers, tt.failure)
			status, stdout, stderr := run(t, append([]string{"job", "run", "scanner", "--output", "json"}, tt.args...)...)
			if status != tt.status || !strings.Contains(stderr, tt.stderr) {
				t.Fatalf("status %d, want %d; %s", status, tt.status, stderr)
			}
			if tt.sent < 0 {
				if stdout != "" {
					t.Errorf("a result without a run: %s", stdout)
				}
				return
			}
			var got struct{ Jobs []view.Job }
			wantJSON(t, stdout, &got)
			if len(got.Jobs) != 1 || got.Jobs[0].Name != "scanner" {
				t.Fatalf("got %s", stdout)
			}
			if tt.answers {
				var result struct {
					Sent int `json:"sent"`
				}
				if err := json.Unmarshal(got.Jobs[0].LastResult, &result); err != nil || result.Sent != tt.sent {
					t.Errorf("result %s, %v", got.Jobs[0].LastResult, err)
				}
			} else if got.Jobs[0].RunRequestedAt == nil || got.Jobs[0].RunRequestedBy == "" {
				t.Errorf("the request is not shown: %s", stdout)
			}
		})
	}
}
