package daemon_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// hurried makes a daemon that works often and whose lease passes on soon.
func hurried(c *config.Config) {
	c.Scanner.Every, c.Fencer.Every, c.Compensator.Every = 100*time.Millisecond, 100*time.Millisecond, 100*time.Millisecond
	c.Lease.TTL = time.Second
}

// logbook keeps what a daemon logs, with the time of each line.
type logbook struct {
	mu    sync.Mutex
	lines []logged
}

type logged struct {
	at   time.Time
	text string
}

// Enabled is part of [slog.Handler].
func (b *logbook) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

// Handle is part of [slog.Handler].
func (b *logbook) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		text += " " + a.String()
		return true
	})
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lines = append(b.lines, logged{time.Now(), text})
	return nil
}

// WithAttrs is part of [slog.Handler].
func (b *logbook) WithAttrs([]slog.Attr) slog.Handler { return b }

// WithGroup is part of [slog.Handler].
func (b *logbook) WithGroup(string) slog.Handler { return b }

// when lists the times of the lines that begin so.
func (b *logbook) when(prefix string) []time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	var times []time.Time
	for _, line := range b.lines {
		if strings.HasPrefix(line.text, prefix) {
			times = append(times, line.at)
		}
	}
	return times
}

// mentions counts the lines that have the text in them.
func (b *logbook) mentions(text string) (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, line := range b.lines {
		if strings.Contains(line.text, text) {
			n++
		}
	}
	return n
}

func (b *logbook) tail(n int) string {
	b.mu.Lock()
	defer b.mu.Unlock()
	var text strings.Builder
	for _, line := range b.lines[max(0, len(b.lines)-n):] {
		fmt.Fprintf(&text, "%s %.300s\n", line.at.Format("05.000"), line.text)
	}
	return text.String()
}

// What the daemon logs of its lease.
const (
	logHolding = "holding the lease: working"
	logLost    = "the lease was lost: all work has stopped"
)

// service is a daemon that runs in this process.
type service struct {
	s    *sale
	log  *logbook
	stop context.CancelFunc
	done chan struct{}
	err  error
}

// serve runs a daemon until [service.end] or the end of the test.
func (s *sale) serve() *service {
	s.t.Helper()
	r := &service{s: s, log: &logbook{}, done: make(chan struct{})}
	d := s.open(func(o *daemon.Options) { o.Logger = slog.New(r.log) })
	ctx, stop := context.WithCancel(context.WithoutCancel(s.t.Context()))
	r.stop = stop
	go func() {
		defer close(r.done)
		r.err = d.Run(ctx)
	}()
	s.t.Cleanup(func() {
		stop()
		<-r.done // before the daemon is closed
		if s.t.Failed() {
			s.t.Logf("end of the daemon's log:\n%s", r.log.tail(30))
		}
	})
	return r
}

// end stops the daemon as SIGTERM does, and tells how long it took.
func (r *service) end() time.Duration {
	r.s.t.Helper()
	began := time.Now()
	r.stop()
	<-r.done
	if r.err != nil {
		r.s.t.Errorf("the daemon ended with: %v", r.err)
	}
	return time.Since(began)
}

// awaitLog waits until the daemon has logged n lines that begin so.
func (r *service) awaitLog(n int, prefix string) {
	r.s.t.Helper()
	r.s.eventually(time.Minute, func() error {
		if got := len(r.log.when(prefix)); got < n {
			return fmt.Errorf("the daemon has logged %q %d times, want %d", prefix, got, n)
		}
		return nil
	})
}

// seeded is a source of random moments. Its seed is in the test's log.
func seeded(t *testing.T) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 1))
}

// eventually waits until holds returns nil.
func (s *sale) eventually(within time.Duration, holds func() error) {
	s.t.Helper()
	for end := time.Now().Add(within); ; time.Sleep(100 * time.Millisecond) {
		err := holds()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			s.t.Fatalf("not within %s: %v", within, err)
		}
	}
}

// throughout checks for a while that something stays as it is.
func (s *sale) throughout(while time.Duration, holds func() error) {
	s.t.Helper()
	for end := time.Now().Add(while); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if err := holds(); err != nil {
			s.t.Fatal(err)
		}
	}
}

// entry is what Redis and PostgreSQL say of one reservation.
type entry struct {
	status  reservation.Status
	user    string
	marker  string // the reservation that the user's marker names
	claim   reservation.Outcome
	orders  int // active ones
	resends string
}

