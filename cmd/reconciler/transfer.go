package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/lifecycle"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/reconciliation"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/view"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/transfer"
)

func newTransfer(a *app) *cobra.Command {
	cmd := group("transfer", "Move units between the buckets of a version",
		`A transfer takes units out of one bucket and puts them into another of the same
version. Units between the two can be sold nowhere, and are never lost: whatever a
failover or a crash undoes is made up for, as long as the version's keys exist.`,
		newTransferCreate(a), newTransferList(a), newTransferShow(a), newTransferCancel(a))
	cmd.Example = "  reconciler transfer list --open"
	return cmd
}

// stores is what commands about transfers work with.
type stores struct {
	postgres  *pgstore.Store
	redis     *redisstore.Store
	cfg       config.Config
	transfers reconciliation.Transfers
}

// withTransfers runs do with PostgreSQL and Redis, and with what moves units.
func (a *app) withTransfers(cmd *cobra.Command, do func(context.Context, stores) error) error {
	return a.withScopes(cmd, func(ctx context.Context, m *lifecycle.Manager, c config.Config) error {
		drift := &reconcile.Reconciler{Registry: m.Registry, Stocks: m.Redis, Orders: m.Registry}
		return do(ctx, stores{m.Registry, m.Redis, c, reconciliation.NewTransfers(m.Redis, m.Registry, drift, loginName())})
	})
}

func newTransferCreate(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Move units from one bucket to another",
		Long: `Journals a transfer of units between two buckets of one version. The daemon's job
transfer carries it out; with --wait this command does it itself and ends when it is
done. Both may do so at once. All of the units are moved or none: if the donor has too
few of them by then, the transfer is cancelled.

Buckets take part that are ACTIVE or PAUSED and not held, in a version whose sums hold.
A bucket that has lost reservations gives nothing: its units are needed for them.
In mode observe it makes every check and journals nothing.

Exit status: 0 journalled, or with --wait done; 1 refused or cancelled; 3 a dependency
cannot be reached, or it is not done yet.`,
		Example: `  reconciler transfer create --activity 10001 --sku 88001 --version 7 --from 0 --to 3 --units 50 --reason "bucket 3 sells faster"
  reconciler transfer create --activity 10001 --sku 88001 --version 7 --from 0 --to 3 --units 50 --reason "last units" --wait`,
		Args: args(),
	}
	var r transfer.Request
	var wait bool
	var patience time.Duration
	flags := cmd.Flags()
	flags.StringVar(&r.Key.ActivityID, "activity", "", "activity `id`")
	flags.StringVar(&r.Key.SKUID, "sku", "", "SKU `id`")
	flags.Int64Var(&r.Key.Version, "version", 0, "activity `version`")
	flags.Int64Var(&r.Donor, "from", 0, "`bucket` that gives")
	flags.Int64Var(&r.Receiver, "to", 0, "`bucket` that gets")
	flags.Int64Var(&r.Amount, "units", 0, "`number` of units")
	flags.BoolVar(&wait, "wait", false, "carry it out here, and end when it is done")
	flags.DurationVar(&patience, "patience", 30*time.Second, "with --wait: for what `duration` to try")
	for _, name := range []string{"activity", "sku", "version", "from", "to", "units"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flag was defined above
		}
	}
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := by.checkReason(cmd); err != nil {
			return err
		}
		r.Reason, r.Actor = by.reason, by.actor
		return a.withTransfers(cmd, func(ctx context.Context, s stores) error {
			return a.createTransfer(ctx, s, out, r, wait, patience)
		})
	}
	return cmd
}

func (a *app) createTransfer(ctx context.Context, s stores, out *result, r transfer.Request, wait bool, patience time.Duration) error {
	plan := s.transfers.Planner.Plan
	if s.cfg.Mode != config.ModeAct {
		plan = s.transfers.Planner.Propose
	}
	row, warnings, err := plan(ctx, r)
	if err != nil {
		return refusal(err)
	}
	for _, w := range warnings {
		a.sayf("warning: %s", w)
	}
	if s.cfg.Mode != config.ModeAct {
		a.sayf("nothing is journalled: mode is %s. Set it to act to let the transfer be made.", s.cfg.Mode)
		return printTransfer(out, view.LiveTransfer{Transfer: view.OfTransfer(row), Next: string(transfer.Wait), Why: "mode is " + s.cfg.Mode})
	}
	if !wait {
		a.sayWhoDrives(ctx, s.postgres)
		return showTransfer(ctx, s, out, row)
	}
	err = s.drive(ctx, row.ID, patience)
	return errors.Join(showTransfer(context.WithoutCancel(ctx), s, out, row), err)
}

// sayf writes a note for people.
func (a *app) sayf(format string, args ...any) {
	_, _ = fmt.Fprintf(a.stderr, format+"\n", args...) // only a terminal that is gone
}

