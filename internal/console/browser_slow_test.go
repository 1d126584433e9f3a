//go:build slow

package console_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/browser"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
)

var update = flag.Bool("update", false, "write the screenshots of docs/images anew")

// browserLimit bounds everything that is done in the browser, eventual one
// condition: both are generous, for machines that have other work.
const (
	browserLimit = 8 * time.Minute
	eventual     = 90 * time.Second
)

const (
	wide   = 1280
	narrow = 390
)

// tab is a page of the browser with a memory of everything that it complained
// about.
type tab struct {
	t   *testing.T
	ctx context.Context
	s   *shop

	mu         sync.Mutex
	complaints []string
}

// startBrowser starts Chromium; tabs are opened in the context it returns.
func startBrowser(t *testing.T, chromium string) context.Context {
	t.Helper()
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.ExecPath(chromium),
		chromedp.NoSandbox, // it shows our own pages only, and root has no sandbox
		chromedp.DisableGPU, chromedp.Flag("disable-component-update", true), chromedp.Flag("lang", "en-US"),
		chromedp.WSURLReadTimeout(eventual), chromedp.UserDataDir(t.TempDir()), chromedp.WindowSize(wide, 900))
	limited, cancelLimit := context.WithTimeout(context.WithoutCancel(t.Context()), browserLimit)
	t.Cleanup(cancelLimit)
	allocator, cancel := chromedp.NewExecAllocator(limited, options...)
	t.Cleanup(cancel)
	ctx, cancelBrowser := chromedp.NewContext(allocator)
	t.Cleanup(cancelBrowser)
	if err := chromedp.Do(ctx); err != nil {
		t.Fatalf("start %s: %v", chromium, err)
	}
	t.Cleanup(func() { _ = chromedp.Cancel(ctx) })
	return ctx
}

// open opens a tab, with cookies of its own.
func (s *staged) open(t *testing.T) *tab {
	t.Helper()
	b := &tab{t: t, s: s.shop}
	ctx, cancel := chromedp.NewContext(s.browser, chromedp.WithNewBrowserContext(), chromedp.WithListener(b.hear))
	t.Cleanup(cancel)
	b.ctx = ctx
	b.do(chromedp.EmulateViewport(wide, 900))
	return b
}

// hear notes errors of scripts, refused loads and violations of the policy.
func (b *tab) hear(event any) {
	var text string
	switch e := event.(type) {
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError || e.Entry.Level == log.EntryLevelWarning {
			text = e.Entry.Text + " " + e.Entry.URL
		}
	case *runtime.EventExceptionThrown:
		text = e.ExceptionDetails.Text
	case *runtime.EventConsoleAPICalled:
		text = "console." + string(e.Type)
	}
	if text != "" {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.complaints = append(b.complaints, text)
	}
}

// heard is what was noted since it was last asked for.
func (b *tab) heard() []string {
	// Events arrive before the answer to a later command.
	evaluate[int](b, "1")
	b.mu.Lock()
	defer b.mu.Unlock()
	heard := b.complaints
	b.complaints = nil
	return heard
}

func (b *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	if err := chromedp.Do(b.ctx, steps...); err != nil {
		b.t.Fatal(err)
	}
}

func evaluate[T any](b *tab, script string) T {
	b.t.Helper()
	value, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](script, chromedp.EvalAwaitPromise))
	if err != nil {
		b.t.Fatalf("%.200s: %v", script, err)
	}
	return value
}

func (b *tab) visit(path string) { b.t.Helper(); b.do(chromedp.Navigate(b.s.base + path)) }

// until waits for a condition, over navigations too.
func (b *tab) until(script string) {
	b.t.Helper()
	deadline := time.Now().Add(eventual)
	for {
		ok, err := chromedp.Run(b.ctx, chromedp.Evaluate[bool]("!!("+script+")"))
		if ok {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("waited in vain for %s (%v) on\n%s", script, err, evaluate[string](b, "document.body.innerText"))
		}
		b.do(chromedp.Sleep(100 * time.Millisecond))
	}
}

