package reservation_test

import (
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/reservation"
)

var testScope = reservation.Scope{ActivityID: "10001", SKUID: "88001", Version: 7, Bucket: 3}

// wellFormed is the hash that reserve.lua writes, with every optional field set.
func wellFormed() map[string]string {
	return map[string]string{
		"reservation_id": "r1", "request_id": "q1", "message_id": "reserve-order:r1:v1",
		"activity_id": "10001", "sku_id": "88001", "user_id": "u1", "activity_version": "7", "bucket_id": "3",
		"status": "ENQUEUED", "reserved_at_ms": "1000", "expires_at_ms": "2000", "updated_at_ms": "1500",
		"order_id": "o1", "error_code": "E", "release_reason": "R", "released_at_ms": "0", "schema_version": "1",
		"retry_count": "4", "send_count": "1", "resend_count": "2", "last_sent_at_ms": "1400",
		"mq_position": "b1,2,30,7F000001",
	}
}

func TestParse(t *testing.T) {
	got, err := reservation.Parse(testScope, "r1", wellFormed())
	if err != nil {
		t.Fatal(err)
	}
	want := reservation.Reservation{
		ID: "r1", RequestID: "q1", MessageID: "reserve-order:r1:v1", ActivityID: "10001", SKUID: "88001", UserID: "u1",
		Version: 7, Bucket: 3, Status: reservation.StatusEnqueued, ReservedAtMS: 1000, ExpiresAtMS: 2000, UpdatedAtMS: 1500,
		OrderID: "o1", ErrorCode: "E", ReleaseReason: "R", SchemaVersion: 1, RetryCount: 4, SendCount: 1, ResendCount: 2,
		LastSentAtMS: 1400, Position: "b1,2,30,7F000001",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if len(reservation.Fields) != len(wellFormed()) {
		t.Errorf("Fields names %d fields, the contract has %d", len(reservation.Fields), len(wellFormed()))
	}
	for _, f := range reservation.Fields {
		if _, ok := wellFormed()[f]; !ok {
			t.Errorf("Fields names %s, which the contract lacks", f)
		}
	}
}

func TestParseMalformed(t *testing.T) {
	set := func(field, value string) func(map[string]string) {
		return func(h map[string]string) { h[field] = value }
	}
	unset := func(fields ...string) func(map[string]string) {
		return func(h map[string]string) {
			for _, f := range fields {
				delete(h, f)
			}
		}
	}
	for name, c := range map[string]struct {
		change func(map[string]string)
		want   string // "" when well-formed
	}{
		"complete":                       {func(map[string]string) {}, ""},
		"status unknown":                 {set("status", "PAID"), "unknown_status: status"},
		"status absent":                  {unset("status"), "unknown_status: status"},
		"id of another":                  {set("reservation_id", "r2"), "id_mismatch: reservation_id"},
		"id absent":                      {unset("reservation_id"), "id_mismatch: reservation_id"},
		"user absent":                    {unset("user_id"), "missing_field: user_id"},
		"user empty":                     {set("user_id", ""), "missing_field: user_id"},
		"request absent":                 {unset("request_id"), "missing_field: request_id"},
		"message absent":                 {unset("message_id"), "missing_field: message_id"},
		"message of another":             {set("message_id", "reserve-order:r2:v1"), "message_mismatch: message_id"},
		"number with sign":               {set("retry_count", "-1"), "not_a_number: retry_count"},
		"number empty":                   {set("send_count", ""), "not_a_number: send_count"},
		"number with a point":            {set("reserved_at_ms", "1.5"), "not_a_number: reserved_at_ms"},
		"number too large":               {set("updated_at_ms", "9007199254740992"), "not_a_number: updated_at_ms"},
		"number beyond 64 bits":          {set("updated_at_ms", "99999999999999999999"), "not_a_number: updated_at_ms"},
		"number below the limit":         {set("updated_at_ms", "9007199254740991"), ""},
		"expiry absent":                  {unset("expires_at_ms"), "missing_field: expires_at_ms"},
		"expiry absent, terminal":        {func(h map[string]string) { delete(h, "expires_at_ms"); h["status"] = "RELEASED" }, ""},
		"optional fields absent":         {unset("order_id", "error_code", "retry_count", "send_count", "mq_position", "last_sent_at_ms"), ""},
		"text empty is absent":           {set("order_id", ""), ""},
		"scope fields absent":            {unset("activity_id", "sku_id", "activity_version", "bucket_id"), ""},
		"another activity":               {set("activity_id", "10002"), "scope_mismatch: activity_id"},
		"another version":                {set("activity_version", "8"), "scope_mismatch: activity_version"},
		"another bucket":                 {set("bucket_id", "0"), "scope_mismatch: bucket_id"},
		"unknown fields are not ours":    {set("extra", "x"), ""},
		"first fault names the hash":     {func(h map[string]string) { h["status"] = "X"; h["user_id"] = "" }, "unknown_status: status"},
		"number checked though terminal": {func(h map[string]string) { h["status"] = "RELEASED"; h["retry_count"] = "x" }, "not_a_number: retry_count"},
	} {
		t.Run(name, func(t *testing.T) {
			h := maps.Clone(wellFormed())
			c.change(h)
			m := reservation.NewMember(testScope, "r1", h)
			got := ""
			if m.Malformed != nil {
				got = m.Malformed.Error()
			}
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
			if m.Missing {
				t.Error("a hash with fields counts as missing")
			}
		})
	}
	h := wellFormed()
	h["reservation_id"], h["message_id"] = "r\xff", reservation.MessageID("r\xff")
	if m := reservation.NewMember(testScope, "r\xff", h); m.Malformed == nil || m.Malformed.Cause != "invalid_id" {
		t.Errorf("an id that PostgreSQL cannot encode: %+v, want invalid_id", m.Malformed)
	}
	if m := reservation.NewMember(testScope, "r1", nil); !m.Missing || m.Malformed != nil {
		t.Errorf("an empty hash: %+v, want missing and not malformed", m)
	}
}

func TestLastAttempt(t *testing.T) {
	for _, c := range []struct {
		r    reservation.Reservation
		want int64
	}{
		{reservation.Reservation{Status: "RESERVED", ReservedAtMS: 10, UpdatedAtMS: 99}, 10},
		{reservation.Reservation{Status: "RESERVED", ReservedAtMS: 10, LastSentAtMS: 20, UpdatedAtMS: 99}, 20},
		{reservation.Reservation{Status: "SEND_UNKNOWN", ReservedAtMS: 10, LastSentAtMS: 20, UpdatedAtMS: 30}, 30},
		{reservation.Reservation{Status: "ENQUEUED", ReservedAtMS: 10, UpdatedAtMS: 30}, 30},
		{reservation.Reservation{Status: "ENQUEUED", ReservedAtMS: 10, LastSentAtMS: 40, UpdatedAtMS: 30}, 40},
	} {
		if got := c.r.LastAttemptMS(); got != c.want {
			t.Errorf("%+v: LastAttemptMS = %d, want %d", c.r, got, c.want)
		}
	}
}
