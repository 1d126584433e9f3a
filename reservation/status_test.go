package reservation_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/reservation"
)

// legal is spec §3, written down a second time: what transition.lua may do.
var legal = map[[2]reservation.Status]bool{
	{"RESERVED", "SEND_UNKNOWN"}:        true,
	{"RESERVED", "ENQUEUED"}:            true,
	{"RESERVED", "RELEASE_PENDING"}:     true,
	{"SEND_UNKNOWN", "ENQUEUED"}:        true,
	{"SEND_UNKNOWN", "RELEASE_PENDING"}: true,
	{"ENQUEUED", "ORDER_CREATED"}:       true,
	{"ENQUEUED", "REJECTED"}:            true,
	{"ENQUEUED", "RELEASE_PENDING"}:     true,
	{"REJECTED", "RELEASE_PENDING"}:     true,
}

func TestTransitions(t *testing.T) {
	for _, from := range reservation.Statuses {
		for _, to := range reservation.Statuses {
			if got, want := reservation.CanTransition(from, to), legal[[2]reservation.Status{from, to}]; got != want {
				t.Errorf("CanTransition(%s, %s) = %v, want %v", from, to, got, want)
			}
		}
	}
}

func TestPath(t *testing.T) {
	for _, c := range []struct {
		from, to reservation.Status
		want     []reservation.Status
	}{
		{"RESERVED", "ORDER_CREATED", []reservation.Status{"ENQUEUED", "ORDER_CREATED"}},
		{"SEND_UNKNOWN", "ORDER_CREATED", []reservation.Status{"ENQUEUED", "ORDER_CREATED"}},
		{"ENQUEUED", "ORDER_CREATED", []reservation.Status{"ORDER_CREATED"}},
		{"RESERVED", "REJECTED", []reservation.Status{"ENQUEUED", "REJECTED"}},
		{"ENQUEUED", "RELEASE_PENDING", []reservation.Status{"RELEASE_PENDING"}},
		{"SEND_UNKNOWN", "RELEASE_PENDING", []reservation.Status{"RELEASE_PENDING"}},
		{"RELEASE_PENDING", "ORDER_CREATED", nil}, // confirm.lua alone
		{"RELEASE_PENDING", "RELEASED", nil},      // compensate.lua alone
		{"ORDER_CREATED", "RELEASED", nil},
		{"RELEASED", "ORDER_CREATED", nil},
	} {
		if diff := cmp.Diff(c.want, reservation.Path(c.from, c.to)); diff != "" {
			t.Errorf("Path(%s, %s): %s", c.from, c.to, diff)
		}
	}
}

func TestKnown(t *testing.T) {
	for _, s := range reservation.Statuses {
		if !s.Known() {
			t.Errorf("%s is not known", s)
		}
	}
	for _, s := range []reservation.Status{"", "reserved", "CANCELLED"} {
		if s.Known() {
			t.Errorf("%q is known", s)
		}
	}
}
