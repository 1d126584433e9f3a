// Command reconciler finishes what a flash sale left half done: it drives stuck
// Redis reservations to an order or to a release, exactly once, and compares
// Redis with PostgreSQL.
//
// Standard output carries a command's result and nothing else; logs, progress
// and errors go to standard error. The exit status is 0 for done or
// consistent, 1 for an error, 2 for confirmed drift, 3 for incomplete evidence
// or a dependency that cannot be reached, 4 if another run holds the lock
// (interface §1, §7).
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(execute(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// execute runs the command line and returns the exit status.
func execute(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot(&app{stdin: stdin, stdout: stdout, stderr: stderr})
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if message := errorMessage(err); message != "" {
		fmt.Fprintf(stderr, "reconciler: %s\n", message)
	}
	return exitStatus(err)
}
