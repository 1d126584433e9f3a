// Package faultproxy is a TCP proxy that misbehaves on demand: for tests of what
// a client does when the wire fails. Every fault can be changed while
// connections are open.
//
// "Up" is from the client to the server, "down" is back.
package faultproxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Faults are what the proxy does to the traffic. The zero value forwards
// everything unchanged.
type Faults struct {
	// Refuse resets each new connection at once. Open ones go on.
	Refuse bool
	// Stall forwards nothing in either direction; connections stay open and new
	// ones are accepted. What was held back is forwarded when the fault ends.
	Stall bool
	// DropReplies forwards requests and throws every answer away: the outcome of
	// what was asked is unknown to the client.
	DropReplies bool
	// Delay holds back each chunk on its way down.
	Delay time.Duration
	// BytesPerSecond limits the way down; 0 is no limit.
	BytesPerSecond int
	// CutAfter resets a connection once so many bytes went down on it since this
	// fault was set, not more; 0 is never.
	CutAfter int
}

// Proxy forwards connections to one target.
type Proxy struct {
	target string
	ln     net.Listener
	wg     sync.WaitGroup

	mu      sync.Mutex
	faults  Faults
	epoch   int           // counts changes of faults
	changed chan struct{} // closed when the faults change or the proxy ends
	closed  bool
	conns   map[*pair]struct{}
}

// pair is one proxied connection.
type pair struct{ client, server net.Conn }

// Start listens on a free loopback port and forwards to target, host:port.
func Start(target string) (*Proxy, error) {
	var lc net.ListenConfig
	ln, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0") // binding does not wait
	if err != nil {
		return nil, fmt.Errorf("start a fault proxy: %w", err)
	}
	p := &Proxy{target: target, ln: ln, changed: make(chan struct{}), conns: map[*pair]struct{}{}}
	p.wg.Go(p.accept)
	return p, nil
}

// Addr is where clients connect.
func (p *Proxy) Addr() string { return p.ln.Addr().String() }

// Set replaces the faults.
func (p *Proxy) Set(f Faults) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.faults = f
	p.epoch++
	close(p.changed)
	p.changed = make(chan struct{})
}

// Reset sends a TCP reset on every open connection, to both ends.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.reset()
	}
}

// Conns is the number of open connections.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

// Close resets all connections, stops listening and waits until all is quiet.
func (p *Proxy) Close() {
	_ = p.ln.Close()
	p.mu.Lock()
	if !p.closed {
		p.closed = true
		close(p.changed)
	}
	for c := range p.conns {
		c.reset()
	}
	p.mu.Unlock()
	p.wg.Wait()
}

func (c *pair) reset() {
	for _, conn := range []net.Conn{c.client, c.server} {
		if tcp, ok := conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // makes Close send RST instead of FIN
		}
		_ = conn.Close()
	}
}

// current are the faults now in force.
func (p *Proxy) current() (f Faults, epoch int, changed <-chan struct{}, closed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.faults, p.epoch, p.changed, p.closed
}

func (p *Proxy) accept() {
	for {
		client, err := p.ln.Accept()
		if err != nil {
			return // closed
		}
		if f, _, _, _ := p.current(); f.Refuse {
			(&pair{client: client, server: client}).reset()
			continue
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) serve(client net.Conn) {
	var d net.Dialer
	server, err := d.DialContext(context.Background(), "tcp", p.target) // loopback answers at once
	if err != nil {
		(&pair{client: client, server: client}).reset()
		return
	}
	c := &pair{client: client, server: server}
	p.mu.Lock()
	p.conns[c] = struct{}{}
	closed := p.closed
	p.mu.Unlock()
	if closed { // Close has been through the table already
		c.reset()
	}
	var both sync.WaitGroup
	both.Go(func() { p.up(c) })
	both.Go(func() { p.down(c) })
	both.Wait()
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
	_ = client.Close()
	_ = server.Close()
}

const chunk = 16 << 10

// up forwards requests until either end closes. The client's end of stream is
// passed on, so that the server's last answer still gets through.
func (p *Proxy) up(c *pair) {
	buf := make([]byte, chunk)
	for {
		n, err := c.client.Read(buf)
		if _, alive := p.waitStall(); !alive {
			return
		}
		if _, werr := c.server.Write(buf[:n]); werr != nil {
			_ = c.client.Close()
			return
		}
		if err != nil {
			halfClose(c.server, err)
			return
		}
	}
}

// down forwards answers, and is where most faults happen.
func (p *Proxy) down(c *pair) {
	buf := make([]byte, chunk)
	sent, epoch := 0, -1
	for {
		n, err := c.server.Read(buf)
		f, alive := p.waitStall()
		if !alive {
			return
		}
		if _, now, _, _ := p.current(); now != epoch {
			sent, epoch = 0, now
		}
		out := buf[:n]
		if f.DropReplies {
			out = nil
		}
		if !p.pause(f, len(out)) {
			return
		}
		cut := f.CutAfter > 0 && sent+len(out) >= f.CutAfter
		if cut {
			out = out[:f.CutAfter-sent]
		}
		sent += len(out)
		if _, werr := c.client.Write(out); werr != nil {
			_ = c.server.Close()
			return
		}
		if cut {
			c.reset()
			return
		}
		if err != nil {
			halfClose(c.client, err)
			return
		}
	}
}

// waitStall returns the faults in force once they allow traffic; false if the
// proxy ended meanwhile.
func (p *Proxy) waitStall() (Faults, bool) {
	for {
		f, _, changed, closed := p.current()
		if closed {
			return f, false
		}
		if !f.Stall {
			return f, true
		}
		<-changed
	}
}

// pause waits as long as n bytes take; false if the proxy ended meanwhile.
func (p *Proxy) pause(f Faults, n int) bool {
	wait := f.Delay
	if f.BytesPerSecond > 0 {
		wait += time.Duration(n) * time.Second / time.Duration(f.BytesPerSecond)
	}
	if wait <= 0 || n == 0 {
		return true
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for {
		_, _, changed, closed := p.current()
		if closed {
			return false
		}
		select {
		case <-timer.C:
			return true
		case <-changed:
		}
	}
}

// halfClose passes on the end of a stream; any other error ends both ways.
func halfClose(conn net.Conn, err error) {
	if tcp, ok := conn.(*net.TCPConn); ok && errors.Is(err, io.EOF) {
		_ = tcp.CloseWrite()
		return
	}
	_ = conn.Close()
}
