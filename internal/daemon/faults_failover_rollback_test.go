//go:build slow

package daemon_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// leftToHand: the daemon does not reconcile by itself, so that one run by hand
// is one run. What it compares settles soon.
func leftToHand(c *config.Config) {
	c.Reconcile.Quick, c.Reconcile.Deep = "", ""
	c.Reconcile.Settle = 200 * time.Millisecond
}

// market is a scope of few units in which reservations are made, ordered,
// released and made again.
type market struct {
	*sale
	sold    []upstream.Sold
	gateway *upstream.Gateway
	binary  string
}

func (s *sale) market(units int64) *market {
	s.t.Helper()
	small := *s
	small.scope = stacktest.Scope(s.t)
	small.register(units)
	return &market{sale: &small, gateway: &upstream.Gateway{Redis: s.redis}, binary: binary(s.t)}
}

// take makes an ENQUEUED reservation that expires after ttl; "" if none is left.
func (m *market) take(ttl time.Duration) string {
	m.t.Helper()
	m.users++
	user, request := fmt.Sprint("u", m.users), fmt.Sprint("q", m.users)
	id := reservation.NewID([]byte("secret"), m.scope.ActivityID, m.scope.SKUID, user, request)
	b := m.runner.Batch()
	r := b.Reserve(m.scope, lua.ReserveArgs{
		RequestID: request, ReservationID: id, UserID: user, TTLMS: ttl.Milliseconds(), SchemaVersion: 1, MessageID: reservation.MessageID(id),
	})
	m.run(b)
	reply, err := r.Get()
	if err == nil && reply.Code == lua.ReserveSoldOut {
		return ""
	}
	if err != nil || reply.Code != lua.ReserveAccepted {
		m.t.Fatalf("reserve: %+v, %v", reply, err)
	}
	m.sold = append(m.sold, upstream.Sold{Reservation: reservation.Reservation{ID: id, UserID: user}})
	m.walk(id, reservation.StatusEnqueued)
	return id
}

// takeOrdered is a reservation with its order, which Redis does not show yet.
func (m *market) takeOrdered() string {
	m.t.Helper()
	id := m.take(time.Millisecond)
	if id == "" {
		m.t.Fatal("no unit is left for an order")
	}
	m.buy(id)
	return id
}

// buy creates the order and deducts its unit.
func (m *market) buy(id string) {
	m.t.Helper()
	m.mustOrder(id)
}

// drop makes it certain that the reservation's message is lost, and due.
func (m *market) drop(id string) {
	m.t.Helper()
	ctx, past := m.t.Context(), time.Now().Add(-time.Second).UnixMilli()
	m.redis.HSet(ctx, m.scope.ReservationKey(id), "resend_count", "3", "expires_at_ms", past)
	m.redis.ZAddXX(ctx, m.scope.IndexKey(reservation.ReservationExpiry), z(id, float64(past)))
}

func (m *market) dump() *upstream.Dump {
	m.t.Helper()
	d, err := m.gateway.DumpScope(m.t.Context(), m.scope, m.sold)
	if err != nil {
		m.t.Fatal(err)
	}
	return d
}

func (m *market) rollBack(d *upstream.Dump) {
	m.t.Helper()
	if err := m.gateway.RestoreScope(m.t.Context(), d, m.sold); err != nil {
		m.t.Fatal(err)
	}
}

// decided says whether every reservation that Redis knows has come to its end.
func (m *market) decided() error {
	for _, one := range m.sold {
		if status := m.status(one.Reservation.ID); status != "" && !status.Terminal() {
			return fmt.Errorf("%s is %s", one.Reservation.ID, status)
		}
	}
	return nil
}

// books are both sides of the market, by the test's own count.
type books struct {
	available, reserved, orders int64
	unshown                     []string // ordered reservations that Redis does not show as such
}

func (m *market) books() books {
	m.t.Helper()
	stock := m.stock()
	if stock[0] != stock[1]+stock[2] {
		m.t.Errorf("stock %v does not add up", stock)
	}
	b := books{available: stock[1], reserved: stock[2]}
	rows, err := m.db.Query(m.t.Context(), `SELECT reservation_id FROM shop.orders WHERE activity_id = $1 AND status <> 'CANCELLED'`, m.scope.ActivityID)
	if err != nil {
		m.t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			m.t.Fatal(err)
		}
		b.orders++
		if m.status(id) != reservation.StatusOrderCreated {
			b.unshown = append(b.unshown, id)
		}
	}
	if err := rows.Err(); err != nil {
		m.t.Fatal(err)
	}
	return b
}

