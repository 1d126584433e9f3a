package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/migrations"
)

func newMigrate(a *app) *cobra.Command {
	cmd := group("migrate", "Create and change the database's schema seckill",
		`Applies the numbered steps of schema seckill, which holds the claims. It connects
with postgres.migrate_url if that is set, else with postgres.url.`,
		newMigrateUp(a), newMigrateDown(a), newMigrateStatus(a), newMigrateEvidence(a))
	cmd.Example = "  reconciler migrate up"
	return cmd
}

func newMigrateUp(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Apply what is missing",
		Example: `  reconciler migrate up
  reconciler migrate up --with-reference   # and schema shop, the reference order side`,
		Args: args(),
	}
	return migrateSteps(a, cmd, "nothing to apply", migrations.Up)
}

func newMigrateDown(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "down",
		Short: "Roll the newest step back",
		Long: `Rolls back one step, the newest. It refuses to drop claims or orders, and the
order fence while an order table carries it.`,
		Example: `  reconciler migrate down
  reconciler migrate down --with-reference   # the newest step of schema shop`,
		Args: args(),
	}
	return migrateSteps(a, cmd, "nothing to roll back", migrations.Down)
}

// migrateFunc is [migrations.Up] or [migrations.Down].
type migrateFunc func(ctx context.Context, url string, o migrations.Options) ([]migrations.Migration, error)

// migrateSteps completes a command that runs steps and lists those it ran, also
// when a later one failed.
func migrateSteps(a *app, cmd *cobra.Command, none string, run migrateFunc) *cobra.Command {
	var opts migrations.Options
	cmd.Flags().BoolVar(&opts.WithReference, "with-reference", false, "include schema shop, the reference order side")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		url, err := a.migrateURL(cmd)
		if err != nil {
			return err
		}
		steps, err := run(cmd.Context(), url, opts)
		if err != nil && len(steps) == 0 {
			return err
		}
		return errors.Join(err, printSteps(out, none, steps))
	}
	return cmd
}

func newMigrateStatus(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "status",
		Short:   "List all steps and which of them are applied",
		Example: "  reconciler migrate status --output json",
		Args:    args(),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		url, err := a.migrateURL(cmd)
		if err != nil {
			return err
		}
		steps, err := migrations.Status(cmd.Context(), url)
		if err != nil {
			return err
		}
		return printSteps(out, "no steps", steps)
	}
	return cmd
}

// schemaOf names the schema that a set of steps makes.
var schemaOf = map[string]string{"sql": "seckill", "reference": "shop"}

func printSteps(out *result, none string, steps []migrations.Migration) error {
	rows := make([]table.Row, 0, len(steps))
	for _, m := range steps {
		rows = append(rows, table.Row{schemaOf[m.Set], m.Version, m.Name, yesNo(m.Applied), stamp(m.AppliedAt)})
	}
	return out.print(struct {
		Schema int                    `json:"schema"`
		Steps  []migrations.Migration `json:"steps"`
	}{1, view.NonNil(steps)}, func() error {
		return out.table(none, table.Row{"SCHEMA", "VERSION", "NAME", "APPLIED", "AT"}, rows)
	})
}

func newMigrateEvidence(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "evidence FILE",
		Short: "Install a view of your own over your order tables",
		Long: `Makes the query in FILE ("-" is standard input) the view order_evidence, through
which orders are found: one SELECT with the columns reservation_id, order_id, request_id,
activity_id, sku_id, activity_version, bucket_id, user_id, active and created_at.
It replaces the view in force in one transaction, or changes nothing.`,
		Example: "  reconciler migrate evidence orders.sql",
		Args:    args("FILE"),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		url, err := a.migrateURL(cmd)
		if err != nil {
			return err
		}
		query, err := readArgument(a.stdin, args[0])
		if err != nil {
			return err
		}
		installed, err := migrations.InstallEvidence(cmd.Context(), url, query)
		if err != nil {
			return err
		}
		return out.print(struct {
			Schema   int      `json:"schema"`
			Problems []string `json:"problems"`
		}{1, view.NonNil(installed.Problems)}, func() error {
			if err := out.line("the view order_evidence is installed"); err != nil {
				return err
			}
			for _, p := range installed.Problems {
				if err := out.line("releases are stopped until this is put right: %s", p); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return cmd
}

// readArgument reads the named file, "-" being standard input.
func readArgument(stdin io.Reader, name string) (string, error) {
	if name == "-" {
		text, err := io.ReadAll(stdin)
		if err != nil {
			return "", fmt.Errorf("read standard input: %w", err)
		}
		return string(text), nil
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return "", err
	}
	return string(text), nil
}

// migrateURL is where the schema is changed.
func (a *app) migrateURL(cmd *cobra.Command) (string, error) {
	loaded, err := a.settings(cmd)
	if err != nil {
		return "", err
	}
	return loaded.Config.Postgres.MigrateString(), nil
}
