package redisstore

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/reservation"
)

// MarkerReply is what a scope's marker of a user names, or why it could not be
// read.
type MarkerReply struct {
	ReservationID string // "": the user has no live reservation there
	Err           error
}

// Markers reads the user's marker in each of the scopes.
func (s *Store) Markers(ctx context.Context, scopes []reservation.Scope, userID string) []MarkerReply {
	replies := make([]MarkerReply, len(scopes))
	if len(scopes) == 0 {
		return replies
	}
	pipe := s.reading.Pipeline()
	cmds := make([]*redis.StringCmd, len(scopes))
	for i, scope := range scopes {
		cmds[i] = pipe.Get(ctx, scope.UserKey(userID))
	}
	bound, cancel := s.bound(ctx)
	defer cancel()
	_, _ = pipe.Exec(bound) // each command has its own error
	for i, scope := range scopes {
		if replies[i].ReservationID, replies[i].Err = stringOf(cmds[i]); replies[i].Err != nil {
			replies[i].Err = fmt.Errorf("read a user's marker of %s: %w", scope, replies[i].Err)
		}
	}
	return replies
}
