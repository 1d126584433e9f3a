package reconcile_test

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// sold is a sale with reservations in every state that is none of a fault.
func sold(t *testing.T, s *sale) []booking {
	t.Helper()
	all := s.reserve(60)
	s.order(all[:40]...)
	s.finish(all[:30]...) // 10 have an order and are still in reservation_expiry
	s.release(all[55:]...)
	s.exec(`UPDATE shop.orders SET status = 'CANCELLED' WHERE user_id IN ('u0', 'u1', 'u35')`)
	return all
}

// every runs a test on each of the four Redis deployments.
func every(t *testing.T, buckets int64, test func(t *testing.T, s *sale)) {
	t.Helper()
	stack := stacktest.Shared(t)
	for _, target := range stacktest.RedisTargets(t) {
		t.Run(target.Name, func(t *testing.T) {
			t.Parallel()
			test(t, newSale(t, stack, target.Addrs, buckets))
		})
	}
}

// one runs a test on the main Redis.
func one(t *testing.T, buckets int64) *sale {
	t.Helper()
	t.Parallel()
	stack := stacktest.Shared(t)
	return newSale(t, stack, []string{stack.Redis().Addr()}, buckets)
}

func TestConsistentSale(t *testing.T) {
	every(t, 2, func(t *testing.T, s *sale) {
		t.Helper()
		s.want(s.run(s.options()), "consistent", "b0 +0", "b1 +0")
		sold(t, s)
		r := s.run(s.options())
		s.want(r, "consistent", "b0 +0", "b1 +0")
		var got [5]int64
		for _, row := range r.Scopes {
			if row.InMotion {
				t.Errorf("%+v: in motion, but nothing moves", row)
			}
			for i, n := range []int64{*row.Redis.Reserved, *row.Redis.ReleasedTotal, *row.Redis.ReservationExpiry, row.Postgres.Active, row.Postgres.Cancelled} {
				got[i] += n
			}
		}
		if want := [5]int64{55, 5, 25, 37, 3}; got != want {
			t.Errorf("reserved, released, expiry, active, cancelled: %v, want %v", got, want)
		}
	})
}

