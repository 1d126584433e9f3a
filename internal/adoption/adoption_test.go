// Package adoption_test follows the adopting guide, docs/adopting.md, word by
// word against a shop that has tables of its own, and then lets that shop have
// every kind of trouble. It has no code but tests.
package adoption_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seckill/reconciler/reservation"
)

// installation are the guide's headings up to a working installation.
var installation = []string{"1. ", "2. ", "3. ", "4. ", "5. "}

const (
	reserved     = reservation.StatusReserved
	enqueued     = reservation.StatusEnqueued
	pending      = reservation.StatusReleasePending
	orderCreated = reservation.StatusOrderCreated
	released     = reservation.StatusReleased
)

func TestAdoption(t *testing.T) {
	l := openLaden(t)
	l.follow(installation...)
	for bucket := range int64(buckets) {
		l.tool(l.scope(bucket), perBucket)
	}
	l.follow("7. ")
	for _, part := range []struct {
		name string
		run  func(*laden)
	}{
		{"the least rights", (*laden).leastRights},
		{"stuck reservations settle", (*laden).stuckReservationsSettle},
		{"an unknown status is held", (*laden).unknownStatusIsHeld},
		{"drift", (*laden).drift},
		{"new partitions", (*laden).newPartitions},
		{"backing out", (*laden).backOut},
	} {
		if !t.Run(part.name, func(t *testing.T) {
			l.t = t
			part.run(l)
		}) {
			return // each goes on where the one before ended
		}
	}
}

// leastRights: the daemon's login sees orders through the view alone, and the
// consumer's knows nothing of the claims but the functions.
func (l *laden) leastRights() {
	for role, statements := range map[string][]string{
		"seckill_reconciler": {
			`SELECT FROM laden.bestellung`, `SELECT FROM laden.position`, `INSERT INTO seckill.reservation_claim (reservation_id, outcome) VALUES ('x', 'ORDER')`,
			`CREATE OR REPLACE VIEW seckill.order_evidence AS SELECT 1`, `SELECT seckill.remove_order_fence('16384')`,
		},
		"laden_consumer": {
			`SELECT FROM seckill.reservation_claim`, `SELECT FROM seckill.order_evidence`, `SELECT seckill.fence_reservations('{x}', 'x', NULL)`,
		},
		"laden_owner": {`SELECT FROM seckill.reservation_claim`, `SELECT FROM seckill.order_evidence`},
	} {
		conn := l.connect(role)
		for _, sql := range statements {
			_, err := conn.Exec(l.t.Context(), sql)
			if state := sqlState(err); state != "42501" { // insufficient_privilege
				l.t.Errorf("%s may run %q: %v", role, sql, err)
			}
		}
	}
	if _, err := l.connect("seckill_reconciler").Exec(l.t.Context(), `SELECT FROM seckill.order_evidence`); err != nil {
		l.t.Error(err)
	}
}

// stuckReservationsSettle: every way of being stuck ends, with the shop's own
// orders; what is released stays released, whoever tries.
func (l *laden) stuckReservationsSettle() {
	ordered := func(m reservation.OrderMessage) reservation.OrderMessage {
		l.order(created, m)
		return m
	}
	unsent := l.reserve()
	crashed := ordered(l.reserve(enqueued))            // the consumer died before it told Redis
	releasing := ordered(l.reserve(enqueued, pending)) // somebody wanted it released, and the order was faster
	cancelled := ordered(l.reserve(enqueued))
	l.changed(cancelled, `status = 'storniert'`)
	deleted := ordered(l.reserve(enqueued))
	l.changed(deleted, `geloescht_am = now()`)
	halfCancelled := ordered(l.reserve(enqueued))
	l.exec(l.super, `UPDATE laden.position SET storniert = true WHERE zeile = 1 AND bestell_nr = (SELECT bestell_nr FROM laden.bestellung WHERE vormerkung = $1)`, halfCancelled.ReservationID)
	lost := l.reserve(enqueued)
	unguarded := l.reserve(enqueued) // an order of an old consumer comes too late
	for _, m := range []reservation.OrderMessage{lost, unguarded} {
		l.redis.HSet(l.t.Context(), m.Scope().ReservationKey(m.ReservationID), "resend_count", "3")
	}
	soldOut := l.reserve(enqueued)
	l.exec(l.super, `UPDATE laden.kontingent SET verkauft = menge WHERE aktion = $1`, l.activity)
	l.order(rejected, soldOut)
	l.exec(l.super, `UPDATE laden.kontingent SET verkauft = (SELECT count(*) FROM laden.bestellung WHERE aktion = $1) WHERE aktion = $1`, l.activity)

	stop := l.run()
	l.becomes(enqueued, unsent) // the daemon sent its message
	l.order(created, unsent)
	l.becomes(orderCreated, unsent, crashed, releasing, cancelled, deleted, halfCancelled)
	l.becomes(released, lost, unguarded, soldOut)
	stop()

	l.order(fenced, lost)
	l.order(existed, crashed)
	_, err := l.consumer.Exec(l.t.Context(), `INSERT INTO laden.bestellung (kunde_nr, aktion, vormerkung, anfrage) VALUES ($1::bigint, $2, $3, $4)`,
		unguarded.UserID, l.activity, unguarded.ReservationID, unguarded.RequestID)
	if sqlState(err) != "SK001" {
		l.t.Errorf("a late order without a claim: %v, want SK001", err)
	}
	_, err = l.consumer.Exec(l.t.Context(), `INSERT INTO laden.bestellung (kunde_nr, aktion, vormerkung, anfrage) VALUES ($1::bigint, $2, $3, $4)`,
		crashed.UserID, l.activity, crashed.ReservationID, crashed.RequestID)
	if sqlState(err) != "SK002" {
		l.t.Errorf("a second order of one reservation: %v, want SK002", err)
	}
	l.agree(4, 2)
}

