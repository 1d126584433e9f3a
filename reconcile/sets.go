package reconcile

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/time/rate"

	"github.com/seckill/reconciler/reservation"
)

// Bounds of a set pass, whatever the size of a sale.
const (
	// maxSuspects bounds how many members of a scope one check may suspect. The
	// others are counted, and the scope is incomplete.
	maxSuspects = 10_000
	// shardsAtOnce is how many request shards are read side by side.
	shardsAtOnce = 8
)

// origin is what is read again as one: a reservation, or a request result
// (then without a reservation id).
type origin struct {
	Ref
	shard     int
	requestID string
}

// aspect is what of an origin contradicts.
type aspect struct{ check, subject string }

// suspects are an origin's contradictions over the rounds in which they stood.
type suspects struct {
	query  MemberQuery
	result RequestResult
	open   map[aspect]*standing
}

func (s *suspects) origin() origin {
	if s.query.ID != "" {
		return origin{Ref: s.query.Ref}
	}
	return origin{Ref: Ref{Scope: s.result.Scope}, shard: s.result.Shard, requestID: s.result.RequestID}
}

// settled says whether another round could change nothing.
func (s *suspects) settled() bool {
	for _, st := range s.open {
		if !st.same {
			return false
		}
	}
	return true
}

// checkIn is a check in a scope.
type checkIn struct {
	check string
	scope reservation.Scope
}

// sets is one set pass: a walk over all members, which only notes what is
// suspicious, and rounds that read exactly the suspicious ones again.
type sets struct {
	run     *run
	members Members
	claims  Claims
	limiter *rate.Limiter
	targets map[reservation.Scope]*scopeReading
	only    map[string]bool // the checks that are made

	suspects map[origin]*suspects
	immortal map[reservation.Scope]*standing // keys of the scope itself that never expire
	kept     map[checkIn]int                 // suspects in the first round
	beyond   map[checkIn]int                 // those that are not kept
	done     int64                           // members looked at
	walked   *walked                         // how far the walk has got
	queries  map[findingKey]MemberQuery      // how to read again what became findings
}

// setPass makes the set checks in the scopes that call for them.
func (r *run) setPass(ctx context.Context) error {
	p := r.newSets()
	r.sets = p
	if len(p.targets) == 0 {
		for id := range p.only {
			delete(r.report.Summary, id) // it was not made
		}
		return nil
	}
	for _, sku := range r.skus {
		if err := p.walkSKU(ctx, sku); err != nil {
			return err
		}
	}
	if err := p.scopeKeys(ctx); err != nil {
		return err
	}
	for round := 2; round <= r.options.Rounds && p.unsettled(); round++ {
		if err := r.settle(ctx); err != nil {
			return err
		}
		if err := p.again(ctx); err != nil {
			return err
		}
		r.round = max(r.round, round)
	}
	p.vanished(ctx)
	if cancelled(ctx) {
		return context.Cause(ctx)
	}
	p.conclude()
	for s, reading := range p.targets {
		r.report.members[jsonScope(s)] = true
		r.report.closed[jsonScope(s)] = reading.closed()
	}
	return nil
}

// vanished looks whether the scopes are still there. One whose keys expired, or
// whose server lost them, during the pass has no findings: everything in it
// would be lost.
func (p *sets) vanished(ctx context.Context) {
	var suspected []*scopeReading
	for at := range p.suspects {
		if s := p.targets[at.Scope]; !s.failed() && !slices.Contains(suspected, s) {
			suspected = append(suspected, s)
		}
	}
	p.run.reader.readFields(ctx, suspected)
	for at := range p.suspects {
		if len(p.targets[at.Scope].missing) > 0 {
			delete(p.suspects, at)
		}
	}
}

