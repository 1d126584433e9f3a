package lua

import "github.com/seckill/reconciler/reservation"

var markUser = load("mark_user")

// MarkUserCode is the code of a reply of mark_user.lua.
type MarkUserCode int64

// The codes of mark_user.lua (spec §4).
const (
	MarkUserMarked        MarkUserCode = 0
	MarkUserAlreadyMarked MarkUserCode = 1
	MarkUserNotFound      MarkUserCode = 2
	MarkUserNotLive       MarkUserCode = 3
	MarkUserIDConflict    MarkUserCode = 4
	MarkUserMarkerChanged MarkUserCode = 5
)

var markUserCodes = map[MarkUserCode]string{
	MarkUserMarked: "MARKED", MarkUserAlreadyMarked: "ALREADY_MARKED", MarkUserNotFound: "NOT_FOUND",
	MarkUserNotLive: "NOT_LIVE", MarkUserIDConflict: "ID_CONFLICT", MarkUserMarkerChanged: "MARKER_CHANGED",
}

func (c MarkUserCode) String() string { return codeText(markUserCodes, c) }

// MarkUserArgs are the arguments of mark_user.lua.
type MarkUserArgs struct {
	ReservationID string
	UserID        string // of the reservation's hash
	Seen          string // the marker that the caller saw, "" for none
}

// MarkUserReply is the reply of mark_user.lua.
type MarkUserReply struct {
	Code   MarkUserCode
	Marker string // after the call; "" for none
}

// MarkUser points a user's marker at a reservation, if it is still the one that
// the caller saw. Seen may name another reservation only when ours has an
// active order and that one has none.
func (b *Batch) MarkUser(scope reservation.Scope, a MarkUserArgs) *Result[MarkUserReply] {
	keys := []string{scope.ReservationKey(a.ReservationID), scope.UserKey(a.UserID)}
	argv := []any{a.ReservationID, a.Seen}
	return enqueue(b, markUser, scope, keys, argv, 2, func(v *values) MarkUserReply {
		return MarkUserReply{Code: code(v, markUserCodes), Marker: v.text(1)}
	})
}
