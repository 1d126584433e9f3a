package pgstore_test

import (
	"bytes"
	"errors"
	"net"
	"os"
	osexec "os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/migrations"
)

func checkIdentity(t *testing.T, store *pgstore.Store, elsewhere ...pgstore.Identity) pgstore.IdentityCheck {
	t.Helper()
	check, err := store.CheckIdentity(t.Context(), elsewhere...)
	if err != nil {
		t.Fatal(err)
	}
	return check
}

func TestIdentityOfOneServer(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	consumer := connect(t, db.as(t, "seckill_consumer"))
	var before pgstore.Identity
	for i, id := range []string{"r1", "r2", "r3"} {
		check := checkIdentity(t, db.store)
		if check.Changed != "" || check.Halted {
			t.Errorf("check %d: %+v", i, check)
		}
		if now := check.Identity; now.SystemIdentifier == 0 || now.Timeline < 1 || now.WALPosition == 0 || now.WALPosition < before.WALPosition {
			t.Errorf("identity %v after %v", now, before)
		}
		before = check.Identity
		if err := order(t.Context(), consumer, db.scope, id); err != nil {
			t.Fatal(err)
		}
	}
	other := db.open(t, "seckill_daemon") // another process, or this one after a restart
	if check := checkIdentity(t, other, before); check.Changed != "" || check.Halted || check.Identity.WALPosition <= before.WALPosition {
		t.Errorf("by another process: %+v", check)
	}
}

func TestIdentityThatChanged(t *testing.T) {
	t.Parallel()
	for want, change := range map[string]string{
		"system_identifier_changed": `UPDATE seckill.server_identity SET system_identifier = system_identifier - 1`,
		"timeline_changed":          `UPDATE seckill.server_identity SET timeline = timeline + 1`,
		"wal_position_went_back":    `UPDATE seckill.server_identity SET wal_position = 'FFFF/0'`,
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			db := newDatabase(t)
			checkIdentity(t, db.store)
			exec(t, connect(t, db.url), change)
			store := db.open(t, "seckill_daemon")
			if check := checkIdentity(t, store); check.Changed != want || !check.Halted {
				t.Errorf("first check: %+v, want %s and a halt", check, want)
			}
			if check := checkIdentity(t, store); check.Changed != "" || !check.Halted {
				t.Errorf("second check: %+v, want no change more, but the halt", check)
			}
			halts, err := store.Halts(t.Context())
			if err != nil || len(halts) != 1 || halts[0].Kind != pgstore.TaskPostgresChanged || halts[0].Cause != want || len(halts[0].Sample) != 2 {
				t.Fatalf("halts: %+v, %v", halts, err)
			}
			if err := store.ResolveTask(t.Context(), halts[0].ID, "ann", "never mind"); !errors.Is(err, pgstore.ErrNotLiftedByHand) {
				t.Errorf("lifted by hand: %v, want ErrNotLiftedByHand", err)
			}
			if check := checkIdentity(t, store); check.Changed != "" || !check.Halted {
				t.Errorf("after it was to be lifted by hand: %+v, want the halt still", check)
			}
		})
	}
}

// A volume that is restored takes its own row back with it: what this process,
// or somebody else, saw shows the change.
func TestIdentityOfARestoredVolume(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	seen := checkIdentity(t, db.store).Identity
	seen.WALPosition += 1 << 30
	if check := checkIdentity(t, db.open(t, "seckill_daemon"), seen); check.Changed != "wal_position_went_back" || !check.Halted {
		t.Errorf("seen elsewhere: %+v", check)
	}
}

