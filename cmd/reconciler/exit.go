package main

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
)

// Exit statuses (interface §1).
const (
	exitDone       = 0
	exitFailed     = 1 // usage, configuration or internal error
	exitDrift      = 2 // drift confirmed
	exitIncomplete = 3 // incomplete evidence, or a dependency that cannot be reached
	exitLocked     = 4 // another run holds the lock
)

// verdict is the error by which a command chooses its exit status.
type verdict struct {
	status int
	err    error // nil: the result says it all
}

func (v *verdict) Error() string {
	if v.err == nil {
		return ""
	}
	return v.err.Error()
}

func (v *verdict) Unwrap() error { return v.err }

// exitStatus maps a command's error to the process's exit status.
func exitStatus(err error) int {
	if err == nil {
		return exitDone
	}
	if v, ok := errors.AsType[*verdict](err); ok {
		return v.status
	}
	if errors.Is(err, pgstore.ErrLeaseHeld) {
		return exitLocked
	}
	if isUnreachable(err) {
		return exitIncomplete
	}
	return exitFailed
}

// errorMessage is what people see; "" if there is nothing to say. Joined
// errors are lines of their own.
func errorMessage(err error) string {
	if err == nil {
		return ""
	}
	return strings.ReplaceAll(err.Error(), "\n", "\n  ")
}

// isUnreachable tells a dependency that could not be reached, or not in time,
// from one that answered with a refusal: wrong password, no such database and
// missing rights are mistakes of the configuration.
func isUnreachable(err error) bool {
	for _, known := range []error{pgstore.ErrUnavailable, pgstore.ErrInRecovery, redisstore.ErrUnreachable} {
		if errors.Is(err, known) {
			return true
		}
	}
	if pe, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch {
		case strings.HasPrefix(pe.Code, "08"), // connection exceptions
			strings.HasPrefix(pe.Code, "53"),  // too many connections, disk full, out of memory
			strings.HasPrefix(pe.Code, "57P"), // shutting down, starting up
			pe.Code == "57014",                // statement time-out
			pe.Code == "25006":                // a read-only server: in recovery
			return true
		}
		return false
	}
	if _, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		return true
	}
	if _, ok := errors.AsType[*net.OpError](err); ok {
		return true
	}
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.ErrUnexpectedEOF)
}
