package pass_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// shelf is an index held in memory: the walk's logic needs no Redis, and a
// real one is walked in the tests of redisstore.
type shelf struct {
	members map[reservation.Scope][]string // in the index's order; scores do not matter here
	broken  map[reservation.Scope]bool
	largest int // members in the largest round
	now     int64
	until   []int64 // what the requests asked for
}

func (s *shelf) Pages(_ context.Context, requests []pass.PageRequest) []pass.PageReply {
	replies := make([]pass.PageReply, len(requests))
	round := 0
	for i, r := range requests {
		s.now++
		s.until = append(s.until, r.UntilMS)
		replies[i].NowMS = s.now
		replies[i].Scope, replies[i].Index, replies[i].Next = r.Scope, r.Index, r.After
		if s.broken[r.Scope] {
			replies[i].Err = errors.New("unreachable")
			continue
		}
		all := s.members[r.Scope]
		from := sort.SearchStrings(all, r.After.Member)
		if r.After.Started && from < len(all) && all[from] == r.After.Member {
			from++
		}
		to := min(from+r.Limit, len(all))
		for _, id := range all[from:to] {
			replies[i].Members = append(replies[i].Members, reservation.Member{Scope: r.Scope, ID: id})
			replies[i].Next = pass.Cursor{Member: id, Started: true}
		}
		replies[i].End = to-from < r.Limit
		round += to - from
	}
	s.largest = max(s.largest, round)
	return replies
}

func scopes(n int) []reservation.Scope {
	all := make([]reservation.Scope, n)
	for i := range all {
		all[i] = reservation.Scope{ActivityID: "a", SKUID: "s", Version: 1, Bucket: int64(i)}
	}
	return all
}

func fill(sizes ...int) (*shelf, []reservation.Scope) {
	s := &shelf{members: map[reservation.Scope][]string{}, broken: map[reservation.Scope]bool{}}
	all := scopes(len(sizes))
	for i, n := range sizes {
		for j := range n {
			s.members[all[i]] = append(s.members[all[i]], fmt.Sprintf("r%06d", j))
		}
	}
	return s, all
}

// Whatever the sizes and limits, each member is met exactly once in each round
// through the ranges, in however many passes that takes.
func TestWalkMeetsEachMemberOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, all := fill(rapid.SliceOfN(rapid.IntRange(0, 300), 1, 12).Draw(t, "sizes")...)
		limits := pass.Limits{
			Batch: rapid.IntRange(1, 200).Draw(t, "batch"),
			Items: rapid.IntRange(1, 500).Draw(t, "items"),
			Time:  time.Minute,
		}
		walk := pass.Walk{Index: reservation.SendPending}
		met := map[reservation.Scope]map[string]int{}
		total := 0
		for _, members := range s.members {
			total += len(members)
		}
		seen := 0
		for passes := 0; seen < total; passes++ {
			if passes > (total+1)*(len(all)+1) {
				t.Fatalf("%d of %d members met after %d passes", seen, total, passes)
			}
			before := seen
			tally := pass.NewTally()
			walk.Each(t.Context(), s, all, limits, tally, func(_ context.Context, pages []reservation.Page) {
				for _, p := range pages {
					for _, m := range p.Members {
						if met[p.Scope] == nil {
							met[p.Scope] = map[string]int{}
						}
						if met[p.Scope][m.ID]++; met[p.Scope][m.ID] == 1 {
							seen++
						}
					}
				}
			})
			if seen-before > limits.Items {
				t.Fatalf("a pass met %d members, its limit is %d", seen-before, limits.Items)
			}
			if tally.Complete && seen < total && len(all) == 1 {
				t.Fatalf("the pass says complete with %d of %d members met", seen, total)
			}
		}
		if s.largest > limits.Batch {
			t.Fatalf("a round of %d members, the batch is %d", s.largest, limits.Batch)
		}
	})
}

func TestWalkIsFair(t *testing.T) {
	s, all := fill(100_000, 10, 10)
	walk := pass.Walk{Index: reservation.SendPending}
	met := map[reservation.Scope]int{}
	tally := pass.NewTally()
	walk.Each(t.Context(), s, all, pass.Limits{Batch: 300, Items: 600, Time: time.Minute}, tally, func(_ context.Context, pages []reservation.Page) {
		for _, p := range pages {
			met[p.Scope] += len(p.Members)
		}
	})
	if met[all[1]] != 10 || met[all[2]] != 10 {
		t.Errorf("a large scope kept the small ones waiting: %v", met)
	}
	if tally.Complete {
		t.Error("a pass that its limit ended calls itself complete")
	}
}

func TestWalkLeavesABrokenScopeForLater(t *testing.T) {
	s, all := fill(50, 50)
	s.broken[all[0]] = true
	walk := pass.Walk{Index: reservation.SendPending}
	count := func() (n int, tally *pass.Tally) {
		tally = pass.NewTally()
		walk.Each(t.Context(), s, all, pass.Limits{Batch: 100, Items: 1000, Time: time.Minute}, tally, func(_ context.Context, pages []reservation.Page) {
			for _, p := range pages {
				n += len(p.Members)
			}
		})
		return n, tally
	}
	if n, tally := count(); n != 50 || tally.Err() == nil || tally.Complete {
		t.Errorf("met %d members, err %v, complete %v; want the 50 of the good scope, an error, incomplete", n, tally.Err(), tally.Complete)
	}
	s.broken[all[0]] = false
	if n, tally := count(); n != 100 || tally.Err() != nil || !tally.Complete {
		t.Errorf("met %d members, err %v, complete %v; want all 100", n, tally.Err(), tally.Complete)
	}
}

func TestWalkEndsWithItsContext(t *testing.T) {
	s, all := fill(1000)
	walk := pass.Walk{Index: reservation.SendPending}
	ctx, cancel := context.WithCancel(t.Context())
	tally := pass.NewTally()
	rounds := 0
	walk.Each(ctx, s, all, pass.Limits{Batch: 100, Items: 1000, Time: time.Minute}, tally, func(context.Context, []reservation.Page) {
		rounds++
		cancel()
	})
	if rounds != 1 || tally.Err() == nil || tally.Complete {
		t.Errorf("%d rounds, err %v, complete %v after cancel; want 1, an error, incomplete", rounds, tally.Err(), tally.Complete)
	}
}

// What a pass defers must not come back to it, however long it takes and however
// short the wait: the range ends at what was due at its first page.
func TestAPassDoesNotMeetItsOwnDeferrals(t *testing.T) {
	s, all := fill(100)
	w := pass.Walk{}
	w.Each(t.Context(), s, all, pass.Limits{Batch: 32, Items: 1000, Time: time.Hour}, pass.NewTally(), func(context.Context, []reservation.Page) {})
	if want := []int64{0, 1, 1, 1}; !slices.Equal(s.until, want) { // the first page's time is 1
		t.Errorf("the requests end at %v, want %v", s.until, want)
	}
}
