package console

import (
	"net/http"
	"slices"

	"github.com/seckill/reconciler/internal/daemon"
)

func (c *Console) jobs(w http.ResponseWriter, r *http.Request) error {
	rows, err := c.jobRows(r.Context())
	if err != nil {
		return err
	}
	c.render(w, r, http.StatusOK, "jobs", map[string]any{"Jobs": rows})
	return nil
}

// changeJob pauses, resumes or runs a job.
func (c *Console) changeJob(w http.ResponseWriter, r *http.Request) error {
	if err := c.applyToJob(r); err != nil {
		return err
	}
	return seeOther(w, r, "/jobs", r.PostFormValue("action"))
}

// applyToJob does what `reconciler job` does under the same name.
func (c *Console) applyToJob(r *http.Request) error {
	name, actor := r.PathValue("name"), actorOf(r)
	if !slices.Contains(daemon.JobNames(), name) {
		return failedWith(http.StatusNotFound, "there is no job %q", name)
	}
	store := c.Daemon.Postgres
	switch action := r.PostFormValue("action"); action {
	case "pause":
		return store.PauseJob(r.Context(), name, actor, r.PostFormValue("reason"))
	case "resume":
		return store.ResumeJob(r.Context(), name, actor, r.PostFormValue("reason"))
	case "run":
		if off := daemon.OffBy(c.Daemon.Config(), name); off != "" {
			return failedWith(http.StatusConflict, "the job %s does not run: %s", name, off)
		}
		return store.RequestRun(r.Context(), name, actor)
	default:
		return failedWith(http.StatusBadRequest, "%q is no action on a job: pause, resume or run", action)
	}
}
