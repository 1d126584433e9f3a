package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/user"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/migrations"
)

// settingAnnotation marks a flag that overrides a setting.
const settingAnnotation = "setting"

// settingFlag adds a flag that overrides the setting at path.
func settingFlag(flags *pflag.FlagSet, path, name, usage string) {
	flags.String(name, "", usage)
	if err := flags.SetAnnotation(name, settingAnnotation, []string{path}); err != nil {
		panic(err) // the flag was defined in the line above
	}
}

// settings loads the configuration and makes the log as it says.
func (a *app) settings(cmd *cobra.Command) (config.Loaded, error) {
	loaded, err := a.load(cmd)
	if err != nil {
		return config.Loaded{}, err
	}
	if err := a.setLevel(loaded.Config); err != nil {
		return config.Loaded{}, err
	}
	log, err := observe.NewLogger(a.stderr, loaded.Config.Log.Format, &a.level)
	if err != nil {
		return config.Loaded{}, err
	}
	slog.SetDefault(log)
	a.current = loaded
	return loaded, nil
}

// setLevel is the least level of the log from now on.
func (a *app) setLevel(c config.Config) error {
	level, err := observe.ParseLevel(c.Log.Level)
	if err != nil {
		return err
	}
	a.level.Set(level)
	return nil
}

// load reads the settings: the file, the environment and the command's flags.
func (a *app) load(cmd *cobra.Command) (config.Loaded, error) {
	given := map[string]string{}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if path := f.Annotations[settingAnnotation]; len(path) == 1 {
			given[path[0]] = f.Value.String()
		}
	})
	loaded, err := config.Load(config.Options{File: a.configFile, Flags: given})
	if err != nil {
		return config.Loaded{}, &verdict{exitFailed, fmt.Errorf("configuration:\n%w", err)}
	}
	return loaded, nil
}

// withStore runs do with PostgreSQL, whose schema must be the one that this
// binary knows.
func (a *app) withStore(cmd *cobra.Command, do func(context.Context, *pgstore.Store) error) error {
	loaded, err := a.settings(cmd)
	if err != nil {
		return err
	}
	p := loaded.Config.Postgres
	store, err := pgstore.Open(cmd.Context(), pgstore.Config{
		URL: p.URL, MaxConns: p.MaxConns, ApplicationName: cmd.CommandPath(),
		ConnectTimeout: p.ConnectTimeout, StatementTimeout: p.StatementTimeout,
	})
	if err != nil {
		return err
	}
	defer store.Close()
	if err := migrations.Check(cmd.Context(), store.Pool()); err != nil {
		return err
	}
	return do(cmd.Context(), store)
}

// act is who does something to the installation, and why: both go into the
// audit trail.
type act struct{ actor, reason string }

// actFlags adds --actor and --reason.
func actFlags(cmd *cobra.Command) *act {
	var by act
	cmd.Flags().StringVar(&by.actor, "actor", loginName(), "who does it, for the audit trail")
	cmd.Flags().StringVar(&by.reason, "reason", "", "why, for the audit trail")
	return &by
}

// loginName is the person behind the process as far as the system knows.
func loginName() string {
	if name := os.Getenv("SUDO_USER"); name != "" {
		return name
	}
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return "unknown"
}
