package console_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/admin"
	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/console"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/lifecycle"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

func TestMain(m *testing.M) {
	// The RocketMQ client's own cache starts one when the package is loaded; the
	// client leaves others behind when it is shut down.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/patrickmn/go-cache.(*janitor).Run"),
		goleak.IgnoreAnyFunction("github.com/apache/rocketmq-client-go/v2/primitive.WithRecover"))
}

const (
	readToken   = "a-token-that-reads"
	changeToken = "a-token-that-changes"
)

func hashed(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// shop is a sale of two buckets with a console over it, on real services.
type shop struct {
	t      *testing.T
	spec   lifecycle.Spec
	daemon *daemon.Daemon
	redis  redis.UniversalClient
	db     *pgxpool.Pool // as the superuser
	base   string        // of the console's addresses
	ids    []string

	operator string // the login of an operator
}

func newShop(t *testing.T) *shop {
	t.Helper()
	stack := stacktest.Shared(t)
	database := stacktest.Database(t, stack)
	topic, group := stacktest.Topic(t, stack, 2)
	c := config.Default()
	c.Mode = config.ModeAct
	c.Redis.Addrs = []string{stack.Redis().Addr()}
	c.Postgres.URL = stacktest.LoginURL(t, stack, database, "seckill_daemon")
	c.RocketMQ.NameServers = []string{stack.NameServer().Addr()}
	c.RocketMQ.Topic, c.RocketMQ.ConsumerGroup = topic, group
	c.Scanner.SendGrace, c.Fencer.Settle, c.Reconcile.Settle = time.Millisecond, time.Millisecond, time.Millisecond
	c.Admin.ReadTokenSHA256, c.Admin.ChangeTokenSHA256 = hashed(readToken), hashed(changeToken)
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	s := &shop{t: t}
	var err error
	if s.db, err = pgxpool.New(t.Context(), database); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.db.Close)
	s.redis = redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{Addrs: c.Redis.Addrs}))
	t.Cleanup(func() { _ = s.redis.Close() })
	s.daemon, err = daemon.Open(t.Context(), daemon.Options{Config: c, Logger: slog.New(slog.DiscardHandler), Metrics: observe.NewMetrics("test")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.daemon.Close(context.WithoutCancel(t.Context())) })
	s.operator = stacktest.LoginURL(t, stack, database, "seckill_operator")
	s.spec = s.sell(7, 200, 2)
	s.serve(c)
	return s
}

// sell makes a sale as an operator does.
func (s *shop) sell(version, total, buckets int64) lifecycle.Spec {
	s.t.Helper()
	registry, err := pgstore.Open(s.t.Context(), pgstore.Config{URL: s.operator})
	if err != nil {
		s.t.Fatal(err)
	}
	defer registry.Close()
	scope, now := stacktest.Scope(s.t), time.Now()
	spec := lifecycle.Spec{
		ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: version, Total: total, Buckets: buckets,
		StartsAt: now.Add(-time.Minute), EndsAt: now.Add(time.Hour), Retention: time.Hour,
	}
	if err := (&lifecycle.Manager{Redis: s.daemon.Redis, Registry: registry}).Create(s.t.Context(), spec, "test"); err != nil {
		s.t.Fatal(err)
	}
	return spec
}

func (s *shop) serve(c config.Config) {
	s.t.Helper()
	auth, err := console.NewAuth(c.Admin)
	if err != nil {
		s.t.Fatal(err)
	}
	pages, err := console.New(console.Options{Daemon: s.daemon, Auth: auth, Hasher: observe.NewUserHasher("key"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		s.t.Fatal(err)
	}
	server := admin.New(admin.Options{Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler)})
	pages.Register(server)
	if err := server.Start(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = server.Stop(context.WithoutCancel(s.t.Context())) })
	s.base = "http://" + server.Addr()
}

// scopeOf is the user's bucket.
func (s *shop) scopeOf(user string) reservation.Scope {
	return s.spec.Scopes()[reservation.BucketOf(s.spec.ActivityID, s.spec.SKUID, user, s.spec.Buckets)]
}

