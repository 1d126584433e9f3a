package devstack_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack"
)

// ownerVariable makes the test binary the owner of a stack that waits to be killed.
const ownerVariable = "DEVSTACK_TEST_OWNER"

func TestMain(m *testing.M) {
	if os.Getenv(ownerVariable) != "" {
		own()
	}
	os.Exit(m.Run())
}

// own starts a stack, says where it is and waits for its death.
func own() {
	stack, err := devstack.Start(context.Background(), devstack.Options{Redis: true, Postgres: true, Dir: os.Getenv(ownerVariable)})
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	fmt.Println("ready", stack.Redis().Addr(), stack.Postgres().Addr())
	select {}
}

// detached brings up a small stack in a directory that PostgreSQL can reach.
func detached(t *testing.T, dir string, opts devstack.Options) *devstack.Stack {
	t.Helper()
	opts.Dir = dir
	stack, err := devstack.Up(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	return stack
}

func stackDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "devstack-test-") //nolint:usetesting // PostgreSQL's account cannot go through those
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if err := devstack.Down(ctx, dir, nil); err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	return dir
}

func pids(s *devstack.Stack) map[string]int {
	out := map[string]int{}
	for _, svc := range s.Services() {
		out[svc.Name()] = svc.PID()
	}
	return out
}

func TestUpTwiceStartsOnlyWhatIsDead(t *testing.T) {
	dir := stackDir(t)
	first := detached(t, dir, devstack.Options{Redis: true, Postgres: true})
	before := pids(first)

	if got := pids(detached(t, dir, devstack.Options{Redis: true, Postgres: true})); fmt.Sprint(got) != fmt.Sprint(before) {
		t.Errorf("a second up changed processes: %v, before %v", got, before)
	}
	if err := first.Redis().Kill(); err != nil {
		t.Fatal(err)
	}
	if err := first.Postgres().Pause(); err != nil {
		t.Fatal(err)
	}
	// Only PostgreSQL is asked for: what was there before belongs to the stack still.
	again := detached(t, dir, devstack.Options{Postgres: true})
	after := pids(again)
	if after["redis"] == before["redis"] || after["postgres"] != before["postgres"] {
		t.Errorf("after the death of Redis: %v, before %v", after, before)
	}
	if again.Redis().Addr() != first.Redis().Addr() {
		t.Errorf("Redis moved from %s to %s", first.Redis().Addr(), again.Redis().Addr())
	}
	ping(t, again)
	if !devstack.IsUp(dir) {
		t.Error("the stack does not count as up")
	}
	wantDown(t, dir, again)
}