// agree wants a deep reconciliation without findings, and so many orders.
func (l *laden) agree(active, cancelled int64) {
	l.t.Helper()
	r, found := l.reconcile(0, "--deep")
	got := [2]int64{}
	for _, s := range r.Scopes {
		got[0] += s.Postgres.Active
		got[1] += s.Postgres.Cancelled
	}
	if len(found) > 0 || r.Verdict != "consistent" || got != [2]int64{active, cancelled} {
		l.t.Errorf("%s with %v; %d active and %d cancelled orders, want %d and %d", r.Verdict, found, got[0], got[1], active, cancelled)
	}
}

// unknownStatusIsHeld: a status that the view does not map is nobody's guess.
func (l *laden) unknownStatusIsHeld() {
	l.exec(l.connect("laden_owner"), `ALTER TYPE laden.bestellstatus ADD VALUE 'in_klaerung'`)
	held := l.reserve(enqueued)
	l.order(created, held)
	l.changed(held, `status = 'in_klaerung'`)
	releasing := l.reserve(enqueued, pending)
	l.order(created, releasing)
	l.changed(releasing, `status = 'in_klaerung'`)

	stop := l.run()
	l.eventually("a task", func() string {
		if out := l.want(0, "task", "list", "--output", "json"); !strings.Contains(out, "unknown_order_status") {
			return out
		}
		return ""
	})
	stop()
	if l.status(held) != enqueued || l.status(releasing) != pending {
		l.t.Errorf("%s and %s, want them as they were", l.status(held), l.status(releasing))
	}
	_, found := l.reconcile(2, "--deep")
	want := []string{"unknown_order_status " + held.ReservationID, "unknown_order_status " + releasing.ReservationID}
	slices.Sort(want)
	if diff := cmp.Diff(want, found); diff != "" {
		l.t.Errorf("findings (-want +got):\n%s", diff)
	}

	for _, b := range l.guide {
		if b.label == "orders.sql" {
			l.write("orders.sql", strings.Replace(b.text, "'versandt')", "'versandt', 'in_klaerung')", 1))
		}
	}
	l.want(0, "migrate", "evidence", "orders.sql")
	stop = l.run()
	l.becomes(orderCreated, held, releasing)
	stop()
	l.agree(6, 2)
}

// drift: what a failover takes from Redis is found, and nothing else.
func (l *laden) drift() {
	m := l.reserve(enqueued)
	l.order(created, m)
	stop := l.run()
	l.becomes(orderCreated, m)
	stop()
	l.agree(7, 2)

	// The reserve and all that followed is undone.
	s, ctx := m.Scope(), l.t.Context()
	l.redis.Del(ctx, s.ReservationKey(m.ReservationID))
	l.redis.Del(ctx, s.UserKey(m.UserID))
	l.redis.HDel(ctx, s.RequestKey(m.RequestID), m.RequestID)
	l.redis.HIncrBy(ctx, s.StockKey(), "available", 1)
	l.redis.HIncrBy(ctx, s.StockKey(), "reserved", -1)
	_, found := l.reconcile(2, "--deep")
	if diff := cmp.Diff([]string{"count_drift " + s.Tag(), "lost_reservation " + m.ReservationID}, found); diff != "" {
		l.t.Errorf("findings (-want +got):\n%s", diff)
	}
	l.env = append(l.env, "RECONCILER_MODE=act")
	l.reconcile(0, "--deep", "--repair", "--yes")
	l.agree(7, 2)
	if got := l.status(m); got != orderCreated {
		l.t.Errorf("restored as %q", got)
	}
}

