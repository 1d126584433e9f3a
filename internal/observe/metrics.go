package observe

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/seckill/reconciler/internal/schedule"
)

const namespace = "seckill"

// Metrics is the process's metrics. No label is an id of a user, reservation,
// activity or scope: their number has no bound. A metric that nothing has set
// yet is not exported. docs/metrics.md lists them all.
//
// It is a [schedule.Recorder]. The label worker is a job's name, since "job" is
// taken by Prometheus itself. Names are those of spec §7 where it has one.
type Metrics struct {
	registry *prometheus.Registry

	runs        *prometheus.CounterVec
	duration    *prometheus.HistogramVec
	lastSuccess *prometheus.GaugeVec
	items       *prometheus.CounterVec
	backlog     *prometheus.GaugeVec
	oldestAge   *prometheus.GaugeVec
	halted      *prometheus.GaugeVec
	decisions   *prometheus.CounterVec
	pending     *prometheus.GaugeVec // without labels, so that they are absent until set
	pendingAge  *prometheus.GaugeVec
	expired     *prometheus.GaugeVec
	expiredAge  *prometheus.GaugeVec
	evidence    evidence
	lease       lease
	board       *board
	compared    *prometheus.GaugeVec
	findings    *prometheus.GaugeVec
	invariant   *prometheus.GaugeVec
	deviation   *prometheus.GaugeVec
	deliveries  *prometheus.CounterVec
}

var _ schedule.Recorder = (*Metrics)(nil)

// NewMetrics returns metrics that are exported under the namespace seckill, and
// those of the Go runtime and the process beside them.
func NewMetrics(version string) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry()}
	worker := []string{"worker"}
	m.runs = counter("job_runs_total", "Runs of a job by how they ended; skipped ones did not take place.", "worker", "result")
	m.duration = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Namespace: namespace, Name: "job_duration_seconds", Help: "Time of one run of a job.",
		Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300},
	}, worker)
	m.lastSuccess = gauge("job_last_success_timestamp_seconds", "When a job last ended without an error.", worker...)
	m.items = counter("job_items_total", "Items that a job handled, by what became of them.", "worker", "result")
	m.backlog = gauge("job_backlog", "Items that were due for a job and not yet handled.", worker...)
	m.oldestAge = gauge("job_oldest_age_seconds", "How long the oldest of a job's due items has been due.", worker...)
	m.halted = gauge("job_halted", "Scopes for which a job has halted, such as by a release storm.", worker...)
	m.decisions = counter("decisions_total", "Decisions by row of the decision table (orphan: the hash is gone) and verb.", "row", "verb")
	m.pending = gauge("send_pending_count", "Reservations still to be sent or of unknown outcome, over all scopes.")
	m.pendingAge = gauge("send_pending_oldest_age_seconds", "How long the oldest of them has been due.")
	m.expired = gauge("reservation_expired_count", "Undecided reservations past their expiry or next check, over all scopes.")
	m.expiredAge = gauge("reservation_expired_oldest_age_seconds", "How long the oldest of them has been due.")
	m.compared = gauge("reconcile_scopes", "Scopes by the verdict of the last pass of that mode.", "mode", "verdict")
	m.findings = gauge("reconcile_findings", "Findings that stood after the last pass of that mode, by check.", "mode", "check")
	m.invariant = gauge("stock_invariant_deviation", "Units by which initial differs from available + reserved, over all scopes, as last compared.")
	m.deviation = gauge("stock_count_deviation", "Units by which reserved differs from reservations and orders, over all scopes, as last compared.")
	m.deliveries = counter("webhook_requests_total", "Requests to the webhook by how they ended.", "result")
	m.evidence, m.lease = newEvidence(), newLease()
	m.board = newBoard(redisMetrics, stockMetrics, keyMetrics, workMetrics, reconcileMetrics, serviceMetrics)
	build := gauge("build_info", "1, with the version of this build.", "version")
	build.WithLabelValues(version).Set(1)

	m.registry.MustRegister(
		m.runs, m.duration, m.lastSuccess, m.items, m.backlog, m.oldestAge, m.halted, m.decisions,
		m.pending, m.pendingAge, m.expired, m.expiredAge, m.compared, m.findings, m.invariant, m.deviation, m.deliveries, build,
		m.evidence.queries, m.evidence.failures, m.evidence.complete, m.lease.held, m.lease.since, m.lease.losses, m.board,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return m
}

