package chart_test

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/seckill/reconciler/internal/chart"
)

// texts parses the SVG, which must be well-formed, and returns what its text
// elements say.
func texts(t rapid.TB, svg string) []string {
	t.Helper()
	dec := xml.NewDecoder(strings.NewReader(svg))
	var out []string
	inText := false
	for {
		token, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatalf("not well-formed: %v\n%s", err, svg)
		}
		switch e := token.(type) {
		case xml.StartElement:
			inText = e.Name.Local == "text"
			if inText {
				out = append(out, "")
			}
			for _, a := range e.Attr {
				if a.Name.Local == "style" || strings.HasPrefix(a.Name.Local, "on") || a.Name.Local == "fill" {
					t.Fatalf("<%s> has %s: only classes are allowed", e.Name.Local, a.Name.Local)
				}
			}
			if e.Name.Local == "script" || e.Name.Local == "style" {
				t.Fatalf("<%s> in the chart", e.Name.Local)
			}
		case xml.CharData:
			if inText {
				out[len(out)-1] += string(e)
			}
		case xml.EndElement:
			inText = false
		}
	}
}

func TestBars(t *testing.T) {
	svg := chart.Bars{
		ID: "stock", Title: "Stock <b>", Description: "per bucket", Series: []string{"available", "\u5df2\u9884\u7559"},
		Groups: []chart.Group{{Label: "a:1 & <script>", Values: []float64{100, 0}}, {Label: "\u5e93\u5b58", Values: []float64{chart.Unknown, -25}}},
	}.SVG()
	got := strings.Join(texts(t, svg), "|")
	if want := "available|\u5df2\u9884\u7559|a:1 & <script>|100|0|\u5e93\u5b58|unknown|-25"; got != want {
		t.Errorf("texts %q, want %q", got, want)
	}
	for _, want := range []string{`role="img"`, `aria-labelledby="stock-title stock-desc"`, `<title id="stock-title">Stock &lt;b&gt;</title>`} {
		if !strings.Contains(svg, want) {
			t.Errorf("no %s in\n%s", want, svg)
		}
	}
	if got := strings.Count(svg, "<rect"); got != 2+3 { // the legend and what is known
		t.Errorf("%d rectangles in\n%s", got, svg)
	}
}

var rects = regexp.MustCompile(`<rect class="c-\d" x="([-0-9.]+)" y="[-0-9.]+" width="([-0-9.]+)"`)

// Whatever is drawn stays inside, is well-formed, and longer for more.
func TestBarsStayInside(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := chart.Bars{ID: "x", Title: "t", Description: "d", Series: []string{"s"}}
		for range rapid.IntRange(0, 20).Draw(t, "groups") {
			v := float64(rapid.Int64Range(-1<<53, 1<<53).Draw(t, "value"))
			if rapid.IntRange(0, 5).Draw(t, "unknown") == 0 {
				v = chart.Unknown
			}
			b.Groups = append(b.Groups, chart.Group{Label: rapid.StringMatching(`[a-z\x{5e93}\x{5b58}<>&"' -]{0,60}`).Draw(t, "label"), Values: []float64{v}, Class: 7})
		}
		svg := b.SVG()
		texts(t, svg)
		for _, m := range rects.FindAllStringSubmatch(svg, -1) {
			x, _ := strconv.ParseFloat(m[1], 64)
			w, _ := strconv.ParseFloat(m[2], 64)
			if x < 0 || w < 0 || x+w > 360.1 {
				t.Fatalf("a bar from %v to %v", x, x+w)
			}
		}
	})
}

func TestFit(t *testing.T) {
	for _, tt := range []struct {
		text string
		room float64
		want string
	}{
		{"short", 100, "short"},
		{"reservation", 57, "reser…tion"},
		{"\u5e93\u5b58\u5e93\u5b58\u5e93\u5b58", 50, "\u5e93\u5b58…\u5e93\u5b58"},
		{"abc", 1, "…"},
	} {
		if got := chart.Fit(tt.text, 10, tt.room); got != tt.want {
			t.Errorf("Fit(%q, %v) = %q, want %q", tt.text, tt.room, got, tt.want)
		}
	}
	if got, want := fmt.Sprintf("%.1f %.1f", chart.TextWidth("a\u5e93", 10), chart.TextWidth("é", 10)), "15.6 5.6"; got != want {
		t.Errorf("widths %s, want %s", got, want)
	}
}