// sayWhoDrives tells who carries a transfer out that was only journalled.
func (a *app) sayWhoDrives(ctx context.Context, store *pgstore.Store) {
	holder, err := store.LeaseHolder(ctx, pgstore.LeaseDaemon)
	switch {
	case err != nil || !holder.Held:
		a.sayf("no daemon is at work now: the transfer is carried out when one is, or by `reconciler transfer create --wait`")
	default:
		a.sayf("the daemon's job transfer carries it out: see `reconciler transfer show`")
	}
}

// refusal is an error of planning as the exit status has it: what could not be
// read is incomplete, and no refusal.
func refusal(err error) error {
	if errors.Is(err, transfer.ErrUnreadable) || errors.Is(err, transfer.ErrMoving) {
		return &verdict{exitIncomplete, err}
	}
	return err
}

// errNotDone says that a transfer waits for something.
var errNotDone = errors.New("the transfer is not done yet: see what it waits for in `next`")

// drivePause is the pause between two tries.
const drivePause = 200 * time.Millisecond

// drive carries a transfer out. The daemon may be doing the same.
func (s stores) drive(ctx context.Context, id string, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		row, err := s.postgres.Transfer(ctx, id)
		if err != nil {
			return err
		}
		if _, err = s.transfers.Worker.Drive(ctx, transfer.FilterOf(row.Key)); err == nil {
			row, err = s.postgres.Transfer(ctx, id)
		}
		switch {
		case err == nil && row.State == transfer.Done:
			return nil
		case err == nil && row.State == transfer.Cancelled:
			return errors.New("the transfer was cancelled: " + row.Reason)
		case err != nil && ctx.Err() == nil:
			err = fmt.Errorf("drive transfer %s: %w", id, err)
		}
		select {
		case <-ctx.Done():
			return &verdict{exitIncomplete, errors.Join(errNotDone, err)}
		case <-time.After(drivePause):
		}
	}
}

func newTransferList(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the transfers in the journal, the newest first",
		Long: `Lists the journal. A row says what was seen last; transfer show reads what the buckets
say now.`,
		Example: "  reconciler transfer list --open\n  reconciler transfer list --activity 10001 --limit 20 --output json",
		Args:    args(),
	}
	var f pgstore.TransferFilter
	var version int64
	cmd.Flags().StringVar(&f.ActivityID, "activity", "", "only of this activity `id`")
	cmd.Flags().StringVar(&f.SKUID, "sku", "", "only of this SKU `id`")
	cmd.Flags().Int64Var(&version, "version", 0, "only of this activity `version`")
	cmd.Flags().BoolVar(&f.Open, "open", false, "only those that are not finished")
	cmd.Flags().IntVar(&f.Limit, "limit", 0, "at most so many (0: no limit)")
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if cmd.Flags().Changed("version") {
			f.Version = &version
		}
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			transfers, err := store.Transfers(ctx, f)
			if err != nil {
				return err
			}
			return printTransfers(out, transfers)
		})
	}
	return cmd
}

func printTransfers(out *result, transfers []transfer.Transfer) error {
	views := make([]view.Transfer, 0, len(transfers))
	rows := make([]table.Row, 0, len(transfers))
	for _, t := range transfers {
		views = append(views, view.OfTransfer(t))
		rows = append(rows, table.Row{
			t.ID, t.Key.ActivityID, t.Key.SKUID, t.Key.Version, t.Donor, t.Receiver, t.Amount, t.State, stamp(t.CreatedAt), t.CreatedBy, orDash(t.Reason),
		})
	}
	return out.print(struct {
		Schema    int             `json:"schema"`
		Transfers []view.Transfer `json:"transfers"`
	}{1, views}, func() error {
		return out.table("no transfers", table.Row{
			"TRANSFER", "ACTIVITY", "SKU", "VERSION", "FROM", "TO", "UNITS", "STATE", "CREATED", "BY", "REASON",
		}, rows)
	})
}

func newTransferShow(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show a transfer as both buckets have it now, and what comes next",
		Long: `Reads the journal, and from Redis both buckets with their markers: how many units went
out of the one and came into the other, what is to be done about it, and why. It changes
nothing.

Exit status: 0, or 3 if not all of the version could be read.`,
		Example: "  reconciler transfer show 20260301T100000Z-abcdefghij",
		Args:    args("ID"),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.withTransfers(cmd, func(ctx context.Context, s stores) error {
			row, err := s.postgres.Transfer(ctx, args[0])
			if err != nil {
				return err
			}
			return showTransfer(ctx, s, out, row)
		})
	}
	return cmd
}

