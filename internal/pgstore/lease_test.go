package pgstore_test

import (
	"context"
	"errors"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/pgstore"
)

// acquire gets the lease of the test's database, released with the test.
func acquire(t *testing.T, o pgstore.LeaseOptions) *pgstore.Lease {
	t.Helper()
	lease, err := pgstore.AcquireLease(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lease.Release(context.WithoutCancel(t.Context())) }) // twice is fine
	return lease
}

func lost(lease *pgstore.Lease) bool {
	select {
	case <-lease.Lost():
		return true
	default:
		return false
	}
}

func TestLeaseIsHeldByOne(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx := t.Context()
	// A minute's TTL: nothing here may depend on its end.
	options := pgstore.LeaseOptions{URL: db.as(t, "seckill_daemon"), Holder: "first", TTL: time.Minute}
	if holder, err := db.store.LeaseHolder(ctx, pgstore.LeaseDaemon); err != nil || holder.Held || holder.Holder != "" {
		t.Errorf("before: %+v, %v", holder, err)
	}
	first := acquire(t, options)
	options.Holder = "second"
	_, err := pgstore.AcquireLease(ctx, options)
	held, ok := errors.AsType[*pgstore.LeaseHeldError](err)
	if !ok || !errors.Is(err, pgstore.ErrLeaseHeld) || held.Holder.Holder != "first" {
		t.Fatalf("second: %v; want ErrLeaseHeld, by the first", err)
	}
	holder, err := db.store.LeaseHolder(ctx, pgstore.LeaseDaemon)
	if err != nil || !holder.Held || holder.BackendPID == 0 || holder.Holder != "first" || holder.AcquiredAt.IsZero() || !holder.ReleasedAt.IsZero() {
		t.Errorf("holder: %+v, %v", holder, err)
	}
	other := options
	other.Name = "reconcile:deep:10001"
	acquire(t, other) // another lease is another lock

	options.Wait = true
	waiting, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := pgstore.AcquireLease(waiting, options); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a wait that is given up: %v", err)
	}

	second := make(chan *pgstore.Lease)
	go func() {
		lease, err := pgstore.AcquireLease(ctx, options)
		if err != nil {
			t.Errorf("the waiting one: %v", err)
		}
		second <- lease
	}()
	for range 2 {
		if err := first.Release(ctx); err != nil {
			t.Errorf("release: %v", err)
		}
	}
	if lost(first) {
		t.Error("a released lease counts as lost")
	}
	lease := <-second
	if lease == nil || !lease.Valid() {
		t.Fatal("the waiting one did not get it")
	}
	if holder, err = db.store.LeaseHolder(ctx, pgstore.LeaseDaemon); err != nil || !holder.Held || holder.Holder != "second" {
		t.Errorf("holder: %+v, %v", holder, err)
	}
	if err := lease.Release(ctx); err != nil {
		t.Error(err)
	}
	if holder, err = db.store.LeaseHolder(ctx, pgstore.LeaseDaemon); err != nil || holder.Held || holder.ReleasedAt.IsZero() {
		t.Errorf("afterwards: %+v, %v", holder, err)
	}
}

// The holder learns that it lost the lease before a successor works: by the
// end of its connection at once, and by silence within two thirds of the TTL,
// while the successor waits for all of it.
func TestLeaseIsLostBeforeAnotherHasIt(t *testing.T) {
	t.Parallel()
	const ttl = 1500 * time.Millisecond
	tests := map[string]func(t *testing.T, proxy *faultproxy.Proxy, super *pgx.Conn, pid int){
		"backend killed": func(t *testing.T, _ *faultproxy.Proxy, super *pgx.Conn, pid int) {
			t.Helper()
			exec(t, super, `SELECT pg_terminate_backend($1)`, pid)
		},
		"network stalled, then the server gives up": func(t *testing.T, proxy *faultproxy.Proxy, super *pgx.Conn, pid int) {
			t.Helper()
			proxy.Set(faultproxy.Faults{Stall: true})
			exec(t, super, `SELECT pg_terminate_backend($1)`, pid)
		},
		"connection reset": func(_ *testing.T, proxy *faultproxy.Proxy, _ *pgx.Conn, _ int) {
			proxy.Set(faultproxy.Faults{Refuse: true})
			proxy.Reset()
		},
	}
	for name, breaks := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			super := connect(t, db.url)
			direct := db.as(t, "seckill_daemon")
			proxy, proxied := startProxy(t, direct)
			first := acquire(t, pgstore.LeaseOptions{URL: proxied, Holder: "first", TTL: ttl})
			holder, err := db.store.LeaseHolder(t.Context(), pgstore.LeaseDaemon)
			if err != nil {
				t.Fatal(err)
			}
			second := make(chan error, 1)
			var lostBefore, validBefore bool
			go func() {
				lease, err := pgstore.AcquireLease(t.Context(), pgstore.LeaseOptions{URL: direct, Holder: "second", Wait: true, TTL: ttl})
				lostBefore, validBefore = lost(first), first.Valid()
				if err == nil {
					err = lease.Release(t.Context())
				}
				second <- err
			}()
			waitForWaiter(t, super)
			breaks(t, proxy, super, holder.BackendPID)
			<-first.Lost()
			if err := <-second; err != nil {
				t.Errorf("second: %v", err)
			}
			if !lostBefore || validBefore {
				t.Errorf("when the second had it, the first knew of its loss: %v, and called it valid: %v", lostBefore, validBefore)
			}
		})
	}
}

