package client

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/seckill/reconciler/lua"
)

// hottest is how many scopes the metrics by rank show.
const hottest = 5

// metrics are the hot path's (spec §7). No label is an id of anything: scopes
// appear by their rank among the hottest, and [Gateway.HotScopes] names them.
type metrics struct {
	duration     prometheus.Histogram
	codes        *prometheus.CounterVec
	failures     *prometheus.CounterVec
	timeouts     prometheus.Counter
	unknown      prometheus.Counter
	localRejects prometheus.Counter
	soldOut      prometheus.Counter
	falseSoldOut prometheus.Counter
	invalidation *prometheus.HistogramVec
	trips        *prometheus.CounterVec
}

const namespace = "seckill"

func newMetrics() *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help})
	}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	return &metrics{
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Name: "reserve_lua_duration_seconds", Help: "Time of one attempt to run reserve.lua, as the gateway sees it.",
			Buckets: []float64{.00025, .0005, .001, .002, .003, .005, .008, .012, .02, .03, .04, .08, .2},
		}),
		codes:        vec("reserve_lua_rc_total", "Replies of reserve.lua by code.", "code", "replay"),
		failures:     vec("reserve_lua_error_total", "Attempts to run reserve.lua without a reply, by kind of failure.", "kind"),
		timeouts:     counter("redis_timeout_total", "Attempts to run reserve.lua that used up their budget."),
		unknown:      counter("redis_outcome_unknown_total", "Attempts to run reserve.lua of which nobody knows whether it ran."),
		localRejects: counter("local_soldout_reject_total", "Requests answered by the local sold-out marker."),
		soldOut:      counter("redis_soldout_total", "Requests that Redis answered with SOLD_OUT."),
		falseSoldOut: counter("soldout_false_positive_total", "Local sold-out markers that stood although units had come free."),
		invalidation: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: namespace, Name: "soldout_invalidation_delay_seconds",
			Help:    "How long such a marker had stood when a notice or a re-check ended it: the units came free at some time in it.",
			Buckets: []float64{.01, .05, .1, .2, .3, .4, .5, 1, 5, 30},
		}, []string{"by"}),
		trips: vec("sku_stopped_total", "Times that a SKU was stopped, by kind of failure.", "kind"),
	}
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{
		m.duration, m.codes, m.failures, m.timeouts, m.unknown, m.localRejects, m.soldOut, m.falseSoldOut, m.invalidation, m.trips,
	}
}

func (m *metrics) replied(r lua.ReserveReply) {
	m.codes.WithLabelValues(r.Code.String(), strconv.FormatBool(r.Replay)).Inc()
	if r.Code == lua.ReserveSoldOut {
		m.soldOut.Inc()
	}
}

func gaugeDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(namespace+"_"+name, help, labels, nil)
}

var (
	descStopped   = gaugeDesc("sku_stopped", "SKUs that are stopped now.")
	descPoolWait  = gaugeDesc("redis_pool_wait_seconds_total", "Time that commands waited for a connection of the gateway's pools.")
	descPoolWaits = gaugeDesc("redis_pool_waits_total", "Commands that waited for a connection.")
	descQPS       = gaugeDesc("bucket_qps", "Requests in the last full second of the hottest buckets.", "rank")
	descP99       = gaugeDesc("bucket_lua_p99_seconds", "P99 of reserve.lua of the hottest buckets, the upper bound of its class.", "rank")
	descAvailable = gaugeDesc("bucket_available", "Units available in the hottest buckets, as the last reply said.", "rank")
	descSoldOut   = gaugeDesc("bucket_soldout_time_seconds", "From the first request to the sell-out of the hottest buckets.", "rank")
)

// Describe is part of [prometheus.Collector].
func (g *Gateway) Describe(out chan<- *prometheus.Desc) {
	for _, c := range g.metrics.collectors() {
		c.Describe(out)
	}
	for _, d := range []*prometheus.Desc{descStopped, descPoolWait, descPoolWaits, descQPS, descP99, descAvailable, descSoldOut} {
		out <- d
	}
}

// Collect is part of [prometheus.Collector]: register the gateway where your
// metrics are.
func (g *Gateway) Collect(out chan<- prometheus.Metric) {
	for _, c := range g.metrics.collectors() {
		c.Collect(out)
	}
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(descStopped, float64(len(g.Stopped())))
	wait, waits := g.poolWait()
	out <- prometheus.MustNewConstMetric(descPoolWait, prometheus.CounterValue, wait.Seconds())
	out <- prometheus.MustNewConstMetric(descPoolWaits, prometheus.CounterValue, float64(waits))
	for i, s := range g.HotScopes(hottest) {
		rank := strconv.Itoa(i + 1)
		gauge(descQPS, s.PerSecond, rank)
		gauge(descP99, s.LuaP99.Seconds(), rank)
		if s.Available != lua.Missing {
			gauge(descAvailable, float64(s.Available), rank)
		}
		if s.SoldOutAfter > 0 {
			gauge(descSoldOut, s.SoldOutAfter.Seconds(), rank)
		}
	}
}
