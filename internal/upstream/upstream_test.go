package upstream_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/client"
	"github.com/seckill/reconciler/internal/devstack/faultproxy"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

const (
	reserved       = reservation.StatusReserved
	sendUnknown    = reservation.StatusSendUnknown
	enqueued       = reservation.StatusEnqueued
	rejected       = reservation.StatusRejected
	orderCreated   = reservation.StatusOrderCreated
	releasePending = reservation.StatusReleasePending
)

var kinds = []upstream.Kind{upstream.Claiming, upstream.Unmodified}

func TestFaultsOf(t *testing.T) {
	t.Parallel()
	shares := map[upstream.Fault]float64{upstream.CrashAfterReserve: 0.05, upstream.Duplicate: 0.2, upstream.DeadLetter: 0.01}
	faults := upstream.Faults{Seed: 7, Share: shares}
	const n = 100_000
	counts, differ := map[upstream.Fault]int{}, 0
	for i := range n {
		id := reservation.NewID([]byte("s"), "a", "s", strconv.Itoa(i), "q")
		counts[faults.Of(id)]++
		if faults.Of(id) != (upstream.Faults{Seed: 7, Share: maps.Clone(shares)}).Of(id) {
			t.Fatalf("%s has two faults under one seed", id)
		}
		if faults.Of(id) != (upstream.Faults{Seed: 8, Share: shares}).Of(id) {
			differ++
		}
	}
	for fault, share := range shares {
		// Five standard deviations of a binomial count.
		if want, got := share*n, float64(counts[fault]); math.Abs(got-want) > 5*math.Sqrt(n*share*(1-share)) {
			t.Errorf("%s befell %.0f of %d, want about %.0f", fault, got, n, want)
		}
	}
	if differ == 0 {
		t.Error("another seed gives the same faults")
	}
	if got := upstream.Only(upstream.Delayed).Of("x"); got != upstream.Delayed {
		t.Errorf("Only gave %s", got)
	}
}

// TestFaults brings reservations through every fault, first to where the
// gateway leaves them, then to where each kind of consumer does, then to where
// what was put off does. There is no daemon here: this is what it will meet.
func TestFaults(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := open(t, "8-standalone", 4, 1000)
			s.throughAllFaults(kind)
		})
	}
}

// left says what a fault leaves, message counts aside where copies vary.
type left struct{ gateway, consumer, later found }

func expectations(kind upstream.Kind) map[upstream.Fault]left {
	sent := found{Status: enqueued, Messages: 1, Expiry: true, Position: true}
	done := found{Status: orderCreated, Claim: "ORDER", Orders: 1, Messages: 1, Position: true}
	with := func(f found, change func(*found)) found { change(&f); return f }
	unsent := found{Status: reserved, Pending: true, Expiry: true}
	unknown := with(unsent, func(f *found) { f.Status = sendUnknown })
	unknownStored := with(unknown, func(f *found) { f.Messages = 1 })
	// The consumer may not go from SEND_UNKNOWN to ORDER_CREATED.
	unknownOrdered := with(unknownStored, func(f *found) { f.Claim, f.Orders = "ORDER", 1 })
	lateSent := with(unsent, func(f *found) { f.Messages = 1 })
	lateOrdered := with(lateSent, func(f *found) { f.Claim, f.Orders = "ORDER", 1 })
	lateMarked := with(lateOrdered, func(f *found) { f.Status, f.Pending, f.Position = enqueued, false, true })
	claimed := with(sent, func(f *found) { f.Status, f.Claim = rejected, "REJECTED" })
	unclaimed := with(sent, func(f *found) { f.Status = rejected })
	behindRedis := with(sent, func(f *found) { f.Claim, f.Orders = "ORDER", 1 })
	dead := with(sent, func(f *found) { f.Dead = 1 })
	lost := with(sent, func(f *found) { f.Messages = 0 })
	gone := found{Pending: true, Expiry: true}
	all := map[upstream.Fault]left{
		upstream.None:              {sent, done, done},
		upstream.CrashAfterReserve: {unsent, unsent, unsent},
		upstream.TimeoutStored:     {unknownStored, unknownOrdered, unknownOrdered},
		upstream.TimeoutLost:       {unknown, unknown, unknown},
		upstream.LateEnqueued:      {lateSent, lateOrdered, lateMarked},
		upstream.Duplicate:         {sent, done, done},
		upstream.LostAfterAck:      {lost, lost, lost},
		upstream.Delayed:           {unknown, unknown, unknownOrdered},
		upstream.DeletedHash:       {gone, gone, gone},
		upstream.CrashBeforeCommit: {sent, done, done},
		upstream.CrashAfterCommit:  {sent, behindRedis, behindRedis},
		upstream.RejectClaimed:     {sent, claimed, claimed},
		upstream.RejectUnclaimed:   {sent, unclaimed, unclaimed},
		upstream.Dropped:           {sent, sent, sent},
		upstream.Replayed:          {sent, sent, with(done, func(f *found) { f.Messages = 2 })},
		upstream.DeadLetter:        {sent, dead, dead},
	}
	if kind == upstream.Unmodified {
		all[upstream.RejectClaimed] = left{sent, unclaimed, unclaimed}
	}
	return all
}

