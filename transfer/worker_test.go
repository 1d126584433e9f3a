package transfer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/transfer"
)

func reading(state string, available, reserved int64, marker transfer.Marker) transfer.Reading {
	return transfer.Reading{
		State: state, Initial: available + reserved, Available: available, Reserved: reserved, Markers: map[string]transfer.Marker{"t": marker},
	}
}

func TestNext(t *testing.T) {
	out, in := func(n int64) transfer.Marker { return transfer.Marker{Leg: transfer.LegOut, Amount: n} }, func(n int64) transfer.Marker { return transfer.Marker{Leg: transfer.LegIn, Amount: n} }
	none := transfer.Marker{}
	for name, c := range map[string]struct {
		state    transfer.State
		donor    transfer.Reading
		receiver transfer.Reading
		held     bool
		want     transfer.Step
	}{
		"planned":                     {transfer.Planned, reading("ACTIVE", 9, 0, none), reading("ACTIVE", 0, 9, none), false, transfer.Step{Verb: transfer.Begin, Target: 5, State: transfer.Planned}},
		"planned, paused":             {transfer.Planned, reading("PAUSED", 9, 0, none), reading("ACTIVE", 0, 9, none), false, transfer.Step{Verb: transfer.Begin, Target: 5, State: transfer.Planned}},
		"planned, donor closed":       {transfer.Planned, reading("CLOSED", 9, 0, none), reading("ACTIVE", 0, 9, none), false, transfer.Step{Verb: transfer.Cancel, State: transfer.Cancelled}},
		"planned, receiver closed":    {transfer.Planned, reading("ACTIVE", 9, 0, none), reading("CLOSED", 0, 9, none), false, transfer.Step{Verb: transfer.Cancel, State: transfer.Cancelled}},
		"planned, held":               {transfer.Planned, reading("ACTIVE", 9, 0, none), reading("ACTIVE", 0, 9, none), true, transfer.Step{Verb: transfer.Wait, Target: 5, State: transfer.Planned}},
		"begun, and undone":           {transfer.Out, reading("ACTIVE", 9, 0, none), reading("ACTIVE", 0, 9, none), false, transfer.Step{Verb: transfer.Begin, Target: 5, State: transfer.Out}},
		"done, and both undone":       {transfer.Done, reading("ACTIVE", 9, 0, out(0)), reading("ACTIVE", 0, 9, none), false, transfer.Step{Verb: transfer.Cancel, State: transfer.Cancelled}},
		"cancelled":                   {transfer.Cancelled, reading("ACTIVE", 9, 0, none), reading("ACTIVE", 0, 9, none), false, transfer.Step{Verb: transfer.Rest, State: transfer.Cancelled}},
		"on its way":                  {transfer.Planned, reading("ACTIVE", 4, 0, out(5)), reading("ACTIVE", 0, 9, none), false, transfer.Step{Verb: transfer.Raise, Target: 5, State: transfer.Out}},
		"on its way, closed":          {transfer.Out, reading("CLOSED", 4, 0, out(5)), reading("CLOSED", 0, 9, in(2)), false, transfer.Step{Verb: transfer.Raise, Target: 5, State: transfer.Out}},
		"less than planned is out":    {transfer.Out, reading("ACTIVE", 0, 4, out(3)), reading("ACTIVE", 0, 9, in(2)), false, transfer.Step{Verb: transfer.Raise, Target: 3, State: transfer.Out}},
		"on its way, held":            {transfer.Out, reading("ACTIVE", 4, 0, out(5)), reading("ACTIVE", 0, 9, in(2)), true, transfer.Step{Verb: transfer.Wait, Target: 5, State: transfer.Out}},
		"cancelled by a slower hand":  {transfer.Cancelled, reading("ACTIVE", 4, 0, out(5)), reading("ACTIVE", 0, 9, none), false, transfer.Step{Verb: transfer.Raise, Target: 5, State: transfer.Out}},
		"receiver undone":             {transfer.Done, reading("ACTIVE", 4, 0, out(5)), reading("ACTIVE", 0, 9, none), false, transfer.Step{Verb: transfer.Raise, Target: 5, State: transfer.Out}},
		"donor undone":                {transfer.Done, reading("ACTIVE", 1, 8, none), reading("ACTIVE", 5, 9, in(5)), false, transfer.Step{Verb: transfer.TopUp, Target: 5, State: transfer.Out}},
		"donor undone, sold out":      {transfer.Done, reading("ACTIVE", 0, 9, out(2)), reading("ACTIVE", 5, 9, in(5)), false, transfer.Step{Verb: transfer.Lower, Target: 2, State: transfer.Out}},
		"donor undone, both sold out": {transfer.Done, reading("ACTIVE", 0, 9, none), reading("ACTIVE", 0, 9, in(5)), false, transfer.Step{Verb: transfer.Wait, State: transfer.Out}},
		"equal":                       {transfer.Out, reading("ACTIVE", 4, 0, out(5)), reading("ACTIVE", 5, 9, in(5)), false, transfer.Step{Verb: transfer.Rest, State: transfer.Done}},
		"equal at less":               {transfer.Out, reading("ACTIVE", 0, 9, out(2)), reading("ACTIVE", 0, 9, in(2)), false, transfer.Step{Verb: transfer.Rest, State: transfer.Done}},
		"equal, held":                 {transfer.Done, reading("ACTIVE", 4, 0, out(5)), reading("ACTIVE", 5, 9, in(5)), true, transfer.Step{Verb: transfer.Rest, State: transfer.Done}},
	} {
		got := transfer.Next(transfer.Pair{Transfer: transfer.Transfer{ID: "t", Amount: 5, State: c.state}, Donor: c.donor, Receiver: c.receiver, Held: c.held})
		if got.Why == "" {
			t.Errorf("%s: no reason", name)
		}
		got.Why = ""
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestTransferIsDrivenToItsEnd(t *testing.T) {
	onEach(t, func(t *testing.T, open func(...int64) *world) {
		t.Helper()
		w := open(10, 2, 0)
		one, two := w.plan(0, 1, 4), w.plan(0, 2, 1)
		if counts := w.pass(); counts[transfer.DoneBegun] != 2 || counts[transfer.DoneRaised] != 2 || counts[transfer.DoneFinished] != 2 {
			t.Errorf("counts %v", counts)
		}
		w.want("after the pass", "5/0", "6/0", "1/0")
		w.atRest("after the pass")
		if w.state(one.ID) != transfer.Done || w.state(two.ID) != transfer.Done {
			t.Errorf("states %s and %s", w.state(one.ID), w.state(two.ID))
		}
		if counts := w.pass(); len(counts) != 1 {
			t.Errorf("a second pass did %v", counts)
		}
	})
}

func TestDonorShortOfStock(t *testing.T) {
	onEach(t, func(t *testing.T, open func(...int64) *world) {
		t.Helper()
		w := open(3, 0)
		row := w.plan(0, 1, 4)
		if counts := w.pass(); counts[transfer.DoneInsufficient] != 1 || w.state(row.ID) != transfer.Cancelled {
			t.Errorf("counts %v, %s", counts, w.state(row.ID))
		}
		w.want("nothing moved", "3/0", "0/0")
		w.atRest("nothing moved")
	})
}

// Gateways are told of units that came in, and the sold-out marker ends.
func TestReceiverSellsAgain(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	w := newWorld(t, store, client, 1, 0)
	receiver := w.key.Scope(1)
	w.must(client.Set(t.Context(), receiver.SoldOutKey(), "1", 0).Err())
	events := client.Subscribe(t.Context(), receiver.EventsChannel())
	defer func() { _ = events.Close() }()
	_, err := events.Receive(t.Context()) // the subscription stands
	w.must(err)
	w.plan(0, 1, 1)
	w.pass()
	if message, err := events.ReceiveMessage(t.Context()); err != nil || message.Payload != "available" {
		t.Errorf("message %v, %v", message, err)
	}
	if n := client.Exists(t.Context(), receiver.SoldOutKey()).Val(); n != 0 {
		t.Error("the receiver is still marked as sold out")
	}
	if client.Get(t.Context(), w.key.Scope(0).SoldOutKey()).Val() != "1" {
		t.Error("the donor gave its last unit and is not marked as sold out")
	}
}

func TestObserveChangesNothing(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	w := newWorld(t, store, client, 9, 0)
	row := w.plan(0, 1, 4)
	worker := w.worker()
	worker.Observe = true
	tally, err := worker.Pass(t.Context())
	if err != nil || tally.Seen != 1 || len(tally.Done) != 0 {
		t.Errorf("%+v, %v", tally, err)
	}
	w.want("observed", "9/0", "0/0")
	if w.state(row.ID) != transfer.Planned {
		t.Errorf("the row is %s", w.state(row.ID))
	}
}

func TestHeldBucketsAreNotTouched(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	w := newWorld(t, store, client, 9, 0, 0)
	w.version.Buckets[1].Held = true
	held, other := w.plan(0, 1, 4), w.plan(0, 2, 1)
	w.pass()
	w.want("while held", "8/0", "0/0", "1/0")
	if w.state(held.ID) != transfer.Planned || w.state(other.ID) != transfer.Done {
		t.Errorf("the rows are %s and %s", w.state(held.ID), w.state(other.ID))
	}
	w.version.Buckets[1].Held = false
	w.pass()
	w.want("let go", "4/0", "4/0", "1/0")
}

// No OUT is begun from a bucket that has lost reservations.
func TestDonorThatNeedsItsUnits(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	w := newWorld(t, store, client, 9, 0)
	w.orders[0] = 2 // and nothing reserved for them
	row := w.plan(0, 1, 9)
	if counts := w.pass(); counts[transfer.DoneWaiting] != 1 {
		t.Errorf("counts %v", counts)
	}
	w.want("needed", "9/0", "0/0")
	w.restore()
	w.pass()
	w.want("restored", "7/2", "0/0")
	if w.state(row.ID) != transfer.Cancelled {
		t.Errorf("the row is %s", w.state(row.ID))
	}
}

// Where somebody else changed the stock nothing is moved, and a person is asked.
func TestConflict(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(w *world, row transfer.Transfer)
		cause string
	}{
		"a unit more than allocated": {func(w *world, _ transfer.Transfer) {
			w.must(w.client.HSet(w.Context(), w.key.Scope(1).StockKey(), "initial", 1, "available", 1).Err())
		}, transfer.CauseSum},
		"the marker of the other leg": {func(w *world, row transfer.Transfer) {
			w.must(w.client.HSet(w.Context(), w.key.Scope(0).TransferKey(row.ID), "leg", "in", "amount", 1, "updated_at_ms", 1).Err())
		}, transfer.CauseMarker},
		"a marker that is none": {func(w *world, row transfer.Transfer) {
			w.must(w.client.HSet(w.Context(), w.key.Scope(0).TransferKey(row.ID), "amount", "many").Err())
		}, transfer.CauseMarker},
		"more out than planned": {func(w *world, row transfer.Transfer) {
			w.must(w.client.HSet(w.Context(), w.key.Scope(0).TransferKey(row.ID), "leg", "out", "amount", 5, "updated_at_ms", 1).Err())
		}, transfer.CauseMarker},
	} {
		t.Run(name, func(t *testing.T) {
			store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
			w := newWorld(t, store, client, 9, 0)
			row := w.plan(0, 1, 4)
			c.spoil(w, row)
			before := w.numbers()
			if _, err := w.worker().Pass(t.Context()); err == nil {
				t.Error("the pass did not fail")
			}
			if !slices.Equal(before, w.numbers()) || w.state(row.ID) != transfer.Planned {
				t.Errorf("%v became %v, the row %s", before, w.numbers(), w.state(row.ID))
			}
			if len(w.tasks) != 1 || w.tasks[0].Kind != transfer.TaskConflict || w.tasks[0].Cause != c.cause || !slices.Equal(w.tasks[0].Sample, []string{row.ID}) {
				t.Errorf("tasks %+v", w.tasks)
			}
		})
	}
}

// A bucket that cannot be read stops its version, and nothing is concluded.
func TestMissingBucket(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	w := newWorld(t, store, client, 9, 0, 0)
	w.plan(0, 1, 4)
	w.must(client.Del(t.Context(), w.key.Scope(2).StockKey()).Err())
	_, err := w.worker().Pass(t.Context())
	if !errors.Is(err, transfer.ErrUnreadable) || len(w.tasks) != 0 || w.stock(0).Available != 9 {
		t.Errorf("%v, tasks %v, %d available", err, w.tasks, w.stock(0).Available)
	}
}

// lateJournal shows a row only in the second read: it was journalled, and its
// units left, after the first one.
type lateJournal struct {
	*world
	reads int
}

func (l *lateJournal) Versions(ctx context.Context, f transfer.Filter) ([]transfer.Version, error) {
	versions, err := l.world.Versions(ctx, f)
	if l.reads++; l.reads == 1 {
		versions[0].Transfers = versions[0].Transfers[:1]
	}
	return versions, err
}

// A transfer that begins while its version is read is no conflict.
func TestTransferBegunWhileReading(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	w := newWorld(t, store, client, 9, 0)
	w.plan(0, 1, 1)
	w.pass()
	late := w.plan(0, 1, 4)
	w.store.MoveUnits(t.Context(), []transfer.Move{{Scope: w.key.Scope(0), TransferID: late.ID, Leg: transfer.LegOut, Target: 4}})
	worker := w.worker()
	worker.Journal = &lateJournal{world: w}
	tally, err := worker.Pass(t.Context())
	if err != nil || tally.Done[transfer.DoneConflict] != 0 {
		t.Errorf("%+v, %v", tally, err)
	}
	w.atRest("after the pass")
	w.want("after the pass", "4/0", "5/0")
}

func TestPlan(t *testing.T) {
	store, client := openStore(t, stacktest.Shared(t).Redis().Addr())
	for name, c := range map[string]struct {
		change  func(w *world, r *transfer.Request)
		refused string
		warning string
	}{
		"in order":             {func(*world, *transfer.Request) {}, "", ""},
		"paused":               {func(w *world, _ *transfer.Request) { w.setState(0, lua.StatePaused) }, "", ""},
		"more than available":  {func(_ *world, r *transfer.Request) { r.Amount = 10 }, "", "9 units available"},
		"one bucket":           {func(_ *world, r *transfer.Request) { r.Donor, r.Receiver = 1, 1 }, "one bucket", ""},
		"nothing":              {func(_ *world, r *transfer.Request) { r.Amount = 0 }, "not a number of units", ""},
		"no such donor":        {func(_ *world, r *transfer.Request) { r.Donor = 7 }, "the donor is not a bucket", ""},
		"no such receiver":     {func(_ *world, r *transfer.Request) { r.Receiver = 7 }, "the receiver is not a bucket", ""},
		"closed":               {func(w *world, _ *transfer.Request) { w.setState(1, lua.StateClosed) }, "the receiver is CLOSED", ""},
		"held":                 {func(w *world, _ *transfer.Request) { w.version.Buckets[0].Held = true }, "holds the donor", ""},
		"lost reservations":    {func(w *world, _ *transfer.Request) { w.orders[0] = 2 }, "lost 2 reservations", ""},
		"sums that do not add": {func(w *world, _ *transfer.Request) { w.version.Allocated = 8 }, "not what was allocated", ""},
		"too many":             {func(w *world, _ *transfer.Request) { w.many(transfer.MostPerBucket) }, "1000 transfers", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, store, client, 9, 0)
			r := transfer.Request{Key: w.key, Donor: 0, Receiver: 1, Amount: 4, Reason: "test", Actor: "alice"}
			c.change(w, &r)
			before := len(w.version.Transfers)
			row, warnings, err := w.planner().Plan(t.Context(), r)
			if c.refused != "" {
				refusal, ok := errors.AsType[*transfer.RefusedError](err)
				if !ok || !strings.Contains(refusal.Why, c.refused) || len(w.version.Transfers) != before {
					t.Fatalf("%v, want a refusal with %q", err, c.refused)
				}
				return
			}
			if err != nil || row.State != transfer.Planned || w.state(row.ID) != transfer.Planned {
				t.Fatalf("%+v, %v", row, err)
			}
			if (c.warning != "") != (len(warnings) == 1) || !strings.Contains(strings.Join(warnings, ""), c.warning) {
				t.Errorf("warnings %q", warnings)
			}
		})
	}
	t.Run("a version of one bucket", func(t *testing.T) {
		w := newWorld(t, store, client, 9)
		_, _, err := w.planner().Plan(t.Context(), transfer.Request{Key: w.key, Receiver: 1, Amount: 1})
		if _, ok := errors.AsType[*transfer.RefusedError](err); !ok || !strings.Contains(err.Error(), "one bucket") {
			t.Error(err)
		}
	})
}

