package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"time"

	"github.com/seckill/reconciler/internal/devstack"
	"github.com/seckill/reconciler/internal/upstream"
	"github.com/seckill/reconciler/reservation"
)

// Options say how big the demo is.
type Options struct {
	Dir    string // for services, settings, logs and reports
	Binary string // the reconciler, which the daemon is started from

	Users   int
	Units   int64
	Buckets int64
	Rate    float64 // requests per second
	Seed    uint64  // of the faults
	Share   float64 // of the reservations that each fault befalls

	// Limit is how long the recovery may take once the last request was made.
	Limit time.Duration

	Progress io.Writer // gets what happens while it happens
	Terminal bool      // Progress is a terminal: one picture instead of many lines
	Colour   bool      // titles may stand out
}

// Default is the demo at full size.
func Default() Options {
	return Options{
		Dir: ".run/demo", Users: 30_000, Units: 10_000, Buckets: 4, Rate: 1500, Seed: 1, Share: 0.02, Limit: 2 * time.Minute,
	}
}

// Validate reports what makes no demo.
func (o Options) Validate() error {
	var errs []error
	if o.Users < 1 || o.Units < 1 || o.Buckets < 1 || o.Rate <= 0 {
		errs = append(errs, errors.New("users, units, buckets and rate must be positive"))
	}
	if most := 1 / float64(len(upstream.AllFaults)-1); o.Share < 0 || o.Share > most {
		errs = append(errs, fmt.Errorf("share: %g is not in [0, %.3f], the most that each of %d faults can have", o.Share, most, len(upstream.AllFaults)-1))
	}
	return errors.Join(errs...)
}

func (o Options) activity() upstream.Activity {
	return upstream.Activity{ActivityID: "demo", SKUID: "88001", Version: 1, Buckets: o.Buckets, Total: o.Units}
}

// The demo's clock: seconds where a real sale has minutes.
const (
	ttl         = 5 * time.Second  // of a reservation
	markLate    = 8 * time.Second  // LateEnqueued
	sendLate    = 10 * time.Second // Delayed
	replayLate  = 40 * time.Second // Replayed: most of them are released by then
	rollBackTo  = 0.08             // share of the requests: what a bucket's failover goes back to
	rollBackAt  = 0.10             // and when it happens, before the broker stops
	rolledBack  = 1                // the bucket, modulo their number
	rollBackMin = 10               // reservations: some of them are ordered, whatever befalls them
	outageStart = 0.15             // share of the requests
	outageTime  = 3 * time.Second  // and until the broker serves again: longer than a reservation lives
	killPause   = time.Second      // before it is started again

	lookEvery          = 2 * time.Second
	steadyLooks        = 3 // equal looks in a row that mean rest
	brokenLooks        = 8 // and that mean that nothing will mend what is broken
	repairPasses       = 5 // the most after the approval: each takes what came free meanwhile
	consumerGoroutines = 16
)

// play is one run of the demo.
type play struct {
	o       Options
	stage   *stage
	screen  *screen
	report  Report
	sale    *upstream.Sale
	workers []*upstream.Consumer
	saleEnd chan struct{} // closed when the sale is over, late messages included
	saleErr error         // once saleEnd is closed

	approved bool // a person was asked, and said yes
}

// Run plays the demo. The report is there whatever happens; its verdict says
// whether every promise was kept. An error means that the demo itself failed.
func Run(ctx context.Context, o Options) (Report, error) {
	if err := o.Validate(); err != nil {
		return Report{}, err
	}
	p := &play{o: o, screen: newScreen(o), report: newReport(o)}
	err := p.run(ctx)
	if p.stage != nil {
		err = errors.Join(err, p.stage.strike())
	}
	if p.sale != nil {
		p.report.Sale, p.report.Consumers = p.sale.Tally(), p.events()
	}
	p.report.finish(err)
	return p.report, err
}