func (s *shop) throughAllFaults(kind upstream.Kind) {
	t := s.t
	t.Helper()
	const each = 3
	byFault := map[upstream.Fault][]reservation.Reservation{}
	faultOf := map[string]upstream.Fault{}
	var all []reservation.Reservation
	var later []upstream.Later
	for _, fault := range upstream.AllFaults { // None first: LostAfterAck needs a real position
		var users []string
		for i := range each {
			users = append(users, fmt.Sprintf("%s-%d", fault, i))
		}
		made := s.reserve(users...)
		more, err := s.gateway.Deliver(t.Context(), fault, upstream.Only(fault), upstream.Delays{}, made)
		if err != nil {
			t.Fatalf("%s: %v", fault, err)
		}
		byFault[fault] = made
		later = append(later, more...)
		all = append(all, made...)
		for _, r := range made {
			faultOf[r.ID] = fault
		}
	}
	want := expectations(kind)
	// compare says what is not yet as a stage of the faults promises.
	compare := func(stage func(left) found) string {
		got := s.look(all)
		for fault, rs := range byFault {
			for _, r := range rs {
				expected := stage(want[fault])
				if copies := got[r.ID].Messages; fault == upstream.Duplicate && (copies == 2 || copies == 3) {
					expected.Messages = copies
				}
				if diff := cmp.Diff(expected, got[r.ID]); diff != "" {
					return fmt.Sprintf("%s (-want +got):\n%s", fault, diff)
				}
			}
		}
		return ""
	}
	// A broker acknowledges a message a moment before it can be read.
	eventually(t, func() string {
		if diff := compare(func(l left) found { return l.gateway }); diff != "" {
			return "after the gateway: " + diff
		}
		return ""
	})

	consumer := s.order(kind, upstream.Faults{})
	consumer.FaultOf = func(id string) upstream.Fault { return faultOf[id] }
	s.start(consumer)
	eventually(t, func() string {
		if dropped := consumer.Events()[upstream.EventDropped]; dropped != 2*each {
			return fmt.Sprintf("%d messages were dropped, want %d", dropped, 2*each)
		}
		if diff := compare(func(l left) found { return l.consumer }); diff != "" {
			return "after the consumer: " + diff
		}
		return ""
	})

	for _, l := range later {
		if err := l.Do(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, func() string {
		if diff := compare(func(l left) found { return l.later }); diff != "" {
			return "after what was put off: " + diff
		}
		return ""
	})
	if got := s.stock(); got.Sold != got.Orders || got.Reserved != int64(len(all)) {
		t.Errorf("stock %+v of %d reservations", got, len(all))
	}
	if crashed := consumer.Events()[upstream.EventCrashed]; crashed != 2*each {
		t.Errorf("the consumer crashed %d times, want %d", crashed, 2*each)
	}
}

// TestFencedReservation: a consumer of either kind creates nothing for a
// reservation that the daemon has fenced.
func TestFencedReservation(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := open(t, "7.0-standalone", 1, 10)
			made := s.reserve("alice")
			if _, err := s.gateway.Deliver(t.Context(), upstream.None, upstream.Faults{}, upstream.Delays{}, made); err != nil {
				t.Fatal(err)
			}
			s.fence(made[0])
			consumer := s.order(kind, upstream.Faults{})
			event, acknowledged, err := consumer.Consume(t.Context(), upstream.Delivery{Body: body(t, made[0])})
			wantStatus := rejected
			switch kind {
			case upstream.Claiming:
				if event != upstream.EventFenced || !acknowledged || err != nil {
					t.Errorf("consumed: %s, acknowledged %t, %v", event, acknowledged, err)
				}
			case upstream.Unmodified:
				wantStatus = enqueued
				if event != upstream.EventFenced || acknowledged || err == nil {
					t.Errorf("consumed: %s, acknowledged %t, %v", event, acknowledged, err)
				}
			}
			want := found{Status: wantStatus, Claim: "FENCED", Messages: 1, Expiry: true, Position: true}
			eventually(t, func() string { return cmp.Diff(want, s.look(made)[made[0].ID]) })
			if stock := s.stock(); stock.Sold != 0 || stock.Orders != 0 {
				t.Errorf("stock %+v", stock)
			}
		})
	}
}