func (w *world) setState(bucket int64, state lua.State) {
	w.Helper()
	w.must(w.client.HSet(w.Context(), w.key.Scope(bucket).MetaKey(), "state", string(state)).Err())
}

// many journals so many transfers that were cancelled.
func (w *world) many(n int) {
	for i := range n {
		w.version.Transfers = append(w.version.Transfers, transfer.Transfer{
			ID: fmt.Sprint("old-", i), Key: w.key, Donor: 0, Receiver: 1, Amount: 1, State: transfer.Cancelled,
		})
	}
}

func TestFillDeficit(t *testing.T) {
	onEach(t, func(t *testing.T, open func(...int64) *world) {
		t.Helper()
		w := open(2, 7, 4, 3)
		w.trade(0, 2)
		w.orders[0] = 10 // 8 of them lost
		w.version.Buckets[3].Held = true
		filler := &transfer.Filler{Planner: w.planner(), Worker: w.worker(), Actor: "test"}
		came, err := filler.FillDeficit(t.Context(), w.key.Scope(0), 8)
		if err != nil || came != 8 {
			t.Fatalf("%d units, %v", came, err)
		}
		w.want("most from where most is", "8/2", "0/0", "3/0", "3/0")
		came, err = filler.FillDeficit(t.Context(), w.key.Scope(0), 5)
		if err != nil || came != 3 {
			t.Fatalf("%d units, %v; a held bucket gives nothing", came, err)
		}
		w.atRest("filled")
	})
}
