package client

import (
	"errors"
	"fmt"

	"github.com/seckill/reconciler/reservation"
)

// Codes of a [Response] that are not codes of reserve.lua.
const (
	CodeSystemBusy     = "SYSTEM_BUSY"
	CodeInvalidRequest = "INVALID_REQUEST"
	CodeNotOnSale      = "NOT_ON_SALE"
)

// Response is what a user's client is told when a request has no result.
type Response struct {
	Code      string `json:"code"`
	Retryable bool   `json:"retryable"` // ask again with the same request_id
	RequestID string `json:"request_id"`
}

// ResponseTo is the response to an error of [Gateway.Reserve] or
// [Gateway.Lookup]. An error of another origin is SYSTEM_BUSY, too: a gateway
// fails closed.
func ResponseTo(err error, requestID string) Response {
	if refused, ok := errors.AsType[*RefusedError](err); ok {
		return Response{Code: refused.Code, RequestID: refused.RequestID}
	}
	return Response{Code: CodeSystemBusy, Retryable: true, RequestID: requestID}
}

// Kinds of a [BusyError] beside those of package lua ([lua.KindName]).
const (
	KindSKUStopped    = "sku_stopped"    // the breaker of the SKU is open
	KindScopeUnknown  = "scope_unknown"  // the ScopeSource cannot tell
	KindConfigMissing = "config_missing" // code 17: Redis has lost meta or stock, or never had it
	KindInvariant     = "invariant"      // code 19: the scope's data contradict each other
	KindNotRead       = "not_read"       // reserved, but the reservation could not be read back
)

// BusyError says that a request has no result now: {code: SYSTEM_BUSY,
// retryable: true, request_id}. The same request is to be asked again, with the
// same request_id; any other id could take a second unit.
type BusyError struct {
	RequestID string
	Scope     reservation.Scope
	// ReservationID is what the request's reservation is called if it was made.
	ReservationID string
	// OutcomeUnknown: a unit may have been taken. Otherwise none was, by this
	// request, as far as this call is concerned.
	OutcomeUnknown bool
	Kind           string // a stable name, as in the metrics
	Err            error  // may be nil
}

func (e *BusyError) Error() string {
	text := fmt.Sprintf("request %s of %s: %s", e.RequestID, e.Scope, e.Kind)
	if e.OutcomeUnknown {
		text = fmt.Sprintf("whether request %s of %s made reservation %s is unknown", e.RequestID, e.Scope, e.ReservationID)
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap is what went wrong.
func (e *BusyError) Unwrap() error { return e.Err }

// Response is {code: SYSTEM_BUSY, retryable: true, request_id}.
func (e *BusyError) Response() Response { return ResponseTo(e, e.RequestID) }

// RefusedError says that a request can never have a result as it is: an
// identifier that is none, a request_id of somebody else (code 16), a SKU that
// is not on sale. Asking again does not help.
type RefusedError struct {
	RequestID string
	Code      string // INVALID_REQUEST, NOT_ON_SALE, or the name of reserve.lua's code
	Err       error  // may be nil
}

func (e *RefusedError) Error() string {
	text := fmt.Sprintf("request %.140q refused: %s", e.RequestID, e.Code)
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

// Unwrap is what is wrong with the request.
func (e *RefusedError) Unwrap() error { return e.Err }

// Response is {code, retryable: false, request_id}.
func (e *RefusedError) Response() Response { return ResponseTo(e, e.RequestID) }

// ErrNotFound says that neither Redis nor PostgreSQL knows what was looked up.
// It is said only when all that was asked has answered.
var ErrNotFound = errors.New("no such request or reservation")