// TestNoStock: PostgreSQL is the last defence. What it has no unit for is
// refused by both kinds, and only the claiming one says so in a claim.
func TestNoStock(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := open(t, "8-standalone", 1, 10)
			s.exec(`UPDATE shop.stock SET total = 1 WHERE activity_id = $1`, s.activity.ActivityID)
			made := s.reserve("alice", "bob")
			if _, err := s.gateway.Deliver(t.Context(), upstream.None, upstream.Faults{}, upstream.Delays{}, made); err != nil {
				t.Fatal(err)
			}
			consumer := s.order(kind, upstream.Faults{})
			want := []upstream.Event{upstream.EventOrdered, upstream.EventRejected}
			for i, r := range made {
				event, acknowledged, err := consumer.Consume(t.Context(), upstream.Delivery{Body: body(t, r)})
				if event != want[i] || !acknowledged || err != nil {
					t.Errorf("consumed %d: %s, acknowledged %t, %v", i, event, acknowledged, err)
				}
			}
			claim := "REJECTED"
			if kind == upstream.Unmodified {
				claim = ""
			}
			if got := s.look(made)[made[1].ID]; got.Status != rejected || got.Claim != claim || got.Orders != 0 {
				t.Errorf("the one without a unit: %+v", got)
			}
			if got := s.stock(); got.Sold != 1 || got.Orders != 1 {
				t.Errorf("stock %+v", got)
			}
		})
	}
}

// TestSecondOrderOfAUser: one active order per user, whatever Redis let through.
func TestSecondOrderOfAUser(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := open(t, "8-standalone", 1, 10)
			first := s.reserve("alice")[0]
			second := first
			second.RequestID, second.ID = "q-other", reservation.NewID(s.gateway.Secret, first.ActivityID, first.SKUID, "alice", "q-other")
			second.MessageID = reservation.MessageID(second.ID)
			consumer := s.order(kind, upstream.Faults{})
			for i, want := range []upstream.Event{upstream.EventOrdered, upstream.EventRejected, upstream.EventDuplicate} {
				r := []reservation.Reservation{first, second, first}[i]
				event, acknowledged, err := consumer.Consume(t.Context(), upstream.Delivery{Body: body(t, r)})
				if event != want || !acknowledged || err != nil {
					t.Errorf("consumed %d: %s, acknowledged %t, %v", i, event, acknowledged, err)
				}
			}
			if got := s.stock(); got.Sold != 1 || got.Orders != 1 {
				t.Errorf("stock %+v", got)
			}
		})
	}
}