// newSets selects the scopes: all with Deep or when set checks were asked for
// by name, else those with drift.
func (r *run) newSets() *sets {
	p := &sets{
		run: r, members: r.source.Members, claims: r.source.Claims, limiter: rate.NewLimiter(rate.Inf, 0),
		targets: map[reservation.Scope]*scopeReading{}, only: map[string]bool{},
		suspects: map[origin]*suspects{}, immortal: map[reservation.Scope]*standing{}, beyond: map[checkIn]int{}, kept: map[checkIn]int{}, queries: map[findingKey]MemberQuery{},
		walked: newWalked(r.options.CheckpointEvery),
	}
	for _, c := range r.checks {
		if c.Level == LevelSet {
			p.only[c.ID] = true
		}
	}
	if len(p.only) == 0 || r.broken {
		return p
	}
	if n := r.options.Rate; n > 0 {
		p.limiter = rate.NewLimiter(rate.Limit(n), max(n/10, r.options.Batch))
	}
	p.choose()
	if from := r.options.Resume; from != nil {
		p.resume(from.Progress)
	}
	return p
}

// choose selects the scopes that are walked.
func (p *sets) choose() {
	drift := map[reservation.Scope]bool{}
	for key, st := range p.run.open {
		drift[key.scope] = drift[key.scope] || st.settled()
	}
	o := p.run.options
	for s, reading := range p.run.latest {
		if reading.asked && !reading.failed() && (o.Deep || len(o.Checks) > 0 || drift[s] || o.also[s] != nil) {
			p.targets[s] = reading
		}
	}
}

// settled says whether the rounds make a finding of it.
func (st *standing) settled() bool { return st.same || (st.alike && st.rounds >= persistent) }

// walkSKU reads a SKU's orders, and what Redis holds of its scopes.
func (p *sets) walkSKU(ctx context.Context, sku SKU) error {
	k := &skuReading{sku: sku, byName: p.targets}
	var scopes []reservation.Scope
	for _, v := range sku.Versions {
		for _, b := range v.Buckets {
			if s := sku.scope(v, b); p.targets[s] != nil {
				scopes = append(scopes, s)
			}
		}
	}
	if len(scopes) == 0 {
		return nil
	}
	if err := p.walkOrders(ctx, k, p.walked.orders(sku, scopes)); err != nil {
		return err
	}
	for _, s := range scopes {
		for _, walk := range []func(context.Context, reservation.Scope) error{p.walkResults, p.walkIndexes} {
			if p.targets[s].failed() {
				break
			}
			if err := walk(ctx, s); err != nil {
				return err
			}
			if cancelled(ctx) { // what could not be read then is no failure of the scope
				return context.Cause(ctx)
			}
		}
	}
	return nil
}

// walkOrders reads every order's reservation, from the position on.
func (p *sets) walkOrders(ctx context.Context, k *skuReading, at *SKUProgress) error {
	for !at.Done {
		ids, queries, err := p.orderPage(ctx, k, at.After)
		if cancelled(ctx) {
			return context.Cause(ctx)
		}
		if err != nil {
			p.failSKU(k.sku, err)
			return nil
		}
		if err := p.lookUnnamed(ctx, queries); err != nil {
			return err
		}
		if p.anyFailed(at.Scopes) { // its members were not compared: a run that goes on begins here
			at = &SKUProgress{After: at.After}
		}
		if at.Done = len(ids) < p.run.options.Batch; len(ids) > 0 {
			at.After = ids[len(ids)-1]
		}
		p.checkpoint(ctx)
	}
	return nil
}

// anyFailed says whether one of the scopes could not be read.
func (p *sets) anyFailed(scopes []Scope) bool {
	return slices.ContainsFunc(scopes, func(s Scope) bool {
		reading := p.targets[s.Reservation()]
		return reading != nil && reading.failed()
	})
}

// orderPage reads a page of a SKU's orders: the ids, and the reservations to
// look for in the scopes that the orders name.
func (p *sets) orderPage(ctx context.Context, k *skuReading, after string) (ids []string, queries []MemberQuery, err error) {
	ids, err = p.claims.OrderPage(ctx, k.sku.ActivityID, k.sku.SKUID, after, p.run.options.Batch)
	if err != nil || len(ids) == 0 {
		return nil, nil, err
	}
	records, err := p.claims.Records(ctx, ids)
	if err != nil {
		return nil, nil, err
	}
	for _, id := range ids {
		for _, o := range records[id].Orders {
			owner, ok := k.ownerOf(Order{Version: o.Version, Bucket: o.Bucket, UserID: o.UserID})
			if !ok {
				return nil, nil, k.ambiguous(1)
			}
			if owner != nil && o.ActivityID == k.sku.ActivityID && o.SKUID == k.sku.SKUID {
				queries = append(queries, MemberQuery{Ref{owner.scope, id}, o.UserID, o.RequestID})
			}
		}
	}
	return ids, queries, nil
}

