package chart_test

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/chart"
)

var noon = time.Date(2026, 11, 11, 12, 0, 0, 0, time.UTC)

// points are one value a minute.
func points(values ...float64) []chart.Point {
	all := make([]chart.Point, len(values))
	for i, v := range values {
		all[i] = chart.Point{At: noon.Add(time.Duration(i) * time.Minute), Value: v}
	}
	return all
}

func wellFormed(t *testing.T, svg string) {
	t.Helper()
	for d := xml.NewDecoder(strings.NewReader(svg)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("%v in %s", err, svg)
		}
	}
}

func TestLine(t *testing.T) {
	t.Parallel()
	svg := chart.Line{ID: "a", Title: "<available>", Points: points(100, 50, 0)}.SVG()
	wellFormed(t, svg)
	for _, want := range []string{
		`d="M0 18L180 78L360 138"`, // from the top to the base, evenly
		`>100</text>`, `text-anchor="end">0</text>`, `>12:00</text>`, `>12:02</text>`, `&lt;available&gt;`,
	} {
		if !strings.Contains(svg, want) {
			t.Errorf("%s\nhas no %s", svg, want)
		}
	}
	if strings.Contains(svg, "style=") || strings.Contains(svg, "#") {
		t.Error("a colour or an inline style is in it")
	}
}

func TestLineIsBrokenWhereNothingWasMeasured(t *testing.T) {
	t.Parallel()
	all := points(1, 1, 1, 1, 1, 1)
	for i := range all[3:] {
		all[3+i].At = all[3+i].At.Add(time.Hour)
	}
	svg := chart.Line{ID: "a", Points: all}.SVG()
	_, line, _ := strings.Cut(svg, "c-line")
	if n := strings.Count(line, "M"); n != 2 {
		t.Errorf("%d parts, want 2: %s", n, svg)
	}
}

func TestLineOfFewPoints(t *testing.T) {
	t.Parallel()
	if svg := (chart.Line{ID: "a", None: "no samples & none"}).SVG(); !strings.Contains(svg, "no samples &amp; none") || strings.Contains(svg, "NaN") {
		t.Error(svg)
	}
	for _, svg := range []string{chart.Line{ID: "a", Points: points(7)}.SVG(), chart.Line{ID: "a", Points: points(0, 0)}.SVG()} {
		wellFormed(t, svg)
		if strings.Contains(svg, "NaN") || strings.Contains(svg, "Inf") {
			t.Error(svg)
		}
	}
}
