package pgstore_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// sellingIn registers a version of so many buckets with 10 units each, until a
// time from now.
func sellingIn(t *testing.T, db database, version, buckets int64, until time.Duration) transfer.Key {
	t.Helper()
	now := time.Now().UTC().Truncate(time.Millisecond)
	v := pgstore.Version{
		ActivityID: db.scope.ActivityID, SKUID: db.scope.SKUID, Version: version, Total: 10 * buckets, Buckets: buckets,
		StartsAt: now.Add(-2 * time.Hour), EndsAt: now.Add(-time.Hour), RetentionUntil: now.Add(until),
	}
	var all []pgstore.Bucket
	for id := range buckets {
		all = append(all, pgstore.Bucket{ID: id, Initial: 10, State: pgstore.ScopeActive, Confirmed: true})
	}
	if err := db.store.RegisterVersion(t.Context(), v, all, "ann"); err != nil {
		t.Fatal(err)
	}
	return transfer.Key{ActivityID: db.scope.ActivityID, SKUID: db.scope.SKUID, Version: version}
}

func journalled(key transfer.Key, id string) transfer.Transfer {
	return transfer.Transfer{ID: id, Key: key, Donor: 0, Receiver: 1, Amount: 3, State: transfer.Planned, Reason: "skewed", CreatedBy: "ann"}
}

func TestTransferJournal(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx := t.Context()
	key := sellingIn(t, db, 1, 2, time.Hour)
	one, two := journalled(key, "t1"), journalled(key, "t2")
	if err := db.store.CreateTransfers(ctx, []transfer.Transfer{one}); err != nil {
		t.Fatal(err)
	}
	if err := db.store.CreateTransfers(ctx, []transfer.Transfer{two, one}); err == nil {
		t.Error("an id was journalled twice")
	}
	for name, change := range map[string]func(*transfer.Transfer){
		"one bucket":        func(x *transfer.Transfer) { x.Receiver = x.Donor },
		"nothing":           func(x *transfer.Transfer) { x.Amount = 0 },
		"no such bucket":    func(x *transfer.Transfer) { x.Receiver = 7 },
		"no such version":   func(x *transfer.Transfer) { x.Key.Version = 9 },
		"a state of no row": func(x *transfer.Transfer) { x.State = "IN" },
	} {
		bad := journalled(key, "t3")
		change(&bad)
		if err := db.store.CreateTransfers(ctx, []transfer.Transfer{bad}); err == nil {
			t.Errorf("%s was journalled", name)
		}
	}
	got, err := db.store.Transfers(ctx, pgstore.TransferFilter{})
	if err != nil || len(got) != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	if diff := cmp.Diff(one, got[0], cmpopts.IgnoreFields(one, "CreatedAt", "UpdatedAt")); diff != "" {
		t.Errorf("row (-want +got):\n%s", diff)
	}
	if err := db.store.CreateTransfers(ctx, []transfer.Transfer{two}); err != nil {
		t.Fatal(err)
	}

	// A note counts only while the row is what it comes from.
	note := func(id string, from, to transfer.State, text string) transfer.Transfer {
		t.Helper()
		if err := db.store.NoteTransfers(ctx, []transfer.Change{{ID: id, From: from, To: to, Note: text}}); err != nil {
			t.Fatal(err)
		}
		row, err := db.store.Transfer(ctx, id)
		if err != nil {
			t.Fatal(err)
		}
		return row
	}
	if row := note("t1", transfer.Out, transfer.Done, "x"); row.State != transfer.Planned || row.Reason != "skewed" {
		t.Errorf("a note of another state: %+v", row)
	}
	if row := note("t1", transfer.Planned, transfer.Out, ""); row.State != transfer.Out || row.Reason != "skewed" {
		t.Errorf("%+v", row)
	}
	note("t1", transfer.Out, transfer.Cancelled, "undone")
	note("t1", transfer.Cancelled, transfer.Out, "")
	if row := note("t1", transfer.Out, transfer.Cancelled, "undone"); row.Reason != "skewed; undone" || !row.UpdatedAt.After(row.CreatedAt) {
		t.Errorf("%+v", row)
	}

	// Only what has not begun can be cancelled.
	if err := db.store.CancelTransfer(ctx, "t2", "bob", "wrong bucket"); err != nil {
		t.Error(err)
	}
	if err := db.store.CancelTransfer(ctx, "t2", "bob", "again"); err != nil {
		t.Errorf("again: %v", err)
	}
	note("t1", transfer.Cancelled, transfer.Done, "")
	if err := db.store.CancelTransfer(ctx, "t1", "bob", "too late"); !errors.Is(err, transfer.ErrMoved) {
		t.Errorf("too late: %v", err)
	}
	if err := db.store.CancelTransfer(ctx, "t9", "bob", "x"); !errors.Is(err, pgstore.ErrNotFound) {
		t.Errorf("no such transfer: %v", err)
	}
	if open, err := db.store.Transfers(ctx, pgstore.TransferFilter{Open: true}); err != nil || len(open) != 0 {
		t.Errorf("open: %+v, %v", open, err)
	}
	donor := key.Scope(0).Tag()
	want := []string{
		"ann/transfer_planned/" + donor + "/t1/skewed", "ann/transfer_planned/" + donor + "/t2/skewed",
		"bob/transfer_cancelled/" + donor + "/t2/wrong bucket",
	}
	trail := slices.DeleteFunc(audited(t, db), func(line string) bool { return !slices.Contains(want, line) })
	if diff := cmp.Diff(want, trail); diff != "" {
		t.Errorf("audit trail (-want +got):\n%s", diff)
	}
}