func TestMalformedMessageIsNotAcknowledged(t *testing.T) {
	t.Parallel()
	consumer := &upstream.Consumer{Kind: upstream.Claiming}
	event, acknowledged, err := consumer.Consume(t.Context(), upstream.Delivery{Body: []byte(`{"schema_version":1}`)})
	if event != upstream.EventMalformed || acknowledged || err == nil {
		t.Errorf("consumed: %s, acknowledged %t, %v", event, acknowledged, err)
	}
}

func TestConsumerSurvivesAPanic(t *testing.T) {
	t.Parallel()
	s := open(t, "8-standalone", 1, 1)
	consumer := s.order(upstream.Claiming, upstream.Faults{})
	consumer.FaultOf = func(string) upstream.Fault { panic("a bug in a handler") }
	event, acknowledged, err := consumer.Consume(t.Context(), upstream.Delivery{Body: body(t, s.reserve("alice")[0])})
	if event != upstream.EventFailed || acknowledged || err == nil {
		t.Errorf("consumed: %s, acknowledged %t, %v", event, acknowledged, err)
	}
}

// TestUnknownOutcome: replies are lost twice, so the gateway fails closed, and
// yet at most one unit is gone. Once Redis answers again, the same request has
// its one reservation.
func TestUnknownOutcome(t *testing.T) {
	t.Parallel()
	s := open(t, "8-standalone", 1, 10)
	proxy, err := faultproxy.Start(s.stack.Redis().Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Close)
	behind := connect(t, 300*time.Millisecond, proxy.Addr())
	cut := &upstream.Gateway{
		Activity: s.activity, Secret: s.gateway.Secret, TTL: time.Minute, Timeout: time.Second,
		Redis: behind, Sender: s.sender,
	}
	click := []upstream.Request{{UserID: "alice", RequestID: "q-1"}}
	// Loads the scripts, so that the call itself is what gets no reply.
	if a := cut.Reserve(t.Context(), []upstream.Request{{UserID: "bob", RequestID: "q-2"}})[0]; !a.Accepted() {
		t.Fatalf("before the fault: %+v, %v", a.Reply, a.Err)
	}
	proxy.Set(faultproxy.Faults{DropReplies: true})
	a := cut.Reserve(t.Context(), click)[0]
	unknown, ok := errors.AsType[*client.BusyError](a.Err)
	if !ok || !unknown.OutcomeUnknown || a.Accepted() || !errors.Is(a.Err, lua.ErrOutcomeUnknown) {
		t.Fatalf("without replies: %+v, %v", a.Reply, a.Err)
	}
	proxy.Set(faultproxy.Faults{})
	proxy.Reset()
	again := cut.Reserve(t.Context(), click)[0]
	if !again.Accepted() || !again.Reply.Replay || again.Reservation.ID != unknown.ReservationID {
		t.Errorf("asked again: %+v, %v; want the reservation %s", again.Reply, again.Err, unknown.ReservationID)
	}
	if got := s.stock(); got.Reserved != 2 || got.Available != 8 {
		t.Errorf("stock %+v after two users", got)
	}
}

// lossySender loses the answers of all sends.
type lossySender struct{ sent int }

func (l *lossySender) Send(_ context.Context, messages []rocketmq.Outgoing) []rocketmq.SendResult {
	l.sent += len(messages)
	results := make([]rocketmq.SendResult, len(messages))
	for i, m := range messages {
		results[i] = rocketmq.SendResult{MessageID: m.MessageID, Outcome: rocketmq.Unavailable, Cause: rocketmq.CauseBrokerBusy, Err: errors.New("busy")}
	}
	return results
}

