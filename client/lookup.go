package client

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/pgstore/claims"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// Query names a request or a reservation of the version that is on sale.
type Query struct {
	ActivityID string
	SKUID      string
	// UserID is the asking user, whose request or reservation alone is found.
	// With a ReservationID it may be empty; every bucket is asked then.
	UserID        string
	RequestID     string // or
	ReservationID string
}

// Source says where a look-up found its answer.
type Source string

// The sources of [Found].
const (
	FromRedis    Source = "redis"
	FromPostgres Source = "postgres"
)

// State is how far a request has come, as a user may be told.
type State string

// The states of [Found]. A refused request has the name of reserve.lua's code,
// for example SOLD_OUT.
const (
	StateQueued       State = "QUEUED"
	StateOrderCreated State = "ORDER_CREATED"
	StateReleasing    State = "RELEASING" // there will be no order, the unit is about to be given back
	StateReleased     State = "RELEASED"
)

// Found is what is known of a request or a reservation.
type Found struct {
	Source        Source
	State         State
	Scope         reservation.Scope
	ReservationID string // "" for a request that was refused
	OrderID       string // when there is an order
	// Reservation is Redis's; empty when only PostgreSQL knows it.
	Reservation reservation.Reservation
}

// Lookup finds what became of a request or a reservation: in Redis, else, with
// [Options].Orders, in PostgreSQL. [ErrNotFound] is said only when all that was
// asked has answered; otherwise it is a [*BusyError].
func (g *Gateway) Lookup(ctx context.Context, q Query) (Found, error) {
	sale, err := g.lookupSale(q)
	if err != nil {
		return Found{}, err
	}
	ctx, cancel := g.bound(ctx)
	defer cancel()
	id := q.ReservationID
	if id == "" {
		id = sale.ReservationID(q.UserID, q.RequestID)
	}
	found, err := g.lookupRedis(ctx, sale, q, id)
	if err == nil || g.o.Orders == nil {
		return found, g.lookupError(q, sale, id, err)
	}
	found, fromPostgres := g.lookupPostgres(ctx, sale, q, id)
	switch {
	case fromPostgres == nil:
		return found, nil
	case errors.Is(err, ErrNotFound), !errors.Is(fromPostgres, ErrNotFound):
		err = fromPostgres // Redis has nothing: PostgreSQL has the last word, or failed as well
	}
	return Found{}, g.lookupError(q, sale, id, err)
}

func (g *Gateway) lookupError(q Query, sale Sale, id string, err error) error {
	if err == nil || errors.Is(err, ErrNotFound) {
		return err
	}
	return &BusyError{
		RequestID: q.RequestID, Scope: sale.ScopeOf(q.UserID), ReservationID: id, Kind: KindNotRead, Err: err,
	}
}

func (g *Gateway) lookupSale(q Query) (Sale, error) {
	refused := func(err error) (Sale, error) { return Sale{}, &RefusedError{q.RequestID, CodeInvalidRequest, err} }
	switch {
	case (q.RequestID == "") == (q.ReservationID == ""):
		return refused(errors.New("either a request_id or a reservation_id is wanted"))
	case q.RequestID != "" && reservation.ValidateID(q.RequestID) != nil,
		q.ReservationID != "" && reservation.ValidateID(q.ReservationID) != nil,
		(q.UserID != "" || q.RequestID != "") && reservation.ValidateID(q.UserID) != nil:
		return refused(reservation.ErrInvalidID)
	}
	sale, err := g.source.Sale(q.ActivityID, q.SKUID)
	switch {
	case errors.Is(err, ErrNotOnSale):
		return Sale{}, &RefusedError{q.RequestID, CodeNotOnSale, err}
	case err == nil:
		err = sale.validate()
	}
	if err != nil {
		return Sale{}, &BusyError{RequestID: q.RequestID, Kind: KindScopeUnknown, Err: err}
	}
	return sale, nil
}

