package main

import (
	"fmt"
	"log/slog"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/observe"
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
	log, err := observe.NewLogger(a.stderr, loaded.Config.Log.Format, loaded.Config.Log.Level)
	if err != nil {
		return config.Loaded{}, err
	}
	slog.SetDefault(log)
	return loaded, nil
}
