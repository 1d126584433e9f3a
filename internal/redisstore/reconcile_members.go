package redisstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reconcile"
	"github.com/seckill/reconciler/reservation"
)

// neverExpires is what PTTL replies for a key without an expiry.
const neverExpires = -1

// MemberStates reads reservations with their places in the indexes, their
// users' markers and the results of their requests. The latter two are where
// the hash says; without one, where the query says.
func (s *Store) MemberStates(ctx context.Context, queries []reconcile.MemberQuery) []reconcile.MemberState {
	states := make([]reconcile.MemberState, len(queries))
	if len(queries) == 0 {
		return states
	}
	refs := make([]Ref, len(queries))
	for i, q := range queries {
		refs[i] = Ref{q.Scope, q.ID}
	}
	for i, m := range s.Members(ctx, refs) {
		states[i].Member, states[i].Err = m.Member, m.Err
	}
	type commands struct {
		expiry, markerExpiry *redis.IntCmd
		marker, request      *redis.StringCmd
	}
	pipe := s.reading.Pipeline()
	cmds := make([]commands, len(queries))
	for i, q := range queries {
		user, request := q.UserID, q.RequestID
		if r := states[i].Reservation; !states[i].Missing && states[i].Malformed == nil {
			user, request = r.UserID, r.RequestID
		}
		cmds[i].expiry = pttl(ctx, pipe, q.Scope.ReservationKey(q.ID))
		if user != "" {
			cmds[i].marker = pipe.Get(ctx, q.Scope.UserKey(user))
			cmds[i].markerExpiry = pttl(ctx, pipe, q.Scope.UserKey(user))
		}
		if request != "" {
			cmds[i].request = pipe.HGet(ctx, q.Scope.RequestKey(request), request)
		}
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, q := range queries {
		state := &states[i]
		if state.Err != nil {
			continue
		}
		var errs [3]error
		state.NoExpiry = cmds[i].expiry.Val() == neverExpires
		if cmd := cmds[i].markerExpiry; cmd != nil {
			state.MarkerNoExpiry, errs[2] = cmd.Val() == neverExpires, cmd.Err()
		}
		state.Marker, errs[0] = stringOf(cmds[i].marker)
		state.Request, errs[1] = stringOf(cmds[i].request)
		if err := errors.Join(append(errs[:], cmds[i].expiry.Err())...); err != nil {
			state.Err = fmt.Errorf("read what belongs to reservation %s of %s: %w", q.ID, q.Scope, err)
		}
	}
	return states
}

// pttl asks for the time that a key has left, as the server says it: the
// library's own call reads the reply as a duration.
func pttl(ctx context.Context, pipe redis.Pipeliner, key string) *redis.IntCmd {
	cmd := redis.NewIntCmd(ctx, "pttl", key)
	_ = pipe.Process(ctx, cmd)
	return cmd
}

// OwnResults reads the results of the reservations' own requests.
func (s *Store) OwnResults(ctx context.Context, queries []reconcile.MemberQuery) []string {
	requests := make([]string, len(queries))
	hashes := make([]*redis.StringCmd, len(queries))
	pipe := s.reading.Pipeline()
	for i, q := range queries {
		if requests[i] = q.RequestID; requests[i] == "" {
			hashes[i] = pipe.HGet(ctx, q.Scope.ReservationKey(q.ID), "request_id")
		}
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	if pipe.Len() > 0 {
		_, _ = pipe.Exec(bound) // what has no reply has no request
	}
	results := make([]*redis.StringCmd, len(queries))
	pipe = s.reading.Pipeline()
	for i, q := range queries {
		if hashes[i] != nil {
			requests[i], _ = stringOf(hashes[i])
		}
		if requests[i] != "" {
			results[i] = pipe.HGet(ctx, q.Scope.RequestKey(requests[i]), requests[i])
		}
	}
	if pipe.Len() > 0 {
		_, _ = pipe.Exec(bound)
	}
	values := make([]string, len(queries))
	for i, cmd := range results {
		values[i], _ = stringOf(cmd)
	}
	return values
}

// stringOf is a command's reply; "" where it was not asked for or has none. A
// key of another type names nothing either.
func stringOf(cmd *redis.StringCmd) (string, error) {
	if cmd == nil {
		return "", nil
	}
	value, err := cmd.Result()
	if errors.Is(err, redis.Nil) || isWrongType(err) {
		return "", nil
	}
	return value, err
}

// ResultPages reads pages of request shards.
func (s *Store) ResultPages(ctx context.Context, requests []reconcile.ShardRequest) []reconcile.ShardReply {
	replies := make([]reconcile.ShardReply, len(requests))
	if len(requests) == 0 {
		return replies
	}
	pipe := s.reading.Pipeline()
	cmds := make([]*redis.ScanCmd, len(requests))
	for i, r := range requests {
		cmds[i] = pipe.HScan(ctx, r.Scope.RequestShardKey(r.Shard), r.Cursor, "", int64(r.Limit))
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, r := range requests {
		pairs, cursor, err := cmds[i].Result()
		if err != nil {
			replies[i].Err = fmt.Errorf("read request shard %03d of %s: %w", r.Shard, r.Scope, err)
			continue
		}
		replies[i].Cursor = cursor
		for j := 0; j+1 < len(pairs); j += 2 { // field, value
			replies[i].Results = append(replies[i].Results, reconcile.RequestResult{
				Scope: r.Scope, Shard: r.Shard, RequestID: pairs[j], Value: pairs[j+1],
			})
		}
	}
	return replies
}

// Results reads single request results.
func (s *Store) Results(ctx context.Context, results []reconcile.RequestResult) []reconcile.ResultReply {
	replies := make([]reconcile.ResultReply, len(results))
	if len(results) == 0 {
		return replies
	}
	pipe := s.reading.Pipeline()
	cmds := make([]*redis.StringCmd, len(results))
	for i, r := range results {
		cmds[i] = pipe.HGet(ctx, r.Scope.RequestShardKey(r.Shard), r.RequestID)
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, r := range results {
		replies[i].RequestResult = r
		if replies[i].Value, replies[i].Err = stringOf(cmds[i]); replies[i].Err != nil {
			replies[i].Err = fmt.Errorf("read request %s of %s: %w", r.RequestID, r.Scope, replies[i].Err)
		}
	}
	return replies
}

// Immortal names the scopes' own keys that exist and never expire: meta,
// stock, both indexes, soldout and the request shards.
func (s *Store) Immortal(ctx context.Context, scopes []reservation.Scope) []reconcile.FieldsReply {
	replies := make([]reconcile.FieldsReply, len(scopes))
	if len(scopes) == 0 {
		return replies
	}
	pipe := s.reading.Pipeline()
	keys := make([][]string, len(scopes))
	cmds := make([][]*redis.IntCmd, len(scopes))
	for i, scope := range scopes {
		keys[i] = []string{
			scope.MetaKey(), scope.StockKey(), scope.SoldOutKey(),
			scope.IndexKey(reservation.SendPending), scope.IndexKey(reservation.ReservationExpiry),
		}
		for shard := range reservation.RequestShards {
			keys[i] = append(keys[i], scope.RequestShardKey(shard))
		}
		for _, key := range keys[i] {
			cmds[i] = append(cmds[i], pttl(ctx, pipe, key))
		}
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, scope := range scopes {
		for j, cmd := range cmds[i] {
			if err := cmd.Err(); err != nil {
				replies[i].Err = fmt.Errorf("read the expiry of the keys of %s: %w", scope, err)
				break
			}
			if cmd.Val() == neverExpires {
				replies[i].Missing = append(replies[i].Missing, keys[i][j])
			}
		}
	}
	return replies
}