// newPartitions: the fence is on a partition that comes later, and the orders
// that such a one brings get their claims.
func (l *laden) newPartitions() {
	l.follow("New partitions")
	insert := `INSERT INTO laden.bestellung (angelegt_am, kunde_nr, aktion, vormerkung, anfrage) VALUES ('2090-07-01', $1::bigint, $2, $3, $4)`
	args := func(m reservation.OrderMessage) []any {
		return []any{m.UserID, l.activity, m.ReservationID, m.RequestID}
	}
	fencedOff, late := l.reserve(enqueued), l.reserve(enqueued)
	l.redis.HSet(l.t.Context(), fencedOff.Scope().ReservationKey(fencedOff.ReservationID), "resend_count", "3")
	if _, err := l.consumer.Exec(l.t.Context(), insert, args(late)...); err != nil {
		l.t.Fatal(err)
	}
	l.exec(l.super, `INSERT INTO laden.position SELECT bestell_nr, angelegt_am, 1, 'A-100', 1, true FROM laden.bestellung WHERE vormerkung = $1`, late.ReservationID)
	if got := one[string](l, `SELECT outcome FROM seckill.reservation_claim WHERE reservation_id = $1`, late.ReservationID); got != "ORDER" {
		l.t.Errorf("the claim of an order in the new partition: %s", got)
	}
	stop := l.run()
	l.becomes(orderCreated, late)
	l.becomes(released, fencedOff)
	stop()
	if _, err := l.consumer.Exec(l.t.Context(), insert, args(fencedOff)...); sqlState(err) != "SK001" {
		l.t.Errorf("a late order in the new partition: %v, want SK001", err)
	}

	// Attached with an order in it, which no trigger saw.
	m := l.reserve(enqueued)
	owner := l.connect("laden_owner")
	l.exec(owner, `CREATE TABLE laden.archiv (LIKE laden.bestellung INCLUDING DEFAULTS)`)
	l.exec(owner, `INSERT INTO laden.archiv (bestell_nr, angelegt_am, kunde_nr, aktion, vormerkung, anfrage) VALUES (900, '2092-07-01', $1::bigint, $2, $3, $4)`, args(m)...)
	l.exec(owner, `ALTER TABLE laden.bestellung ATTACH PARTITION laden.archiv FOR VALUES FROM ('2092-01-01') TO ('2093-01-01')`)
	l.exec(owner, `INSERT INTO laden.position VALUES (900, '2092-07-01', 1, 'A-100', 1, true)`)
	if _, found := l.reconcile(2, "--deep"); !slices.Contains(found, "order_without_claim "+m.ReservationID) {
		l.t.Errorf("an order that no trigger saw: %v", found)
	}
	l.exec(owner, `SELECT seckill.restart_backfill('laden.bestellung')`)
	if got := one[int](l, `SELECT count(*)::int FROM seckill.fence_problems()`); got != 1 {
		l.t.Errorf("%d problems during the back-fill, want 1", got)
	}
	l.exec(owner, `CALL seckill.backfill_order_fence('laden.bestellung')`)
	if got := one[int](l, `SELECT count(*)::int FROM seckill.fence_problems()`); got != 0 {
		l.t.Errorf("%d problems after the back-fill", got)
	}
	stop = l.run()
	l.becomes(orderCreated, m)
	stop()
	l.agree(9, 2)
}

// backOut: the shop is as it was, and its consumer of before works.
func (l *laden) backOut() {
	l.follow("Backing out")
	if _, err := l.consumer.Exec(l.t.Context(), `INSERT INTO laden.bestellung (kunde_nr, aktion) VALUES (1, 'x')`); err != nil {
		l.t.Error(err)
	}
	if got := one[int](l, `SELECT count(*)::int FROM pg_trigger WHERE tgname LIKE '%seckill%'`); got != 0 {
		l.t.Errorf("%d triggers are left", got)
	}
}

func sqlState(err error) string {
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok {
		return refused.Code
	}
	return ""
}
