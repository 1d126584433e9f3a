package reconcile

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// Reconciler compares the scopes of a registry. It is safe for concurrent use.
type Reconciler struct {
	Registry Registry
	Stocks   Stocks
	Orders   Orders
	// Members and Claims are for the set checks; without them none is made.
	Members Members
	Claims  Claims
	// Mender, Guard and Trail are for repairs; without them none is made.
	Mender Mender
	Guard  Guard
	Trail  Trail
	// Nodes and Server are for the check environment; without them it is not made.
	Nodes  Nodes
	Server Server
	// Transfers is for the checks of cross-bucket transfers; without it no version
	// is taken to have any. Mover finishes and plans them in repairs.
	Transfers *transfer.Reader
	Mover     Mover
}

// Options say what a run compares and how. The zero value compares everything.
type Options struct {
	RunID  string // names the report; empty: a new one
	Filter Filter
	Checks []string      // ids; empty: all
	Settle time.Duration // between two rounds; reconcile.settle
	Batch  int           // members or orders in one page; 0 means 1000
	Rounds int           // at most; 0 means 4. A finding takes two
	Tries  int           // readings of a scope in motion in one round; 0 means 4
	// Patience is the time that reads may lose to sources that do not answer,
	// in one round; 0 means 30 s. Then the rest of the round is not tried.
	Patience time.Duration
	// StuckAfter is how long the two legs of a transfer may be unequal; 0 means a
	// minute.
	StuckAfter time.Duration

	Deep bool // all members of all scopes, instead of those with drift alone
	Rate int  // members a second that a set pass reads at most; 0: no limit
	// Progress is told how many members a set pass has looked at, and of about
	// how many.
	Progress func(done, expected int64)
	Repair   *RepairOptions // nil: nothing is planned and nothing changed

	// Checkpoint is given how far a deep pass has got, now and then; Resume is
	// what it was given last, of a run that was cut off.
	Checkpoint      func(context.Context, Progress)
	CheckpointEvery time.Duration // 0 means 5 s
	Resume          *Resume

	also map[reservation.Scope]*scopeReading // scopes that a run after repairs looks at again
}

// Validate finds mistakes that need no source to be seen: unknown checks.
func (o Options) Validate() error {
	_, err := selectChecks(o.Checks)
	return err
}

// Filter selects scopes; what is not set selects all.
type Filter struct {
	ActivityID string
	SKUID      string
	Version    *int64
	Bucket     *int64
}

func (f Filter) empty() bool { return f == Filter{} }

func (f Filter) match(s reservation.Scope) bool {
	return (f.ActivityID == "" || f.ActivityID == s.ActivityID) &&
		(f.SKUID == "" || f.SKUID == s.SKUID) &&
		(f.Version == nil || *f.Version == s.Version) &&
		(f.Bucket == nil || *f.Bucket == s.Bucket)
}

// ErrNoScope says that a filter selects nothing: that is a mistake, and never
// "consistent".
var ErrNoScope = errors.New("no registered scope within its retention matches the filter")

const (
	defaultBatch    = 1000
	defaultRounds   = 4
	defaultTries    = 4
	defaultPatience = 30 * time.Second
	// persistent is how many rounds make a finding of a contradiction whose
	// numbers differ each time while its direction stays.
	persistent = 3
)

// Run compares the scopes that the options select, in as many rounds as it
// takes to settle what contradicts. Sources that cannot be read are in the
// report, which is incomplete then, as is that of a run that was told to stop:
// it says what was found and repaired by then. The error is for what makes a
// report impossible: unknown checks ([ErrUnknownCheck]), a filter that selects
// nothing ([ErrNoScope]), and a run to resume that selects something else
// ([ErrOtherSelection]). After repairs everything is read again, and the report is
// of the state then.
func (r *Reconciler) Run(ctx context.Context, o Options) (*Report, error) {
	checks, err := selectChecks(o.Checks)
	if err != nil {
		return nil, err
	}
	checks = r.possible(checks)
	if o.Resume != nil {
		if err := o.Resume.Progress.Selection.check(o.selection(checks)); err != nil {
			return nil, err
		}
	}
	run, err := r.read(ctx, checks, o)
	if err != nil {
		return nil, err
	}
	report := run.result()
	members := run.sets != nil && len(run.sets.queries) > 0
	if o.Repair == nil || !r.repairs() || run.stopped || (!members && report.Summary[CheckStuckTransfer] == 0) {
		return report, nil
	}
	p := &repairer{
		sets: run.sets, mender: r.Mender, mover: r.Mover, books: r.Transfers, batch: run.options.Batch, guard: r.Guard, trail: r.Trail,
		options: *o.Repair, report: report, deficit: map[Ref]bool{},
	}
	if p.repair(ctx); !p.tried {
		return report, nil
	}
	if cancelled(ctx) {
		return p.cutOff(), nil
	}
	o.Checkpoint, o.Resume = nil, nil
	if run.sets != nil {
		o.also = run.sets.targets
	}
	after, err := r.read(ctx, checks, o)
	if err != nil {
		return nil, err
	}
	return p.merge(after.result()), nil
}

