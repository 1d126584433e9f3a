package daemon_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// lockedBuffer is a buffer that a daemon writes to while a test reads.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// logFields are the names that a line may have: slog's own, those of spec §7, and
// those of jobs and services.
var logFields = []string{
	slog.TimeKey, slog.LevelKey, slog.MessageKey,
	observe.FieldRequestID, observe.FieldReservationID, observe.FieldMessageID, observe.FieldActivityID, observe.FieldSKUID,
	observe.FieldUserIDHash, observe.FieldActivityVersion, observe.FieldBucketID, observe.FieldRedisSlot, observe.FieldLuaCode,
	observe.FieldReservationStatus, observe.FieldRedisNode, observe.FieldLatencyMS, observe.FieldRetryCount, observe.FieldTraceID,
	"job", "items", "outcome", "error", "stack", "reason", "mode", "address", "holder", "since", "component",
	"role", "count", "slowest", "messages", "brokers", "swept", "verdict", "findings", "run", "scopes", "check", "run_id",
}

// TestLog runs a daemon that logs JSON at its most talkative over releases,
// orders and failures: no user's id, no secret, no name that is not agreed, and
// one line for each change.
func TestLog(t *testing.T) {
	const secret = "hunter2"
	out := &lockedBuffer{}
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) {
		hurried(c)
		c.Reconcile.Quick = "* * * * * *"
		c.RocketMQ.AccessKey, c.RocketMQ.SecretKey = "access", secret+"-mq"
		c.Postgres.URL = strings.Replace(c.Postgres.URL, "@", ":"+secret+"-pg@", 1)
		c.Observe.UserHashKey = secret + "-hash"
	})
	reserve := func(i int, walk ...reservation.Status) string {
		user := fmt.Sprintf("customer-of-the-sale-%d", i)
		request := fmt.Sprint("q", i)
		id := reservation.NewID([]byte("secret"), s.scope.ActivityID, s.scope.SKUID, user, request)
		b := s.runner.Batch()
		b.Reserve(s.scope, lua.ReserveArgs{RequestID: request, ReservationID: id, UserID: user, TTLMS: 1, SchemaVersion: 1, MessageID: reservation.MessageID(id)})
		s.run(b)
		s.walk(id, walk...)
		return id
	}
	released := []string{
		reserve(1, reservation.StatusEnqueued, reservation.StatusRejected), reserve(2, reservation.StatusEnqueued, reservation.StatusRejected),
		reserve(3, reservation.StatusReleasePending),
	}
	confirmed := reserve(4, reservation.StatusReleasePending)
	s.mustOrder(confirmed)
	advanced := reserve(5, reservation.StatusEnqueued)
	s.mustOrder(advanced)
	malformed := reserve(6)
	if err := s.redis.HDel(t.Context(), s.scope.ReservationKey(malformed), "message_id").Err(); err != nil {
		t.Fatal(err)
	}

	log, err := observe.NewLogger(out, "json", slog.LevelDebug)
	if err != nil {
		t.Fatal(err)
	}
	d := s.open(func(o *daemon.Options) { o.Logger = log })
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	s.eventually(time.Minute, func() error {
		for _, id := range released {
			if got := s.status(id); got != reservation.StatusReleased {
				return fmt.Errorf("%s is %s", id, got)
			}
		}
		for _, id := range []string{confirmed, advanced} {
			if got := s.status(id); got != reservation.StatusOrderCreated {
				return fmt.Errorf("%s is %s", id, got)
			}
		}
		return nil
	})
	time.Sleep(time.Second) // what repeats itself has time to
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}

	given := map[string]int{}
	for line := range strings.Lines(out.String()) {
		var fields map[string]any
		if err := json.Unmarshal([]byte(line), &fields); err != nil {
			t.Fatalf("%v in %s", err, line)
		}
		fromLibrary := fields["component"] != nil // its fields are its own, at level debug
		for name := range fields {
			if !slices.Contains(logFields, name) && !fromLibrary {
				t.Errorf("the field %s is not agreed: %s", name, line)
			}
		}
		for _, forbidden := range []string{secret, "customer-of-the-sale"} {
			if strings.Contains(line, forbidden) {
				t.Errorf("%q is in the log: %s", forbidden, line)
			}
		}
		if fields["msg"] != "unit given back" {
			continue
		}
		id, _ := fields[observe.FieldReservationID].(string)
		given[id]++
		for _, name := range []string{
			observe.FieldMessageID, observe.FieldActivityID, observe.FieldSKUID, observe.FieldActivityVersion, observe.FieldBucketID, observe.FieldRedisSlot,
			observe.FieldRedisNode, observe.FieldLuaCode, observe.FieldReservationStatus, observe.FieldLatencyMS, observe.FieldUserIDHash,
		} {
			if fields[name] == nil {
				t.Errorf("%s is missing: %s", name, line)
			}
		}
	}
	want := map[string]int{released[0]: 1, released[1]: 1, released[2]: 1}
	if diff := cmp.Diff(want, given); diff != "" {
		t.Errorf("lines of units that were given back, -want +got:\n%s", diff)
	}
}

// TestSlot compares with what a cluster says.
func TestSlot(t *testing.T) {
	for _, target := range stacktest.RedisTargets(t) {
		if !target.Cluster {
			continue
		}
		for range 20 {
			scope := stacktest.Scope(t)
			want, err := target.Client(t).ClusterKeySlot(t.Context(), scope.MetaKey()).Result()
			if got := observe.Slot(scope); err != nil || int64(got) != want {
				t.Fatalf("%s: slot %d, want %d, %v", scope, got, want, err)
			}
		}
	}
}
