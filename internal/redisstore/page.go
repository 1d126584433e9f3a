package redisstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// start is the lower bound of the range behind a cursor, its own score included.
func start(c pass.Cursor) string {
	if !c.Started {
		return "-inf"
	}
	return strconv.FormatFloat(c.Score, 'g', -1, 64)
}

// passed says whether the walk has been at z before.
func passed(c pass.Cursor, z redis.Z, id string) bool {
	return c.Started && (z.Score < c.Score || (z.Score == c.Score && id <= c.Member))
}

// Pages reads one page for each request, all of them in a few round trips.
// Members come with their hashes and with their places in both indexes, all
// read after the page's NowMS.
func (s *Store) Pages(ctx context.Context, requests []pass.PageRequest) []pass.PageReply {
	replies := make([]pass.PageReply, len(requests))
	for i, r := range requests {
		replies[i].Page = reservation.Page{Scope: r.Scope, Index: r.Index}
		replies[i].Next = r.After
	}
	s.readTimes(ctx, replies)
	s.readIDs(ctx, requests, replies)
	var refs []Ref
	for _, reply := range replies {
		if reply.Err == nil {
			for _, m := range reply.Members {
				refs = append(refs, Ref{reply.Scope, m.ID})
			}
		}
	}
	members := s.Members(ctx, refs)
	for i := range replies {
		if replies[i].Err != nil {
			continue
		}
		n := len(replies[i].Members)
		for j, m := range members[:n] {
			if m.Err != nil {
				replies[i].Err = m.Err
				break
			}
			replies[i].Members[j] = m.Member
		}
		members = members[n:]
		if replies[i].Err != nil {
			replies[i].Members = nil
			replies[i].Next = requests[i].After
		}
	}
	return replies
}

// readTimes fills in the times of the scopes' own nodes (protocol §2), asking
// each node once and all of them at the same time. They are not the
// snapshots': a stock that cannot be read must not stop what does not need it.
func (s *Store) readTimes(ctx context.Context, replies []pass.PageReply) {
	bound, cancel := s.bound(ctx)
	defer cancel()
	onNode := map[*redis.Client][]*pass.PageReply{}
	for i := range replies {
		node, err := s.node(bound, replies[i].Scope)
		if err != nil {
			replies[i].Err = fmt.Errorf("find the node of %s: %w", replies[i].Scope, err)
			continue
		}
		onNode[node] = append(onNode[node], &replies[i])
	}
	var wg sync.WaitGroup
	for node, own := range onNode {
		wg.Go(func() {
			now, err := node.Time(bound).Result()
			for _, reply := range own {
				reply.NowMS = now.UnixMilli()
				if err != nil {
					reply.Err = fmt.Errorf("read the time of the node of %s: %w", reply.Scope, err)
				}
			}
		})
	}
	wg.Wait()
}

// Now is the time of the scope's own node, in milliseconds since 1970.
func (s *Store) Now(ctx context.Context, scope reservation.Scope) (int64, error) {
	reply := []pass.PageReply{{Page: reservation.Page{Scope: scope}}}
	s.readTimes(ctx, reply)
	return reply[0].NowMS, reply[0].Err
}

// node is the client of the master that holds the scope.
func (s *Store) node(ctx context.Context, scope reservation.Scope) (*redis.Client, error) {
	switch client := s.reading.(type) {
	case *redis.ClusterClient:
		return client.MasterForKey(ctx, scope.MetaKey())
	case *redis.Client:
		return client, nil
	default:
		return nil, fmt.Errorf("%T has no nodes", client)
	}
}

// NodeOf is the address of the master that holds the scope, as last known; ""
// if none is.
func (s *Store) NodeOf(ctx context.Context, scope reservation.Scope) string {
	node, err := s.node(ctx, scope)
	if err != nil {
		return ""
	}
	return node.Options().Addr
}