// census is every reservation that was ever accepted in the scope, by the
// gateway's receipts in its request shards, as both sides have it. It is the
// tests' own count and uses nothing of the daemon's.
func (s *sale) census() (map[string]*entry, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), 10*time.Second)
	defer cancel()
	pipe := s.redis.Pipeline()
	shards := make([]*redis.MapStringStringCmd, 256)
	for i := range shards {
		shards[i] = pipe.HGetAll(ctx, fmt.Sprintf("seckill:{%s}:req:%03d", s.scope.Tag(), i))
	}
	if _, err := pipe.Exec(ctx); err != nil {
		return nil, fmt.Errorf("census: read the request shards: %w", err)
	}
	all := map[string]*entry{}
	for _, shard := range shards {
		for _, value := range shard.Val() {
			// code|reservation_id|remaining|status|user_id
			if f := strings.Split(value, "|"); len(f) == 5 && f[0] == "0" {
				all[f[1]] = &entry{user: f[4]}
			}
		}
	}
	if err := s.readHashes(ctx, all); err != nil {
		return nil, err
	}
	return all, s.readClaims(ctx, all)
}

func (s *sale) readHashes(ctx context.Context, all map[string]*entry) error {
	pipe := s.redis.Pipeline()
	hashes, markers := map[string]*redis.SliceCmd{}, map[string]*redis.StringCmd{}
	for id, e := range all {
		hashes[id] = pipe.HMGet(ctx, s.scope.ReservationKey(id), "status", "resend_count")
		markers[id] = pipe.Get(ctx, s.scope.UserKey(e.user))
	}
	if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
		return fmt.Errorf("census: read the reservations: %w", err)
	}
	for id, e := range all {
		status, _ := hashes[id].Val()[0].(string)
		e.status = reservation.Status(status)
		e.resends, _ = hashes[id].Val()[1].(string)
		e.marker = markers[id].Val()
	}
	return nil
}

func (s *sale) readClaims(ctx context.Context, all map[string]*entry) error {
	rows, err := s.db.Query(ctx, `
		SELECT i.id, coalesce(c.outcome, ''), (SELECT count(*) FROM shop.orders AS o WHERE o.reservation_id = i.id AND o.status <> 'CANCELLED')
		FROM unnest($1::text[]) AS i (id) LEFT JOIN seckill.reservation_claim AS c ON c.reservation_id = i.id`,
		slices.Collect(maps.Keys(all)))
	if err != nil {
		return fmt.Errorf("census: read the claims: %w", err)
	}
	var id string
	var outcome reservation.Outcome
	var orders int
	_, err = pgx.ForEachRow(rows, []any{&id, &outcome, &orders}, func() error {
		all[id].claim, all[id].orders = outcome, orders
		return nil
	})
	if err != nil {
		return fmt.Errorf("census: read the claims: %w", err)
	}
	return nil
}

// promised checks S1 and S2 of protocol.md over the whole scope, at rest or in
// motion: nothing here may fail at any time that no pass is half way through a
// script.
func (s *sale) promised(all map[string]*entry) error {
	var errs []error
	var held, released int64
	for id, e := range all {
		if e.status != reservation.StatusReleased {
			held++
			if e.marker != id {
				errs = append(errs, fmt.Errorf("%s is %s and its user's marker names %q", id, e.status, e.marker))
			}
			continue
		}
		released++
		if e.claim != reservation.OutcomeFenced && e.claim != reservation.OutcomeRejected {
			errs = append(errs, fmt.Errorf("S1: %s is RELEASED and its claim is %q", id, e.claim))
		}
		if e.orders != 0 {
			errs = append(errs, fmt.Errorf("S1: %s is RELEASED and has %d orders", id, e.orders))
		}
		if e.marker == id {
			errs = append(errs, fmt.Errorf("%s is RELEASED and its user's marker is left", id))
		}
	}
	stock := s.stock()
	if want := [4]int64{units, units - held, held, released}; stock != want {
		errs = append(errs, fmt.Errorf("S2: stock %v, want %v by the reservations", stock, want))
	}
	return errors.Join(errs...)
}

// units is what [newSale] puts on sale.
const units = 1000