// possible are the checks for which there are sources.
func (r *Reconciler) possible(checks []Check) []Check {
	return slices.DeleteFunc(checks, func(c Check) bool {
		switch {
		case c.Level == LevelSet:
			return r.Members == nil || r.Claims == nil
		case c.ID == CheckEnvironment:
			return r.Nodes == nil && r.Server == nil
		case c.ID == CheckStuckTransfer, c.ID == CheckTransferConflict:
			return r.Transfers == nil
		default:
			return false
		}
	})
}

func (r *Reconciler) repairs() bool { return r.Mender != nil && r.Guard != nil && r.Trail != nil }

// read makes the rounds and the set pass. A run that is told to stop ends early.
func (r *Reconciler) read(ctx context.Context, checks []Check, o Options) (*run, error) {
	run := newRun(r, checks, o)
	err := run.rounds(ctx)
	if err == nil {
		err = run.setPass(ctx)
	}
	if err == nil {
		run.environment(ctx)
		run.sayWhatWasNotMade()
	}
	if err != nil && cancelled(ctx) {
		run.stop(ctx)
		return run, nil
	}
	return run, err
}

// stopLimit bounds what a run that is told to stop still does.
const stopLimit = 10 * time.Second

// stop ends a run early. How far a deep pass got is not lost.
func (r *run) stop(ctx context.Context) {
	r.stopped = true
	if r.options.Checkpoint == nil || !r.options.Deep || r.sets == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancel()
	r.options.Checkpoint(ctx, r.sets.progress())
	r.report.resumable = true
}

// rounds reads until nothing more can be settled.
func (r *run) rounds(ctx context.Context) error {
	for r.round = 1; ; r.round++ {
		if err := r.oneRound(ctx); err != nil {
			return err
		}
		if !r.again() {
			return nil
		}
		if err := r.settle(ctx); err != nil {
			return err
		}
	}
}

// run is the state of a run between its rounds.
type run struct {
	source  *Reconciler
	reader  reader
	checks  []Check
	skus    []SKU // as the last round read them
	sets    *sets // of the set pass
	options Options
	report  *Report
	round   int
	stopped bool // it was told to stop before it was through

	latest   map[reservation.Scope]*scopeReading // the newest reading of each scope
	moved    map[reservation.Scope]bool          // numbers that changed between rounds
	open     map[subject]*standing
	summed   map[reservation.Scope]bool // versions (as their bucket 0) whose buckets were all read
	retry    map[reservation.Scope]bool // scopes that the next round reads again
	retrySKU map[skuName]bool           // SKUs whose strays it looks for again
	broken   bool                       // the registry could not be read: there is no next round
}

// subject is what a contradiction is about.
type subject struct {
	check string
	scope reservation.Scope
}

// standing is a contradiction over the rounds in which it stood, which follow
// each other.
type standing struct {
	last   contradiction
	rounds int
	same   bool // the last two rounds saw the same
	alike  bool // all rounds saw the same direction
}

type skuName struct{ activityID, skuID string }

