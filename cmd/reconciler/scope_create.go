package main

import (
	"context"
	"fmt"
	"os"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/lifecycle"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

func newScopeCreate(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create activity versions with their stock",
		Long: `Registers a version, writes its stock to Redis bucket by bucket, opens it and makes
it the activity's current version. Running it again with the same values completes what
was begun; it never refills a bucket that was there before.

With --file it creates all versions of a YAML file, whose keys are the names of the flags:

  defaults: {activity: "10001", version: 7, starts: 2026-11-11T00:00:00Z, ends: 2026-11-11T02:00:00Z}
  versions:
    - {sku: "88001", total: 10000, buckets: 4}
    - {sku: "88002", total: 500}

One bucket is right until a single Redis slot is measured to be the limit.`,
		Example: `  reconciler scope create --activity 10001 --sku 88001 --version 7 --total 10000 --starts now --ends +1h
  reconciler scope create --activity 10001 --sku 88001 --version 8 --total 10000 --buckets 4 \
      --starts 2026-11-11T00:00:00Z --ends 2026-11-11T02:00:00Z --retention 168h
  reconciler scope create --file sale.yaml`,
		Args: args(),
	}
	var spec lifecycle.Spec
	var starts, ends lifecycle.Instant
	var file string
	f := cmd.Flags()
	f.StringVar(&file, "file", "", "YAML `file` of versions (- for standard input)")
	f.StringVar(&spec.ActivityID, "activity", "", "activity `id`")
	f.StringVar(&spec.SKUID, "sku", "", "SKU `id`")
	f.Int64Var(&spec.Version, "version", 0, "activity `version`")
	f.Int64Var(&spec.Total, "total", 0, "`units` to sell over all buckets")
	f.Int64Var(&spec.Buckets, "buckets", 1, "`number` of stock buckets")
	f.Var(&starts, "starts", "start of the sale: now, +10m or RFC 3339")
	f.Var(&ends, "ends", "end of the sale: +1h or RFC 3339")
	f.DurationVar(&spec.Retention, "retention", lifecycle.DefaultRetention, "how long keys are kept after the end; never extended later")
	f.BoolVar(&spec.AllowSmall, "allow-small", false, fmt.Sprintf("permit fewer than %d units in a bucket", lifecycle.MinPerBucket))
	described := []string{"activity", "sku", "version", "total", "starts", "ends"}
	cmd.MarkFlagsRequiredTogether(described...)
	cmd.MarkFlagsOneRequired("file", "activity")
	for _, name := range append(described, "buckets", "retention", "allow-small") {
		cmd.MarkFlagsMutuallyExclusive("file", name)
	}
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		spec.StartsAt, spec.EndsAt, spec.StartsRelative, spec.EndsRelative = starts.At, ends.At, starts.Relative, ends.Relative
		specs := []lifecycle.Spec{spec}
		if file != "" {
			var err error
			if specs, err = a.readVersions(file); err != nil {
				return err
			}
		}
		return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager, c config.Config) error {
			if err := a.createScopes(ctx, m, c.Redis, specs, by.actor); err != nil {
				return err
			}
			return showScopes(ctx, m, out, filtersOf(specs)...)
		})
	}
	return cmd
}

// readVersions reads the descriptions in a file or from standard input.
func (a *app) readVersions(name string) ([]lifecycle.Spec, error) {
	in := a.stdin
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer func() { _ = file.Close() }() // it was only read
		in = file
	}
	specs, err := lifecycle.ReadFile(in)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return specs, nil
}

// createScopes creates the versions, with doubts, progress and what Redis says
// of their durability on standard error.
func (a *app) createScopes(ctx context.Context, m *lifecycle.Manager, c config.Redis, specs []lifecycle.Spec, actor string) error {
	warnings, err := m.Warnings(ctx, specs)
	if err != nil {
		return err
	}
	a.warn(warnings...)
	var done func(lifecycle.Spec)
	if len(specs) > 1 && isTerminal(a.stderr) {
		bar := progressbar.NewOptions(len(specs), progressbar.OptionSetWriter(a.stderr), progressbar.OptionSetDescription("creating"),
			progressbar.OptionShowCount(), progressbar.OptionSetPredictTime(true), progressbar.OptionClearOnFinish())
		done = func(lifecycle.Spec) { _ = bar.Add(1) } // only a terminal that is gone
		defer func() { _ = bar.Clear() }()
	}
	if err := m.CreateAll(ctx, specs, actor, done); err != nil {
		return err
	}
	var scopes []reservation.Scope
	for _, s := range specs {
		scopes = append(scopes, s.Scopes()...)
	}
	a.reportDurability(ctx, m, c, scopes)
	return nil
}

// reportDurability says how far new scopes have spread, if the settings ask for
// it. It fails nothing: the scopes are there.
func (a *app) reportDurability(ctx context.Context, m *lifecycle.Manager, c config.Redis, scopes []reservation.Scope) {
	if c.WaitReplicas == 0 && !c.WaitAOF {
		return
	}
	for _, d := range m.Redis.AwaitDurability(ctx, scopes, c.WaitReplicas, c.WaitAOF, c.WaitTimeout) {
		switch {
		case d.Err != nil:
			a.warn(fmt.Sprintf("redis.wait_replicas: %v", d.Err))
		case d.Replicas < int64(c.WaitReplicas):
			a.warn(fmt.Sprintf("redis.wait_replicas: %d of %d replicas of %s confirmed the new scopes within %s: a failover now may lose them",
				d.Replicas, c.WaitReplicas, d.Node, c.WaitTimeout))
		case c.WaitAOF && !d.Local:
			a.warn(fmt.Sprintf("redis.wait_aof: %s did not confirm within %s that the new scopes are on its disk", d.Node, c.WaitTimeout))
		}
	}
}

// warn writes to standard error.
func (a *app) warn(warnings ...string) {
	for _, w := range warnings {
		_, _ = fmt.Fprintf(a.stderr, "warning: %s\n", w)
	}
}

// filtersOf select the described versions.
func filtersOf(specs []lifecycle.Spec) []pgstore.ScopeFilter {
	filters := make([]pgstore.ScopeFilter, len(specs))
	for i, s := range specs {
		filters[i] = pgstore.ScopeFilter{ActivityID: s.ActivityID, SKUID: s.SKUID, Version: &s.Version}
	}
	return filters
}
