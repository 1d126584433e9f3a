// Package stacktest gives tests their real services.
//
// Most tests use [Shared], the one stack that `make test` starts, and keep to
// their own activity ([Scope]), topic and group ([Topic]) and database
// ([Database]), so that they can run side by side. A test that breaks a service
// starts a stack with [Own].
package stacktest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/reservation"
)

// DirVariable names the environment variable that says where the shared stack
// is; .run/test of the module if it is not set.
const DirVariable = "DEVSTACK_TEST_DIR"

// turnLimit bounds the wait for other tests' own stacks, below go test's default
// time limit of ten minutes.
const turnLimit = 8 * time.Minute

// setupLimit bounds what a helper here does before its test begins.
const setupLimit = 2 * time.Minute

var sharedStack = sync.OnceValues(func() (*devstack.Stack, error) {
	dir, err := sharedDir()
	if err != nil {
		return nil, err
	}
	stack, err := devstack.Open(dir)
	if err != nil {
		return nil, err
	}
	var dead []string
	for _, svc := range stack.Services() {
		if !svc.Alive() {
			dead = append(dead, svc.Name())
		}
	}
	if len(dead) > 0 {
		return nil, errors.New("not running: " + strings.Join(dead, ", "))
	}
	return stack, nil
})

func sharedDir() (string, error) {
	if dir := os.Getenv(DirVariable); dir != "" {
		return dir, nil
	}
	root, err := devstack.ModuleRoot()
	if err != nil {
		return "", err
	}
	return filepath.Join(root, ".run", "test"), nil
}

// Shared is the stack of the whole test run: Redis 8 and 7.0, each standalone
// and as a cluster, PostgreSQL, and RocketMQ with two brokers. Its services
// cannot be broken. Without one the test fails.
func Shared(tb testing.TB) *devstack.Stack {
	tb.Helper()
	stack, err := sharedStack()
	if err != nil {
		tb.Fatalf("no test stack (%v): run `make test`, or start one with `make test-up`", err)
	}
	return stack
}

// Own starts a stack for this test alone, which may break it, and ends it with
// the test. A few test processes at a time have such stacks: more would make
// each other slow enough to fail, so they wait.
func Own(tb testing.TB, opts devstack.Options) *devstack.Stack {
	tb.Helper()
	turn.take(tb)
	ctx, cancel := context.WithTimeout(tb.Context(), setupLimit)
	defer cancel()
	stack, err := devstack.Start(ctx, opts)
	if err != nil {
		tb.Fatalf("start a stack of the test's own: %v", err)
	}
	tb.Cleanup(func() {
		for _, svc := range stack.Services() {
			if tb.Failed() {
				tb.Logf("end of the log of %s:\n%s", svc.Name(), svc.LogTail())
			}
		}
		if err := stack.Stop(); err != nil {
			tb.Errorf("stop the test's stack: %v", err)
		}
	})
	return stack
}

// ownTurn is the right of a test process to have own stacks, shared by its
// tests. There are a few of them on a machine.
type ownTurn struct {
	mu    sync.Mutex
	users int
	lock  *os.File
}

// turns is how many test processes may have own stacks at a time: enough for
// `go test -p 2`, and for a second run beside it.
const turns = 4

var turn ownTurn

func (o *ownTurn) take(tb testing.TB) {
	tb.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.users == 0 {
		lock, err := waitForTurn(tb.Context())
		if err != nil {
			tb.Fatalf("wait for the stacks of other tests to end: %v", err)
		}
		o.lock = lock
	}
	o.users++
	tb.Cleanup(func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.users--; o.users == 0 {
			_ = o.lock.Close()
		}
	})
}

func waitForTurn(ctx context.Context) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, turnLimit)
	defer cancel()
	for {
		for i := range turns {
			f, err := os.OpenFile(filepath.Join(os.TempDir(), fmt.Sprintf("seckill-stacktest-%d-%d.lock", os.Getuid(), i)), os.O_CREATE|os.O_RDWR, 0o644)
			if err != nil {
				return nil, err
			}
			err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
			if err == nil {
				return f, nil
			}
			_ = f.Close()
			if !errors.Is(err, syscall.EWOULDBLOCK) {
				return nil, err
			}
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// unique is a name that no other test of any run has.
func unique() string { return strings.ToLower(rand.Text()[:12]) }

// Scope is a scope of an activity that only this test has: SKU "sku", version
// 1, bucket 0.
func Scope(tb testing.TB) reservation.Scope {
	tb.Helper()
	return reservation.Scope{ActivityID: "t" + unique(), SKUID: "sku", Version: 1}
}

// Topic creates a topic with so many queues on each broker, and a consumer
// group with its retry topic, that only this test has.
func Topic(tb testing.TB, stack *devstack.Stack, queues int) (topic, group string) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), setupLimit)
	defer cancel()
	topic, group = "t-"+unique(), "g-"+unique()
	if err := stack.CreateTopic(ctx, topic, queues); err != nil {
		tb.Fatal(err)
	}
	if err := stack.CreateGroup(ctx, group); err != nil {
		tb.Fatal(err)
	}
	return topic, group
}

// RedisTarget is one of the servers on which everything that runs in Redis has
// to work.
type RedisTarget struct {
	Name    string // "8-standalone", "7.0-standalone", "8-cluster", "7.0-cluster"
	Version string
	Cluster bool
	Addrs   []string
}

// RedisTargets are the four Redis servers of the shared stack.
func RedisTargets(tb testing.TB) []RedisTarget {
	tb.Helper()
	stack := Shared(tb)
	standalone := func(name string, svc *devstack.Service) RedisTarget {
		return RedisTarget{Name: name, Version: svc.Version(), Addrs: []string{svc.Addr()}}
	}
	cluster := func(name string, nodes devstack.RedisCluster) RedisTarget {
		return RedisTarget{Name: name, Version: nodes[0].Version(), Cluster: true, Addrs: nodes.Addrs()}
	}
	return []RedisTarget{
		standalone("8-standalone", stack.Redis()),
		standalone("7.0-standalone", stack.RedisFloor()),
		cluster("8-cluster", stack.Cluster()),
		cluster("7.0-cluster", stack.ClusterFloor()),
	}
}

// Client is a client of the target for the test's own reads and writes. It does
// not repeat a command whose outcome is unknown.
func (r RedisTarget) Client(tb testing.TB) redis.UniversalClient {
	tb.Helper()
	client := redis.NewUniversalClient(&redis.UniversalOptions{
		Addrs: r.Addrs, IsClusterMode: r.Cluster, MaxRetries: -1, ContextTimeoutEnabled: true, DisableIdentity: true,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	tb.Cleanup(func() { _ = client.Close() })
	return client
}
