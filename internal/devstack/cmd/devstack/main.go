// Command devstack starts and ends the services that the Makefile's targets need.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/devstack"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if status := report(command().ExecuteContext(ctx), os.Stderr); status != 0 {
		os.Exit(status) //nolint:gocritic // the handler that stop removes ends with the process
	}
}

// report says what failed, unless the command that `with` ran has said so
// itself, and returns the exit status.
func report(err error, stderr io.Writer) int {
	if err == nil {
		return 0
	}
	if status, ok := errors.AsType[statusError](err); ok {
		return int(status)
	}
	fmt.Fprintln(stderr, "devstack:", err)
	return 1
}

// statusError is the exit status of the command that `with` ran.
type statusError int

func (s statusError) Error() string { return fmt.Sprintf("the command ended with status %d", int(s)) }

func command() *cobra.Command {
	root := &cobra.Command{
		Use: "devstack", Short: "Real Redis, PostgreSQL and RocketMQ for development and tests",
		SilenceUsage: true, SilenceErrors: true,
	}
	dir := root.PersistentFlags().String("dir", ".run", "the stack's directory")
	root.AddCommand(upCommand(dir), downCommand(dir), statusCommand(dir), withCommand(dir))
	return root
}

// stackFlags are the flags that say what a stack consists of.
type stackFlags struct {
	cluster  bool
	brokers  int
	forTests bool
	binary   string
}

func (f *stackFlags) register(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.cluster, "cluster", false, "add a six-node Redis Cluster, which the environment then names")
	cmd.Flags().IntVar(&f.brokers, "brokers", 1, "number of RocketMQ brokers")
	cmd.Flags().BoolVar(&f.forTests, "for-tests", false, "everything the tests share: Redis 8 and 7.0, standalone and cluster, PostgreSQL, two brokers")
	cmd.Flags().StringVar(&f.binary, "binary", "", "path that the environment file gives as RECONCILER")
}

func (f *stackFlags) options(dir string, log io.Writer) devstack.Options {
	opts := devstack.Options{Dir: dir, Log: log, Redis: true, Postgres: true, Cluster: f.cluster, Brokers: f.brokers}
	if f.forTests {
		opts.RedisFloor, opts.Cluster, opts.ClusterFloor = true, true, true
		opts.Brokers = max(opts.Brokers, 2)
	}
	return opts
}

func (f *stackFlags) up(ctx context.Context, dir string, log io.Writer) (*devstack.Stack, error) {
	stack, err := devstack.Up(ctx, f.options(dir, log))
	if err != nil {
		return nil, err
	}
	if err := stack.PrepareDatabase(ctx); err != nil {
		return nil, err
	}
	if err := stack.CreateTopic(ctx, devstack.Topic, devstack.TopicQueues); err != nil {
		return nil, err
	}
	if err := stack.CreateGroup(ctx, devstack.ConsumerGroup); err != nil {
		return nil, err
	}
	binary := f.binary
	if binary != "" {
		if binary, err = filepath.Abs(binary); err != nil {
			return nil, fmt.Errorf("find the binary: %w", err)
		}
	}
	return stack, stack.WriteEnvironment(binary)
}

func upCommand(dir *string) *cobra.Command {
	var flags stackFlags
	cmd := &cobra.Command{
		Use: "up", Short: "Start the stack, or what is missing of it", Args: cobra.NoArgs,
		Example: "  devstack up --dir .run --cluster --brokers 2",
		RunE: func(cmd *cobra.Command, _ []string) error {
			stack, err := flags.up(cmd.Context(), *dir, cmd.ErrOrStderr())
			if err != nil {
				return fmt.Errorf("start the stack in %s: %w", *dir, err)
			}
			if err := devstack.Keep(*dir); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.ErrOrStderr(), "ready: . %s\n", filepath.Join(stack.Dir(), devstack.EnvFile))
			return err
		},
	}
	flags.register(cmd)
	return cmd
}

func downCommand(dir *string) *cobra.Command {
	return &cobra.Command{
		Use: "down", Short: "End the stack and remove its data", Args: cobra.NoArgs,
		Example: "  devstack down --dir .run",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := devstack.Down(cmd.Context(), *dir, cmd.ErrOrStderr()); err != nil {
				return fmt.Errorf("end the stack in %s: %w", *dir, err)
			}
			return nil
		},
	}
}

func statusCommand(dir *string) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "List the services and whether they run", Args: cobra.NoArgs,
		Example: "  devstack status --dir .run",
		RunE: func(cmd *cobra.Command, _ []string) error {
			stack, err := devstack.Open(*dir)
			if err != nil {
				return err
			}
			table := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(table, "SERVICE\tVERSION\tADDRESS\tPID\tSTATE")
			for _, svc := range stack.Services() {
				state := "dead"
				if svc.Alive() {
					state = "running"
				}
				fmt.Fprintf(table, "%s\t%s\t%s\t%d\t%s\n", svc.Name(), svc.Version(), svc.Addr(), svc.PID(), state)
			}
			return table.Flush()
		},
	}
}

// withCommand runs a program while the stack is up. Several can share it; a
// stack that was brought up by `up` stays up.
func withCommand(dir *string) *cobra.Command {
	var flags stackFlags
	cmd := &cobra.Command{
		Use: "with -- COMMAND [ARGUMENT…]", Short: "Run a command while the stack is up; exit with its status",
		Example: "  devstack with --dir .run/test --for-tests -- go test ./...",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			release, err := devstack.Borrow(cmd.Context(), *dir, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			defer func() {
				// Also after Ctrl-C. The command's own status is what the caller needs.
				if err := release(context.WithoutCancel(cmd.Context())); err != nil {
					fmt.Fprintln(cmd.ErrOrStderr(), "devstack: end the stack:", err)
				}
			}()
			if _, err := flags.up(cmd.Context(), *dir, cmd.ErrOrStderr()); err != nil {
				return fmt.Errorf("start the stack in %s: %w", *dir, err)
			}
			run := exec.CommandContext(cmd.Context(), args[0], args[1:]...)
			run.Stdin, run.Stdout, run.Stderr = os.Stdin, os.Stdout, os.Stderr
			run.Cancel = func() error { return run.Process.Signal(syscall.SIGTERM) }
			err = run.Run()
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				return statusError(max(exit.ExitCode(), 1))
			}
			return err
		},
	}
	flags.register(cmd)
	return cmd
}
