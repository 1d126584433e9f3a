package console

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func readWords(t *testing.T, name string) map[string]any {
	t.Helper()
	raw, err := files.ReadFile("locales/" + name + ".json")
	if err != nil {
		t.Fatal(err)
	}
	var words map[string]any
	if err := json.Unmarshal(raw, &words); err != nil {
		t.Fatal(err)
	}
	return words
}

// Every language has every sentence, and every sentence that is asked for is
// there, and asked for.
func TestEveryLanguageHasEveryWord(t *testing.T) {
	t.Parallel()
	english, chinese := readWords(t, "en"), readWords(t, "zh-Hans")
	if diff := cmp.Diff(slices.Sorted(maps.Keys(english)), slices.Sorted(maps.Keys(chinese))); diff != "" {
		t.Error(diff)
	}
	asked := map[string]bool{}
	named := regexp.MustCompile(`\{\{-? ?t "(\w+)"|\(t "(\w+)"|\bmust\("(\w+)"|one\("[\w-]+", "(\w+)"`)
	states := regexp.MustCompile(`state "(\w+)"|orItself\("([a-z]+)_"`)
	prefixes := map[string]bool{}
	for _, pattern := range []string{"templates", "."} {
		read(t, pattern, func(text string) {
			for _, m := range named.FindAllStringSubmatch(text, -1) {
				for _, name := range m[1:] {
					if name != "" {
						asked[name] = true
					}
				}
			}
			for _, m := range states.FindAllStringSubmatch(text, -1) {
				prefixes[m[1]+m[2]] = true
			}
		})
	}
	for name := range asked {
		if english[name] == nil {
			t.Errorf("there is no word %q", name)
		}
	}
	for name := range english {
		prefix := regexp.MustCompile(`^[a-z]+`).FindString(name)
		if !asked[name] && !prefixes[prefix] {
			t.Errorf("nobody asks for %q", name)
		}
	}
}

func TestNumber(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1\u202f000", -1234567: "-1\u202f234\u202f567", 123456: "123\u202f456"} {
		if got := number(n); got != want {
			t.Errorf("%d is %q, want %q", n, got, want)
		}
	}
}

func TestDuration(t *testing.T) {
	t.Parallel()
	for seconds, want := range map[float64]string{0: "–", -1: "–", 0.25: "0.2 s", 59: "59 s", 150: "2 min", 7300: "2 h", 1e6: "11 d"} {
		if got := duration(seconds); got != want {
			t.Errorf("%g s is %q, want %q", seconds, got, want)
		}
	}
}

// read gives the texts of the templates or of this package's sources.
func read(t *testing.T, dir string, each func(string)) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		if filepath.Ext(name) != ".tmpl" && (filepath.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go")) {
			continue
		}
		raw, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		each(string(raw))
	}
}
