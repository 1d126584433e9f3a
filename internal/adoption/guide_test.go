package adoption_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/devstack"
)

// block is a fenced piece of the guide, under its heading.
type block struct {
	heading  string
	language string // sql, sh, yaml or go
	label    string // of SQL, the first line: who runs it, or the file it is
	text     string // without the label
}

var (
	pieces = regexp.MustCompile("(?ms)^```([a-z]+)\n(.*?)^```$")
	titled = regexp.MustCompile(`(?m)^##+ (.*)$`)
)

// readGuide is the guide's blocks in order.
func readGuide(t *testing.T) []block {
	t.Helper()
	text := readFile(t, "docs", "adopting.md")
	headings := titled.FindAllStringSubmatchIndex(text, -1)
	var blocks []block
	for _, m := range pieces.FindAllStringSubmatchIndex(text, -1) {
		b := block{language: text[m[2]:m[3]], text: text[m[4]:m[5]]}
		for _, h := range headings {
			if h[0] < m[0] {
				b.heading = text[h[2]:h[3]]
			}
		}
		if b.language == "sql" {
			first, rest, _ := strings.Cut(b.text, "\n")
			label, found := strings.CutPrefix(first, "-- ")
			if !found {
				t.Fatalf("adopting.md: the SQL under %q does not begin with who runs it: %s", b.heading, first)
			}
			b.label, b.text = label, rest
		}
		blocks = append(blocks, b)
	}
	if len(blocks) < 10 {
		t.Fatalf("adopting.md has %d blocks, which is not the guide", len(blocks))
	}
	return blocks
}

func readFile(t *testing.T, path ...string) string {
	t.Helper()
	root, err := devstack.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(append([]string{root}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// The guide's consumer is the one that the test runs.
func TestGuideShowsTheConsumer(t *testing.T) {
	t.Parallel()
	_, code, _ := strings.Cut(readFile(t, "internal", "adoption", "consumer_test.go"), "// guide:begin consumer\n")
	code, _, _ = strings.Cut(code, "// guide:end consumer")
	for _, b := range readGuide(t) {
		if b.language != "go" {
			continue
		}
		if diff := cmp.Diff(strings.TrimSpace(code), strings.TrimSpace(b.text)); diff != "" {
			t.Errorf("consumer_test.go and adopting.md (-test +guide):\n%s", diff)
		}
		return
	}
	t.Error("adopting.md shows no consumer")
}