// finding is what is read of one in the report of a run by hand.
type finding struct {
	Check    string `json:"check"`
	Severity string `json:"severity"`
	Subject  string `json:"subject"`
	Message  string `json:"message"`
	Repair   struct {
		State string `json:"state"`
	} `json:"repair"`
}

// repair is one `reconcile --deep --repair`, and what it leaves standing beyond
// warnings, by check.
func (m *market) repair() (exit int, standing map[string][]finding) {
	m.t.Helper()
	ctx, cancel := context.WithTimeout(m.t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, m.binary, "reconcile", "--deep", "--repair", "--yes", "--activity", m.scope.ActivityID, "--output", "json")
	cmd.Dir, cmd.Env = m.t.TempDir(), m.environment()
	out, err := cmd.Output()
	var status *exec.ExitError
	if err != nil && !errors.As(err, &status) {
		m.t.Fatalf("reconcile: %v", err)
	}
	var report struct {
		Findings []finding `json:"findings"`
	}
	if err := json.Unmarshal(out, &report); err != nil {
		m.t.Fatalf("reconcile: %v\n%s", err, out)
	}
	done := map[string]int{}
	standing = map[string][]finding{}
	for _, f := range report.Findings {
		switch {
		case f.Repair.State == "done":
			done[f.Check]++
		case f.Severity == "critical" || f.Severity == "error":
			standing[f.Check] = append(standing[f.Check], f)
		}
	}
	m.t.Logf("repaired %v; left %+v", done, standing)
	return cmd.ProcessState.ExitCode(), standing
}

// balanced wants L2 after one run with repairs.
func (m *market) balanced() {
	m.t.Helper()
	before := m.books()
	m.t.Logf("before the repair: %d available, %d reserved, %d orders of which Redis does not show %d",
		before.available, before.reserved, before.orders, len(before.unshown))
	if len(before.unshown) == 0 {
		m.t.Error("no order was lost in Redis: nothing is shown here")
	}
	exit, standing := m.repair()
	after := m.books()
	if exit != 0 || after.reserved != after.orders || len(after.unshown) > 0 {
		m.t.Errorf("L2 after one repair: %d reserved, %d orders, not shown %v; exit status %d, %+v",
			after.reserved, after.orders, after.unshown, exit, standing)
	}
}

// A slot loses its last writes, several times, while the daemon releases units
// and users take them again: after one run with repairs L2 holds.
func TestSlowFailoverUndoesReleasesAndReservations(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	m := newSale(t, stack, hurried, leftToHand).market(60)
	random := seeded(t)
	running := m.serve()
	running.awaitLog(1, logHolding)
	const users, orders, window = 240, 40, 25
	starts := []int{40 + random.IntN(20), 100 + random.IntN(20), 160 + random.IntN(40)}
	ordered := 0
	var dump *upstream.Dump
	for i := range users {
		if slices.Contains(starts, i) {
			dump = m.dump()
		}
		if slices.Contains(starts, i-window) {
			m.rollBack(dump)
		}
		var id string
		m.eventually(time.Minute, func() error { // a unit that was released
			if id = m.take(time.Hour); id == "" {
				return errors.New("sold out, and nothing is released")
			}
			return nil
		})
		// The last orders come late in the sale, so that each window has some.
		if ordered < orders*(i+users/8)/users && random.IntN(2) == 0 {
			m.buy(id)
			m.drop(id) // it is due, and its order is found
			ordered++
		} else {
			m.drop(id)
		}
	}
	m.eventually(2*time.Minute, m.decided)
	running.end()
	t.Logf("%d reservations, %d orders; stock %v", len(m.sold), ordered, m.stock())
	m.balanced()
}

