package lifecycle_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

// toolKeys are a bucket's keys as a tool of the shop's own makes them.
type toolKeys struct {
	meta, stock map[string]string
	expireAt    map[string]time.Time // by suffix; none: never
}

// byTool writes a version's buckets by hand, changed in bucket `at`.
func (b bench) byTool(at int64, change func(*toolKeys)) {
	b.t.Helper()
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	starts, ends := b.spec.StartsAt.Truncate(time.Millisecond), b.spec.EndsAt.Truncate(time.Millisecond)
	retention := ends.Add(b.spec.Retention)
	units := reservation.Allocation(b.spec.Total, b.spec.Buckets)
	for i, scope := range b.spec.Scopes() {
		k := toolKeys{
			meta: map[string]string{
				"activity_id": scope.ActivityID, "sku_id": scope.SKUID, "version": number(scope.Version), "bucket_id": number(scope.Bucket),
				"state": "ACTIVE", "starts_at_ms": number(starts.UnixMilli()), "ends_at_ms": number(ends.UnixMilli()),
				"retention_until_ms": number(retention.UnixMilli()), "schema_version": "1",
			},
			stock:    map[string]string{"initial": number(units[i]), "available": number(units[i] - 3), "reserved": "3"},
			expireAt: map[string]time.Time{"meta": retention, "stock": retention},
		}
		if scope.Bucket == at && change != nil {
			change(&k)
		}
		b.writeKeys(scope, k)
	}
}

func (b bench) writeKeys(scope reservation.Scope, k toolKeys) {
	b.t.Helper()
	_, err := b.redis.TxPipelined(b.t.Context(), func(pipe redis.Pipeliner) error {
		for suffix, fields := range map[string]map[string]string{"meta": k.meta, "stock": k.stock} {
			key := map[string]string{"meta": scope.MetaKey(), "stock": scope.StockKey()}[suffix]
			pipe.Del(b.t.Context(), key)
			if len(fields) > 0 {
				pipe.HSet(b.t.Context(), key, fields)
			}
			if at, ok := k.expireAt[suffix]; ok {
				pipe.PExpireAt(b.t.Context(), key, at)
			}
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b bench) importIt() error {
	return b.Import(b.t.Context(), b.spec.ActivityID, b.spec.SKUID, b.spec.Version, b.spec.Buckets, "test")
}

// A version in the middle of its sale, made by a tool that knows nothing of the
// registry.
func TestImportOfAToolsVersion(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.byTool(0, nil)
	if err := b.importIt(); err != nil {
		t.Fatal(err)
	}
	b.wantStates("ACTIVE", "ACTIVE", "ACTIVE", "ACTIVE")
	found, err := b.Registry.Scopes(t.Context(), pgstore.ScopeFilter{ActivityID: b.spec.ActivityID})
	if err != nil {
		t.Fatal(err)
	}
	if f := found[0]; f.Total != 1001 || f.Initial != 251 || f.ConfirmedAt.IsZero() || !f.RetentionUntil.Equal(b.spec.EndsAt.Add(time.Hour).Truncate(time.Millisecond)) {
		t.Errorf("imported as %+v", f)
	}
}

// Keys that break the contract are refused, each with what is wrong, and
// nothing is registered.
func TestImportRefusals(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	for name, tt := range map[string]struct {
		change func(*toolKeys)
		want   string
	}{
		"no retention":       {func(k *toolKeys) { delete(k.meta, "retention_until_ms") }, "meta has no retention_until_ms"},
		"no schema version":  {func(k *toolKeys) { delete(k.meta, "schema_version") }, "meta has no schema_version"},
		"another schema":     {func(k *toolKeys) { k.meta["schema_version"] = "2" }, `schema_version "2", want "1"`},
		"another SKU":        {func(k *toolKeys) { k.meta["sku_id"] = "other" }, `sku_id "other", want "sku"`},
		"another bucket":     {func(k *toolKeys) { k.meta["bucket_id"] = "0" }, `bucket_id "0", want "2"`},
		"a state of its own": {func(k *toolKeys) { k.meta["state"] = "open" }, `state "open"`},
		"times in seconds": {func(k *toolKeys) {
			k.meta["ends_at_ms"] = strconv.FormatInt(b.spec.EndsAt.Unix(), 10)
		}, "not after its start"},
		"a fraction": {func(k *toolKeys) { k.meta["starts_at_ms"] += ".5" }, "starts_at_ms"},
		"retention before the end": {func(k *toolKeys) {
			k.meta["retention_until_ms"] = strconv.FormatInt(b.spec.EndsAt.Add(-time.Minute).UnixMilli(), 10)
		}, "before the activity"},
		"no reserved":       {func(k *toolKeys) { delete(k.stock, "reserved") }, "stock has no reserved"},
		"a negative stock":  {func(k *toolKeys) { k.stock["available"] = "-3" }, `available "-3"`},
		"a sum that is off": {func(k *toolKeys) { k.stock["reserved"] = "4" }, "is not available 247 + reserved 4"},
		"no stock": {func(k *toolKeys) {
			k.stock = nil
			delete(k.expireAt, "stock")
		}, "stock has no initial"},
		"stock for ever":       {func(k *toolKeys) { delete(k.expireAt, "stock") }, "stock has no expiry"},
		"meta goes earlier":    {func(k *toolKeys) { k.expireAt["meta"] = k.expireAt["meta"].Add(-time.Second) }, "meta expires at"},
		"stock stays longer":   {func(k *toolKeys) { k.expireAt["stock"] = k.expireAt["stock"].Add(time.Second) }, "stock expires at"},
		"another bucket's end": {func(k *toolKeys) { k.meta["ends_at_ms"] = strconv.FormatInt(b.spec.EndsAt.UnixMilli()-1, 10) }, "differ from those of bucket 0"},
		"nothing":              {func(k *toolKeys) { *k = toolKeys{} }, "no meta and no stock"},
	} {
		b.byTool(2, tt.change)
		err := b.importIt()
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), b.spec.Scopes()[2].Tag()) {
			t.Errorf("%s: %v; want it refused with %q and the bucket", name, err, tt.want)
		}
	}
	b.byTool(2, func(k *toolKeys) { delete(k.stock, "reserved"); k.meta["state"] = "open" })
	if err := b.importIt(); err == nil || !strings.Contains(err.Error(), "reserved") || !strings.Contains(err.Error(), "open") {
		t.Errorf("%v; want everything that is wrong at once", err)
	}
	found, err := b.Registry.Scopes(t.Context(), pgstore.ScopeFilter{ActivityID: b.spec.ActivityID})
	if err != nil || len(found) != 0 {
		t.Errorf("%d scopes are registered, %v", len(found), err)
	}
}
