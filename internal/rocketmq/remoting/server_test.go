package remoting_test

import (
	"bufio"
	"context"
	"net"
	"sync"
	"testing"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

// server is a TCP server that does to each connection what a test wants: a
// real broker cannot be made to misbehave like this.
type server struct {
	ln      net.Listener
	serving sync.WaitGroup
	mu      sync.Mutex
	conns   []net.Conn
}

func startServer(t *testing.T, serve func(conn net.Conn, n int)) *server {
	t.Helper()
	var lc net.ListenConfig
	ln, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &server{ln: ln}
	s.serving.Go(func() {
		for n := 0; ; n++ {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, conn)
			s.mu.Unlock()
			s.serving.Go(func() { serve(conn, n) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		s.mu.Lock()
		for _, conn := range s.conns {
			_ = conn.Close()
		}
		s.mu.Unlock()
		s.serving.Wait()
	})
	return s
}

func (s *server) addr() string { return s.ln.Addr().String() }

// accepted is how many connections there were.
func (s *server) accepted() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// answering serves requests: answer returns the replies to write, or nil.
func answering(answer func(request *remoting.Command) []*remoting.Command) func(net.Conn, int) {
	return func(conn net.Conn, _ int) {
		r := bufio.NewReader(conn)
		for {
			request, err := remoting.ReadFrame(r, remoting.DefaultMaxFrame)
			if err != nil {
				return
			}
			for _, reply := range answer(request) {
				frame, err := remoting.AppendFrame(nil, reply)
				if err != nil {
					panic(err)
				}
				if _, err := conn.Write(frame); err != nil {
					return
				}
			}
		}
	}
}

// replyTo is a reply with code 0 and nothing in it.
func replyTo(request *remoting.Command) *remoting.Command {
	return &remoting.Command{Opaque: request.Opaque, Flag: 1}
}

// writing writes the same bytes whatever is asked.
func writing(raw []byte) func(net.Conn, int) {
	return func(conn net.Conn, _ int) {
		if _, err := remoting.ReadFrame(conn, remoting.DefaultMaxFrame); err != nil {
			return
		}
		_, _ = conn.Write(raw)
		_, _ = conn.Read(make([]byte, 1)) // until the client goes
	}
}

func newPeer(t *testing.T, addr string, opts remoting.Options) *remoting.Peer {
	t.Helper()
	p := remoting.NewPeer(addr, opts)
	t.Cleanup(p.Close)
	return p
}
