// Package prometheus_test checks the alert rules, their runbooks and the
// dashboard against each other and against the metrics that are exported.
package prometheus_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"go.yaml.in/yaml/v3"
)

const (
	docs          = "../../docs"
	dashboardFile = "../grafana/reconciler.json"
	runbookPrefix = "https://github.com/seckill/reconciler/blob/main/docs/runbooks/"
)

// rule is an alert of alerts.yaml.
type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func alerts(t *testing.T) []rule {
	t.Helper()
	text, err := os.ReadFile("alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []rule `yaml:"rules"`
		} `yaml:"groups"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	var all []rule
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Fatal("alerts.yaml has no rules")
	}
	return all
}

// TestRunbooks: every alert has its page and every page its alert, and the page
// quotes the rule that is in force.
func TestRunbooks(t *testing.T) {
	entries, err := os.ReadDir(filepath.Join(docs, "runbooks"))
	if err != nil {
		t.Fatal(err)
	}
	pages := map[string]bool{}
	for _, e := range entries {
		if name := strings.TrimSuffix(e.Name(), ".md"); name != "README" {
			pages[name] = true
		}
	}
	index, err := os.ReadFile(filepath.Join(docs, "runbooks", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range alerts(t) {
		if !pages[r.Alert] {
			t.Errorf("%s has no page in docs/runbooks", r.Alert)
			continue
		}
		delete(pages, r.Alert)
		if want := runbookPrefix + r.Alert + ".md"; r.Annotations["runbook_url"] != want {
			t.Errorf("%s links %q, want %q", r.Alert, r.Annotations["runbook_url"], want)
		}
		page, err := os.ReadFile(filepath.Join(docs, "runbooks", r.Alert+".md"))
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range []string{"`" + r.Expr + "`", "## Meaning\n", "## First look\n", "## What to do\n", "## Escalate\n"} {
			if !strings.Contains(string(page), part) {
				t.Errorf("the page of %s lacks %q", r.Alert, part)
			}
		}
		if !strings.Contains(string(index), "("+r.Alert+".md)") {
			t.Errorf("docs/runbooks/README.md does not list %s", r.Alert)
		}
		if !slices.Contains([]string{"critical", "warning", "info"}, r.Labels["severity"]) || r.Annotations["summary"] == "" {
			t.Errorf("%s has no severity or no summary", r.Alert)
		}
	}
	if len(pages) > 0 {
		t.Errorf("pages without an alert: %v", slices.Sorted(maps.Keys(pages)))
	}
}

var metricName = regexp.MustCompile(`seckill_[a-z_]+`)

// documented is every name in docs/metrics.md, which a test of the daemon
// compares with what a running one exports. A histogram has three series.
func documented(t *testing.T) map[string]bool {
	t.Helper()
	page, err := os.ReadFile(filepath.Join(docs, "metrics.md"))
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for line := range strings.Lines(string(page)) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		name := metricName.FindString(line)
		names[name] = true
		if strings.Contains(line, "| histogram |") {
			names[name+"_bucket"], names[name+"_sum"], names[name+"_count"] = true, true, true
		}
	}
	return names
}

// TestMetricsExist: rules and dashboard name only metrics that exist.
func TestMetricsExist(t *testing.T) {
	known := documented(t)
	check := func(where, expr string) {
		names := metricName.FindAllString(expr, -1)
		if len(names) == 0 {
			t.Errorf("%s: no metric in %q", where, expr)
		}
		for _, name := range names {
			if !known[name] {
				t.Errorf("%s: %s is not in docs/metrics.md", where, name)
			}
		}
	}
	for _, r := range alerts(t) {
		check(r.Alert, r.Expr)
	}
	for _, q := range queries(t) {
		check(q.panel, q.expr)
	}
}

// TestAlertsAreTested: the rules' own test lets each alert fire, and each stay
// silent.
func TestAlertsAreTested(t *testing.T) {
	text, err := os.ReadFile("alerts.test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Tests []struct {
			Rules []struct {
				Name   string `yaml:"alertname"`
				Alerts []any  `yaml:"exp_alerts"`
			} `yaml:"alert_rule_test"`
		} `yaml:"tests"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	fires, silent := map[string]bool{}, map[string]bool{}
	for _, test := range file.Tests {
		for _, r := range test.Rules {
			fires[r.Name] = fires[r.Name] || len(r.Alerts) > 0
			silent[r.Name] = silent[r.Name] || len(r.Alerts) == 0
		}
	}
	for _, r := range alerts(t) {
		if !fires[r.Alert] || !silent[r.Alert] {
			t.Errorf("alerts.test.yaml: %s fires: %t, stays silent: %t", r.Alert, fires[r.Alert], silent[r.Alert])
		}
	}
}

// TestDashboard: Grafana's own types accept the dashboard, strictly.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard.Dashboard //nolint:staticcheck // dashboardv2 is not what Grafana imports from a file
	// It returns an empty list, which is no nil error, where nothing is wrong.
	err = d.UnmarshalJSONStrict(text)
	if problems, ok := errors.AsType[cog.BuildErrors](err); err != nil && (!ok || len(problems) > 0) {
		t.Fatal(err)
	}
	if len(d.Panels) == 0 {
		t.Error("the dashboard has no panels")
	}
}

// query is an expression of the dashboard.
type query struct{ panel, expr string }

func queries(t *testing.T) []query {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			Title   string `json:"title"`
			Type    string `json:"type"`
			Targets []struct {
				Expr string `json:"expr"`
			} `json:"targets"`
		} `json:"panels"`
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	var all []query
	for _, p := range d.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %s shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			all = append(all, query{p.Title, target.Expr})
		}
	}
	return all
}

// asRules makes a rules file of the dashboard's expressions, for promtool.
func asRules(t *testing.T) []byte {
	t.Helper()
	type record struct {
		Record string `yaml:"record"`
		Expr   string `yaml:"expr"`
	}
	variables := strings.NewReplacer("$__rate_interval", "5m", "$instance", "x")
	var rules []record
	for i, q := range queries(t) {
		expr := variables.Replace(q.expr)
		if strings.Contains(expr, "$") {
			t.Errorf("%s: a variable that is not known here: %s", q.panel, expr)
		}
		rules = append(rules, record{fmt.Sprintf("dashboard:query%d", i), expr})
	}
	text, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": rules}}})
	if err != nil {
		t.Fatal(err)
	}
	return text
}
