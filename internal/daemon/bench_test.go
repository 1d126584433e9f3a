//go:build bench

package daemon_test

import (
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Sizes of the benchmark: reservations in each stage, and in one page.
const (
	benchItems = 20_000
	benchBatch = 256
	// leastRatio is what the daemon must reach of the bare composite's rate.
	leastRatio = 0.5
)

// stage is one kind of work, prepared for the daemon and for the composite.
type stage struct {
	name      string
	ttl       time.Duration // an hour keeps the fencer away from what the scanner does
	prepare   func(s *sale, ids []string)
	composite func(b *bare)
	want      reservation.Status
}

// TestBench measures each stage of the daemon beside a bare composite: a loop
// without logic that makes the same round trips on as many items of the same
// kind, in the same run, on a scope of its own. Only the ratio is judged, since
// machines differ.
func TestBench(t *testing.T) {
	stages := []stage{
		{"re-send", time.Hour, func(*sale, []string) {}, (*bare).resend, reservation.StatusEnqueued},
		{"settle", time.Millisecond, (*sale).ordersFor, (*bare).settle, reservation.StatusOrderCreated},
		{"compensate", time.Millisecond, (*sale).releasing, (*bare).compensate, reservation.StatusReleased},
	}
	report := table.NewWriter()
	report.SetTitle(fmt.Sprintf("%d reservations of one scope in pages of %d", benchItems, benchBatch))
	report.AppendHeader(table.Row{"stage", "daemon items/s", "composite items/s", "ratio"})
	for _, st := range stages {
		daemonRate, compositeRate := st.measure(t)
		ratio := daemonRate / compositeRate
		report.AppendRow(table.Row{st.name, int(daemonRate), int(compositeRate), strconv.FormatFloat(ratio, 'f', 2, 64)})
		if ratio < leastRatio {
			t.Errorf("%s: the daemon reaches %.2f of the composite's rate, want %.2f", st.name, ratio, leastRatio)
		}
	}
	fmt.Fprintln(os.Stdout, report.Render())
}

func (st stage) measure(t *testing.T) (daemonRate, compositeRate float64) {
	t.Helper()
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) {
		c.Fencer.MaxRelease.Min = benchItems
		c.Scanner.Batch, c.Fencer.Batch, c.Compensator.Batch = benchBatch, benchBatch, benchBatch
		c.Scanner.PassItems, c.Fencer.PassItems, c.Compensator.PassItems = 10*benchItems, 10*benchItems, 10*benchItems
		c.Scanner.PassLimit, c.Fencer.PassLimit, c.Compensator.PassLimit = time.Minute, time.Minute, time.Minute
		c.RocketMQ.SendRate = 1e6
	})
	d := s.open()
	d.Once(t.Context()) // connections and scripts are there
	b := newBare(s)

	ids := s.many(benchItems, st.ttl)
	st.prepare(s, ids)
	due()
	began := time.Now()
	d.Once(t.Context())
	daemonRate = benchItems / time.Since(began).Seconds()
	s.wantAll(ids, st.want)

	// The composite has a scope of its own, which the daemon never saw.
	b.sale.scope = stacktest.Scope(t)
	b.sale.register(benchItems)
	ids = b.sale.many(benchItems, st.ttl)
	st.prepare(b.sale, ids)
	due()
	began = time.Now()
	st.composite(b)
	compositeRate = benchItems / time.Since(began).Seconds()
	b.sale.wantAll(ids, st.want)
	return daemonRate, compositeRate
}

// many makes n reservations that are due to be sent, and due to be checked
// after ttl.
func (s *sale) many(n int, ttl time.Duration) []string {
	s.t.Helper()
	s.exec(`UPDATE shop.stock SET total = $1`, 10*n)
	s.redis.HSet(s.t.Context(), s.scope.StockKey(), "initial", n, "available", n, "reserved", 0)
	ids := make([]string, n)
	for from := 0; from < n; from += 1000 {
		b := s.runner.Batch()
		for i := from; i < min(from+1000, n); i++ {
			user, request := fmt.Sprint("m", i), fmt.Sprint(s.scope.ActivityID, "-", i)
			ids[i] = reservation.NewID([]byte("secret"), s.scope.ActivityID, s.scope.SKUID, user, request)
			b.Reserve(s.scope, lua.ReserveArgs{
				RequestID: request, ReservationID: ids[i], UserID: user, TTLMS: ttl.Milliseconds(), SchemaVersion: 1,
				MessageID: reservation.MessageID(ids[i]),
			})
		}
		s.run(b)
	}
	return ids
}

// ordersFor marks the reservations sent and gives each its order, which Redis
// does not know of.
func (s *sale) ordersFor(ids []string) {
	s.t.Helper()
	s.walkAll(ids, reservation.StatusEnqueued)
	s.exec(`
		INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
		SELECT 'o-' || id, id, $2 || '-' || (n - 1), $2, $3, $4, $5, 'm' || (n - 1)
		FROM unnest($1::text[]) WITH ORDINALITY AS t (id, n)`,
		ids, s.scope.ActivityID, s.scope.SKUID, s.scope.Version, s.scope.Bucket)
}

// releasing marks the reservations to be released.
func (s *sale) releasing(ids []string) { s.walkAll(ids, reservation.StatusReleasePending) }

func (s *sale) walkAll(ids []string, to reservation.Status) {
	s.t.Helper()
	b := s.runner.Batch()
	for _, id := range ids {
		b.Transition(s.scope, lua.TransitionArgs{ReservationID: id, Target: to})
	}
	s.run(b)
}