func (p *play) run(ctx context.Context) error {
	for _, phase := range []struct {
		title string
		play  func(context.Context) error
	}{
		{"Start Redis, PostgreSQL and RocketMQ", p.setStage},
		{"Create the schema and the activity", p.createActivity},
		{"Start the daemon", p.startDaemon},
		{"Sell, and break things", p.sell},
		{"Let the daemon finish", p.recover},
		{"Repair what the failover took", p.repair},
		{"Approve what waits for a person", p.approve},
		{"Stop the daemon and count", p.count},
	} {
		p.screen.phase(phase.title)
		began := time.Now()
		err := phase.play(ctx)
		p.report.Phases = append(p.report.Phases, Phase{phase.title, time.Since(began).Seconds()})
		if err != nil {
			return fmt.Errorf("%s: %w", phase.title, err)
		}
		p.screen.done(time.Since(began))
	}
	return nil
}

func (p *play) setStage(ctx context.Context) (err error) {
	if p.stage, err = setStage(ctx, p.o, p.screen); err != nil {
		return err
	}
	return p.stage.connect(ctx)
}

func (p *play) createActivity(ctx context.Context) error {
	addr, err := freeAddr(ctx)
	if err != nil {
		return err
	}
	if err := p.stage.writeConfig(addr); err != nil {
		return err
	}
	p.stage.daemon = newDaemon(p.o.Binary, p.stage.dir, addr)
	a := p.stage.activity
	for _, command := range [][]string{
		{"migrate", "up", "--with-reference"},
		{
			"scope", "create", "--activity", a.ActivityID, "--sku", a.SKUID, "--version", strconv.FormatInt(a.Version, 10),
			"--total", strconv.FormatInt(a.Total, 10), "--buckets", strconv.FormatInt(a.Buckets, 10),
			"--starts", "now", "--ends", "+30m", "--retention", "1h", "--allow-small",
		},
	} {
		p.screen.sayf("reconciler %s", quoteless(command))
		if err := p.stage.daemon.run(ctx, command...); err != nil {
			return err
		}
	}
	return nil
}

func (p *play) startDaemon(ctx context.Context) error {
	p.screen.sayf("reconciler run, with %s/%s", p.o.Dir, configFile)
	if err := p.stage.daemon.start(); err != nil {
		return err
	}
	return p.stage.daemon.await(ctx)
}

// sell runs the sale until the last request was made. What the faults put off
// goes on behind it.
func (p *play) sell(ctx context.Context) error {
	s := p.stage
	faults := upstream.Evenly(p.o.Seed, p.o.Share, upstream.AllFaults[1:]...)
	for _, kind := range []upstream.Kind{upstream.Claiming, upstream.Unmodified} {
		p.workers = append(p.workers, &upstream.Consumer{Kind: kind, DB: s.shop, Redis: s.client, FaultOf: faults.Of})
	}
	p.sale = &upstream.Sale{
		Gateway: &upstream.Gateway{
			Activity: s.activity, Secret: []byte("the demo's secret"), TTL: ttl, Redis: s.client, Sender: s.sender,
		},
		Users: p.o.Users, Rate: p.o.Rate, Faults: faults,
		Delays: upstream.Delays{Mark: markLate, Send: sendLate, Replay: replayLate},
		Outage: &upstream.Outage{Broker: s.stack.Brokers()[0], At: outageStart, For: outageTime},
		Rollback: &upstream.Rollback{
			Scope: s.activity.Scope(rolledBack % p.o.Buckets), DumpAt: rollBackTo, LoseAt: rollBackAt, Least: rollBackMin,
		},
	}
	subscriber, err := upstream.Subscribe(upstream.Subscription{
		NameServers: []string{s.stack.NameServer().Addr()}, Topic: devstack.Topic, Group: devstack.ConsumerGroup,
		Goroutines: consumerGoroutines, MaxAttempts: 2, Logger: slog.New(slog.DiscardHandler),
	}, p.workers...)
	if err != nil {
		return err
	}
	s.subscriber = subscriber
	p.saleEnd = make(chan struct{})
	ctx, s.endSale = context.WithCancel(ctx)
	go func() {
		defer close(p.saleEnd)
		p.saleErr = p.sale.Run(ctx)
	}()
	s.saleEnd = p.saleEnd
	if err := p.watch(ctx, p.requestsMade); err != nil {
		return err
	}
	before, err := p.look(ctx)
	if err != nil {
		return err
	}
	p.report.before(before, p.sale.Ledger())
	return nil
}