func (b *tab) speak(language string) {
	b.t.Helper()
	if _, err := chromedp.Call(b.ctx, emulation.SetUserAgentOverride, emulation.SetUserAgentOverrideParams{UserAgent: "console test", AcceptLanguage: language}); err != nil {
		b.t.Fatal(err)
	}
}

func (b *tab) scheme(name string) {
	b.t.Helper()
	if _, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}, {Name: "prefers-reduced-motion", Value: "reduce"}},
	}); err != nil {
		b.t.Fatal(err)
	}
}

// signIn signs in as a person does, with the keyboard.
func (b *tab) signIn(token, next string) {
	b.t.Helper()
	b.visit(next)
	b.do(chromedp.SendKeys(chromedp.CSS("#actor"), "alice"), chromedp.SendKeys(chromedp.CSS("#token"), token+kb.Enter))
	b.until(`location.pathname === "` + next + `" && document.querySelector("nav") && document.readyState === "complete"`)
}

// violations are those of WCAG 2 A and AA that axe finds.
func (b *tab) violations() []string {
	b.t.Helper()
	return evaluate[[]string](b, `axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"], resultTypes: ["violations"]})
		.then(r => r.violations.flatMap(v => v.nodes.map(n => v.id + " at " + n.target.join(" ") + ": " + n.failureSummary)))`)
}

// overflow names what sticks out of the page to the right.
func (b *tab) overflow(width int64) []string {
	b.t.Helper()
	b.do(chromedp.EmulateViewport(width, 900))
	return evaluate[[]string](b, `document.documentElement.scrollWidth <= innerWidth ? [] :
		[...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll")).map(e => e.outerHTML.slice(0, 120))
		.concat("page is " + document.documentElement.scrollWidth + " wide")`)
}

// staged is a shop with something to see on every page, and a browser.
type staged struct {
	*shop
	browser context.Context
	axe     string
	orphan  string
	task    int64
	run     string // of the comparison
	pages   []string
}

func newStage(t *testing.T) *staged {
	t.Helper()
	chromium, axe := stacktest.Browser(t)
	s := &staged{shop: newShop(t), axe: axe}
	s.sell(1, 12_000, 4)
	for i := range 37 {
		s.reserve(fmt.Sprint("buyer-", i))
	}
	s.orphan, s.task = s.shop.orphan()
	s.work(t)
	runs, err := s.daemon.Postgres.Runs(t.Context(), pgstore.RunFilter{Limit: 2})
	if err != nil || len(runs) != 2 {
		t.Fatalf("stored comparisons: %v, %v; want two", runs, err)
	}
	s.run = runs[0].ID
	s.drawTrends(t)
	lease, err := s.daemon.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lease.Release(context.WithoutCancel(t.Context())) })
	s.pages = []string{
		"/", s.versionPath(), "/tasks", "/tasks?all=1", fmt.Sprintf("/tasks/%d", s.task), "/reports", "/reports/" + s.run,
		"/reservations", "/reservations?id=" + s.orphan, "/reservations?id=" + s.ids[0], "/jobs",
	}
	s.browser = startBrowser(t, chromium)
	return s
}

