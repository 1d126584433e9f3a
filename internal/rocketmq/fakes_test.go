package rocketmq_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"net"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

// fakeServer speaks the remoting protocol and answers as a test says: for
// replies that no real server can be made to give. nil is no answer.
type fakeServer struct {
	ln     net.Listener
	answer func(request *remoting.Command) *remoting.Command

	mu      sync.Mutex
	conns   []net.Conn
	serving sync.WaitGroup
}

func startFake(t *testing.T, answer func(request *remoting.Command) *remoting.Command) *fakeServer {
	t.Helper()
	var lc net.ListenConfig
	ln, err := lc.Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &fakeServer{ln: ln, answer: answer}
	s.serving.Go(s.accept)
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

func (s *fakeServer) addr() string { return s.ln.Addr().String() }

func (s *fakeServer) accept() {
	for {
		conn, err := s.ln.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.conns = append(s.conns, conn)
		s.mu.Unlock()
		s.serving.Go(func() { s.serve(conn) })
	}
}

func (s *fakeServer) serve(conn net.Conn) {
	r := bufio.NewReader(conn)
	for {
		request, err := remoting.ReadFrame(r, remoting.DefaultMaxFrame)
		if err != nil {
			return
		}
		reply := s.answer(request)
		if reply == nil {
			continue
		}
		reply.Opaque, reply.Flag, reply.Language = request.Opaque, 1, "JAVA"
		frame, err := remoting.AppendFrame(nil, reply)
		if err != nil {
			return
		}
		if _, err := conn.Write(frame); err != nil {
			return
		}
	}
}

// fakeRoute is a name server that routes every topic to the brokers by name,
// with so many queues each.
func fakeRoute(t *testing.T, queues int, brokers map[string]string) *fakeServer {
	t.Helper()
	var route struct {
		Queues  []map[string]any `json:"queueDatas"`
		Brokers []map[string]any `json:"brokerDatas"`
	}
	for name, addr := range brokers {
		route.Queues = append(route.Queues, map[string]any{
			"brokerName": name, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6, "topicSysFlag": 0,
		})
		route.Brokers = append(route.Brokers, map[string]any{
			"cluster": "c", "brokerName": name, "brokerAddrs": map[string]string{"0": addr},
		})
	}
	body, err := json.Marshal(route)
	if err != nil {
		t.Fatal(err)
	}
	return startFake(t, func(request *remoting.Command) *remoting.Command {
		if request.Code != remoting.RequestRoute {
			return &remoting.Command{Code: remoting.SystemError}
		}
		return &remoting.Command{Body: body}
	})
}

// proxied puts a fault proxy in front of every broker of a stack, and a name
// server that names the proxies, by asking the real one.
type proxied struct {
	names   *fakeServer
	brokers map[string]*faultproxy.Proxy // by broker name
}

func proxyBrokers(t *testing.T, stack *devstack.Stack) *proxied {
	t.Helper()
	p := &proxied{brokers: make(map[string]*faultproxy.Proxy)}
	swaps := make(map[string][]byte)
	for _, svc := range stack.Brokers() {
		proxy, err := faultproxy.Start(svc.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(proxy.Close)
		p.brokers[svc.Name()] = proxy
		swaps[svc.Addr()] = []byte(proxy.Addr())
	}
	upstream := remoting.NewPeer(stack.NameServer().Addr(), remoting.Options{})
	t.Cleanup(upstream.Close)
	p.names = startFake(t, func(request *remoting.Command) *remoting.Command {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
		defer cancel()
		reply, err := upstream.Call(ctx, request.Code, request.ExtFields, request.Body)
		if err != nil {
			return nil
		}
		for from, to := range swaps {
			reply.Body = bytes.ReplaceAll(reply.Body, []byte(from), to)
		}
		return reply
	})
	return p
}

// config is cfg with the proxies between.
func (p *proxied) config(cfg rocketmq.Config) rocketmq.Config {
	cfg.NameServers = []string{p.names.addr()}
	return cfg
}

// deadAddr is an address where nobody listens.
func deadAddr(t *testing.T) string {
	t.Helper()
	var lc net.ListenConfig
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	return ln.Addr().String()
}

// tampered puts a server in front of every broker that asks the real one and
// lets alter change its replies, and returns cfg with these between: for states
// of a broker that take days to come about.
func tampered(t *testing.T, stack *devstack.Stack, cfg rocketmq.Config, alter func(request, reply *remoting.Command)) rocketmq.Config {
	t.Helper()
	return tamperedRequests(t, stack, cfg, func(*remoting.Command) {}, alter)
}

// tamperedRequests changes the requests too.
func tamperedRequests(t *testing.T, stack *devstack.Stack, cfg rocketmq.Config, ask func(request *remoting.Command), alter func(request, reply *remoting.Command)) rocketmq.Config {
	t.Helper()
	addrs := make(map[string]string)
	for _, svc := range stack.Brokers() {
		broker := remoting.NewPeer(svc.Addr(), remoting.Options{})
		t.Cleanup(broker.Close)
		front := startFake(t, func(request *remoting.Command) *remoting.Command {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
			defer cancel()
			ask(request)
			reply, err := broker.Call(ctx, request.Code, request.ExtFields, request.Body)
			if err != nil {
				return nil
			}
			alter(request, reply)
			return reply
		})
		addrs[svc.Name()] = front.addr()
	}
	cfg.NameServers = []string{fakeRoute(t, 1, addrs).addr()}
	return cfg
}

// setJSON changes a value of a JSON reply, found by what stands before it.
func setJSON(reply *remoting.Command, before, value string) {
	pattern := regexp.MustCompile(regexp.QuoteMeta(before) + `"?-?[^,"}]*"?`)
	reply.Body = pattern.ReplaceAll(reply.Body, []byte(before+value))
}
