package main

import (
	"context"
	"errors"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/lifecycle"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// withScopes runs do with PostgreSQL and Redis.
func (a *app) withScopes(cmd *cobra.Command, do func(context.Context, *lifecycle.Manager, config.Config) error) error {
	loaded, err := a.settings(cmd)
	if err != nil {
		return err
	}
	return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
		clients, err := redisstore.Open(ctx, loaded.Config.Redis)
		if err != nil {
			return err
		}
		defer func() { _ = clients.Close() }() // nothing is in flight
		if err := clients.Ping(ctx); err != nil {
			return err
		}
		rstore, err := redisstore.New(clients, loaded.Config.Redis.CommandTimeout)
		if err != nil {
			return err
		}
		return do(ctx, &lifecycle.Manager{Redis: rstore, Registry: store}, loaded.Config)
	})
}

func newScopeImport(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "import",
		Short: "Register an activity version that another tool made in Redis",
		Long: `Reads times, state and stock of the version's buckets from Redis and registers them.
From then on the daemon works on it. Nothing in Redis is changed.`,
		Example: "  reconciler scope import --activity 10001 --sku 88001 --version 7 --buckets 4",
		Args:    args(),
	}
	chosen := selectorFlags(cmd, true)
	var buckets int64
	cmd.Flags().Int64Var(&buckets, "buckets", 1, "`number` of stock buckets")
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if cmd.Flags().Changed("bucket") {
			return usageError(cmd, errors.New("--bucket: a version is imported whole; say how many buckets it has by --buckets"))
		}
		return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager, _ config.Config) error {
			if err := m.Import(ctx, chosen.activity, chosen.sku, chosen.version, buckets, by.actor); err != nil {
				return err
			}
			return showScopes(ctx, m, out, chosen.filter())
		})
	}
	return cmd
}

func newScopeShow(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "show",
		Short:   "Show live numbers of a version's buckets",
		Example: "  reconciler scope show --activity 10001 --sku 88001 --version 7",
		Args:    args(),
	}
	chosen := selectorFlags(cmd, true)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager, _ config.Config) error {
			if _, err := chosen.find(ctx, m.Registry); err != nil {
				return err
			}
			return showScopes(ctx, m, out, chosen.filter())
		})
	}
	return cmd
}

func newScopePause(a *app) *cobra.Command {
	return scopeMove(a, lua.StatePaused, &cobra.Command{
		Use:     "pause",
		Short:   "Stop a sale for a while",
		Long:    "Gateways turn everybody away until it is resumed. Stuck reservations are worked on all the same.",
		Example: `  reconciler scope pause --activity 10001 --sku 88001 --version 7 --reason "wrong price"`,
	})
}

func newScopeResume(a *app) *cobra.Command {
	return scopeMove(a, lua.StateActive, &cobra.Command{
		Use:     "resume",
		Short:   "Let a paused sale go on",
		Example: "  reconciler scope resume --activity 10001 --sku 88001 --version 7",
	})
}

func newScopeClose(a *app) *cobra.Command {
	return scopeMove(a, lua.StateClosed, &cobra.Command{
		Use:     "close",
		Short:   "End a sale for good",
		Long:    "A closed version cannot be opened again. Its stuck reservations are worked on until the retention ends.",
		Example: "  reconciler scope close --activity 10001 --sku 88001 --version 7",
	})
}

// scopeMove completes a command that changes the state of scopes.
func scopeMove(a *app, target lua.State, cmd *cobra.Command) *cobra.Command {
	cmd.Args = args()
	chosen := selectorFlags(cmd, true)
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager, _ config.Config) error {
			scopes, err := chosen.find(ctx, m.Registry)
			if err != nil {
				return err
			}
			if err := m.Change(ctx, scopes, target, by.actor, by.reason); err != nil {
				return err
			}
			return showScopes(ctx, m, out, chosen.filter())
		})
	}
	return cmd
}

// showScopes prints the selected scopes with their live numbers. A scope that
// cannot be read is shown as such, and makes the command fail.
func showScopes(ctx context.Context, m *lifecycle.Manager, out *result, filters ...pgstore.ScopeFilter) error {
	var registered []pgstore.RegisteredScope
	for _, filter := range filters {
		found, err := m.Registry.Scopes(ctx, filter)
		if err != nil {
			return err
		}
		registered = append(registered, found...)
	}
	scopes := make([]reservation.Scope, len(registered))
	for i, r := range registered {
		scopes[i] = r.Scope
	}
	var live []view.LiveScope
	var rows []table.Row
	incomplete := false
	for i, snapshot := range m.Redis.Snapshots(ctx, scopes) {
		v := view.OfLiveScope(registered[i], snapshot)
		s := scopes[i]
		row := table.Row{s.ActivityID, s.SKUID, s.Version, s.Bucket}
		if n := v.Redis; n != nil {
			row = append(row, n.State, n.Initial, n.Available, n.Reserved, n.ReleasedTotal, n.SendPending, n.ReservationExpiry, stamp(v.EndsAt))
		} else {
			row = append(row, v.Error)
		}
		incomplete = incomplete || v.Error != ""
		live, rows = append(live, v), append(rows, row)
	}
	err := out.print(struct {
		Schema int              `json:"schema"`
		Scopes []view.LiveScope `json:"scopes"`
	}{1, view.NonNil(live)}, func() error {
		return out.table("no scopes", table.Row{"ACTIVITY", "SKU", "VERSION", "BUCKET", "STATE", "INITIAL", "AVAILABLE", "RESERVED", "RELEASED", "TO SEND", "UNDECIDED", "ENDS"}, rows)
	})
	if err == nil && incomplete {
		return &verdict{exitIncomplete, errors.New("not every scope could be read")}
	}
	return err
}
