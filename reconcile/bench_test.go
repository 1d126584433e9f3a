package reconcile_test

import (
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// fill makes a scope of so many orders that are done, and of reservations that
// wait, as they look once the scripts and the consumer have been there.
func (s *sale) fill(sold, waiting int) {
	s.t.Helper()
	ctx := s.t.Context()
	for _, scope := range s.scopes {
		s.exec(`INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
			SELECT format('o-%s-%s', $4::bigint, i), format('r-%s-%s', $4, i), 'q', $1, $2, $3, $4, format('u-%s-%s', $4, i)
			FROM generate_series(1, $5::bigint) AS i`, scope.ActivityID, scope.SKUID, scope.Version, scope.Bucket, sold)
		_, err := s.redis.Pipelined(ctx, func(p redis.Pipeliner) error {
			members := make([]redis.Z, waiting)
			for i := range members {
				members[i] = redis.Z{Score: float64(i), Member: fmt.Sprintf("w-%d-%d", scope.Bucket, i)}
			}
			p.ZAdd(ctx, scope.IndexKey(reservation.ReservationExpiry), members...)
			p.HSet(ctx, scope.StockKey(), "initial", sold+waiting+7, "reserved", sold+waiting, "available", 7)
			return nil
		})
		if err != nil {
			s.t.Fatal(err)
		}
	}
	s.exec(`ANALYZE shop.orders`)
}

// BenchmarkQuick compares 8 scopes, beside the bare reads of the same keys and
// rows: the snapshots, the members and the count, without any comparison.
func BenchmarkQuick(b *testing.B) {
	const waiting = 200
	for _, sold := range []int{100, 1000, 10000} {
		stack := stacktest.Shared(b)
		s := newSale(b, stack, []string{stack.Redis().Addr()}, 8)
		s.fill(sold, waiting)
		o := reconcile.Options{Checks: []string{reconcile.CheckInvariantBroken, reconcile.CheckCountDrift}}
		b.Run(fmt.Sprintf("sold=%d", sold), func(b *testing.B) {
			peak, stop := watchHeap()
			for b.Loop() {
				if r := s.run(o); r.Summary[reconcile.CheckCountDrift] != 0 || len(r.Incomplete) != 0 {
					b.Fatalf("%v", short(r))
				}
			}
			stop()
			b.ReportMetric(float64(peak.Load())/(1<<20), "MiB-peak")
			b.ReportMetric(float64(len(s.scopes)*b.N)/b.Elapsed().Seconds(), "scopes/s")
			b.ReportMetric(float64(len(s.scopes)*(sold+waiting)*b.N)/b.Elapsed().Seconds(), "reservations/s")
		})
		b.Run(fmt.Sprintf("bare/sold=%d", sold), func(b *testing.B) {
			for b.Loop() {
				s.bare()
			}
			b.ReportMetric(float64(len(s.scopes)*b.N)/b.Elapsed().Seconds(), "scopes/s")
		})
	}
}

func (s *sale) bare() {
	ctx := s.t.Context()
	for _, snapshot := range s.stocks.Snapshots(ctx, s.scopes) {
		if snapshot.Err != nil || snapshot.Reserved == lua.Missing {
			s.t.Fatalf("%+v", snapshot)
		}
	}
	pipe := s.redis.Pipeline()
	cmds := make([]*redis.ScanCmd, len(s.scopes))
	for i, scope := range s.scopes {
		cmds[i] = pipe.ZScan(ctx, scope.IndexKey(reservation.ReservationExpiry), 0, "", 1000)
	}
	if _, err := pipe.Exec(ctx); err != nil {
		s.t.Fatal(err)
	}
	var orders int
	for _, cmd := range cmds {
		var ids []string
		members, _ := cmd.Val()
		for i := 0; i < len(members); i += 2 {
			ids = append(ids, members[i])
		}
		if err := s.db.QueryRow(ctx, `SELECT count(*) FROM seckill.order_evidence WHERE reservation_id = ANY ($1)`, ids).Scan(&orders); err != nil {
			s.t.Fatal(err)
		}
	}
	if err := s.db.QueryRow(ctx, `SELECT count(*) FROM seckill.order_evidence WHERE activity_id = $1 AND sku_id = $2 AND activity_version = $3`,
		s.scopes[0].ActivityID, s.scopes[0].SKUID, s.scopes[0].Version).Scan(&orders); err != nil {
		s.t.Fatal(err)
	}
}

// watchHeap samples the live heap until it is stopped.
func watchHeap() (peak *atomic.Uint64, stop func()) {
	peak = &atomic.Uint64{}
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for tick := time.NewTicker(5 * time.Millisecond); ; {
			select {
			case <-done:
				return
			case <-tick.C:
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				peak.Store(max(peak.Load(), m.HeapInuse))
			}
		}
	}()
	return peak, func() { close(done); <-ended }
}

