package redisstore

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// Stocks reads the numbers of the scopes, one reply for each. Each scope is
// read at one instant by snapshot.lua; one whose data the script refuses is
// read field by field, to say what is wrong with it.
func (s *Store) Stocks(ctx context.Context, scopes []reservation.Scope) []reconcile.StockReply {
	replies := make([]reconcile.StockReply, len(scopes))
	if err := s.refuseReplica(ctx); err != nil {
		for i := range replies {
			replies[i].Err = err
		}
		return replies
	}
	var refused []int
	for i, snapshot := range s.Snapshots(ctx, scopes) {
		switch {
		case snapshot.Err == nil:
			replies[i].Stock = stockOf(snapshot.SnapshotReply)
			replies[i].State = string(snapshot.State)
			replies[i].RetentionMS, replies[i].NowMS = max(snapshot.RetentionUntilMS, 0), snapshot.TimeMS
		case errors.Is(snapshot.Err, lua.ErrWrongData):
			refused = append(refused, i)
		default:
			replies[i].Err = snapshot.Err
		}
	}
	s.explain(ctx, scopes, refused, replies)
	return replies
}

// ErrReplica says that the server that is read is no master: what it shows may
// be old, so that nothing is compared with it.
var ErrReplica = errors.New("the Redis server is a replica: it may show an old state, and takes no writes")

