//go:build bench

package client_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
)

var (
	benchRequests = flag.Int("requests", 40_000, "requests of each row")
	benchWorkers  = flag.Int("workers", 32, "requests at once")
	benchOut      = flag.String("table", "", "file that the table is written to, for example ../docs/bench-gateway.md")
)

// load is one row: a sale, and which request comes i-th.
type load struct {
	name    string
	addrs   []string
	buckets int64
	units   int64
	local   bool // with the local sold-out marker
	warm    int  // requests made before, for replays
	click   func(i, n int) (userID, request string)
}

func fresh(i, _ int) (userID, request string) { return user(i), "q-" + strconv.Itoa(i) }

const replayed = 2_000

// TestBenchGateway measures the loads of spec §8 through [client.Gateway], one
// request a call, with the contract's budget of 40 ms.
func TestBenchGateway(t *testing.T) {
	n, busy := *benchRequests, loadAverage()
	enough := int64(4 * n)
	stack := stacktest.Own(t, devstack.Options{Redis: true, Cluster: true}) // whose CPU nobody else uses
	one, cluster := []string{stack.Redis().Addr()}, stack.Cluster().Addrs()
	rows := []load{
		{name: "one slot", addrs: one, buckets: 1, units: enough, click: fresh},
		{name: "16 buckets, 3 masters", addrs: cluster, buckets: 16, units: enough, click: fresh},
		{name: "32 buckets, 3 masters", addrs: cluster, buckets: 32, units: enough, click: fresh},
		{
			name: "replays only", addrs: one, buckets: 1, units: enough, warm: replayed,
			click: func(i, _ int) (string, string) { return fresh(i%replayed, 0) },
		},
		{name: "90 % sold out", addrs: one, buckets: 1, units: int64(n / 10), click: fresh},
		{name: "90 % sold out, local marker", addrs: one, buckets: 1, units: int64(n / 10), local: true, click: fresh},
		{
			name: "50 % duplicates", addrs: one, buckets: 1, units: enough,
			click: func(i, n int) (string, string) { return fresh(i%(n/2), 0) },
		},
	}
	table := []string{
		"| load | requests/s | P50 ms | P95 | P99 | P99.9 | accepted | sold out (local) | unknown | busy | pool wait ms | Redis CPU µs | invariant | duplicates |",
		"|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
	}
	for _, row := range rows {
		line := row.run(t, n)
		table = append(table, line)
		t.Log(line)
	}
	if *benchOut == "" {
		return
	}
	text := fmt.Sprintf(`# Gateway under load

%d requests a row, %d at once, one call of `+"`Gateway.Reserve`"+` each, budget 40 ms. The client, Redis 8.2 and, for buckets, its six-node
cluster share %d cores of one machine, whose load average was %s before: above 0 it had other work, and the figures are that much too low.

Times are the caller's, and include the read of what was accepted. "unknown": nobody knows whether a unit was taken, and the user asks again;
"busy": other failures; "pool wait": per request; "Redis CPU": of all servers, per request; "invariant": initial = available + reserved, and as
many reserved as accepted, those of unknown outcome aside; "duplicates": users with two reservations.

Made by `+"`go test -tags bench -run '^TestBenchGateway$' ./client -args -table ../docs/bench-gateway.md`"+`.

%s
`, n, *benchWorkers, runtime.NumCPU(), busy, strings.Join(table, "\n"))
	if err := os.WriteFile(*benchOut, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (l load) run(t *testing.T, n int) string {
	t.Helper()
	s := at(t, l.addrs, len(l.addrs) > 1, l.buckets, l.units)
	rdb := s.connect(func(o *redis.UniversalOptions) {
		o.Dialer, o.PoolSize, o.PipelinePoolSize = nil, 2**benchWorkers, *benchWorkers
	})
	o := client.Options{Budget: 40 * time.Millisecond, SoldOutTTL: -1}
	if l.local {
		o.SoldOutTTL = 0
	}
	g := s.gateway(rdb, o)
	request := func(i int) client.Request {
		userID, id := l.click(i, n)
		return client.Request{ActivityID: s.ActivityID, SKUID: s.SKUID, UserID: userID, RequestID: id}
	}
	for i := range l.warm {
		if _, err := g.Reserve(t.Context(), request(i)); err != nil {
			t.Fatal(err)
		}
	}
	var next, accepted, soldOut, local, unknown, failed atomic.Int64
	var mu sync.Mutex
	byUser := map[string]string{} // reservation ids
	duplicates := 0
	took := make([]time.Duration, n)
	cpu, waited := s.cpu(), poolWait(rdb)
	began := time.Now()
	var wg sync.WaitGroup
	for range *benchWorkers {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				r := request(i)
				start := time.Now()
				result, err := g.Reserve(t.Context(), r)
				took[i] = time.Since(start)
				busy, _ := errors.AsType[*client.BusyError](err)
				switch {
				case busy != nil && busy.OutcomeUnknown:
					unknown.Add(1)
				case err != nil:
					failed.Add(1)
				case result.Accepted():
					accepted.Add(1)
					mu.Lock()
					if id := byUser[r.UserID]; id != "" && id != result.ReservationID {
						duplicates++
					}
					byUser[r.UserID] = result.ReservationID
					mu.Unlock()
				case result.Code == lua.ReserveSoldOut:
					soldOut.Add(1)
					if result.Local {
						local.Add(1)
					}
				}
			}
		})
	}
	wg.Wait()
	elapsed := time.Since(began)
	cpu, waited = s.cpu()-cpu, poolWait(rdb)-waited
	slices.Sort(took)
	quantile := func(q float64) string {
		return fmt.Sprintf("%.2f", float64(took[min(int(q*float64(n)), n-1)].Microseconds())/1000)
	}
	percent := func(v int64) string { return fmt.Sprintf("%.2f %%", 100*float64(v)/float64(n)) }
	return fmt.Sprintf("| %s | %.0f | %s | %s | %s | %s | %d | %d (%d) | %s | %s | %.3f | %.1f | %s | %d |",
		l.name, float64(n)/elapsed.Seconds(), quantile(.5), quantile(.95), quantile(.99), quantile(.999),
		accepted.Load(), soldOut.Load(), local.Load(), percent(unknown.Load()), percent(failed.Load()),
		float64(waited.Microseconds())/1000/float64(n), float64(cpu.Microseconds())/float64(n),
		s.invariant(l.units, int64(len(byUser)), unknown.Load()), duplicates)
}

