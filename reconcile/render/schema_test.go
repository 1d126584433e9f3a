package render_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"pgregory.net/rapid"

	"github.com/seckill/reconciler/docs"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reconcile/render"
)

// schema compiles the published schema, with formats checked.
func schema(t rapid.TB) *jsonschema.Schema {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(docs.ReportSchema))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource("report.schema.json", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("report.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func validate(t rapid.TB, s *jsonschema.Schema, written string) error {
	t.Helper()
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(written))
	if err != nil {
		t.Fatal(err)
	}
	return s.Validate(doc)
}

// Every report that a run can make is what the schema says.
func TestReportsAreValid(t *testing.T) {
	s := schema(t)
	for name, r := range map[string]*reconcile.Report{
		"empty": settle(empty()), "consistent": consistent(), "drift": drifted(), "incomplete": partial(),
		"unreachable": reconcile.Unreachable(reconcile.SourceRedis, errNoAnswer),
	} {
		if err := validate(t, s, write(t, render.FormatJSON, r)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, c := range reconcile.Checks() {
		for _, state := range []reconcile.RepairState{
			reconcile.RepairStateNone, reconcile.RepairStatePlanned, reconcile.RepairStateDone, reconcile.RepairStateFailed, reconcile.RepairStatePendingApproval,
		} {
			r := empty()
			f := finding(c.ID, c.Severity, 0, "x", "y")
			f.Repair.Kind, f.Repair.State = c.Repair, state
			r.Findings = append(r.Findings, f)
			if err := validate(t, s, write(t, render.FormatJSON, settle(r))); err != nil {
				t.Errorf("%s, %s: %v", c.ID, state, err)
			}
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		if err := validate(t, s, write(t, render.FormatJSON, random(t))); err != nil {
			t.Fatal(err)
		}
	})
}

var errNoAnswer = errors.New("no\nanswer")

// The schema refuses what is not a report, and one that contradicts itself.
func TestSchemaRefuses(t *testing.T) {
	s := schema(t)
	good := write(t, render.FormatJSON, partial())
	if err := validate(t, s, good); err != nil {
		t.Fatal(err)
	}
	// at walks to the object that a path names.
	at := func(doc any, path ...any) map[string]any {
		for _, step := range path {
			switch step := step.(type) {
			case string:
				doc = doc.(map[string]any)[step]
			case int:
				doc = doc.([]any)[step]
			}
		}
		return doc.(map[string]any)
	}
	for name, spoil := range map[string]func(doc map[string]any){
		"another schema":       func(d map[string]any) { d["schema"] = 2 },
		"no schema":            func(d map[string]any) { delete(d, "schema") },
		"no run_id":            func(d map[string]any) { delete(d, "run_id") },
		"empty run_id":         func(d map[string]any) { d["run_id"] = "" },
		"unknown mode":         func(d map[string]any) { d["mode"] = "slow" },
		"local time":           func(d map[string]any) { d["started_at"] = "2026-01-02T03:04:05+02:00" },
		"no time":              func(d map[string]any) { d["finished_at"] = "yesterdayZ" },
		"unknown verdict":      func(d map[string]any) { d["verdict"] = "fine" },
		"scopes null":          func(d map[string]any) { d["scopes"] = nil },
		"findings null":        func(d map[string]any) { d["findings"] = nil },
		"negative count":       func(d map[string]any) { at(d, "summary")["deficit"] = -1 },
		"count as text":        func(d map[string]any) { at(d, "summary")["deficit"] = "1" },
		"odd check name":       func(d map[string]any) { at(d, "summary")["Deficit!"] = 1 },
		"id as number":         func(d map[string]any) { at(d, "scopes", 0)["activity_id"] = 10001 },
		"number as text":       func(d map[string]any) { at(d, "scopes", 0, "redis")["available"] = "60" },
		"a number missing":     func(d map[string]any) { delete(at(d, "scopes", 0, "redis"), "available") },
		"fraction":             func(d map[string]any) { at(d, "scopes", 0, "redis")["available"] = 1.5 },
		"negative orders":      func(d map[string]any) { at(d, "scopes", 0, "postgres")["active"] = -1 },
		"unread but deviation": func(d map[string]any) { at(d, "scopes", 1)["deviation"] = 0 },
		"no scope verdict":     func(d map[string]any) { delete(at(d, "scopes", 0), "verdict") },
		"finding of no check":  func(d map[string]any) { delete(at(d, "findings", 0), "check") },
		"unknown severity":     func(d map[string]any) { at(d, "findings", 0)["severity"] = "fatal" },
		"no evidence":          func(d map[string]any) { delete(at(d, "findings", 0), "evidence") },
		"evidence of one side": func(d map[string]any) { delete(at(d, "findings", 0, "evidence"), "mq") },
		"no round":             func(d map[string]any) { at(d, "findings", 0)["rounds"] = 0 },
		"unknown repair":       func(d map[string]any) { at(d, "findings", 0, "repair")["state"] = "maybe" },
		"unnamed source":       func(d map[string]any) { at(d, "incomplete", 0)["source"] = "" },
		"no reason":            func(d map[string]any) { delete(at(d, "incomplete", 0), "reason") },
		"scope left out":       func(d map[string]any) { delete(at(d, "incomplete", 1), "scope") },
		"unread as drift":      func(d map[string]any) { d["verdict"] = "drift" },
		"unread as consistent": func(d map[string]any) { d["verdict"] = "consistent" },
		"incomplete in vain":   func(d map[string]any) { d["incomplete"] = []any{} },
		"drift as consistent": func(d map[string]any) {
			d["verdict"], d["incomplete"] = "consistent", []any{}
		},
		"drift of nothing": func(d map[string]any) {
			d["verdict"], d["incomplete"], d["findings"] = "drift", []any{}, []any{}
			delete(d, "omitted")
		},
	} {
		var doc map[string]any
		if err := json.Unmarshal([]byte(good), &doc); err != nil {
			t.Fatal(err)
		}
		spoil(doc)
		spoiled, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		if err := validate(t, s, string(spoiled)); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	var doc map[string]any
	if err := json.Unmarshal([]byte(good), &doc); err != nil {
		t.Fatal(err)
	}
	doc["added_later"] = map[string]any{"x": 1}
	later, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	if err := validate(t, s, string(later)); err != nil {
		t.Errorf("a field of a later version: %v", err)
	}
}
