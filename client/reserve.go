package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Request is one click of one user. The same click repeated has the same
// RequestID; one RequestID belongs to one activity version.
type Request struct {
	ActivityID string
	SKUID      string
	UserID     string
	RequestID  string
	// Retry: the user asks again after SYSTEM_BUSY. There may be a reservation,
	// so that the local sold-out marker does not answer.
	Retry bool
}

// noCode is the code of a result that there is none of: 0 would be ACCEPTED.
const noCode lua.ReserveCode = -1

// Result is the answer to a request: a code of reserve.lua of 0 or 10 to 15.
// Beside an error it answers nothing.
type Result struct {
	lua.ReserveReply
	Request Request
	Scope   reservation.Scope
	// Local: the local sold-out marker answered, and Redis was not asked. Such a
	// SOLD_OUT is not final: the same request may be made again.
	Local bool
	// Reservation is the user's, as Redis held it right after, when Accepted. It
	// is empty if Redis has lost it since.
	Reservation reservation.Reservation
}

// Accepted says whether the user has a reservation by this request: "queued",
// never "ordered".
func (r Result) Accepted() bool { return r.Code == lua.ReserveAccepted && r.ReservationID != "" }

// Unsent says whether the order message is this gateway's to send. It is not
// when a repeated request finds a reservation that is further on.
func (r Result) Unsent() bool {
	return r.Accepted() && r.Reservation.Status == reservation.StatusReserved
}

// Message is the order message of an accepted request (interface §3): its key,
// for KEYS, and its body. Tag and topic are the installation's; a trace_id goes
// into the user properties. The daemon's re-send has the same key and body.
func (r Result) Message() (key string, body []byte, err error) {
	if r.Reservation.ID == "" {
		return "", nil, fmt.Errorf("request %s has no reservation to send", r.Request.RequestID)
	}
	body, err = reservation.NewOrderMessage(r.Reservation).Marshal()
	return r.Reservation.MessageID, body, err
}

// Answer is what became of one request of a page.
type Answer struct {
	Result
	Err error // [*BusyError] or [*RefusedError]
}

// reserveAttempts: the first, and one with the same ids.
const reserveAttempts = 2

// Reserve takes one unit for a user. Codes 0 and 10 to 15 are results;
// everything else is a [*BusyError] or a [*RefusedError]. It returns after two
// attempts and a read, each of Budget, at the latest.
func (g *Gateway) Reserve(ctx context.Context, r Request) (Result, error) {
	answer := g.ReserveAll(ctx, []Request{r})[0]
	return answer.Result, answer.Err
}

// ReserveAll is [Gateway.Reserve] for a page of requests in one round trip, with
// an answer for each in their order.
func (g *Gateway) ReserveAll(ctx context.Context, requests []Request) []Answer {
	answers := make([]Answer, len(requests))
	tries := make([]try, len(requests))
	open := make([]*try, 0, len(requests))
	for i, r := range requests {
		answers[i].Request, answers[i].Code = r, noCode
		tries[i].answer = &answers[i]
		if g.begin(&tries[i]) {
			open = append(open, &tries[i])
		}
	}
	asked := open
	for range reserveAttempts {
		if len(open) == 0 {
			break
		}
		open = g.attempt(ctx, open)
	}
	for _, t := range asked {
		g.conclude(t)
	}
	g.readBack(ctx, asked)
	return answers
}

// try is a request on its way.
type try struct {
	answer  *Answer
	id      string // of its reservation
	sale    *saleState
	scope   *scopeState
	probe   bool // of an open breaker
	look    verdict
	epoch   uint64 // of the marker when it began
	unknown error  // an attempt that may have run, whatever the next one says
	err     error  // of the last attempt
}

func (t *try) busy(kind string, err error) *BusyError {
	return &BusyError{
		RequestID: t.answer.Request.RequestID, Scope: t.answer.Scope, ReservationID: t.id,
		OutcomeUnknown: t.unknown != nil, Kind: kind, Err: err,
	}
}

