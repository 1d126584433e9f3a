package doctor

import (
	"fmt"
	"time"

	"github.com/seckill/reconciler/internal/probe"
)

// skewWarning is how far a clock may be off PostgreSQL's (protocol §2).
const skewWarning = 500 * time.Millisecond

const syncClock = "synchronise the clocks of the machines (NTP)"

// Clocks compares the clocks of the Redis servers and the brokers with
// PostgreSQL's. What the questions' round trips leave open is not held against
// them.
func Clocks(nodes []probe.RedisNode, p probe.Postgres, m probe.RocketMQ, sweepMargin time.Duration) []Row {
	if p.Err != nil || p.ClockErr != nil {
		return nil // PostgreSQL's own row says so
	}
	var list []Row
	for _, n := range nodes {
		if n.Err == nil && n.Role != probe.RoleSentinel {
			r := &rows{area: AreaClocks, subject: "redis " + n.Addr}
			r.clock(n.Clock-p.Clock, n.ClockError+p.ClockError, 0)
			list = append(list, r.list...)
		}
	}
	for _, b := range m.Brokers {
		r := &rows{area: AreaClocks, subject: "broker " + b.Name}
		switch {
		case b.Err != nil: // its own row says so
		case b.ClockErr != nil:
			r.unread("clock", b.ClockErr, "see the broker's access control")
		default:
			r.clock(b.Clock-p.Clock, b.ClockError+p.ClockError, sweepMargin/2)
		}
		list = append(list, r.list...)
	}
	return list
}

// clock judges an offset that is known to ± uncertain. blind is from where on
// evidence is unknown; 0: no offset makes it so.
func (r *rows) clock(offset, uncertain, blind time.Duration) {
	certain := max(offset.Abs()-uncertain, 0)
	why := fmt.Sprintf("%s off PostgreSQL's, ± %s", offset.Round(time.Millisecond), uncertain.Round(time.Millisecond))
	switch {
	case blind > 0 && certain > blind:
		r.add("clock", Broken, why+": evidence of messages is unknown", syncClock)
	case certain > skewWarning:
		r.add("clock", Warning, why, syncClock)
	default:
		r.ok("clock", why)
	}
}
