package main

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/view"
)

func newStatus(a *app) *cobra.Command {
	var watch bool
	var every time.Duration
	var most int
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what waits, for what, and what is halted",
		Long: `Reads everything live: who holds the lease, how much waits in each scope and for how
long, what each undecided reservation waits for (by row of the decision table and cause),
what holds back releases, and how the jobs ended last. It changes nothing.`,
		Example: "  reconciler status\n  reconciler status --watch",
		Args:    args(),
	}
	cmd.Flags().BoolVar(&watch, "watch", false, "print it again and again, until interrupted")
	cmd.Flags().DurationVar(&every, "every", 2*time.Second, "pause between two prints of --watch")
	cmd.Flags().IntVar(&most, "most", 20_000, "look at so many undecided reservations at most")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.withDaemon(cmd, true, func(ctx context.Context, d *daemon.Daemon) error {
			for {
				s, err := d.Status(ctx, most)
				if err != nil {
					return err
				}
				if err := printStatus(out, s); err != nil {
					return err
				}
				if !watch {
					if len(s.Incomplete) > 0 {
						return &verdict{exitIncomplete, errors.New("not everything could be read:\n" + strings.Join(s.Incomplete, "\n"))}
					}
					return nil
				}
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(every):
				}
			}
		})
	}
	return cmd
}

func printStatus(out *result, s daemon.Status) error {
	v := view.OfStatus(s)
	return out.print(v, func() error {
		holder := "nobody holds the lease: no daemon is working"
		if v.Lease.Held {
			holder = "lease held by " + v.Lease.Holder + " since " + stamp(s.Lease.AcquiredAt)
		}
		sections := []func() error{
			func() error { return out.line("%s", holder) },
			func() error { return printHalts(out, v) },
			func() error { return printBacklog(out, v) },
			func() error { return printWaiting(out, v) },
		}
		for _, section := range sections {
			if err := section(); err != nil {
				return err
			}
		}
		return nil
	})
}

func printHalts(out *result, v view.Status) error {
	if v.NotReady != "" {
		if err := out.line("HALTED: %s", v.NotReady); err != nil {
			return err
		}
	}
	if len(v.Halts) == 0 && v.NotReady != "" {
		return out.line("%d open tasks\n", v.OpenTasks)
	}
	if len(v.Halts) == 0 {
		return out.line("nothing is halted; %d open tasks\n", v.OpenTasks)
	}
	rows := make([]table.Row, 0, len(v.Halts))
	for _, h := range v.Halts {
		rows = append(rows, table.Row{h.ID, h.Kind, orDash(h.Scope), h.Cause, h.Count})
	}
	if err := out.line("HALTED: releases wait for a person (`reconciler task show ID`); %d open tasks", v.OpenTasks); err != nil {
		return err
	}
	if err := out.table("", table.Row{"TASK", "KIND", "SCOPE", "CAUSE", "COUNT"}, rows); err != nil {
		return err
	}
	return out.line("")
}

func printBacklog(out *result, v view.Status) error {
	rows := make([]table.Row, 0, len(v.Scopes))
	for _, b := range v.Scopes {
		if b.Error != "" {
			rows = append(rows, table.Row{b.Scope, "unreadable: " + b.Error})
			continue
		}
		rows = append(rows, table.Row{b.Scope, b.SendPending, age(b.SendOldestSeconds), b.Due, age(b.DueOldestSeconds)})
	}
	if err := out.table("no scopes", table.Row{"SCOPE", "TO SEND", "OLDEST", "DUE", "OLDEST"}, rows); err != nil {
		return err
	}
	return out.line("")
}

func printWaiting(out *result, v view.Status) error {
	rows := make([]table.Row, 0, len(v.Waiting))
	for _, w := range v.Waiting {
		rows = append(rows, table.Row{pass.RowName(w.Row), string(w.Verb), w.Cause, w.Count})
	}
	if err := out.table("no reservation is undecided", table.Row{"ROW", "NEXT", "WAITS FOR", "COUNT"}, rows); err != nil {
		return err
	}
	if v.Truncated {
		return out.line("the first %d of more: see --most", v.Looked)
	}
	return nil
}

// age is how long something has been due; "-" when nothing is.
func age(seconds float64) string {
	if seconds <= 0 {
		return "-"
	}
	if seconds < 1 {
		return strconv.FormatFloat(seconds, 'f', 1, 64) + "s"
	}
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
}
