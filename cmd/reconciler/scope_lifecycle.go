package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/lifecycle"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// instant is a flag for a point in time: RFC 3339, or relative to now.
type instant struct {
	text     string
	at       time.Time
	relative bool
}

func (i *instant) String() string { return i.text }
func (i *instant) Type() string   { return "time" }

func (i *instant) Set(text string) error {
	now := time.Now()
	i.text, i.relative = text, true
	switch {
	case text == "now":
		i.at = now
		return nil
	case strings.HasPrefix(text, "+"):
		d, err := time.ParseDuration(text[1:])
		if err != nil {
			return fmt.Errorf("want now, +10m or 2026-11-11T00:00:00Z: %w", err)
		}
		i.at = now.Add(d)
		return nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return fmt.Errorf("want now, +10m or 2026-11-11T00:00:00Z: %w", err)
	}
	i.at, i.relative = at, false
	return nil
}

// withScopes runs do with PostgreSQL and Redis.
func (a *app) withScopes(cmd *cobra.Command, do func(context.Context, *lifecycle.Manager) error) error {
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
		return do(ctx, &lifecycle.Manager{Redis: rstore, Registry: store})
	})
}

func newScopeCreate(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create an activity version with its stock",
		Long: `Registers the version, writes its stock to Redis bucket by bucket, opens it and makes
it the activity's current version. Running it again with the same values completes what
was begun; it never refills a bucket that was there before.

One bucket is right until a single Redis slot is measured to be the limit.`,
		Example: `  reconciler scope create --activity 10001 --sku 88001 --version 7 --total 10000 --starts now --ends +1h
  reconciler scope create --activity 10001 --sku 88001 --version 8 --total 10000 --buckets 4 \
      --starts 2026-11-11T00:00:00Z --ends 2026-11-11T02:00:00Z --retention 168h`,
		Args: args(),
	}
	var spec lifecycle.Spec
	var starts, ends instant
	f := cmd.Flags()
	f.StringVar(&spec.ActivityID, "activity", "", "activity `id`")
	f.StringVar(&spec.SKUID, "sku", "", "SKU `id`")
	f.Int64Var(&spec.Version, "version", 0, "activity `version`")
	f.Int64Var(&spec.Total, "total", 0, "`units` to sell over all buckets")
	f.Int64Var(&spec.Buckets, "buckets", 1, "`number` of stock buckets")
	f.Var(&starts, "starts", "start of the sale: now, +10m or RFC 3339")
	f.Var(&ends, "ends", "end of the sale: +1h or RFC 3339")
	f.DurationVar(&spec.Retention, "retention", lifecycle.DefaultRetention, "how long keys are kept after the end; never extended later")
	f.BoolVar(&spec.AllowSmall, "allow-small", false, fmt.Sprintf("permit fewer than %d units in a bucket", lifecycle.MinPerBucket))
	for _, name := range []string{"activity", "sku", "version", "total", "starts", "ends"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flag was defined above
		}
	}
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		spec.StartsAt, spec.EndsAt = starts.at, ends.at
		return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager) error {
			if err := keepTimes(ctx, m, &spec, starts.relative, ends.relative); err != nil {
				return err
			}
			if err := m.Create(ctx, spec, by.actor); err != nil {
				return err
			}
			return showScopes(ctx, m, out, pgstore.ScopeFilter{ActivityID: spec.ActivityID, SKUID: spec.SKUID, Version: &spec.Version})
		})
	}
	return cmd
}

// keepTimes makes relative times mean what they meant when the version was
// begun, so that the same command completes it.
func keepTimes(ctx context.Context, m *lifecycle.Manager, spec *lifecycle.Spec, starts, ends bool) error {
	begun, err := m.Registry.Scopes(ctx, pgstore.ScopeFilter{ActivityID: spec.ActivityID, SKUID: spec.SKUID, Version: &spec.Version})
	if err != nil || len(begun) == 0 {
		return err
	}
	if starts {
		spec.StartsAt = begun[0].StartsAt
	}
	if ends {
		spec.EndsAt = begun[0].EndsAt
	}
	return nil
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
		return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager) error {
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
		return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager) error {
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
		return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager) error {
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

// scopeLive is a scope with its numbers in Redis.
type scopeLive struct {
	scopeView
	Redis *scopeNumbers `json:"redis"` // null: see error
	Error string        `json:"error,omitempty"`
}

// scopeNumbers are the live numbers of a scope.
type scopeNumbers struct {
	State             string `json:"state"`
	Initial           int64  `json:"initial"`
	Available         int64  `json:"available"`
	Reserved          int64  `json:"reserved"`
	ReleasedTotal     int64  `json:"released_total"`
	SendPending       int64  `json:"send_pending"`
	ReservationExpiry int64  `json:"reservation_expiry"`
}

// showScopes prints the selected scopes with their live numbers. A scope that
// cannot be read is shown as such, and makes the command fail.
func showScopes(ctx context.Context, m *lifecycle.Manager, out *result, filter pgstore.ScopeFilter) error {
	registered, err := m.Registry.Scopes(ctx, filter)
	if err != nil {
		return err
	}
	scopes := make([]reservation.Scope, len(registered))
	for i, r := range registered {
		scopes[i] = r.Scope
	}
	var live []scopeLive
	var rows []table.Row
	incomplete := false
	for i, snapshot := range m.Redis.Snapshots(ctx, scopes) {
		v := scopeLive{scopeView: viewScope(registered[i])}
		s := scopes[i]
		row := table.Row{s.ActivityID, s.SKUID, s.Version, s.Bucket}
		switch {
		case snapshot.Err != nil:
			v.Error = snapshot.Err.Error()
			row = append(row, "unreadable: "+v.Error)
		case snapshot.State == "" || snapshot.Available == lua.Missing:
			v.Error = "config_missing: Redis holds no complete meta and stock"
			row = append(row, v.Error)
		default:
			v.Redis = &scopeNumbers{
				State: string(snapshot.State), Initial: snapshot.Initial, Available: snapshot.Available, Reserved: snapshot.Reserved,
				ReleasedTotal: max(snapshot.ReleasedTotal, 0), SendPending: snapshot.Pending, ReservationExpiry: snapshot.Expiry,
			}
			n := v.Redis
			row = append(row, n.State, n.Initial, n.Available, n.Reserved, n.ReleasedTotal, n.SendPending, n.ReservationExpiry, stamp(v.EndsAt))
		}
		incomplete = incomplete || v.Error != ""
		live, rows = append(live, v), append(rows, row)
	}
	err = out.print(struct {
		Schema int         `json:"schema"`
		Scopes []scopeLive `json:"scopes"`
	}{1, nonNil(live)}, func() error {
		return out.table("no scopes", table.Row{"ACTIVITY", "SKU", "VERSION", "BUCKET", "STATE", "INITIAL", "AVAILABLE", "RESERVED", "RELEASED", "TO SEND", "UNDECIDED", "ENDS"}, rows)
	})
	if err == nil && incomplete {
		return &verdict{exitIncomplete, errors.New("not every scope could be read")}
	}
	return err
}