// waitForWaiter waits until somebody waits for an advisory lock of the database.
func waitForWaiter(t *testing.T, super *pgx.Conn) {
	t.Helper()
	for waiting := false; !waiting; {
		if err := super.QueryRow(t.Context(), `SELECT count(*) > 0 FROM pg_locks, pg_sleep(0.005)
			WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
}

// While the server still believes in a stalled holder, the holder itself does
// not, and nobody else gets the lease.
func TestStalledLease(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	proxy, proxied := startProxy(t, db.as(t, "seckill_daemon"))
	first := acquire(t, pgstore.LeaseOptions{URL: proxied, TTL: 600 * time.Millisecond})
	proxy.Set(faultproxy.Faults{Stall: true})
	<-first.Lost()
	if first.Valid() {
		t.Error("lost and valid")
	}
	if _, err := pgstore.AcquireLease(t.Context(), pgstore.LeaseOptions{URL: db.as(t, "seckill_daemon")}); !errors.Is(err, pgstore.ErrLeaseHeld) {
		t.Errorf("the server has the lock still: %v", err)
	}
	proxy.Set(faultproxy.Faults{})
}

// A session that lost only its lock, or whose lease another one took over, is
// no holder.
func TestLeaseWithoutItsLock(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	lease := acquire(t, pgstore.LeaseOptions{URL: db.as(t, "seckill_daemon"), TTL: 500 * time.Millisecond})
	exec(t, connect(t, db.url), `UPDATE seckill.lease SET backend_pid = 0`)
	<-lease.Lost()
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("release after the loss: %v", err)
	}
}

// A predecessor that ended without giving the lease back: even without Wait
// its last heartbeat is outwaited, since it might still be at work.
func TestLeaseAfterACrash(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	exec(t, connect(t, db.url), `INSERT INTO seckill.lease (name, holder, backend_pid, acquired_at, heartbeat_at, ttl)
		VALUES ('daemon', 'crashed', 1, now(), clock_timestamp(), interval '700 ms')`)
	begun := time.Now()
	lease := acquire(t, pgstore.LeaseOptions{URL: db.as(t, "seckill_daemon")})
	if waited := time.Since(begun); waited < 600*time.Millisecond {
		t.Errorf("waited %v only", waited)
	}
	if !lease.Valid() {
		t.Error("not valid")
	}
}

func TestLeaseThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	pooled := startTransactionPooler(t, db.as(t, "seckill_daemon"))
	_, err := pgstore.AcquireLease(t.Context(), pgstore.LeaseOptions{URL: pooled})
	if !errors.Is(err, pgstore.ErrTransactionPooler) {
		t.Errorf("%v, want ErrTransactionPooler", err)
	}
	acquire(t, pgstore.LeaseOptions{URL: db.as(t, "seckill_daemon")}) // nothing is left behind
}

func startProxy(t *testing.T, raw string) (*faultproxy.Proxy, string) {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := faultproxy.Start(u.Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	u.Host = proxy.Addr()
	return proxy, u.String()
}

// transactionPooler gives each transaction of its clients a server session
// that is free, the one used last first, as poolers in transaction mode do.
type transactionPooler struct {
	mu       sync.Mutex
	sessions []*pgconn.HijackedConn
}

func startTransactionPooler(t *testing.T, raw string) string {
	t.Helper()
	p := &transactionPooler{}
	for range 3 {
		conn, err := pgconn.Connect(t.Context(), raw)
		if err != nil {
			t.Fatal(err)
		}
		session, err := conn.Hijack()
		if err != nil {
			t.Fatal(err)
		}
		p.sessions = append(p.sessions, session)
		t.Cleanup(func() { _ = session.Conn.Close() })
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var clients sync.WaitGroup
	clients.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			clients.Go(func() {
				defer client.Close()
				p.serve(client)
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		clients.Wait()
	})
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = listener.Addr().String()
	return u.String()
}

func (p *transactionPooler) serve(client net.Conn) {
	backend := pgproto3.NewBackend(client, client)
	if _, err := backend.ReceiveStartupMessage(); err != nil {
		return
	}
	backend.Send(&pgproto3.AuthenticationOk{})
	backend.Send(&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"})
	backend.Send(&pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"})
	backend.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}})
	backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	if backend.Flush() != nil {
		return
	}
	for {
		message, err := backend.Receive()
		if err != nil {
			return
		}
		if _, over := message.(*pgproto3.Terminate); over {
			return
		}
		if !p.transaction(backend, message) {
			return
		}
	}
}

// transaction forwards messages, the first among them, until the session is idle.
func (p *transactionPooler) transaction(backend *pgproto3.Backend, message pgproto3.FrontendMessage) bool {
	p.mu.Lock()
	session := p.sessions[len(p.sessions)-1]
	p.sessions = p.sessions[:len(p.sessions)-1]
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.sessions = append(p.sessions, session)
	}()
	for {
		session.Frontend.Send(message)
		_, query := message.(*pgproto3.Query)
		_, sync := message.(*pgproto3.Sync)
		if query || sync {
			if session.Frontend.Flush() != nil {
				return false
			}
			for ready := false; !ready; {
				reply, err := session.Frontend.Receive()
				if err != nil {
					return false
				}
				backend.Send(reply)
				if status, ok := reply.(*pgproto3.ReadyForQuery); ok {
					if backend.Flush() != nil {
						return false
					}
					if status.TxStatus == 'I' {
						return true
					}
					ready = true
				}
			}
		}
		var err error
		if message, err = backend.Receive(); err != nil {
			return false
		}
	}
}
