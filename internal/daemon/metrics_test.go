package daemon_test

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

// documented is a row of docs/metrics.md.
type documented struct {
	kind   string
	labels []string
	rare   bool // only exported where something applies
}

var metricRow = regexp.MustCompile("^\\| `(seckill_[a-z_]+)`( ¹)? \\| (counter|gauge|histogram) \\| ([^|]*) \\| ([^|]*) \\| ([^|]+) \\|$")

// readMetricsPage reads the tables of the daemon's part of docs/metrics.md.
func readMetricsPage(t *testing.T) map[string]documented {
	t.Helper()
	root, err := devstack.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	daemons, _, found := strings.Cut(string(page), "\n## The client library\n")
	if !found {
		t.Fatal("docs/metrics.md has no part on the client library")
	}
	rows := map[string]documented{}
	for line := range strings.Lines(daemons) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		m := metricRow.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			t.Errorf("not a row of five columns: %s", line)
			continue
		}
		d := documented{kind: m[3], rare: m[2] != ""}
		for label := range strings.SplitSeq(m[5], ",") {
			if label = strings.Trim(strings.TrimSpace(label), "`"); label != "–" {
				d.labels = append(d.labels, label)
			}
		}
		slices.Sort(d.labels)
		rows[m[1]] = d
	}
	return rows
}

// scraped is what a daemon exports, as Prometheus reads it.
func scraped(t *testing.T, address string) map[string]*dto.MetricFamily {
	t.Helper()
	reply, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reply.Body.Close() }()
	if reply.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(reply.Body)
		t.Fatalf("%s: %s", reply.Status, text)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(reply.Body)
	if err != nil {
		t.Fatal(err)
	}
	maps.DeleteFunc(families, func(name string, _ *dto.MetricFamily) bool { return !strings.HasPrefix(name, "seckill_") })
	return families
}

func kindOf(f *dto.MetricFamily) string { return strings.ToLower(f.GetType().String()) }

func labelsOf(f *dto.MetricFamily) []string {
	names := map[string]bool{}
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			names[l.GetName()] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// observedSale is a sale whose daemon has had something of everything to count.
func observedSale(t *testing.T, stack *devstack.Stack, change ...func(*config.Config)) (s *sale, address string) {
	t.Helper()
	s = newSale(t, stack, append(change, func(c *config.Config) {
		hurried(c)
		c.Reconcile.Settle = 100 * time.Millisecond
		c.Reconcile.Quick, c.Reconcile.Deep = "* * * * * *", "* * * * * *"
		// A cluster has what a single server has not: replicas and slots.
		c.Redis.Addrs = stack.Cluster().Addrs()
	})...)
	order := s.expired(reservation.StatusSendUnknown)
	s.mustOrder(order)
	s.expired(reservation.StatusEnqueued)
	s.expired()
	s.exec(`INSERT INTO seckill.manual_task (kind, scope, cause, count) VALUES ('dead_letter', '', 'test', 1)`)
	return s, s.serve().address()
}

// address is where the daemon serves HTTP.
func (r *service) address() string {
	r.s.t.Helper()
	const line = "listening"
	r.awaitLog(1, line)
	r.log.mu.Lock()
	defer r.log.mu.Unlock()
	for _, l := range r.log.lines {
		if _, address, found := strings.Cut(l.text, line+" address="); found {
			return address
		}
	}
	r.s.t.Fatal("the daemon does not say where it listens")
	return ""
}

// TestMetricsPage compares docs/metrics.md with what a running daemon exports,
// in both directions: name, type and labels. No label's value is an id.
func TestMetricsPage(t *testing.T) {
	rows := readMetricsPage(t)
	s, address := observedSale(t, stacktest.Shared(t))
	s.awaitExported(address, func(name string) bool { return !rows[name].rare }, slices.Collect(maps.Keys(rows)))
	for name, family := range scraped(t, address) {
		row, there := rows[name]
		switch {
		case !there:
			t.Errorf("%s is exported and not documented (%s, labels %v: %s)", name, kindOf(family), labelsOf(family), family.GetHelp())
		case row.kind != kindOf(family) || !slices.Equal(row.labels, labelsOf(family)):
			t.Errorf("%s is a %s with labels %v, the page says %s with %v", name, kindOf(family), labelsOf(family), row.kind, row.labels)
		}
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				if v := l.GetValue(); strings.Contains(v, s.scope.ActivityID) || len(v) == 26 {
					t.Errorf("%s: label %s is %q", name, l.GetName(), v)
				}
			}
		}
	}
}

// awaitExported waits until the daemon exports the wanted ones of the names.
func (s *sale) awaitExported(address string, wanted func(name string) bool, names []string) {
	s.t.Helper()
	store, err := pgstore.Open(s.t.Context(), pgstore.Config{URL: s.db.Config().ConnString()})
	if err != nil {
		s.t.Fatal(err)
	}
	defer store.Close()
	s.eventually(2*time.Minute, func() error {
		// Samples come every half minute: do not wait for the next one.
		if err := store.RequestRun(s.t.Context(), daemon.JobProbe, "test"); err != nil {
			return err
		}
		time.Sleep(time.Second)
		exported := scraped(s.t, address)
		for _, name := range names {
			if _, there := exported[name]; !there && wanted(name) {
				return fmt.Errorf("%s is not exported", name)
			}
		}
		return nil
	})
}
