package redisstore

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// Backlog is how much of a scope waits, or why that could not be read.
type Backlog struct {
	Scope      reservation.Scope
	Pending    int64         // members of send_pending, due or not
	PendingDue int64         // those of them that are due
	PendingAge time.Duration // how long the oldest of them has been due
	ExpiryDue  int64         // members of reservation_expiry whose check is due
	ExpiryAge  time.Duration // how long the oldest of them has been due
	Err        error
}

// Backlogs measures the scopes, one reply for each.
func (s *Store) Backlogs(ctx context.Context, scopes []reservation.Scope) []Backlog {
	replies := make([]pass.PageReply, len(scopes))
	for i, scope := range scopes {
		replies[i].Scope = scope
	}
	s.readTimes(ctx, replies)
	type commands struct {
		pending, pendingDue, due    *redis.IntCmd
		oldestPending, oldestExpiry *redis.ZSliceCmd
	}
	pipe := s.reading.Pipeline()
	cmds := make([]commands, len(scopes))
	for i, scope := range scopes {
		pendingKey, expiryKey := scope.IndexKey(reservation.SendPending), scope.IndexKey(reservation.ReservationExpiry)
		cmds[i] = commands{
			pending:       pipe.ZCard(ctx, pendingKey),
			pendingDue:    pipe.ZCount(ctx, pendingKey, "-inf", strconv.FormatInt(replies[i].NowMS, 10)),
			due:           pipe.ZCount(ctx, expiryKey, "-inf", strconv.FormatInt(replies[i].NowMS, 10)),
			oldestPending: pipe.ZRangeWithScores(ctx, pendingKey, 0, 0),
			oldestExpiry:  pipe.ZRangeWithScores(ctx, expiryKey, 0, 0),
		}
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	if len(scopes) > 0 {
		_, _ = pipe.Exec(bound) // each command has its own error
	}
	backlogs := make([]Backlog, len(scopes))
	for i, scope := range scopes {
		b := Backlog{Scope: scope, Pending: cmds[i].pending.Val(), PendingDue: cmds[i].pendingDue.Val(), ExpiryDue: cmds[i].due.Val(), Err: replies[i].Err}
		for _, cmd := range []redis.Cmder{cmds[i].pending, cmds[i].pendingDue, cmds[i].due, cmds[i].oldestPending, cmds[i].oldestExpiry} {
			if b.Err == nil && cmd.Err() != nil {
				b.Err = fmt.Errorf("measure the backlog of %s: %w", scope, cmd.Err())
			}
		}
		b.PendingAge = overdue(replies[i].NowMS, cmds[i].oldestPending.Val())
		b.ExpiryAge = overdue(replies[i].NowMS, cmds[i].oldestExpiry.Val())
		backlogs[i] = b
	}
	return backlogs
}

// overdue is how long the first member has been due; 0 when none is.
func overdue(nowMS int64, oldest []redis.Z) time.Duration {
	if len(oldest) == 0 {
		return 0
	}
	return max(time.Duration(nowMS-int64(oldest[0].Score))*time.Millisecond, 0)
}
