package console_test

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/seckill/reconciler/internal/pgstore"
)

// Every page is there, in both languages, and nothing on it comes from
// elsewhere or could be a script.
//
//nolint:gosmopolitan // the pages are in Chinese too
func TestPages(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id, task := s.orphan()
	runs, err := s.daemon.Postgres.Runs(t.Context(), pgstore.RunFilter{Limit: 1})
	if err != nil || len(runs) != 1 {
		t.Fatalf("stored comparisons: %v, %v; want one", runs, err)
	}
	v := s.browser(changeToken)
	for path, want := range map[string][2]string{
		"/":                            {"Overview", "总览"},
		s.versionPath():                {"Buckets", "库存桶"},
		"/tasks":                       {"orphan_member", "orphan_member"},
		"/tasks?all=1":                 {"Only open tasks", "只看未决任务"},
		fmt.Sprintf("/tasks/%d", task): {"What is proposed", "建议的处理"},
		"/reports":                     {"Comparison", "对账"},
		"/reports/" + runs[0].ID:       {"Download", "下载"},
		"/reservations?id=" + id:       {"What happens next", "接下来会怎样"},
		"/jobs":                        {"Run now", "立即运行"},
	} {
		for i, language := range []string{"en-GB,en;q=0.9", "zh-CN,zh;q=0.9"} {
			v.header.Set("Accept-Language", language)
			status, body, header := v.get(path)
			if status != http.StatusOK || !strings.Contains(body, want[i]) {
				t.Errorf("%s in %s: %d, without %q\n%s", path, language, status, want[i], body)
			}
			if policy := header.Get("Content-Security-Policy"); !strings.Contains(policy, "default-src 'none'") || strings.Contains(policy, "unsafe") {
				t.Errorf("%s: policy %q", path, policy)
			}
			for _, bad := range []string{"<style", " style=", "onclick=", "http://", "https://", "<no value>", "%!"} {
				if strings.Contains(strings.ReplaceAll(body, "http://www.w3.org/2000/svg", ""), bad) {
					t.Errorf("%s has %q in it", path, bad)
				}
			}
			if !strings.Contains(body, `<html lang="`+[]string{"en", "zh-Hans"}[i]+`">`) {
				t.Errorf("%s does not say that it is in %s", path, language)
			}
		}
	}
	for _, path := range []string{"/assets/console.css", "/assets/console.js", "/assets/chart.css", "/assets/icon.svg"} {
		if status, _, _ := s.stranger().get(path); status != http.StatusOK {
			t.Errorf("%s: %d", path, status)
		}
	}
}

//nolint:gosmopolitan // the pages are in Chinese too
func TestAChosenLanguageStays(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	v := s.browser(readToken)
	v.header.Set("Accept-Language", "en")
	if status, body, _ := v.post("/language", url.Values{"language": {"zh-Hans"}, "next": {"/jobs"}}); status != http.StatusOK || !strings.Contains(body, "作业") {
		t.Errorf("after choosing Chinese: %d\n%s", status, body)
	}
}

func TestReportDownloads(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.orphan()
	runs, err := s.daemon.Postgres.Runs(t.Context(), pgstore.RunFilter{Limit: 1})
	if err != nil || len(runs) != 1 {
		t.Fatal(runs, err)
	}
	v := s.browser(readToken)
	for format, want := range map[string]string{"json": `"verdict"`, "csv": "orphan_member", "html": "<!doctype html>", "markdown": "orphan_member"} {
		status, body, header := v.get("/reports/" + runs[0].ID + "/download?format=" + format)
		if status != http.StatusOK || !strings.Contains(strings.ToLower(body), want) {
			t.Errorf("%s: %d, without %q\n%.400s", format, status, want, body)
		}
		if !strings.HasPrefix(header.Get("Content-Disposition"), "attachment;") {
			t.Errorf("%s is shown instead of saved: it has a policy of its own", format)
		}
	}
	if status, _, _ := v.get("/reports/" + runs[0].ID + "/download?format=exe"); status != http.StatusBadRequest {
		t.Errorf("an unknown format: %d", status)
	}
}

