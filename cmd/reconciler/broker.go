package main

import (
	"context"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/pgstore"
)

func newBroker(a *app) *cobra.Command {
	cmd := group("broker", "See and forget the brokers that messages may be on",
		`Every broker ever seen with the order topic must be read before a message counts
as absent. One that is gone for good keeps its messages waiting until it is
forgotten.`,
		newBrokerList(a), newBrokerForget(a))
	cmd.Example = "  reconciler broker list"
	return cmd
}

// queueView is a topic's queues on one broker in JSON.
type queueView struct {
	Broker string `json:"broker"`
	Topic  string `json:"topic"`
	Queues int    `json:"queues"`
}

func newBrokerList(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the brokers that are expected, with their topics and queues",
		Example: "  reconciler broker list",
		Args:    args(),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			queues, err := store.ExpectedQueues(ctx)
			if err != nil {
				return err
			}
			return printQueues(out, "no brokers were seen yet", queues)
		})
	}
	return cmd
}

func printQueues(out *result, none string, queues []pgstore.ExpectedQueue) error {
	views := make([]queueView, 0, len(queues))
	rows := make([]table.Row, 0, len(queues))
	for _, q := range queues {
		views = append(views, queueView(q))
		rows = append(rows, table.Row{q.Broker, q.Topic, q.Queues})
	}
	return out.print(struct {
		Schema int         `json:"schema"`
		Queues []queueView `json:"queues"`
	}{1, views}, func() error {
		return out.table(none, table.Row{"BROKER", "TOPIC", "QUEUES"}, rows)
	})
}

func newBrokerForget(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "forget NAME",
		Short: "Give up a broker that will not come back",
		Long: `Takes a broker off the list of those that must be read. Messages that only it
holds count as lost from then on. A broker that is seen again is expected again.
Shows the brokers that are left.`,
		Example: `  reconciler broker forget broker-b --reason "disk destroyed"`,
		Args:    args("NAME"),
	}
	by := actFlags(cmd)
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return a.withStore(cmd, func(ctx context.Context, store *pgstore.Store) error {
			if err := store.ForgetBroker(ctx, args[0], by.actor, by.reason); err != nil {
				return err
			}
			left, err := store.ExpectedQueues(ctx)
			if err != nil {
				return err
			}
			return printQueues(out, "no brokers are left", left)
		})
	}
	return cmd
}
