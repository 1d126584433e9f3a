package reportfile_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/reportfile"
	"github.com/seckill/reconciler/reconcile"
)

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	all := []string{}
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}

func report(id string) *reconcile.Report {
	return &reconcile.Report{
		Schema: 1, RunID: id, Mode: reconcile.ModeQuick, Verdict: reconcile.VerdictConsistent,
		Scopes: []reconcile.ScopeReport{}, Findings: []reconcile.Finding{}, Incomplete: []reconcile.Incomplete{}, Summary: map[string]int{},
	}
}

func TestWrite(t *testing.T) {
	dir := t.TempDir()
	id := reconcile.NewRunID()
	files, err := reportfile.Write(dir, report(id))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"reconcile-" + id + ".html", "reconcile-" + id + ".json"}
	if diff := cmp.Diff(want, names(t, dir)); diff != "" || len(files) != 2 {
		t.Errorf("files %v (-want +got):\n%s", files, diff)
	}
	text, err := os.ReadFile(files[0])
	var got reconcile.Report
	if err != nil || json.Unmarshal(text, &got) != nil || got.RunID != id {
		t.Errorf("the JSON file: %v, %s", err, text)
	}
	for _, bad := range []string{"", "../escape", "20260102T030405Z-a/b"} {
		if _, err := reportfile.Write(dir, report(bad)); err == nil {
			t.Errorf("run id %q is accepted", bad)
		}
	}
	if _, err := reportfile.Write(filepath.Join(dir, "none"), report(id)); err == nil || !strings.Contains(err.Error(), "none") {
		t.Errorf("a directory that does not exist: %v", err)
	}
}

// A write that fails leaves what was there before, and nothing beside it.
func TestAtomically(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "r.json")
	write := func(text string, fail error) error {
		return reportfile.Atomically(file, func(w io.Writer) error {
			_, err := io.WriteString(w, text)
			return errors.Join(err, fail)
		})
	}
	broken := errors.New("broken")
	if err := write("first", nil); err != nil {
		t.Fatal(err)
	}
	if err := write("sec", broken); !errors.Is(err, broken) {
		t.Errorf("a write that fails: %v", err)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "first" {
		t.Errorf("after a write that failed: %q, %v", text, err)
	}
	if err := write("second", nil); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "second" {
		t.Errorf("after another write: %q, %v", text, err)
	}
	if diff := cmp.Diff([]string{"r.json"}, names(t, dir)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	t.Chdir(dir)
	if err := reportfile.Atomically("here.json", func(io.Writer) error { return nil }); err != nil || !slices.Contains(names(t, dir), "here.json") {
		t.Errorf("a file in the working directory: %v", err)
	}
}

func TestOlder(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{
		"reconcile-20260101T000000Z-abcdefgh.json", "reconcile-20260101T000000Z-abcdefgh.html", ".reconcile-20260102T000000Z-x.json-123.tmp",
		"reconcile-20260301T000000Z-abcdefgh.json", "notes.txt", "reconcile-20260101T000000Z-abcdefgh.json.bak", "reconcile-20269901T000000Z-a.json",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "reconcile-20260101T000000Z-directory.json"), 0o700); err != nil {
		t.Fatal(err)
	}
	files, err := reportfile.Older(dir, time.Date(2026, 2, 1, 0, 0, 0, 0, time.UTC))
	if err != nil || len(files) != 3 || !strings.HasSuffix(files[2].Path, ".tmp") {
		t.Fatalf("got %v, %v", files, err)
	}
	for range 2 {
		for _, f := range files {
			if err := f.Remove(); err != nil {
				t.Error(err)
			}
		}
	}
	if got := names(t, dir); len(got) != 5 {
		t.Errorf("left are %v", got)
	}
}
