package reconcile_test

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/seckill/reconciler/reconcile"
)

// kindName is what a kind of task looks like.
var kindName = regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`)

// raised finds the kinds of tasks that the program's source names: the
// constants Task…, and literals where a task is raised.
func raised(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	root := ".."
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (entry.Name() == "testdata" || (strings.HasPrefix(entry.Name(), ".") && path != root)):
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			for _, kind := range kindsIn(n) {
				found[kind] = path
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// kindsIn are the kinds that one node names.
func kindsIn(n ast.Node) []string {
	switch n := n.(type) {
	case *ast.ValueSpec: // const TaskX = "x", untyped
		var kinds []string
		for i, name := range n.Names {
			if n.Type == nil && i < len(n.Values) && strings.HasPrefix(strings.ToLower(name.Name), "task") {
				kinds = append(kinds, literal(n.Values[i])...)
			}
		}
		return kinds
	case *ast.CallExpr: // tally.Task(scope, kind, cause, id)
		if f, ok := n.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "Task" && len(n.Args) == 4 {
			return literal(n.Args[1])
		}
	case *ast.CompositeLit: // reservation.TaskReport{Kind: …}, reservation.Task{Kind: …}
		name := ""
		switch typ := n.Type.(type) {
		case *ast.SelectorExpr:
			name = typ.Sel.Name
		case *ast.Ident:
			name = typ.Name
		}
		if name != "TaskReport" && name != "Task" && name != "NotReadyError" {
			return nil
		}
		for _, e := range n.Elts {
			if kv, ok := e.(*ast.KeyValueExpr); ok {
				if key, ok := kv.Key.(*ast.Ident); ok && key.Name == "Kind" {
					return literal(kv.Value)
				}
			}
		}
	}
	return nil
}

func literal(e ast.Expr) []string {
	if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
		if text, err := strconv.Unquote(lit.Value); err == nil && kindName.MatchString(text) {
			return []string{text}
		}
	}
	return nil
}

// Every kind of task that the code raises is listed, with what a person does
// about it; nothing is listed twice.
func TestEveryKindIsListed(t *testing.T) {
	listed := map[string]bool{}
	for _, c := range reconcile.Kinds() {
		if listed[c.ID] {
			t.Errorf("%s is listed twice", c.ID)
		}
		listed[c.ID] = true
		if c.Severity == "" || c.Advice == "" || c.Compares == "" || c.Source == "" || c.Repair == "" {
			t.Errorf("%+v lacks something", c)
		}
		if (c.Level == "") != (!slices.ContainsFunc(reconcile.Checks(), func(d reconcile.Check) bool { return d.ID == c.ID })) {
			t.Errorf("%s has level %q", c.ID, c.Level)
		}
	}
	kinds := raised(t)
	for kind, path := range kinds {
		if !listed[kind] {
			t.Errorf("%s raises tasks %s, which `reconcile --list-checks` does not list", path, kind)
		}
	}
	for _, kind := range []string{"send_blocked", "evidence_stuck", "release_storm", "invariant_broken", "config_missing"} {
		if kinds[kind] == "" {
			t.Errorf("%s was not found in the code: the search is broken", kind)
		}
	}
	for _, c := range reconcile.Kinds() {
		if c.Source == reconcile.RaisedByWorkers && kinds[c.ID] == "" {
			t.Errorf("%s is listed, and no code raises it", c.ID)
		}
	}
}

func TestWorkersKindsAreNoChecks(t *testing.T) {
	for name, where := range map[string]string{"send_blocked": "workers raise it", "restore_impossible": "lost_reservation"} {
		err := reconcile.Options{Checks: []string{reconcile.CheckCountDrift, name}}.Validate()
		var not *reconcile.NotACheckError
		if !errors.As(err, &not) || !strings.Contains(err.Error(), where) || !strings.Contains(err.Error(), "task list --kind "+name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