// TestUnavailableStaysReserved: a message that was certainly not stored leaves
// its reservation where the scanner finds it.
func TestUnavailableStaysReserved(t *testing.T) {
	t.Parallel()
	s := open(t, "7.0-cluster", 4, 10)
	s.gateway.Sender = &lossySender{}
	made := s.reserve("alice", "bob", "carol")
	if _, err := s.gateway.Deliver(t.Context(), upstream.None, upstream.Faults{}, upstream.Delays{}, made); err != nil {
		t.Fatal(err)
	}
	for id, got := range s.look(made) {
		if diff := cmp.Diff(found{Status: reserved, Pending: true, Expiry: true}, got); diff != "" {
			t.Errorf("%s: %s", id, diff)
		}
	}
}

// TestSale sells to more users than there are units, with all faults, to both
// kinds of consumer at once: nothing is sold twice, whatever goes wrong.
func TestSale(t *testing.T) {
	t.Parallel()
	const units, users = 400, 1200
	s := open(t, "8-cluster", 4, units)
	faults := upstream.Evenly(1, 0.05, upstream.AllFaults[1:]...)
	var consumers []*upstream.Consumer
	for _, kind := range kinds {
		consumers = append(consumers, s.order(kind, faults))
	}
	s.start(consumers...)
	sale := &upstream.Sale{
		Gateway: s.gateway, Users: users, Faults: faults, Page: 50, Concurrency: 8,
		Delays: upstream.Delays{Mark: 2 * time.Second, Send: 2 * time.Second, Replay: 4 * time.Second},
	}
	if err := sale.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	tally, ledger := sale.Tally(), sale.Ledger()
	if tally.Requests != users || tally.Accepted != units || tally.Codes["SOLD_OUT"] != users-units {
		t.Errorf("tally %+v", tally)
	}
	if ledger.Len() != units {
		t.Errorf("the ledger has %d reservations", ledger.Len())
	}
	counts := ledger.ByFault()
	for _, fault := range upstream.AllFaults {
		if counts[fault] == 0 {
			t.Errorf("%s befell nobody: %v", fault, counts)
		}
	}
	ordering := 0 // reservations that end with an order even without a daemon
	for _, fault := range []upstream.Fault{
		upstream.None, upstream.TimeoutStored, upstream.LateEnqueued, upstream.Duplicate, upstream.Delayed,
		upstream.CrashBeforeCommit, upstream.CrashAfterCommit, upstream.Replayed,
	} {
		ordering += counts[fault]
	}
	defer func() {
		if t.Failed() {
			t.Logf("deliveries %v and %v; without an order:\n%s", consumers[0].Events(), consumers[1].Events(), s.unordered(ledger.All()))
		}
	}()
	eventually(t, func() string {
		got := s.stock()
		if got.Orders == int64(ordering) && got.Sold == got.Orders {
			return ""
		}
		return fmt.Sprintf("stock %+v, want %d orders", got, ordering)
	})
	if got := s.stock(); got.Reserved != units || got.Available != 0 || got.Sold > units {
		t.Errorf("stock %+v", got)
	}
	for _, consumer := range consumers {
		if consumer.Events()[upstream.EventOrdered] == 0 {
			t.Errorf("the %s consumer created no order: %v", consumer.Kind, consumer.Events())
		}
	}
}

