package observe

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/reservation"
)

func TestLogger(t *testing.T) {
	var out bytes.Buffer
	log, err := NewLogger(&out, "json", slog.LevelWarn)
	if err != nil {
		t.Fatal(err)
	}
	h := NewUserHasher("key")
	log.Info("not written")
	log.Warn("deferred", Scope(reservation.Scope{ActivityID: "a1", SKUID: "s1", Version: 7, Bucket: 2}), h.User("user-1"))
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("%v in %s", err, out.String())
	}
	if at, ok := line["time"].(string); !ok || !strings.HasSuffix(at, "Z") {
		t.Errorf("time %v is not UTC", line["time"])
	}
	delete(line, "time")
	want := map[string]any{
		"level": "WARN", "msg": "deferred", "activity_id": "a1", "sku_id": "s1",
		"activity_version": 7.0, "bucket_id": 2.0,
		// printf %s user-1 | openssl dgst -sha256 -hmac key
		"user_id_hash": "8a32e68074948afd0d37d5a1b6be3292",
	}
	if diff := cmp.Diff(want, line); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}

	out.Reset()
	log, err = NewLogger(&out, "text", slog.LevelDebug)
	if err != nil {
		t.Fatal(err)
	}
	log.Debug("hello")
	if !strings.Contains(out.String(), "level=DEBUG msg=hello") {
		t.Errorf("text: %s", out.String())
	}
	if _, err := NewLogger(io.Discard, "xml", slog.LevelInfo); err == nil {
		t.Error("format xml: accepted")
	}
	if level, err := ParseLevel("warn"); err != nil || level != slog.LevelWarn {
		t.Errorf("warn: %v, %v", level, err)
	}
	if _, err := ParseLevel("loud"); err == nil {
		t.Error("level loud: accepted")
	}
}

func TestUserHasher(t *testing.T) {
	a, b, drawn := NewUserHasher("a"), NewUserHasher("b"), NewUserHasher("")
	if a.Hash("u") != NewUserHasher("a").Hash("u") {
		t.Error("one key, one user, two hashes")
	}
	if a.Hash("u") == b.Hash("u") || a.Hash("u") == a.Hash("v") {
		t.Error("two keys or two users have one hash")
	}
	if first, again := drawn.Hash("u"), drawn.Hash("u"); first != again || first == NewUserHasher("").Hash("u") {
		t.Error("a drawn key is not one per hasher")
	}
}

// scrape is what Prometheus would read, without the runtime's metrics.
func scrape(t *testing.T, m *Metrics) string {
	t.Helper()
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	var out []string
	for line := range strings.Lines(rec.Body.String()) {
		if strings.HasPrefix(line, "seckill_") && !strings.Contains(line, "_bucket{") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}

func TestMetrics(t *testing.T) {
	m := NewMetrics("v1")
	if got, want := scrape(t, m), "seckill_build_info{version=\"v1\"} 1\n"; got != want {
		t.Errorf("metrics that nothing has set are exported:\n%s", got)
	}
	at := time.Unix(1000, 500e6)
	m.JobStarted(schedule.Run{})
	m.JobFinished(schedule.Run{
		Job: "scanner", Started: at.Add(-2 * time.Second), Finished: at,
		Outcome: schedule.Succeeded, Items: schedule.Result{"sent": 3, "failed": 0},
	})
	m.JobFinished(schedule.Run{
		Job: "scanner", Started: at, Finished: at.Add(time.Second),
		Outcome: schedule.Panicked, Items: schedule.Result{"sent": 1}, Err: errors.New("x"),
	})
	m.JobSkipped("scanner", schedule.ErrAlreadyRunning)
	m.SetBacklog("scanner", 7, 90*time.Second)
	m.SetHalted("fencer", 1)
	m.Decided("9", "send", 4)
	m.SetSendPending(11, 1500*time.Millisecond)
	m.SetReservationExpired(12, 0)
	want := `seckill_build_info{version="v1"} 1
seckill_decisions_total{row="9",verb="send"} 4
seckill_job_backlog{worker="scanner"} 7
seckill_job_duration_seconds_sum{worker="scanner"} 3
seckill_job_duration_seconds_count{worker="scanner"} 2
seckill_job_halted{worker="fencer"} 1
seckill_job_items_total{result="sent",worker="scanner"} 4
seckill_job_last_success_timestamp_seconds{worker="scanner"} 1000.5
seckill_job_oldest_age_seconds{worker="scanner"} 90
seckill_job_runs_total{result="panic",worker="scanner"} 1
seckill_job_runs_total{result="skipped",worker="scanner"} 1
seckill_job_runs_total{result="success",worker="scanner"} 1
seckill_reservation_expired_count 12
seckill_reservation_expired_oldest_age_seconds 0
seckill_send_pending_count 11
seckill_send_pending_oldest_age_seconds 1.5
`
	if diff := cmp.Diff(want, scrape(t, m)); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestMetricConventions lints what is exported; the two names that the data
// contract fixes are the only exceptions.
func TestMetricConventions(t *testing.T) {
	m := NewMetrics("v1")
	m.SetSendPending(1, 0)
	m.SetReservationExpired(1, 0)
	m.SetBacklog("scanner", 1, 0)
	m.SetHalted("fencer", 0)
	m.Decided("9", "send", 1)
	m.JobFinished(schedule.Run{Job: "scanner", Outcome: schedule.Succeeded, Items: schedule.Result{"sent": 1}})
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	fixed := map[string]bool{"seckill_send_pending_count": true, "seckill_reservation_expired_count": true}
	for _, p := range problems {
		if !fixed[p.Metric] && strings.HasPrefix(p.Metric, "seckill_") {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
}
