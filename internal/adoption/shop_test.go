package adoption_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Names that the guide uses.
const (
	guideDatabase = "DATABASE laden "
	guideActivity = "winter26"
	guideSKU      = "A-100"
	buckets       = 2
	perBucket     = 50
)

// laden is the shop of the guide, on real services: its database, its Redis
// keys, and the reconciler's program beside it.
type laden struct {
	t        *testing.T
	stack    *devstack.Stack
	url      string // of the superuser
	activity string
	dir      string // where the program runs
	binary   string
	env      []string
	redis    redis.UniversalClient
	scripts  *lua.Runner
	super    *pgx.Conn
	consumer *pgx.Conn
	guide    []block
	users    int
}

// openLaden prepares the services, and the shop as it was before.
func openLaden(t *testing.T) *laden {
	t.Helper()
	l := &laden{t: t, stack: stacktest.Shared(t), activity: stacktest.Scope(t).ActivityID, dir: t.TempDir(), guide: readGuide(t)}
	l.url = stacktest.EmptyDatabase(t, l.stack)
	l.super = l.connect("postgres")
	for _, role := range []string{"laden_owner", "laden_consumer"} {
		if err := devstack.EnsureRole(t.Context(), l.super, role, "LOGIN"); err != nil {
			t.Fatal(err)
		}
	}
	name := l.super.Config().Database
	l.exec(l.super, `GRANT CREATE ON DATABASE `+name+` TO laden_owner`)
	owner := l.connect("laden_owner")
	l.exec(owner, readFile(t, "internal", "adoption", "testdata", "laden.sql"))
	l.exec(owner, `INSERT INTO laden.kontingent (aktion, artikel, menge) VALUES ($1, $2, $3)`, l.activity, guideSKU, buckets*perBucket)
	l.consumer = l.connect("laden_consumer")

	l.redis = redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{Addrs: []string{l.stack.Redis().Addr()}, ReadTimeout: 5 * time.Second}))
	t.Cleanup(func() { _ = l.redis.Close() })
	var err error
	if l.scripts, err = lua.NewRunner(l.redis); err != nil {
		t.Fatal(err)
	}
	l.binary = filepath.Join(l.dir, "reconciler")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", l.binary, "github.com/seckill/reconciler/cmd/reconciler")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the program: %v\n%s", err, out)
	}
	l.settings()
	return l
}

// settings are those of the guide's config.yaml, with the addresses of the
// test's services, and times for a test.
func (l *laden) settings() {
	l.t.Helper()
	topic, group := stacktest.Topic(l.t, l.stack, 2)
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "RECONCILER_") {
			l.env = append(l.env, kv)
		}
	}
	l.env = append(l.env,
		"RECONCILER_REDIS_ADDRS="+l.stack.Redis().Addr(),
		"RECONCILER_POSTGRES_URL="+l.login("seckill_reconciler"),
		"RECONCILER_POSTGRES_MIGRATE_URL="+l.login("seckill_owner"),
		"RECONCILER_ROCKETMQ_NAME_SERVERS="+l.stack.NameServer().Addr(),
		"RECONCILER_ROCKETMQ_TOPIC="+topic, "RECONCILER_ROCKETMQ_CONSUMER_GROUP="+group,
		"RECONCILER_SCANNER_SEND_GRACE=100ms", "RECONCILER_FENCER_SETTLE=200ms", "RECONCILER_FENCER_RECHECK=200ms",
		"RECONCILER_FENCER_BACKOFF_MIN=100ms", "RECONCILER_FENCER_BACKOFF_MAX=300ms", "RECONCILER_FENCER_MAX_RELEASE_MIN=1000",
		"RECONCILER_RECONCILE_SETTLE=200ms", "RECONCILER_ADMIN_LISTEN=127.0.0.1:0",
	)
	config := slices.IndexFunc(l.guide, func(b block) bool { return b.language == "yaml" })
	if config < 0 {
		l.t.Fatal("the guide shows no config.yaml")
	}
	l.write("config.yaml", l.guide[config].text)
}

func (l *laden) write(name, text string) {
	l.t.Helper()
	if err := os.WriteFile(filepath.Join(l.dir, name), []byte(text), 0o600); err != nil {
		l.t.Fatal(err)
	}
}

// login is the URL of the shop's database for a role.
func (l *laden) login(role string) string {
	l.t.Helper()
	u, err := url.Parse(l.url)
	if err != nil {
		l.t.Fatal(err)
	}
	u.User = url.User(role)
	return u.String()
}

func (l *laden) connect(role string) *pgx.Conn {
	l.t.Helper()
	conn, err := pgx.Connect(l.t.Context(), l.login(role))
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(l.t.Context())) })
	return conn
}

// exec runs one statement, or several that take no arguments.
func (l *laden) exec(conn *pgx.Conn, sql string, args ...any) {
	l.t.Helper()
	var err error
	if len(args) > 0 {
		_, err = conn.Exec(l.t.Context(), sql, args...)
	} else {
		_, err = conn.PgConn().Exec(l.t.Context(), sql).ReadAll()
	}
	if err != nil {
		l.t.Fatalf("%s: %v", sql, err)
	}
}