// begin says whether Redis is to be asked; otherwise the answer is there.
func (g *Gateway) begin(t *try) bool {
	r := t.answer.Request
	for _, id := range []struct{ name, value string }{{"request_id", r.RequestID}, {"user_id", r.UserID}} {
		if reservation.ValidateID(id.value) != nil { // whose text would show a raw user id
			t.answer.Err = &RefusedError{r.RequestID, CodeInvalidRequest, fmt.Errorf("%s: %w", id.name, reservation.ErrInvalidID)}
			return false
		}
	}
	sale, err := g.source.Sale(r.ActivityID, r.SKUID)
	switch {
	case errors.Is(err, ErrNotOnSale):
		t.answer.Err = &RefusedError{r.RequestID, CodeNotOnSale, err}
		return false
	case err == nil:
		err = sale.validate()
	}
	if err != nil {
		t.answer.Err = t.busy(KindScopeUnknown, err)
		return false
	}
	t.answer.Scope, t.id = sale.ScopeOf(r.UserID), sale.ReservationID(r.UserID, r.RequestID)
	t.sale = g.state(sale)
	t.scope = g.scopeState(t.sale, t.answer.Scope)
	t.scope.seen(g.now())
	return g.consult(t)
}

// consult asks the local marker and the breaker.
func (g *Gateway) consult(t *try) bool {
	t.epoch = t.scope.marker.epoch.Load()
	if g.notices != nil && !t.answer.Request.Retry {
		if t.look = t.scope.marker.look(g.now()); t.look == rejected {
			t.scope.local.Add(1)
			g.metrics.localRejects.Inc()
			t.answer.ReserveReply = lua.ReserveReply{Code: lua.ReserveSoldOut, Status: lua.ReserveSoldOut.String()}
			t.answer.Local = true
			return false
		}
	}
	admitted, probe, kind := t.sale.breaker.admit(time.Now())
	if !admitted {
		t.scope.failures.Add(1)
		t.answer.Err = t.busy(KindSKUStopped, fmt.Errorf("stopped by %s", kind))
		return false
	}
	t.probe = probe
	return true
}

// attempt runs reserve.lua for the tries and returns those to ask again.
func (g *Gateway) attempt(ctx context.Context, tries []*try) []*try {
	ctx, cancel := context.WithTimeout(ctx, g.o.Budget)
	defer cancel()
	batch := g.scripts.Batch()
	results := make([]*lua.Result[lua.ReserveReply], len(tries))
	for i, t := range tries {
		results[i] = batch.Reserve(t.answer.Scope, lua.ReserveArgs{
			RequestID: t.answer.Request.RequestID, ReservationID: t.id, UserID: t.answer.Request.UserID,
			MessageID: reservation.MessageID(t.id), TTLMS: g.o.ReservationTTL.Milliseconds(), SchemaVersion: schemaVersion,
		})
	}
	began := time.Now()
	_ = batch.Run(ctx) // each call has its own error
	took := time.Since(began)
	var again []*try
	for i, t := range tries {
		t.answer.ReserveReply, t.err = results[i].Get()
		t.scope.took(took)
		g.metrics.duration.Observe(took.Seconds())
		if t.err == nil {
			continue
		}
		t.answer.Code = noCode
		g.metrics.failures.WithLabelValues(lua.KindName(t.err)).Inc()
		if isTimeout(t.err) {
			g.metrics.timeouts.Inc()
		}
		switch lua.Classify(t.err) {
		case lua.ClassUnknown:
			g.metrics.unknown.Inc()
			t.unknown = t.err
			again = append(again, t)
		case lua.ClassNotExecuted:
			again = append(again, t)
		default:
		}
	}
	return again
}

// conclude turns the last attempt into a result or an error, and tells the
// breaker, the marker and the counters.
func (g *Gateway) conclude(t *try) {
	if t.err != nil {
		t.scope.failures.Add(1)
		kind := lua.KindName(t.err)
		t.answer.Err = t.busy(kind, errors.Join(t.unknown, only(t.err, t.unknown)))
		g.failed(t, kind, trips(t.err))
		return
	}
	reply := t.answer.ReserveReply
	g.metrics.replied(reply)
	t.scope.replied(g.now(), reply)
	switch code := reply.Code; code {
	case lua.ReserveRequestIDConflict, lua.ReserveReservationIDConflict, lua.ReserveBadArgument:
		t.answer.Err = &RefusedError{t.answer.Request.RequestID, code.String(), reason(reply)}
	case lua.ReserveConfigMissing:
		t.answer.Err = t.busy(KindConfigMissing, reason(reply))
	case lua.ReserveInvariantViolation:
		t.scope.failures.Add(1)
		t.answer.Err = t.busy(KindInvariant, reason(reply))
		g.failed(t, KindInvariant, true)
		return
	default:
		g.believe(t, reply)
	}
	if t.probe {
		// What was kept of an earlier call says nothing of the stock.
		t.sale.breaker.answered(time.Now(), !reply.Replay, 0)
	}
}

