package upstream

import (
	"sync"

	"github.com/seckill/reconciler/reservation"
)

// Ledger remembers every reservation that a gateway was told of. It is safe for
// concurrent use.
type Ledger struct {
	mu   sync.Mutex
	byID map[string]Sold
}

// Sold is one reservation of the ledger.
type Sold struct {
	Reservation reservation.Reservation // as it was made
	Fault       Fault
}

func (l *Ledger) add(rs []reservation.Reservation, faults Faults) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byID == nil {
		l.byID = map[string]Sold{}
	}
	for _, r := range rs {
		l.byID[r.ID] = Sold{Reservation: r, Fault: faults.Of(r.ID)}
	}
}

// Len is the number of reservations.
func (l *Ledger) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.byID)
}

// All are the reservations, in no order.
func (l *Ledger) All() []Sold {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]Sold, 0, len(l.byID))
	for _, sold := range l.byID {
		all = append(all, sold)
	}
	return all
}

// Of are the reservations of one scope.
func (l *Ledger) Of(s reservation.Scope) []Sold {
	var of []Sold
	for _, sold := range l.All() {
		if sold.Reservation.Scope() == s {
			of = append(of, sold)
		}
	}
	return of
}

// ByFault counts the reservations that each fault befell.
func (l *Ledger) ByFault() map[Fault]int {
	counts := map[Fault]int{}
	for _, sold := range l.All() {
		counts[sold.Fault]++
	}
	return counts
}