func newRun(r *Reconciler, checks []Check, o Options) *run {
	o.Batch, o.Rounds, o.Tries = orDefault(o.Batch, defaultBatch), orDefault(o.Rounds, defaultRounds), orDefault(o.Tries, defaultTries)
	o.Patience = orDefault(o.Patience, defaultPatience)
	started := &run{
		source: r, reader: reader{
			registry: r.Registry, stocks: r.Stocks, orders: r.Orders, needs: union(checks),
			batch: o.Batch, tries: o.Tries, transfers: r.Transfers, stuckAfter: orDefault(o.StuckAfter, defaultStuckAfter),
		},
		checks: checks, options: o, report: newReport(checks, time.Now()),
		latest: map[reservation.Scope]*scopeReading{}, moved: map[reservation.Scope]bool{},
		summed: map[reservation.Scope]bool{}, open: map[subject]*standing{}, retry: map[reservation.Scope]bool{}, retrySKU: map[skuName]bool{},
	}
	started.report.RunID = cmp.Or(o.RunID, started.report.RunID)
	if o.Deep {
		started.report.Mode = ModeDeep
	}
	started.report.unfiltered = o.Filter.empty()
	if o.Resume != nil {
		started.report.resumed = true
		started.report.RunID, started.report.StartedAt = o.Resume.RunID, o.Resume.StartedAt.UTC()
	}
	return started
}

// orDefault is n, or the fallback where n is not set.
func orDefault[N int | time.Duration](n, fallback N) N {
	if n <= 0 {
		return fallback
	}
	return n
}

// oneRound reads what is to be read, the registry first, and weighs what
// contradicts.
func (r *run) oneRound(ctx context.Context) error {
	skus, err := r.reader.registry.SKUs(ctx, r.options.Filter.ActivityID, r.options.Filter.SKUID)
	if cancelled(ctx) {
		return context.Cause(ctx)
	}
	if err != nil {
		r.broken = true
		r.report.Incomplete = append(r.report.Incomplete, Incomplete{Source: SourcePostgres, Reason: oneLine(err.Error())})
		return nil
	}
	r.skus = skus
	r.readTransfers(ctx)
	readings, asked := r.prepare(skus)
	if r.round == 1 && asked == 0 && !r.options.Filter.empty() {
		return ErrNoScope
	}
	var lost time.Duration
	for _, k := range readings {
		if lost > r.options.Patience {
			failAll(k.scopes, SourceTime, errNotTried)
		} else {
			lost += r.read(ctx, k)
		}
		if cancelled(ctx) {
			return context.Cause(ctx)
		}
		r.keep(k)
		r.weigh(k)
	}
	return nil
}

// errNotTried is why a scope was not read at all.
var errNotTried = errors.New("not tried: reading the scopes before it took too long and failed")

// read reads a SKU and returns the time that was lost, if nothing of it could
// be read.
func (r *run) read(ctx context.Context, k *skuReading) time.Duration {
	begin := time.Now()
	strays := r.reader.needs.allOrders && (r.round == 1 || r.retrySKU[skuName{k.sku.ActivityID, k.sku.SKUID}])
	r.reader.read(ctx, k, strays)
	if slices.ContainsFunc(k.scopes, func(s *scopeReading) bool { return s.full && !s.failed() }) {
		return 0
	}
	return time.Since(begin)
}

// cancelled tells a run that was told to stop from one that ran out of time:
// the latter still has a report to give, of what it could not read.
func cancelled(ctx context.Context) bool {
	return errors.Is(ctx.Err(), context.Canceled)
}

// prepare makes the readings of a round: in the first all scopes, later those
// that are to be read again.
func (r *run) prepare(skus []SKU) (readings []*skuReading, asked int) {
	live := map[reservation.Scope]bool{}
	for _, sku := range skus {
		k := &skuReading{sku: sku, byName: map[reservation.Scope]*scopeReading{}}
		work := r.retrySKU[skuName{sku.ActivityID, sku.SKUID}]
		for _, v := range sku.Versions {
			for _, s := range r.prepareVersion(sku, v) {
				live[s.scope] = true
				if s.asked {
					asked++
				}
				if s.full || s.sibling {
					work = true
					k.scopes, k.byName[s.scope] = append(k.scopes, s), s
				}
			}
		}
		if work {
			readings = append(readings, k)
		}
	}
	for s := range r.latest { // its retention ended between the rounds
		if !live[s] {
			delete(r.latest, s)
		}
	}
	return readings, asked
}

