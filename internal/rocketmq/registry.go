package rocketmq

import "context"

// ExpectedQueue says that a broker was seen with that many queues of a topic.
type ExpectedQueue struct {
	Broker string
	Topic  string
	Queues int32
}

// QueueRegistry remembers every (broker, topic, queues) ever seen, because a
// dead broker vanishes from the route: a sweep that lacks one is UNKNOWN until
// an operator forgets it (services §3).
type QueueRegistry interface {
	// Record adds the queues, and raises the number of those that are known.
	Record(ctx context.Context, queues []ExpectedQueue) error
	// Expected is everything recorded of a topic.
	Expected(ctx context.Context, topic string) ([]ExpectedQueue, error)
	// Forgotten are the brokers that an operator forgot and that were not
	// recorded since.
	Forgotten(ctx context.Context) ([]string, error)
}
