package observe

import (
	"maps"
	"slices"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// metric is a name with what it means.
type metric struct {
	name, help string
	labels     []string
	counter    bool // the value counts up where it comes from
}

func (d metric) desc() *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", d.name), d.help, d.labels, nil)
}

// board shows what was last sampled elsewhere. A sample replaces the one before
// as a whole, so that a server, task or check that is gone is gone here too, and
// a scrape never meets half of it.
type board struct {
	metrics map[string]metric
	descs   map[string]*prometheus.Desc

	mu      sync.Mutex
	samples map[string][]prometheus.Metric // by group
}

func newBoard(groups ...[]metric) *board {
	b := &board{metrics: map[string]metric{}, descs: map[string]*prometheus.Desc{}, samples: map[string][]prometheus.Metric{}}
	for _, group := range groups {
		for _, d := range group {
			b.metrics[d.name], b.descs[d.name] = d, d.desc()
		}
	}
	return b
}

// Describe is part of [prometheus.Collector].
func (b *board) Describe(out chan<- *prometheus.Desc) {
	for _, name := range slices.Sorted(maps.Keys(b.descs)) {
		out <- b.descs[name]
	}
}

// Collect is part of [prometheus.Collector].
func (b *board) Collect(out chan<- prometheus.Metric) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, group := range slices.Sorted(maps.Keys(b.samples)) {
		for _, m := range b.samples[group] {
			out <- m
		}
	}
}

// show replaces the samples of a group.
func (b *board) show(group string, samples *samples) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.samples[group] = samples.list
}

// clear takes everything down.
func (b *board) clear() {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.samples)
}

// samples gathers the values of one group.
type samples struct {
	board *board
	list  []prometheus.Metric
}

func (b *board) sample() *samples { return &samples{board: b} }

func (s *samples) set(name string, value float64, labels ...string) {
	kind := prometheus.GaugeValue
	if s.board.metrics[name].counter {
		kind = prometheus.CounterValue
	}
	s.list = append(s.list, prometheus.MustNewConstMetric(s.board.descs[name], kind, value, labels...))
}

func (s *samples) flag(name string, on bool, labels ...string) {
	value := 0.0
	if on {
		value = 1
	}
	s.set(name, value, labels...)
}
