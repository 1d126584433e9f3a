package reservation_test

import (
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/seckill/reconciler/reservation"
)

func TestKeys(t *testing.T) {
	s := reservation.Scope{ActivityID: "10001", SKUID: "88001", Version: 7, Bucket: 0}
	const prefix = "seckill:{a:10001:s:88001:v:7:b:0}:"
	for _, key := range []struct{ got, want string }{
		{s.MetaKey(), prefix + "meta"},
		{s.StockKey(), prefix + "stock"},
		{s.SoldOutKey(), prefix + "soldout"},
		{s.UserKey("u1"), prefix + "user:u1"},
		{s.ReservationKey("r1"), prefix + "resv:r1"},
		{s.IndexKey(reservation.SendPending), prefix + "send_pending"},
		{s.IndexKey(reservation.ReservationExpiry), prefix + "reservation_expiry"},
		{s.TransferKey("t1"), prefix + "transfer:t1"},
		{s.RequestShardKey(0), prefix + "req:000"},
		{s.RequestShardKey(255), prefix + "req:255"},
		{s.RequestKey("req-1"), prefix + "req:017"},
		{s.EventsChannel(), prefix + "events"},
		{reservation.CurrentVersionKey("10001"), "seckill:activity:10001:current_version"},
	} {
		if key.got != key.want {
			t.Errorf("got %s, want %s", key.got, key.want)
		}
	}
}

// The expected shards and buckets were computed with a Python FNV-1a.
func TestShardAndBucketKnownAnswers(t *testing.T) {
	for request, want := range map[string]int{
		"req-1": 17, "a": 44, "0": 175, "": 197, "request_000000000000001": 138, "Zz-_9": 132,
	} {
		if got := reservation.RequestShard(request); got != want {
			t.Errorf("RequestShard(%q) = %d, want %d", request, got, want)
		}
	}
	for _, c := range []struct {
		activity, sku, user string
		buckets, want       int64
	}{
		{"10001", "88001", "u1", 4, 2},
		{"10001", "88001", "u1", 32, 14},
		{"10001", "88001", "u2", 4, 3},
		{"a", "s", "u", 7, 4},
		{"1", "12", "3", 16, 2},
		{"11", "2", "3", 16, 4},
		{"10001", "88001", "u1", 1, 0},
		{"10001", "88001", "u1", 0, 0},
	} {
		if got := reservation.BucketOf(c.activity, c.sku, c.user, c.buckets); got != c.want {
			t.Errorf("BucketOf(%s, %s, %s, %d) = %d, want %d", c.activity, c.sku, c.user, c.buckets, got, c.want)
		}
	}
}

func TestAllocation(t *testing.T) {
	if diff := cmp.Diff([]int64{4, 3, 3}, reservation.Allocation(10, 3)); diff != "" {
		t.Error(diff)
	}
	rapid.Check(t, func(t *rapid.T) {
		total, buckets := rapid.Int64Range(0, 1_000_000).Draw(t, "total"), rapid.Int64Range(-1, 64).Draw(t, "buckets")
		var sum int64
		for _, n := range reservation.Allocation(total, buckets) {
			sum += n
		}
		if sum != total {
			t.Fatalf("allocated %d of %d", sum, total)
		}
	})
}

func TestTagRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := rapid.StringMatching(`[A-Za-z0-9_-]{1,128}`)
		s := reservation.Scope{
			ActivityID: id.Draw(t, "activity"),
			SKUID:      id.Draw(t, "sku"),
			Version:    rapid.Int64Range(0, reservation.MaxNumber-1).Draw(t, "version"),
			Bucket:     rapid.Int64Range(0, reservation.MaxNumber-1).Draw(t, "bucket"),
		}
		got, err := reservation.ParseTag(s.Tag())
		if err != nil || got != s {
			t.Fatalf("ParseTag(%s) = %v, %v", s.Tag(), got, err)
		}
	})
	for _, bad := range []string{
		"", "a:1:s:2:v:3", "a:1:s:2:v:03:b:0", "a:1:s:2:v:3:b:-1", "a:1:s:2:v:3:b:0 ", "a::s:2:v:3:b:0",
		"a:{1}:s:2:v:3:b:0", "a:1:s:2:v:" + strconv.FormatInt(reservation.MaxNumber, 10) + ":b:0",
	} {
		if s, err := reservation.ParseTag(bad); err == nil {
			t.Errorf("ParseTag(%q) = %v, want an error", bad, s)
		}
	}
}