// failSKU notes that a SKU's orders could not be read.
func (p *sets) failSKU(sku SKU, err error) {
	for s, reading := range p.targets {
		if s.ActivityID == sku.ActivityID && s.SKUID == sku.SKUID {
			reading.fail(SourcePostgres, err.Error())
		}
	}
}

// walkResults reads the 256 request shards of a scope, and every reservation
// that they name.
func (p *sets) walkResults(ctx context.Context, s reservation.Scope) error {
	at := p.walked.scope(s)
	for first := at.Shard; first < reservation.RequestShards; first += shardsAtOnce {
		var requests []ShardRequest
		for shard := first; shard < first+shardsAtOnce; shard++ {
			requests = append(requests, ShardRequest{Scope: s, Shard: shard, Limit: max(p.run.options.Batch/shardsAtOnce, 1)})
		}
		for len(requests) > 0 {
			queries, next := p.resultPages(ctx, s, requests)
			if err := p.look(ctx, queries); err != nil {
				return err
			}
			requests = next
		}
		if p.targets[s].failed() {
			return nil
		}
		at.Shard = first + shardsAtOnce
		p.checkpoint(ctx)
	}
	return nil
}

// resultPages reads pages of request shards: the reservations that they accept,
// and the pages that follow.
func (p *sets) resultPages(ctx context.Context, s reservation.Scope, requests []ShardRequest) (queries []MemberQuery, next []ShardRequest) {
	for i, reply := range p.members.ResultPages(ctx, requests) {
		if reply.Err != nil {
			p.targets[s].fail(SourceRedis, reply.Err.Error())
			continue
		}
		for _, r := range reply.Results {
			p.note(judgeResult(r), suspects{result: r})
			if parts := splitResult(r.Value); parts != nil && parts[0] == "0" {
				queries = append(queries, MemberQuery{Ref{s, parts[1]}, parts[4], r.RequestID})
			}
		}
		if reply.Cursor != 0 {
			again := requests[i]
			again.Cursor = reply.Cursor
			next = append(next, again)
		}
	}
	return queries, next
}

// walkIndexes reads every member of both indexes: one whose request result is
// gone is named by nothing else.
func (p *sets) walkIndexes(ctx context.Context, s reservation.Scope) error {
	at := p.walked.scope(s)
	for _, index := range []reservation.Index{reservation.ReservationExpiry, reservation.SendPending} {
		if slices.Contains(at.Indexes, index) {
			continue
		}
		for cursor, first := uint64(0), true; first || cursor != 0; first = false {
			reply := p.members.IndexPages(ctx, index, []PageRequest{{Scope: s, Cursor: cursor, Limit: p.run.options.Batch}})[0]
			if reply.Err != nil {
				p.targets[s].fail(SourceRedis, reply.Err.Error())
				return nil //nolint:nilerr // the report says it
			}
			queries := make([]MemberQuery, len(reply.IDs))
			for i, id := range reply.IDs {
				queries[i].Ref = Ref{s, id}
			}
			if err := p.lookUnnamed(ctx, queries); err != nil {
				return err
			}
			cursor = reply.Cursor
		}
		if p.targets[s].failed() {
			return nil
		}
		at.Indexes = append(at.Indexes, index)
		p.checkpoint(ctx)
	}
	return nil
}