// lookupRedis asks the user's bucket, or all of them when the user is not known.
func (g *Gateway) lookupRedis(ctx context.Context, sale Sale, q Query, id string) (Found, error) {
	scopes := []reservation.Scope{sale.ScopeOf(q.UserID)}
	if q.UserID == "" {
		scopes = scopes[:0]
		for bucket := range max(sale.Buckets, 1) {
			scopes = append(scopes, sale.scope(bucket))
		}
	}
	pipe := g.redis.Pipeline()
	hashes := make([]*redis.SliceCmd, len(scopes))
	for i, s := range scopes {
		hashes[i] = pipe.HMGet(ctx, s.ReservationKey(id), reservation.Fields...)
	}
	var kept *redis.StringCmd
	if q.RequestID != "" {
		kept = pipe.HGet(ctx, scopes[0].RequestKey(q.RequestID), q.RequestID)
	}
	_, _ = pipe.Exec(ctx) // each command has its own error
	var errs []error
	for i, hash := range hashes {
		values, err := hash.Result()
		if err != nil {
			errs = append(errs, fmt.Errorf("read reservation %s of %s: %w", id, scopes[i], err))
			continue
		}
		if r, ok := parse(scopes[i], id, values); ok && (q.UserID == "" || r.UserID == q.UserID) {
			return Found{
				Source: FromRedis, State: stateOf(r.Status), Scope: scopes[i], ReservationID: id, OrderID: r.OrderID, Reservation: r,
			}, nil
		}
	}
	if len(errs) > 0 {
		return Found{}, errors.Join(errs...)
	}
	if kept == nil {
		return Found{}, ErrNotFound
	}
	return foundResult(kept, scopes[0], q)
}

// foundResult reads what a request without a reservation of its own was
// answered. One that was accepted and whose reservation is gone is not found:
// what was kept is a receipt, not a state.
func foundResult(kept *redis.StringCmd, scope reservation.Scope, q Query) (Found, error) {
	value, err := kept.Result()
	if errors.Is(err, redis.Nil) {
		return Found{}, ErrNotFound
	}
	if err != nil {
		return Found{}, fmt.Errorf("read request %s of %s: %w", q.RequestID, scope, err)
	}
	result, err := reservation.ParseRequestResult(value)
	if err != nil || result.UserID != q.UserID || result.Code == int64(lua.ReserveAccepted) {
		return Found{}, ErrNotFound
	}
	return Found{Source: FromRedis, State: State(result.Status), Scope: scope, ReservationID: result.ReservationID}, nil
}

func stateOf(s reservation.Status) State {
	switch {
	case s == reservation.StatusOrderCreated:
		return StateOrderCreated
	case s == reservation.StatusReleased:
		return StateReleased
	case s.Releasing():
		return StateReleasing
	default:
		return StateQueued
	}
}

// lookupPostgres finds what PostgreSQL alone can tell: an order, or a claim that
// excludes one.
func (g *Gateway) lookupPostgres(ctx context.Context, sale Sale, q Query, id string) (Found, error) {
	records, err := claims.Read(ctx, g.o.Orders, []string{id})
	if err != nil {
		return Found{}, err
	}
	record := records[id]
	if !belongs(record, q.UserID) {
		return Found{}, ErrNotFound
	}
	found := Found{Source: FromPostgres, Scope: sale.ScopeOf(q.UserID), ReservationID: id}
	if q.UserID == "" {
		found.Scope = scopeOf(sale, record)
	}
	switch orders := reservation.ClassifyOrders(found.Scope, q.UserID, record); orders.State {
	case reservation.OrderExists:
		found.State, found.OrderID = StateOrderCreated, orders.OrderID
		return found, nil
	case reservation.OrderFenced, reservation.OrderRejected:
		found.State = StateReleasing
		return found, nil
	case reservation.OrderNone:
		return Found{}, ErrNotFound
	default:
		return Found{}, fmt.Errorf("reservation %s: %s", id, orders.Cause)
	}
}

// belongs says whether nothing of a record names another user: what does is not
// shown, and not even said to be there.
func belongs(record reservation.Record, userID string) bool {
	other := func(named string) bool { return userID != "" && named != "" && named != userID }
	return (record.Claim == nil || !other(record.Claim.UserID)) &&
		!slices.ContainsFunc(record.Orders, func(o reservation.Order) bool { return other(o.UserID) })
}

// scopeOf is the bucket that a record names; the first one if it names none.
func scopeOf(sale Sale, record reservation.Record) reservation.Scope {
	switch {
	case record.Claim != nil && record.Claim.Bucket >= 0:
		return sale.scope(record.Claim.Bucket)
	case len(record.Orders) > 0 && record.Orders[0].Bucket >= 0:
		return sale.scope(record.Orders[0].Bucket)
	default:
		return sale.scope(0)
	}
}
