package rocketmq

import (
	"fmt"

	"github.com/seckill/reconciler/reservation"
)

// conclude says for each query what the pass found. Of several copies the
// strongest counts (protocol §2), and what was not read completely is UNKNOWN.
func (p *pass) conclude() map[string]reservation.MessageEvidence {
	answer := make(map[string]reservation.MessageEvidence, len(p.queries))
	for i, q := range p.queries {
		e := p.concludeOne(i)
		if other, twice := answer[q.MessageID]; twice {
			e = e.Stronger(other)
		}
		answer[q.MessageID] = e
	}
	return answer
}

func (p *pass) concludeOne(i int) reservation.MessageEvidence {
	m := &p.messages[i]
	switch {
	case m.problem != nil:
		return m.problem.evidence()
	case p.overall != nil:
		return p.overall.evidence()
	case m.final:
		return m.found
	}
	if why := p.incomplete(i); why != nil {
		return why.evidence()
	}
	e := m.found
	if !m.any {
		e = reservation.MessageEvidence{State: reservation.MessageAbsent}
	}
	if p.e.cfg.ConsumerProtocol == ProtocolPOP &&
		(e.State == reservation.MessageConsumed || e.State == reservation.MessageAbsent) {
		return problem{UnknownPOP, "a POP consumer's offsets do not say what was acknowledged"}.evidence()
	}
	return e
}

// incomplete is why the sweeps do not decide the query; nil if they do.
func (p *pass) incomplete(i int) *problem {
	if p.sweeping != nil {
		return p.sweeping
	}
	for _, b := range p.brokers {
		if b.problem != nil {
			return b.problem
		}
		for topic, covered := range b.coverage {
			if topic == p.e.cfg.Topic && !p.messages[i].needsTopic() {
				continue
			}
			if startMS := p.startOf(i); startMS < covered.sinceMS {
				return &problem{covered.why, fmt.Sprintf("broker %s: %s is covered from %d on, needed from %d", b.name, topic, covered.sinceMS, startMS)}
			}
		}
	}
	return nil
}
