package render_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/csv"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"html"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reconcile/render"
)

var update = flag.Bool("update", false, "write the golden files anew")

// settle derives summary and verdict, as a run does.
func settle(r *reconcile.Report) *reconcile.Report {
	drift := false
	for _, f := range r.Findings {
		if f.Stands() {
			r.Summary[f.Check]++
			drift = drift || f.Severity.Drift()
		}
	}
	for check, n := range r.Omitted {
		r.Summary[check] += n
	}
	switch {
	case len(r.Incomplete) > 0:
		r.Verdict = reconcile.VerdictIncomplete
	case drift:
		r.Verdict = reconcile.VerdictDrift
	default:
		r.Verdict = reconcile.VerdictConsistent
	}
	return r
}

// empty is a report of a run that found nothing.
func empty() *reconcile.Report {
	r := &reconcile.Report{
		Schema: reconcile.SchemaVersion, RunID: "20260102T030405Z-abcdefgh", Mode: reconcile.ModeDeep,
		StartedAt: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), FinishedAt: time.Date(2026, 1, 2, 3, 4, 7, 250_000_000, time.UTC),
		Scopes: []reconcile.ScopeReport{}, Findings: []reconcile.Finding{}, Incomplete: []reconcile.Incomplete{}, Summary: map[string]int{},
	}
	for _, check := range []string{reconcile.CheckLostReservation, reconcile.CheckDeficit, reconcile.CheckStatusBehind} {
		r.Summary[check] = 0
	}
	return r
}

func scope(bucket int64) reconcile.Scope {
	return reconcile.Scope{ActivityID: "10001", SKUID: "88001", Version: 7, Bucket: bucket}
}

func row(bucket int64, v reconcile.Verdict, available, reserved, active int64) reconcile.ScopeReport {
	deviation := new(reserved - active)
	if v == reconcile.VerdictIncomplete {
		deviation = nil
	}
	return reconcile.ScopeReport{
		Scope: scope(bucket), Verdict: v, InMotion: bucket == 1,
		Redis: &reconcile.RedisCount{
			Initial: new(available + reserved), Available: new(available), Reserved: new(reserved), ReleasedTotal: new(int64(3)),
			SendPending: new(int64(0)), ReservationExpiry: new(int64(0)),
		},
		Postgres: &reconcile.OrdersCount{Active: active, Cancelled: 1}, Deviation: deviation,
	}
}

func finding(check string, severity reconcile.Severity, bucket int64, subject, message string) reconcile.Finding {
	return reconcile.Finding{
		Check: check, Severity: severity, Scope: scope(bucket), Subject: subject, Message: message, Rounds: 2,
		Evidence: reconcile.Evidence{
			Redis: map[string]any{"status": "RELEASED", "available": 40}, Postgres: map[string]any{"order_id": "o-1", "claim": "ORDER"},
		},
		Repair: reconcile.Repair{Kind: reconcile.RepairManual, State: reconcile.RepairStateNone, Detail: "a person decides"},
	}
}

