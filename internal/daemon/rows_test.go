package daemon_test

import (
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reservation"
)

// passes runs n single passes, each after what the last one deferred is due.
func (s *sale) passes(d *daemon.Daemon, n int) daemon.Verdict {
	s.t.Helper()
	var v daemon.Verdict
	for range n {
		due()
		v = d.Once(s.t.Context())
		if err := v.Err(); err != nil {
			s.t.Logf("pass: %v", err)
		}
	}
	return v
}

// Each reservation is stuck in its own way; the daemon drives every one of
// them to where its row of the table says (protocol §3).
func TestEveryRowIsDrivenToItsEnd(t *testing.T) {
	t.Parallel()
	stack := stacktest.Shared(t)
	for name, addrs := range map[string][]string{
		"standalone": {stack.Redis().Addr()}, "7.0": {stack.RedisFloor().Addr()}, "cluster": stack.Cluster().Addrs(),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			driveEveryRow(newSale(t, stack, func(c *config.Config) { c.Redis.Addrs = addrs }))
		})
	}
}

func driveEveryRow(s *sale) {
	t := s.t
	t.Helper()
	d := s.open()
	claim := func(id, outcome string) {
		s.exec(`INSERT INTO seckill.reservation_claim (reservation_id, outcome, claimed_by) VALUES ($1, $2, 'test')`, id, outcome)
	}

	ids := map[string]string{}
	ids["1 leftover member"] = s.expired("ENQUEUED")
	s.mustOrder(ids["1 leftover member"])
	s.walk(ids["1 leftover member"], "ORDER_CREATED")
	s.redis.ZAdd(t.Context(), s.scope.IndexKey(reservation.ReservationExpiry), z(ids["1 leftover member"], 1))
	ids["2 contradiction"] = s.expired("ENQUEUED")
	claim(ids["2 contradiction"], "ORDER")
	ids["3 release pending, order"] = s.expired("RELEASE_PENDING")
	s.mustOrder(ids["3 release pending, order"])
	ids["4 release pending"] = s.expired("RELEASE_PENDING")
	ids["4 rejected"] = s.expired("ENQUEUED", "REJECTED")
	ids["5 rejected, claimed"] = s.expired("ENQUEUED", "REJECTED")
	claim(ids["5 rejected, claimed"], "REJECTED")
	ids["6 reserved, order"] = s.expired()
	s.mustOrder(ids["6 reserved, order"])
	ids["6 send unknown, order"] = s.expired("SEND_UNKNOWN")
	s.mustOrder(ids["6 send unknown, order"])
	ids["6 enqueued, order"] = s.expired("ENQUEUED")
	s.mustOrder(ids["6 enqueued, order"])
	ids["7 reserved, rejected"] = s.expired()
	claim(ids["7 reserved, rejected"], "REJECTED")
	ids["8 enqueued, fenced"] = s.expired("ENQUEUED")
	claim(ids["8 enqueued, fenced"], "FENCED")
	ids["9 reserved"] = s.expired()
	ids["9 send unknown"] = s.expired("SEND_UNKNOWN")
	ids["9 lost from send_pending"] = s.expired()
	s.redis.ZRem(t.Context(), s.scope.IndexKey(reservation.SendPending), ids["9 lost from send_pending"])
	ids["10 not expired"] = s.reserve(time.Hour)
	s.walk(ids["10 not expired"], "ENQUEUED")
	ids["12 lost message"] = s.expired("ENQUEUED")
	ids["0 malformed"] = s.expired("ENQUEUED")
	s.redis.HSet(t.Context(), s.scope.ReservationKey(ids["0 malformed"]), "expires_at_ms", "soon")
	ids["orphan"] = s.expired("ENQUEUED")
	s.redis.Del(t.Context(), s.scope.ReservationKey(ids["orphan"]))

	s.passes(d, 14)

	want := map[string]reservation.Status{
		"1 leftover member":        "ORDER_CREATED",
		"2 contradiction":          "ENQUEUED",
		"3 release pending, order": "ORDER_CREATED",
		"4 release pending":        "RELEASED",
		"4 rejected":               "RELEASED",
		"5 rejected, claimed":      "RELEASED",
		"6 reserved, order":        "ORDER_CREATED",
		"6 send unknown, order":    "ORDER_CREATED",
		"6 enqueued, order":        "ORDER_CREATED",
		"7 reserved, rejected":     "RELEASED",
		"8 enqueued, fenced":       "RELEASED",
		"9 reserved":               "ENQUEUED",
		"9 send unknown":           "ENQUEUED",
		"9 lost from send_pending": "ENQUEUED",
		"10 not expired":           "ENQUEUED",
		"12 lost message":          "ENQUEUED", // resent: its message waits now
		"0 malformed":              "ENQUEUED",
		"orphan":                   "",
	}
	got := map[string]reservation.Status{}
	var all []string
	for name, id := range ids {
		got[name] = s.status(id)
		all = append(all, id)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	s.holdsPromises(all)
	if diff := cmp.Diff(map[string]int64{"order_missing": 1, "malformed_reservation": 1, "orphan_member": 1}, s.tasks()); diff != "" {
		t.Errorf("tasks: %s", diff)
	}
	if n := s.hash(ids["12 lost message"])["resend_count"]; n != "1" {
		t.Errorf("a lost message was resent %s times, want 1: then it waits for its consumer", n)
	}
	if members, _ := s.redis.ZRange(t.Context(), s.scope.IndexKey(reservation.ReservationExpiry), 0, -1).Result(); slices.Contains(members, ids["1 leftover member"]) {
		t.Error("the leftover member of a decided reservation is still indexed")
	}
	for _, name := range []string{"9 reserved", "9 send unknown", "12 lost message"} {
		if s.hash(ids[name])["mq_position"] == "" {
			t.Errorf("%s: sent, and no mq_position", name)
		}
	}
}

// A message that no broker ever keeps is sent max_resends times, and then its
// unit is given back.
func TestLostMessageIsReleasedAfterItsResends(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t))
	d := s.open()
	id := s.expired("ENQUEUED")
	s.redis.HSet(t.Context(), s.scope.ReservationKey(id), "resend_count", "3")
	s.passes(d, 2)
	if got := s.status(id); got != reservation.StatusReleased {
		t.Errorf("status %s, want RELEASED", got)
	}
	if err := s.order(id); !fencedOff(err) {
		t.Errorf("an order after the release: %v, want SK001", err)
	}
	s.holdsPromises([]string{id})
}

