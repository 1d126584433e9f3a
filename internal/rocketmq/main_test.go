package rocketmq_test

import (
	"testing"

	"go.uber.org/goleak"
)

// The client library leaves goroutines behind after Shutdown: its timers sleep
// up to 10 s before they look whether they are still wanted, and readers of
// closed connections go when they notice. These run inside WithRecover; a cache
// of the library's lives as long as the process. The tests' own consumers leave
// a PULL that waits at the broker, and their workers.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/apache/rocketmq-client-go/v2/primitive.WithRecover"),
		goleak.IgnoreAnyFunction("github.com/apache/rocketmq-client-go/v2/consumer.(*pushConsumer).pullMessage"),
		goleak.IgnoreAnyFunction("github.com/patrickmn/go-cache.(*janitor).Run"))
}