// drifted is a report with findings of every severity and every repair state.
func drifted() *reconcile.Report {
	r := empty()
	r.Scopes = []reconcile.ScopeReport{
		row(0, reconcile.VerdictConsistent, 60, 40, 40), row(1, reconcile.VerdictConsistent, 80, 20, 20), row(2, reconcile.VerdictDrift, 10, 90, 92),
	}
	r.Findings = []reconcile.Finding{
		finding(reconcile.CheckLostReservation, reconcile.SeverityCritical, 2, "uekb4ncu7j4dst4xyjqugyamc3", "order o-1 has no reservation"),
		finding(reconcile.CheckLostReservation, reconcile.SeverityCritical, 2, "vekb4ncu7j4dst4xyjqugyamc4", "order o-2 has no reservation"),
		finding(reconcile.CheckStatusBehind, reconcile.SeverityError, 2, "wekb4ncu7j4dst4xyjqugyamc5", "ENQUEUED, and the order exists"),
		finding(reconcile.CheckRetentionRisk, reconcile.SeverityWarning, 0, "a:10001:s:88001:v:7:b:0", "3 undecided, and the keys expire in 5h0m0s"),
		finding(reconcile.CheckCancelledHoldsStock, reconcile.SeverityInfo, 1, "xekb4ncu7j4dst4xyjqugyamc6", "its order was cancelled"),
	}
	r.Findings[0].Repair = reconcile.Repair{Kind: reconcile.RepairAutomatic, State: reconcile.RepairStateFailed, Detail: "DEFICIT: no unit is left"}
	r.Findings[1].Repair = reconcile.Repair{Kind: reconcile.RepairAutomatic, State: reconcile.RepairStatePlanned, Detail: "restore"}
	r.Findings[2].Repair = reconcile.Repair{
		Kind: reconcile.RepairAutomatic, State: reconcile.RepairStateDone, Detail: "advanced to ORDER_CREATED",
		Before: map[string]any{"status": "ENQUEUED"}, After: map[string]any{"status": "ORDER_CREATED"},
	}
	r.Findings[3].Repair.State = reconcile.RepairStatePendingApproval
	return settle(r)
}

// partial is a report of a run that could not read everything.
func partial() *reconcile.Report {
	r := drifted()
	clear(r.Summary)
	r.Scopes[1].Verdict, r.Scopes[1].Deviation, r.Scopes[1].Redis, r.Scopes[1].Postgres = reconcile.VerdictIncomplete, nil, nil, nil
	at := scope(1)
	r.Incomplete = []reconcile.Incomplete{
		{Source: reconcile.SourceRedis, Scope: &at, Reason: "read the stock: i/o timeout"},
		{Source: reconcile.SourcePostgres, Reason: "the registry changed"},
	}
	r.NotMade = map[string]string{reconcile.CheckSoldMismatch: "not applicable: no counter is named"}
	r.Omitted, r.OmittedRepaired = map[string]int{reconcile.CheckLostReservation: 3}, map[string]int{reconcile.CheckStatusBehind: 4}
	return settle(r)
}

func write(t rapid.TB, format string, r *reconcile.Report) string {
	t.Helper()
	var b bytes.Buffer
	if err := render.Write(&b, format, r); err != nil {
		t.Fatalf("%s: %v", format, err)
	}
	return b.String()
}

// TestGolden compares what people read with files; -update writes them anew.
func TestGolden(t *testing.T) {
	for name, report := range map[string]*reconcile.Report{"consistent": consistent(), "drift": drifted(), "incomplete": partial()} {
		for _, format := range render.Formats() {
			file := filepath.Join("testdata", name+"."+format)
			got := write(t, format, report)
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s (-want +got); -update writes it anew:\n%s", file, diff)
			}
		}
	}
}

func consistent() *reconcile.Report {
	r := empty()
	r.Mode = reconcile.ModeQuick
	r.Scopes = []reconcile.ScopeReport{row(0, reconcile.VerdictConsistent, 60, 40, 40)}
	return settle(r)
}

// texts are values that mean something to a terminal, a spreadsheet, Markdown or
// HTML, and harmless ones.
var texts = []string{
	"plain", "", "a|b", "=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\uFF1D1", `"quoted", and a comma`, "two\nlines", "\x1b[31mred\x1b[0m", "\u2028",
	"<script>alert(1)</script>", "</style><script>x</script>", `" onmouseover="x`, "`tick` ``two``", "*b* _i_ [l](http://x) ![i](y)", "\u5e93\u5b58\u4e0d\u8db3",
	"@everyone", "&lt;", "\xff\xfe", "javascript:alert(1)", "'; DROP TABLE x; --", "{{.}}", "\\",
}

