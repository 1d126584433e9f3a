package devstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

const (
	// usersFile is locked, shared, by every command that runs with the stack.
	usersFile = "users.lock"
	// borrowedFile says that the stack is up only for such commands.
	borrowedFile = "borrowed"
)

// Borrow makes the caller a user of the detached stack in dir, which it may
// then bring [Up]. release ends that; the last user takes the stack down, if it
// was not up before the first one came.
func Borrow(ctx context.Context, dir string, log io.Writer) (release func(context.Context) error, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("create the stack's directory: %w", err)
	}
	users, err := os.OpenFile(filepath.Join(dir, usersFile), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the lock of the stack's users: %w", err)
	}
	err = flock(ctx, users, syscall.LOCK_SH) // waits while the last user takes it down
	if err == nil && !IsUp(dir) {
		err = writeFile(filepath.Join(dir, borrowedFile), nil)
	}
	if err != nil {
		_ = users.Close()
		return nil, err
	}
	return func(ctx context.Context) error {
		defer func() { _ = users.Close() }()
		if !exists(filepath.Join(dir, borrowedFile)) {
			return nil
		}
		err := syscall.Flock(int(users.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil // others use it still
		}
		if err != nil {
			return fmt.Errorf("lock %s: %w", users.Name(), err)
		}
		return Down(ctx, dir, log)
	}, nil
}

// Keep makes a stack that is up for borrowers stay when they have gone.
func Keep(dir string) error {
	if err := os.Remove(filepath.Join(dir, borrowedFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("keep the stack: %w", err)
	}
	return nil
}
