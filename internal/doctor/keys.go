package doctor

import (
	"fmt"

	"github.com/seckill/reconciler/internal/probe"
)

// Limits of one scope's keys. The system is designed for 1,000,000 requests and
// 10,000 units on one SKU (spec §1): 4,000 request results in a shard.
const (
	bigShardFields = 50_000
	bigIndex       = 100_000
	bigKeyBytes    = 16 << 20
	skewLimit      = 2.0
	hotRate        = 30_000 // requests a second: half of what one core takes (services §4)
)

// Keys judges the sizes of the scopes' keys. rates are the new requests a second
// of each scope between two looks, in the order of the sizes.
func Keys(sizes []probe.KeySizes, rates []float64) []Row {
	all := &rows{area: AreaKeys}
	all.ok("scopes", fmt.Sprintf("%d live scopes measured, without SCAN and MONITOR", len(sizes)))
	list := all.list
	for i, k := range sizes {
		list = append(list, scopeKeys(k, rates[i])...)
	}
	return list
}

func scopeKeys(k probe.KeySizes, rate float64) []Row {
	r := &rows{area: AreaKeys, subject: k.Scope.Tag()}
	if k.Err != nil {
		r.unread("sizes", k.Err, "see the rows of the server that holds the scope")
		return r.list
	}
	r.judge("request-shards", k.MaxFields() < bigShardFields && k.ShardBytes < bigKeyBytes,
		fmt.Sprintf("%d requests, at most %d in a shard of %s", k.Requests(), k.MaxFields(), bytes(k.ShardBytes)), Warning,
		fmt.Sprintf("a shard has %d requests and takes %s: deleting or moving it stops the server", k.MaxFields(), bytes(k.ShardBytes)),
		"limit requests per user at the gateway; use a new version, or more buckets, for the next sale")
	r.judge("shard-skew", k.Skew() < skewLimit, fmt.Sprintf("%.1f times the average", k.Skew()), Warning,
		fmt.Sprintf("the biggest shard has %.1f times the average", k.Skew()), "compare the gateway's hash with spec §2: FNV-1a-32(request_id) mod 256")
	members := max(k.Pending, k.Expiry)
	r.judge("indexes", members < bigIndex && max(k.PendingBytes, k.ExpiryBytes) < bigKeyBytes,
		fmt.Sprintf("%d to send, %d to check", k.Pending, k.Expiry), Warning,
		fmt.Sprintf("%d to send, %d to check: more than a sale has units", k.Pending, k.Expiry), "see `reconciler status`: what do they wait for?")
	r.judge("heat", rate < hotRate, fmt.Sprintf("%.0f new requests a second", rate), Warning,
		fmt.Sprintf("%.0f new requests a second on one slot: near what one server takes", rate), "more buckets for the next version")
	return r.list
}

func bytes(n int64) string {
	switch {
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	case n >= 1<<10:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	default:
		return fmt.Sprintf("%d bytes", n)
	}
}