// prepareVersion makes readings of a version's live buckets, and marks which
// are to be read: those that are asked for, and their siblings if a check sums
// over all of them.
func (r *run) prepareVersion(sku SKU, v Version) []*scopeReading {
	var all []*scopeReading
	work := false
	for _, b := range v.Buckets {
		if b.Expired {
			continue
		}
		s := &scopeReading{scope: sku.scope(v, b), version: v, bucket: b}
		s.asked = r.options.Filter.match(s.scope)
		s.full = s.asked && (r.round == 1 || r.retry[s.scope])
		work = work || s.full
		all = append(all, s)
	}
	if !work || !r.sums(sku, v) {
		return all
	}
	for _, s := range all {
		s.sibling = !s.full
		if s.full && int64(len(all)) != v.Count {
			s.fail(SourcePostgres, fmt.Sprintf("%d of the version's %d buckets are registered: its allocation cannot be compared", len(all), v.Count))
		}
	}
	return all
}

// sums says whether a round needs all buckets of a version: until their sum was
// once taken, and while it is in question.
func (r *run) sums(sku SKU, v Version) bool {
	if !r.reader.needs.siblings {
		return false
	}
	return !r.summed[sku.scope(v, Bucket{})] || slices.ContainsFunc(v.Buckets, func(b Bucket) bool {
		return r.open[subject{CheckAllocationMismatch, sku.scope(v, b)}] != nil
	})
}

// keep makes the readings the newest ones of their scopes. Of a sibling only
// its failure counts: the check that sums over all could not be made.
func (r *run) keep(k *skuReading) {
	for _, s := range k.scopes {
		before := r.latest[s.scope]
		switch {
		case s.full:
			if before != nil && before.differs(s) {
				r.moved[s.scope] = true
			}
			r.latest[s.scope] = s
		case !s.failed():
		case before == nil:
			r.latest[s.scope] = s
		default:
			for _, f := range s.failures {
				before.fail(f.Source, f.Reason)
			}
		}
	}
	for _, v := range k.sku.Versions {
		if _, err := k.initialOfAll(v); err == nil {
			r.summed[k.sku.scope(v, Bucket{})] = true
		}
	}
}

// differs says whether two readings show other numbers.
func (s *scopeReading) differs(later *scopeReading) bool {
	return (s.stock != nil && later.stock != nil && *s.stock != *later.stock) ||
		(s.counted && later.counted && (s.active != later.active || s.canceled != later.canceled))
}

// weigh compares what a SKU's reading contradicts with what the rounds before
// saw.
func (r *run) weigh(k *skuReading) {
	seen := map[subject]contradiction{}
	for _, check := range r.checks {
		if check.compare == nil {
			continue
		}
		for _, c := range check.compare(k) {
			if r.options.Filter.match(c.scope) {
				seen[subject{c.check, c.scope}] = c
			}
		}
	}
	for key := range r.open {
		if _, stands := seen[key]; !stands && k.shows(key) {
			delete(r.open, key)
			r.moved[key.scope] = true
		}
	}
	for key, c := range seen {
		st := r.open[key]
		if st == nil {
			r.open[key] = &standing{last: c, rounds: 1, alike: true}
			continue
		}
		st.same, st.alike = st.last.same(c), st.alike && st.last.alike(c)
		st.last = c
		st.rounds++
	}
}

// shows says whether the reading would show a contradiction if it still stood.
func (k *skuReading) shows(key subject) bool {
	if key.scope.ActivityID != k.sku.ActivityID || key.scope.SKUID != k.sku.SKUID {
		return false
	}
	s := k.byName[key.scope]
	switch key.check {
	case CheckUnregisteredScope:
		return k.straysRead
	case CheckAllocationMismatch:
		return s != nil && s.full && k.allRead(key.scope.Version, false)
	case CheckOversold:
		return s != nil && k.allRead(key.scope.Version, true)
	default:
		return s != nil && s.full && !s.failed()
	}
}

// allRead says whether every bucket of a version could be read, with full in
// full.
func (k *skuReading) allRead(version int64, full bool) bool {
	return !slices.ContainsFunc(k.scopes, func(s *scopeReading) bool {
		return s.scope.Version == version && (s.failed() || (full && !s.full))
	})
}

