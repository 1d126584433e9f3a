package reservation_test

import (
	"testing"

	"github.com/seckill/reconciler/reservation"
)

func TestParseRequestResult(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]reservation.RequestResult{
		"0|abc|9|QUEUED|alice":     {Code: 0, ReservationID: "abc", Remaining: 9, Status: "QUEUED", UserID: "alice"},
		"0|abc|-1|ENQUEUED|alice":  {Code: 0, ReservationID: "abc", Remaining: -1, Status: "ENQUEUED", UserID: "alice"},
		"15||0|SOLD_OUT|bob":       {Code: 15, Remaining: 0, Status: "SOLD_OUT", UserID: "bob"},
		"10|r|3|USER_ALREADY_R|bo": {Code: 10, ReservationID: "r", Remaining: 3, Status: "USER_ALREADY_R", UserID: "bo"},
	} {
		if got, err := reservation.ParseRequestResult(value); err != nil || got != want {
			t.Errorf("%s: %+v, %v", value, got, err)
		}
	}
	for _, bad := range []string{"", "0|a|1|QUEUED", "0|a|1|QUEUED|", "x|a|1|QUEUED|u", "0||1|QUEUED|u", "0|a b|1|QUEUED|u", "15||x|SOLD_OUT|u", "0|a|1|QUEUED|u|v"} {
		if got, err := reservation.ParseRequestResult(bad); err == nil {
			t.Errorf("%q was accepted: %+v", bad, got)
		}
	}
}
