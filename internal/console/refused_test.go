package console_test

import (
	"bytes"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
)

func TestNothingWithoutAToken(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, task := s.orphan()
	stranger := s.stranger()
	stranger.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	pages := []string{"/", s.versionPath(), "/tasks", fmt.Sprintf("/tasks/%d", task), "/reports", "/reservations", "/jobs"}
	for _, page := range pages {
		if status, body, header := stranger.get(page); status != http.StatusSeeOther || !strings.HasPrefix(header.Get("Location"), "/login?next=") || strings.Contains(body, "<main") {
			t.Errorf("%s: %d to %q", page, status, header.Get("Location"))
		}
	}
	for _, path := range []string{"/api/v1/status", "/api/v1/tasks", "/api/v1/nothing"} {
		if status, answer := stranger.call(http.MethodGet, path, nil); status != http.StatusUnauthorized || len(answer) != 2 {
			t.Errorf("%s: %d %v", path, status, answer)
		}
	}
	reader := s.browser(readToken)
	program := s.program(readToken)
	for _, to := range []string{s.versionPath(), "/activities/" + s.spec.ActivityID, fmt.Sprintf("/tasks/%d", task), "/jobs/fencer"} {
		form := url.Values{"action": {"hold"}, "reason": {"x"}}
		if status, _, _ := stranger.post(to, form); status != http.StatusUnauthorized {
			t.Errorf("a stranger's change of %s: %d", to, status)
		}
		if status, _ := reader.submit("/reservations", to, form); status != http.StatusForbidden {
			t.Errorf("a reader's change of %s: %d", to, status)
		}
		if status, answer := program.call(http.MethodPost, "/api/v1"+to, map[string]string{"action": "hold", "reason": "x"}); status != http.StatusForbidden {
			t.Errorf("a reading program's change of %s: %d %v", to, status, answer)
		}
	}
	if status, body, _ := stranger.post("/login", url.Values{"token": {"guess"}, "actor": {"eve"}}); status != http.StatusUnauthorized || !strings.Contains(body, "the token is wrong") || strings.Contains(body, "guess") {
		t.Errorf("signing in with a guess: %d", status)
	}
	// A page that a reader sees offers nothing that they may not do.
	for _, page := range pages {
		if _, body, _ := reader.get(page); strings.Contains(body, `name="action"`) {
			t.Errorf("%s offers a reader a change", page)
		}
	}
}

func TestHostileRequests(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	v := s.browser(changeToken)
	crossSite := s.browser(changeToken)
	crossSite.header.Set("Origin", "http://evil.example")
	crossSite.header.Set("Sec-Fetch-Site", "cross-site")
	if status, _ := crossSite.submit("/jobs", "/jobs/fencer", url.Values{"action": {"pause"}}); status != http.StatusForbidden {
		t.Errorf("a form of another site: %d", status)
	}
	if status, _, _ := crossSite.post("/login", url.Values{"token": {changeToken}, "actor": {"mallory"}}); status != http.StatusForbidden {
		t.Errorf("another site signs somebody in: %d", status)
	}
	huge := bytes.Repeat([]byte("x"), 10<<20)
	api := s.program(changeToken)
	for _, kind := range []string{"application/json", "application/x-www-form-urlencoded", "text/plain"} {
		if status, _, _ := api.do(http.MethodPost, "/api/v1/jobs/fencer", kind, huge); status < 400 || status == 500 {
			t.Errorf("10 MB of %s: %d", kind, status)
		}
	}
	if status, _, _ := api.do(http.MethodPost, "/api/v1/jobs/fencer", "application/json", append([]byte(`{"action": "`), append(huge, []byte(`"}`)...)...)); status != http.StatusRequestEntityTooLarge {
		t.Errorf("10 MB of JSON: %d", status)
	}
	for body, want := range map[string]int{``: 400, `[]`: 400, `{"action": 1}`: 400, `{"action": "run"} {}`: 400, `{"action": "run"`: 400} {
		if status, _, _ := api.do(http.MethodPost, "/api/v1/jobs/fencer", "application/json", []byte(body)); status != want {
			t.Errorf("body %q: %d", body, status)
		}
	}
	for _, path := range []string{
		"/assets/../console.go", "/assets/%2e%2e/console.go", "/assets/..%2f..%2fetc/passwd", "/scopes/..%2f/x/7", "/reports/..%2f..%2fx",
		"/tasks/-1", "/tasks/1%00", "/scopes/a/b/99999999999999999999", "/assets/", "/reports/%3Cscript%3E",
	} {
		if status, body, _ := v.get(path); status == 500 || strings.Contains(body, "package console") || strings.Contains(body, "root:") || strings.Contains(body, "<script>") {
			t.Errorf("%s: %d\n%.300s", path, status, body)
		}
	}
	for next, want := range map[string]string{"//evil.example": "/", "https://evil.example": "/", "/\\evil.example": "/", "/jobs": "/jobs"} {
		stranger := s.stranger()
		stranger.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		_, _, header := stranger.post("/login", url.Values{"token": {readToken}, "actor": {"bob"}, "next": {next}})
		if got := header.Get("Location"); got != want {
			t.Errorf("signing in leads from %q to %q, want %q", next, got, want)
		}
	}
}

// Names that others chose are text and never markup.
func TestHostileNames(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	evil := `<script>alert(1)</script>"><img src=x>`
	if _, err := s.db.Exec(t.Context(), `INSERT INTO seckill.manual_task (kind, scope, cause, count, sample) VALUES ('orphan_member', '', $1, 1, ARRAY[$1])`, evil); err != nil {
		t.Fatal(err)
	}
	v := s.browser(readToken)
	for _, page := range []string{"/tasks", "/tasks/1", "/", "/reservations?id=" + url.QueryEscape(evil)} {
		if _, body, _ := v.get(page); strings.Contains(body, "<script>alert") || strings.Contains(body, "<img") {
			t.Errorf("%s: markup of others got through", page)
		}
	}
}
