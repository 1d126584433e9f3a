package daemon

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/probe"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// watcher samples the services for the metrics, with connections of its own, so
// that no worker waits for it. Only the job probe uses it, one run at a time.
type watcher struct {
	prober  *redisstore.Prober
	clients *redisstore.Clients
	store   *redisstore.Store

	sizes  map[reservation.Scope]probe.KeySizes // as last measured, of live scopes
	rates  map[reservation.Scope]float64        // requests per second, between the last two looks
	after  reservation.Scope                    // the last one that was measured
	uneven map[reservation.Scope]time.Time      // since when a bucket is sold out and another is not, by the version's bucket 0
	slow   map[string]int64                     // entries of the slow log that were seen, by server
	down   map[string]bool                      // servers that did not answer
}

const (
	// watchConns is the connections of each pool: a sample is one pipeline after
	// another.
	watchConns = 2
	// sizedAtOnce bounds the scopes whose keys one sample measures: 260 commands
	// each. The others' turn comes with the next samples.
	sizedAtOnce = 8
)

func (d *Daemon) openWatcher(ctx context.Context) (err error) {
	w := &watcher{
		sizes: map[reservation.Scope]probe.KeySizes{}, rates: map[reservation.Scope]float64{},
		uneven: map[reservation.Scope]time.Time{}, slow: map[string]int64{}, down: map[string]bool{},
	}
	d.watcher = w
	c := d.cfg.Redis
	c.PoolSize = watchConns
	if w.prober, err = redisstore.NewProber(c); err != nil {
		return err
	}
	if w.clients, err = redisstore.Open(ctx, c); err != nil {
		return err
	}
	w.store, err = redisstore.New(w.clients, c.CommandTimeout)
	return err
}

func (w *watcher) close() error {
	var errs []error
	if w != nil && w.prober != nil {
		errs = append(errs, w.prober.Close())
	}
	if w != nil && w.clients != nil {
		errs = append(errs, w.clients.Close())
	}
	return errors.Join(errs...)
}

// sample is the job probe: it asks every service how it is, and exports the
// answers. What one service does not answer leaves the others' as they are.
func (d *Daemon) sample(ctx context.Context) (schedule.Result, error) {
	var services observe.Services
	services.Up = map[string]bool{}

	nodes := d.watcher.prober.Nodes(ctx, redisstore.Vital)
	d.tellNodes(nodes)
	services.Up["redis"] = mastersAnswer(nodes)

	offset, postgresErr := d.postgresClock(ctx)
	services.Up["postgres"] = postgresErr == nil
	d.metrics.SetRedis(nodes, offset, postgresErr == nil)

	health, brokersErr := d.Evidence.Probe(ctx)
	brokersErr = errors.Join(brokersErr, health.Err())
	services.Up["rocketmq"] = brokersErr == nil
	services.GroupKnown, services.Brokers = health.GroupKnown, brokersUp(health)
	d.metrics.SetServices(services)

	if postgresErr != nil {
		return nil, errors.Join(postgresErr, brokersErr) // what follows would fail the same way
	}
	return nil, errors.Join(brokersErr, d.sampleScopes(ctx), d.sampleWork(ctx))
}

func mastersAnswer(nodes []probe.RedisNode) bool {
	masters := 0
	for _, n := range nodes {
		if n.Err != nil && n.Role != probe.RoleReplica && n.Role != probe.RoleSentinel {
			return false
		}
		if n.Err == nil && n.Role == probe.RoleMaster {
			masters++
		}
	}
	return masters > 0
}

func brokersUp(h rocketmq.Health) map[string]bool {
	up := make(map[string]bool, len(h.Brokers))
	for name, err := range h.Brokers {
		up[name] = err == nil
	}
	return up
}

// postgresClock is PostgreSQL's clock minus ours.
func (d *Daemon) postgresClock(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	at, err := d.Postgres.ServerTime(ctx)
	if err != nil {
		return 0, err
	}
	return at.Sub(began.Add(time.Since(began) / 2)), nil
}

