// Package chart draws charts as SVG for pages without scripts: no colour and no
// inline style is in them, only classes, so the same bytes serve light and
// dark themes and fit a strict content security policy. The page brings the
// colours, see [CSS].
//
// A chart is an image to assistive technology, with a title and a description;
// whoever shows one shows its numbers in a table too. Text is measured with
// the widths of CJK characters, and cut where it does not fit. Numbers that are
// not known are said to be unknown, and never drawn as zero.
package chart

import (
	"fmt"
	"html"
	"math"
	"strings"

	"github.com/mattn/go-runewidth"
)

// CSS are the rules that charts need, with a palette in custom properties that
// a page may set otherwise: --chart-fg, --chart-muted, --chart-grid and
// --chart-0 to --chart-3.
const CSS = `
.chart{display:block;width:100%;height:auto;font-family:system-ui,"Noto Sans","Noto Sans CJK SC","PingFang SC","Microsoft YaHei",sans-serif}
.chart .c-label{font-size:13px;fill:var(--chart-fg)}
.chart .c-value,.chart .c-legend,.chart .c-none{font-size:12px;fill:var(--chart-muted)}
.chart .c-axis{stroke:var(--chart-grid);stroke-width:1}
.chart .c-line{fill:none;stroke-width:2;stroke-linecap:round;stroke-linejoin:round}
.chart .c-line-0{stroke:var(--chart-0)}.chart .c-line-1{stroke:var(--chart-1)}.chart .c-line-2{stroke:var(--chart-2)}.chart .c-line-3{stroke:var(--chart-3)}
.chart .c-0{fill:var(--chart-0)}.chart .c-1{fill:var(--chart-1)}.chart .c-2{fill:var(--chart-2)}.chart .c-3{fill:var(--chart-3)}
`

// Unknown stands for a number that is not known.
var Unknown = math.NaN()

// Bars is a chart of horizontal bars, in groups below each other. Negative
// numbers go to the left of a common zero.
type Bars struct {
	ID          string // unique on the page: letters, digits, -
	Title       string // for assistive technology; a page shows a heading of its own
	Description string
	Series      []string // what the bars of a group are; a legend is drawn for two and more
	Groups      []Group
	Signed      bool // write + before positive numbers
}

// Group is one label with one number for each series.
type Group struct {
	Label  string
	Values []float64 // [Unknown] for what is not known
	// Class is the palette's number of the first series, so that bars of one
	// series may differ. The other series follow.
	Class int
}

// The layout, in units of the viewBox, which are pixels at the full width.
const (
	width       = 360.0
	labelHeight = 20.0
	barHeight   = 12.0
	barGap      = 3.0
	groupGap    = 10.0
	legendSpace = 26.0
	valueSpace  = 76.0 // to the right of the longest bar
	labelSize   = 13.0
	palette     = 4
)

// SVG draws the chart.
func (b Bars) SVG() string {
	var s strings.Builder
	top := 0.0
	if len(b.Series) > 1 {
		top = legendSpace
	}
	height := top
	for _, g := range b.Groups {
		height += g.height()
	}
	fmt.Fprintf(&s, `<svg class="chart" role="img" viewBox="0 0 %s %s" aria-labelledby="%[3]s-title %[3]s-desc" xmlns="http://www.w3.org/2000/svg">`,
		px(width), px(height), html.EscapeString(b.ID))
	fmt.Fprintf(&s, `<title id="%[1]s-title">%[2]s</title><desc id="%[1]s-desc">%[3]s</desc>`,
		html.EscapeString(b.ID), html.EscapeString(b.Title), html.EscapeString(b.Description))
	b.legend(&s)
	zero, scale := b.scale()
	y := top
	for _, g := range b.Groups {
		b.group(&s, g, y, zero, scale)
		y += g.height()
	}
	if zero > 0 {
		fmt.Fprintf(&s, `<path class="c-axis" d="M%s %sV%s"/>`, px(zero), px(top+labelHeight), px(height-groupGap))
	}
	s.WriteString(`</svg>`)
	return s.String()
}

