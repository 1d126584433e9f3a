package upstream

import (
	"hash/fnv"
	"maps"
	"slices"
	"strconv"
)

// Fault is what goes wrong with one reservation.
type Fault string

// The faults. The daemon is to bring each of them to ORDER_CREATED or RELEASED,
// but for [DeletedHash], which is a person's.
const (
	// None: everything goes as it should.
	None Fault = "none"

	// CrashAfterReserve: the gateway dies before it sends.
	CrashAfterReserve Fault = "crash_after_reserve"
	// TimeoutStored: the send times out at the gateway, and the broker has it.
	TimeoutStored Fault = "send_timeout_stored"
	// TimeoutLost: the send times out, and the broker never got it.
	TimeoutLost Fault = "send_timeout_lost"
	// LateEnqueued: the gateway notes ENQUEUED long after the broker's answer,
	// when the order exists or the daemon has acted.
	LateEnqueued Fault = "late_enqueued"
	// Duplicate: the message is sent two or three times.
	Duplicate Fault = "duplicate"
	// LostAfterAck: the broker acknowledged and then lost the message. The
	// broker here is sound, so this one is played: the gateway notes ENQUEUED
	// and the position of another message, as if the broker had lost its tail
	// and used the offset again, and sends nothing.
	LostAfterAck Fault = "lost_after_ack"
	// Delayed: the send times out, and the message turns up at the broker after
	// the reservation has expired.
	Delayed Fault = "delayed"
	// DeletedHash: the gateway dies before it sends, and the reservation's hash
	// is gone, while its index members are left.
	DeletedHash Fault = "deleted_hash"

	// CrashBeforeCommit: the consumer dies with its transaction open; the
	// message is delivered again.
	CrashBeforeCommit Fault = "consumer_crash_before_commit"
	// CrashAfterCommit: the consumer dies between its commit and Redis. At the
	// next delivery it finds the order and leaves Redis as it is.
	CrashAfterCommit Fault = "consumer_crash_after_commit"
	// RejectClaimed: the consumer refuses the order for good, says so by
	// reject_reservation and in Redis. A consumer without the claim calls
	// says it in Redis alone.
	RejectClaimed Fault = "reject_with_claim"
	// RejectUnclaimed: it says so in Redis alone.
	RejectUnclaimed Fault = "reject_without_claim"
	// Dropped: it acknowledges the message and does nothing.
	Dropped Fault = "dropped_by_consumer"
	// Replayed: as Dropped, and long after the message is there again, as after
	// an offset reset. If the reservation was released meanwhile, no order may
	// come of it.
	Replayed Fault = "replayed_after_drop"
	// DeadLetter: it fails at every delivery, until the dead-letter topic.
	DeadLetter Fault = "dead_letter"
)

// AllFaults lists the faults, None first, in the order of reports.
var AllFaults = []Fault{
	None, CrashAfterReserve, TimeoutStored, TimeoutLost, LateEnqueued, Duplicate, LostAfterAck, Delayed, DeletedHash,
	CrashBeforeCommit, CrashAfterCommit, RejectClaimed, RejectUnclaimed, Dropped, Replayed, DeadLetter,
}

// Faults assigns faults to reservations.
type Faults struct {
	Seed uint64
	// Share is the part of the reservations that each fault befalls, 0 to 1; the
	// rest, to a sum of 1, is None.
	Share map[Fault]float64
}

// Evenly gives each of the faults the same share.
func Evenly(seed uint64, share float64, faults ...Fault) Faults {
	f := Faults{Seed: seed, Share: map[Fault]float64{}}
	for _, fault := range faults {
		f.Share[fault] = share
	}
	return f
}

// Only gives every reservation the same fault.
func Only(fault Fault) Faults { return Faults{Share: map[Fault]float64{fault: 1}} }

// Of is the fault of a reservation. It depends on the seed, the shares and the
// id alone.
func (f Faults) Of(reservationID string) Fault {
	point := f.draw(reservationID, "fault")
	for _, fault := range slices.Sorted(maps.Keys(f.Share)) {
		if point -= f.Share[fault]; point < 0 {
			return fault
		}
	}
	return None
}

// copies is how often a Duplicate's message is sent.
func (f Faults) copies(reservationID string) int {
	if f.draw(reservationID, "copies") < 0.5 {
		return 2
	}
	return 3
}

// draw is a number in [0, 1), spread evenly over ids.
func (f Faults) draw(reservationID, purpose string) float64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(strconv.FormatUint(f.Seed, 10) + "\x00" + purpose + "\x00" + reservationID)) // never fails
	// The low bits of FNV-1a are mixed best.
	const bits = 32
	return float64(h.Sum64()&(1<<bits-1)) / (1 << bits)
}
