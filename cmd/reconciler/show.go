package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/reservation"
)

func newShow(a *app) *cobra.Command {
	cmd := group("show", "Show everything that is known of one thing",
		`Gathers what Redis, PostgreSQL and RocketMQ say, and tells what the daemon does
next, when, and why. It changes nothing and needs no daemon that runs. A source
that does not answer is named, and the exit status is 3. Users appear as hashes.`,
		newShowReservation(a), newShowRequest(a), newShowUser(a))
	cmd.Example = "  reconciler show reservation uekb4ncu7j4dst4xyjqugyamc3"
	return cmd
}

func newShowReservation(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "reservation ID",
		Short: "Explain one reservation",
		Long: `Looks for the reservation in every registered scope, gathers its evidence as the
daemon would, and decides as it would.`,
		Example: `  reconciler show reservation uekb4ncu7j4dst4xyjqugyamc3 --output json
  reconciler show reservation uekb4ncu7j4dst4xyjqugyamc3 --scope a:10001:s:88001:v:7:b:0`,
	}
	return a.inspecting(cmd, "ID", func(ctx context.Context, i *daemon.Inspector, id string, in daemon.In, hasher observe.UserHasher, out *result) ([]daemon.Unread, error) {
		e, err := i.Reservation(ctx, id, in)
		if err != nil {
			return nil, err
		}
		v := view.OfExplanation(e, hasher)
		return e.Unread, out.print(v, func() error { return printExplanation(out, v) })
	})
}

func newShowRequest(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "request ID",
		Short: "Explain what became of one request",
		Long: `Looks for the result that Redis keeps of the request, in the one shard of each
registered scope that may have it, and for its orders in PostgreSQL, and explains
every reservation that either names.`,
		Example: "  reconciler show request q-20261111-77 --activity 10001",
	}
	return a.inspecting(cmd, "ID", func(ctx context.Context, i *daemon.Inspector, id string, in daemon.In, hasher observe.UserHasher, out *result) ([]daemon.Unread, error) {
		f, err := i.Request(ctx, id, in)
		if err != nil {
			return nil, err
		}
		v := view.OfRequest(f, hasher)
		return f.Unread, out.print(v, func() error {
			p := newPage(v.RequestID)
			for _, r := range v.Results {
				p.add("redis", "result in "+r.Scope, r.Malformed)
				if r.Malformed == "" {
					p.add("redis", "result in "+r.Scope, fmt.Sprintf("%s (code %d), user %s", r.Status, r.Code, r.UserIDHash))
				}
				p.add("redis", "reservation", r.ReservationID)
			}
			p.orders(v.Orders)
			p.unread(v.Unread)
			return printFound(out, p, v.Reservations)
		})
	})
}

func newShowUser(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "user ID",
		Short: "Explain the reservations and orders of one user",
		Long: `Looks for the user's live reservation in the one bucket that the user has of each
registered version, and for the user's orders in PostgreSQL, and explains every
reservation that either names. The id itself is not printed.`,
		Example: "  reconciler show user 4711 --activity 10001 --sku 88001",
	}
	return a.inspecting(cmd, "ID", func(ctx context.Context, i *daemon.Inspector, id string, in daemon.In, hasher observe.UserHasher, out *result) ([]daemon.Unread, error) {
		f, err := i.User(ctx, id, in)
		if err != nil {
			return nil, err
		}
		v := view.OfUser(id, f, hasher)
		return f.Unread, out.print(v, func() error {
			p := newPage("user " + v.UserIDHash)
			for _, m := range v.Markers {
				p.add("redis", "live in "+m.Scope, m.ReservationID)
			}
			p.orders(v.Orders)
			p.unread(v.Unread)
			return printFound(out, p, v.Reservations)
		})
	})
}

// showLimit bounds one look, however many sources hang.
const showLimit = 2 * time.Minute

// inspecting completes a command that looks for one thing and prints what was
// found; what was not read becomes exit status 3.
func (a *app) inspecting(cmd *cobra.Command, what string,
	look func(context.Context, *daemon.Inspector, string, daemon.In, observe.UserHasher, *result) ([]daemon.Unread, error),
) *cobra.Command {
	cmd.Args = args(what)
	out := outputFlag(a, cmd)
	var in daemon.In
	var scopes []string
	cmd.Flags().StringSliceVar(&scopes, "scope", nil, "look in this `scope` only (a:…:s:…:v:…:b:…); needs no registry")
	cmd.Flags().StringVar(&in.ActivityID, "activity", "", "look in the scopes of this activity only")
	cmd.Flags().StringVar(&in.SKUID, "sku", "", "look in the scopes of this SKU only")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		for _, tag := range scopes {
			scope, err := reservation.ParseTag(tag)
			if err != nil {
				return usageError(cmd, fmt.Errorf("--scope: %w", err))
			}
			in.Scopes = append(in.Scopes, scope)
		}
		loaded, err := a.settings(cmd)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), showLimit)
		defer cancel()
		i, err := daemon.OpenInspector(ctx, daemon.Options{
			Config: loaded.Config, Logger: slog.Default(), Metrics: observe.NewMetrics(readBuild().Version),
		})
		if err != nil {
			return err
		}
		defer func() {
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeLimit)
			defer cancel()
			i.Close(closing)
		}()
		unread, err := look(ctx, i, args[0], in, observe.NewUserHasher(loaded.Config.Observe.UserHashKey), out)
		if err == nil && len(unread) > 0 {
			err = &verdict{exitIncomplete, nil} // the page names them
		}
		return err
	}
	return cmd
}