// look reads members on both sides and notes what contradicts.
func (p *sets) look(ctx context.Context, queries []MemberQuery) error {
	for page := range slices.Chunk(queries, p.run.options.Batch) {
		if err := p.limiter.WaitN(ctx, min(len(page), p.limiter.Burst())); err != nil && cancelled(ctx) {
			return context.Cause(ctx)
		}
		for i, v := range p.views(ctx, page) {
			if v != nil {
				p.note(judge(*v), suspects{query: page[i]})
			}
		}
		if cancelled(ctx) {
			return context.Cause(ctx)
		}
		p.done += int64(len(page))
		if p.run.options.Progress != nil {
			p.run.options.Progress(p.done, p.expected())
		}
	}
	return nil
}

// expected is about how many members the walk looks at: each order and each
// request result once, and what is in the indexes.
func (p *sets) expected() int64 {
	var n int64
	for _, s := range p.targets {
		n += s.active + s.canceled
		if s.stock != nil {
			n += s.stock.Reserved + s.stock.ReleasedTotal + s.stock.Expiry + s.stock.SendPending
		}
	}
	return max(n, p.done)
}

// views reads both sides of members: Redis, then PostgreSQL. One that could
// not be read is nil, and its scope incomplete.
func (p *sets) views(ctx context.Context, queries []MemberQuery) []*view {
	views := make([]*view, len(queries))
	var ids []string
	states := p.members.MemberStates(ctx, queries)
	for _, q := range queries {
		// PostgreSQL cannot be asked for others; such a member is malformed.
		if reservation.ValidateID(q.ID) == nil {
			ids = append(ids, q.ID)
		}
	}
	var records map[string]reservation.Record
	var err error
	if len(ids) > 0 {
		records, err = p.claims.Records(ctx, ids)
	}
	for i, q := range queries {
		state, reading := states[i], p.targets[q.Scope]
		switch {
		case state.Err != nil:
			reading.fail(SourceRedis, state.Err.Error())
		case err != nil:
			reading.fail(SourcePostgres, err.Error())
		default:
			if state.Missing && reservation.ValidateID(state.ID) != nil {
				state.Malformed = &reservation.MalformedError{Cause: "invalid_id", Field: "reservation_id"}
			}
			v := newView(state, records[state.ID], reading)
			views[i] = &v
		}
	}
	return views
}

// closed says whether the version is closed, by either side.
func (s *scopeReading) closed() bool { return s.state == "CLOSED" || s.bucket.State == "CLOSED" }

// note notes contradictions of the first round. Their texts are made again
// when they are read again: until then a suspect is small.
func (p *sets) note(found []contradiction, of suspects) {
	for _, c := range found {
		key := aspect{c.check, c.subject}
		at := p.suspects[of.origin()]
		if !p.only[c.check] || (at != nil && at.open[key] != nil) {
			continue
		}
		in := checkIn{c.check, c.scope}
		if p.kept[in] == maxSuspects {
			p.beyond[in]++
			continue
		}
		p.kept[in]++
		if at == nil {
			at = &of
			at.open = map[aspect]*standing{}
			p.suspects[of.origin()] = at
		}
		c.redis, c.pg, c.message = nil, nil, ""
		at.open[key] = &standing{last: c, rounds: 1, alike: true}
	}
}

// scopeKeys finds keys of the scopes themselves that never expire.
func (p *sets) scopeKeys(ctx context.Context) error {
	if !p.only[CheckMissingTTL] {
		return nil
	}
	var scopes []reservation.Scope
	for s, reading := range p.targets {
		if !reading.failed() {
			scopes = append(scopes, s)
		}
	}
	for page := range slices.Chunk(scopes, shardsAtOnce) {
		for i, reply := range p.members.Immortal(ctx, page) {
			switch s := page[i]; {
			case reply.Err != nil:
				p.targets[s].fail(SourceRedis, reply.Err.Error())
			case len(reply.Missing) > 0:
				// A key without expiry does not get one by itself: one round does.
				p.immortal[s] = &standing{rounds: 1, same: true, last: contradiction{
					check: CheckMissingTTL, scope: s, cause: "keys",
					message: fmt.Sprintf("%d keys never expire: %s", len(reply.Missing), join(reply.Missing)),
					redis:   map[string]any{"keys": reply.Missing},
				}}
			}
		}
		if cancelled(ctx) {
			return context.Cause(ctx)
		}
	}
	return nil
}