// again decides whether there is another round, and what it reads: scopes with
// something unsettled, and once more those that could not be read.
func (r *run) again() bool {
	clear(r.retry)
	clear(r.retrySKU)
	if r.broken || r.round >= r.options.Rounds {
		return false
	}
	for key, st := range r.open {
		if st.same {
			continue
		}
		if key.check == CheckOversold { // over all buckets of the version
			for s := range r.latest {
				if s.ActivityID == key.scope.ActivityID && s.SKUID == key.scope.SKUID && s.Version == key.scope.Version {
					r.retry[s] = true
				}
			}
		}
		if key.check == CheckUnregisteredScope {
			r.retrySKU[skuName{key.scope.ActivityID, key.scope.SKUID}] = true
		} else {
			r.retry[key.scope] = true
		}
	}
	if r.round == 1 {
		for s, reading := range r.latest {
			if reading.asked && reading.failed() {
				r.retry[s] = true
			}
		}
	}
	return len(r.retry)+len(r.retrySKU) > 0
}

// settle waits until the next round. Time that runs out ends the waiting; what
// is read then says so.
func (r *run) settle(ctx context.Context) error {
	timer := time.NewTimer(r.options.Settle)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	if cancelled(ctx) {
		return context.Cause(ctx)
	}
	return nil
}

// result makes the report of what the rounds settled.
func (r *run) result() *Report {
	for s, reading := range r.latest {
		r.report.Incomplete = append(r.report.Incomplete, reading.failures...)
		if reading.asked {
			r.report.Scopes = append(r.report.Scopes, reading.row(r.moved[s]))
		}
	}
	for key, st := range r.open {
		switch {
		case st.settled():
			r.report.Findings = append(r.report.Findings, r.finding(key, st))
		case r.broken, r.latest[key.scope] != nil && r.latest[key.scope].failed(): // says already why it is not settled
		default:
			name := jsonScope(key.scope)
			r.report.Incomplete = append(r.report.Incomplete, Incomplete{
				Source: SourceRounds, Scope: &name,
				Reason: fmt.Sprintf("%s stood in %d of %d rounds and was not the same twice: %s", key.check, st.rounds, r.round, st.last.message),
			})
		}
	}
	if r.stopped {
		r.report.stop("the run was told to stop before it was through")
	}
	r.report.finish(time.Now())
	return r.report
}

func (r *run) finding(key subject, st *standing) Finding {
	check := r.check(key.check)
	kind := check.Repair
	if st.last.manual {
		kind = RepairManual
	}
	return Finding{
		Check: check.ID, Severity: check.Severity, Scope: jsonScope(key.scope), Subject: cmp.Or(st.last.subject, key.scope.Tag()),
		Message: st.last.message, Evidence: Evidence{Redis: st.last.redis, Postgres: st.last.pg}, Rounds: st.rounds,
		Repair: Repair{Kind: kind, State: RepairStateNone, Detail: check.Advice},
		cause:  st.last.cause,
	}
}

// check is the check of a name that is made.
func (r *run) check(id string) Check {
	return r.checks[slices.IndexFunc(r.checks, func(c Check) bool { return c.ID == id })]
}

// row is the scope's row; its verdict follows from the whole report.
func (s *scopeReading) row(movedBetween bool) ScopeReport {
	row := ScopeReport{Scope: jsonScope(s.scope), InMotion: movedBetween || s.moved}
	if s.stock != nil {
		row.Redis = &RedisCount{
			Initial: present(s.stock.Initial), Available: present(s.stock.Available), Reserved: present(s.stock.Reserved),
			ReleasedTotal: present(s.stock.ReleasedTotal),
			SendPending:   present(s.stock.SendPending), ReservationExpiry: present(s.stock.Expiry),
		}
	}
	if s.counted {
		row.Postgres = &OrdersCount{Active: s.active, Cancelled: s.canceled}
		deviation := s.deviation()
		row.Deviation = &deviation
	}
	return row
}

// present is a number that may be missing.
func present(n int64) *int64 {
	if n == Missing {
		return nil
	}
	return &n
}

// NewRunID is unique and sorts by time.
func NewRunID() string {
	return time.Now().UTC().Format("20060102T150405Z-") + strings.ToLower(rand.Text()[:8])
}