// random draws a report whose parts agree, of any checks, severities, repairs
// and values.
func random(t *rapid.T) *reconcile.Report {
	r := empty()
	text := rapid.SampledFrom(texts)
	checks := reconcile.Checks()
	for _, c := range checks {
		if rapid.Bool().Draw(t, "made") {
			r.Summary[c.ID] = 0
		}
	}
	drawScope := func() reconcile.Scope {
		return reconcile.Scope{ActivityID: text.Draw(t, "activity"), SKUID: "s", Version: 1, Bucket: rapid.Int64Range(0, 3).Draw(t, "bucket")}
	}
	for range rapid.IntRange(0, 80).Draw(t, "findings") {
		c := rapid.SampledFrom(checks).Draw(t, "check")
		f := finding(c.ID, c.Severity, 0, text.Draw(t, "subject"), text.Draw(t, "message"))
		f.Scope = drawScope()
		f.Evidence.Redis = map[string]any{text.Draw(t, "field"): text.Draw(t, "value")}
		f.Repair.State = rapid.SampledFrom([]reconcile.RepairState{
			reconcile.RepairStateNone, reconcile.RepairStatePlanned, reconcile.RepairStateDone, reconcile.RepairStateFailed, reconcile.RepairStatePendingApproval,
		}).Draw(t, "state")
		f.Repair.Detail = text.Draw(t, "detail")
		r.Findings = append(r.Findings, f)
		r.Summary[c.ID] += 0 // it was made
	}
	for _, c := range checks {
		if _, made := r.Summary[c.ID]; !made && rapid.IntRange(0, 5).Draw(t, "not made") == 0 {
			if r.NotMade == nil {
				r.NotMade = map[string]string{}
			}
			r.NotMade[c.ID] = text.Draw(t, "why")
		}
	}
	for range rapid.IntRange(0, 3).Draw(t, "incomplete") {
		at := drawScope()
		i := reconcile.Incomplete{Source: reconcile.SourceRedis, Reason: text.Draw(t, "reason")}
		if rapid.Bool().Draw(t, "scoped") {
			i.Scope = &at
		}
		r.Incomplete = append(r.Incomplete, i)
	}
	for bucket := range rapid.Int64Range(0, 30).Draw(t, "scopes") {
		s := row(bucket, reconcile.VerdictConsistent, 1, 2, 3)
		s.ActivityID = text.Draw(t, "activity")
		r.Scopes = append(r.Scopes, s)
	}
	return settle(r).Bounded(rapid.SampledFrom([]int{5, 1000}).Draw(t, "bound"))
}

// seen is what a format says of a report, counted in what it wrote.
type seen struct {
	standing   map[string]int // by check
	incomplete int
	verdict    reconcile.Verdict // "" where the format has none
}