// join names a few of many.
func join(names []string) string {
	const few = 5
	text := strings.Join(names[:min(len(names), few)], ", ")
	if len(names) > few {
		text += ", …"
	}
	return text
}

// unsettled says whether another round could change anything.
func (p *sets) unsettled() bool {
	for at, s := range p.suspects {
		if !s.settled() && !p.targets[at.Scope].failed() {
			return true
		}
	}
	return false
}

// again reads what is suspicious, and nothing else, from both sides again.
func (p *sets) again(ctx context.Context) error {
	var queries []MemberQuery
	var results []RequestResult
	for at, s := range p.suspects {
		switch {
		case s.settled() || p.targets[at.Scope].failed():
		case at.ID != "":
			queries = append(queries, s.query)
		default:
			results = append(results, s.result)
		}
	}
	for page := range slices.Chunk(queries, p.run.options.Batch) {
		for i, v := range p.views(ctx, page) {
			if v != nil {
				p.weigh(origin{Ref: page[i].Ref}, judge(*v))
			}
		}
		if cancelled(ctx) {
			return context.Cause(ctx)
		}
	}
	return p.againResults(ctx, results)
}

func (p *sets) againResults(ctx context.Context, results []RequestResult) error {
	for page := range slices.Chunk(results, p.run.options.Batch) {
		for i, reply := range p.members.Results(ctx, page) {
			at := (&suspects{result: page[i]}).origin()
			switch {
			case reply.Err != nil:
				p.targets[at.Scope].fail(SourceRedis, reply.Err.Error())
			case reply.Value == "":
				p.weigh(at, nil)
			default:
				p.weigh(at, judgeResult(reply.RequestResult))
			}
		}
		if cancelled(ctx) {
			return context.Cause(ctx)
		}
	}
	return nil
}

// weigh compares what an origin contradicts now with the rounds before.
func (p *sets) weigh(at origin, found []contradiction) {
	open := p.suspects[at].open
	now := map[aspect]contradiction{}
	for _, c := range found {
		if p.only[c.check] {
			now[aspect{c.check, c.subject}] = c
		}
	}
	for key := range open {
		if _, stands := now[key]; !stands {
			delete(open, key)
			p.run.moved[at.Scope] = true
		}
	}
	for key, c := range now {
		st := open[key]
		if st == nil { // it became another contradiction: that takes rounds of its own
			open[key] = &standing{last: c, rounds: 1, alike: true}
			p.run.moved[at.Scope] = true
			continue
		}
		st.same = st.last.cause == c.cause
		st.last = c
		st.rounds++
	}
	if len(open) == 0 {
		delete(p.suspects, at)
	}
}

// conclude makes findings of what stood, and says what could not be settled.
func (p *sets) conclude() {
	for s, st := range p.immortal {
		p.run.report.Findings = append(p.run.report.Findings, p.run.finding(subject{CheckMissingTTL, s}, st))
	}
	for at, s := range p.suspects {
		for key, st := range s.open {
			switch {
			case st.settled():
				f := p.run.finding(subject{key.check, at.Scope}, st)
				p.run.report.Findings = append(p.run.report.Findings, f)
				if at.ID != "" {
					p.queries[keyOf(f)] = s.query
				}
			case !p.targets[at.Scope].failed() && p.run.check(key.check).Severity.Drift():
				p.incomplete(at.Scope, fmt.Sprintf("%s of %s stood in %d rounds and was not the same twice", key.check, key.subject, st.rounds))
			}
		}
	}
	for in, n := range p.beyond {
		if p.run.check(in.check).Severity.Drift() {
			p.incomplete(in.scope, fmt.Sprintf("%d more members show %s beyond the %d that one run looks at again: repair these and run again", n, in.check, maxSuspects))
		}
	}
}

func (p *sets) incomplete(s reservation.Scope, reason string) {
	name := jsonScope(s)
	p.run.report.Incomplete = append(p.run.report.Incomplete, Incomplete{Source: SourceRounds, Scope: &name, Reason: reason})
}
