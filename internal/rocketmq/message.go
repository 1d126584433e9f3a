package rocketmq

// tracerName is this package as traces name it.
const tracerName = "github.com/seckill/reconciler/internal/rocketmq"

// TraceProperty is the user property that carries a trace id.
const TraceProperty = "trace_id"

// Outgoing is a message to send.
type Outgoing struct {
	MessageID  string            // its KEYS, and what its result is named by
	Body       []byte            //
	Tag        string            // TAGS; "" for the configured one
	Properties map[string]string // user properties, for example TraceProperty
}
