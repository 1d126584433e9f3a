package main_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// TestGateway builds the example and buys from it, on a standalone Redis and on
// a cluster: the orders are reserved, sent and noted.
func TestGateway(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(source, []byte("\n")); n >= 60 {
		t.Errorf("the example has %d lines: it is to be read at a glance", n)
	}
	binary := filepath.Join(t.TempDir(), "gateway")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, target := range stacktest.RedisTargets(t)[1:3] {
		t.Run(target.Name, func(t *testing.T) {
			t.Parallel()
			buy(t, binary, target)
		})
	}
}

func buy(t *testing.T, binary string, target stacktest.RedisTarget) {
	t.Helper()
	stack := stacktest.Shared(t)
	scope := stacktest.Scope(t)
	scope.SKUID = "88001"
	topic, _ := stacktest.Topic(t, stack, 2)
	rdb := redis.NewUniversalClient(client.RedisOptions(&redis.UniversalOptions{Addrs: target.Addrs, ReadTimeout: time.Minute}))
	t.Cleanup(func() { _ = rdb.Close() })
	provision(t, rdb, scope, 10)
	address := start(t, binary, scope.ActivityID, "RECONCILER_REDIS_ADDRS="+strings.Join(target.Addrs, ","),
		"RECONCILER_ROCKETMQ_NAME_SERVERS="+stack.NameServer().Addr(), "RECONCILER_ROCKETMQ_TOPIC="+topic)

	post := func(user, request string) map[string]any {
		t.Helper()
		answer, err := http.PostForm("http://"+address+"/buy", url.Values{"user": {user}, "request_id": {request}, "retry": {"yes"}})
		if err != nil {
			t.Fatal(err)
		}
		defer answer.Body.Close()
		var got map[string]any
		if err := json.NewDecoder(answer.Body).Decode(&got); err != nil {
			t.Fatal(err)
		}
		return got
	}
	// With 40 ms for Redis, a busy machine may well be told to ask again.
	var bought map[string]any
	for deadline := time.Now().Add(90 * time.Second); ; {
		if bought = post("alice", "q-1"); bought["code"] == "ACCEPTED" {
			break
		}
		if bought["code"] != client.CodeSystemBusy || bought["retryable"] != true || bought["request_id"] != "q-1" || time.Now().After(deadline) {
			t.Fatalf("%v", bought)
		}
	}
	id, _ := bought["reservation_id"].(string)
	fields, err := rdb.HGetAll(t.Context(), scope.ReservationKey(id)).Result()
	if err != nil {
		t.Fatal(err)
	}
	m := reservation.NewMember(scope, id, fields)
	if m.Missing || m.Malformed != nil || m.Reservation.UserID != "alice" {
		t.Fatalf("the reservation: %+v", m)
	}
	switch r := m.Reservation; r.Status {
	case reservation.StatusEnqueued:
		if _, err := rocketmq.ParsePosition(r.Position); err != nil {
			t.Error(err)
		}
	case reservation.StatusSendUnknown: // a busy broker
	default:
		t.Errorf("the reservation is %s", r.Status)
	}
	if got := post("a b", "q-3"); got["code"] != client.CodeInvalidRequest || got["retryable"] != false {
		t.Errorf("a bad user: %v", got)
	}
}

// start runs the example on a port of its own until the test ends.
func start(t *testing.T, binary, activity string, env ...string) (address string) {
	t.Helper()
	var config net.ListenConfig
	listener, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address = listener.Addr().String()
	_ = listener.Close()
	cmd := exec.CommandContext(t.Context(), binary, "-activity", activity, "-listen", address)
	cmd.Env = append(os.Environ(), env...)
	log, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	listening, done := make(chan bool, 1), make(chan struct{})
	go func() {
		defer close(done)
		for lines := bufio.NewScanner(log); lines.Scan(); {
			if strings.Contains(lines.Text(), "listening on") {
				listening <- true
			}
			_, _ = fmt.Fprintln(t.Output(), lines.Text())
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-done
		_ = cmd.Wait()
	})
	select {
	case <-listening:
	case <-done:
		t.Fatal("the example ended")
	case <-time.After(time.Minute):
		t.Fatal("the example does not listen")
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		if err == nil {
			_ = conn.Close()
			return address
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
}

func provision(t *testing.T, rdb redis.UniversalClient, scope reservation.Scope, units int64) {
	t.Helper()
	scripts, err := lua.NewRunner(rdb)
	if err != nil {
		t.Fatal(err)
	}
	now, batch := time.Now(), scripts.Batch()
	result := batch.Provision(scope, lua.ProvisionArgs{
		State: lua.StateActive, StartsAtMS: now.Add(-time.Minute).UnixMilli(), EndsAtMS: now.Add(time.Hour).UnixMilli(),
		RetentionUntilMS: now.Add(2 * time.Hour).UnixMilli(), SchemaVersion: 1, Initial: units,
	})
	_ = batch.Run(t.Context())
	if reply, err := result.Get(); err != nil || reply.Code != lua.ProvisionCreated {
		t.Fatalf("provision: %v, %v", reply.Code, err)
	}
}
