package reservation_test

import (
	"testing"

	"github.com/seckill/reconciler/reservation"
)

func TestOrderMessage(t *testing.T) {
	t.Parallel()
	m := reservation.NewOrderMessage(reservation.Reservation{
		ID: "r1", MessageID: reservation.MessageID("r1"), RequestID: "q", ActivityID: "10001", SKUID: "88001", UserID: "u",
		Version: 7, Bucket: 0, ReservedAtMS: 1_700_000_000_000,
	})
	body, err := m.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	want := `{"schema_version":1,"message_id":"reserve-order:r1:v1","reservation_id":"r1","request_id":"q",` +
		`"activity_id":"10001","sku_id":"88001","user_id":"u","activity_version":7,"bucket_id":0,"reserved_at_ms":1700000000000}`
	if string(body) != want {
		t.Errorf("body\n%s\nwant\n%s", body, want)
	}
	if scope := m.Scope(); scope != (reservation.Scope{ActivityID: "10001", SKUID: "88001", Version: 7}) {
		t.Errorf("scope %s", scope)
	}
	back, err := reservation.ParseOrderMessage(append(body[:len(body)-1], `,"new":1}`...))
	if err != nil || back != m {
		t.Errorf("parsed %+v, %v", back, err)
	}
	for _, bad := range []string{"", "{}", `{"schema_version":2}`, `{"schema_version":1,"reservation_id":"a b"}`, `{"schema_version":1,"reservation_id":"a","message_id":"b"}`} {
		if _, err := reservation.ParseOrderMessage([]byte(bad)); err == nil {
			t.Errorf("%s was accepted", bad)
		}
	}
}
