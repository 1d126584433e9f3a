package main

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/rogpeppe/go-internal/testscript"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// TestTransferScripts runs the command lines of testdata/transfer on real
// services. Each script has an activity of its own: $ACTIVITY, SKU sku, version 1,
// with 40, 0 and 10 units in its buckets 0, 1 and 2. `stock BUCKET FIELD VALUE`
// sets a number in Redis, `demand BUCKET N` has a bucket asked N times, and `id`
// keeps the transfer that was printed last as JSON in $ID.
func TestTransferScripts(t *testing.T) {
	stack := stacktest.Shared(t)
	client := stacktest.RedisTarget{Addrs: []string{stack.Redis().Addr()}}.Client(t)
	testscript.Run(t, testscript.Params{
		Dir: "testdata/transfer", RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			scope := stacktest.Scope(t)
			url := stacktest.Database(t, stack)
			env.Setenv("RECONCILER_POSTGRES_URL", stacktest.LoginURL(t, stack, url, "seckill_operator"))
			env.Setenv("RECONCILER_REDIS_ADDRS", stack.Redis().Addr())
			env.Setenv("RECONCILER_MODE", "act")
			env.Setenv("RECONCILER_REBALANCE_COOL_DOWN", "0s")
			env.Setenv("ACTIVITY", scope.ActivityID)
			env.Values["scope"] = scope
			return openTransferSale(t, client, url, scope, 40, 0, 10)
		},
		Cmds: transferCommands(client),
	})
}

// openTransferSale registers and provisions a version with so many units in each
// bucket.
func openTransferSale(t *testing.T, client redis.UniversalClient, url string, scope reservation.Scope, units ...int64) error {
	t.Helper()
	store, err := pgstore.Open(t.Context(), pgstore.Config{URL: url})
	if err != nil {
		return err
	}
	defer store.Close()
	now := time.Now().UTC().Truncate(time.Second)
	v := pgstore.Version{
		ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: scope.Version, Buckets: int64(len(units)),
		StartsAt: now.Add(-time.Minute), EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(24 * time.Hour),
	}
	runner, err := lua.NewRunner(client)
	if err != nil {
		return err
	}
	batch := runner.Batch()
	var buckets []pgstore.Bucket
	for i, n := range units {
		v.Total += n
		scope.Bucket = int64(i)
		buckets = append(buckets, pgstore.Bucket{ID: int64(i), Initial: n, State: pgstore.ScopeActive, Confirmed: true})
		batch.Provision(scope, lua.ProvisionArgs{
			State: lua.StateActive, StartsAtMS: v.StartsAt.UnixMilli(), EndsAtMS: v.EndsAt.UnixMilli(),
			RetentionUntilMS: v.RetentionUntil.UnixMilli(), SchemaVersion: 1, Initial: n,
		})
	}
	if err := store.RegisterVersion(t.Context(), v, buckets, "test"); err != nil {
		return err
	}
	return batch.Run(t.Context())
}

func transferCommands(client redis.UniversalClient) map[string]func(*testscript.TestScript, bool, []string) {
	bucket := func(ts *testscript.TestScript, text string) reservation.Scope {
		scope := ts.Value("scope").(reservation.Scope)
		n, err := strconv.ParseInt(text, 10, 64)
		ts.Check(err)
		scope.Bucket = n
		return scope
	}
	commands := map[string]func(*testscript.TestScript, bool, []string){
		"stock": func(ts *testscript.TestScript, _ bool, args []string) {
			ts.Check(client.HSet(context.Background(), bucket(ts, args[0]).StockKey(), args[1], args[2]).Err())
		},
		// unmark takes the receiver's leg back, as a failover of its slot does.
		"unmark": func(ts *testscript.TestScript, _ bool, args []string) {
			s := bucket(ts, args[0])
			n, err := client.HGet(context.Background(), s.TransferKey(ts.Getenv("ID")), "amount").Int64()
			ts.Check(err)
			ts.Check(client.Del(context.Background(), s.TransferKey(ts.Getenv("ID"))).Err())
			for _, field := range []string{"initial", "available"} {
				ts.Check(client.HIncrBy(context.Background(), s.StockKey(), field, -n).Err())
			}
		},
		"demand": func(ts *testscript.TestScript, _ bool, args []string) {
			s := bucket(ts, args[0])
			n, err := strconv.Atoi(args[1])
			ts.Check(err)
			go func() { // while the command watches
				for i := range n {
					time.Sleep(300 * time.Millisecond)
					request := fmt.Sprint("q", i)
					_ = client.HSet(context.Background(), s.RequestKey(request), request, "15||0|SOLD_OUT|u").Err() // the next one makes up for it
				}
			}()
		},
		"id": func(ts *testscript.TestScript, _ bool, _ []string) {
			_, rest, found := strings.Cut(ts.ReadFile("stdout"), `"transfer_id": "`)
			id, _, _ := strings.Cut(rest, `"`)
			if !found {
				ts.Fatalf("no transfer was printed")
			}
			ts.Setenv("ID", id)
		},
	}
	maps.Copy(commands, scriptCommands)
	return commands
}

// The scripts are there: a directory that was moved would pass as well.
func TestTransferScriptsAreThere(t *testing.T) {
	scripts, err := filepath.Glob("testdata/transfer/*.txtar")
	if err != nil || len(scripts) < 3 {
		t.Errorf("%v, %v", scripts, err)
	}
}
