package transfer

import "fmt"

// Verb is what is to be done for a pair.
type Verb string

// The verbs.
const (
	Rest   Verb = "rest"   // the pair is equal
	Begin  Verb = "begin"  // OUT whole: the planned leg
	TopUp  Verb = "top_up" // OUT partial towards in: the donor's leg was undone
	Raise  Verb = "raise"  // IN raise to out: the receiver's leg is due, or was undone
	Lower  Verb = "lower"  // IN lower to out: the donor has no unit left to take
	Cancel Verb = "cancel" // nothing moved, and it is not to be begun
	Wait   Verb = "wait"   // nothing can be done now
)

// Pair is a transfer with both of its markers and buckets, as they were read.
type Pair struct {
	Transfer        Transfer
	Donor, Receiver Reading
	Held            bool // a person holds one of the buckets
}

// Out is the donor's marker.
func (p Pair) Out() Marker { return p.Donor.Markers[p.Transfer.ID] }

// In is the receiver's marker.
func (p Pair) In() Marker { return p.Receiver.Markers[p.Transfer.ID] }

// InTransit is how many units are out and not in; below zero they are in both
// buckets.
func (p Pair) InTransit() int64 { return p.Out().Amount - p.In().Amount }

// Step is a decision, and why.
type Step struct {
	Verb   Verb
	Target int64 // of the leg, for the verbs that run one
	State  State // what the journal is to say of the pair as it was read
	Why    string
}

// Move is the script call of the step; false when there is none.
func (s Step) Move(t Transfer) (Move, bool) {
	switch s.Verb {
	case Begin:
		return Move{t.DonorScope(), t.ID, LegOut, s.Target, false}, true
	case TopUp:
		return Move{t.DonorScope(), t.ID, LegOut, s.Target, true}, true
	case Raise:
		return Move{t.ReceiverScope(), t.ID, LegIn, s.Target, false}, true
	case Lower:
		return Move{t.ReceiverScope(), t.ID, LegIn, s.Target, true}, true
	default:
		return Move{}, false
	}
}

// Next decides what is to be done for a pair (protocol §4, transfer). It reads
// nothing: the same pair always gets the same answer. The caller has made sure
// that the sums of the version hold.
func Next(p Pair) Step {
	out, in := p.Out().Amount, p.In().Amount
	var s Step
	switch {
	case out > in:
		s = Step{Raise, out, Out, fmt.Sprintf("%d units are out and %d are in: the receiver gets the rest", out, in)}
	case in > out:
		s = takeBack(p, out, in)
	case out > 0:
		s = Step{Rest, 0, Done, fmt.Sprintf("%d units went out and came in", out)}
	default:
		s = unmoved(p)
	}
	if p.Held && s.Verb != Rest {
		s.Verb, s.Why = Wait, "a person holds one of the buckets; then: "+s.Why
	}
	return s
}

// takeBack: the units are in both buckets.
func takeBack(p Pair, out, in int64) Step {
	twice := fmt.Sprintf("%d units are in and only %d are out: a failover undid the donor's leg", in, out)
	switch {
	case p.Donor.Available > 0:
		return Step{TopUp, in, Out, twice + ", which is made up for as far as it has units"}
	case p.Receiver.Available > 0:
		return Step{Lower, out, Out, twice + "; the donor has none left, so the receiver gives back"}
	default:
		return Step{Wait, 0, Out, twice + "; both buckets are sold out: waits until a unit comes free in either"}
	}
}

// unmoved: no unit has left the donor, as far as the markers say.
func unmoved(p Pair) Step {
	t := p.Transfer
	switch {
	case t.State == Cancelled:
		return Step{Rest, 0, Cancelled, "cancelled: no unit has moved"}
	case t.State == Done:
		return Step{Cancel, 0, Cancelled, "failovers undid both legs: the units are in the donor's bucket"}
	case !sells(p.Donor.State) || !sells(p.Receiver.State):
		return Step{Cancel, 0, Cancelled, fmt.Sprintf("the donor's bucket is %s and the receiver's %s", p.Donor.State, p.Receiver.State)}
	default:
		return Step{Begin, t.Amount, t.State, fmt.Sprintf("no unit has moved: %d are to leave the donor's bucket, all or none", t.Amount)}
	}
}

// sells says whether a bucket in this state has a use for units.
func sells(state string) bool { return state == "ACTIVE" || state == "PAUSED" }