// readIDs fills the members' ids. Members of one score come in the order of
// their names, so (score, member) is a total order; those of the cursor's own
// score that it has passed are read again and dropped, which is why a score
// that more members share than a page holds is read on by offset.
func (s *Store) readIDs(ctx context.Context, requests []pass.PageRequest, replies []pass.PageReply) {
	offsets := make([]int64, len(requests))
	open := make([]int, 0, len(requests))
	for i := range requests {
		if replies[i].Err == nil {
			open = append(open, i)
		}
	}
	for len(open) > 0 {
		pipe := s.reading.Pipeline()
		cmds := make([]*redis.ZSliceCmd, len(open))
		for k, i := range open {
			upTo := strconv.FormatInt(cmp.Or(requests[i].UntilMS, replies[i].NowMS), 10)
			if requests[i].All {
				upTo = "+inf"
			}
			cmds[k] = pipe.ZRangeArgsWithScores(ctx, redis.ZRangeArgs{
				Key: requests[i].Scope.IndexKey(requests[i].Index), ByScore: true,
				Start: start(requests[i].After), Stop: upTo,
				Offset: offsets[i], Count: int64(requests[i].Limit),
			})
		}
		bound, cancel := s.bound(ctx)
		_, _ = pipe.Exec(bound) // each command has its own error
		cancel()
		var again []int
		for k, i := range open {
			read, err := cmds[k].Result()
			if err != nil {
				replies[i].Err = fmt.Errorf("read %s of %s: %w", requests[i].Index, requests[i].Scope, err)
				continue
			}
			if !take(&replies[i], requests[i], read) {
				offsets[i] += int64(len(read))
				again = append(again, i)
			}
		}
		open = again
	}
}

// take adds to the reply what was read beyond the cursor; false asks to read
// on, since all of it had been passed.
func take(p *pass.PageReply, request pass.PageRequest, read []redis.Z) bool {
	for _, z := range read {
		id, _ := z.Member.(string)
		if passed(request.After, z, id) {
			continue
		}
		p.Members = append(p.Members, reservation.Member{Scope: request.Scope, ID: id})
		p.Next = pass.Cursor{Score: z.Score, Member: id, Started: true}
	}
	p.End = len(read) < request.Limit
	return len(p.Members) > 0 || p.End
}

// Ref names a reservation.
type Ref struct {
	Scope reservation.Scope
	ID    string
}

// MemberReply is a member, or why it could not be read.
type MemberReply struct {
	reservation.Member
	Err error
}

// Members reads reservations by name, with their places in both indexes.
func (s *Store) Members(ctx context.Context, refs []Ref) []MemberReply {
	replies := make([]MemberReply, len(refs))
	if len(refs) == 0 {
		return replies
	}
	type commands struct {
		hash            *redis.SliceCmd
		pending, expiry *redis.FloatCmd
	}
	pipe := s.reading.Pipeline()
	cmds := make([]commands, len(refs))
	for i, r := range refs {
		cmds[i] = commands{
			hash:    pipe.HMGet(ctx, r.Scope.ReservationKey(r.ID), reservation.Fields...),
			pending: pipe.ZScore(ctx, r.Scope.IndexKey(reservation.SendPending), r.ID),
			expiry:  pipe.ZScore(ctx, r.Scope.IndexKey(reservation.ReservationExpiry), r.ID),
		}
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, r := range refs {
		replies[i].Member, replies[i].Err = member(r, cmds[i].hash)
		if replies[i].Err == nil {
			replies[i].InPending, replies[i].PendingScoreMS, replies[i].Err = score(cmds[i].pending)
		}
		if replies[i].Err == nil {
			replies[i].InExpiry, replies[i].ExpiryScoreMS, replies[i].Err = score(cmds[i].expiry)
		}
		if replies[i].Err != nil {
			replies[i].Err = fmt.Errorf("read reservation %s of %s: %w", r.ID, r.Scope, replies[i].Err)
		}
	}
	return replies
}

func member(r Ref, cmd *redis.SliceCmd) (reservation.Member, error) {
	values, err := cmd.Result()
	if isWrongType(err) {
		// One key of another type must not hide its neighbours.
		return reservation.Member{
			Scope: r.Scope, ID: r.ID,
			Malformed: &reservation.MalformedError{Cause: "not_a_hash"},
		}, nil
	}
	if err != nil {
		return reservation.Member{}, err
	}
	fields := make(map[string]string, len(values))
	for i, v := range values {
		if text, ok := v.(string); ok {
			fields[reservation.Fields[i]] = text
		}
	}
	return reservation.NewMember(r.Scope, r.ID, fields), nil
}

func score(cmd *redis.FloatCmd) (bool, int64, error) {
	value, err := cmd.Result()
	if errors.Is(err, redis.Nil) {
		return false, 0, nil
	}
	return err == nil, int64(value), err
}

func isWrongType(err error) bool {
	return err != nil && strings.HasPrefix(err.Error(), "WRONGTYPE")
}