// reserve makes a reservation of the user, which expires at once.
func (s *shop) reserve(user string) string {
	s.t.Helper()
	runner, err := lua.NewRunner(s.redis)
	if err != nil {
		s.t.Fatal(err)
	}
	id := reservation.NewID([]byte("secret"), s.spec.ActivityID, s.spec.SKUID, user, "q-"+user)
	b := runner.Batch()
	r := b.Reserve(s.scopeOf(user), lua.ReserveArgs{
		RequestID: "q-" + user, ReservationID: id, UserID: user, TTLMS: 1, SchemaVersion: 1, MessageID: reservation.MessageID(id),
	})
	if err := b.Run(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
	if reply, err := r.Get(); err != nil || reply.Code != lua.ReserveAccepted {
		s.t.Fatalf("reserve: %+v, %v", reply, err)
	}
	s.ids = append(s.ids, id)
	return id
}

// orphan is a reservation whose hash is gone, with the task that the daemon
// opened for it, and a comparison that found it.
func (s *shop) orphan() (id string, task int64) {
	s.t.Helper()
	id = s.reserve("orphan-user")
	if err := s.redis.Del(s.t.Context(), s.scopeOf("orphan-user").ReservationKey(id)).Err(); err != nil {
		s.t.Fatal(err)
	}
	s.daemon.Once(s.t.Context())
	tasks, err := s.daemon.Postgres.Tasks(s.t.Context(), pgstore.TaskFilter{Kinds: []string{"orphan_member"}, States: pgstore.Unresolved})
	if err != nil || len(tasks) != 1 {
		s.t.Fatalf("tasks of orphans: %v, %v; want one", tasks, err)
	}
	return id, tasks[0].ID
}

// visitor is a browser, or a program where it has a token.
type visitor struct {
	s      *shop
	client *http.Client
	header http.Header
}

func (s *shop) browser(token string) *visitor {
	s.t.Helper()
	v := s.stranger()
	status, body, _ := v.post("/login", url.Values{"token": {token}, "actor": {"alice"}})
	if status != http.StatusOK || !strings.Contains(body, "alice") {
		s.t.Fatalf("signing in: %d\n%s", status, body)
	}
	return v
}

func (s *shop) stranger() *visitor {
	jar, err := cookiejar.New(nil)
	if err != nil {
		s.t.Fatal(err)
	}
	transport := &http.Transport{}
	s.t.Cleanup(transport.CloseIdleConnections)
	return &visitor{s: s, client: &http.Client{Jar: jar, Transport: transport, Timeout: time.Minute}, header: http.Header{}}
}

func (s *shop) program(token string) *visitor {
	v := s.stranger()
	v.client.Jar = nil
	v.header.Set("Authorization", "Bearer "+token)
	v.header.Set(admin.ActorHeader, "ci")
	return v
}

func (v *visitor) do(method, path, contentType string, body []byte) (int, string, http.Header) {
	v.s.t.Helper()
	r, err := http.NewRequestWithContext(v.s.t.Context(), method, v.s.base+path, bytes.NewReader(body))
	if err != nil {
		v.s.t.Fatal(err)
	}
	maps.Copy(r.Header, v.header)
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	answer, err := v.client.Do(r)
	if err != nil {
		v.s.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		v.s.t.Fatal(err)
	}
	return answer.StatusCode, string(text), answer.Header
}

func (v *visitor) get(path string) (int, string, http.Header) {
	return v.do(http.MethodGet, path, "", nil)
}

func (v *visitor) post(path string, form url.Values) (int, string, http.Header) {
	return v.do(http.MethodPost, path, "application/x-www-form-urlencoded", []byte(form.Encode()))
}

// call is a request of the API, whose answer is one JSON object.
func (v *visitor) call(method, path string, fields map[string]string) (int, map[string]any) {
	v.s.t.Helper()
	var body []byte
	kind := ""
	if fields != nil {
		body = encode(v.s.t, fields)
		kind = "application/json"
	}
	status, text, _ := v.do(method, path, kind, body)
	var value map[string]any
	if err := json.Unmarshal([]byte(text), &value); err != nil {
		v.s.t.Fatalf("%s %s: %v in %s", method, path, err, text)
	}
	return status, value
}

func encode(t *testing.T, fields map[string]string) []byte {
	t.Helper()
	body, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	return body
}

var formToken = regexp.MustCompile(`name="form_token" value="([A-Z0-9]+)"`)

// submit sends a form of a page, with the hidden fields that it has.
func (v *visitor) submit(page, to string, form url.Values) (int, string) {
	v.s.t.Helper()
	_, body, _ := v.get(page)
	if m := formToken.FindStringSubmatch(body); m != nil {
		form.Set("form_token", m[1])
	}
	if m := regexp.MustCompile(`name="fingerprint" value="([0-9a-f]+)"`).FindStringSubmatch(body); m != nil {
		form.Set("fingerprint", m[1])
	}
	status, text, _ := v.post(to, form)
	return status, text
}

func (s *shop) versionPath() string {
	return fmt.Sprintf("/scopes/%s/%s/%d", s.spec.ActivityID, s.spec.SKUID, s.spec.Version)
}

// audited says whether the audit trail has the action in the name of the actor.
func (s *shop) audited(action, actor string) bool {
	s.t.Helper()
	var n int
	if err := s.db.QueryRow(s.t.Context(), `SELECT count(*) FROM seckill.audit_log WHERE action = $1 AND actor = $2`, action, actor).Scan(&n); err != nil {
		s.t.Fatal(err)
	}
	return n > 0
}