// refuseReplica asks a single server whether it is the master; the masters of a
// cluster answer for their own slots alone. Where the question is not allowed
// nothing is known against it.
func (s *Store) refuseReplica(ctx context.Context) error {
	client, single := s.reading.(*redis.Client)
	if !single {
		return nil
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	reply, err := client.Do(bound, "role").Slice()
	switch {
	case redis.HasErrorPrefix(err, "NOPERM"):
		return nil
	case err != nil:
		return fmt.Errorf("ask the Redis server for its role: %w", err)
	case len(reply) > 0 && reply[0] != "master":
		return ErrReplica
	default:
		return nil
	}
}

func stockOf(r lua.SnapshotReply) reconcile.Stock {
	orMissing := func(n int64) int64 {
		if n == lua.Missing {
			return reconcile.Missing
		}
		return n
	}
	return withReleased(reconcile.Stock{
		Initial: orMissing(r.Initial), Available: orMissing(r.Available), Reserved: orMissing(r.Reserved),
		ReleasedTotal: orMissing(r.ReleasedTotal), SendPending: r.Pending, Expiry: r.Expiry,
	})
}

// withReleased reads a released_total that is not there: none yet, unless the
// stock is not there either.
func withReleased(s reconcile.Stock) reconcile.Stock {
	if s.ReleasedTotal == reconcile.Missing && s.Initial != reconcile.Missing {
		s.ReleasedTotal = 0
	}
	return s
}

// stockFields are those of the hash stock (spec §2).
var stockFields = []string{"initial", "available", "reserved", "released_total"}

// explain reads scopes that snapshot.lua refuses. Their numbers are not of one
// instant, which does no harm: every script refuses to change such a stock.
func (s *Store) explain(ctx context.Context, scopes []reservation.Scope, which []int, replies []reconcile.StockReply) {
	if len(which) == 0 {
		return
	}
	type commands struct {
		stock           *redis.SliceCmd
		pending, expiry *redis.IntCmd
	}
	pipe := s.reading.Pipeline()
	cmds := make([]commands, len(which))
	for k, i := range which {
		cmds[k] = commands{
			stock:   pipe.HMGet(ctx, scopes[i].StockKey(), stockFields...),
			pending: pipe.ZCard(ctx, scopes[i].IndexKey(reservation.SendPending)),
			expiry:  pipe.ZCard(ctx, scopes[i].IndexKey(reservation.ReservationExpiry)),
		}
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for k, i := range which {
		reply := &replies[i]
		if reply.Malformed = wrongKey(cmds[k].stock.Err(), cmds[k].pending.Err(), cmds[k].expiry.Err()); reply.Malformed != "" {
			continue
		}
		if err := errors.Join(cmds[k].stock.Err(), cmds[k].pending.Err(), cmds[k].expiry.Err()); err != nil {
			reply.Err = fmt.Errorf("read the stock of %s: %w", scopes[i], err)
			continue
		}
		reply.SendPending, reply.Expiry = cmds[k].pending.Val(), cmds[k].expiry.Val()
		reply.Malformed = parseStock(&reply.Stock, cmds[k].stock.Val())
	}
}

// wrongKey names the key that is of another type than the contract's.
func wrongKey(stock, pending, expiry error) string {
	for _, key := range []struct {
		err  error
		text string
	}{
		{stock, "stock is not a hash"},
		{pending, "send_pending is not a sorted set"},
		{expiry, "reservation_expiry is not a sorted set"},
	} {
		if isWrongType(key.err) {
			return key.text
		}
	}
	return ""
}

// parseStock reads the fields of stock, negative numbers too, and says what is
// no number.
func parseStock(stock *reconcile.Stock, values []any) (malformed string) {
	into := []*int64{&stock.Initial, &stock.Available, &stock.Reserved, &stock.ReleasedTotal}
	for i, value := range values {
		text, there := value.(string)
		if !there {
			*into[i] = reconcile.Missing
			continue
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n >= reservation.MaxNumber || n <= -reservation.MaxNumber {
			return fmt.Sprintf("stock.%s is %.40q, not a number below 2^53", stockFields[i], text)
		}
		*into[i] = n
	}
	*stock = withReleased(*stock)
	return ""
}

// metaFields are those of the hash meta that reserve.lua demands (spec §2, §4).
var metaFields = []string{
	"activity_id", "sku_id", "bucket_id", "version", "state", "starts_at_ms", "ends_at_ms", "retention_until_ms", "schema_version",
}

// MissingFields names what the scopes lack of meta and stock.
func (s *Store) MissingFields(ctx context.Context, scopes []reservation.Scope) []reconcile.FieldsReply {
	replies := make([]reconcile.FieldsReply, len(scopes))
	if len(scopes) == 0 {
		return replies
	}
	keys := []struct {
		name   string
		fields []string
		key    func(reservation.Scope) string
	}{
		{"meta", metaFields, reservation.Scope.MetaKey},
		{"stock", stockFields[:3], reservation.Scope.StockKey}, // released_total comes with the first release
	}
	pipe := s.reading.Pipeline()
	cmds := make([]*redis.SliceCmd, 0, len(keys)*len(scopes))
	for _, scope := range scopes {
		for _, k := range keys {
			cmds = append(cmds, pipe.HMGet(ctx, k.key(scope), k.fields...))
		}
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, scope := range scopes {
		for j, k := range keys {
			cmd := cmds[i*len(keys)+j]
			switch err := cmd.Err(); {
			case isWrongType(err) && k.name == "stock": // present, and malformed: another check's
			case isWrongType(err):
				replies[i].Missing = append(replies[i].Missing, k.name+" as a hash")
			case err != nil:
				replies[i].Err = fmt.Errorf("read %s of %s: %w", k.name, scope, err)
			default:
				replies[i].Missing = append(replies[i].Missing, missingOf(k.name, k.fields, cmd.Val())...)
			}
		}
	}
	return replies
}

func missingOf(key string, fields []string, values []any) []string {
	var missing []string
	for i, v := range values {
		if v == nil {
			missing = append(missing, key+"."+fields[i])
		}
	}
	if len(missing) == len(fields) {
		return []string{key}
	}
	return missing
}

// ExpiryPages reads pages of reservation_expiry. ZSCAN and not a range by
// score: while workers move scores, only ZSCAN meets every member that stays.
func (s *Store) ExpiryPages(ctx context.Context, requests []reconcile.PageRequest) []reconcile.PageReply {
	return s.IndexPages(ctx, reservation.ReservationExpiry, requests)
}

// IndexPages is ExpiryPages for either index.
func (s *Store) IndexPages(ctx context.Context, index reservation.Index, requests []reconcile.PageRequest) []reconcile.PageReply {
	replies := make([]reconcile.PageReply, len(requests))
	if len(requests) == 0 {
		return replies
	}
	pipe := s.reading.Pipeline()
	cmds := make([]*redis.ScanCmd, len(requests))
	for i, r := range requests {
		cmds[i] = pipe.ZScan(ctx, r.Scope.IndexKey(index), r.Cursor, "", int64(r.Limit))
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, r := range requests {
		pairs, cursor, err := cmds[i].Result()
		if err != nil {
			replies[i].Err = fmt.Errorf("read %s of %s: %w", index, r.Scope, err)
			continue
		}
		replies[i].Cursor = cursor
		replies[i].IDs = make([]string, 0, len(pairs)/2)
		for j := 0; j < len(pairs); j += 2 { // member, score
			replies[i].IDs = append(replies[i].IDs, pairs[j])
		}
	}
	return replies
}

// heldFields tell a hash that exists from one that does not.
var heldFields = []string{"status", "reservation_id", "request_id"}

// Held says which reservations' hashes exist and are not RELEASED.
func (s *Store) Held(ctx context.Context, refs []reconcile.Ref) []reconcile.HeldReply {
	replies := make([]reconcile.HeldReply, len(refs))
	if len(refs) == 0 {
		return replies
	}
	pipe := s.reading.Pipeline()
	cmds := make([]*redis.SliceCmd, len(refs))
	for i, r := range refs {
		cmds[i] = pipe.HMGet(ctx, r.Scope.ReservationKey(r.ID), heldFields...)
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, r := range refs {
		values, err := cmds[i].Result()
		if err != nil {
			replies[i].Err = fmt.Errorf("read reservation %s of %s: %w", r.ID, r.Scope, err)
			continue
		}
		exists := values[0] != nil || values[1] != nil || values[2] != nil
		replies[i].Held = exists && values[0] != string(reservation.StatusReleased)
	}
	return replies
}
