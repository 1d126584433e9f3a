package lua

import "github.com/seckill/reconciler/reservation"

var adoptOrphan = load("adopt_orphan")

// AdoptOrphanCode is the code of a reply of adopt_orphan.lua.
type AdoptOrphanCode int64

// The codes of adopt_orphan.lua (spec §4).
const (
	AdoptOrphanAdopted         AdoptOrphanCode = 0
	AdoptOrphanHashExists      AdoptOrphanCode = 1
	AdoptOrphanNoMember        AdoptOrphanCode = 2
	AdoptOrphanRequestMismatch AdoptOrphanCode = 3
	AdoptOrphanRefused         AdoptOrphanCode = 7
)

var adoptOrphanCodes = map[AdoptOrphanCode]string{
	AdoptOrphanAdopted: "ADOPTED", AdoptOrphanHashExists: "HASH_EXISTS", AdoptOrphanNoMember: "NO_MEMBER",
	AdoptOrphanRequestMismatch: "REQUEST_MISMATCH", AdoptOrphanRefused: "REFUSED",
}

func (c AdoptOrphanCode) String() string { return codeText(adoptOrphanCodes, c) }

// AdoptOrphanArgs are the arguments of adopt_orphan.lua beside the scope.
type AdoptOrphanArgs struct {
	ReservationID string
	RequestID     string
	UserID        string
	MessageID     string
	SchemaVersion int64
	NowMS         int64
}

// AdoptOrphanReply is the reply of adopt_orphan.lua.
type AdoptOrphanReply struct {
	Code   AdoptOrphanCode
	Status reservation.Status // after the call; "" when there is none
}

// AdoptOrphan recreates the hash of an index member as RELEASE_PENDING. A
// person has approved it and the claim is FENCED or REJECTED (protocol §3).
func (b *Batch) AdoptOrphan(scope reservation.Scope, a AdoptOrphanArgs) *Result[AdoptOrphanReply] {
	keys := []string{
		scope.MetaKey(), scope.RequestKey(a.RequestID), scope.ReservationKey(a.ReservationID),
		scope.IndexKey(reservation.SendPending), scope.IndexKey(reservation.ReservationExpiry),
	}
	argv := []any{
		a.ReservationID, a.RequestID, a.UserID, scope.ActivityID, scope.SKUID, decimal(scope.Version),
		decimal(scope.Bucket), a.MessageID, decimal(a.SchemaVersion), decimal(a.NowMS),
	}
	return enqueue(b, adoptOrphan, scope, keys, argv, 2, func(v *values) AdoptOrphanReply {
		return AdoptOrphanReply{Code: code(v, adoptOrphanCodes), Status: v.status(1)}
	})
}