func TestTransferVersions(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	ctx := t.Context()
	first := sellingIn(t, db, 1, 2, time.Hour)
	sellingIn(t, db, 2, 1, time.Hour)
	over := sellingIn(t, db, 3, 2, -time.Minute)
	ending := sellingIn(t, db, 4, 2, 30*time.Second) // its keys may be gone by a clock of their own
	rows := []transfer.Transfer{journalled(first, "t1"), journalled(over, "t2"), journalled(ending, "t3")}
	if err := db.store.CreateTransfers(ctx, rows); err != nil {
		t.Fatal(err)
	}
	if err := db.store.CreateTransfers(ctx, []transfer.Transfer{journalled(first, "t0")}); err != nil {
		t.Fatal(err)
	}
	if err := db.store.HoldScopes(ctx, []reservation.Scope{first.Scope(1)}, "ann", "x"); err != nil {
		t.Fatal(err)
	}
	numbers := func(f transfer.Filter) (out []int64) {
		t.Helper()
		found, err := db.store.Versions(ctx, f)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range found {
			out = append(out, v.Key.Version)
		}
		return out
	}
	for name, c := range map[string]struct {
		filter transfer.Filter
		want   []int64
	}{
		"all":              {transfer.Filter{}, []int64{1, 2}},
		"several buckets":  {transfer.Filter{Several: true}, []int64{1}},
		"with transfers":   {transfer.Filter{Journalled: true}, []int64{1}},
		"one":              {transfer.FilterOf(first), []int64{1}},
		"another activity": {transfer.Filter{ActivityID: "nobody"}, nil},
		"past retention":   {transfer.FilterOf(over), nil},
	} {
		if got := numbers(c.filter); !slices.Equal(got, c.want) {
			t.Errorf("%s: versions %v, want %v", name, got, c.want)
		}
	}
	found, err := db.store.Versions(ctx, transfer.FilterOf(first))
	if err != nil {
		t.Fatal(err)
	}
	v := found[0]
	want := []transfer.Bucket{{ID: 0, Initial: 10, State: "ACTIVE"}, {ID: 1, Initial: 10, State: "ACTIVE", Held: true}}
	if diff := cmp.Diff(want, v.Buckets); diff != "" || v.Allocated != 20 || v.Count != 2 || v.ReadAt.IsZero() {
		t.Errorf("version %+v\n%s", v, diff)
	}
	if len(v.Transfers) != 2 || v.Transfers[0].ID != "t1" || v.Transfers[1].ID != "t0" {
		t.Errorf("transfers, the oldest first: %+v", v.Transfers)
	}
}