// work makes another pass of every job and notes it, as the daemon does.
func (s *staged) work(t *testing.T) {
	t.Helper()
	for _, job := range s.daemon.Once(t.Context()).Jobs {
		if err := s.daemon.Postgres.RecordJob(t.Context(), pgstore.JobRun{
			Name: job.Job, StartedAt: time.Now(), FinishedAt: time.Now(), Result: job.Counts, Error: job.Error,
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// drawTrends stores samples of the last hours, as the daemon does each minute.
func (s *staged) drawTrends(t *testing.T) {
	t.Helper()
	if _, err := s.db.Exec(t.Context(), `
		INSERT INTO seckill.version_sample (activity_id, sku_id, activity_version, at, buckets_read, available, reserved, released_total, send_pending, undecided)
		SELECT $1, $2, $3, clock_timestamp() - make_interval(mins => 300 - 5 * n), 2, 200 - n * n / 40, n / 2, n / 4, round(9 + 6 * sin(n / 6.0)), round(7 - 4 * cos(n / 9.0))
		FROM generate_series(0, 60) AS n`, s.spec.ActivityID, s.spec.SKUID, s.spec.Version); err != nil {
		t.Fatal(err)
	}
}

// The console in a real browser, from signing in to signing out.
func TestSlowConsole(t *testing.T) {
	t.Parallel()
	s := newStage(t)
	for _, step := range []struct {
		name string
		run  func(*staged, *tab)
	}{
		{"the watch sees a violation", (*staged).watchSees},
		{"every page", (*staged).everyPage},
		{"screenshots", (*staged).screenshots},
		{"keyboard", (*staged).keyboard},
		{"refresh", (*staged).refresh},
		{"language", (*staged).chooseLanguage},
		{"download", (*staged).downloadReport},
		{"jobs", (*staged).pauseJob},
		{"without scripts", (*staged).withoutScripts},
		{"approve", (*staged).approveTask},
	} {
		t.Run(step.name, func(t *testing.T) { step.run(s, s.open(t)) })
	}
}

// A test that listens for complaints must hear one.
func (s *staged) watchSees(b *tab) {
	b.visit("/login")
	if heard := b.heard(); len(heard) != 0 {
		b.t.Errorf("the sign-in page: %q", heard)
	}
	evaluate[chromedp.Void](b, `document.body.insertAdjacentHTML("beforeend", "<p style='color:red'>x</p><img src='http://elsewhere.example/x.png'>")`)
	b.until(`document.querySelector("img")`)
	if heard := strings.Join(b.heard(), "\n"); !strings.Contains(heard, "style-src") || !strings.Contains(heard, "img-src") {
		b.t.Errorf("the policy lets foreign images and inline styles in, or nobody hears of it: %q", heard)
	}
	b.do(chromedp.Evaluate[chromedp.Void](s.axe))
	evaluate[chromedp.Void](b, `document.querySelector("main").insertAdjacentHTML("beforeend", "<input>")`)
	if found := strings.Join(b.violations(), "\n"); !strings.Contains(found, "label") {
		b.t.Errorf("axe does not miss a label: %q", found)
	}
}

// Every page, in both languages, light and dark, wide and narrow.
func (s *staged) everyPage(b *tab) {
	b.speak("en")
	b.signIn(changeToken, "/")
	for _, language := range []string{"en", "zh-CN"} {
		b.speak(language)
		for _, path := range s.pages {
			b.visit(path)
			s.examine(b, language, path)
		}
	}
	stranger := s.open(b.t)
	for _, language := range []string{"en", "zh-CN"} {
		stranger.speak(language)
		stranger.visit("/login")
		s.examine(stranger, language, "/login")
	}
	b.visit("/tasks/999999")
	b.heard() // the browser itself complains of the status
	s.examine(b, "zh-CN", "/tasks/999999")
}

// examine looks at the page that a tab shows.
func (s *staged) examine(b *tab, language, path string) {
	b.t.Helper()
	if lang := evaluate[string](b, "document.documentElement.lang"); !strings.HasPrefix(lang, language[:2]) {
		b.t.Errorf("%s in %s is in %s", path, language, lang)
	}
	for _, width := range []int64{narrow, wide} {
		if out := b.overflow(width); len(out) > 0 {
			b.t.Errorf("%s in %s, %d px wide: scrolls sideways for %q", path, language, width, out)
		}
	}
	b.do(chromedp.Evaluate[chromedp.Void](s.axe))
	var background [2]string
	for i, scheme := range []string{"light", "dark"} {
		b.scheme(scheme)
		background[i] = evaluate[string](b, "getComputedStyle(document.body).backgroundColor")
		for _, violation := range b.violations() {
			b.t.Errorf("%s in %s, %s: %s", path, language, scheme, violation)
		}
	}
	if background[0] == background[1] {
		b.t.Errorf("%s does not follow the dark setting", path)
	}
	if heard := b.heard(); len(heard) > 0 {
		b.t.Errorf("%s in %s: %q", path, language, heard)
	}
}

// screenshots writes the pictures of docs/images, with -update.
func (s *staged) screenshots(b *tab) {
	root, err := devstack.ModuleRoot()
	if err != nil {
		b.t.Fatal(err)
	}
	b.speak("en")
	b.signIn(changeToken, "/")
	for _, shot := range []struct{ file, path, language, scheme string }{
		{"overview", "/", "en", "light"},
		{"version", s.versionPath(), "en", "dark"},
		{"task-zh", fmt.Sprintf("/tasks/%d", s.task), "zh-CN", "light"},
	} {
		b.speak(shot.language)
		b.scheme(shot.scheme)
		b.visit(shot.path)
		picture, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
		if err != nil {
			b.t.Fatal(err)
		}
		if len(picture) > 150<<10 {
			b.t.Errorf("the picture of %s is large: %d bytes", shot.path, len(picture))
		}
		if !*update {
			continue
		}
		if err := os.WriteFile(filepath.Join(root, "docs", "images", shot.file+".png"), picture, 0o644); err != nil {
			b.t.Fatal(err)
		}
	}
}

// mark numbers everything that can be operated and seen.
const mark = `[...document.querySelectorAll("a[href],button,input:not([type=hidden]),select,textarea,summary")]
	.filter(e => e.checkVisibility()).map((e, i) => { e.dataset.tab = i; return e.outerHTML.slice(0, 100) })`

// focused is what has the focus, and whether a person sees that it has.
const focused = `(() => {
	const e = document.activeElement, style = getComputedStyle(e), r = e.getBoundingClientRect();
	return {tab: e.dataset.tab ?? "", visible: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2
		&& r.right > 0 && r.left < innerWidth && r.bottom > 0 && r.top < innerHeight};
})()`

// keyboard walks over every page with the tab key.
func (s *staged) keyboard(b *tab) {
	b.signIn(changeToken, "/")
	for _, path := range s.pages {
		b.visit(path)
		all := evaluate[[]string](b, mark)
		reached := map[string]bool{}
		for range 2*len(all) + 20 { // also over what scrolls
			b.do(chromedp.KeyEvent(kb.Tab))
			at := evaluate[struct {
				Tab     string
				Visible bool
			}](b, focused)
			if at.Tab == "" {
				continue
			}
			if !at.Visible {
				b.t.Errorf("%s: nobody sees the focus on %s", path, evaluate[string](b, "document.activeElement.outerHTML.slice(0, 200)"))
			}
			if reached[at.Tab] = true; len(reached) == len(all) {
				break
			}
		}
		for i, element := range all {
			if !reached[strconv.Itoa(i)] {
				b.t.Errorf("%s: the tab key does not get to %s", path, element)
			}
		}
	}
	b.visit("/")
	b.do(chromedp.KeyEvent(kb.Tab), chromedp.KeyEvent(kb.Enter))
	b.until(`location.hash === "#main"`)
}

// refresh lets the page's clock tick by hand.
func (s *staged) refresh(b *tab) {
	if _, err := chromedp.Call(b.ctx, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{
		Source: `window.setInterval = tick => { window.tick = tick; return 1 }`,
	}); err != nil {
		b.t.Fatal(err)
	}
	b.signIn(changeToken, s.versionPath())
	hold := func(reason string) {
		b.t.Helper()
		if err := s.daemon.Postgres.HoldScopes(b.t.Context(), s.spec.Scopes(), "bob", reason); err != nil {
			b.t.Fatal(err)
		}
	}
	shows := func(text string) bool {
		return evaluate[bool](b, fmt.Sprintf(`window.tick().then(() => document.querySelector("main").innerText.includes(%q))`, text))
	}
	defer func() {
		if err := s.daemon.Postgres.UnholdScopes(context.WithoutCancel(b.t.Context()), s.spec.Scopes(), "bob", "done"); err != nil {
			b.t.Error(err)
		}
	}()
	hold("first-hold")
	if !shows("first-hold") {
		b.t.Error("the page does not fetch itself again")
	}
	b.do(chromedp.SendKeys(chromedp.CSS("#reason"), "half a sent"))
	hold("second-hold")
	if shows("second-hold") {
		b.t.Error("the page was fetched again under a person who types")
	}
	evaluate[chromedp.Void](b, `document.activeElement.blur()`)
	if shows("second-hold") || evaluate[string](b, `document.querySelector("#reason").value`) != "half a sent" {
		b.t.Error("what a person has typed is gone")
	}
	evaluate[chromedp.Void](b, `document.querySelector("#reason").value = ""; document.querySelector("main a").focus()`)
	if shows("second-hold") || !evaluate[bool](b, `document.activeElement.matches("main a")`) {
		b.t.Error("the focus of a keyboard was taken away")
	}
	evaluate[chromedp.Void](b, `document.activeElement.blur(); getSelection().selectAllChildren(document.querySelector("h1"))`)
	if shows("second-hold") {
		b.t.Error("what a person has selected, to copy it, was taken away")
	}
	evaluate[chromedp.Void](b, `getSelection().removeAllRanges()`)
	if !shows("second-hold") {
		b.t.Error("the page does not fetch itself again once nobody types")
	}
	if heard := b.heard(); len(heard) > 0 {
		b.t.Errorf("%q", heard)
	}
}

//nolint:gosmopolitan // the pages are in Chinese too
func (s *staged) chooseLanguage(b *tab) {
	b.speak("en")
	b.signIn(readToken, "/jobs")
	b.do(chromedp.Click(chromedp.CSS(`button[value="zh-Hans"]`)))
	b.until(`document.documentElement.lang === "zh-Hans" && location.pathname === "/jobs" && document.querySelector("h1").innerText === "作业"`)
	b.do(chromedp.Click(chromedp.CSS(`form[action="/logout"] button`)))
	b.until(`location.pathname === "/login" && document.documentElement.lang === "zh-Hans"`)
	b.visit("/jobs")
	b.until(`location.pathname === "/login"`)
}

// A report is read, and its JSON saved.
func (s *staged) downloadReport(b *tab) {
	b.speak("en")
	b.signIn(readToken, "/reports")
	b.do(chromedp.Click(chromedp.CSS(`a[href="/reports/` + s.run + `"]`)))
	b.until(`document.querySelector("h1").innerText === "drift" && document.querySelector("main").innerText.includes("orphan_member")`)
	dir := b.t.TempDir()
	id := chromedp.FromContext(b.ctx).BrowserContextID
	if _, err := chromedp.CallBrowser(b.ctx, browser.SetDownloadBehavior, browser.SetDownloadBehaviorParams{
		Behavior: browser.SetDownloadBehaviorBehaviorAllow, DownloadPath: dir, BrowserContextID: id,
	}); err != nil {
		b.t.Fatal(err)
	}
	b.do(chromedp.Click(chromedp.CSS(`a[href$="format=json"]`)))
	var report struct {
		RunID   string `json:"run_id"`
		Verdict string `json:"verdict"`
	}
	for deadline := time.Now().Add(eventual); ; b.do(chromedp.Sleep(100 * time.Millisecond)) {
		raw, err := os.ReadFile(filepath.Join(dir, "reconciliation-"+s.run+".json"))
		if err == nil && json.Unmarshal(raw, &report) == nil {
			break
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("no report was saved: %v", err)
		}
	}
	if report.RunID != s.run || report.Verdict != "drift" {
		b.t.Errorf("saved %+v, want %s with its drift", report, s.run)
	}
}

// rowOf is the line of a job.
func rowOf(job string) string {
	return `[...document.querySelectorAll("tbody tr")].find(r => r.querySelector("th").innerText === "` + job + `").innerText`
}

func (s *staged) pauseJob(b *tab) {
	b.speak("en")
	b.signIn(changeToken, "/jobs")
	press := func(action string) {
		b.do(chromedp.Click(chromedp.CSS(`form[action="/jobs/scanner"] button[value="` + action + `"]`)))
	}
	press("pause")
	b.until(rowOf("scanner") + `.includes("paused") && document.querySelector("[role=status]").innerText === "Paused."`)
	press("resume")
	b.until(rowOf("scanner") + `.includes("scheduled")`)
	for _, action := range []string{"job_paused", "job_resumed"} {
		if !s.audited(action, "alice") {
			b.t.Errorf("the audit trail has no %s by alice", action)
		}
	}
	if heard := b.heard(); len(heard) > 0 {
		b.t.Errorf("%q", heard)
	}
}

// Everything can be done in a browser without scripts.
func (s *staged) withoutScripts(b *tab) {
	b.speak("en")
	if _, err := chromedp.Call(b.ctx, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: true}); err != nil {
		b.t.Fatal(err)
	}
	b.signIn(changeToken, "/jobs")
	b.do(chromedp.Click(chromedp.CSS(`form[action="/jobs/fencer"] button[value="pause"]`)))
	b.until(rowOf("fencer") + `.includes("paused")`)
	b.do(chromedp.Click(chromedp.CSS(`form[action="/jobs/fencer"] button[value="resume"]`)))
	b.until(rowOf("fencer") + `.includes("scheduled")`)
	b.visit("/reservations")
	b.do(chromedp.SendKeys(chromedp.CSS("#id"), s.ids[0]+kb.Enter))
	b.until(`document.querySelector("main").innerText.includes("What happens next")`)
	for _, path := range s.pages {
		b.visit(path)
		if text := evaluate[string](b, `document.querySelector("main").innerText`); len(text) < 20 {
			b.t.Errorf("%s shows %q", path, text)
		}
	}
}

// A task is read, approved and seen to be done.
func (s *staged) approveTask(b *tab) {
	b.speak("en")
	b.signIn(changeToken, "/tasks")
	b.do(chromedp.Click(chromedp.CSS(fmt.Sprintf(`main a[href="/tasks/%d"]`, s.task))))
	b.until(`document.querySelector("#proposals") && document.querySelector("main").innerText.includes("` + s.orphan + `")`)
	b.do(chromedp.SendKeys(chromedp.CSS("#reason"), "lost in a failover"), chromedp.Click(chromedp.CSS(`button[value="approve"]`)))
	b.until(`document.querySelector(".banner.good") && document.querySelector("main").innerText.includes("carried out")`)
	for _, violation := range s.afterApproval(b) {
		b.t.Error(violation)
	}
	if !s.audited("repair_ended", "alice") {
		b.t.Error("the audit trail does not name alice")
	}
	b.visit(fmt.Sprintf("/tasks/%d", s.task))
	b.until(`document.querySelector("main").innerText.includes("resolved") && !document.querySelector("#proposals")`)
	if heard := b.heard(); len(heard) > 0 {
		b.t.Errorf("%q", heard)
	}
}

// afterApproval examines the page that no address leads to.
func (s *staged) afterApproval(b *tab) []string {
	found := b.overflow(narrow)
	b.do(chromedp.Evaluate[chromedp.Void](s.axe))
	return append(found, b.violations()...)
}