func counter(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func gauge(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

// Registry is where other packages register collectors of their own.
func (m *Metrics) Registry() prometheus.Registerer { return m.registry }

// Gatherer is what is exported.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// Handler serves the metrics to Prometheus.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry})
}

// JobStarted is part of [schedule.Recorder]; what matters is known at the end.
func (m *Metrics) JobStarted(schedule.Run) {}

// JobFinished counts a run, its time and its items.
func (m *Metrics) JobFinished(run schedule.Run) {
	m.runs.WithLabelValues(run.Job, string(run.Outcome)).Inc()
	m.duration.WithLabelValues(run.Job).Observe(run.Finished.Sub(run.Started).Seconds())
	if run.Outcome == schedule.Succeeded {
		m.lastSuccess.WithLabelValues(run.Job).Set(float64(run.Finished.UnixMilli()) / 1000)
	}
	for result, n := range run.Items {
		if n > 0 {
			m.items.WithLabelValues(run.Job, result).Add(float64(n))
		}
	}
}

// JobSkipped counts a scheduled run that did not take place.
func (m *Metrics) JobSkipped(job string, _ error) {
	m.runs.WithLabelValues(job, "skipped").Inc()
}

// SetBacklog says how many due items a job has left, and for how long the
// oldest has been due.
func (m *Metrics) SetBacklog(job string, items int, oldest time.Duration) {
	m.backlog.WithLabelValues(job).Set(float64(items))
	m.oldestAge.WithLabelValues(job).Set(oldest.Seconds())
}

// SetHalted says for how many scopes a job has halted.
func (m *Metrics) SetHalted(job string, scopes int) {
	m.halted.WithLabelValues(job).Set(float64(scopes))
}

// Decided counts n decisions of a row, by its shown name, with their verb.
func (m *Metrics) Decided(row, verb string, n int) {
	m.decisions.WithLabelValues(row, verb).Add(float64(n))
}

// SetSendPending says how many members send_pending has over all scopes, and
// for how long the oldest has been due (0: none is).
func (m *Metrics) SetSendPending(members int64, oldest time.Duration) {
	m.pending.WithLabelValues().Set(float64(members))
	m.pendingAge.WithLabelValues().Set(oldest.Seconds())
}

// SetReservationExpired says how many members of reservation_expiry are due
// over all scopes, and for how long the oldest has been due.
func (m *Metrics) SetReservationExpired(due int64, oldest time.Duration) {
	m.expired.WithLabelValues().Set(float64(due))
	m.expiredAge.WithLabelValues().Set(oldest.Seconds())
}

// SetReconciled says what a pass of the mode found: scopes by verdict, and
// findings by check. Checks that it did not make keep what they had.
func (m *Metrics) SetReconciled(mode string, scopes, findings map[string]int) {
	for verdict, n := range scopes {
		m.compared.WithLabelValues(mode, verdict).Set(float64(n))
	}
	for check, n := range findings {
		m.findings.WithLabelValues(mode, check).Set(float64(n))
	}
}

// SetDeviation says by how many units the sides differ, over all scopes.
func (m *Metrics) SetDeviation(invariant, count int64) {
	m.invariant.WithLabelValues().Set(float64(invariant))
	m.deviation.WithLabelValues().Set(float64(count))
}

// WebhookAnswered counts a request to the webhook.
func (m *Metrics) WebhookAnswered(result string) { m.deliveries.WithLabelValues(result).Inc() }
