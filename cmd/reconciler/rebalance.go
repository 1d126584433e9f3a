package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/transfer"
)

// rebalanceFlags are what rebalance was told.
type rebalanceFlags struct {
	plan, apply bool
	watch       time.Duration
}

func newRebalance(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rebalance",
		Short: "Give sold-out buckets that are still asked for what others have left",
		Long: `Looks twice at the running versions of several buckets. A bucket that has no unit left
and was asked for one in between gets a share of what others have above their own
needs: each keeps as many units as it was asked for in that time, and
rebalance.keep at least.

--plan prints what each bucket would give or get, and why. --apply makes the transfers.
The daemon does it by itself, again and again, if rebalance.enabled is set.

Exit status: 0, or 3 if not everything could be read or moved.`,
		Example: `  reconciler rebalance --plan
  reconciler rebalance --plan --activity 10001 --watch 10s --output json
  reconciler rebalance --apply --activity 10001`,
		Args: args(),
	}
	var given rebalanceFlags
	flags := cmd.Flags()
	flags.BoolVar(&given.plan, "plan", false, "print what would be moved, change nothing")
	flags.BoolVar(&given.apply, "apply", false, "move it")
	flags.DurationVar(&given.watch, "watch", 2*time.Second, "`time` between the two looks")
	settingFlag(flags, "rebalance.keep", "keep", "`units` that a bucket keeps at least")
	settingFlag(flags, "rebalance.share_percent", "share", "`percent` of what it has above that which a bucket gives")
	settingFlag(flags, "rebalance.max_units", "max-units", "most `units` that are moved in one version")
	selected := selectorFlags(cmd, false)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		switch {
		case given.plan == given.apply:
			return usageError(cmd, errors.New("say --plan or --apply"))
		case flags.Changed("bucket"):
			return usageError(cmd, errors.New("--bucket: a version is balanced as a whole"))
		case given.watch < 0:
			return usageError(cmd, fmt.Errorf("--watch %s is negative", given.watch))
		}
		return a.withTransfers(cmd, func(ctx context.Context, s stores) error {
			f := selected.filter()
			plans, err := s.balance(ctx, transfer.Filter{ActivityID: f.ActivityID, SKUID: f.SKUID, Version: f.Version}, given.watch)
			if err != nil {
				return err
			}
			return a.rebalance(ctx, s, out, plans, given.apply)
		})
	}
	return cmd
}

// balancer is the rebalancer as it is configured.
func (s stores) balancer() *transfer.Rebalancer {
	r := s.cfg.Rebalance
	return &transfer.Rebalancer{
		Planner: s.transfers.Planner, Demand: s.redis, Actor: loginName(),
		Limits: transfer.Limits{Keep: r.Keep, Share: r.SharePercent, MinUnits: r.MinUnits, MaxUnits: r.MaxUnits, CoolDown: r.CoolDown},
	}
}

// balance looks twice, and plans for the versions that were there both times.
func (s stores) balance(ctx context.Context, f transfer.Filter, watch time.Duration) ([]transfer.Plan, error) {
	b := s.balancer()
	first, err := b.Looks(ctx, f)
	if err != nil {
		return nil, err
	}
	select {
	case <-time.After(watch):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	second, err := b.Looks(ctx, f)
	if err != nil {
		return nil, err
	}
	before := map[transfer.Key]transfer.Look{}
	for _, look := range first {
		before[look.Books.Version.Key] = look
	}
	var plans []transfer.Plan
	for _, now := range second {
		if last, known := before[now.Books.Version.Key]; known {
			plans = append(plans, transfer.Rebalance(last, now, b.Limits, time.Now()))
		}
	}
	return plans, nil
}

// rebalance prints the plans and, if they are to be applied, makes the
// transfers.
func (a *app) rebalance(ctx context.Context, s stores, out *result, plans []transfer.Plan, apply bool) error {
	views := make([]view.Rebalance, 0, len(plans))
	if apply && s.cfg.Mode != config.ModeAct {
		a.sayf("nothing is moved: mode is %s. Set it to act to let the transfers be made.", s.cfg.Mode)
		apply = false
	}
	tally := pass.NewTally()
	var keys []transfer.Key
	for _, p := range plans {
		v := view.OfRebalance(p)
		if apply && len(p.Moves) > 0 {
			keys = append(keys, p.Key)
			v.Transfers = nil
			for _, t := range s.balancer().Apply(ctx, p, tally) {
				v.Transfers = append(v.Transfers, view.PlannedMove{DonorBucket: t.Donor, ReceiverBucket: t.Receiver, Amount: t.Amount, TransferID: t.ID})
			}
			v.Transfers = view.NonNil(v.Transfers)
		}
		views = append(views, v)
	}
	s.driven(ctx, keys, tally)
	err := printRebalance(out, views)
	if failure := tally.Err(); err == nil && failure != nil {
		return &verdict{exitIncomplete, failure}
	}
	return err
}

func printRebalance(out *result, views []view.Rebalance) error {
	return out.print(struct {
		Schema   int              `json:"schema"`
		Versions []view.Rebalance `json:"versions"`
	}{1, views}, func() error {
		var roles, moves []table.Row
		for _, v := range views {
			for _, b := range v.Buckets {
				roles = append(roles, table.Row{v.ActivityID, v.SKUID, v.ActivityVersion, b.BucketID, b.Available, b.Asked, b.Gives, b.Gets, b.Why})
			}
			for _, m := range v.Transfers {
				moves = append(moves, table.Row{v.ActivityID, v.SKUID, v.ActivityVersion, m.DonorBucket, m.ReceiverBucket, m.Amount, orDash(m.TransferID)})
			}
		}
		none := "no running version has a bucket without units beside one that has some"
		if err := out.table(none, table.Row{"ACTIVITY", "SKU", "VERSION", "BUCKET", "AVAILABLE", "ASKED", "GIVES", "GETS", "WHY"}, roles); err != nil || len(roles) == 0 {
			return err
		}
		if err := out.line(""); err != nil {
			return err
		}
		return out.table("nothing to move", table.Row{"ACTIVITY", "SKU", "VERSION", "FROM", "TO", "UNITS", "TRANSFER"}, moves)
	})
}