func (s *sale) wantAll(ids []string, want reservation.Status) {
	s.t.Helper()
	counts := map[string]int{}
	for from := 0; from < len(ids); from += 1000 {
		pipe := s.redis.Pipeline()
		var cmds []*redis.StringCmd
		for _, id := range ids[from:min(from+1000, len(ids))] {
			cmds = append(cmds, pipe.HGet(s.t.Context(), s.scope.ReservationKey(id), "status"))
		}
		if _, err := pipe.Exec(s.t.Context()); err != nil {
			s.t.Fatal(err)
		}
		for _, cmd := range cmds {
			counts[cmd.Val()]++
		}
	}
	if counts[string(want)] != len(ids) {
		s.t.Fatalf("statuses %v, want %d %s", counts, len(ids), want)
	}
}

// bare makes the round trips of a stage and nothing else: it looks at no
// reply, and would be wrong on any input but this one.
type bare struct {
	sale   *sale
	sender *rocketmq.Sender
}

func newBare(s *sale) *bare {
	s.t.Helper()
	sender, err := rocketmq.NewSender(rocketmq.Config{
		NameServers: s.config.RocketMQ.NameServers, Topic: s.config.RocketMQ.Topic, ConsumerGroup: s.config.RocketMQ.ConsumerGroup,
		SendRate: s.config.RocketMQ.SendRate, SendTimeout: s.config.RocketMQ.SendTimeout, SendConcurrency: s.config.RocketMQ.SendConcurrency,
		DialTimeout: s.config.RocketMQ.DialTimeout,
	}, slog.New(slog.DiscardHandler))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = sender.Close(s.t.Context()) })
	own := *s
	return &bare{sale: &own, sender: sender}
}

// pages reads the index page by page with the hashes, asks PostgreSQL for each
// page, and hands the ids and users over.
func (b *bare) pages(index reservation.Index, do func(ids, users []string)) {
	s, ctx := b.sale, b.sale.t.Context()
	for {
		now := s.redis.Time(ctx).Val().UnixMilli()
		ids := s.redis.ZRangeArgs(ctx, redis.ZRangeArgs{
			Key: s.scope.IndexKey(index), ByScore: true, Start: "-inf", Stop: strconv.FormatInt(now, 10), Count: benchBatch,
		}).Val()
		if len(ids) == 0 {
			return
		}
		pipe := s.redis.Pipeline()
		var hashes []*redis.SliceCmd
		for _, id := range ids {
			hashes = append(hashes, pipe.HMGet(ctx, s.scope.ReservationKey(id), reservation.Fields...))
			pipe.ZScore(ctx, s.scope.IndexKey(reservation.SendPending), id)
			pipe.ZScore(ctx, s.scope.IndexKey(reservation.ReservationExpiry), id)
		}
		_, _ = pipe.Exec(ctx)
		users := make([]string, len(ids))
		for i, h := range hashes {
			users[i], _ = h.Val()[5].(string)
		}
		b.evidence(ids)
		do(ids, users)
	}
}

func (b *bare) evidence(ids []string) {
	rows, err := b.sale.db.Query(b.sale.t.Context(), `
		SELECT w.id, c.outcome, c.order_id, o.order_id, o.user_id, o.active
		FROM unnest($1::text[]) AS w (id)
		LEFT JOIN seckill.reservation_claim AS c ON c.reservation_id = w.id
		LEFT JOIN (SELECT reservation_id, order_id, user_id, active FROM seckill.order_evidence WHERE reservation_id = ANY ($1)) AS o ON o.reservation_id = w.id`, ids)
	if err != nil {
		b.sale.t.Fatal(err)
	}
	for rows.Next() {
		if _, err := rows.Values(); err != nil {
			b.sale.t.Fatal(err)
		}
	}
	rows.Close()
}

func (b *bare) resend() {
	s := b.sale
	b.pages(reservation.SendPending, func(ids, users []string) {
		batch := s.runner.Batch()
		for _, id := range ids {
			batch.RecordSend(s.scope, lua.RecordSendArgs{ReservationID: id, Expected: reservation.StatusReserved, Kind: lua.SendFirst})
		}
		s.run(batch)
		outgoing := make([]rocketmq.Outgoing, len(ids))
		for i, id := range ids {
			body, _ := reservation.NewOrderMessage(reservation.Reservation{ID: id, MessageID: reservation.MessageID(id), UserID: users[i]}).Marshal()
			outgoing[i] = rocketmq.Outgoing{MessageID: reservation.MessageID(id), Body: body}
		}
		results := b.sender.Send(s.t.Context(), outgoing)
		batch = s.runner.Batch()
		for i, id := range ids {
			batch.Transition(s.scope, lua.TransitionArgs{ReservationID: id, Target: reservation.StatusEnqueued, Position: results[i].Position})
		}
		s.run(batch)
	})
}

func (b *bare) settle() {
	s := b.sale
	b.pages(reservation.ReservationExpiry, func(ids, _ []string) {
		batch := s.runner.Batch()
		for _, id := range ids {
			batch.Transition(s.scope, lua.TransitionArgs{ReservationID: id, Target: reservation.StatusOrderCreated, OrderID: "o-" + id})
		}
		s.run(batch)
	})
}

func (b *bare) compensate() {
	s := b.sale
	tags := make([]string, 0, benchBatch)
	b.pages(reservation.ReservationExpiry, func(ids, users []string) {
		tags = tags[:0]
		for range ids {
			tags = append(tags, s.scope.Tag())
		}
		s.exec(`SELECT reservation_id, outcome, order_id, won FROM seckill.fence_reservations($1, 'bench', $2)`, ids, tags)
		batch := s.runner.Batch()
		for i, id := range ids {
			batch.Compensate(s.scope, lua.CompensateArgs{ReservationID: id, UserID: users[i], Reason: "bench"})
		}
		s.run(batch)
	})
}