// A task is approved from what a person saw, and leaves their name.
func TestApprove(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, task := s.orphan()
	page := fmt.Sprintf("/tasks/%d", task)
	v := s.browser(changeToken)
	if status, body := v.submit(page, page, url.Values{"action": {"approve"}}); status != http.StatusBadRequest || !strings.Contains(body, "say why") {
		t.Errorf("without a reason: %d", status)
	}
	if status, _, _ := v.post(page, url.Values{"action": {"approve"}, "reason": {"x"}, "fingerprint": {"0"}}); status != http.StatusForbidden {
		t.Errorf("without the form's token: %d", status)
	}
	status, body := v.submit(page, page, url.Values{"action": {"approve"}, "reason": {"lost in a failover"}})
	if status != http.StatusOK || !strings.Contains(body, "Nothing is left behind the task") {
		t.Fatalf("approved: %d\n%s", status, body)
	}
	if !s.audited("repair_ended", "alice") {
		t.Error("the audit trail does not name alice")
	}
	for _, snapshot := range s.daemon.Redis.Snapshots(t.Context(), s.spec.Scopes()) {
		if snapshot.Available != snapshot.Initial || snapshot.Reserved != 0 {
			t.Errorf("the unit was not given back: %+v", snapshot.SnapshotReply)
		}
	}
}

// A refusal that is nobody's fault is no error of the server.
func TestRefusedAsThingsStand(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, task := s.orphan()
	api := s.program(changeToken)
	path := fmt.Sprintf("/api/v1/tasks/%d", task)
	if err := s.daemon.Postgres.HoldScopes(t.Context(), s.spec.Scopes(), "bob", "looking"); err != nil {
		t.Fatal(err)
	}
	_, seen := api.call(http.MethodGet, path, nil)
	approve := map[string]string{"action": "approve", "reason": "x", "fingerprint": fmt.Sprint(seen["fingerprint"])}
	if status, answer := api.call(http.MethodPost, path, approve); status != http.StatusConflict {
		t.Errorf("approving in a scope that is held: %d %v", status, answer)
	}
	reject := map[string]string{"action": "reject", "reason": "x"}
	for i, want := range []int{http.StatusOK, http.StatusConflict} {
		if status, answer := api.call(http.MethodPost, path, reject); status != want {
			t.Errorf("rejecting, time %d: %d %v, want %d", i+1, status, answer, want)
		}
	}
}

// What changed since a person looked is not carried out.
func TestApproveOnlyWhatWasShown(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	_, task := s.orphan()
	api := s.program(changeToken)
	path := fmt.Sprintf("/api/v1/tasks/%d", task)
	_, seen := api.call(http.MethodGet, path, nil)
	user := "second-user" // in the same bucket, which is the task's
	for i := 0; s.scopeOf(user) != s.scopeOf("orphan-user"); i++ {
		user = fmt.Sprint("second-user-", i)
	}
	second := s.reserve(user)
	if err := s.redis.Del(t.Context(), s.scopeOf(user).ReservationKey(second)).Err(); err != nil {
		t.Fatal(err)
	}
	status, answer := api.call(http.MethodPost, path, map[string]string{"action": "approve", "reason": "x", "fingerprint": fmt.Sprint(seen["fingerprint"])})
	if status != http.StatusConflict {
		t.Errorf("approved what was not shown: %d %v", status, answer)
	}
	_, seen = api.call(http.MethodGet, path, nil)
	status, answer = api.call(http.MethodPost, path, map[string]string{"action": "approve", "reason": "x", "fingerprint": fmt.Sprint(seen["fingerprint"])})
	if status != http.StatusOK {
		t.Errorf("approved what was shown: %d %v", status, answer)
	}
	if !s.audited("repair_ended", "ci") {
		t.Error("the audit trail does not name the program's person")
	}
}

