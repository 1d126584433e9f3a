package daemon_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
)

// The daemon keeps a version's numbers for the charts, and says when each of its
// jobs runs next, as long as it works.
func TestSamplesAndNextRuns(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	s.reserve(time.Hour)
	d := s.open(func(o *daemon.Options) { o.Logger = slog.New(slog.DiscardHandler) })
	if next := d.NextRuns(); len(next) != 0 {
		t.Errorf("before it works: %v", next)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	if err := d.Postgres.RequestRun(t.Context(), daemon.JobSamples, "test"); err != nil {
		t.Error(err)
	}
	s.eventually(time.Minute, func() error {
		samples, err := d.Postgres.VersionSamples(t.Context(), s.scope.ActivityID, s.scope.SKUID, s.scope.Version, time.Hour)
		if err == nil && (len(samples) == 0 || samples[0].Available != 999 || samples[0].Reserved != 1 || samples[0].Undecided != 1) {
			err = errors.New("no sample with 999 available units, 1 reserved and 1 undecided")
		}
		return err
	})
	next := d.NextRuns()
	for _, job := range []string{daemon.JobScanner, daemon.JobFencer, daemon.JobSamples} {
		if !next[job].After(time.Now().Add(-time.Minute)) {
			t.Errorf("%s runs next at %s", job, next[job])
		}
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
