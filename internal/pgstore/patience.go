package pgstore

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// replyLimit is how long a reply may take where the server ends a statement
// after statementTimeout: the replies of a batch come together.
func replyLimit(statementTimeout time.Duration) time.Duration {
	return 2*statementTimeout + 2*time.Second
}

// impatient makes connections that give up a read after a limit, whatever the
// context allows: a server that hangs, and a connection that leads nowhere,
// keep nobody waiting for ever.
func impatient(dial pgconn.DialFunc, limit time.Duration) pgconn.DialFunc {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &impatientConn{Conn: conn, limit: limit}, nil
	}
}

// impatientConn bounds each read, unless somebody has set a deadline: that is
// how a context's end reaches a connection.
type impatientConn struct {
	net.Conn

	limit time.Duration

	mu       sync.Mutex
	deadline time.Time // as it was set from outside; zero: none
}

// Read is part of [net.Conn].
func (c *impatientConn) Read(p []byte) (int, error) {
	if err := c.bound(); err != nil {
		return 0, err
	}
	return c.Conn.Read(p)
}

func (c *impatientConn) bound() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.deadline.IsZero() {
		return nil
	}
	return c.Conn.SetReadDeadline(time.Now().Add(c.limit))
}

// SetDeadline is part of [net.Conn].
func (c *impatientConn) SetDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline is part of [net.Conn].
func (c *impatientConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	return c.Conn.SetReadDeadline(t)
}