// BenchmarkDeep looks at every reservation of a scope, half of which have
// orders, beside the bare reads of the same keys and rows: request shards,
// hashes, indexes, markers and results, claims and orders, each once, without
// any comparison.
func BenchmarkDeep(b *testing.B) {
	const n = 10_000
	stack := stacktest.Shared(b)
	s := newSale(b, stack, []string{stack.Redis().Addr()}, 1)
	s.do("hset", s.scopes[0].StockKey(), "initial", n, "available", n)
	s.exec(`UPDATE seckill.scope_allocation SET total = $2 WHERE activity_id = $1`, s.scopes[0].ActivityID, n)
	s.sell(n)
	b.Run("deep", func(b *testing.B) {
		o := reconcile.Options{Deep: true}
		for b.Loop() {
			if r := s.run(o); r.Verdict != reconcile.VerdictConsistent {
				b.Fatalf("%v", short(r))
			}
		}
		b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "reservations/s")
	})
	b.Run("bare", func(b *testing.B) {
		for b.Loop() {
			if got := s.bareMembers(); got != n {
				b.Fatalf("%d reservations", got)
			}
		}
		b.ReportMetric(float64(n*b.N)/b.Elapsed().Seconds(), "reservations/s")
	})
}

func (s *sale) bareMembers() int {
	ctx := s.t.Context()
	read := 0
	var queries []reconcile.MemberQuery
	flush := func() {
		if len(queries) == 0 {
			return
		}
		ids := make([]string, len(queries))
		for i, state := range s.stocks.MemberStates(ctx, queries) {
			if state.Err != nil {
				s.t.Fatal(state.Err)
			}
			ids[i] = state.ID
		}
		if _, err := s.orders.Records(ctx, ids); err != nil {
			s.t.Fatal(err)
		}
		read += len(ids)
		queries = queries[:0]
	}
	for shard := range reservation.RequestShards {
		reply := s.stocks.ResultPages(ctx, []reconcile.ShardRequest{{Scope: s.scopes[0], Shard: shard, Limit: 1000}})[0]
		for _, r := range reply.Results {
			queries = append(queries, reconcile.MemberQuery{
				Ref: reconcile.Ref{Scope: r.Scope, ID: strings.Split(r.Value, "|")[1]}, RequestID: r.RequestID,
			})
		}
		if len(queries) >= 1000 {
			flush()
		}
	}
	flush()
	return read
}

// sell makes reservations of which every second has an order.
func (s *sale) sell(n int) {
	s.t.Helper()
	for n > 0 {
		page := s.reserve(min(n, 2000))
		n -= len(page)
		ordered := page[:len(page)/2]
		ids, users, buckets := make([]string, len(ordered)), make([]string, len(ordered)), make([]int64, len(ordered))
		for i, b := range ordered {
			ids[i], users[i], buckets[i] = b.id, b.user, b.scope.Bucket
		}
		s.exec(`INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
			SELECT 'o-' || id, id, u, $4, $5, $6, b, u FROM unnest($1::text[], $2::text[], $3::bigint[]) AS t (id, u, b)`,
			ids, users, buckets, s.scopes[0].ActivityID, s.scopes[0].SKUID, s.scopes[0].Version)
		s.finish(ordered...)
	}
	s.exec(`ANALYZE`)
}