func TestChanges(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	v := s.browser(changeToken)
	page := s.versionPath()
	held := func() bool {
		scope, err := s.daemon.Postgres.Scope(t.Context(), s.spec.Scopes()[1])
		if err != nil {
			t.Fatal(err)
		}
		return scope.Hold != nil
	}
	change := func(to, action, reason string) int {
		status, _ := v.submit(page, to, url.Values{"action": {action}, "reason": {reason}})
		return status
	}
	activity := "/activities/" + s.spec.ActivityID
	if status := change(activity, "hold", "recount"); status != http.StatusOK || !held() {
		t.Errorf("hold: %d, held %v", status, held())
	}
	if status := change(page, "unhold", "done"); status != http.StatusOK || held() {
		t.Errorf("unhold: %d, held %v", status, held())
	}
	if status := change(page, "pause", "wrong price"); status != http.StatusOK || s.daemon.Redis.Snapshots(t.Context(), s.spec.Scopes())[0].State != "PAUSED" {
		t.Errorf("pause: %d", status)
	}
	if status := change(page, "resume", "right price"); status != http.StatusOK || s.daemon.Redis.Snapshots(t.Context(), s.spec.Scopes())[0].State != "ACTIVE" {
		t.Errorf("resume: %d", status)
	}
	for _, bad := range []string{"delete", "", "close;"} {
		if status := change(page, bad, "x"); status != http.StatusBadRequest {
			t.Errorf("action %q: %d", bad, status)
		}
	}
	if status := change(page, "hold", ""); status != http.StatusBadRequest || held() {
		t.Errorf("hold without a reason: %d", status)
	}
	if !s.audited("scope_hold", "alice") || !s.audited("scope_state", "alice") {
		t.Error("the audit trail does not name alice")
	}
	status, body := v.submit("/jobs", "/jobs/fencer", url.Values{"action": {"pause"}})
	if status != http.StatusOK || !strings.Contains(body, "paused") {
		t.Errorf("pause of a job: %d", status)
	}
	api := s.program(changeToken)
	if status, jobs := api.call(http.MethodPost, "/api/v1/jobs/fencer", map[string]string{"action": "resume"}); status != http.StatusOK || strings.Contains(fmt.Sprint(jobs), "paused:true") {
		t.Errorf("resume of a job: %d %v", status, jobs)
	}
	if status, _ := api.call(http.MethodPost, "/api/v1/jobs/nobody", map[string]string{"action": "run"}); status != http.StatusNotFound {
		t.Errorf("a job that there is not: %d", status)
	}
}

// The API answers what the commands print.
func TestAPI(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id, _ := s.orphan()
	api := s.program(readToken)
	for path, key := range map[string]string{
		"/api/v1/status": "lease", "/api/v1/scopes": "scopes", "/api/v1/jobs": "jobs", "/api/v1/tasks": "tasks",
		"/api/v1/reports": "runs", "/api/v1/reservations/" + id: "next", "/api/v1/requests/q-orphan-user": "results",
	} {
		status, answer := api.call(http.MethodGet, path, nil)
		if status != http.StatusOK || answer["schema"] != float64(1) || answer[key] == nil {
			t.Errorf("%s: %d %v", path, status, answer)
		}
	}
	_, runs := api.call(http.MethodGet, "/api/v1/reports", nil)
	newest := fmt.Sprint(runs["runs"].([]any)[0].(map[string]any)["run_id"])
	if status, report := api.call(http.MethodGet, "/api/v1/reports/"+newest, nil); status != http.StatusOK || report["verdict"] == nil {
		t.Errorf("a report: %d %v", status, report)
	}
	for path, want := range map[string]int{
		"/api/v1/nothing": 404, "/api/v1/tasks/999999": 404, "/api/v1/tasks/x": 404, "/api/v1/reports/none": 404,
		"/api/v1/reservations/none": 404, "/api/v1/status?most=-1": 400,
	} {
		if status, answer := api.call(http.MethodGet, path, nil); status != want || answer["error"] == nil {
			t.Errorf("%s: %d %v, want %d with an error", path, status, answer, want)
		}
	}
}

// A user is looked for without their id getting into an address or a page.
func TestLookUpOfAUser(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	id := s.reserve("user-0815")
	v := s.browser(readToken)
	status, body := v.submit("/reservations", "/reservations", url.Values{"kind": {"user"}, "id": {"user-0815"}})
	if status != http.StatusOK || !strings.Contains(body, id) {
		t.Errorf("looking for a user: %d, without their reservation\n%s", status, body)
	}
	if strings.Contains(body, "user-0815") && !strings.Contains(body, "q-user-0815") {
		t.Error("the page names the user")
	}
	if status, body := v.submit("/reservations", "/reservations", url.Values{"kind": {"request"}, "id": {"q-user-0815"}}); status != http.StatusOK || !strings.Contains(body, id) {
		t.Errorf("looking for a request: %d", status)
	}
	if status, body, _ := v.get("/reservations?id=nothing"); status != http.StatusOK || !strings.Contains(body, "no such reservation") {
		t.Errorf("looking for nothing: %d", status)
	}
}
