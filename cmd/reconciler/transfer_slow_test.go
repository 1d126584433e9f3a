//go:build slow

package main

import (
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reservation"
)

// The program is killed (SIGKILL) at random moments while it moves units, thirty
// times. Whatever it left behind, the next one finishes: every unit is in one bucket.
func TestSlowTransferKilled(t *testing.T) {
	stack := stacktest.Shared(t)
	client := stacktest.RedisTarget{Addrs: []string{stack.Redis().Addr()}}.Client(t)
	scope := stacktest.Scope(t)
	url := stacktest.Database(t, stack)
	if err := openTransferSale(t, client, url, scope, 200, 100, 0); err != nil {
		t.Fatal(err)
	}
	env := append(os.Environ(),
		"RECONCILER_POSTGRES_URL="+stacktest.LoginURL(t, stack, url, "seckill_operator"), "RECONCILER_REDIS_ADDRS="+stack.Redis().Addr(),
		"RECONCILER_MODE=act", "RECONCILER_RECONCILE_SETTLE=20ms")
	program := func(args ...string) *exec.Cmd {
		cmd := exec.CommandContext(t.Context(), "reconciler", args...)
		cmd.Env, cmd.Dir = env, t.TempDir()
		return cmd
	}
	create := func(from, to, units int) *exec.Cmd {
		return program("transfer", "create", "--activity", scope.ActivityID, "--sku", scope.SKUID, "--version", "1",
			"--from", strconv.Itoa(from), "--to", strconv.Itoa(to), "--units", strconv.Itoa(units), "--reason", "test", "--wait")
	}
	began := time.Now()
	if out, err := create(0, 2, 5).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	usual := time.Since(began)
	const seed = 7
	rng := rand.New(rand.NewPCG(seed, seed))
	killed := 0
	for n := range 30 {
		cmd := create(n%3, (n+1)%3, 1+rng.IntN(4))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		timer := time.AfterFunc(usual/4+time.Duration(rng.Int64N(int64(usual))), func() { _ = cmd.Process.Kill() })
		if cmd.Wait() != nil {
			killed++
		}
		timer.Stop()
	}
	if killed < 5 {
		t.Errorf("only %d of 30 were killed", killed)
	}
	if out, err := create(0, 1, 1).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if out, err := program("transfer", "list", "--open", "--activity", scope.ActivityID).Output(); err != nil || string(out) != "no transfers\n" {
		t.Errorf("%v: left open:\n%s", err, out)
	}
	if out, err := program("reconcile", "--activity", scope.ActivityID).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	var sum int64
	for bucket := range int64(3) {
		s := reservation.Scope{ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: 1, Bucket: bucket}
		n, err := client.HGet(t.Context(), s.StockKey(), "available").Int64()
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	if sum != 300 {
		t.Errorf("%d units, want 300", sum)
	}
	t.Logf("%d of 30 killed; one takes %v", killed, usual.Round(time.Millisecond))
}
