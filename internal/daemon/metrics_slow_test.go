//go:build slow

package daemon_test

import (
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reservation"
)

// TestSlowEveryMetric: on servers that are set up as a production has them, and
// with a broker that has gone, each documented metric is exported, those that
// are rare included.
func TestSlowEveryMetric(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{
		Redis: true, Cluster: true, Postgres: true, Brokers: 2,
		RedisArgs: []string{"--maxmemory", "256mb", "--min-replicas-to-write", "1", "--latency-monitor-threshold", "1"},
	})
	hook := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }))
	defer hook.Close()
	s, address := observedSale(t, stack, func(c *config.Config) {
		c.Notify.Webhook.URL = hook.URL
		c.Notify.Webhook.Every = time.Second
	})
	for _, node := range stack.Cluster() {
		server := redis.NewClient(&redis.Options{Addr: node.Addr(), ReadTimeout: 10 * time.Second})
		if err := server.Do(t.Context(), "debug", "sleep", "0.05").Err(); err != nil { // a latency event
			t.Fatal(err)
		}
		_ = server.Close() // nothing is in flight
	}
	if err := stack.Brokers()[1].Kill(); err != nil {
		t.Fatal(err)
	}
	s.expired(reservation.StatusEnqueued) // its evidence is unknown
	rows := readMetricsPage(t)
	s.awaitExported(address, func(string) bool { return true }, slices.Collect(maps.Keys(rows)))
}