// settled says what is still missing of L1 and L2: every reservation decided,
// each order shown, as many units reserved as there are orders, no index
// member left over.
func (s *sale) settled() error {
	all, err := s.census()
	if err != nil {
		return err
	}
	open := map[reservation.Status]int{}
	var orders int64
	for id, e := range all {
		orders += int64(e.orders)
		switch {
		case !e.status.Terminal():
			open[e.status]++
		case (e.status == reservation.StatusOrderCreated) != (e.orders == 1):
			return fmt.Errorf("%s is %s and has %d orders", id, e.status, e.orders)
		}
	}
	if len(open) > 0 {
		return fmt.Errorf("L1: not decided: %v", open)
	}
	if reserved := s.stock()[2]; reserved != orders {
		return fmt.Errorf("L2: %d units reserved and %d orders", reserved, orders)
	}
	for _, index := range []reservation.Index{reservation.SendPending, reservation.ReservationExpiry} {
		if n := s.redis.ZCard(s.t.Context(), s.scope.IndexKey(index)).Val(); n != 0 {
			return fmt.Errorf("L1: %d members are left in %s", n, index)
		}
	}
	return nil
}

// keepsPromises fails the test unless S1 and S2 hold now.
func (s *sale) keepsPromises() {
	s.t.Helper()
	all, err := s.census()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.promised(all); err != nil {
		s.t.Error(err)
	}
}

// settles waits for L1 and L2, and checks S1 and S2 then.
func (s *sale) settles(within time.Duration) {
	s.t.Helper()
	s.eventually(within, s.settled)
	s.keepsPromises()
}

// is checks the status of each reservation by name.
func (s *sale) is(want reservation.Status, ids ...string) error {
	got := map[reservation.Status]int{}
	for _, id := range ids {
		got[s.status(id)]++
	}
	if got[want] != len(ids) {
		return fmt.Errorf("%v, want all %d to be %s", got, len(ids), want)
	}
	return nil
}

// subscribe starts an order consumer of the sale's topic.
func (s *sale) subscribe(o upstream.Subscription, faultOf func(id string) upstream.Fault) *upstream.Subscriber {
	s.t.Helper()
	o.NameServers = s.config.RocketMQ.NameServers
	if o.Topic == "" {
		o.Topic = s.config.RocketMQ.Topic
	}
	if o.Group == "" {
		o.Group = s.config.RocketMQ.ConsumerGroup
	}
	o.Logger = slog.New(slog.DiscardHandler)
	sub, err := upstream.Subscribe(o, &upstream.Consumer{
		Kind: upstream.Claiming, DB: s.consumer(), Redis: s.redis, FaultOf: faultOf,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { s.unsubscribe(sub) })
	return sub
}

func (s *sale) unsubscribe(sub *upstream.Subscriber) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), 20*time.Second)
	defer cancel()
	if err := sub.Stop(ctx); err != nil {
		s.t.Error(err)
	}
}

// taskCauses are the open tasks of a kind, by cause.
func (s *sale) taskCauses(kind string) map[string]int64 {
	s.t.Helper()
	rows, err := s.db.Query(s.t.Context(),
		`SELECT cause, count FROM seckill.manual_task WHERE state = 'open' AND kind = $1 AND scope IN ('', $2)`, kind, s.scope.Tag())
	if err != nil {
		s.t.Fatal(err)
	}
	causes := map[string]int64{}
	var cause string
	var n int64
	if _, err := pgx.ForEachRow(rows, []any{&cause, &n}, func() error { causes[cause] = n; return nil }); err != nil {
		s.t.Fatal(err)
	}
	return causes
}

// fences counts the claims FENCED.
func (s *sale) fences() (n int) {
	s.t.Helper()
	if err := s.db.QueryRow(s.t.Context(), `SELECT count(*) FROM seckill.reservation_claim WHERE outcome = 'FENCED'`).Scan(&n); err != nil {
		s.t.Fatal(err)
	}
	return n
}

// decided reads how often the job's last pass decided so.
func decided(v daemon.Verdict, job string, row int, cause string) (n int) {
	for _, j := range v.Jobs {
		for _, d := range j.Decisions {
			if j.Job == job && d.Row == row && d.Cause == cause {
				n += d.Count
			}
		}
	}
	return n
}

// decidedBy is [decided] over all jobs.
func decidedBy(v daemon.Verdict, row int, cause string) (n int) {
	for _, job := range v.Jobs {
		n += decided(v, job.Job, row, cause)
	}
	return n
}

// operator is PostgreSQL with the rights of a person.
func (s *sale) operator() *pgstore.Store {
	s.t.Helper()
	url := stacktest.LoginURL(s.t, s.stack, s.db.Config().ConnString(), "seckill_operator")
	store, err := pgstore.Open(s.t.Context(), pgstore.Config{URL: url})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(store.Close)
	return store
}