func one[T any](l *laden, sql string, args ...any) T {
	l.t.Helper()
	var value T
	if err := l.super.QueryRow(l.t.Context(), sql, args...).Scan(&value); err != nil {
		l.t.Fatalf("%s: %v", sql, err)
	}
	return value
}

// follow does what the guide says under the headings that begin so: SQL as the
// role that it names, each statement for itself, and every command.
func (l *laden) follow(headings ...string) {
	l.t.Helper()
	for _, heading := range headings {
		done := 0
		for _, b := range l.guide {
			if strings.HasPrefix(b.heading, heading) && l.do(b) {
				done++
			}
		}
		if done == 0 {
			l.t.Fatalf("the guide has nothing to do under %q", heading)
		}
	}
}

func (l *laden) do(b block) bool {
	l.t.Helper()
	role, byRole := strings.CutPrefix(b.label, "as ")
	role, wantNone := strings.CutSuffix(role, ", none")
	switch {
	case b.language == "sql" && byRole:
		l.statements(role, strings.ReplaceAll(b.text, guideDatabase, "DATABASE "+l.super.Config().Database+" "), wantNone)
	case b.language == "sql":
		l.write(b.label, b.text)
	case b.language == "sh":
		for line := range strings.Lines(b.text) {
			args := strings.Fields(strings.ReplaceAll(line, guideActivity, l.activity))
			if args[0] != "reconciler" {
				l.t.Fatalf("the guide runs %q", line)
			}
			l.want(0, args[1:]...)
		}
	default:
		return false
	}
	return true
}

// statements runs SQL as psql does. The roles are the whole server's: another
// test of this package may have made them.
func (l *laden) statements(role, sql string, wantNone bool) {
	l.t.Helper()
	conn := l.connect(role)
	for _, statement := range strings.SplitAfter(sql, ";\n") {
		if strings.TrimSpace(statement) == "" {
			continue
		}
		results, err := conn.PgConn().Exec(l.t.Context(), statement).ReadAll()
		var refused *pgconn.PgError
		if errors.As(err, &refused) && refused.Code == "42710" { // duplicate_object
			continue
		}
		if err != nil {
			l.t.Fatalf("the guide, as %s:\n%s\n%v", role, statement, err)
		}
		if wantNone && len(results[0].Rows) > 0 {
			l.t.Fatalf("the guide, as %s:\n%s\nshows %s", role, statement, results[0].Rows[0])
		}
	}
}

// command runs the program to its end.
func (l *laden) command(args ...string) (stdout string, exit int, stderr string) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, l.binary, args...)
	cmd.Dir, cmd.Env = l.dir, l.env
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	err := cmd.Run()
	var status *exec.ExitError
	if err != nil && !errors.As(err, &status) {
		l.t.Fatalf("reconciler %s: %v", strings.Join(args, " "), err)
	}
	return out.String(), cmd.ProcessState.ExitCode(), log.String()
}

// want runs the program, which must end with the exit status.
func (l *laden) want(exit int, args ...string) string {
	l.t.Helper()
	out, got, log := l.command(args...)
	if got != exit {
		l.t.Fatalf("reconciler %s: exit status %d, want %d\n%s%s", strings.Join(args, " "), got, exit, out, log)
	}
	return out
}

// run starts the daemon in mode act and returns what stops it.
func (l *laden) run() (stop func()) {
	l.t.Helper()
	cmd := exec.Command(l.binary, "run", "--log-level", "warn")
	cmd.Dir = l.dir
	cmd.Env = append(slices.Clone(l.env), "RECONCILER_MODE=act")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		l.t.Fatal(err)
	}
	ended := false
	stop = func() {
		if ended {
			return
		}
		ended = true
		if err := errors.Join(cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
			l.t.Errorf("the daemon ended with: %v", err)
		}
		if l.t.Failed() {
			l.t.Logf("the daemon's log:\n%s", log.String())
		}
	}
	l.t.Cleanup(stop)
	return stop
}

// report is what the tests read of a reconciliation.
type report struct {
	Verdict string `json:"verdict"`
	Scopes  []struct {
		Bucket   int64 `json:"bucket_id"`
		Postgres struct {
			Active    int64 `json:"active"`
			Cancelled int64 `json:"cancelled"`
		} `json:"postgres"`
	} `json:"scopes"`
	Findings []struct {
		Check    string `json:"check"`
		Severity string `json:"severity"`
		Subject  string `json:"subject"`
	} `json:"findings"`
}

// reconcile reports on the activity: "check subject" of every finding that is
// more than a warning.
func (l *laden) reconcile(exit int, args ...string) (r report, found []string) {
	l.t.Helper()
	out := l.want(exit, append([]string{"reconcile", "--activity", l.activity, "--output", "json"}, args...)...)
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		l.t.Fatalf("report: %v\n%s", err, out)
	}
	for _, f := range r.Findings {
		if f.Severity == "critical" || f.Severity == "error" {
			found = append(found, f.Check+" "+f.Subject)
		}
	}
	slices.Sort(found)
	return r, found
}