func TestFaults(t *testing.T) {
	for name, c := range map[string]struct {
		fault func(s *sale, all []booking)
		want  []string
	}{
		"leaked unit": {
			func(s *sale, _ []booking) { s.leak(s.scopes[1], 1) },
			[]string{"drift", "count_drift 1", "b0 +0", "b1 +1"},
		},
		"lost reservations": {
			func(s *sale, _ []booking) { s.leak(s.scopes[0], -2) },
			[]string{"drift", "count_drift 0", "b0 -2", "b1 +0"},
		},
		"a reserve that a failover undid": {
			func(s *sale, all []booking) {
				b := all[0] // a cancelled order, whose hash is gone, holds nothing
				s.do("del", b.scope.ReservationKey(b.id))
				s.leak(b.scope, -1)
			},
			[]string{"consistent", "b0 +0", "b1 +0"},
		},
		"one lost and one leaked cancel out": {
			func(s *sale, all []booking) {
				s.order(all[50])
				s.do("zrem", all[50].scope.IndexKey(reservation.ReservationExpiry), all[50].id)
				s.do("zrem", all[51].scope.IndexKey(reservation.ReservationExpiry), all[51].id)
				s.leak(all[51].scope, -1)
			},
			[]string{"consistent", "b0 +0", "b1 +0"},
		},
		"broken invariant": {
			func(s *sale, _ []booking) { s.do("hincrby", s.scopes[0].StockKey(), "available", 3) },
			[]string{"drift", "invariant_broken 0", "b0 +0", "b1 +0"},
		},
		"negative stock": {
			func(s *sale, _ []booking) {
				s.do("hset", s.scopes[0].StockKey(), "initial", 1, "available", -5, "reserved", 6)
			},
			[]string{"drift", "allocation_mismatch 0", "count_drift 0", "invariant_broken 0", "b0 -", "b1 +0"},
		},
		"missing stock": {
			func(s *sale, _ []booking) { s.do("del", s.scopes[1].StockKey()) },
			[]string{"incomplete", "config_missing 1", "redis 1", "b0 +0", "b1 ?"},
		},
		"incomplete stock": {
			func(s *sale, _ []booking) { s.do("hdel", s.scopes[1].StockKey(), "reserved") },
			[]string{"incomplete", "config_missing 1", "redis 1", "b0 +0", "b1 ?"},
		},
		"missing meta": {
			func(s *sale, _ []booking) { s.do("del", s.scopes[1].MetaKey()) },
			[]string{"incomplete", "config_missing 1", "redis 1", "b0 +0", "b1 ?"},
		},
		"incomplete meta": {
			func(s *sale, _ []booking) { s.do("hdel", s.scopes[1].MetaKey(), "ends_at_ms") },
			[]string{"incomplete", "config_missing 1", "redis 1", "b0 +0", "b1 ?"},
		},
		"stock of another type": {
			func(s *sale, _ []booking) { s.do("set", s.scopes[0].StockKey(), "x") },
			[]string{"incomplete", "invariant_broken 0", "redis 0", "b0 ?", "b1 +0"},
		},
		"stock that is no number": {
			func(s *sale, _ []booking) { s.do("hset", s.scopes[0].StockKey(), "available", "many") },
			[]string{"incomplete", "invariant_broken 0", "redis 0", "b0 ?", "b1 +0"},
		},
		"index of another type": {
			func(s *sale, _ []booking) { s.do("set", s.scopes[0].IndexKey(reservation.ReservationExpiry), "x") },
			[]string{"incomplete", "invariant_broken 0", "redis 0", "b0 ?", "b1 +0"},
		},
		"allocation": {
			func(s *sale, _ []booking) {
				s.do("hincrby", s.scopes[1].StockKey(), "initial", 7)
				s.do("hincrby", s.scopes[1].StockKey(), "available", 7)
			},
			[]string{"drift", "allocation_mismatch 1", "b0 +0", "b1 +0"},
		},
		"an order of another bucket": {
			func(s *sale, all []booking) {
				b := all[50]
				b.scope.Bucket = 9
				s.order(b)
			},
			[]string{"drift", "unregistered_scope 9", "b0 +0", "b1 +0"},
		},
		"a corrupt score": {
			func(s *sale, all []booking) {
				s.do("zadd", all[50].scope.IndexKey(reservation.ReservationExpiry), "-inf", all[50].id)
			},
			[]string{"consistent", "b0 +0", "b1 +0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := one(t, 2)
			all := sold(t, s)
			c.fault(s, all)
			r := s.run(s.options())
			for i, line := range c.want {
				if strings.HasSuffix(line, " -") { // any number below zero
					c.want[i] = short(r)[i]
				}
			}
			s.want(r, c.want...)
			for _, f := range r.Findings {
				if f.Rounds < 2 || f.Message == "" || f.Repair.Detail == "" {
					t.Errorf("finding %+v", f)
				}
			}
		})
	}
}

func TestFilters(t *testing.T) {
	s := one(t, 2)
	sold(t, s)
	s.leak(s.scopes[0], 1)
	bucket := func(n int64) *int64 { return &n }
	for name, c := range map[string]struct {
		f    reconcile.Filter
		want []string
	}{
		"bucket with the fault":    {reconcile.Filter{Bucket: bucket(0)}, []string{"drift", "count_drift 0", "b0 +1"}},
		"bucket without it":        {reconcile.Filter{Bucket: bucket(1)}, []string{"consistent", "b1 +0"}},
		"activity and SKU":         {reconcile.Filter{ActivityID: s.scopes[0].ActivityID, SKUID: "sku"}, []string{"drift", "count_drift 0", "b0 +1", "b1 +0"}},
		"version":                  {reconcile.Filter{Version: bucket(1)}, []string{"drift", "count_drift 0", "b0 +1", "b1 +0"}},
		"everything":               {reconcile.Filter{}, []string{"drift", "count_drift 0", "b0 +1", "b1 +0"}},
		"everything, one check":    {reconcile.Filter{}, []string{"consistent", "b0 ?", "b1 ?"}},
		"a check of orders, alone": {reconcile.Filter{}, []string{"consistent", "b0 ?", "b1 ?"}},
	} {
		o := s.options()
		o.Filter = c.f
		switch name {
		case "everything, one check":
			o.Checks = []string{reconcile.CheckInvariantBroken}
		case "a check of orders, alone":
			o.Checks = []string{reconcile.CheckUnregisteredScope}
		}
		t.Run(name, func(t *testing.T) {
			s.t = t
			s.want(s.run(o), c.want...)
		})
	}
}