// wantDown ends a stack twice and checks that nothing of it is left.
func wantDown(t *testing.T, dir string, s *devstack.Stack) {
	t.Helper()
	for range 2 {
		if err := devstack.Down(t.Context(), dir, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, svc := range s.Services() {
		if svc.Alive() {
			t.Errorf("%s is alive", svc.Name())
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*"))
	if err != nil || len(left) != 1 || filepath.Base(left[0]) != "stack.lock" {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestDownSparesAStrangerWithARecordedPID(t *testing.T) {
	dir := stackDir(t)
	stack := detached(t, dir, devstack.Options{Redis: true})
	if err := stack.Redis().Kill(); err != nil {
		t.Fatal(err)
	}
	stranger := exec.Command("sleep", "300")
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = stranger.Process.Kill()
		_ = stranger.Wait()
	}()
	// As if the kernel had given the dead server's pid to another program.
	rewriteState(t, dir, func(state map[string]any) {
		service := state["services"].([]any)[0].(map[string]any)
		service["process"].(map[string]any)["pid"] = stranger.Process.Pid
	})
	if devstack.IsUp(dir) {
		t.Error("the stranger is taken for Redis")
	}
	if err := devstack.Down(t.Context(), dir, nil); err != nil {
		t.Fatal(err)
	}
	if err := stranger.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the stranger: %v", err)
	}
}

func rewriteState(t *testing.T, dir string, change func(map[string]any)) {
	t.Helper()
	path := filepath.Join(dir, "stack.json")
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	decoder := json.NewDecoder(strings.NewReader(string(raw)))
	decoder.UseNumber() // start times do not fit a float
	var state map[string]any
	if err := decoder.Decode(&state); err != nil {
		t.Fatal(err)
	}
	change(state)
	if raw, err = json.Marshal(state); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestEnvironmentFileReachesTheServices(t *testing.T) {
	dir := stackDir(t)
	stack := detached(t, dir, devstack.Options{Redis: true, Postgres: true})
	for range 2 { // safe to repeat
		if err := stack.PrepareDatabase(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := stack.WriteEnvironment("/usr/local/bin/reconciler"); err != nil {
		t.Fatal(err)
	}
	for script, want := range map[string]string{
		`$REDIS_CLI ping`:                   "PONG",
		`$PSQL -Atc 'SELECT 1'`:             "1",
		`echo $RECONCILER_REDIS_ADDRS`:      stack.Redis().Addr(),
		`echo $RECONCILER $RECONCILER_MODE`: "/usr/local/bin/reconciler act",
		`printf %s "$CONSOLE_TOKEN" | sha256sum | grep -c "^$RECONCILER_ADMIN_CHANGE_TOKEN_SHA256 "`: "1",
		`$PSQL -Atc "SELECT pg_has_role('reconciler', 'seckill_daemon', 'MEMBER')"`:                  "t",
		`$PSQL -Atc "SELECT pg_has_role('reconciler', 'seckill_operator', 'MEMBER')"`:                "t",
		`$PSQL -Atc "SELECT pg_has_role('shop_consumer', 'seckill_consumer', 'MEMBER')"`:             "t",
		`$PSQL -Atc "SELECT rolsuper FROM pg_roles WHERE rolname = 'reconciler'"`:                    "f",
		`psql -Atc 'SELECT current_user' "$RECONCILER_POSTGRES_URL"`:                                 "reconciler",
		`psql -Atc 'SELECT current_user' "$SHOP_POSTGRES_URL"`:                                       "shop_consumer",
		`psql -Atc 'SHOW synchronous_commit' "$RECONCILER_POSTGRES_MIGRATE_URL"`:                     "on",
	} {
		out, err := exec.Command("bash", "-euc", ". "+filepath.Join(dir, devstack.EnvFile)+"; "+script).CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", script, got, err, want)
		}
	}
}

func ping(t *testing.T, s *devstack.Stack) {
	t.Helper()
	client := redis.NewClient(&redis.Options{Addr: s.Redis().Addr()})
	defer func() { _ = client.Close() }()
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
	conn := connect(t, s)
	if err := conn.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func connect(t *testing.T, s *devstack.Stack) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), s.PostgresURL("postgres", "postgres"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func TestSingleServicesCanBeBroken(t *testing.T) {
	stack, err := devstack.Start(t.Context(), devstack.Options{Redis: true, Postgres: true, PostgresSettings: []string{"deadlock_timeout=250ms"}})
	if err != nil {
		t.Fatal(err)
	}
	dir := stack.Dir()
	defer func() {
		if err := stack.Stop(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("the stack's directory stays: %v", err)
		}
	}()
	conn := connect(t, stack)
	if _, err := conn.Exec(t.Context(), "CREATE TABLE kept AS SELECT current_setting('deadlock_timeout') AS setting"); err != nil {
		t.Fatal(err)
	}

	t.Run("a service outlives the thread that asked for it", func(t *testing.T) {
		restarted := make(chan error)
		go func() {
			runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
			restarted <- stack.Redis().Restart(t.Context())
		}()
		if err := <-restarted; err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond)
		ping(t, stack)
	})

	t.Run("a paused server answers when it is resumed", func(t *testing.T) { pauseAndResume(t, stack, conn) })

	t.Run("a killed server keeps what was committed", func(t *testing.T) {
		if err := stack.Postgres().Kill(); err != nil {
			t.Fatal(err)
		}
		if err := conn.Ping(t.Context()); err == nil || stack.Postgres().Alive() {
			t.Error("a connection outlived the kill")
		}
		if err := stack.Postgres().Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		var setting string
		if err := connect(t, stack).QueryRow(t.Context(), "SELECT setting FROM kept").Scan(&setting); err != nil || setting != "250ms" {
			t.Errorf("read back %q, %v", setting, err)
		}
	})
}

func pauseAndResume(t *testing.T, stack *devstack.Stack, conn *pgx.Conn) {
	t.Helper()
	if err := stack.Postgres().Pause(); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() { answered <- conn.Ping(t.Context()) }()
	select {
	case err := <-answered:
		t.Errorf("a paused server answered: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	if err := stack.Postgres().Resume(); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err != nil {
		t.Error(err)
	}
}

func TestAnOwnedStackDiesWithItsOwner(t *testing.T) {
	dir := stackDir(t)
	owner := exec.Command(os.Args[0], "-test.run", "^$")
	owner.Env = append(os.Environ(), ownerVariable+"="+dir)
	out, err := owner.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := owner.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = owner.Wait() }()
	line, err := bufio.NewReader(out).ReadString('\n')
	if killErr := owner.Process.Kill(); killErr != nil {
		t.Fatal(killErr)
	}
	addrs, ok := strings.CutPrefix(strings.TrimSpace(line), "ready ")
	if err != nil || !ok {
		t.Fatalf("the owner said %q, %v", line, err)
	}
	for addr := range strings.FieldsSeq(addrs) {
		for end := time.Now().Add(20 * time.Second); listens(t, addr); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s outlived its owner", addr)
			}
		}
	}
}

// listens reports whether a process has the port, by the kernel's own table: a
// connection attempt would not see one that is paused.
func listens(t *testing.T, addr string) bool {
	t.Helper()
	_, port, _ := strings.Cut(addr, ":")
	var n int
	if _, err := fmt.Sscan(port, &n); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(raw), fmt.Sprintf("0100007F:%04X 00000000:0000 0A", n))
}

func TestAStackNeedsADirectoryToOutliveItsStarter(t *testing.T) {
	if _, err := devstack.Up(t.Context(), devstack.Options{Redis: true}); err == nil {
		t.Error("a detached stack without a directory")
	}
	if _, err := devstack.Open(t.TempDir()); !os.IsNotExist(err) && err == nil {
		t.Error("opened a stack that is not there")
	}
	if err := devstack.Down(t.Context(), filepath.Join(t.TempDir(), "none"), nil); err != nil {
		t.Errorf("ending a stack that is not there: %v", err)
	}
}

func TestTheLastBorrowerTakesTheStackDown(t *testing.T) {
	dir := stackDir(t)
	borrow := func() func() {
		release, err := devstack.Borrow(t.Context(), dir, nil)
		if err != nil {
			t.Fatal(err)
		}
		return func() {
			t.Helper()
			if err := release(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	wantUp := func(when string, want bool) {
		t.Helper()
		if got := devstack.IsUp(dir); got != want {
			t.Errorf("%s: up is %v", when, got)
		}
	}
	first := borrow()
	detached(t, dir, devstack.Options{Redis: true})
	second := borrow()
	first()
	wantUp("the second borrower is left", true)
	second()
	wantUp("the last one has gone", false)

	third := borrow()
	detached(t, dir, devstack.Options{Redis: true})
	if err := devstack.Keep(dir); err != nil {
		t.Fatal(err)
	}
	third()
	wantUp("the borrowed stack was kept", true)
	borrow()()
	wantUp("a stack that was up before", true)
}
