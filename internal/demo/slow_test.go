//go:build slow

package demo_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/demo"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/lua"
)

// small is a demo that is over soon.
func small(t *testing.T) demo.Options {
	t.Helper()
	root, err := devstack.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	o := demo.Default()
	o.Dir = t.TempDir()
	o.Binary = filepath.Join(o.Dir, "reconciler")
	o.Users, o.Units, o.Rate, o.Share = 1500, 600, 300, 0.05
	build := exec.CommandContext(t.Context(), "go", "build", "-o", o.Binary, "./cmd/reconciler")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the reconciler: %v\n%s", err, out)
	}
	return o
}

// TestSlowDemo plays the whole demo in small.
func TestSlowDemo(t *testing.T) {
	o := small(t)
	var progress bytes.Buffer
	o.Progress = &progress
	report, err := demo.Run(t.Context(), o)
	if err != nil || report.Verdict != demo.Kept {
		t.Fatalf("verdict %s, %v\n%s\n%s", report.Verdict, err, progress.String(), report.Text(false))
	}
	if report.DaemonKills != 1 || report.TimedOut || report.Sale.Requests != o.Users || len(report.Scopes) != int(o.Buckets) {
		t.Errorf("kills %d, timed out %t, sale %+v, %d scopes", report.DaemonKills, report.TimedOut, report.Sale, len(report.Scopes))
	}
	befell := map[upstream.Fault]demo.FaultReport{}
	for _, f := range report.Faults {
		befell[f.Fault] = f
	}
	for _, fault := range upstream.AllFaults {
		f := befell[fault]
		if f.Reservations == 0 || f.After.Undecided != 0 || f.After.Person != 0 {
			t.Errorf("%s: %+v", fault, f)
		}
	}
	deleted := befell[upstream.DeletedHash] // the failover may have taken some
	if a := deleted.After; report.Approved == 0 || a.Released != report.Approved || a.Released+a.Gone != deleted.Reservations {
		t.Errorf("%d approved; deleted hashes: %+v, want all of them ended", report.Approved, deleted)
	}
	b := report.Rollback
	if b.Reservations == 0 || b.Orders == 0 || b.Reserved <= b.Left || b.Before.Deviation != -int64(b.Orders) {
		t.Errorf("the failover took nothing, or something else than is missing: %+v", b)
	}
	restored := 0
	for _, pass := range b.Passes {
		restored += pass.Repaired["lost_reservation"]
	}
	if restored != b.Orders || b.After.Deviation != 0 || b.Passes[len(b.Passes)-1].Deficits != 0 {
		t.Errorf("%d reservations restored, %d orders were lost: %+v", restored, b.Orders, b)
	}
	if err := report.Save(o.Dir); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(o.Dir, "report.md"))
	if err != nil || !strings.Contains(string(page), "KEPT: every promise held") {
		t.Errorf("the page: %v\n%s", err, page)
	}
}

// trigger passes progress on and calls do once when it meets the text.
type trigger struct {
	bytes.Buffer
	text string
	do   func()
	once sync.Once
}

func (w *trigger) Write(p []byte) (int, error) {
	if strings.Contains(string(p), w.text) {
		w.once.Do(w.do)
	}
	return w.Buffer.Write(p)
}

// TestSlowDemoFindsATamperedUnit: one unit is taken out of the stock while the
// daemon works, and the demo says so.
func TestSlowDemoFindsATamperedUnit(t *testing.T) {
	o := small(t)
	w := &trigger{text: "Let the daemon finish"}
	w.do = func() {
		settings, err := os.ReadFile(filepath.Join(o.Dir, "config.yaml"))
		addr := regexp.MustCompile(`addrs: \[(.*)\]`).FindSubmatch(settings)
		if err != nil || addr == nil {
			t.Errorf("find Redis: %v\n%s", err, settings)
			return
		}
		client := redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{Addrs: []string{string(addr[1])}}))
		defer func() { _ = client.Close() }()
		activity := upstream.Activity{ActivityID: "demo", SKUID: "88001", Version: 1}
		for field, by := range map[string]int64{"available": 1, "reserved": -1} {
			if err := client.HIncrBy(t.Context(), activity.Scope(2).StockKey(), field, by).Err(); err != nil {
				t.Error(err)
			}
		}
	}
	o.Progress = w
	report, err := demo.Run(t.Context(), o)
	if err != nil || report.Verdict != demo.Broken || len(report.Violations) == 0 {
		t.Fatalf("verdict %s, %v\n%s", report.Verdict, err, report.Text(false))
	}
	for _, v := range report.Violations {
		if v.Promise != "L2" || v.Scope != "a:demo:s:88001:v:1:b:2" || v.Subject != "" {
			t.Errorf("not expected: %s", v)
		}
	}
}