// readers count in what was written, each in the way of its format.
var readers = map[string]func(t rapid.TB, written string, r *reconcile.Report) seen{
	render.FormatJSON: func(t rapid.TB, written string, _ *reconcile.Report) seen {
		var r reconcile.Report
		if err := json.Unmarshal([]byte(written), &r); err != nil {
			t.Fatal(err)
		}
		return countRows(&r)
	},
	render.FormatJSONL: func(t rapid.TB, written string, r *reconcile.Report) seen {
		s := seen{standing: map[string]int{}}
		dec := json.NewDecoder(strings.NewReader(written))
		for {
			var line struct {
				Schema   int              `json:"schema"`
				RunID    string           `json:"run_id"`
				Kind     string           `json:"kind"`
				Check    string           `json:"check"`
				Repair   reconcile.Repair `json:"repair"`
				Count    int              `json:"count"`
				Repaired bool             `json:"repaired"`
			}
			err := dec.Decode(&line)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil || line.Schema != 1 || line.RunID != r.RunID {
				t.Fatalf("line %+v, %v", line, err)
			}
			s.add(line.Kind, line.Check, line.Repair.State == reconcile.RepairStateDone || line.Repaired, max(line.Count, 1))
		}
		if lines := strings.Count(written, "\n"); lines != len(r.Findings)+len(r.Incomplete)+len(r.NotMade)+len(r.Omitted)+len(r.OmittedRepaired) {
			t.Fatalf("%d lines", lines)
		}
		return s
	},
	render.FormatCSV: func(t rapid.TB, written string, _ *reconcile.Report) seen {
		s := seen{standing: map[string]int{}}
		rows, err := csv.NewReader(strings.NewReader(written)).ReadAll()
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range rows[1:] {
			for i, cell := range row {
				if cell != "" && strings.ContainsRune("=+-@\t\r\n\uFF1D\uFF0B\uFF0D\uFF20", []rune(cell)[0]) {
					t.Fatalf("column %s is a formula: %q", rows[0][i], cell)
				}
			}
			n := 1
			if row[1] == "omitted" {
				_, _ = fmt.Sscan(row[9], &n)
			}
			s.add(row[1], row[2], row[12] == string(reconcile.RepairStateDone), n)
		}
		return s
	},
	render.FormatMarkdown: func(t rapid.TB, written string, r *reconcile.Report) seen {
		s := seen{standing: map[string]int{}, verdict: reconcile.Verdict(match(t, written, `^## Reconciliation: (\w+)\n`))}
		_, _ = fmt.Sscan(match(t, written, `(?m)^\| Incomplete \| (\d+) \|$`), &s.incomplete)
		for _, m := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| [a-z]* \\| (\\d+) \\| \\d+ \\|$").FindAllStringSubmatch(written, -1) {
			s.standing[m[1]], _ = strconv.Atoi(m[2])
			section := match(t, written, "(?s)\n#### `"+m[1]+"` \\("+m[2]+"\\)\n\n(.*?)(?:\n\n|\n\\z)")
			shown := 0
			for _, f := range r.Findings {
				if f.Check == m[1] {
					shown++
				}
			}
			if rows := strings.Count(section, "\n") - 1; rows != min(shown, 20) {
				t.Fatalf("%s: %d rows of %d:\n%s", m[1], rows, shown, section)
			}
		}
		return s
	},
	render.FormatHTML: func(t rapid.TB, written string, _ *reconcile.Report) seen {
		s := seen{standing: map[string]int{}, verdict: reconcile.Verdict(match(t, written, `<h1>Reconciliation: (\w+)</h1>`))}
		_, _ = fmt.Sscan(match(t, written, `<dt>Incomplete</dt><dd>(\d+)</dd>`), &s.incomplete)
		for _, m := range regexp.MustCompile(`<code>([a-z_]+)</code> <span class="count">(\d+) stand`).FindAllStringSubmatch(written, -1) {
			s.standing[m[1]], _ = strconv.Atoi(m[2])
		}
		return s
	},
	render.FormatTable: func(t rapid.TB, written string, r *reconcile.Report) seen {
		m := regexp.MustCompile(`\n(\w+): (\d+) scopes?, (\d+) findings?(?:, (\d+) repaired)?, (\d+) incomplete \(2.25s\)\n$`).FindStringSubmatch(written)
		if m == nil {
			t.Fatalf("no sum in:\n%s", written)
		}
		s := countRows(r) // the table has no counts by check: its total is compared
		total := 0
		for _, n := range s.standing {
			total += n
		}
		if m[2] != strconv.Itoa(len(r.Scopes)) || m[3] != strconv.Itoa(total) {
			t.Fatalf("the table says %v; there are %d scopes and %d findings", m, len(r.Scopes), total)
		}
		s.verdict = reconcile.Verdict(m[1])
		s.incomplete, _ = strconv.Atoi(m[5])
		return s
	},
}

func (s *seen) add(kind, check string, repaired bool, n int) {
	switch {
	case kind == "incomplete":
		s.incomplete++
	case kind == "not_made":
	case !repaired:
		s.standing[check] += n
	}
}

// countRows counts the rows, and not the summary.
func countRows(r *reconcile.Report) seen {
	s := seen{standing: map[string]int{}, incomplete: len(r.Incomplete), verdict: r.Verdict}
	for _, f := range r.Findings {
		s.add("finding", f.Check, !f.Stands(), 1)
	}
	for check, n := range r.Omitted {
		s.add("omitted", check, false, n)
	}
	return s
}

func match(t rapid.TB, text, pattern string) string {
	m := regexp.MustCompile(pattern).FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("no %s in:\n%s", pattern, text)
	}
	return m[1]
}

