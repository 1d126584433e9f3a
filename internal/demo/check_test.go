package demo_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/demo"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// books is an activity whose story is over: some reservations became orders,
// one was released, one waits for a person.
type books struct {
	t        *testing.T
	client   redis.UniversalClient
	db       *pgxpool.Pool
	activity upstream.Activity
	orders   []reservation.Reservation
	released reservation.Reservation
	orphan   reservation.Reservation
}

// stored acknowledges every message without sending it: the orders are made
// by hand here.
type stored struct{}

func (stored) Send(_ context.Context, messages []rocketmq.Outgoing) []rocketmq.SendResult {
	results := make([]rocketmq.SendResult, len(messages))
	for i, m := range messages {
		results[i] = rocketmq.SendResult{MessageID: m.MessageID, Outcome: rocketmq.Stored}
	}
	return results
}

func open(t *testing.T) *books {
	t.Helper()
	stack := stacktest.Shared(t)
	scope := stacktest.Scope(t)
	b := &books{t: t, activity: upstream.Activity{ActivityID: scope.ActivityID, SKUID: scope.SKUID, Version: 1, Buckets: 2, Total: 40}}
	b.client = redis.NewUniversalClient(lua.ClientOptions(&redis.UniversalOptions{
		Addrs: []string{stack.Redis().Addr()}, ReadTimeout: 10 * time.Second, WriteTimeout: 10 * time.Second,
	}))
	t.Cleanup(func() { _ = b.client.Close() })
	url := stacktest.Database(t, stack)
	b.db = b.pool(url)
	scripts, err := lua.NewRunner(b.client)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.activity.Open(t.Context(), scripts, b.db, time.Hour); err != nil {
		t.Fatal(err)
	}
	b.tell(scripts, &upstream.Gateway{
		Activity: b.activity, Secret: []byte("secret"), TTL: time.Minute, Timeout: 10 * time.Second,
		Redis: b.client, Sender: stored{},
	}, &upstream.Consumer{
		Kind: upstream.Claiming, Redis: b.client, DB: b.pool(stacktest.LoginURL(t, stack, url, "seckill_consumer")),
	})
	return b
}

func (b *books) pool(url string) *pgxpool.Pool {
	b.t.Helper()
	p, err := pgxpool.New(b.t.Context(), url)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(p.Close)
	return p
}

// tell lets the story happen, with the daemon's part in it done by hand.
func (b *books) tell(scripts *lua.Runner, g *upstream.Gateway, c *upstream.Consumer) {
	b.t.Helper()
	ctx := b.t.Context()
	var requests []upstream.Request
	for i := range 8 {
		requests = append(requests, upstream.Request{UserID: fmt.Sprintf("u%d", i), RequestID: fmt.Sprintf("q%d", i)})
	}
	var made []reservation.Reservation
	for _, a := range g.Reserve(ctx, requests) {
		if !a.Accepted() {
			b.t.Fatalf("%+v, %v", a.Reply, a.Err)
		}
		made = append(made, a.Reservation)
	}
	b.released, b.orphan, b.orders = made[0], made[1], made[2:]
	for fault, rs := range map[upstream.Fault][]reservation.Reservation{upstream.None: append(b.orders, b.released), upstream.DeletedHash: {b.orphan}} {
		if _, err := g.Deliver(ctx, fault, upstream.Faults{}, upstream.Delays{}, rs); err != nil {
			b.t.Fatal(err)
		}
	}
	for _, r := range b.orders {
		body, err := reservation.NewOrderMessage(r).Marshal()
		if err != nil {
			b.t.Fatal(err)
		}
		if event, done, err := c.Consume(ctx, upstream.Delivery{Body: body}); event != upstream.EventOrdered || !done {
			b.t.Fatalf("consumed: %s, %t, %v", event, done, err)
		}
	}
	scope := b.scope(b.released)
	b.sql(`SELECT seckill.fence_reservations($1, 'test', $2)`, []string{b.released.ID}, []string{scope.Tag()})
	batch := scripts.Batch()
	batch.Transition(scope, lua.TransitionArgs{ReservationID: b.released.ID, Target: reservation.StatusReleasePending})
	compensated := batch.Compensate(scope, lua.CompensateArgs{ReservationID: b.released.ID, UserID: b.released.UserID, Reason: "test"})
	if err := batch.Run(ctx); err != nil {
		b.t.Fatal(err)
	}
	if reply, err := compensated.Get(); err != nil || reply.Code != lua.CompensateReleased {
		b.t.Fatalf("compensate: %+v, %v", reply, err)
	}
	b.sql(`INSERT INTO seckill.manual_task (kind, scope, cause, count) VALUES ('orphan_member', $1, 'hash_missing', 1)`, b.scope(b.orphan).Tag())
}

