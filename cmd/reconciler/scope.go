package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/reservation"
)

func newScope(a *app) *cobra.Command {
	cmd := group("scope", "Create, see and hold the stock buckets of activities",
		"A scope is one stock bucket: an activity, a SKU, an activity version and a bucket.",
		newScopeCreate(a), newScopeImport(a), newScopeList(a), newScopeShow(a),
		newScopePause(a), newScopeResume(a), newScopeClose(a), newScopeRoll(a), newScopeHold(a), newScopeUnhold(a))
	cmd.Example = "  reconciler scope list --activity 10001"
	return cmd
}

// selector is the flags that choose scopes.
type selector struct {
	flags    *pflag.FlagSet
	activity string
	sku      string
	version  int64
	bucket   int64
}

// selectorFlags adds --activity --sku --version --bucket, all but the last
// required if one version must be named.
func selectorFlags(cmd *cobra.Command, oneVersion bool) *selector {
	s := &selector{flags: cmd.Flags()}
	s.flags.StringVar(&s.activity, "activity", "", "activity `id`")
	s.flags.StringVar(&s.sku, "sku", "", "SKU `id`")
	s.flags.Int64Var(&s.version, "version", 0, "activity `version`")
	s.flags.Int64Var(&s.bucket, "bucket", 0, "`number` of the bucket (default: all)")
	if oneVersion {
		for _, name := range []string{"activity", "sku", "version"} {
			if err := cmd.MarkFlagRequired(name); err != nil {
				panic(err) // the flag was defined above
			}
		}
	}
	return s
}

// filter is the selection as the registry takes it.
func (s *selector) filter() pgstore.ScopeFilter {
	f := pgstore.ScopeFilter{ActivityID: s.activity, SKUID: s.sku}
	if s.flags.Changed("version") {
		f.Version = &s.version
	}
	if s.flags.Changed("bucket") {
		f.Bucket = &s.bucket
	}
	return f
}

// String names the selection in messages.
func (s *selector) String() string {
	text := "activity " + s.activity + ", SKU " + s.sku + ", version " + strconv.FormatInt(s.version, 10)
	if s.flags.Changed("bucket") {
		text += ", bucket " + strconv.FormatInt(s.bucket, 10)
	}
	return text
}

// find returns the selected scopes, of which there must be at least one.
func (s *selector) find(ctx context.Context, store *pgstore.Store) ([]reservation.Scope, error) {
	registered, err := store.Scopes(ctx, s.filter())
	if err != nil {
		return nil, err
	}
	if len(registered) == 0 {
		return nil, fmt.Errorf("no scope is registered for %s: see `reconciler scope list`", s)
	}
	scopes := make([]reservation.Scope, len(registered))
	for i, r := range registered {
		scopes[i] = r.Scope
	}
	return scopes, nil
}

func newScopeList(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the registered scopes",
		Example: `  reconciler scope list
  reconciler scope list --activity 10001 --output json`,
		Args: args(),
	}
	chosen := selectorFlags(cmd, false)
	var all bool
	cmd.Flags().BoolVar(&all, "all", false, "also those past their retention, whose keys have expired")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		filter := chosen.filter()
		filter.Live = !all
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			return printScopes(ctx, store, out, filter)
		})
	}
	return cmd
}

func printScopes(ctx context.Context, store *pgstore.Store, out *result, filter pgstore.ScopeFilter) error {
	scopes, err := store.Scopes(ctx, filter)
	if err != nil {
		return err
	}
	views := make([]view.Scope, 0, len(scopes))
	rows := make([]table.Row, 0, len(scopes))
	for _, r := range scopes {
		views = append(views, view.OfScope(r))
		held := "-"
		if r.Hold != nil {
			held = "by " + r.Hold.By
		}
		s := r.Scope
		rows = append(rows, table.Row{s.ActivityID, s.SKUID, s.Version, s.Bucket, r.State, r.Initial, stamp(r.StartsAt), stamp(r.EndsAt), stamp(r.RetentionUntil), held})
	}
	return out.print(struct {
		Schema int          `json:"schema"`
		Scopes []view.Scope `json:"scopes"`
	}{1, views}, func() error {
		return out.table("no scopes", table.Row{"ACTIVITY", "SKU", "VERSION", "BUCKET", "STATE", "INITIAL", "STARTS", "ENDS", "RETAINED UNTIL", "HELD"}, rows)
	})
}

func newScopeHold(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "hold",
		Short: "Keep every worker from changing a scope",
		Long: `Keeps every worker from changing the scope, not even its index members are
deferred. The sale itself goes on.`,
		Example: `  reconciler scope hold --activity 10001 --sku 88001 --version 7 --reason "stock recount"
  reconciler scope hold --activity 10001 --sku 88001 --version 7 --bucket 0`,
		Args: args(),
	}
	return scopeChange(a, cmd, (*pgstore.Store).HoldScopes)
}

func newScopeUnhold(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "unhold",
		Short:   "Let workers change a held scope again",
		Example: "  reconciler scope unhold --activity 10001 --sku 88001 --version 7",
		Args:    args(),
	}
	return scopeChange(a, cmd, (*pgstore.Store).UnholdScopes)
}

// scopeChange completes a command that changes scopes in the registry and shows
// them.
func scopeChange(a *app, cmd *cobra.Command,
	change func(s *pgstore.Store, ctx context.Context, scopes []reservation.Scope, actor, reason string) error,
) *cobra.Command {
	chosen := selectorFlags(cmd, true)
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if chosen.activity == "" || chosen.sku == "" { // empty means all to the registry
			return usageError(cmd, errors.New("--activity and --sku must not be empty"))
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			scopes, err := chosen.find(ctx, store)
			if err != nil {
				return err
			}
			if err := change(store, ctx, scopes, by.actor, by.reason); err != nil {
				return err
			}
			return printScopes(ctx, store, out, chosen.filter())
		})
	}
	return cmd
}
