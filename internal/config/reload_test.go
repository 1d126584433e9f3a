package config

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestReload(t *testing.T) {
	now, next := Default(), Default()
	next.Log.Level = "debug"
	next.Fencer.Settle = time.Minute
	next.Fencer.MaxRelease.Min = 7
	next.Mode = ModeAct
	next.Redis.Addrs = []string{"10.0.0.1:6379"}
	next.Postgres.URL = "postgres://elsewhere/seckill"
	merged, taken, restart := now.Reload(next)
	if diff := cmp.Diff([]string{"fencer.settle", "fencer.max_release.min", "log.level"}, taken); diff != "" {
		t.Errorf("taken over (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"mode", "redis.addrs", "postgres.url"}, restart); diff != "" {
		t.Errorf("needs a restart (-want +got):\n%s", diff)
	}
	want := Default()
	want.Log.Level, want.Fencer.Settle, want.Fencer.MaxRelease.Min = "debug", time.Minute, 7
	if diff := cmp.Diff(want, merged); diff != "" {
		t.Errorf("merged (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(Default(), now); diff != "" {
		t.Errorf("the settings before were changed:\n%s", diff)
	}
	_, taken, restart = merged.Reload(next)
	if len(taken) != 0 || len(restart) != 3 {
		t.Errorf("again: took over %v, restart for %v", taken, restart)
	}
}

// Only what is read anew for each pass or each send may be marked.
func TestReloadable(t *testing.T) {
	var got []string
	for _, f := range fields {
		if f.reload {
			got = append(got, f.path)
		}
	}
	want := []string{
		"rocketmq.send_rate",
		"scanner.send_grace", "scanner.unsent", "scanner.max_refusals",
		"fencer.settle", "fencer.recheck", "fencer.lost_message", "fencer.max_resends", "fencer.dead_letter",
		"fencer.dead_letter_after", "fencer.confirm", "fencer.escalate_after", "fencer.backoff_min", "fencer.backoff_max",
		"fencer.max_release.percent", "fencer.max_release.min", "fencer.max_release.window",
		"log.level",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("marked reload (-want +got):\n%s", diff)
	}
}