func TestObserveChangesNothing(t *testing.T) {
	t.Parallel()
	s := newSale(t, stacktest.Shared(t), func(c *config.Config) { c.Mode = config.ModeObserve })
	ids := []string{s.expired(), s.expired("ENQUEUED"), s.expired("RELEASE_PENDING"), s.expired("ENQUEUED", "REJECTED"), s.expired("SEND_UNKNOWN")}
	s.mustOrder(ids[1])
	before := s.dump(ids)
	v := s.passes(s.open(), 2)
	if diff := cmp.Diff(before, s.dump(ids)); diff != "" {
		t.Errorf("observe changed Redis: %s", diff)
	}
	for _, id := range ids {
		if claim := s.claim(id); claim != "" && id != ids[1] {
			t.Errorf("observe claimed %s: %s", id, claim)
		}
	}
	for _, job := range v.Jobs {
		// Of what the others do, nothing here asks for any.
		works := slices.Contains([]string{daemon.JobScanner, daemon.JobFencer, daemon.JobCompensator}, job.Job)
		if works && job.Counts["seen"] == 0 {
			t.Errorf("%s saw nothing: observe must decide and count all the same", job.Job)
		}
	}
}

// dump is everything of the scope in Redis that a worker could change.
func (s *sale) dump(ids []string) map[string]any {
	s.t.Helper()
	all := map[string]any{"stock": s.stock()}
	for _, id := range ids {
		all[id] = s.hash(id)
	}
	for _, index := range []reservation.Index{reservation.SendPending, reservation.ReservationExpiry} {
		members, err := s.redis.ZRangeWithScores(s.t.Context(), s.scope.IndexKey(index), 0, -1).Result()
		if err != nil {
			s.t.Fatal(err)
		}
		all[string(index)] = members
	}
	return all
}
