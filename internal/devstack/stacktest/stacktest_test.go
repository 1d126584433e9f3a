package stacktest_test

import (
	"cmp"
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
)

func TestRedisTargetsAnswer(t *testing.T) {
	t.Parallel()
	for _, target := range stacktest.RedisTargets(t) {
		t.Run(target.Name, func(t *testing.T) {
			t.Parallel()
			if want := strings.TrimSuffix(target.Name, "-standalone"); !strings.HasPrefix(target.Version, strings.TrimSuffix(want, "-cluster")) {
				t.Errorf("version %s", target.Version)
			}
			client := target.Client(t)
			key := stacktest.Scope(t).StockKey()
			if err := client.HSet(t.Context(), key, "available", 7).Err(); err != nil {
				t.Fatal(err)
			}
			got, err := client.HGet(t.Context(), key, "available").Int()
			if err != nil || got != 7 {
				t.Errorf("read back %d, %v", got, err)
			}
			info, err := client.Info(t.Context(), "cluster").Result()
			if err != nil || strings.Contains(info, "cluster_enabled:1") != target.Cluster {
				t.Errorf("cluster mode: %q, %v", info, err)
			}
		})
	}
}

func TestDatabasesAreApart(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	for range 2 {
		url := stacktest.Database(t, stack)
		exec(t, url, "CREATE TABLE only_mine ()")
		exec(t, url, "SELECT FROM seckill.reservation_claim, shop.orders")
	}
	empty := connect(t, stacktest.EmptyDatabase(t, stack))
	var schemas int
	err := empty.QueryRow(t.Context(), "SELECT count(*) FROM pg_namespace WHERE nspname IN ('seckill', 'shop')").Scan(&schemas)
	if err != nil || schemas != 0 {
		t.Errorf("an empty database has %d schemas of ours, %v", schemas, err)
	}
}

func TestLoginHasOnlyTheGroupsRights(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	url := stacktest.Database(t, stack)
	login := stacktest.LoginURL(t, stack, url, "seckill_consumer")
	exec(t, url, "CREATE TABLE secret ()")
	conn := connect(t, login)
	if _, err := conn.Exec(t.Context(), "SELECT FROM secret"); err == nil || !strings.Contains(err.Error(), "42501") {
		t.Errorf("reading a table without a grant: %v, want SQLSTATE 42501", err)
	}
	exec(t, url, "GRANT SELECT ON secret TO seckill_consumer")
	if _, err := conn.Exec(t.Context(), "SELECT FROM secret"); err != nil {
		t.Errorf("reading a table that the group may read: %v", err)
	}
}

func TestTopicIsRoutedToAllBrokers(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	topic, group := stacktest.Topic(t, stack, 2)
	other, _ := stacktest.Topic(t, stack, 2)
	if topic == other || group == "" {
		t.Errorf("topics %q and %q, group %q", topic, other, group)
	}
	// Creating it again is harmless, and returns only once it is routed.
	if err := stack.CreateTopic(t.Context(), topic, 2); err != nil {
		t.Error(err)
	}
}

func TestSharedServicesCannotBeBroken(t *testing.T) {
	t.Parallel()
	for _, svc := range stacktest.Shared(t).Services() {
		if err := svc.Kill(); err == nil {
			t.Fatalf("%s of the shared stack was killed", svc.Name())
		}
	}
	if slices.ContainsFunc(stacktest.RedisTargets(t), func(r stacktest.RedisTarget) bool { return len(r.Addrs) == 0 }) {
		t.Error("a target without addresses")
	}
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func exec(t *testing.T, url, sql string) {
	t.Helper()
	if _, err := connect(t, url).Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// A slow test of another name would be run by neither `make test` nor `make
// test-slow`, and nobody would notice.
func TestSlowTestsHaveTheNameThatMakeRuns(t *testing.T) {
	root, err := devstack.ModuleRoot()
	if err != nil {
		t.Fatal(err)
	}
	slow := regexp.MustCompile(`(?m)^//go:build .*\bslow\b`)
	test := regexp.MustCompile(`(?m)^func (Test\w+)\(\w+ \*testing\.T\)`)
	files := 0
	err = filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || path != root && entry.IsDir() && strings.HasPrefix(entry.Name(), ".") {
			return cmp.Or(err, fs.SkipDir)
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil || !slow.Match(source) {
			return err
		}
		files++
		for _, name := range test.FindAllSubmatch(source, -1) {
			if !strings.HasPrefix(string(name[1]), "TestSlow") && string(name[1]) != "TestMain" {
				t.Errorf("%s: %s has the build tag slow but not a name that begins with TestSlow", path, name[1])
			}
		}
		return nil
	})
	if err != nil || files == 0 {
		t.Errorf("looked at %d slow files, %v", files, err)
	}
}
