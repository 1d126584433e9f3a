package console

import (
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"

	"github.com/seckill/reconciler/internal/approval"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/reconcile/render"
	"github.com/seckill/reconciler/reservation"
)

// registerAPI adds /api/v1: what the commands print with --output json, and
// what they change.
func (c *Console) registerAPI(read, change func(string, handler)) {
	read("GET /api/v1/status", c.apiStatus)
	read("GET /api/v1/scopes", c.apiScopes)
	read("GET /api/v1/jobs", c.apiJobs)
	read("GET /api/v1/tasks", c.apiTasks)
	read("GET /api/v1/tasks/{id}", c.apiTask)
	read("GET /api/v1/reports", c.apiReports)
	read("GET /api/v1/reports/{id}", c.apiReport)
	read("GET /api/v1/reservations/{id}", c.apiReservation)
	read("GET /api/v1/requests/{id}", c.apiRequest)
	change("POST /api/v1/jobs/{name}", withJSON(c.apiChangeJob))
	change("POST /api/v1/tasks/{id}", withJSON(c.apiDecide))
	change("POST /api/v1/activities/{activity}", withJSON(c.apiChangeActivity))
	change("POST /api/v1/scopes/{activity}/{sku}/{version}", withJSON(c.apiChangeScopes))
	read("GET /api/", func(http.ResponseWriter, *http.Request) error {
		return failedWith(http.StatusNotFound, "there is no such resource: see docs/console.md")
	})
}

func writeJSON(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	_ = enc.Encode(value) //nolint:errchkjson // the values are our own; the client may be gone
}

// withJSON reads the body, an object of texts, as if it were a form: pages and
// API are one code then.
func withJSON(h handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
			return failedWith(http.StatusUnsupportedMediaType, "send a JSON object, with Content-Type: application/json")
		}
		var fields map[string]string
		d := json.NewDecoder(r.Body)
		if err := d.Decode(&fields); err != nil {
			if _, tooLarge := errors.AsType[*http.MaxBytesError](err); tooLarge {
				return err
			}
			return failedWith(http.StatusBadRequest, "the body is no JSON object of texts: %w", err)
		}
		if _, err := d.Token(); !errors.Is(err, io.EOF) {
			return failedWith(http.StatusBadRequest, "the body is more than one JSON object")
		}
		r.PostForm = url.Values{}
		for name, value := range fields {
			r.PostForm.Set(name, value)
		}
		return h(w, r)
	}
}

const defaultStatusMost = 2000

func (c *Console) apiStatus(w http.ResponseWriter, r *http.Request) error {
	most := defaultStatusMost
	if text := r.URL.Query().Get("most"); text != "" {
		var err error
		if most, err = strconv.Atoi(text); err != nil || most < 0 || most > 100_000 {
			return failedWith(http.StatusBadRequest, "most: %q is not from 0 to 100000", text)
		}
	}
	s, err := c.Daemon.Status(r.Context(), most)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, view.OfStatus(s))
	return nil
}

func (c *Console) apiScopes(w http.ResponseWriter, r *http.Request) error {
	registered, err := c.Daemon.Postgres.Scopes(r.Context(), pgstore.ScopeFilter{
		ActivityID: r.URL.Query().Get("activity"), SKUID: r.URL.Query().Get("sku"), Live: true,
	})
	if err != nil {
		return err
	}
	scopes := make([]reservation.Scope, len(registered))
	for i, s := range registered {
		scopes[i] = s.Scope
	}
	live := make([]view.LiveScope, len(scopes))
	for i, s := range c.Daemon.Redis.Snapshots(r.Context(), scopes) {
		live[i] = view.OfLiveScope(registered[i], s)
	}
	writeJSON(w, http.StatusOK, struct {
		Schema int              `json:"schema"`
		Scopes []view.LiveScope `json:"scopes"`
	}{1, live})
	return nil
}

