package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/migrations"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// Sources of evidence, as explanations name them.
const (
	SourceRedis    = "redis"
	SourcePostgres = "postgres"
	SourceRocketMQ = "rocketmq"
)

// Unread is a source that did not say what it was asked.
type Unread struct {
	Source string
	Reason string
}

// Explanation is everything that is known of one reservation, and what the
// daemon would do with it now.
type Explanation struct {
	ID       string
	Scope    reservation.Scope
	Input    reservation.Input
	Record   reservation.Record
	Messages reservation.MessageEvidence // read for every status that has a message
	Held     bool                        // no worker touches its scope
	Action   reservation.Action
	Decided  bool // false: Redis could not be read, so that nobody can decide
	Next     Next
	Unread   []Unread
}

// ErrNoReservation says that neither Redis nor PostgreSQL knows an id.
var ErrNoReservation = fmt.Errorf("no such reservation in any registered scope: %w", pgstore.ErrNotFound)

// Inspector explains reservations from whatever source answers. It changes
// nothing, and needs no daemon that runs.
type Inspector struct {
	d           *Daemon
	redisErr    error
	postgresErr error
}

// OpenInspector connects to what answers. It fails only for a mistake in the
// configuration, or a schema of another version.
func OpenInspector(ctx context.Context, o Options) (_ *Inspector, err error) {
	d := &Daemon{cfg: o.Config, live: o.Config, log: o.Logger, metrics: o.Metrics, observes: true}
	d.setPolicy(o.Config)
	i := &Inspector{d: d}
	defer func() {
		if err != nil {
			i.Close(context.WithoutCancel(ctx))
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	redisstore.RouteLibraryLog(o.Logger)
	if d.clients, i.redisErr = redisstore.Open(ctx, o.Config.Redis); i.redisErr == nil {
		if d.Redis, err = redisstore.New(d.clients, o.Config.Redis.CommandTimeout); err != nil {
			return nil, err
		}
	} else if !errors.Is(i.redisErr, redisstore.ErrUnreachable) {
		return nil, i.redisErr
	}
	p := o.Config.Postgres
	d.Postgres, err = pgstore.Open(ctx, pgstore.Config{
		URL: p.URL, MaxConns: p.MaxConns, ConnectTimeout: p.ConnectTimeout, StatementTimeout: p.StatementTimeout,
	})
	if err != nil {
		return nil, err
	}
	if i.postgresErr = d.Postgres.Ping(ctx); i.postgresErr == nil {
		if err = migrations.Check(ctx, d.Postgres.Pool()); err != nil {
			return nil, err
		}
	} else if !errors.Is(i.postgresErr, pgstore.ErrUnavailable) {
		return nil, i.postgresErr
	}
	return i, d.openRocketMQ()
}

// Inspector explains with the daemon's own connections; it is not to be closed.
func (d *Daemon) Inspector() *Inspector { return &Inspector{d: d} }

// Close ends every connection.
func (i *Inspector) Close(ctx context.Context) { i.d.Close(ctx) }

// candidate is a scope in which a reservation may be.
type candidate struct {
	scope   reservation.Scope
	buckets int64 // of its version; 0: not known
	held    bool
}

// In narrows where a request or a reservation is looked for.
type In struct {
	Scopes     []reservation.Scope // named by the caller: no registry is needed
	ActivityID string
	SKUID      string
}

// candidates are the scopes named, or else the registered ones.
func (i *Inspector) candidates(ctx context.Context, in In) ([]candidate, error) {
	named := make([]candidate, len(in.Scopes))
	for k, scope := range in.Scopes {
		named[k] = candidate{scope: scope}
	}
	err := i.postgresErr
	var registered []pgstore.RegisteredScope
	if err == nil {
		registered, err = i.d.Postgres.Scopes(ctx, pgstore.ScopeFilter{Live: true, ActivityID: in.ActivityID, SKUID: in.SKUID})
	}
	switch {
	case err != nil && len(named) == 0:
		return nil, fmt.Errorf("which scopes there are is not known, so that Redis is not asked; name one with --scope: %w", err)
	case err != nil:
		return named, nil //nolint:nilerr // what PostgreSQL would add is said where it is missing
	}
	all := make([]candidate, len(registered))
	for k, r := range registered {
		all[k] = candidate{r.Scope, r.Buckets, r.Hold != nil}
	}
	if len(named) == 0 {
		return all, nil
	}
	for k, c := range named {
		if known := slices.IndexFunc(all, func(r candidate) bool { return r.scope == c.scope }); known >= 0 {
			named[k] = all[known]
		}
	}
	return named, nil
}

// Reservation explains one reservation. [ErrNoReservation] is said only when
// everything that was asked has answered.
func (i *Inspector) Reservation(ctx context.Context, id string, in In) (Explanation, error) {
	if err := reservation.ValidateID(id); err != nil {
		return Explanation{}, err
	}
	where, err := i.candidates(ctx, in)
	e := i.explain(ctx, id, where, i.situation(ctx))
	if err != nil {
		e.unread(SourceRedis, err)
	}
	if e.Scope == (reservation.Scope{}) && len(e.Unread) == 0 {
		return Explanation{}, fmt.Errorf("reservation %s: %w", id, ErrNoReservation)
	}
	return e, nil
}

// unread notes the first reason of a source.
func (e *Explanation) unread(source string, err error) {
	e.Unread = joinUnread(e.Unread, []Unread{{source, err.Error()}})
}

// explain gathers the evidence of a reservation as the fencer would, and
// decides. A reservation that is nowhere has no Scope.
func (i *Inspector) explain(ctx context.Context, id string, where []candidate, now situation) Explanation {
	e := Explanation{ID: id}
	i.readRecord(ctx, &e)
	member, found := i.find(ctx, &e, where)
	if !found {
		e.Next = now.next(e, i.d.cfg)
		return e
	}
	e.Scope = member.Scope
	if i.redisErr == nil && !hasUnread(e, SourceRedis) {
		i.decide(ctx, &e, member)
	}
	e.Next = now.next(e, i.d.cfg)
	return e
}

func hasUnread(e Explanation, source string) bool {
	return slices.ContainsFunc(e.Unread, func(u Unread) bool { return u.Source == source })
}

// readRecord reads P.
func (i *Inspector) readRecord(ctx context.Context, e *Explanation) {
	err := i.postgresErr
	if err == nil {
		var records map[string]reservation.Record
		records, err = i.d.Postgres.Records(ctx, []string{e.ID})
		e.Record = records[e.ID]
	}
	if err != nil {
		e.unread(SourcePostgres, err)
	}
}

// find looks for the reservation in the scopes. One that only PostgreSQL knows
// is a member of its scope without a hash.
func (i *Inspector) find(ctx context.Context, e *Explanation, where []candidate) (reservation.Member, bool) {
	var named *reservation.Member
	name := func(c candidate) {
		if named == nil && recordNames(e.Record, c.scope) {
			named = &reservation.Member{Scope: c.scope, ID: e.ID, Missing: true}
			e.Held = c.held
		}
	}
	if i.redisErr != nil {
		e.unread(SourceRedis, i.redisErr)
		for _, c := range where {
			name(c)
		}
		return at(named)
	}
	refs := make([]redisstore.Ref, len(where))
	for k, c := range where {
		refs[k] = redisstore.Ref{Scope: c.scope, ID: e.ID}
	}
	var failures []error
	for k, reply := range i.d.Redis.Members(ctx, refs) {
		switch m := reply.Member; {
		case reply.Err != nil:
			failures = append(failures, reply.Err)
		case !m.Missing || m.InPending || m.InExpiry:
			e.Held = where[k].held
			return m, true
		}
		name(where[k])
	}
	if len(failures) > 0 { // it may be where nobody answered
		e.unread(SourceRedis, fmt.Errorf("%d of %d scopes did not answer: %w", len(failures), len(where), failures[0]))
	}
	return at(named)
}

func at(m *reservation.Member) (reservation.Member, bool) {
	if m == nil {
		return reservation.Member{}, false
	}
	return *m, true
}

// recordNames says whether claim or order name the scope.
func recordNames(record reservation.Record, s reservation.Scope) bool {
	if c := record.Claim; c != nil && c.ActivityID == s.ActivityID && c.SKUID == s.SKUID && c.Version == s.Version && c.Bucket == s.Bucket {
		return true
	}
	return slices.ContainsFunc(record.Orders, func(o reservation.Order) bool {
		return o.ActivityID == s.ActivityID && o.SKUID == s.SKUID && o.Version == s.Version && o.Bucket == s.Bucket
	})
}

// decide reads M, P again behind it, and decides.
func (i *Inspector) decide(ctx context.Context, e *Explanation, m reservation.Member) {
	now, err := i.d.Redis.Now(ctx, m.Scope)
	if err != nil {
		e.unread(SourceRedis, err)
		return
	}
	if m.Reservation.MessageID != "" {
		query := m.Reservation.MessageQuery()
		e.Messages = i.d.Evidence.Gather(ctx, now, []reservation.MessageQuery{query})[query.MessageID]
		if e.Messages.State == reservation.MessageUnknown {
			e.unread(SourceRocketMQ, errors.New(joined(e.Messages.Cause, e.Messages.Detail)))
		}
		i.readRecord(ctx, e)
	}
	orders := reservation.ClassifyOrders(m.Scope, m.Reservation.UserID, e.Record)
	if hasUnread(*e, SourcePostgres) {
		orders = reservation.UnknownOrders("orders_not_read")
	}
	e.Input = reservation.Input{Member: m, NowMS: now, Policy: *i.d.policies.Load(), Orders: orders, Messages: e.Messages}
	e.Action, e.Decided = reservation.Decide(e.Input), true
}

func joined(cause, detail string) string {
	if detail == "" {
		return cause
	}
	return cause + ": " + detail
}

// RequestFinding is everything that is known of one request_id.
type RequestFinding struct {
	RequestID    string
	Results      []ResultFinding
	Orders       []pgstore.FoundOrder
	Reservations []Explanation
	Unread       []Unread
}

// ResultFinding is what a scope keeps of a request.
type ResultFinding struct {
	Scope     reservation.Scope
	Result    reservation.RequestResult
	Malformed string // the value, when it is no result
}

// most bounds what one look-up explains: each reservation is a sweep.
const most = 20

// Request looks for a request in the scopes that may have it: each scope has one
// shard for it. Its orders are looked for in PostgreSQL.
func (i *Inspector) Request(ctx context.Context, requestID string, in In) (RequestFinding, error) {
	f := RequestFinding{RequestID: requestID}
	if err := reservation.ValidateID(requestID); err != nil {
		return f, err
	}
	where, err := i.candidates(ctx, in)
	f.note(SourceRedis, err)
	shared := map[string][]candidate{} // where each reservation is
	if i.redisErr != nil {
		f.note(SourceRedis, i.redisErr)
	} else {
		i.results(ctx, &f, where, shared)
	}
	f.Orders, err = i.orders(ctx, pgstore.OrderQuery{RequestID: requestID, Activities: in.activities(), Limit: most})
	f.note(SourcePostgres, err)
	f.Reservations = i.explainAll(ctx, shared, f.Orders, where)
	for _, e := range f.Reservations {
		f.join(e.Unread)
	}
	if len(f.Results)+len(f.Orders) == 0 && len(f.Unread) == 0 {
		return f, fmt.Errorf("no such request in any registered scope: %w", pgstore.ErrNotFound)
	}
	return f, nil
}

func (in In) activities() []string {
	var activities []string
	if in.ActivityID != "" {
		activities = append(activities, in.ActivityID)
	}
	for _, s := range in.Scopes {
		if !slices.Contains(activities, s.ActivityID) {
			activities = append(activities, s.ActivityID)
		}
	}
	return activities
}

func (f *RequestFinding) note(source string, err error) {
	if err != nil {
		f.join([]Unread{{source, err.Error()}})
	}
}

func (f *RequestFinding) join(unread []Unread) { f.Unread = joinUnread(f.Unread, unread) }

// joinUnread keeps the first reason of each source.
func joinUnread(all, more []Unread) []Unread {
	for _, u := range more {
		if !slices.ContainsFunc(all, func(known Unread) bool { return known.Source == u.Source }) {
			all = append(all, u)
		}
	}
	return all
}

// results reads the request's field in the one shard of each scope.
func (i *Inspector) results(ctx context.Context, f *RequestFinding, where []candidate, shared map[string][]candidate) {
	asked := make([]reconcile.RequestResult, len(where))
	for k, c := range where {
		asked[k] = reconcile.RequestResult{Scope: c.scope, Shard: reservation.RequestShard(f.RequestID), RequestID: f.RequestID}
	}
	for k, reply := range i.d.Redis.Results(ctx, asked) {
		f.note(SourceRedis, reply.Err)
		if reply.Err != nil || reply.Value == "" {
			continue
		}
		result, err := reservation.ParseRequestResult(reply.Value)
		found := ResultFinding{Scope: reply.Scope, Result: result}
		if err != nil {
			found.Malformed = err.Error()
		}
		f.Results = append(f.Results, found)
		if result.ReservationID != "" {
			shared[result.ReservationID] = append(shared[result.ReservationID], where[k])
		}
	}
}

func (i *Inspector) orders(ctx context.Context, q pgstore.OrderQuery) ([]pgstore.FoundOrder, error) {
	if i.postgresErr != nil {
		return nil, i.postgresErr
	}
	return i.d.Postgres.FindOrders(ctx, q)
}

// explainAll explains the reservations that Redis named, and those that only
// their orders name.
func (i *Inspector) explainAll(
	ctx context.Context, shared map[string][]candidate, orders []pgstore.FoundOrder, everywhere []candidate,
) []Explanation {
	for _, o := range orders {
		if _, known := shared[o.ReservationID]; !known {
			shared[o.ReservationID] = everywhere
		}
	}
	ids := make([]string, 0, len(shared))
	for id := range shared {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	now := i.situation(ctx)
	explained := make([]Explanation, 0, len(ids))
	for _, id := range ids[:min(len(ids), most)] {
		explained = append(explained, i.explain(ctx, id, shared[id], now))
	}
	return explained
}

// UserFinding is everything that is known of one user.
type UserFinding struct {
	Markers      []MarkerFinding
	Orders       []pgstore.FoundOrder
	Reservations []Explanation
	Unread       []Unread
}

// MarkerFinding is the live reservation that a user has in a scope.
type MarkerFinding struct {
	Scope         reservation.Scope
	ReservationID string
}

// User looks for a user: the marker in the one bucket that the user has of each
// registered version, and the orders in PostgreSQL.
func (i *Inspector) User(ctx context.Context, userID string, in In) (UserFinding, error) {
	var f UserFinding
	if reservation.ValidateID(userID) != nil { // whose text would show the id
		return f, fmt.Errorf("the user id: %w", reservation.ErrInvalidID)
	}
	where, err := i.candidates(ctx, in)
	if err != nil {
		f.Unread = joinUnread(f.Unread, []Unread{{SourceRedis, err.Error()}})
	}
	shared := map[string][]candidate{}
	if i.redisErr != nil {
		f.Unread = joinUnread(f.Unread, []Unread{{SourceRedis, i.redisErr.Error()}})
	} else {
		i.markers(ctx, &f, userID, where, shared)
	}
	f.Orders, err = i.orders(ctx, pgstore.OrderQuery{UserID: userID, Activities: in.activities(), Limit: most})
	if err != nil {
		f.Unread = joinUnread(f.Unread, []Unread{{SourcePostgres, err.Error()}})
	}
	f.Reservations = i.explainAll(ctx, shared, f.Orders, where)
	for _, e := range f.Reservations {
		f.Unread = joinUnread(f.Unread, e.Unread)
	}
	if len(f.Markers)+len(f.Orders) == 0 && len(f.Unread) == 0 {
		return f, fmt.Errorf("the user has no live reservation in any registered scope, and no order: %w", pgstore.ErrNotFound)
	}
	return f, nil
}

func (i *Inspector) markers(ctx context.Context, f *UserFinding, userID string, where []candidate, shared map[string][]candidate) {
	var scopes []reservation.Scope
	var own []candidate
	for _, c := range where {
		s := c.scope
		if c.buckets == 0 || reservation.BucketOf(s.ActivityID, s.SKUID, userID, c.buckets) == s.Bucket {
			scopes, own = append(scopes, s), append(own, c)
		}
	}
	for k, reply := range i.d.Redis.Markers(ctx, scopes, userID) {
		switch {
		case reply.Err != nil:
			f.Unread = joinUnread(f.Unread, []Unread{{SourceRedis, reply.Err.Error()}})
		case reply.ReservationID != "":
			f.Markers = append(f.Markers, MarkerFinding{scopes[k], reply.ReservationID})
			shared[reply.ReservationID] = append(shared[reply.ReservationID], own[k])
		}
	}
}