// A real standby: nothing can be fenced on it, and its promotion is seen by
// the first check, though nothing else about it differs.
func TestStandbyAndPromotion(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Postgres: true, PostgresSettings: []string{"max_wal_senders=4", "wal_level=replica"}})
	super := stack.PostgresURL("postgres", "postgres")
	if _, err := migrations.Up(t.Context(), super, migrations.Options{WithReference: true}); err != nil {
		t.Fatal(err)
	}
	primary := open(t, pgstore.Config{URL: stacktest.LoginURL(t, stack, super, "seckill_daemon")})
	before := checkIdentity(t, primary)
	scope := stacktest.Scope(t)
	if results, err := primary.Fence(t.Context(), "x", requests(scope, "r1")); err != nil || !results[0].Won {
		t.Fatalf("fence on the primary: %+v, %v", results, err)
	}

	standbyURL, promote := startStandby(t, stack)
	standby := open(t, pgstore.Config{URL: standbyURL})
	if results, err := standby.Fence(t.Context(), "x", requests(scope, "r2")); !errors.Is(err, pgstore.ErrInRecovery) || results[0].Known {
		t.Errorf("fence on the standby: %+v, %v", results, err)
	}
	if err := standby.FenceReady(t.Context()); !errors.Is(err, pgstore.ErrInRecovery) {
		t.Errorf("FenceReady on the standby: %v", err)
	}
	if _, err := standby.CheckIdentity(t.Context()); !errors.Is(err, pgstore.ErrInRecovery) {
		t.Errorf("CheckIdentity on the standby: %v", err)
	}

	promote()
	check := checkIdentity(t, standby)
	if check.Changed != "timeline_changed" || !check.Halted || check.Identity.Timeline != before.Identity.Timeline+1 ||
		check.Identity.SystemIdentifier != before.Identity.SystemIdentifier {
		t.Errorf("after the promotion: %+v, before %+v", check, before)
	}
	results, err := standby.Fence(t.Context(), "x", requests(scope, "r1", "r2"))
	if err != nil || results[0].Won || !results[1].Won {
		t.Errorf("fence on the new primary: %+v, %v", results, err)
	}
}

// startStandby clones the stack's server and starts the clone as its standby.
// promote returns when the clone takes writes.
func startStandby(t *testing.T, stack *devstack.Stack) (url string, promote func()) {
	t.Helper()
	dir, err := os.MkdirTemp("", "pgstore-standby-") //nolint:usetesting // PostgreSQL's account cannot enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	account := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 { // PostgreSQL refuses to be run by root
		postgres, err := user.Lookup("postgres")
		if err != nil {
			t.Fatal(err)
		}
		uid, _ := strconv.ParseUint(postgres.Uid, 10, 32)
		gid, _ := strconv.ParseUint(postgres.Gid, 10, 32)
		account.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		if err := os.Chown(dir, int(uid), int(gid)); err != nil {
			t.Fatal(err)
		}
	}
	data := filepath.Join(dir, "data")
	port := strconv.Itoa(freePort(t))
	command := func(name string, args ...string) *osexec.Cmd {
		cmd := osexec.Command(postgresBinary(t, name), args...)
		cmd.Dir, cmd.SysProcAttr = dir, account
		return cmd
	}
	run := func(name string, args ...string) {
		t.Helper()
		if out, err := command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", name, err, out)
		}
	}
	source := "host=127.0.0.1 user=postgres port=" + strconv.Itoa(stack.Postgres().Port())
	run("pg_basebackup", "-D", data, "-d", source, "-R", "-X", "stream", "-c", "fast", "--no-sync")
	server := command("postgres", "-D", data, "-p", port, "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off",
		"-c", "max_connections=300", "-c", "max_wal_senders=4") // a standby may not have less than its primary
	var output bytes.Buffer
	server.Stdout, server.Stderr = &output, &output
	started, ended := make(chan error, 1), make(chan struct{})
	go func() {
		runtime.LockOSThread() // Pdeathsig follows the thread that started it
		defer runtime.UnlockOSThread()
		defer close(ended)
		err := server.Start()
		started <- err
		if err == nil {
			_ = server.Wait() // it is killed at the end
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGQUIT) // at once
		<-ended
	})
	for osexec.Command(postgresBinary(t, "pg_isready"), "-q", "-h", "127.0.0.1", "-p", port).Run() != nil {
		select {
		case <-ended:
			t.Fatalf("the standby ended:\n%s", output.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
	return "postgres://test_seckill_daemon@127.0.0.1:" + port + "/postgres?sslmode=disable",
		func() { run("pg_ctl", "promote", "-w", "-D", data) }
}

// postgresBinary finds a program beside the newest installed server.
func postgresBinary(t *testing.T, name string) string {
	t.Helper()
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if err != nil || len(found) == 0 {
		t.Fatalf("no %s in /usr/lib/postgresql: %v", name, err)
	}
	slices.Sort(found)
	return found[len(found)-1]
}

func freePort(t *testing.T) int {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	address, ok := listener.Addr().(*net.TCPAddr)
	if !ok {
		t.Fatalf("%v is no TCP address", listener.Addr())
	}
	return address.Port
}

func TestServerTime(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	first, err := db.store.ServerTime(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	second, err := db.store.ServerTime(t.Context())
	if err != nil || !second.After(first) || first.Location() != time.UTC {
		t.Errorf("%v after %v, %v", second, first, err)
	}
}
