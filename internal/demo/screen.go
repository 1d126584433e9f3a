package demo

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// screen shows what happens. On a terminal the picture of the moment is drawn
// over the one before; elsewhere each is one line.
type screen struct {
	out      io.Writer
	terminal bool
	colour   bool
	began    time.Time

	mu    sync.Mutex
	drawn int // lines of the picture on the terminal
	draws int
	parts []byte
}

func newScreen(o Options) *screen {
	s := &screen{out: o.Progress, terminal: o.Terminal, colour: o.Colour, began: time.Now()}
	if s.out == nil {
		s.out = io.Discard
	}
	return s
}

// picture is the state of things at one moment.
type picture struct {
	line   string // in short
	title  string // of the block on a terminal
	detail []string
}

// detailEvery is how many short lines come between two with all details.
const detailEvery = 5

func (s *screen) phase(title string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep()
	s.printf("\n%s\n", s.bold(title))
}

func (s *screen) done(took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep()
	s.printf("  done in %.1f s\n", took.Seconds())
}

func (s *screen) sayf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep()
	s.printf("  %s\n", fmt.Sprintf(format, args...))
}

// Write lets others report their progress, line by line.
func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.parts = append(s.parts, p...)
	for {
		line, rest, whole := strings.Cut(string(s.parts), "\n")
		if !whole {
			return len(p), nil
		}
		s.parts = []byte(rest)
		s.printf("  %s\n", line)
	}
}

// draw shows the picture in place of the last one.
func (s *screen) draw(p picture) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := time.Since(s.began)
	clock := fmt.Sprintf("%02d:%02d", int(at.Minutes()), int(at.Seconds())%60)
	if !s.terminal {
		s.printf("  %s  %s\n", clock, p.line)
		if s.draws++; s.draws%detailEvery == 0 {
			for _, line := range p.detail {
				s.printf("         %s\n", line)
			}
		}
		return
	}
	if s.drawn > 0 {
		s.printf("\x1b[%dA\x1b[J", s.drawn) // up, and clear to the end
	}
	block := append([]string{clock + "  " + p.title}, p.detail...)
	for _, line := range block {
		s.printf("  %s\n", line)
	}
	s.drawn = len(block)
}

// keep leaves the picture where it is: what follows comes below it.
func (s *screen) keep() { s.drawn = 0 }

func (s *screen) bold(title string) string {
	if s.colour {
		return text.Bold.Sprint(title)
	}
	return title
}

func (s *screen) printf(format string, args ...any) {
	_, _ = fmt.Fprintf(s.out, format, args...) // progress is only a courtesy
}

// picture puts together what the demo knows at this moment.
func (p *play) picture(s *State) picture {
	tally := p.sale.Tally()
	byStatus := map[reservation.Status]int{}
	for i := range s.Scopes {
		for status, n := range s.Scopes[i].ByStatus() {
			byStatus[status] += n
		}
	}
	var statuses []string
	for _, status := range reservation.Statuses {
		statuses = append(statuses, fmt.Sprintf("%s %d", status, byStatus[status]))
	}
	orphans := len(s.Orphans())
	rows := rowCounts(p.stage.daemon.counters())
	var shown []string
	for _, r := range rows {
		shown = append(shown, fmt.Sprintf("%s: %d", r.Row, r.Count))
	}
	requests := fmt.Sprintf("requests %d/%d, accepted %d", tally.Requests, p.o.Users, tally.Accepted)
	open := fmt.Sprintf("undecided %d, waiting for a person %d", s.Open(), orphans)
	return picture{
		line:  requests + " | " + open,
		title: requests + "  " + bar(tally.Requests, p.o.Users) + "  " + open,
		detail: []string{
			"by status:  " + strings.Join(statuses, "  "),
			"undecided, by fault:  " + p.openByFault(s),
			"the daemon's decisions, by row:  " + strings.Join(shown, "  "),
		},
	}
}

const barWidth = 30

func bar(done, all int) string {
	full := min(barWidth*done/max(all, 1), barWidth)
	return "[" + strings.Repeat("#", full) + strings.Repeat(".", barWidth-full) + "]"
}

// openByFault lists the faults with undecided reservations, most first.
func (p *play) openByFault(s *State) string {
	counts := map[upstream.Fault]int{}
	for _, sold := range p.sale.Ledger().All() {
		if r := s.of(sold); r != nil && r.Open() {
			counts[sold.Fault]++
		}
	}
	var faults []upstream.Fault
	for _, fault := range upstream.AllFaults {
		if counts[fault] > 0 {
			faults = append(faults, fault)
		}
	}
	slices.SortStableFunc(faults, func(a, b upstream.Fault) int { return counts[b] - counts[a] })
	const most = 6
	var parts []string
	for _, fault := range faults[:min(len(faults), most)] {
		parts = append(parts, fmt.Sprintf("%s %d", fault, counts[fault]))
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, "  ")
}

func quoteless(args []string) string { return strings.Join(args, " ") }