// In every format the rows, the summary, what is incomplete and the verdict
// say the same, and nothing unreadable looks like zero.
func TestAllFormatsAgree(t *testing.T) {
	if len(readers) != len(render.Formats()) {
		t.Fatalf("%d formats are read of %d", len(readers), len(render.Formats()))
	}
	rapid.Check(t, func(t *rapid.T) {
		r := random(t)
		for format, read := range readers {
			got := read(t, write(t, format, r), r)
			for check, n := range got.standing {
				if n != r.Summary[check] {
					t.Fatalf("%s shows %d of %s, the summary says %d", format, n, check, r.Summary[check])
				}
			}
			for check, n := range r.Summary {
				if n != got.standing[check] {
					t.Fatalf("%s shows %d of %s, the summary says %d", format, got.standing[check], check, n)
				}
			}
			if got.incomplete != len(r.Incomplete) || (got.verdict != "" && got.verdict != r.Verdict) {
				t.Fatalf("%s: %d incomplete and verdict %s, want %d and %s", format, got.incomplete, got.verdict, len(r.Incomplete), r.Verdict)
			}
		}
	})
}

// A report whose parts contradict each other is shown, and is an error.
func TestContradictionsAreErrors(t *testing.T) {
	for name, spoil := range map[string]func(r *reconcile.Report){
		"summary too small": func(r *reconcile.Report) { r.Summary[reconcile.CheckLostReservation] = 0 },
		"summary too large": func(r *reconcile.Report) { r.Summary[reconcile.CheckDeficit] = 1 },
		"check not counted": func(r *reconcile.Report) { delete(r.Summary, reconcile.CheckLostReservation) },
		"verdict too good":  func(r *reconcile.Report) { r.Verdict = reconcile.VerdictConsistent },
		"unread, no word":   func(r *reconcile.Report) { r.Incomplete = []reconcile.Incomplete{{Source: "redis"}} },
		"incomplete in vain": func(r *reconcile.Report) {
			r.Verdict = reconcile.VerdictIncomplete
		},
	} {
		r := drifted()
		spoil(r)
		var b bytes.Buffer
		if err := render.Write(&b, render.FormatTable, r); err == nil || !strings.Contains(err.Error(), "contradicts itself") || b.Len() == 0 {
			t.Errorf("%s: %v, %d bytes", name, err, b.Len())
		}
	}
	if err := render.Write(io.Discard, "xml", empty()); err == nil {
		t.Error("an unknown format is no error")
	}
	full, broken := drifted(), errors.New("disk full")
	for _, format := range render.Formats() {
		if err := render.Write(failing{broken}, format, full); !errors.Is(err, broken) {
			t.Errorf("%s to a full disk: %v", format, err)
		}
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

// hostile is a report in which every text is the given one.
func hostile(text string) *reconcile.Report {
	r := drifted()
	clear(r.Summary)
	at := reconcile.Scope{ActivityID: text, SKUID: text}
	for i := range r.Findings {
		f := &r.Findings[i]
		f.Scope, f.Subject, f.Message, f.Repair.Detail = at, text, text, text
		f.Evidence = reconcile.Evidence{Redis: map[string]any{text: text}}
	}
	for i := range r.Scopes {
		r.Scopes[i].Scope = at
	}
	r.Incomplete = []reconcile.Incomplete{{Source: text, Scope: &at, Reason: text}}
	return settle(r)
}

// No value becomes an element, an attribute or a style of the page; the policy
// allows its one style and nothing else.
func TestPageIsSafe(t *testing.T) {
	tag := regexp.MustCompile(`<(/?[a-zA-Z][a-zA-Z0-9]*)`)
	names := func(page string) map[string]bool {
		found := map[string]bool{}
		for _, m := range tag.FindAllStringSubmatch(page, -1) {
			found[m[1]] = true
		}
		return found
	}
	benign := names(write(t, render.FormatHTML, hostile("plain")))
	for _, text := range texts {
		page := write(t, render.FormatHTML, hostile(text))
		if diff := cmp.Diff(benign, names(page)); diff != "" {
			t.Errorf("%q changes the elements of the page (-benign +hostile):\n%s", text, diff)
		}
		for _, never := range []string{"<script", "onmouseover=\"x", "style=\"", "src=", "http://x\"", "@import", "url("} {
			if strings.Contains(page, never) {
				t.Errorf("%q: the page contains %s", text, never)
			}
		}
	}
	page := write(t, render.FormatHTML, partial())
	style := match(t, page, `(?s)<style>(.*?)</style>`)
	hash := sha256.Sum256([]byte(style))
	policy := html.UnescapeString(match(t, page, `Content-Security-Policy" content="([^"]*)"`))
	want := "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(hash[:]) + "'; base-uri 'none'; form-action 'none'"
	if policy != want {
		t.Errorf("policy %s, want %s", policy, want)
	}
	if !strings.Contains(page, "@media (prefers-color-scheme:dark)") || !strings.Contains(page, `name="viewport"`) {
		t.Error("the page is for one theme or one width only")
	}
	for _, table := range strings.Split(page, "<table")[1:] {
		if !strings.Contains(table, "<caption>") || !strings.Contains(table, `<th scope="col"`) {
			t.Errorf("a table without caption or headers: %.100s", table)
		}
	}
	if got := strings.Count(page, `role="img"`); got != 3 || strings.Count(page, "aria-labelledby=\"chart-") != got {
		t.Errorf("%d charts with names", got)
	}
	if !strings.Contains(write(t, render.FormatHTML, hostile("\u5e93\u5b58")), "\u5e93\u5b58") {
		t.Error("CJK text is not on the page as it is")
	}
}

// No value makes another cell, element, link or mention in Markdown.
func TestMarkdownIsSafe(t *testing.T) {
	cells := regexp.MustCompile(`(?:^|[^\\])\|`)
	for _, text := range texts {
		doc := write(t, render.FormatMarkdown, hostile(text))
		if strings.Contains(doc, "\n<") || regexp.MustCompile(`(?m)^[^|#\n]*<script`).MatchString(doc) {
			t.Errorf("%q: an element outside of a cell", text)
		}
		columns := 0
		for line := range strings.Lines(doc) {
			if !strings.HasPrefix(line, "|") {
				columns = 0
				continue
			}
			n := len(cells.FindAllString(line, -1))
			if columns != 0 && n != columns {
				t.Errorf("%q: a row of %d separators in a table of %d: %s", text, n, columns, line)
			}
			columns = n
		}
	}
	doc := write(t, render.FormatMarkdown, hostile("<script> @all www.x http://x"))
	if !strings.Contains(doc, "&lt;script&gt; &#64;all www&#46;x http&#58;//x") {
		t.Errorf("text is not escaped in:\n%s", doc)
	}
}

// What a terminal would obey is not printed to it.
func TestTableIsPrintable(t *testing.T) {
	for _, text := range texts {
		if table := write(t, render.FormatTable, hostile(text)); strings.ContainsAny(table, "\x1b\t\u2028") {
			t.Errorf("%q is printed as it is", text)
		}
	}
}

// The page of a large report stays one that a browser can show, and says what
// it leaves out.
func TestPageIsBounded(t *testing.T) {
	r := empty()
	for i := range 10_000 {
		r.Findings = append(r.Findings, finding(reconcile.CheckLostReservation, reconcile.SeverityCritical, 0, fmt.Sprint("rid", i), "lost"))
		r.Scopes = append(r.Scopes, row(int64(i), reconcile.VerdictConsistent, 1, 1, 1))
		r.Incomplete = append(r.Incomplete, reconcile.Incomplete{Source: "redis", Reason: "x"})
	}
	page := write(t, render.FormatHTML, settle(r))
	if len(page) > 1<<20 {
		t.Errorf("the page has %d bytes", len(page))
	}
	for _, want := range []string{"10000 stand", "and 9800 more", "and 9500 more"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not say %q", want)
		}
	}
	if lines := strings.Count(write(t, render.FormatJSONL, r), "\n"); lines != 20_000 {
		t.Errorf("JSON Lines has %d lines", lines)
	}
}
