package probe

import (
	"strings"
	"time"
)

// RocketMQ is the name servers and the brokers of the order topic as they answered.
type RocketMQ struct {
	NameServers map[string]error // by address; nil: it answers
	TopicExists bool
	// PopTopic is a retry topic that only POP consumers of the group have; "" if
	// there is none.
	PopTopic string
	Brokers  []Broker
}

// Answers says whether a name server does.
func (r RocketMQ) Answers() bool {
	for _, err := range r.NameServers {
		if err == nil {
			return true
		}
	}
	return false
}

// Broker is one broker of the topic.
type Broker struct {
	Name string
	Addr string // of its master; "" if the route names none
	Err  error  // why it could not be asked

	Version      string
	Queues       int32
	GroupKnown   bool
	Retention    time.Duration // how long it keeps messages; 0: not known
	RetentionErr error
	// Clock is the broker's time minus that of this process, ± ClockError; the
	// broker tells whole seconds.
	Clock      time.Duration
	ClockError time.Duration
	ClockErr   error
	// Consumers are those of the group that are online at this broker.
	Consumers    Consumers
	ConsumersErr error
}

// Consumers is what the members of a consumer group have told a broker.
type Consumers struct {
	Clients   []string // client ids
	Type      string   // CONSUME_PASSIVELY, CONSUME_ACTIVELY or CONSUME_POP
	Model     string   // CLUSTERING or BROADCASTING
	Subscribe map[string]Subscription
}

// Subscription is what a group wants of a topic.
type Subscription struct {
	Type       string // TAG or SQL92
	Expression string // *, or tags joined by ||
}

// Takes says whether the subscription takes messages of the tag; "" is none.
// known is false for an expression that is not a list of tags.
func (s Subscription) Takes(tag string) (takes, known bool) {
	if s.Type != "" && s.Type != "TAG" {
		return false, false
	}
	if strings.TrimSpace(s.Expression) == "*" || s.Expression == "" {
		return true, true
	}
	for one := range strings.SplitSeq(s.Expression, "||") {
		if tag != "" && strings.TrimSpace(one) == tag {
			return true, true
		}
	}
	return false, true
}