// live reads the transfer as its buckets have it. One past its retention has
// nothing left in Redis.
func (s stores) live(ctx context.Context, row transfer.Transfer) (transfer.Books, transfer.Pair, error) {
	versions, err := s.postgres.Versions(ctx, transfer.FilterOf(row.Key))
	if err != nil {
		return transfer.Books{}, transfer.Pair{}, err
	}
	for _, b := range (transfer.Reader{Journal: s.postgres, Stocks: s.redis}).Books(ctx, versions) {
		for _, p := range b.Pairs() {
			if p.Transfer.ID == row.ID {
				return b, p, nil
			}
		}
	}
	return transfer.Books{}, transfer.Pair{}, errPast
}

var errPast = errors.New("the version's retention is over: its keys are gone, and with them every bucket's side of the transfer")

func showTransfer(ctx context.Context, s stores, out *result, row transfer.Transfer) error {
	books, pair, err := s.live(ctx, row)
	if errors.Is(err, errPast) {
		return printTransfer(out, view.LiveTransfer{Transfer: view.OfTransfer(row), Next: string(transfer.Rest), Why: err.Error()})
	}
	if err != nil {
		return err
	}
	v := view.OfLiveTransfer(books, pair)
	if err := printTransfer(out, v); err != nil {
		return err
	}
	if v.Error != "" {
		return &verdict{exitIncomplete, errors.New(v.Error)}
	}
	return nil
}

func printTransfer(out *result, v view.LiveTransfer) error {
	return out.print(struct {
		Schema   int               `json:"schema"`
		Transfer view.LiveTransfer `json:"transfer"`
	}{1, v}, func() error {
		rows := []table.Row{
			{"TRANSFER", v.TransferID},
			{"VERSION", fmt.Sprintf("a:%s:s:%s:v:%d", v.ActivityID, v.SKUID, v.ActivityVersion)},
			{"UNITS", fmt.Sprintf("%d from bucket %d to bucket %d", v.Amount, v.DonorBucket, v.ReceiverBucket)},
			{"JOURNAL", v.State + " since " + stamp(v.UpdatedAt)},
			{"CREATED", stamp(v.CreatedAt) + " by " + v.CreatedBy},
			{"REASON", orDash(v.Reason)},
			{"OUT", sideText(v.Donor)},
			{"IN", sideText(v.Receiver)},
			{"NEXT", v.Next + ": " + v.Why},
		}
		return out.table("", nil, rows)
	})
}

func sideText(s *view.TransferSide) string {
	if s == nil {
		return "not read"
	}
	when := ""
	if s.MovedAt != nil {
		when = " at " + stamp(*s.MovedAt)
	}
	text := fmt.Sprintf("%d%s; the bucket is %s with %d units, %d available", s.Moved, when, s.State, s.Initial, s.Available)
	if s.Initial != s.Expected {
		text += fmt.Sprintf("; %d units were expected", s.Expected)
	}
	return text
}

func newTransferCancel(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cancel ID",
		Short: "Stop a transfer that has not begun",
		Long: `Stops a transfer of which no unit has left the donor's bucket. One that has begun is
carried through: move the units back by another one.`,
		Example: `  reconciler transfer cancel 20260301T100000Z-abcdefghij --reason "wrong bucket"`,
		Args:    args("ID"),
	}
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if err := by.checkReason(cmd); err != nil {
			return err
		}
		return a.withTransfers(cmd, func(ctx context.Context, s stores) error {
			row, err := s.postgres.Transfer(ctx, args[0])
			if err != nil {
				return err
			}
			if err := s.cancel(ctx, row, *by); err != nil {
				return refusal(err)
			}
			if row, err = s.postgres.Transfer(ctx, row.ID); err != nil {
				return err
			}
			return showTransfer(ctx, s, out, row)
		})
	}
	return cmd
}

// cancel stops a transfer, if neither the journal nor the buckets have seen its
// OUT. Buckets that cannot be read may have.
func (s stores) cancel(ctx context.Context, row transfer.Transfer, by act) error {
	books, pair, err := s.live(ctx, row)
	switch {
	case errors.Is(err, errPast):
		return s.postgres.CancelTransfer(ctx, row.ID, by.actor, by.reason)
	case err != nil:
		return err
	}
	if err := books.Check(); err != nil {
		return err
	}
	if err := transfer.Cancellable(pair); err != nil {
		return err
	}
	return s.postgres.CancelTransfer(ctx, row.ID, by.actor, by.reason)
}

// driven makes a pass over the versions, and counts what it did.
func (s stores) driven(ctx context.Context, keys []transfer.Key, tally *pass.Tally) {
	for _, key := range keys {
		one, err := s.transfers.Worker.Drive(ctx, transfer.FilterOf(key))
		tally.Failed(err)
		for name, n := range one.Done {
			tally.Did(name, n)
		}
	}
}