func (l *laden) scope(bucket int64) reservation.Scope {
	return reservation.Scope{ActivityID: l.activity, SKUID: guideSKU, Version: 1, Bucket: bucket}
}

// tool is the shop's own: it makes the keys of a bucket by hand.
func (l *laden) tool(scope reservation.Scope, units int64, change ...func(meta, stock map[string]string)) {
	l.t.Helper()
	ctx, now := l.t.Context(), time.Now().Truncate(time.Minute)
	retention := now.Add(2 * time.Hour)
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	meta := map[string]string{
		"activity_id": scope.ActivityID, "sku_id": scope.SKUID, "bucket_id": number(scope.Bucket), "version": number(scope.Version),
		"state": "ACTIVE", "starts_at_ms": number(now.Add(-time.Minute).UnixMilli()),
		"ends_at_ms": number(now.Add(time.Hour).UnixMilli()), "retention_until_ms": number(retention.UnixMilli()),
		"schema_version": "1",
	}
	stock := map[string]string{"initial": number(units), "available": number(units), "reserved": "0", "released_total": "0"}
	for _, f := range change {
		f(meta, stock)
	}
	_, err := l.redis.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		for key, fields := range map[string]map[string]string{scope.MetaKey(): meta, scope.StockKey(): stock} {
			if len(fields) == 0 {
				continue
			}
			pipe.HSet(ctx, key, fields)
			pipe.PExpireAt(ctx, key, retention)
		}
		return nil
	})
	if err != nil {
		l.t.Fatal(err)
	}
}

// reserve makes a reservation as the gateway does, already expired, and walks
// it along the statuses.
func (l *laden) reserve(walk ...reservation.Status) reservation.OrderMessage {
	l.t.Helper()
	l.users++
	user, request := strconv.Itoa(1000+l.users), "q-"+strconv.Itoa(l.users)
	scope := l.scope(reservation.BucketOf(l.activity, guideSKU, user, buckets))
	id := reservation.NewID([]byte("secret"), l.activity, guideSKU, user, request)
	batch := l.scripts.Batch()
	reserved := batch.Reserve(scope, lua.ReserveArgs{
		RequestID: request, ReservationID: id, UserID: user, TTLMS: 1, SchemaVersion: 1, MessageID: reservation.MessageID(id),
	})
	for _, to := range walk {
		batch.Transition(scope, lua.TransitionArgs{ReservationID: id, Target: to})
	}
	if err := batch.Run(l.t.Context()); err != nil {
		l.t.Fatal(err)
	}
	if reply, err := reserved.Get(); err != nil || reply.Code != lua.ReserveAccepted {
		l.t.Fatalf("reserve: %+v, %v", reply, err)
	}
	fields, err := l.redis.HGetAll(l.t.Context(), scope.ReservationKey(id)).Result()
	if err != nil {
		l.t.Fatal(err)
	}
	r, err := reservation.Parse(scope, id, fields)
	if err != nil {
		l.t.Fatal(err)
	}
	return reservation.NewOrderMessage(r)
}

// order lets the consumer have the message.
func (l *laden) order(want outcome, m reservation.OrderMessage) {
	l.t.Helper()
	got, err := consume(l.t.Context(), l.consumer, m)
	if err != nil || got != want {
		l.t.Fatalf("consume %s: %s, %v; want %s", m.ReservationID, got, err, want)
	}
}

// changed updates one order, or its lines.
func (l *laden) changed(m reservation.OrderMessage, set string) {
	l.t.Helper()
	l.exec(l.super, `UPDATE laden.bestellung AS b SET `+set+` WHERE b.vormerkung = $1`, m.ReservationID)
}

func (l *laden) status(m reservation.OrderMessage) reservation.Status {
	l.t.Helper()
	status, err := l.redis.HGet(l.t.Context(), m.Scope().ReservationKey(m.ReservationID), "status").Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		l.t.Fatal(err)
	}
	return reservation.Status(status)
}

// becomes waits until the reservations have the status.
func (l *laden) becomes(want reservation.Status, ms ...reservation.OrderMessage) {
	l.t.Helper()
	l.eventually(fmt.Sprintf("all %d become %s", len(ms), want), func() string {
		for _, m := range ms {
			if got := l.status(m); got != want {
				return fmt.Sprintf("%s is %s", m.ReservationID, got)
			}
		}
		return ""
	})
}

// eventually waits until holds has nothing to say.
func (l *laden) eventually(what string, holds func() string) {
	l.t.Helper()
	for end := time.Now().Add(2 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
		wrong := holds()
		if wrong == "" {
			return
		}
		if time.Now().After(end) {
			l.t.Fatalf("%s: not within two minutes: %s", what, wrong)
		}
	}
}
