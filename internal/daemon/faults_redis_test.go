//go:build slow

package daemon_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/internal/upstream"
)

// Redis is restarted and has lost everything. Missing is not zero: the verdict
// is incomplete, nobody is flooded with tasks, and nothing is fenced for
// reservations of which nothing is known.
func TestSlowRedisRestartedEmpty(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	s := newSale(t, stack, hurried)
	for _, k := range everyKind {
		s.stuckOne(k, time.Minute)
	}
	running := s.serve()
	running.awaitLog(1, logHolding)
	if err := stack.Redis().Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	fenced := s.fences() // some were due before
	d := s.open()
	for range 3 {
		if v := s.passes(d, 1); !v.Incomplete {
			t.Errorf("verdict over an empty Redis: complete, %+v", v.Jobs)
		}
	}
	tasks := s.tasks()
	t.Logf("tasks: %v", tasks)
	if tasks["orphan_member"]+tasks["malformed_reservation"] != 0 {
		t.Errorf("tasks %v: a flood", tasks)
	}
	if len(s.taskCauses("config_missing")) != 1 {
		t.Errorf("tasks %v, want one config_missing", tasks)
	}
	if n := s.fences(); n != fenced {
		t.Errorf("%d reservations were fenced", n-fenced)
	}
	if keys := s.redis.Keys(t.Context(), "seckill:{*").Val(); len(keys) != 0 {
		t.Errorf("keys were made in an empty Redis: %v", keys)
	}
	running.end()

	program := binary(t)
	if status := s.start(program, "run", "--once", "--mode", "act").wait(time.Minute); status != 3 {
		t.Errorf("run --once over an empty Redis: exit status %d, want 3", status)
	}
	if err := stack.Redis().Kill(); err != nil {
		t.Fatal(err)
	}
	if status := s.start(program, "run", "--once", "--mode", "act").wait(time.Minute); status != 3 {
		t.Errorf("run --once without Redis: exit status %d, want 3", status)
	}
}

// Redis refuses writes while it answers reads: everything stays as it is, and
// the verdict is incomplete. Nothing is sent that could not be put on record,
// and nothing fenced that could not be shown. It goes on by itself afterwards.
func TestSlowRedisReadOnly(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	for name, fault := range map[string]struct{ begin, end []string }{
		"replica of a dead master": {[]string{"REPLICAOF", "127.0.0.1", "1"}, []string{"REPLICAOF", "NO", "ONE"}},
		"too few replicas":         {[]string{"CONFIG", "SET", "min-replicas-to-write", "1"}, []string{"CONFIG", "SET", "min-replicas-to-write", "0"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSale(t, stack, hurried)
			byKind := map[string][]string{}
			for _, k := range everyKind {
				byKind[k.kind] = []string{s.stuckOne(k, time.Millisecond)}
			}
			fenced := s.fences()
			s.admin(fault.begin...)
			before := s.dumpAll(byKind)
			d := s.open()
			for range 3 {
				if v := s.passes(d, 1); !v.Incomplete {
					t.Errorf("verdict over a read-only Redis: complete, %+v", v.Jobs)
				}
			}
			service := s.serve()
			time.Sleep(3 * time.Second)
			if diff := cmp.Diff(before, s.dumpAll(byKind)); diff != "" {
				t.Errorf("Redis changed: %s", diff)
			}
			if n := s.fences(); n != fenced {
				t.Errorf("%d reservations were fenced that cannot be released", n-fenced)
			}
			if n := s.messages(); n != 0 {
				t.Errorf("%d messages were sent that are not on record", n)
			}
			s.admin(fault.end...)
			s.subscribe(upstream.Subscription{}, nil)
			s.settles(2 * time.Minute)
			s.wantEnds(byKind)
			service.end()
		})
	}
}

// Redis hangs with its connections open: a pass ends in bounded time and is
// incomplete, the daemon can be stopped, and nothing is fenced meanwhile.
func TestSlowRedisHangs(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	s := newSale(t, stack, hurried)
	byKind := map[string][]string{}
	for _, k := range everyKind {
		byKind[k.kind] = []string{s.stuckOne(k, time.Millisecond)}
	}
	fenced := s.fences()
	d, stopped := s.open(), s.serve()
	if err := stack.Redis().Pause(); err != nil {
		t.Fatal(err)
	}
	fenced = max(fenced, s.fences()) // the running one may have begun
	began := time.Now()
	v := d.Once(t.Context())
	t.Logf("a pass took %s", time.Since(began).Round(time.Millisecond))
	if took := time.Since(began); took > time.Minute || !v.Incomplete {
		t.Errorf("a pass over a hanging Redis took %s, incomplete: %v", took, v.Incomplete)
	}
	if took := stopped.end(); took > s.config.Run.StopTimeout {
		t.Errorf("the stop took %s", took)
	}
	if n := s.fences(); n != fenced {
		t.Errorf("%d reservations were fenced", n-fenced)
	}
	if err := stack.Redis().Resume(); err != nil {
		t.Fatal(err)
	}
	s.subscribe(upstream.Subscription{}, nil)
	s.serve()
	s.settles(2 * time.Minute)
	s.wantEnds(byKind)
}

// Redis is full: what frees stock and what only moves statuses runs all the same
// (spec §4), so units come back while no new reservation can be made.
func TestSlowRedisOutOfMemory(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	s := newSale(t, stack, hurried)
	byKind := map[string][]string{}
	for _, k := range everyKind {
		byKind[k.kind] = []string{s.stuckOne(k, time.Millisecond)}
	}
	s.admin("CONFIG", "SET", "maxmemory", "1mb")
	if err := s.redis.Set(t.Context(), "probe", "x", 0).Err(); err == nil || !strings.HasPrefix(err.Error(), "OOM") {
		t.Fatalf("a write to a full Redis: %v, want OOM", err)
	}
	daemon := s.serve()
	s.subscribe(upstream.Subscription{}, nil)
	const needsMemory = "reserved, index lost" // it has to be put into an index again
	s.eventually(time.Minute, func() error {
		for _, k := range everyKind {
			if k.kind == needsMemory {
				continue
			}
			if err := s.is(k.want, byKind[k.kind]...); err != nil {
				return fmt.Errorf("%s: %w", k.kind, err)
			}
		}
		return nil
	})
	s.keepsPromises()
	s.admin("CONFIG", "SET", "maxmemory", "0")
	s.settles(time.Minute)
	s.wantEnds(byKind)
	daemon.end()
}

// admin is what an operator types into redis-cli.
func (s *sale) admin(words ...string) {
	s.t.Helper()
	command := make([]any, len(words))
	for i, w := range words {
		command[i] = w
	}
	if err := s.redis.Do(context.WithoutCancel(s.t.Context()), command...).Err(); err != nil {
		s.t.Fatalf("%s: %v", strings.Join(words, " "), err)
	}
}

func (s *sale) dumpAll(byKind map[string][]string) map[string]any {
	s.t.Helper()
	var ids []string
	for _, of := range byKind {
		ids = append(ids, of...)
	}
	return s.dump(ids)
}

// messages counts what the sale's topic holds.
func (s *sale) messages() (n int64) {
	s.t.Helper()
	for _, broker := range s.stack.Brokers() {
		peer := remoting.NewPeer(broker.Addr(), remoting.Options{})
		queues, err := peer.TopicStats(s.t.Context(), s.config.RocketMQ.Topic)
		peer.Close()
		if err != nil {
			s.t.Fatal(err)
		}
		for _, q := range queues {
			n += q.Max - q.Min
		}
	}
	return n
}