// requestsMade ends the phase with the last request.
func (p *play) requestsMade(ctx context.Context, s *State) (bool, error) {
	return p.sale.Tally().Requests >= p.o.Users, p.killOnce(ctx, s)
}

// killOnce kills the daemon, once, when it has most to do: the broker is back,
// and everything that was held up is to be repaired.
func (p *play) killOnce(ctx context.Context, s *State) error {
	if p.report.DaemonKills > 0 || !p.sale.Outage.Over() || s.Open() == 0 {
		return nil
	}
	p.report.DaemonKills++
	p.screen.sayf("kill -9 of the daemon, with %d reservations undecided", s.Open())
	if err := p.stage.daemon.kill(); err != nil {
		return err
	}
	if err := pause(ctx, killPause); err != nil {
		return err
	}
	return p.startDaemon(ctx)
}

// recover waits until nothing moves any more: every reservation is decided or
// in front of a person, nothing is on its way, and L2 holds, or stays broken,
// the bucket apart that lost its writes. It gives up after the limit; the check
// then says what is wrong.
func (p *play) recover(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, p.o.Limit)
	defer cancel()
	steady, last := 0, ""
	err := p.watch(ctx, func(ctx context.Context, s *State) (bool, error) {
		if err := p.killOnce(ctx, s); err != nil {
			return false, err
		}
		select {
		case <-p.saleEnd:
		default:
			return false, nil
		}
		if now := fmt.Sprint(s.summary(), p.events()); now != last || s.Open() > 0 {
			steady, last = 0, now
			return false, nil
		}
		steady++
		broken := slices.ContainsFunc(s.Check(true, p.expectedOrphans()), p.beyondTheRollback)
		return steady >= brokenLooks || (steady >= steadyLooks && !broken), nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		p.screen.sayf("not at rest after %s", p.o.Limit)
		p.report.TimedOut = true
		return nil
	}
	return err
}

// beyondTheRollback says whether a broken promise is of something else than the
// bucket that lost its writes, which is not repaired yet.
func (p *play) beyondTheRollback(v Violation) bool {
	return v.Promise != "L2" || v.Scope != p.sale.Rollback.Scope.Tag()
}

// repair runs one reconciliation with repairs, as cron does, and keeps what it
// found: what the failover took is put back from PostgreSQL.
func (p *play) repair(ctx context.Context) error {
	if p.report.TimedOut {
		return nil
	}
	if p.sale.Rollback.Lost() == nil {
		p.report.Notes = append(p.report.Notes, "no bucket lost its writes: the sale was over before")
		return nil
	}
	before, err := p.look(ctx)
	if err != nil {
		return err
	}
	p.report.rolledBack(before, p.sale.Rollback)
	return p.reconcile(ctx)
}

// reconcile is one pass.
func (p *play) reconcile(ctx context.Context) error {
	command := []string{"reconcile", "--deep", "--repair", "--yes", "--wait", "30s", "--activity", p.stage.activity.ActivityID, "--output", "json"}
	p.screen.sayf("reconciler %s", quoteless(command))
	pass, err := p.stage.daemon.reconcile(ctx, command...)
	if err != nil {
		return err
	}
	p.report.Rollback.Passes = append(p.report.Rollback.Passes, pass)
	p.screen.sayf("%s", pass)
	return nil
}

