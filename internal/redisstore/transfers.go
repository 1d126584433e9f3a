package redisstore

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
	"github.com/seckill/reconciler/transfer"
)

// ReadTransfers reads buckets with their markers of transfers, each bucket at
// one instant of its own.
func (s *Store) ReadTransfers(ctx context.Context, queries []transfer.Query) []transfer.Reading {
	batch := s.reader.Batch()
	results := make([]*lua.Result[lua.TransferReadReply], len(queries))
	for i, q := range queries {
		results[i] = batch.TransferRead(q.Scope, q.Transfers)
	}
	s.runBatch(ctx, batch)
	readings := make([]transfer.Reading, len(queries))
	for i, result := range results {
		reply, err := result.Get()
		readings[i] = readingOf(queries[i], reply, err)
	}
	return readings
}

func readingOf(q transfer.Query, reply lua.TransferReadReply, err error) transfer.Reading {
	if errors.Is(err, lua.ErrWrongData) {
		return transfer.Reading{WrongData: err.Error()}
	}
	if err != nil {
		return transfer.Reading{Err: err}
	}
	r := transfer.Reading{
		TimeMS: reply.TimeMS, State: string(reply.State), RetentionUntilMS: reply.RetentionUntilMS,
		Initial: reply.Initial, Available: reply.Available, Reserved: reply.Reserved,
		Markers: make(map[string]transfer.Marker, len(q.Transfers)),
	}
	for i, m := range reply.Markers {
		r.Markers[q.Transfers[i]] = transfer.Marker{Leg: transfer.Leg(m.Leg), Amount: m.Amount, UpdatedAtMS: max(m.UpdatedAtMS, 0)}
	}
	return r
}

// MoveUnits runs legs of transfers, each at most once, in one batch.
func (s *Store) MoveUnits(ctx context.Context, moves []transfer.Move) []transfer.Outcome {
	batch := s.writer.Batch()
	collect := make([]func() transfer.Outcome, len(moves))
	for i, m := range moves {
		switch m.Leg {
		case transfer.LegOut:
			args := lua.TransferOutArgs{TransferID: m.TransferID, Target: m.Target, Mode: lua.OutWhole}
			if m.Second {
				args.Mode = lua.OutPartial
			}
			collect[i] = outcomeOf(batch.TransferOut(m.Scope, args))
		case transfer.LegIn:
			args := lua.TransferInArgs{TransferID: m.TransferID, Target: m.Target, Mode: lua.InRaise}
			if m.Second {
				args.Mode = lua.InLower
			}
			collect[i] = outcomeOf(batch.TransferIn(m.Scope, args))
		default:
			collect[i] = func() transfer.Outcome { return transfer.Outcome{Err: fmt.Errorf("leg %q is no script", m.Leg)} }
		}
	}
	s.runBatch(ctx, batch)
	outcomes := make([]transfer.Outcome, len(moves))
	for i, get := range collect {
		outcomes[i] = get()
	}
	return outcomes
}

// outcomeOf reads the reply of either leg: their codes mean the same (spec §4),
// but for 2, which only OUT has.
func outcomeOf[C code](r *lua.Result[lua.TransferReply[C]]) func() transfer.Outcome {
	return func() transfer.Outcome {
		reply, err := r.Get()
		if err != nil {
			if errors.Is(err, lua.ErrWrongData) {
				return transfer.Outcome{Code: codeWrongData, Contradicts: true}
			}
			return transfer.Outcome{Err: err}
		}
		o := transfer.Outcome{Code: reply.Code.String()}
		switch lua.TransferOutCode(reply.Code) {
		case lua.TransferOutTaken, lua.TransferOutLimited:
			o.Changed = true
		case lua.TransferOutInsufficient:
			o.Insufficient = true
		case lua.TransferOutWrongLeg, lua.TransferOutInvariant:
			o.Contradicts = true
		default: // done before, or past its retention
		}
		return o
	}
}

// TransferMarkers reads a bucket's markers of transfers alone, for a bucket whose
// stock no script reads any more. A marker that is none is an error.
func (s *Store) TransferMarkers(ctx context.Context, scope reservation.Scope, ids []string) (map[string]transfer.Marker, error) {
	markers := make(map[string]transfer.Marker, len(ids))
	if len(ids) == 0 {
		return markers, nil
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	pipe := s.reading.Pipeline()
	reads := make([]*redis.SliceCmd, len(ids))
	for i, id := range ids {
		reads[i] = pipe.HMGet(bound, scope.TransferKey(id), "leg", "amount")
	}
	if _, err := pipe.Exec(bound); err != nil {
		return nil, fmt.Errorf("read the transfers of %s: %w", scope, err)
	}
	for i, id := range ids {
		leg, _ := reads[i].Val()[0].(string)
		amount, _ := reads[i].Val()[1].(string)
		if leg == "" && amount == "" {
			continue
		}
		n, err := reservation.ParseNumber(amount)
		if err != nil || (leg != string(transfer.LegOut) && leg != string(transfer.LegIn)) {
			return nil, fmt.Errorf("the marker %s is none: leg %q, amount %q", scope.TransferKey(id), leg, amount)
		}
		markers[id] = transfer.Marker{Leg: transfer.Leg(leg), Amount: n}
	}
	return markers, nil
}

// requestPage is how many scopes' shards are counted in one pipeline.
const requestPage = 16

// Requests counts the requests that each scope has answered, whatever the
// answer: the fields of its 256 shards of request results.
func (s *Store) Requests(ctx context.Context, scopes []reservation.Scope) ([]int64, error) {
	counts := make([]int64, 0, len(scopes))
	for page := range slices.Chunk(scopes, requestPage) {
		bound, cancel := s.bound(ctx)
		pipe := s.reading.Pipeline()
		lengths := make([]*redis.IntCmd, 0, len(page)*reservation.RequestShards)
		for _, scope := range page {
			for shard := range reservation.RequestShards {
				lengths = append(lengths, pipe.HLen(bound, scope.RequestShardKey(shard)))
			}
		}
		_, err := pipe.Exec(bound)
		cancel()
		if err != nil {
			return nil, fmt.Errorf("count request results: %w", err)
		}
		for shards := range slices.Chunk(lengths, reservation.RequestShards) {
			var requests int64
			for _, n := range shards {
				requests += n.Val()
			}
			counts = append(counts, requests)
		}
	}
	return counts, nil
}
