package doctor

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/seckill/reconciler/internal/probe"
)

// Messaging is how RocketMQ is configured here, as far as it has to agree with
// what the brokers say.
type Messaging struct {
	Topic, Group, Tag string
	Pop               bool          // rocketmq.consumer_protocol
	ClaimsAfter       time.Duration // purge.claims_after; 0: claims are kept
	DeadLetterAfter   time.Duration // fencer.dead_letter_after
	SweepMargin       time.Duration // rocketmq.sweep_margin
	// Known are the brokers that were ever seen with the topic.
	Known []string
}

// RocketMQ judges the name servers, the topic, the brokers and the consumers.
func RocketMQ(m probe.RocketMQ, c Messaging) []Row {
	all := &rows{area: AreaRocketMQ}
	var list []Row
	for _, addr := range slices.Sorted(maps.Keys(m.NameServers)) {
		r := &rows{area: AreaRocketMQ, subject: addr}
		switch err := m.NameServers[addr]; {
		case err == nil:
			r.ok("answers", "name server")
		case m.Answers():
			r.add("answers", Warning, "the name server does not answer, others do: "+err.Error(), "start it")
		default:
			r.unread("answers", err, "start it, or correct rocketmq.name_servers")
		}
		list = append(list, r.list...)
	}
	if !m.Answers() {
		all.unread("topic", errNoServer, "start a name server, or correct rocketmq.name_servers")
		return append(all.list, list...)
	}
	if !m.TopicExists {
		all.add("topic", Broken, "the name servers have no route for topic "+c.Topic, "create the topic, or correct rocketmq.topic")
		return append(all.list, list...)
	}
	all.ok("topic", fmt.Sprintf("%s on %d brokers", c.Topic, len(m.Brokers)))
	all.group(m, c)
	all.consumers(m, c)
	all.knownBrokers(m, c)
	list = append(all.list, list...)
	for _, b := range m.Brokers {
		list = append(list, broker(b, c)...)
	}
	return list
}

func (r *rows) group(m probe.RocketMQ, c Messaging) {
	known, answered := false, false
	for _, b := range m.Brokers {
		known, answered = known || b.GroupKnown, answered || b.Err == nil
	}
	if !answered {
		return // each broker's row says so
	}
	r.judge("group", known, c.Group, Broken, fmt.Sprintf("no broker knows the consumer group %s: every message looks unread", c.Group),
		"start the order consumer, or correct rocketmq.consumer_group")
}

// consumers judges what the online members of the group have told the brokers.
func (r *rows) consumers(m probe.RocketMQ, c Messaging) {
	var online []string
	var first *probe.Consumers
	for i, b := range m.Brokers {
		if b.Err == nil && b.ConsumersErr != nil {
			r.unread("consumers", b.ConsumersErr, "see the broker's access control")
			return
		}
		online = append(online, b.Consumers.Clients...)
		if first == nil && len(b.Consumers.Clients) > 0 {
			first = &m.Brokers[i].Consumers
		}
	}
	slices.Sort(online)
	online = slices.Compact(online)
	if first == nil {
		r.add("consumers", Warning, "no consumer of the group is online: messages wait", "start the order consumer")
	} else {
		r.ok("consumers", fmt.Sprintf("%d online", len(online)))
		r.subscription(*first, c)
		r.judge("message-model", first.Model == "CLUSTERING", "clustering", Broken,
			"the consumers are in mode "+first.Model+": the brokers do not know what they have handled", "use clustering")
	}
	r.protocol(m, first, c)
}

// protocol compares how the consumers read with how evidence is concluded.
func (r *rows) protocol(m probe.RocketMQ, first *probe.Consumers, c Messaging) {
	pop := m.PopTopic != "" || first != nil && first.Type == "CONSUME_POP"
	switch {
	case pop && !c.Pop:
		why := "the consumers use POP"
		if m.PopTopic != "" {
			why = "there is a retry topic of POP consumers, " + m.PopTopic
		}
		r.add("consumer-protocol", Broken, why+": a passed offset does not mean that a message was handled", "set rocketmq.consumer_protocol: pop")
	case first != nil && c.Pop && !pop:
		r.add("consumer-protocol", Warning, "rocketmq.consumer_protocol is pop, and the consumers do not use it: more is left undecided than has to be",
			"set rocketmq.consumer_protocol: remoting")
	default:
		r.ok("consumer-protocol", "as configured")
	}
}

func (r *rows) subscription(online probe.Consumers, c Messaging) {
	s, there := online.Subscribe[c.Topic]
	if !there {
		r.add("subscription", Broken, fmt.Sprintf("the online consumers of %s do not subscribe to %s", c.Group, c.Topic), "correct the consumer, or rocketmq.topic and rocketmq.consumer_group")
		return
	}
	takes, known := s.Takes(c.Tag)
	tag := c.Tag
	if tag == "" {
		tag = "no tag"
	}
	switch {
	case !known:
		r.add("subscription", Warning, fmt.Sprintf("the consumers select by %s: whether that takes messages with %s is not known here", s.Type, tag), "compare it with rocketmq.tag")
	case !takes:
		r.add("subscription", Broken, fmt.Sprintf("the consumers take %q, and order messages carry %s: they are skipped, and count as consumed", s.Expression, tag),
			"make gateway, consumer and rocketmq.tag agree")
	default:
		r.ok("subscription", fmt.Sprintf("%q takes messages with %s", s.Expression, tag))
	}
}

func (r *rows) knownBrokers(m probe.RocketMQ, c Messaging) {
	var missing []string
	for _, name := range c.Known {
		if !slices.ContainsFunc(m.Brokers, func(b probe.Broker) bool { return b.Name == name }) && !slices.Contains(missing, name) {
			missing = append(missing, name)
		}
	}
	slices.Sort(missing)
	r.judge("known-brokers", len(missing) == 0, "all in the route", Broken, fmt.Sprintf("%v had the topic and are out of the route: messages on them are neither found nor excluded", missing),
		"start them; one that is gone for good: `reconciler broker forget NAME`")
}

func broker(b probe.Broker, c Messaging) []Row {
	r := &rows{area: AreaRocketMQ, subject: b.Name}
	if b.Err != nil {
		r.unread("answers", b.Err, "start it; messages on it are neither found nor excluded meanwhile")
		return r.list
	}
	r.ok("answers", fmt.Sprintf("%s, %d queues", b.Version, b.Queues))
	switch {
	case b.RetentionErr != nil:
		r.unread("retention", b.RetentionErr, "see the broker's access control")
	case c.ClaimsAfter > 0 && b.Retention >= c.ClaimsAfter:
		r.add("retention", Broken, fmt.Sprintf("messages are kept for %s, claims for %s: a late message could make an order for a unit that was given back", b.Retention, c.ClaimsAfter),
			"raise purge.claims_after, or lower the broker's fileReservedTime")
	case b.Retention <= c.DeadLetterAfter:
		r.add("retention", Warning, fmt.Sprintf("messages are kept for %s, dead letters are held for %s: they vanish before they are decided", b.Retention, c.DeadLetterAfter),
			"raise the broker's fileReservedTime, or lower fencer.dead_letter_after")
	default:
		r.ok("retention", fmt.Sprintf("messages %s, claims %s, dead letters held for %s", b.Retention, kept(c.ClaimsAfter), c.DeadLetterAfter))
	}
	return r.list
}

func kept(d time.Duration) string {
	if d == 0 {
		return "for ever"
	}
	return d.String()
}
