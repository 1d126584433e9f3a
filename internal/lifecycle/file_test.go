package lifecycle_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/seckill/reconciler/internal/lifecycle"
)

func TestReadFile(t *testing.T) {
	t.Parallel()
	specs, err := lifecycle.ReadFile(strings.NewReader(`
defaults: {activity: "10001", version: 7, starts: 2026-11-11T00:00:00Z, ends: 2026-11-11T02:00:00Z, retention: 48h}
versions:
  - {sku: "88001", total: 10000, buckets: 4}
  - {sku: "88002", total: 0, version: 0, retention: 1h, allow_small: true, starts: now, ends: +1h}
`))
	if err != nil {
		t.Fatal(err)
	}
	starts := time.Date(2026, 11, 11, 0, 0, 0, 0, time.UTC)
	want := []lifecycle.Spec{
		{
			ActivityID: "10001", SKUID: "88001", Version: 7, Total: 10000, Buckets: 4,
			StartsAt: starts, EndsAt: starts.Add(2 * time.Hour), Retention: 48 * time.Hour,
		},
		{
			ActivityID: "10001", SKUID: "88002", Buckets: 1, Retention: time.Hour, AllowSmall: true,
			StartsAt: time.Now(), EndsAt: time.Now().Add(time.Hour), StartsRelative: true, EndsRelative: true,
		},
	}
	if diff := cmp.Diff(want, specs, cmpopts.EquateApproxTime(time.Minute)); diff != "" {
		t.Error(diff)
	}
}

func TestReadFileRefuses(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ text, want string }{
		"nothing":        {``, "versions"},
		"no versions":    {`defaults: {sku: "1"}`, "versions"},
		"an unknown key": {`versions: [{sku: "1", stock: 7}]`, "stock"},
		"missing keys":   {`versions: [{sku: "1", total: 1, starts: now, ends: +1h}]`, "versions[0]: activity is missing\nversion is missing"},
		"no time":        {`versions: [{activity: a, sku: "1", version: 1, total: 1, starts: soon, ends: +1h}]`, "soon"},
		"no duration":    {`versions: [{activity: a, sku: "1", version: 1, total: 1, starts: now, ends: +1h, retention: 7d}]`, "retention"},
		"no number":      {`versions: [{activity: a, sku: "1", version: 1, total: many, starts: now, ends: +1h}]`, "many"},
	} {
		if _, err := lifecycle.ReadFile(strings.NewReader(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error that names %q", name, err, c.want)
		}
	}
}
