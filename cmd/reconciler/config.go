package main

import (
	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/admin"
	"github.com/seckill/reconciler/internal/config"
)

func newConfig(a *app) *cobra.Command {
	cmd := group("config", "Check and show the settings",
		"Settings come from config.yaml, overridden by RECONCILER_* variables, overridden by flags.",
		newConfigCheck(a), newConfigShow(a), newConfigToken(a))
	cmd.Example = "  reconciler config check"
	return cmd
}

func newConfigCheck(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check the settings without connecting to anything",
		Long: `Reads the file, the environment and the flags, and names every setting that is
unknown, of the wrong kind, out of range or in contradiction to another one.`,
		Example: "  reconciler config check --config /etc/reconciler/config.yaml",
		Args:    args(),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := a.settings(cmd)
		if err != nil {
			return err
		}
		return out.print(struct {
			Schema int    `json:"schema"`
			OK     bool   `json:"ok"`
			File   string `json:"file"`
		}{1, true, loaded.File}, func() error {
			return out.line("the settings are valid (%s)", fileOrNone(loaded))
		})
	}
	return cmd
}

func newConfigShow(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the settings in force and where each comes from",
		Long:  "Lists every setting. Secrets are masked, passwords inside connection strings too.",
		Example: `  reconciler config show
  RECONCILER_MODE=act reconciler config show --output json`,
		Args: args(),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		loaded, err := a.settings(cmd)
		if err != nil {
			return err
		}
		settings := loaded.Settings()
		return out.print(struct {
			Schema   int              `json:"schema"`
			File     string           `json:"file"`
			Settings []config.Setting `json:"settings"`
		}{1, loaded.File, settings}, func() error {
			rows := make([]table.Row, 0, len(settings))
			for _, s := range settings {
				rows = append(rows, table.Row{s.Key, orDash(s.Value), orDefault(s.Origin)})
			}
			return out.table("no settings", table.Row{"SETTING", "VALUE", "FROM"}, rows)
		})
	}
	return cmd
}

func fileOrNone(l config.Loaded) string {
	if l.File == "" {
		return "no file, so defaults and environment"
	}
	return l.File
}

func orDefault(origin string) string {
	if origin == "" {
		return "default"
	}
	return origin
}

func newConfigToken(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "token",
		Short: "Draw a token for the console and the API",
		Long: `Prints a new token and its hash. The hash goes into admin.read_token_sha256 or
admin.change_token_sha256; the token goes to the person or program, and is kept nowhere.`,
		Example: "  reconciler config token",
		Args:    args(),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		token, hashed := admin.NewToken()
		return out.print(struct {
			Schema int    `json:"schema"`
			Token  string `json:"token"`
			SHA256 string `json:"sha256"`
		}{1, token, hashed.String()}, func() error {
			return out.line("token   %s\nsha256  %s", token, hashed)
		})
	}
	return cmd
}