func (b *books) scope(r reservation.Reservation) reservation.Scope { return b.activity.Scope(r.Bucket) }

func (b *books) sql(statement string, args ...any) {
	b.t.Helper()
	if _, err := b.db.Exec(b.t.Context(), statement, args...); err != nil {
		b.t.Fatalf("%s: %v", statement, err)
	}
}

func (b *books) redis(args ...any) {
	b.t.Helper()
	if err := b.client.Do(b.t.Context(), args...).Err(); err != nil {
		b.t.Fatalf("%v: %v", args, err)
	}
}

// check is what the demo says of the books at rest.
func (b *books) check() []demo.Violation {
	b.t.Helper()
	state, err := demo.Look(b.t.Context(), b.client, b.db, b.activity)
	if err != nil {
		b.t.Fatal(err)
	}
	return state.Check(true, []string{b.orphan.ID})
}

func TestBooksThatAgree(t *testing.T) {
	t.Parallel()
	if got := open(t).check(); len(got) != 0 {
		t.Errorf("violations: %v", got)
	}
}

// TestTampering: whatever one unit, row or field is changed to, the check says
// which promise that breaks.
func TestTampering(t *testing.T) {
	t.Parallel()
	hash := func(b *books, r reservation.Reservation) string { return b.scope(r).ReservationKey(r.ID) }
	stock := func(b *books) string { return b.activity.Scope(0).StockKey() }
	for name, test := range map[string]struct {
		tamper func(b *books)
		want   []string // one violation begins with each
	}{
		"a unit appears": {
			func(b *books) { b.redis("hincrby", stock(b), "available", 1) },
			[]string{"S2: initial 20 is not available"},
		},
		"a unit vanishes with its reservation": {
			func(b *books) {
				b.redis("hincrby", stock(b), "available", 1)
				b.redis("hincrby", stock(b), "reserved", -1)
			},
			[]string{"L2: reserved is"},
		},
		"the allocation changes": {
			func(b *books) {
				b.redis("hincrby", stock(b), "available", 1)
				b.redis("hincrby", stock(b), "initial", 1)
			},
			[]string{"S2: initial is 21, 20 were allocated"},
		},
		"stock below nothing": {
			func(b *books) {
				b.redis("hset", stock(b), "available", 21)
				b.redis("hset", stock(b), "reserved", -1)
			},
			[]string{"L2: reserved is -1", "S2: available 21, reserved -1"},
		},
		"a release that is not counted": {
			func(b *books) { b.redis("hincrby", b.scope(b.released).StockKey(), "released_total", -1) },
			[]string{"S2: released_total is 0, and 1"},
		},
		"a release too many counted": {
			func(b *books) { b.redis("hincrby", stock(b), "released_total", 1) },
			[]string{"S2: released_total is"},
		},
		"a release of what has an order": {
			func(b *books) { b.redis("hset", hash(b, b.orders[0]), "status", "RELEASED") },
			[]string{"L2: has an order, but its status is RELEASED", "S1: RELEASED, but its claim is ORDER", "S1: has an order", "S2: released_total is"},
		},
		"a release without a claim": {
			func(b *books) {
				b.sql(`ALTER TABLE seckill.reservation_claim DISABLE TRIGGER ALL`)
				b.sql(`DELETE FROM seckill.reservation_claim WHERE reservation_id = $1`, b.released.ID)
			},
			[]string{"S1: RELEASED, but its claim is none"},
		},
		"an order for what was released": {
			func(b *books) {
				b.sql(`ALTER TABLE shop.orders DISABLE TRIGGER ALL`)
				b.sql(`INSERT INTO shop.orders (order_id, reservation_id, request_id, activity_id, sku_id, activity_version, bucket_id, user_id)
					VALUES ('forged', $1, 'q', $2, $3, 1, $4, 'u0')`, b.released.ID, b.activity.ActivityID, b.activity.SKUID, b.released.Bucket)
			},
			[]string{"L2: reserved is", "L2: has an order, but its status is RELEASED", "S1: has an order, its claim is FENCED", "stock: shop.stock has sold 6, and there are 7"},
		},
		"an order vanishes": {
			func(b *books) { b.sql(`DELETE FROM shop.orders WHERE reservation_id = $1`, b.orders[0].ID) },
			[]string{"L2: ORDER_CREATED, but there is no order", "L2: reserved is", "stock: shop.stock has sold 6, and there are 5"},
		},
		"the counter of the shop is off": {
			func(b *books) {
				b.sql(`UPDATE shop.stock SET sold = sold + 1 WHERE activity_id = $1`, b.activity.ActivityID)
			},
			[]string{"stock: shop.stock has sold 7, and there are 6"},
		},
		"a second live reservation of a user": {
			func(b *books) { b.redis("hset", hash(b, b.orders[1]), "user_id", b.orders[0].UserID) },
			[]string{"S2: user "},
		},
		"a reservation that nobody decided": {
			func(b *books) { b.redis("hset", hash(b, b.orders[0]), "status", "ENQUEUED") },
			[]string{"L1: 1 reservations are undecided", "L2: has an order, but its status is ENQUEUED"},
		},
		"a decided one is still indexed": {
			func(b *books) {
				b.redis("zadd", b.scope(b.orders[0]).IndexKey(reservation.ReservationExpiry), 1, b.orders[0].ID)
			},
			[]string{"L2: decided, but still in an index"},
		},
		"a hash that nobody deleted is gone": {
			func(b *books) { b.redis("del", hash(b, b.released)) },
			[]string{"S2: released_total is 1, and 0"},
		},
		"nobody is asked about the orphan": {
			func(b *books) { b.sql(`UPDATE seckill.manual_task SET state = 'resolved'`) },
			[]string{"L1: 1 reservations wait for a person, and no"},
		},
		"the orphan's member is gone too": {
			func(b *books) {
				for _, index := range []reservation.Index{reservation.SendPending, reservation.ReservationExpiry} {
					b.redis("zrem", b.scope(b.orphan).IndexKey(index), b.orphan.ID)
				}
			},
			[]string{"L1: its hash was deleted, and it does not wait", "L2: reserved is"},
		},
		"another orphan": {
			func(b *books) {
				b.redis("zadd", b.scope(b.orphan).IndexKey(reservation.SendPending), 1, "another")
			},
			[]string{"L1: its hash is gone: nobody deleted it", "L2: reserved is"},
		},
		"a claim for nothing": {
			func(b *books) {
				b.sql(`SELECT seckill.claim_reservation('nobody', 'o-1', $1)`, b.activity.Scope(1).Tag())
			},
			[]string{"L2: claimed for an order that does not exist"},
		},
		"an order of another bucket": {
			func(b *books) {
				b.sql(`UPDATE shop.orders SET bucket_id = 7 WHERE reservation_id = $1`, b.orders[0].ID)
			},
			[]string{"L2: ORDER_CREATED, but there is no order", "L2: reserved is", "stock: belongs to no bucket"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := open(t)
			test.tamper(b)
			got := b.check()
			var texts []string
			for _, v := range got {
				texts = append(texts, v.String())
			}
			for _, want := range test.want {
				if !slices.ContainsFunc(texts, func(text string) bool { return strings.HasPrefix(text, want) }) {
					t.Errorf("no violation begins with %q:\n%s", want, strings.Join(texts, "\n"))
				}
			}
			for _, text := range texts {
				if !slices.ContainsFunc(test.want, func(want string) bool { return strings.HasPrefix(text, want) }) {
					t.Errorf("not expected: %s", text)
				}
			}
		})
	}
}