// tellNodes logs what changed: a server that is gone or back, and new entries
// of a slow log, which is read from the last seen one on and never reset.
func (d *Daemon) tellNodes(nodes []probe.RedisNode) {
	w := d.watcher
	for _, n := range nodes {
		log := d.log.With(observe.FieldRedisNode, n.Addr)
		if was := w.down[n.Addr]; was != (n.Err != nil) {
			if n.Err != nil {
				log.Warn("a Redis server does not answer", "role", n.Role, "error", n.Err)
			} else {
				log.Info("a Redis server answers again", "role", n.Role)
			}
		}
		w.down[n.Addr] = n.Err != nil
		if n.SlowTotal < 0 {
			continue
		}
		seen, known := w.slow[n.Addr]
		w.slow[n.Addr] = n.SlowTotal
		if slowest, ok := newlySlow(n, seen); ok && known {
			log.Info("commands were slow", "count", n.SlowTotal-min(seen, n.SlowTotal), "slowest", slowest.Command,
				observe.FieldLatencyMS, float64(slowest.Took.Microseconds())/1000)
		}
	}
	maps.DeleteFunc(w.down, func(addr string, _ bool) bool {
		return !slices.ContainsFunc(nodes, func(n probe.RedisNode) bool { return n.Addr == addr })
	})
}

// newlySlow is the slowest command that was entered after the first seen ones.
// A server that was restarted counts from 0 again.
func newlySlow(n probe.RedisNode, seen int64) (slowest probe.SlowCommand, ok bool) {
	if n.SlowTotal < seen {
		seen = 0
	}
	for _, c := range n.Slow {
		if c.ID >= seen && c.Took >= slowest.Took {
			slowest, ok = c, true
		}
	}
	return slowest, ok
}

// sampleScopes exports what the live scopes hold and how big their keys are.
func (d *Daemon) sampleScopes(ctx context.Context) error {
	registered, err := d.Postgres.Scopes(ctx, pgstore.ScopeFilter{Live: true})
	if err != nil {
		return err
	}
	scopes := make([]reservation.Scope, len(registered))
	for i, r := range registered {
		scopes[i] = r.Scope
	}
	snapshots := d.watcher.store.Snapshots(ctx, scopes)
	d.metrics.SetStock(d.watcher.stock(scopes, snapshots, time.Now()))
	return d.watcher.measure(ctx, scopes, d.metrics)
}

// stock adds up the scopes, and remembers since when versions have been uneven.
func (w *watcher) stock(scopes []reservation.Scope, snapshots []redisstore.Snapshot, now time.Time) observe.Stock {
	s := observe.Stock{States: map[string]int{
		string(lua.StatePrepared): 0, string(lua.StateActive): 0, string(lua.StatePaused): 0, string(lua.StateClosed): 0, "missing": 0, "unreadable": 0,
	}}
	available := map[reservation.Scope][]int64{} // by the version's bucket 0
	for i, snapshot := range snapshots {
		switch {
		case snapshot.Err != nil:
			s.States["unreadable"]++
			continue
		case !snapshot.Configured():
			s.States["missing"]++
			continue
		}
		s.States[string(snapshot.State)]++
		if snapshot.Available == 0 {
			s.SoldOut++
		}
		if snapshot.Initial != snapshot.Available+snapshot.Reserved {
			s.Deviating++
		}
		version := scopes[i]
		version.Bucket = 0
		available[version] = append(available[version], snapshot.Available)
	}
	for version, buckets := range available {
		spread := probe.SpreadOf(buckets)
		s.MostVariance, s.MostSpread = max(s.MostVariance, spread.Variance), max(s.MostSpread, spread.Max-spread.Min)
		if spread.Min > 0 || spread.Max == 0 {
			delete(w.uneven, version)
			continue
		}
		if _, known := w.uneven[version]; !known {
			w.uneven[version] = now
		}
		s.SoldOutUneven = max(s.SoldOutUneven, now.Sub(w.uneven[version]))
	}
	maps.DeleteFunc(w.uneven, func(version reservation.Scope, _ time.Time) bool { return available[version] == nil })
	return s
}