// A shop of its own: other names, several lines of an order, no columns for
// version and bucket, statuses that the view does not map.
func TestAdoptersView(t *testing.T) {
	s := one(t, 4)
	s.exec(`DROP VIEW seckill.order_evidence`)
	s.exec(`CREATE TABLE shop.lines (number text, reservation text, item text, buyer text, state text)`)
	s.exec(`CREATE VIEW seckill.order_evidence AS
		SELECT reservation AS reservation_id, number AS order_id, 'q'::text AS request_id, '` + s.scopes[0].ActivityID + `'::text AS activity_id,
		       item AS sku_id, NULL::bigint AS activity_version, NULL::bigint AS bucket_id, buyer AS user_id,
		       CASE state WHEN 'open' THEN true WHEN 'void' THEN false END AS active, NULL::timestamptz AS created_at
		FROM shop.lines`)
	s.exec(`GRANT SELECT ON seckill.order_evidence TO seckill_daemon`)
	all := s.reserve(80)
	lines := func(b booking, states ...string) {
		for _, state := range states {
			s.exec(`INSERT INTO shop.lines VALUES ('n' || $1, $1, 'sku', $2, $3)`, b.id, b.user, state)
		}
	}
	for _, b := range all[:50] {
		lines(b, "open", "void")
	}
	for _, b := range all[50:60] {
		lines(b, "void", "void")
	}
	s.finish(all[:55]...)
	r := s.run(s.options())
	s.want(r, "consistent", "b0 +0", "b1 +0", "b2 +0", "b3 +0")
	var active, cancelled int64
	for _, row := range r.Scopes {
		active, cancelled = active+row.Postgres.Active, cancelled+row.Postgres.Cancelled
	}
	if active != 50 || cancelled != 10 {
		t.Errorf("%d active and %d cancelled, want 50 and 10", active, cancelled)
	}
	s.leak(s.scopes[2], 1)
	s.want(s.run(s.options()), "drift", "count_drift 2", "b0 +0", "b1 +0", "b2 +1", "b3 +0")
	s.leak(s.scopes[2], -1)

	lines(all[60], "odd") // it holds its unit whatever the status means
	s.want(s.run(s.options()), "consistent", "b0 +0", "b1 +0", "b2 +0", "b3 +0")
	s.release(all[61])
	lines(all[61], "odd")
	r = s.run(s.options())
	if r.Verdict != reconcile.VerdictIncomplete || len(r.Incomplete) != 1 || len(r.Findings) != 0 ||
		*r.Incomplete[0].Scope != (reconcile.Scope{ActivityID: s.scopes[0].ActivityID, SKUID: "sku", Version: 1, Bucket: all[61].scope.Bucket}) {
		t.Errorf("an order of unknown status: %v %+v", short(r), r.Incomplete)
	}
}

// The JSON is a contract with other programs: its names, its types and its
// order do not change by accident. Rewrite the file with UPDATE_GOLDEN=1.
func TestReportAsJSON(t *testing.T) {
	s := one(t, 2)
	s.inTurn = true
	sold(t, s)
	s.leak(s.scopes[1], 1)
	s.do("del", s.scopes[0].StockKey(), s.scopes[0].MetaKey())
	got, err := json.MarshalIndent(s.run(s.options()), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.ReplaceAll(string(got), s.scopes[0].ActivityID, "ACTIVITY")
	for pattern, with := range map[string]string{
		`"run_id": "\d{8}T\d{6}Z-[a-z0-9]{8}"`:            `"run_id": "RUN"`,
		`_at": "\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"`: `_at": "TIME"`,
	} {
		text = regexp.MustCompile(pattern).ReplaceAllString(text, with)
	}
	const golden = "testdata/report.golden.json"
	if os.Getenv("UPDATE_GOLDEN") != "" {
		if err := os.WriteFile(golden, []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), text+"\n"); diff != "" {
		t.Errorf("report (-want +got):\n%s", diff)
	}
}