// TestRollback: the scope is as it was, other scopes are not touched, and what
// was reserved in between is gone.
func TestRollback(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"8-standalone", "7.0-cluster"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const units, users = 200, 150
			s := open(t, name, 2, units)
			s.gateway.Sender = &lossySender{}
			sale := &upstream.Sale{
				Gateway: s.gateway, Users: users, Page: 10, Concurrency: 4,
				Rollback: &upstream.Rollback{Scope: s.activity.Scope(1), DumpAt: 0.3, LoseAt: 1},
			}
			if err := sale.Run(t.Context()); err != nil {
				t.Fatal(err)
			}
			reservedIn := func(bucket int64) int {
				n, err := s.client.HGet(t.Context(), s.activity.Scope(bucket).StockKey(), "reserved").Int()
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			made := []int{len(sale.Ledger().Of(s.activity.Scope(0))), len(sale.Ledger().Of(s.activity.Scope(1)))}
			if got := reservedIn(0); got != made[0] {
				t.Errorf("bucket 0 has %d reserved, %d were made", got, made[0])
			}
			if got := reservedIn(1); got >= made[1] || got == 0 {
				t.Errorf("bucket 1 has %d reserved of %d: want some lost, some kept", got, made[1])
			}
			var kept int
			for _, sold := range sale.Ledger().Of(s.activity.Scope(1)) {
				scope := s.activity.Scope(1)
				n, err := s.client.Exists(t.Context(), scope.ReservationKey(sold.Reservation.ID)).Result()
				if err != nil {
					t.Fatal(err)
				}
				marker, err := s.client.Exists(t.Context(), scope.UserKey(sold.Reservation.UserID)).Result()
				if err != nil || marker != n {
					t.Fatalf("marker of %s: %d beside %d, %v", sold.Reservation.UserID, marker, n, err)
				}
				kept += int(n)
			}
			lost := sale.Rollback.Lost()
			if lost == nil || int64(len(lost.Reservations)) != lost.Reserved-lost.ReservedAfter {
				t.Errorf("what was lost: %+v", lost)
			}
			// The last page may have reserved after the loss.
			if got := reservedIn(1); got != kept {
				t.Errorf("bucket 1 has %d reserved, %d reservations are left", got, kept)
			}
			if ttl, err := s.client.PTTL(t.Context(), s.activity.Scope(1).StockKey()).Result(); err != nil || ttl <= 0 {
				t.Errorf("the stock's time to live is %s, %v", ttl, err)
			}
		})
	}
}

// recordedBroker notes what was done to it.
type recordedBroker struct {
	mu  sync.Mutex
	did []string
}

func (b *recordedBroker) note(what string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.did = append(b.did, what)
}

func (b *recordedBroker) Kill() error                 { b.note("kill"); return nil }
func (b *recordedBroker) Start(context.Context) error { b.note("start"); return nil }

// TestOutageEndsWithTheSale: the broker is stopped once and started again, also
// when the sale is abandoned meanwhile.
func TestOutageEndsWithTheSale(t *testing.T) {
	t.Parallel()
	s := open(t, "8-standalone", 1, 100)
	s.gateway.Sender = &lossySender{}
	for _, test := range []struct {
		name    string
		abandon bool
		outage  time.Duration
	}{{"in full", false, 10 * time.Millisecond}, {"abandoned", true, time.Hour}} {
		broker := &recordedBroker{}
		ctx, cancel := context.WithCancel(t.Context())
		sale := &upstream.Sale{
			Gateway: s.gateway, Users: 40, Page: 10, Concurrency: 1,
			Outage: &upstream.Outage{Broker: broker, At: 0.5, For: test.outage},
		}
		if test.abandon {
			time.AfterFunc(50*time.Millisecond, cancel)
		}
		err := sale.Run(ctx)
		cancel()
		if (err != nil) != test.abandon {
			t.Errorf("%s: %v", test.name, err)
		}
		if !slices.Equal(broker.did, []string{"kill", "start"}) {
			t.Errorf("%s: the broker was %v", test.name, broker.did)
		}
		if !sale.Outage.Over() {
			t.Errorf("%s: the outage is not over", test.name)
		}
	}
}

func body(t *testing.T, r reservation.Reservation) []byte {
	t.Helper()
	b, err := reservation.NewOrderMessage(r).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return b
}