// page is a table of what each source says.
type page struct {
	title string
	rows  []table.Row
}

func newPage(title string) *page { return &page{title: title} }

func (p *page) add(source, what, value string) {
	if value != "" {
		p.rows = append(p.rows, table.Row{source, what, value})
	}
}

func (p *page) addTime(source, what string, at *time.Time) {
	if at != nil {
		p.add(source, what, at.Format(time.RFC3339Nano))
	}
}

func (p *page) orders(orders []view.Order) {
	for _, o := range orders {
		text := o.OrderID
		if !o.Active {
			text += " (not active)"
		}
		if o.ReservationID != "" {
			text += " of reservation " + o.ReservationID
		}
		p.add("postgres", "order", text)
	}
}

func (p *page) unread(unread []view.Unread) {
	for _, u := range unread {
		p.add(u.Source, "DID NOT ANSWER", u.Reason)
	}
}

func (p *page) print(out *result) error {
	return out.table("nothing was found", table.Row{"FROM", "WHAT", p.title}, p.rows)
}

func printFound(out *result, p *page, reservations []view.Explanation) error {
	if err := p.print(out); err != nil {
		return err
	}
	for _, v := range reservations {
		if err := out.line(""); err != nil {
			return err
		}
		if err := printExplanation(out, v); err != nil {
			return err
		}
	}
	return nil
}

func printExplanation(out *result, v view.Explanation) error {
	p := newPage(v.ReservationID)
	p.add("", "scope", v.Scope)
	p.addTime("", "now", v.Now)
	p.hash(v)
	for _, i := range v.Indexes {
		p.addTime("redis", "due in "+i.Index, &i.Due)
	}
	p.add("postgres", "evidence", v.Postgres.State)
	p.add("postgres", "because", v.Postgres.Cause)
	p.add("postgres", "claim", v.Postgres.Claim)
	p.add("postgres", "claimed by", v.Postgres.ClaimedBy)
	p.addTime("postgres", "claimed", v.Postgres.ClaimedAt)
	p.add("postgres", "reason", v.Postgres.Reason)
	p.orders(v.Postgres.Orders)
	p.add("rocketmq", "message", v.MQ.State)
	p.add("rocketmq", "because", v.MQ.Cause)
	p.add("rocketmq", "detail", v.MQ.Detail)
	p.unread(v.Unread)
	p.add("next", "the daemon", v.Next.Does)
	p.add("next", "why", v.Next.Why)
	p.add("next", "when", v.Next.When)
	p.addTime("next", "not before", v.Next.At)
	if d := v.Decision; d != nil {
		p.add("next", "asks a person", d.Task)
	}
	for _, what := range v.Next.HeldBack {
		p.add("next", "HELD BACK", what)
	}
	return p.print(out)
}

// hash shows what Redis holds.
func (p *page) hash(v view.Explanation) {
	r := v.Redis
	if r == nil {
		if v.Decision != nil {
			p.add("redis", "hash", "gone")
		}
		return
	}
	p.add("redis", "status", r.Status)
	p.add("redis", "malformed", r.Malformed)
	p.add("redis", "request", r.RequestID)
	p.add("redis", "user", r.UserIDHash)
	p.addTime("redis", "reserved", r.ReservedAt)
	p.addTime("redis", "expires", r.ExpiresAt)
	p.addTime("redis", "updated", r.UpdatedAt)
	p.addTime("redis", "last sent", r.LastSentAt)
	p.add("redis", "sends / resends / waits", fmt.Sprintf("%d / %d / %d", r.SendCount, r.ResendCount, r.RetryCount))
	p.add("redis", "position", r.Position)
	p.add("redis", "order", r.OrderID)
	p.add("redis", "error code", r.ErrorCode)
	p.add("redis", "release reason", r.ReleaseReason)
	p.addTime("redis", "released", r.ReleasedAt)
}
