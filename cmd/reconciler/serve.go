package main

import (
	"context"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/admin"
	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/console"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/service"
)

// serve is the daemon under a service manager, or under a terminal.
func (a *app) serve(cmd *cobra.Command, dryRun bool) error {
	// From the very start, so that an early SIGHUP does not end the process.
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)

	loaded, err := a.settings(cmd)
	if err != nil {
		return err
	}
	interval, err := service.WatchdogInterval()
	if err != nil {
		return err
	}
	manager := service.New(slog.Default())
	manager.Status("connecting")
	o := daemon.Options{Config: loaded.Config, DryRun: dryRun, Supervisor: manager}
	o.Pages = func(d *daemon.Daemon, server *admin.Server) error { return addConsole(loaded.Config, d, server) }
	return openDaemon(cmd.Context(), o, func(ctx context.Context, d *daemon.Daemon) error {
		watch, cancel := context.WithCancel(ctx)
		var background sync.WaitGroup
		defer background.Wait()
		defer cancel()
		background.Go(func() { manager.Watch(watch, interval, d.Stalled) })
		background.Go(func() {
			for {
				select {
				case <-watch.Done():
					return
				case <-hangups:
					manager.Reload(func() { a.reload(cmd, d) })
				}
			}
		})
		return d.Run(ctx)
	})
}

// addConsole puts the console on the daemon's admin server.
func addConsole(c config.Config, d *daemon.Daemon, server *admin.Server) error {
	auth, err := console.NewAuth(c.Admin)
	if err != nil {
		return err
	}
	pages, err := console.New(console.Options{Daemon: d, Auth: auth, Hasher: observe.NewUserHasher(c.Observe.UserHashKey)})
	if err != nil {
		return err
	}
	pages.Register(server)
	return nil
}

// reload reads the settings anew and takes over what a running daemon can.
func (a *app) reload(cmd *cobra.Command, d *daemon.Daemon) {
	loaded, err := a.load(cmd)
	if err != nil {
		slog.Error("reload refused: the settings from before stay in force", "error", err)
		return
	}
	taken, restart := d.Reload(loaded.Config)
	if err := a.setLevel(loaded.Config); err != nil {
		slog.Error("reload: the log's level stays", "error", err)
	}
	slog.Info("reloaded", "changed", taken)
	if len(restart) > 0 {
		slog.Warn("reload: these settings differ and need a restart", "settings", restart)
	}
}
