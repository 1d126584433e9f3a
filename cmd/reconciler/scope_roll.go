package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/lifecycle"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

func newScopeRoll(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "roll",
		Short: "Go on with an activity under a new version",
		Long: `Closes the version in force of every SKU of the activity and begins a new one with the
units that are left: after a reset of the configuration, with other times or another number
of buckets. Sold units stay with the old version, whose stuck reservations are worked on
until its retention ends.

Where the reference schema holds the stock, one transaction caps the old version at what was
sold. Where the stock table is your own, it waits until every reservation of the old version
is decided (let the daemon run), proves by a deep comparison that none is missing, and stops
with the new version prepared. Then, in one transaction, set the old version's total to what
was sold and give the new version its row; running it again opens it, with --old-stock-capped
unless your view seckill.stock_evidence shows that the old version is capped.

Running it again goes on where it stopped.`,
		Example: `  reconciler scope roll --activity 10001 --reason "wrong end"  --ends 2026-11-11T04:00:00Z
  reconciler scope roll --activity 10001 --buckets 8
  reconciler scope roll --activity 10001 --prepare --wait 30m`,
		Args: args(),
	}
	var r lifecycle.Roll
	var starts, ends lifecycle.Instant
	f := cmd.Flags()
	f.StringVar(&r.ActivityID, "activity", "", "activity `id`")
	f.Int64Var(&r.To, "version", 0, "the new `version` (default: the next)")
	f.Int64Var(&r.Buckets, "buckets", 0, "`number` of stock buckets (default: as before, or fewer where few units are left)")
	f.Var(&starts, "starts", "start of the sale: now, +10m or RFC 3339 (default: now)")
	f.Var(&ends, "ends", "end of the sale: +1h or RFC 3339 (default: as before)")
	f.DurationVar(&r.Retention, "retention", 0, "how long keys are kept after the end (default: as before)")
	f.BoolVar(&r.Prepare, "prepare", false, "stop before the new version is opened")
	f.BoolVar(&r.OldCapped, "old-stock-capped", false, "your stock table sells nothing of the old version any more: its total is what was sold")
	f.DurationVar(&r.Wait, "wait", 0, "`duration` to wait for the old version's reservations (0: until they are decided)")
	if err := cmd.MarkFlagRequired("activity"); err != nil {
		panic(err) // the flag was defined above
	}
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if f.Changed("starts") {
			r.Starts = &starts
		}
		if f.Changed("ends") {
			r.Ends = &ends
		}
		return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager, c config.Config) error {
			r.Consistent = proveConsistent(m, c.Reconcile)
			r.Undecided = a.tellUndecided()
			rolled, err := m.Roll(ctx, r, by.actor, by.reason)
			if errors.Is(err, lifecycle.ErrUndecided) {
				return &verdict{exitIncomplete, err}
			}
			if err != nil {
				return err
			}
			a.reportDurability(ctx, m, c.Redis, rolledScopes(r.ActivityID, rolled))
			return printRolled(out, r, rolled)
		})
	}
	return cmd
}

// proveConsistent compares one version deeply.
func proveConsistent(m *lifecycle.Manager, c config.Reconcile) func(ctx context.Context, activityID, skuID string, version int64) error {
	return func(ctx context.Context, activityID, skuID string, version int64) error {
		report, err := (&reconcile.Reconciler{
			Registry: m.Registry, Stocks: m.Redis, Orders: m.Registry, Members: m.Redis, Claims: m.Registry,
		}).Run(ctx, reconcile.Options{
			Filter: reconcile.Filter{ActivityID: activityID, SKUID: skuID, Version: &version},
			Settle: c.Settle, Batch: c.Batch, Deep: true,
		})
		if err != nil {
			return err
		}
		if report.Verdict != reconcile.VerdictConsistent {
			return fmt.Errorf("its comparison ends as %s: see `reconciler reconcile --deep --activity %s --sku %s --version %d`",
				report.Verdict, activityID, skuID, version)
		}
		return nil
	}
}

// tellEvery is how often a wait says that it is still waiting.
const tellEvery = 10 * time.Second

// tellUndecided says on standard error what is waited for.
func (a *app) tellUndecided() func(int64) {
	var last time.Time
	return func(left int64) {
		if time.Since(last) >= tellEvery {
			last = time.Now()
			_, _ = fmt.Fprintf(a.stderr, "waiting for the daemon to settle what is undecided: %d in the indexes\n", left)
		}
	}
}

func rolledScopes(activityID string, rolled []lifecycle.RolledSKU) []reservation.Scope {
	var scopes []reservation.Scope
	for _, r := range rolled {
		scopes = append(scopes, lifecycle.Spec{ActivityID: activityID, SKUID: r.SKUID, Version: r.To, Buckets: r.Buckets}.Scopes()...)
	}
	return scopes
}

// rolledView is a rolled SKU in JSON.
type rolledView struct {
	SKUID       string `json:"sku_id"`
	FromVersion int64  `json:"from_version"`
	ToVersion   int64  `json:"to_version"`
	Sold        int64  `json:"sold"`
	Left        int64  `json:"left"`
	Buckets     int64  `json:"buckets"`
}

func printRolled(out *result, r lifecycle.Roll, rolled []lifecycle.RolledSKU) error {
	prepared := slices.ContainsFunc(rolled, func(s lifecycle.RolledSKU) bool { return !s.Open })
	views := make([]rolledView, len(rolled))
	rows := make([]table.Row, len(rolled))
	for i, s := range rolled {
		views[i] = rolledView{SKUID: s.SKUID, FromVersion: s.From, ToVersion: s.To, Sold: s.Sold, Left: s.Left, Buckets: s.Buckets}
		rows[i] = table.Row{s.SKUID, s.From, s.To, s.Sold, s.Left, s.Buckets}
	}
	return out.print(struct {
		Schema     int          `json:"schema"`
		ActivityID string       `json:"activity_id"`
		Prepared   bool         `json:"prepared"` // not open yet: run it again without --prepare
		SKUs       []rolledView `json:"skus"`
	}{1, r.ActivityID, prepared, views}, func() error {
		err := out.table("no SKU", table.Row{"SKU", "FROM", "TO", "SOLD", "LEFT", "BUCKETS"}, rows)
		if err == nil && prepared {
			err = out.line("\nprepared and not open yet: see to your stock table, if it is your own, and run it again without --prepare")
		}
		return err
	})
}
