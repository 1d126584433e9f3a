package probe

import (
	"errors"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/reservation"
)

const info = "# Server\r\nredis_version:7.0.15\r\nrole:master\r\nused_memory:100\r\nmaxmemory:0\r\nevicted_keys:3\r\nmaster_repl_offset:500\r\n" +
	"connected_slaves:2\r\nslave0:ip=10.0.0.2,port=6379,state=online,offset=480,lag=1\r\nslave1:ip=10.0.0.1,port=6380,state=send_bulk,offset=0,lag=9\r\n" +
	"aof_enabled:1\r\naof_last_write_status:ok\r\nlatest_fork_usec:1500\r\nused_cpu_sys:1.5\r\nused_cpu_user:2.25\r\n"

func TestParseRedisInfo(t *testing.T) {
	got, role, replicas, err := ParseRedisInfo(info)
	if err != nil || role != RoleMaster {
		t.Fatalf("role %s, %v", role, err)
	}
	want := RedisInfo{
		Version: "7.0.15", UsedMemory: 100, EvictedKeys: 3, ConnectedReplicas: 2, GoodReplicas: -1, ReplOffset: 500,
		AOFEnabled: true, AOFWriteOK: true, ForkSeconds: 0.0015, CPUSystem: 1.5, CPUUser: 2.25,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	behind := []RedisReplica{{"10.0.0.1:6380", false, 500, 9}, {"10.0.0.2:6379", true, 20, 1}}
	if diff := cmp.Diff(behind, replicas); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	limited, _, _, err := ParseRedisInfo(info + "min_slaves_good_slaves:0\r\n")
	if err != nil || limited.GoodReplicas != 0 {
		t.Errorf("min-replicas-to-write is set: %d good replicas, %v", limited.GoodReplicas, err)
	}
	for _, bad := range []string{"", "role:master\r\n", info + "evicted_keys:many\r\n", info + "slave2:ip=a,port=1,state=online,offset=x,lag=0\r\n"} {
		if _, _, _, err := ParseRedisInfo(bad); err == nil {
			t.Errorf("accepted: %q", bad)
		}
	}
}

func TestParseClusterNodes(t *testing.T) {
	got := ParseClusterNodes(`a1 10.0.0.1:6379@16379,host myself,master - 0 0 1 connected 0-5460
b1 10.0.0.2:6379@16379 slave a1 0 0 1 connected
c1 10.0.0.3:6379@16379 master,fail - 0 0 2 disconnected 5461-10922
d1 :0@0 master,noaddr - 0 0 3 disconnected
e1 10.0.0.5:6379@16379 handshake - 0 0 0 connected
`)
	want := []ClusterNode{{"10.0.0.1:6379", RoleMaster, false}, {"10.0.0.2:6379", RoleReplica, false}, {"10.0.0.3:6379", RoleMaster, true}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

func TestKeySizes(t *testing.T) {
	even, few, uneven := make([]int64, 256), make([]int64, 256), make([]int64, 256)
	for i := range even {
		even[i], uneven[i] = 100, 100
	}
	few[3], uneven[7] = 50, 1000
	for name, tt := range map[string]struct {
		fields []int64
		skew   float64
	}{"even": {even, 1}, "too few to say": {few, 1}, "uneven": {uneven, 1000 / ((100*255.0 + 1000) / 256)}, "none": {nil, 1}} {
		if got := (KeySizes{Fields: tt.fields}).Skew(); math.Abs(got-tt.skew) > 1e-9 {
			t.Errorf("%s: %f, want %f", name, got, tt.skew)
		}
	}
	before := KeySizes{AtMS: 1000, Fields: []int64{10, 10}}
	for name, tt := range map[string]struct {
		after KeySizes
		want  float64
	}{
		"half a second":   {KeySizes{AtMS: 1500, Fields: []int64{60, 10}}, 100},
		"fewer":           {KeySizes{AtMS: 2000, Fields: []int64{0, 0}}, 0},
		"clock went back": {KeySizes{AtMS: 900, Fields: []int64{60, 10}}, 0},
		"unread":          {KeySizes{AtMS: 2000, Fields: []int64{60, 10}, Err: errors.New("x")}, 0},
		"another":         {KeySizes{AtMS: 2000, Fields: []int64{60, 10}, Scope: reservation.Scope{ActivityID: "a"}}, 0},
	} {
		if got := tt.after.RequestRate(before); got != tt.want {
			t.Errorf("%s: %f, want %f", name, got, tt.want)
		}
	}
	if got, want := SpreadOf([]int64{2, 4, 6}), (Spread{2, 6, 8.0 / 3}); math.Abs(got.Variance-want.Variance) > 1e-9 || got.Min != 2 || got.Max != 6 {
		t.Errorf("spread %+v, want %+v", got, want)
	}
}

func TestSubscriptionTakes(t *testing.T) {
	for _, tt := range []struct {
		s            Subscription
		tag          string
		takes, known bool
	}{
		{Subscription{"TAG", "*"}, "", true, true},
		{Subscription{"", ""}, "x", true, true},
		{Subscription{"TAG", "a || b"}, "b", true, true},
		{Subscription{"TAG", "a||b"}, "c", false, true},
		{Subscription{"TAG", "a"}, "", false, true},
		{Subscription{"SQL92", "x > 1"}, "a", false, false},
	} {
		if takes, known := tt.s.Takes(tt.tag); takes != tt.takes || known != tt.known {
			t.Errorf("%+v with tag %q: %t, %t", tt.s, tt.tag, takes, known)
		}
	}
}
