package reservation

import (
	"fmt"
	"strconv"
	"strings"
)

// RequestResult is a field of a request shard: what a request was answered
// (spec §2). It is kept for as long as the scope is.
type RequestResult struct {
	Code          int64  // 0 or 10 to 15 (spec §4)
	ReservationID string // for codes 0 and 10
	Remaining     int64  // −1: not known
	Status        string
	UserID        string
}

// ParseRequestResult reads `code|reservation_id|remaining|status|user_id`.
func ParseRequestResult(value string) (RequestResult, error) {
	parts := strings.Split(value, "|")
	if len(parts) != 5 || parts[4] == "" {
		return RequestResult{}, fmt.Errorf("%.80q is no request result", value)
	}
	code, err := ParseNumber(parts[0])
	if err != nil {
		return RequestResult{}, fmt.Errorf("%.80q is no request result: code: %w", value, err)
	}
	if code == 0 && ValidateID(parts[1]) != nil {
		return RequestResult{}, fmt.Errorf("%.80q is no request result: it accepts no reservation", value)
	}
	remaining, err := strconv.ParseInt(parts[2], 10, 64)
	if err != nil {
		return RequestResult{}, fmt.Errorf("%.80q is no request result: remaining: %w", value, err)
	}
	return RequestResult{Code: code, ReservationID: parts[1], Remaining: remaining, Status: parts[3], UserID: parts[4]}, nil
}