func (g Group) height() float64 {
	return labelHeight + float64(len(g.Values))*(barHeight+barGap) + groupGap
}

// scale is where zero is and how long a unit is.
func (b Bars) scale() (zero, perUnit float64) {
	least, most := 0.0, 0.0
	for _, g := range b.Groups {
		for _, v := range g.Values {
			if !math.IsNaN(v) {
				least, most = min(least, v), max(most, v)
			}
		}
	}
	left := 0.0
	if least < 0 {
		left = valueSpace
	}
	if most-least == 0 {
		return left, 0
	}
	perUnit = (width - left - valueSpace) / (most - least)
	return left - least*perUnit, perUnit
}

func (b Bars) legend(s *strings.Builder) {
	if len(b.Series) < 2 {
		return
	}
	x := 0.0
	for i, name := range b.Series {
		fmt.Fprintf(s, `<rect class="%s" x="%s" y="5" width="10" height="10" rx="2"/><text class="c-legend" x="%s" y="14">%s</text>`,
			class(i), px(x), px(x+15), html.EscapeString(name))
		x += 15 + TextWidth(name, 12) + 18
	}
}

func (b Bars) group(s *strings.Builder, g Group, y, zero, perUnit float64) {
	label := Fit(g.Label, labelSize, width)
	fmt.Fprintf(s, `<text class="c-label" x="0" y="%s">`, px(y+14))
	if label != g.Label {
		fmt.Fprintf(s, `<title>%s</title>`, html.EscapeString(g.Label))
	}
	fmt.Fprintf(s, `%s</text>`, html.EscapeString(label))
	y += labelHeight
	for i, v := range g.Values {
		if math.IsNaN(v) {
			fmt.Fprintf(s, `<text class="c-none" x="%s" y="%s">unknown</text>`, px(zero+6), px(y+10))
			y += barHeight + barGap
			continue
		}
		length := math.Abs(v) * perUnit
		if v != 0 {
			length = max(length, 1.5) // seen, however small beside the others
		}
		x, at, anchor := zero, zero+length+6, "start"
		if v < 0 {
			x, at, anchor = zero-length, zero-length-6, "end"
		}
		fmt.Fprintf(s, `<rect class="%s" x="%s" y="%s" width="%s" height="%s" rx="2"/>`, class(g.Class+i), px(x), px(y), px(length), px(barHeight))
		fmt.Fprintf(s, `<text class="c-value" x="%s" y="%s" text-anchor="%s">%s</text>`, px(at), px(y+10), anchor, b.number(v))
		y += barHeight + barGap
	}
}

func class(i int) string { return fmt.Sprintf("c-%d", i%palette) }

// number writes all digits: a unit of stock more or less matters.
func (b Bars) number(v float64) string {
	if b.Signed {
		return fmt.Sprintf("%+.0f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// px is a coordinate with at most one digit after the point.
func px(v float64) string { return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0") }

// wide measures East Asian characters as twice as wide as others, whatever the
// locale of the process is.
var wide = &runewidth.Condition{EastAsianWidth: false, StrictEmojiNeutral: true}

// TextWidth is about how wide a text is, in the units of its font size: a
// character of a sans-serif font takes 0.56 of it, a CJK one all of it.
func TextWidth(text string, size float64) float64 {
	total := 0.0
	for _, r := range text {
		switch wide.RuneWidth(r) {
		case 0:
		case 1:
			total += 0.56 * size
		default:
			total += size
		}
	}
	return total
}

// Fit is the text, cut in its middle if it is wider than room: ids differ at
// their ends.
func Fit(text string, size, room float64) string {
	if TextWidth(text, size) <= room {
		return text
	}
	runes := []rune(text)
	for keep := len(runes) - 1; keep > 0; keep-- {
		head := (keep + 1) / 2
		cut := string(runes[:head]) + "…" + string(runes[len(runes)-(keep-head):])
		if TextWidth(cut, size) <= room {
			return cut
		}
	}
	return "…"
}
