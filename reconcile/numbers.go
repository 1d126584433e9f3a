package reconcile

import "cmp"

// Standing is how many findings stand, those that are left out included.
func (r *Report) Standing() int {
	total := 0
	for _, n := range r.Summary {
		total += n
	}
	return total
}

// NamedNumber is a number of a scope by its name in JSON; nil is unknown.
type NamedNumber struct {
	Name  string
	Value *int64
}

// Numbers are the scope's numbers, always the same ones in the same order.
func (s ScopeReport) Numbers() []NamedNumber {
	redis := cmp.Or(s.Redis, &RedisCount{})
	var active, cancelled *int64
	if s.Postgres != nil {
		active, cancelled = &s.Postgres.Active, &s.Postgres.Cancelled
	}
	return []NamedNumber{
		{"initial", redis.Initial},
		{"available", redis.Available},
		{"reserved", redis.Reserved},
		{"released_total", redis.ReleasedTotal},
		{"send_pending", redis.SendPending},
		{"reservation_expiry", redis.ReservationExpiry},
		{"active", active},
		{"cancelled", cancelled},
		{"deviation", s.Deviation},
	}
}