// The units that a failover gave back were taken by others before the orders
// could have them again: a deficit says by how much, and as units come free it
// heals, with nobody doing anything but what cron does.
func TestSlowDeficitHealsWhenUnitsComeFree(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Postgres: true, Brokers: 1})
	m := newSale(t, stack, hurried, leftToHand).market(20)
	running := m.serve()
	for range 6 {
		m.takeOrdered()
	}
	m.eventually(time.Minute, func() error {
		if b := m.books(); len(b.unshown) > 0 {
			return fmt.Errorf("%d orders are not shown", len(b.unshown))
		}
		return nil
	})
	dump := m.dump()
	var lost []string
	for range 4 {
		lost = append(lost, m.takeOrdered())
	}
	m.eventually(time.Minute, m.decided)
	m.rollBack(dump)
	var waiting []string
	for {
		id := m.take(time.Hour)
		if id == "" {
			break
		}
		waiting = append(waiting, id)
	}
	if b := m.books(); b.available != 0 || b.reserved != 20 || b.orders != 10 || len(b.unshown) != len(lost) {
		t.Fatalf("%+v, want everything reserved and four orders unknown to Redis", b)
	}
	for _, free := range []int{0, 1, 3} {
		for _, id := range waiting[:free] {
			m.drop(id)
		}
		m.eventually(time.Minute, func() error { return m.is(reservation.StatusReleased, waiting[:free]...) })
		waiting = waiting[free:]
		exit, standing := m.repair()
		b := m.books()
		want := map[int]int{0: 4, 1: 3, 3: 0}[free]
		if len(b.unshown) != want || (exit == 0) != (want == 0) || len(standing["deficit"]) != want {
			t.Errorf("with %d units come free: exit status %d, %+v; %d orders unknown to Redis, want %d deficits", free, exit, standing, len(b.unshown), want)
		}
		for _, f := range standing["deficit"] {
			if !slices.Contains(lost, f.Subject) || !strings.Contains(f.Message, "no unit is left") {
				t.Errorf("%+v, want a deficit of one of the lost, and why", f)
			}
		}
		drift := standing["count_drift"] // says by how much
		if want > 0 && (len(drift) != 1 || !strings.Contains(drift[0].Message, fmt.Sprintf("deviation -%d", want))) {
			t.Errorf("%+v, want a deviation of -%d", drift, want)
		}
		delete(standing, "deficit")
		delete(standing, "count_drift")
		if len(standing) > 0 {
			t.Errorf("findings that nobody planted: %+v", standing)
		}
	}
	for _, id := range waiting {
		m.drop(id)
	}
	m.eventually(time.Minute, m.decided)
	running.end()
	if b := m.books(); b.reserved != b.orders || len(b.unshown) > 0 {
		t.Errorf("L2: %+v", b)
	}
}

// A real failover of a cluster: the replica has not had the newest writes when
// its master dies, and is promoted without them.
func TestSlowPromotedReplicaLacksTheNewestWrites(t *testing.T) {
	stack := stacktest.Own(t, devstack.Options{Redis: true, Cluster: true, Postgres: true, Brokers: 1})
	m := newSale(t, stack, hurried, leftToHand, func(c *config.Config) {
		c.Redis.Addrs = stack.Cluster().Addrs()
		c.Redis.CommandTimeout, c.Redis.DialTimeout = 500*time.Millisecond, 500*time.Millisecond
	}).market(60)
	running := m.serve()
	for range 10 {
		m.takeOrdered()
	}
	m.eventually(time.Minute, m.decided)
	dead := m.cutReplication()
	before := len(m.sold)
	for range 8 {
		m.takeOrdered()
		m.drop(m.take(time.Hour))
	}
	m.eventually(time.Minute, m.decided)
	for _, svc := range stack.Cluster() {
		if svc.Addr() == dead {
			if err := svc.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	m.eventually(2*time.Minute, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		n, err := m.redis.HExists(ctx, m.scope.StockKey(), "initial").Result()
		if err == nil && !n {
			t.Fatal("the promoted replica never had the scope")
		}
		return err
	})
	for _, one := range m.sold[before:] {
		if status := m.status(one.Reservation.ID); status != "" {
			t.Fatalf("%s is %s: the promoted replica has it, nothing was lost", one.Reservation.ID, status)
		}
	}
	m.eventually(time.Minute, m.decided)
	running.end()
	m.balanced()
}

// cutReplication stops the replica of the scope's slot from following, for
// good, and returns the address of its master.
func (m *market) cutReplication() string {
	m.t.Helper()
	ctx := m.t.Context()
	cluster, ok := m.redis.(*redis.ClusterClient)
	if !ok {
		m.t.Fatalf("%T is no cluster", m.redis)
	}
	master, err := cluster.MasterForKey(ctx, m.scope.StockKey())
	if err != nil {
		m.t.Fatal(err)
	}
	if n, err := master.Wait(ctx, 1, 10*time.Second).Result(); err != nil || n < 1 {
		m.t.Fatalf("%d replicas have the sale, %v", n, err)
	}
	replica, err := cluster.SlaveForKey(ctx, m.scope.StockKey())
	if err != nil {
		m.t.Fatal(err)
	}
	// A master that asks for no password refuses one that is given.
	if err := replica.ConfigSet(ctx, "masterauth", "wrong").Err(); err != nil {
		m.t.Fatal(err)
	}
	if err := master.Do(ctx, "client", "kill", "type", "replica").Err(); err != nil {
		m.t.Fatal(err)
	}
	m.eventually(time.Minute, func() error {
		info, err := master.InfoMap(ctx, "replication").Result()
		if err == nil && info["Replication"]["connected_slaves"] != "0" {
			err = fmt.Errorf("%s replicas follow", info["Replication"]["connected_slaves"])
		}
		return err
	})
	return master.Options().Addr
}
