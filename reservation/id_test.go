package reservation_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/seckill/reconciler/reservation"
)

// The expected values were computed with Python's hmac, hashlib and base64.
func TestNewIDKnownAnswers(t *testing.T) {
	for _, c := range []struct{ secret, activity, sku, user, request, want string }{
		{"secret", "10001", "88001", "u1", "req-1", "uekb4ncu7j4dst4xyjqugyamc3"},
		{"secret", "10001", "88001", "u1", "req-2", "zq6fvpu4ykoqafmzboke3mo6dz"},
		{"", "a", "s", "u", "r", "4cfpvcf747xclbhb6mhoenz5ks"},
		{"\x00\xff\x10", "A_b-C", "88001", "9007199254740993", "0b7c2f", "6el4gytflacqsvcigfcfwds25m"},
		// The separators keep these two apart.
		{"secret", "1", "0001", "u", "r", "slswv4ip5l56rliq4je4vrdysv"},
		{"secret", "10", "001", "u", "r", "sgppeuudigcxeopwvix2clsqfg"},
	} {
		if got := reservation.NewID([]byte(c.secret), c.activity, c.sku, c.user, c.request); got != c.want {
			t.Errorf("NewID(%q, %s, %s, %s, %s) = %s, want %s", c.secret, c.activity, c.sku, c.user, c.request, got, c.want)
		}
	}
	if got, want := reservation.MessageID("abc"), "reserve-order:abc:v1"; got != want {
		t.Errorf("MessageID = %s, want %s", got, want)
	}
}

func TestValidateID(t *testing.T) {
	for _, ok := range []string{"a", "A-_9", strings.Repeat("x", 128)} {
		if err := reservation.ValidateID(ok); err != nil {
			t.Errorf("ValidateID(%q): %v", ok, err)
		}
	}
	for _, bad := range []string{"", "a b", "a:b", "{a}", "a|b", "a\n", "é", "a\x00", strings.Repeat("x", 129)} {
		if err := reservation.ValidateID(bad); !errors.Is(err, reservation.ErrInvalidID) {
			t.Errorf("ValidateID(%q) = %v, want ErrInvalidID", bad, err)
		}
	}
	if err := reservation.ValidateMessageID("reserve-order:abc:v1"); err != nil {
		t.Error(err)
	}
	if err := reservation.ValidateMessageID("a|b"); err == nil {
		t.Error("a message id with | passed")
	}
}