// measure looks at the keys of the next few scopes, in turn, and exports the
// biggest of all as last seen.
func (w *watcher) measure(ctx context.Context, scopes []reservation.Scope, metrics *observe.Metrics) error {
	maps.DeleteFunc(w.sizes, func(scope reservation.Scope, _ probe.KeySizes) bool { return !slices.Contains(scopes, scope) })
	var errs []error
	for _, k := range w.store.KeySizes(ctx, w.turn(scopes)) {
		if k.Err != nil {
			errs = append(errs, k.Err)
			continue
		}
		w.rates[k.Scope] = k.RequestRate(w.sizes[k.Scope])
		w.sizes[k.Scope] = k
	}
	maps.DeleteFunc(w.rates, func(scope reservation.Scope, _ float64) bool { _, live := w.sizes[scope]; return !live })
	keys := observe.Keys{Skew: 1}
	for scope, k := range w.sizes {
		keys.MaxFields, keys.Skew = max(keys.MaxFields, k.MaxFields()), max(keys.Skew, k.Skew())
		keys.Pending, keys.Expiry = max(keys.Pending, k.Pending), max(keys.Expiry, k.Expiry)
		keys.ShardBytes, keys.PendingBytes = max(keys.ShardBytes, k.ShardBytes), max(keys.PendingBytes, k.PendingBytes)
		keys.ExpiryBytes, keys.HottestRate = max(keys.ExpiryBytes, k.ExpiryBytes), max(keys.HottestRate, w.rates[scope])
	}
	metrics.SetKeys(keys)
	return errors.Join(errs...)
}

// turn is the next few scopes after the last ones, around the list.
func (w *watcher) turn(scopes []reservation.Scope) []reservation.Scope {
	if len(scopes) <= sizedAtOnce {
		return scopes
	}
	begin := slices.Index(scopes, w.after) + 1 // from the first, if it has gone
	next := make([]reservation.Scope, sizedAtOnce)
	for i := range next {
		next[i] = scopes[(begin+i)%len(scopes)]
	}
	w.after = next[len(next)-1]
	return next
}

// sampleWork exports what PostgreSQL knows of work to do: tasks, transfers and
// the last reconciliations.
func (d *Daemon) sampleWork(ctx context.Context) error {
	ages, err := d.Postgres.TaskAges(ctx)
	if err != nil {
		return err
	}
	tasks := make([]observe.OpenTasks, len(ages))
	for i, t := range ages {
		tasks[i] = observe.OpenTasks{Kind: t.Kind, Count: t.Count, Oldest: t.Oldest}
	}
	d.metrics.SetTasks(tasks)
	pending, oldest, err := d.Postgres.OpenTransfers(ctx)
	if err != nil {
		return err
	}
	d.metrics.SetTransfers(pending, oldest)
	last, err := d.Postgres.LastRuns(ctx)
	if err != nil {
		return err
	}
	runs := make([]observe.Reconciliation, len(last))
	for i, r := range last {
		runs[i] = observe.Reconciliation{Mode: r.Mode, Verdict: string(r.Verdict), FinishedAt: r.FinishedAt, Incomplete: r.Incomplete}
	}
	d.metrics.SetReconciliations(runs)
	return nil
}

// pages counts what the workers ask Redis.
type pages struct {
	*redisstore.Store
	metrics *observe.Metrics
}

// Pages is part of [pass.Pager].
func (p pages) Pages(ctx context.Context, requests []pass.PageRequest) []pass.PageReply {
	replies := p.Store.Pages(ctx, requests)
	failed := 0
	for _, r := range replies {
		if r.Err != nil {
			failed++
		}
	}
	p.metrics.Asked(observe.SourceRedis, len(replies), failures(failed))
	return replies
}

// failures is a count of failed questions without a cause of their own.
func failures(n int) map[string]int {
	if n == 0 {
		return nil
	}
	return map[string]int{"error": n}
}

// Records is part of [fencer.ClaimStore]; it counts what the workers ask PostgreSQL.
func (c claims) Records(ctx context.Context, ids []string) (map[string]reservation.Record, error) {
	records, err := c.Store.Records(ctx, ids)
	failed := 0
	if err != nil {
		failed = len(ids)
	}
	c.metrics.Asked(observe.SourcePostgres, len(ids), failures(failed))
	return records, err
}

// messages counts what the fencer asks RocketMQ.
type messages struct {
	*rocketmq.Evidence
	metrics *observe.Metrics
}

// Gather is part of [fencer.MessageEvidence].
func (m messages) Gather(ctx context.Context, nowMS int64, queries []rocketmq.Query) map[string]reservation.MessageEvidence {
	gathered := m.Evidence.Gather(ctx, nowMS, queries)
	unknown := map[string]int{}
	for _, e := range gathered {
		if e.State == reservation.MessageUnknown {
			unknown[e.Cause]++
		}
	}
	m.metrics.Asked(observe.SourceRocketMQ, len(gathered), unknown)
	return gathered
}