// reason is what a reply says beside its code.
func reason(r lua.ReserveReply) error {
	if r.Status == r.Code.String() {
		return nil
	}
	return errors.New(r.Status)
}

// only is err, unless it is the other one.
func only(err, other error) error {
	if err == other { //nolint:errorlint // the very same one
		return nil
	}
	return err
}

// failed tells the breaker of a failure.
func (g *Gateway) failed(t *try, kind string, trip bool) {
	switch b := &t.sale.breaker; {
	case trip:
		if b.trip(time.Now(), kind, g.o.Cooldown, t.probe) {
			g.metrics.trips.WithLabelValues(kind).Inc()
			s := t.sale.sale
			g.o.Logger.Error("SKU stopped: no request of it reaches Redis until one that is let through succeeds",
				"kind", kind, "activity_id", s.ActivityID, "sku_id", s.SKUID, "activity_version", s.Version,
				"bucket_id", t.answer.Scope.Bucket, "request_id", t.answer.Request.RequestID, "error", t.answer.Err)
		}
	case t.probe:
		b.answered(time.Now(), false, g.o.Cooldown)
	}
}

// believe keeps the local marker in step with what Redis replied.
func (g *Gateway) believe(t *try, r lua.ReserveReply) {
	if g.notices == nil || r.Replay { // what was kept of an earlier call is old
		return
	}
	switch {
	case r.Code == lua.ReserveSoldOut:
		t.scope.marker.set(g.now(), g.o.SoldOutTTL, t.epoch)
	case r.Code == lua.ReserveAccepted && r.Remaining == 0:
		t.scope.marker.set(g.now(), g.o.SoldOutTTL, t.epoch)
		g.notices.publish(t.answer.Scope, reservation.NoticeSoldOut)
	case r.Code == lua.ReserveAccepted && t.look == recheck:
		g.proveWrong(t.scope, "recheck")
	}
}

// readBack reads the accepted reservations. When one was made is part of its
// message, and only Redis knows it.
func (g *Gateway) readBack(ctx context.Context, tries []*try) {
	open := make([]*try, 0, len(tries))
	for _, t := range tries {
		if t.answer.Err == nil && t.answer.Accepted() {
			open = append(open, t)
		}
	}
	for range reserveAttempts {
		if len(open) == 0 {
			return
		}
		open = g.readOnce(ctx, open)
	}
	for _, t := range open {
		t.unknown = t.err
		t.answer.Err = t.busy(KindNotRead, t.err)
	}
}

// readOnce returns the tries that could not be read.
func (g *Gateway) readOnce(ctx context.Context, tries []*try) (failed []*try) {
	ctx, cancel := context.WithTimeout(ctx, g.o.Budget)
	defer cancel()
	pipe := g.redis.Pipeline()
	reads := make([]*redis.SliceCmd, len(tries))
	for i, t := range tries {
		reads[i] = pipe.HMGet(ctx, t.answer.Scope.ReservationKey(t.answer.ReservationID), reservation.Fields...)
	}
	_, _ = pipe.Exec(ctx) // each command has its own error
	for i, t := range tries {
		values, err := reads[i].Result()
		if err != nil {
			t.err = err
			failed = append(failed, t)
			continue
		}
		t.answer.Reservation, _ = parse(t.answer.Scope, t.answer.ReservationID, values)
	}
	return failed
}

// parse reads a reservation's hash as HMGET gives it. One that is gone or is
// not the contract's is none: the daemon finds it.
func parse(scope reservation.Scope, id string, values []any) (reservation.Reservation, bool) {
	fields := make(map[string]string, len(values))
	for i, v := range values {
		if text, ok := v.(string); ok {
			fields[reservation.Fields[i]] = text
		}
	}
	m := reservation.NewMember(scope, id, fields)
	if m.Missing || m.Malformed != nil {
		return reservation.Reservation{}, false
	}
	return m.Reservation, true
}