// TestReportSaysBroken: a violation that was seen once makes the verdict, even
// if the end looks well.
func TestReportSaysBroken(t *testing.T) {
	t.Parallel()
	report := demo.Report{Verdict: demo.Broken, Violations: []demo.Violation{{Promise: "S1", Scope: "a:1:s:2:v:3:b:0", Subject: "r", Message: "RELEASED, but its claim is none"}}}
	for name, text := range map[string]string{"text": report.Text(false), "markdown": report.Markdown()} {
		for _, want := range []string{"BROKEN: 1 violations", "S1: RELEASED, but its claim is none (r) in a:1:s:2:v:3:b:0"} {
			if !strings.Contains(text, want) {
				t.Errorf("%s does not say %q:\n%s", name, want, text)
			}
		}
	}
}

func TestOptionsRefused(t *testing.T) {
	t.Parallel()
	if err := demo.Default().Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*demo.Options){
		"no users":        func(o *demo.Options) { o.Users = 0 },
		"no units":        func(o *demo.Options) { o.Units = 0 },
		"no rate":         func(o *demo.Options) { o.Rate = 0 },
		"shares beyond 1": func(o *demo.Options) { o.Share = 0.07 },
	} {
		o := demo.Default()
		change(&o)
		if o.Validate() == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

// TestForeignDirectoryIsLeftAlone: the demo removes nothing that it did not make.
func TestForeignDirectoryIsLeftAlone(t *testing.T) {
	t.Parallel()
	o := demo.Default()
	o.Dir = t.TempDir()
	makeFile(t, o.Dir+"/stack/precious")
	o.Progress = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo).Writer()
	report, err := demo.Run(t.Context(), o)
	if err == nil || !strings.Contains(err.Error(), "is not the demo's") || report.Verdict != demo.Incomplete {
		t.Errorf("verdict %s, %v", report.Verdict, err)
	}
	wantFile(t, o.Dir+"/stack/precious")
}
