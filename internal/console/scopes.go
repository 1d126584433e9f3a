package console

import (
	"context"
	"html/template"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/seckill/reconciler/internal/chart"
	"github.com/seckill/reconciler/internal/lifecycle"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// versionData is the page of one version: its buckets side by side.
type versionData struct {
	versionRow

	Bars     template.HTML
	Trends   []trend
	Run      *runRow // the last comparison that this version was part of
	Findings []reconcile.Finding
	Tasks    []taskRow
}

// trend is a number of the version over time.
type trend struct {
	Title string // the name of its words
	SVG   template.HTML
}

func (c *Console) version(w http.ResponseWriter, r *http.Request) error {
	filter, err := versionOf(r)
	if err != nil {
		return err
	}
	ctx := r.Context()
	rows, _, err := c.versions(ctx, filter)
	if err != nil {
		return err
	}
	if len(rows) == 0 {
		return failedWith(http.StatusNotFound, "no scope is registered for this version")
	}
	data := versionData{versionRow: rows[0]}
	speech := c.words.in(chosenLanguage(r))
	data.Bars = bars(speech, data.versionRow)
	if data.Trends, err = c.trends(ctx, speech, data.versionRow); err != nil {
		return err
	}
	if data.Run, data.Findings, err = c.findingsOf(ctx, data.versionRow); err != nil {
		return err
	}
	if data.Tasks, err = c.tasksOf(ctx, data.versionRow); err != nil {
		return err
	}
	c.render(w, r, http.StatusOK, "version", data)
	return nil
}

// versionOf reads the version from the path.
func versionOf(r *http.Request) (pgstore.ScopeFilter, error) {
	number, err := strconv.ParseInt(r.PathValue("version"), 10, 64)
	if err != nil || number < 0 {
		return pgstore.ScopeFilter{}, failedWith(http.StatusNotFound, "%q is no version", r.PathValue("version"))
	}
	return pgstore.ScopeFilter{ActivityID: r.PathValue("activity"), SKUID: r.PathValue("sku"), Version: &number}, nil
}

// bars shows the buckets' units beside each other.
func bars(s speech, v versionRow) template.HTML {
	b := chart.Bars{
		ID: "buckets", Title: s.must("units_by_bucket"), Description: s.must("units_by_bucket_description"),
		Series: []string{s.must("available"), s.must("reserved")},
	}
	for _, bucket := range v.Buckets {
		group := chart.Group{Label: s.must("bucket") + " " + strconv.FormatInt(bucket.BucketID, 10), Values: []float64{chart.Unknown, chart.Unknown}}
		if n := bucket.Redis; n != nil {
			group.Values = []float64{float64(n.Available), float64(n.Reserved)}
		}
		b.Groups = append(b.Groups, group)
	}
	return template.HTML(b.SVG()) //nolint:gosec // the chart escapes its texts
}

// trendTime is how far back the trends go.
const trendTime = 6 * time.Hour

func (c *Console) trends(ctx context.Context, s speech, v versionRow) ([]trend, error) {
	samples, err := c.Daemon.Postgres.VersionSamples(ctx, v.ActivityID, v.SKUID, v.Version, trendTime)
	if err != nil {
		return nil, err
	}
	one := func(id, word string, value func(pgstore.VersionSample) float64) trend {
		line := chart.Line{ID: id, Title: s.must(word), Description: s.must("trend_description"), None: s.must("no_samples")}
		for _, at := range samples {
			line.Points = append(line.Points, chart.Point{At: at.At, Value: value(at)})
		}
		return trend{word, template.HTML(line.SVG())} //nolint:gosec // the chart escapes its texts
	}
	return []trend{
		one("trend-available", "available", func(v pgstore.VersionSample) float64 { return float64(v.Available) }),
		one("trend-reserved", "reserved", func(v pgstore.VersionSample) float64 { return float64(v.Reserved) }),
		one("trend-released", "released", func(v pgstore.VersionSample) float64 { return float64(v.ReleasedTotal) }),
		one("trend-pending", "to_send", func(v pgstore.VersionSample) float64 { return float64(v.SendPending) }),
		one("trend-undecided", "undecided", func(v pgstore.VersionSample) float64 { return float64(v.Undecided) }),
	}, nil
}

// findingsOf are those of the newest comparison that looked at the version.
func (c *Console) findingsOf(ctx context.Context, v versionRow) (*runRow, []reconcile.Finding, error) {
	runs, err := c.Daemon.Postgres.Runs(ctx, pgstore.RunFilter{States: []pgstore.RunState{pgstore.RunFinished}, Limit: 1})
	if err != nil || len(runs) == 0 {
		return nil, nil, err
	}
	report, err := c.Daemon.Postgres.Report(ctx, runs[0].ID)
	if err != nil {
		return nil, nil, err
	}
	var found []reconcile.Finding
	for _, f := range report.Findings {
		if v.is(f.Scope.Reservation()) {
			found = append(found, f)
		}
	}
	row := rowOfRun(runs[0])
	return &row, found, nil
}

func (c *Console) tasksOf(ctx context.Context, v versionRow) ([]taskRow, error) {
	tasks, err := c.taskRows(ctx, pgstore.TaskFilter{States: pgstore.Unresolved})
	if err != nil {
		return nil, err
	}
	var own []taskRow
	for _, t := range tasks {
		if scope, err := reservation.ParseTag(t.Scope); err == nil && v.is(scope) {
			own = append(own, t)
		}
	}
	return own, nil
}

// changeVersion holds, pauses, resumes or closes a version's buckets.
func (c *Console) changeVersion(w http.ResponseWriter, r *http.Request) error {
	filter, err := versionOf(r)
	if err != nil {
		return err
	}
	action := r.PostFormValue("action")
	if err := c.changeScopes(r, filter, action); err != nil {
		return err
	}
	return seeOther(w, r, versionPath(filter.ActivityID, filter.SKUID, *filter.Version), action)
}

// changeActivity holds all scopes of an activity, or lets go of them.
func (c *Console) changeActivity(w http.ResponseWriter, r *http.Request) error {
	if err := c.holdActivity(r); err != nil {
		return err
	}
	return seeOther(w, r, "/", r.PostFormValue("action"))
}

func (c *Console) holdActivity(r *http.Request) error {
	action := r.PostFormValue("action")
	if action != "hold" && action != "unhold" {
		return failedWith(http.StatusBadRequest, "%q is no action on an activity: hold or unhold", action)
	}
	return c.changeScopes(r, pgstore.ScopeFilter{ActivityID: r.PathValue("activity"), Live: true}, action)
}

// changeScopes does what `reconciler scope` does under the same name.
func (c *Console) changeScopes(r *http.Request, filter pgstore.ScopeFilter, action string) error {
	ctx, actor, reason := r.Context(), actorOf(r), r.PostFormValue("reason")
	registered, err := c.Daemon.Postgres.Scopes(ctx, filter)
	if err != nil {
		return err
	}
	if len(registered) == 0 {
		return failedWith(http.StatusNotFound, "no such scope is registered")
	}
	scopes := make([]reservation.Scope, len(registered))
	for i, s := range registered {
		scopes[i] = s.Scope
	}
	if reason == "" {
		return failedWith(http.StatusBadRequest, "say why: the reason goes into the audit trail")
	}
	states := map[string]lua.State{"pause": lua.StatePaused, "resume": lua.StateActive, "close": lua.StateClosed}
	switch action {
	case "hold":
		return c.Daemon.Postgres.HoldScopes(ctx, scopes, actor, reason)
	case "unhold":
		return c.Daemon.Postgres.UnholdScopes(ctx, scopes, actor, reason)
	}
	target, known := states[action]
	if !known {
		return failedWith(http.StatusBadRequest, "%q is no action on a scope: hold, unhold, pause, resume or close", action)
	}
	manager := &lifecycle.Manager{Redis: c.Daemon.Redis, Registry: c.Daemon.Postgres}
	return manager.Change(ctx, scopes, target, actor, reason)
}

func versionPath(activity, sku string, version int64) string {
	return "/scopes/" + url.PathEscape(activity) + "/" + url.PathEscape(sku) + "/" + strconv.FormatInt(version, 10)
}
