package chart

import (
	"fmt"
	"html"
	"math"
	"strings"
	"time"
)

// Line is a chart of one number over time. It begins at zero, so that its height
// means something; where nothing was measured for a while the line is broken.
type Line struct {
	ID          string // unique on the page: letters, digits, -
	Title       string // for assistive technology; a page shows a heading of its own
	Description string
	None        string // what is written where there are no points
	Points      []Point
	Class       int // number in the palette
}

// Point is a number at one moment.
type Point struct {
	At    time.Time
	Value float64
}

const (
	lineHeight = 120.0 // of the plot
	lineTop    = 18.0
	lineBottom = 20.0
	// brokenAfter times the usual distance of two points nothing was measured.
	brokenAfter = 3
)

// SVG draws the chart. Times are UTC.
func (l Line) SVG() string {
	var s strings.Builder
	fmt.Fprintf(&s, `<svg class="chart" role="img" viewBox="0 0 %s %s" aria-labelledby="%[3]s-title %[3]s-desc" xmlns="http://www.w3.org/2000/svg">`,
		px(width), px(lineTop+lineHeight+lineBottom), html.EscapeString(l.ID))
	fmt.Fprintf(&s, `<title id="%[1]s-title">%[2]s</title><desc id="%[1]s-desc">%[3]s</desc>`,
		html.EscapeString(l.ID), html.EscapeString(l.Title), html.EscapeString(l.Description))
	base := lineTop + lineHeight
	fmt.Fprintf(&s, `<path class="c-axis" d="M0 %sH%s"/>`, px(base), px(width))
	if len(l.Points) == 0 {
		fmt.Fprintf(&s, `<text class="c-none" x="0" y="%s">%s</text></svg>`, px(lineTop+lineHeight/2), html.EscapeString(l.None))
		return s.String()
	}
	first, last := l.Points[0], l.Points[len(l.Points)-1]
	most := 0.0
	for _, p := range l.Points {
		most = max(most, p.Value)
	}
	fmt.Fprintf(&s, `<text class="c-value" x="0" y="12">%.0f</text>`, most)
	fmt.Fprintf(&s, `<text class="c-value" x="%s" y="12" text-anchor="end">%.0f</text>`, px(width), last.Value)
	fmt.Fprintf(&s, `<path class="c-line c-line-%d" d="%s"/>`, l.Class%palette, l.path(base, most))
	format := "15:04"
	if last.At.Sub(first.At) > 24*time.Hour {
		format = "01-02 15:04"
	}
	fmt.Fprintf(&s, `<text class="c-value" x="0" y="%s">%s</text>`, px(base+15), first.At.UTC().Format(format))
	fmt.Fprintf(&s, `<text class="c-value" x="%s" y="%s" text-anchor="end">%s</text></svg>`, px(width), px(base+15), last.At.UTC().Format(format))
	return s.String()
}

// path is the line, broken where points are far from each other.
func (l Line) path(base, most float64) string {
	first, span := l.Points[0].At, l.Points[len(l.Points)-1].At.Sub(l.Points[0].At)
	gap := time.Duration(math.MaxInt64)
	if n := len(l.Points); n > 2 {
		gap = brokenAfter * span / time.Duration(n-1)
	}
	var d strings.Builder
	for i, p := range l.Points {
		x, y := width, base
		if span > 0 {
			x = width * float64(p.At.Sub(first)) / float64(span)
		}
		if most > 0 {
			y -= lineHeight * max(p.Value, 0) / most
		}
		command := "L"
		if i == 0 || p.At.Sub(l.Points[i-1].At) > gap {
			command = "M"
		}
		d.WriteString(command + px(x) + " " + px(y))
	}
	if len(l.Points) == 1 {
		d.WriteString("h0") // a dot
	}
	return d.String()
}