func (c *Console) apiJobs(w http.ResponseWriter, r *http.Request) error {
	rows, err := c.jobRows(r.Context())
	if err != nil {
		return err
	}
	jobs := make([]view.Job, len(rows))
	for i, row := range rows {
		jobs[i] = row.Job
	}
	writeJSON(w, http.StatusOK, struct {
		Schema int        `json:"schema"`
		Jobs   []view.Job `json:"jobs"`
	}{1, jobs})
	return nil
}

func (c *Console) apiTasks(w http.ResponseWriter, r *http.Request) error {
	tasks, err := c.openTasks(r.Context())
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, struct {
		Schema int         `json:"schema"`
		Tasks  []view.Task `json:"tasks"`
	}{1, tasks})
	return nil
}

func (c *Console) apiTask(w http.ResponseWriter, r *http.Request) error {
	t, err := c.findTask(r)
	if err != nil {
		return err
	}
	plan, why := c.Daemon.Approver().Propose(r.Context(), t, approval.Selection{})
	v := view.OfProposed(t, plan, why)
	if why == nil {
		if v.Fingerprint, err = fingerprint(plan); err != nil {
			return err
		}
	}
	writeJSON(w, http.StatusOK, v)
	return nil
}

func (c *Console) apiDecide(w http.ResponseWriter, r *http.Request) error {
	t, report, err := c.decide(r)
	if err != nil {
		return err
	}
	if report != nil {
		writeJSON(w, http.StatusOK, struct {
			Schema int           `json:"schema"`
			Report view.Approval `json:"report"`
		}{1, view.OfApproval(*report, false)})
		return nil
	}
	if t, err = c.Daemon.Postgres.Task(r.Context(), t.ID); err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, struct {
		Schema int       `json:"schema"`
		Task   view.Task `json:"task"`
	}{1, view.OfTask(t)})
	return nil
}

func (c *Console) apiChangeJob(w http.ResponseWriter, r *http.Request) error {
	if err := c.applyToJob(r); err != nil {
		return err
	}
	return c.apiJobs(w, r)
}

func (c *Console) apiChangeActivity(w http.ResponseWriter, r *http.Request) error {
	if err := c.holdActivity(r); err != nil {
		return err
	}
	return c.apiScopes(w, r)
}

func (c *Console) apiChangeScopes(w http.ResponseWriter, r *http.Request) error {
	filter, err := versionOf(r)
	if err != nil {
		return err
	}
	if err := c.changeScopes(r, filter, r.PostFormValue("action")); err != nil {
		return err
	}
	return c.apiScopes(w, r)
}

// runView is a comparison in a list.
type runView struct {
	RunID      string `json:"run_id"`
	Mode       string `json:"mode"`
	State      string `json:"state"`
	Verdict    string `json:"verdict,omitempty"`
	StartedBy  string `json:"started_by"`
	StartedAt  string `json:"started_at"`
	Findings   int    `json:"findings"`
	Incomplete int    `json:"incomplete"`
}

func (c *Console) apiReports(w http.ResponseWriter, r *http.Request) error {
	rows, err := c.runRows(r.Context(), pgstore.RunFilter{Limit: listedRuns})
	if err != nil {
		return err
	}
	runs := make([]runView, len(rows))
	for i, row := range rows {
		runs[i] = runView{
			RunID: row.ID, Mode: row.Mode, State: row.State, Verdict: row.Verdict, StartedBy: row.StartedBy,
			StartedAt: row.StartedAt.UTC().Format("2006-01-02T15:04:05.000Z"), Findings: row.Findings, Incomplete: row.Incomplete,
		}
	}
	writeJSON(w, http.StatusOK, struct {
		Schema int       `json:"schema"`
		Runs   []runView `json:"runs"`
	}{1, runs})
	return nil
}

func (c *Console) apiReport(w http.ResponseWriter, r *http.Request) error {
	report, err := c.Daemon.Postgres.Report(r.Context(), r.PathValue("id"))
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	return render.Write(w, "json", report)
}