// invariant checks the sums of the units in Redis.
func (s *sale) invariant(units, made, unknown int64) string {
	s.t.Helper()
	available, reserved := s.units()
	if available+reserved != units || reserved < made || reserved > made+unknown {
		s.t.Errorf("%d available and %d reserved of %d, %d were made and %d are unknown", available, reserved, units, made, unknown)
		return "BROKEN"
	}
	return "holds"
}

// cpu is the time that all servers of the sale have used.
func (s *sale) cpu() time.Duration {
	s.t.Helper()
	var sum float64
	for _, addr := range s.addrs {
		node := redis.NewClient(&redis.Options{Addr: addr})
		info, err := node.Info(s.t.Context(), "cpu").Result()
		s.must(errors.Join(err, node.Close()))
		for line := range strings.Lines(info) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
			if key == "used_cpu_sys" || key == "used_cpu_user" {
				seconds, err := strconv.ParseFloat(value, 64)
				s.must(err)
				sum += seconds
			}
		}
	}
	return time.Duration(sum * float64(time.Second))
}

// loadAverage is the system's over the last minute.
func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	average, _, ok := strings.Cut(string(text), " ")
	if err != nil || !ok {
		return "not known"
	}
	return average
}

func poolWait(rdb redis.UniversalClient) time.Duration {
	stats := rdb.PoolStats()
	wait := stats.WaitDurationNs
	if p := stats.PipelineStats; p != nil {
		wait += p.WaitDurationNs
	}
	return time.Duration(wait)
}
