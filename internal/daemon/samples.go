package daemon

import (
	"context"
	"errors"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/reservation"
)

// JobSamples keeps the numbers of every live version for the console's charts.
const JobSamples = "samples"

// samplesInterval is how close the points of a chart are.
const samplesInterval = time.Minute

func (d *Daemon) keepSamples(ctx context.Context) (schedule.Result, error) {
	registered, err := d.Postgres.Scopes(ctx, pgstore.ScopeFilter{Live: true})
	if err != nil {
		return nil, err
	}
	scopes := make([]reservation.Scope, len(registered))
	for i, r := range registered {
		scopes[i] = r.Scope
	}
	var samples []pgstore.VersionSample
	var errs []error
	for i, s := range d.Redis.Snapshots(ctx, scopes) { // the buckets of a version follow each other
		if s.Err != nil || !s.Configured() {
			errs = append(errs, s.Err)
			continue
		}
		of := scopes[i]
		if n := len(samples); n == 0 || samples[n-1].ActivityID != of.ActivityID || samples[n-1].SKUID != of.SKUID || samples[n-1].Version != of.Version {
			samples = append(samples, pgstore.VersionSample{ActivityID: of.ActivityID, SKUID: of.SKUID, Version: of.Version})
		}
		v := &samples[len(samples)-1]
		v.BucketsRead++
		v.Available += s.Available
		v.Reserved += s.Reserved
		v.ReleasedTotal += max(s.ReleasedTotal, 0)
		v.SendPending += s.Pending
		v.Undecided += s.Expiry
	}
	if len(samples) > 0 {
		errs = append(errs, d.Postgres.RecordSamples(ctx, samples))
	}
	return schedule.Result{"kept": len(samples)}, errors.Join(errs...)
}
