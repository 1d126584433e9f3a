//go:build slow

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

const (
	many = 50_000
	// enough is in the midst of the request results: the orders before them,
	// which mostly name what those name too, are read in no time.
	enough = many/2 + many*2/5
)

// crowd makes reservations, orders for the first half, and some faults among
// them.
func (r *reconciled) crowd() {
	r.t.Helper()
	if err := r.redis.HSet(r.t.Context(), r.scope.StockKey(), "initial", many, "available", many).Err(); err != nil {
		r.t.Fatal(err)
	}
	r.exec1(`UPDATE seckill.scope_allocation SET total = $1`, many)
	r.exec1(`UPDATE seckill.scope SET initial = $1`, many)
	runner, err := lua.NewRunner(r.redis)
	if err != nil {
		r.t.Fatal(err)
	}
	var ids, users []string
	for i := range many {
		users = append(users, fmt.Sprint("u", i))
		ids = append(ids, reservation.NewID([]byte("secret"), r.scope.ActivityID, r.scope.SKUID, users[i], users[i]))
	}
	for page := range slices.Chunk(users, 2000) {
		batch := runner.Batch()
		for _, user := range page {
			id := reservation.NewID([]byte("secret"), r.scope.ActivityID, r.scope.SKUID, user, user)
			batch.Reserve(r.scope, lua.ReserveArgs{
				RequestID: user, ReservationID: id, UserID: user, TTLMS: 900_000, SchemaVersion: 1, MessageID: reservation.MessageID(id),
			})
		}
		if err := batch.Run(r.t.Context()); err != nil {
			r.t.Fatal(err)
		}
	}
	const ordered = many / 2
	r.exec1(`INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		SELECT 'o-' || id, id, u, $3, $4, 1, 0, u FROM unnest($1::text[], $2::text[]) AS t (id, u)`,
		ids[:ordered], users[:ordered], r.scope.ActivityID, r.scope.SKUID)
	for _, to := range []reservation.Status{reservation.StatusEnqueued, reservation.StatusOrderCreated} {
		for page := range slices.Chunk(ids[:ordered], 2000) {
			batch := runner.Batch()
			for _, id := range page {
				args := lua.TransitionArgs{ReservationID: id, Target: to}
				if to == reservation.StatusOrderCreated {
					args.OrderID = "o-" + id
				}
				batch.Transition(r.scope, args)
			}
			if err := batch.Run(r.t.Context()); err != nil {
				r.t.Fatal(err)
			}
		}
	}
	for i := 0; i < ordered; i += ordered / 40 {
		if err := r.redis.Del(r.t.Context(), r.scope.ReservationKey(ids[i])).Err(); err != nil {
			r.t.Fatal(err)
		}
	}
	for i := ordered; i < many; i += ordered / 10 {
		if err := r.redis.ZRem(r.t.Context(), r.scope.IndexKey(reservation.ReservationExpiry), ids[i]).Err(); err != nil {
			r.t.Fatal(err)
		}
	}
}

func (r *reconciled) exec1(sql string, args ...any) {
	r.t.Helper()
	if _, err := r.db.Exec(r.t.Context(), sql, args...); err != nil {
		r.t.Fatal(err)
	}
}

var processed = regexp.MustCompile(`total_commands_processed:(\d+)`)

// commands is how many commands Redis has executed, those within scripts left
// out.
func (r *reconciled) commands() int {
	r.t.Helper()
	info, err := r.redis.Info(r.t.Context(), "stats").Result()
	m := processed.FindStringSubmatch(info)
	if err != nil || m == nil {
		r.t.Fatalf("%v: %s", err, info)
	}
	n, _ := strconv.Atoi(m[1])
	return n
}

// deep makes a deep run as JSON.
func (r *reconciled) deep(status int, args ...string) (report reconcile.Report, commands int) {
	r.t.Helper()
	before := r.commands()
	got, stdout, stderr := r.exec(append([]string{"--deep", "--output", "json", "--rate", "0"}, args...)...)
	if got != status {
		r.t.Fatalf("%v: status %d, want %d\n%s", args, got, status, stderr)
	}
	wantJSON(r.t, stdout, &report)
	return report, r.commands() - before
}

func found(r reconcile.Report) []string {
	var all []string
	for _, f := range r.Findings {
		all = append(all, f.Check+" "+f.Subject)
	}
	slices.Sort(all)
	return all
}

// A deep pass that is killed, or ended by a signal, in the middle is continued
// by --resume: it finds what an uninterrupted one finds and reads less.
func TestSlowResumeAfterKill(t *testing.T) {
	r := newReconciled(t, stacktest.Own(t, devstack.Options{Redis: true, Postgres: true}))
	r.crowd()
	whole, all := r.deep(exitDrift)
	if whole.Summary[reconcile.CheckLostReservation] != 40 || whole.Summary[reconcile.CheckUnindexedReservation] != 10 {
		t.Fatalf("%v", whole.Summary)
	}
	if status, stdout, stderr := r.exec("--deep", "--resume"); status != exitFailed || stdout != "" || !strings.Contains(stderr, "nothing to resume") {
		t.Errorf("with nothing to resume: status %d, %q, %q", status, stdout, stderr)
	}
	for name, signal := range map[string]os.Signal{"killed": os.Kill, "interrupted": os.Interrupt} {
		id, looked := r.cut(signal)
		continued, some := r.deep(exitDrift, "--resume")
		if continued.RunID != id {
			t.Errorf("%s: run %s was continued as %s", name, id, continued.RunID)
		}
		if diff := cmp.Diff(found(whole), found(continued)); diff != "" {
			t.Errorf("%s (-whole +continued):\n%s", name, diff)
		}
		if some > all*9/10 {
			t.Errorf("%s after %d members: the rest took %d commands, a whole run %d", name, looked, some, all)
		}
		t.Logf("%s after %d members: the rest took %d commands, a whole run %d", name, looked, some, all)
	}
}

// cut begins a deep run and ends it by a signal once it has said how far it is.
func (r *reconciled) cut(signal os.Signal) (id string, looked int64) {
	r.t.Helper()
	cmd := exec.CommandContext(r.t.Context(), "reconciler", "reconcile", "--deep", "--output", "json", "--rate", "5000")
	cmd.Env, cmd.Dir = r.env, r.t.TempDir()
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	for end := time.Now().Add(3 * time.Minute); looked < enough; time.Sleep(100 * time.Millisecond) {
		err := r.db.QueryRow(r.t.Context(), `SELECT run_id, coalesce((progress ->> 'looked')::bigint, 0)
			FROM seckill.reconcile_run WHERE verdict IS NULL`).Scan(&id, &looked)
		if time.Now().After(end) {
			r.t.Fatalf("no progress: %v\n%s", err, stderr.String())
		}
	}
	if err := cmd.Process.Signal(signal); err != nil {
		r.t.Fatal(err)
	}
	err := cmd.Wait()
	if signal == os.Kill {
		return id, looked
	}
	exit, _ := errors.AsType[*exec.ExitError](err)
	var report reconcile.Report
	if exit.ExitCode() != exitIncomplete || json.Unmarshal([]byte(stdout.String()), &report) != nil || report.Verdict != reconcile.VerdictIncomplete {
		r.t.Errorf("after a signal: %v\n%.2000s\n%s", err, stdout.String(), stderr.String())
	}
	return id, looked
}
