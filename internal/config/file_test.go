package config

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.yaml.in/yaml/v3"
)

var update = flag.Bool("update", false, "write config.yaml at the root from the comments and defaults in config.go")

const rootFile = "../../config.yaml"

// TestConfigFile proves that config.yaml names every setting with its default
// and its documentation.
func TestConfigFile(t *testing.T) {
	want := generate(t)
	if *update {
		if err := os.WriteFile(rootFile, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(rootFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("config.yaml is not what config.go says (-want +got); run: go test ./internal/config -run TestConfigFile -update\n%s", diff)
	}
}

// TestConfigFileIsDefault reads the file as a user would, independently of how
// it was generated.
func TestConfigFileIsDefault(t *testing.T) {
	l, err := Load(Options{File: rootFile, Environ: []string{}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Default(), l.Config, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("config.yaml and Default differ (-default +file):\n%s", diff)
	}
	text, err := os.ReadFile(rootFile)
	if err != nil {
		t.Fatal(err)
	}
	var tree map[string]any
	if err := yaml.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	for _, f := range fields {
		if _, ok := l.origins[f.path]; !ok {
			t.Errorf("config.yaml does not name %s", f.path)
		}
	}
}

// generate writes config.yaml from the struct, its comments and its defaults.
func generate(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	b.WriteString(`# Every setting of the reconciler with its default. Settings are overridden by
# environment variables (the path in capitals: scanner.send_grace is
# RECONCILER_SCANNER_SEND_GRACE; lists with commas) and those by flags.
# Durations are written with their unit: 300ms, 3s, 10m, 24h.
# A running daemon takes over what is marked so when it is reloaded (SIGHUP,
# systemctl reload); everything else needs a restart.
# ` + "`reconciler config check`" + ` finds mistakes, ` + "`reconciler config show`" + ` tells what is in force.
`)
	writeStruct(t, &b, comments(t), reflect.ValueOf(Default()), "", 0)
	return b.Bytes()
}

func writeStruct(t *testing.T, b *bytes.Buffer, docs map[string]string, v reflect.Value, prefix string, depth int) {
	t.Helper()
	indent := strings.Repeat("  ", depth)
	for i := range v.NumField() {
		sf := v.Type().Field(i)
		name, squash := strings.CutSuffix(sf.Tag.Get("koanf"), ",squash")
		if squash {
			writeStruct(t, b, docs, v.Field(i), prefix, depth)
			continue
		}
		doc := docs[v.Type().Name()+"."+sf.Name]
		if doc == "" {
			t.Errorf("%s.%s has no comment", v.Type().Name(), sf.Name)
		}
		if depth == 0 {
			b.WriteString("\n")
		}
		if oneOf := sf.Tag.Get("oneof"); oneOf != "" {
			doc += "\nOne of: " + strings.Join(strings.Fields(oneOf), ", ") + "."
		}
		if sf.Tag.Get("secret") != "" {
			doc += "\nInstead of it, " + name + fileSuffix + " may name a file that holds it."
		}
		if sf.Tag.Get("reload") != "" {
			doc += "\nTaken over by a reload."
		}
		for line := range strings.SplitSeq(doc, "\n") {
			fmt.Fprintf(b, "%s# %s\n", indent, line)
		}
		if sf.Type.Kind() == reflect.Struct {
			fmt.Fprintf(b, "%s%s:\n", indent, name)
			writeStruct(t, b, docs, v.Field(i), prefix+name+".", depth+1)
			continue
		}
		fmt.Fprintf(b, "%s%s: %s\n", indent, name, yamlValue(t, v.Field(i).Interface()))
	}
}

func yamlValue(t *testing.T, value any) string {
	t.Helper()
	switch x := value.(type) {
	case time.Duration:
		return FormatDuration(x)
	case []string:
		return "[" + strings.Join(x, ", ") + "]"
	}
	text, err := yaml.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

// comments maps Type.Field to the field's comment in this package's source.
func comments(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(".", "config.go"), nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	docs := map[string]string{}
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.TypeSpec)
		if !ok {
			return true
		}
		if st, ok := spec.Type.(*ast.StructType); ok {
			for _, f := range st.Fields.List {
				for _, name := range f.Names {
					docs[spec.Name.Name+"."+name.Name] = strings.TrimSpace(f.Doc.Text())
				}
			}
		}
		return true
	})
	return docs
}