// approve does what the person would whom the daemon asks: the reservations
// whose hash the demo deleted are given back, by the same command and through
// the same fence. What it cannot end is left for the check to name.
func (p *play) approve(ctx context.Context) error {
	if p.report.TimedOut {
		return nil
	}
	orphans := len(p.expectedOrphans())
	if orphans == 0 {
		return p.heal(ctx)
	}
	command := []string{
		"task", "approve", "--kind", reservation.TaskOrphanMember, "--max", strconv.Itoa(orphans),
		"--actor", "demo", "--reason", "the demo deleted their hashes", "--yes",
	}
	p.screen.sayf("reconciler %s", quoteless(command))
	p.approved = true
	if err := p.stage.daemon.run(ctx, command...); err == nil {
		p.report.Approved = orphans
	} else {
		p.report.Notes = append(p.report.Notes, "the approval of the deleted hashes: "+err.Error())
	}
	return p.heal(ctx)
}

// heal repeats the repair while orders lack a unit: those that the approval
// gave back are there now.
func (p *play) heal(ctx context.Context) error {
	for range repairPasses {
		passes := p.report.Rollback.Passes
		if len(passes) == 0 || passes[len(passes)-1].Deficits == 0 {
			return nil
		}
		if err := p.reconcile(ctx); err != nil {
			return err
		}
	}
	return nil
}

// waiting are the reservations that are to be in front of a person at the end.
func (p *play) waiting() []string {
	if p.approved {
		return nil
	}
	return p.expectedOrphans()
}

// count ends everything that moves and checks.
func (p *play) count(ctx context.Context) error {
	s := p.stage
	s.endSale()
	<-p.saleEnd
	stop, cancel := context.WithTimeout(ctx, stopLimit)
	defer cancel()
	if err := errors.Join(s.subscriber.Stop(stop), s.daemon.stop()); err != nil {
		return err
	}
	after, err := p.look(ctx)
	if err != nil {
		return err
	}
	p.report.after(after, p.sale.Ledger(), p.waiting())
	p.report.Rollback.After = after.scopeCounts(p.sale.Rollback.Scope)
	p.report.counters(s.daemon.counters())
	if p.saleErr != nil {
		p.report.Notes = append(p.report.Notes, "failed calls of the gateway on the way: "+p.saleErr.Error())
	}
	return nil
}

// watch looks again and again until done says so, and shows what it sees.
func (p *play) watch(ctx context.Context, done func(context.Context, *State) (bool, error)) error {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		s, err := p.look(ctx)
		if err != nil {
			return err
		}
		p.stage.daemon.read(ctx)
		p.screen.draw(p.picture(s))
		if end, err := done(ctx, s); end || err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// look reads the state and checks what holds at every moment.
func (p *play) look(ctx context.Context) (*State, error) {
	var s *State
	err := p.whole(func() (err error) {
		s, err = Look(ctx, p.stage.client, p.stage.owner, p.stage.activity)
		return err
	})
	if err != nil {
		return nil, err
	}
	p.report.Looks++
	for _, v := range s.Check(false, nil) {
		p.report.violated(v)
	}
	return s, nil
}

// whole runs do while no failover takes half of what it reads.
func (p *play) whole(do func() error) error {
	if p.sale == nil {
		return do()
	}
	return p.sale.Rollback.During(do)
}

func (p *play) events() map[upstream.Event]int {
	sum := map[upstream.Event]int{}
	for _, c := range p.workers {
		for event, n := range c.Events() {
			sum[event] += n
		}
	}
	return sum
}

// expectedOrphans are the reservations whose hash the demo itself deleted, but
// for those that the failover took as a whole.
func (p *play) expectedOrphans() []string {
	lost := p.sale.Rollback.Lost()
	var ids []string
	for _, sold := range p.sale.Ledger().All() {
		id := sold.Reservation.ID
		if sold.Fault == upstream.DeletedHash && (lost == nil || !lost.Reservations[id]) {
			ids = append(ids, id)
		}
	}
	return ids
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
