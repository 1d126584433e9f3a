package pgstore_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/seckill/reconciler/internal/pgstore"
)

func TestSamples(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	now := time.Now()
	err := db.store.RegisterVersion(t.Context(), pgstore.Version{
		ActivityID: db.scope.ActivityID, SKUID: db.scope.SKUID, Version: db.scope.Version, Total: 10, Buckets: 1,
		StartsAt: now, EndsAt: now.Add(time.Hour), RetentionUntil: now.Add(2 * time.Hour),
	}, []pgstore.Bucket{{Initial: 10, Confirmed: true}}, "test")
	if err != nil {
		t.Fatal(err)
	}
	conn := connect(t, db.url)
	s := pgstore.VersionSample{
		ActivityID: db.scope.ActivityID, SKUID: db.scope.SKUID, Version: db.scope.Version, BucketsRead: 1,
		Available: 7, Reserved: 3, ReleasedTotal: 2, SendPending: 1, Undecided: 4,
	}
	other := s
	other.SKUID = "another"
	if err := db.store.RecordSamples(t.Context(), []pgstore.VersionSample{s, other}); err != nil {
		t.Fatal(err)
	}
	// One of only some buckets is no change of the version.
	partial := s
	partial.BucketsRead, partial.Available = 9, 1
	if err := db.store.RecordSamples(t.Context(), []pgstore.VersionSample{partial}); err != nil {
		t.Fatal(err)
	}
	got, err := db.store.VersionSamples(t.Context(), s.ActivityID, s.SKUID, s.Version, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]pgstore.VersionSample{s}, got, cmpopts.IgnoreFields(pgstore.VersionSample{}, "At")); diff != "" {
		t.Error(diff)
	}
	// Many are thinned out, evenly, and old ones purged.
	_, err = conn.Exec(t.Context(), fmt.Sprintf(`INSERT INTO seckill.version_sample
		(at, activity_id, sku_id, activity_version, buckets_read, available, reserved, released_total, send_pending, undecided)
		SELECT clock_timestamp() - n * interval '2 seconds', '%s', '%s', %d, 1, n, 0, 0, 0, 0 FROM generate_series(1, 5000) AS n`,
		s.ActivityID, s.SKUID, s.Version))
	if err != nil {
		t.Fatal(err)
	}
	if got, err = db.store.VersionSamples(t.Context(), s.ActivityID, s.SKUID, s.Version, time.Hour); err != nil || len(got) < 400 || len(got) > 501 {
		t.Errorf("%d samples of an hour that has 1,800, %v; want about 500", len(got), err)
	}
	for i := 1; i < len(got); i++ {
		if !got[i].At.After(got[i-1].At) {
			t.Fatalf("sample %d is of %s, the one before of %s", i, got[i].At, got[i-1].At)
		}
	}
	if plan := purged(t, db, pgstore.PurgeSamples, time.Hour, 1000); plan.Count < 3100 || plan.Count > 3300 {
		t.Errorf("%d samples older than an hour, want about 3,200", plan.Count)
	}
	if got, err = db.store.VersionSamples(t.Context(), s.ActivityID, s.SKUID, s.Version, 24*time.Hour); err != nil || len(got) > 1900 || len(got) == 0 {
		t.Errorf("%d samples are left, %v", len(got), err)
	}
}
