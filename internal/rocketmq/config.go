package rocketmq

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"time"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

// Protocol is how the order consumer takes its messages.
type Protocol string

// The consumer protocols. With POP a passed offset does not mean that the
// message was acknowledged, so nothing can be concluded from it.
const (
	ProtocolRemoting Protocol = "remoting"
	ProtocolPOP      Protocol = "pop"
)

// Config says where RocketMQ is and how to treat it. Zero values of the tuning
// fields mean their defaults.
type Config struct {
	NameServers      []string // host:port
	Topic            string   // of order messages
	ConsumerGroup    string   // of the order consumer
	Tag              string   // TAGS of order messages; "" for none
	ConsumerProtocol Protocol // default remoting

	AccessKey string // with SecretKey: requests are signed (HMAC-SHA1) for the brokers' ACL
	SecretKey string
	// TLS, if not nil, secures all connections. Evidence verifies servers as it
	// says; the producer of the client library encrypts but verifies nobody.
	TLS *tls.Config

	DialTimeout     time.Duration // default 1s
	RequestTimeout  time.Duration // of one evidence request; default 3s
	SendTimeout     time.Duration // of one send; beyond it the outcome is unknown; default 3s
	SendRate        float64       // sends per second; default 5000
	SendConcurrency int           // sends under way at once; default 64

	// SweepMargin is how long before reserved_at_ms a sweep begins, because the
	// clocks of Redis and the brokers differ; default 5m.
	SweepMargin time.Duration
	// MaxSweepMessages bounds the memory of the sweep: fingerprints kept, 8 bytes
	// each; default 8,000,000. A window that does not fit is UNKNOWN.
	MaxSweepMessages int64
}

// Defaults of [Config].
const (
	DefaultDialTimeout      = time.Second
	DefaultRequestTimeout   = 3 * time.Second
	DefaultSendTimeout      = 3 * time.Second
	DefaultSendRate         = 5000
	DefaultSendConcurrency  = 64
	DefaultSweepMargin      = 5 * time.Minute
	DefaultMaxSweepMessages = 8_000_000
)

// namePattern is what RocketMQ allows in topic and group names.
var namePattern = regexp.MustCompile(`^[%|a-zA-Z0-9_-]{1,127}$`)

// withDefaults fills in the defaults and reports everything that is wrong, each
// by the name of its setting.
func (c Config) withDefaults() (Config, error) {
	c.NameServers = slices.Clone(c.NameServers)
	c.ConsumerProtocol = orDefault(c.ConsumerProtocol, ProtocolRemoting)
	c.DialTimeout = orDefault(c.DialTimeout, DefaultDialTimeout)
	c.RequestTimeout = orDefault(c.RequestTimeout, DefaultRequestTimeout)
	c.SendTimeout = orDefault(c.SendTimeout, DefaultSendTimeout)
	c.SendRate = orDefault(c.SendRate, DefaultSendRate)
	c.SendConcurrency = orDefault(c.SendConcurrency, DefaultSendConcurrency)
	c.SweepMargin = orDefault(c.SweepMargin, DefaultSweepMargin)
	c.MaxSweepMessages = orDefault(c.MaxSweepMessages, DefaultMaxSweepMessages)

	var errs []error
	wrong := func(setting, format string, args ...any) {
		errs = append(errs, fmt.Errorf("rocketmq.%s: %s", setting, fmt.Sprintf(format, args...)))
	}
	if len(c.NameServers) == 0 {
		wrong("name_servers", "at least one host:port is needed")
	}
	for _, addr := range c.NameServers {
		if _, port, err := net.SplitHostPort(addr); err != nil || port == "" {
			wrong("name_servers", "%q is not host:port", addr)
		}
	}
	if !namePattern.MatchString(c.Topic) {
		wrong("topic", "%q is not a topic name", c.Topic)
	}
	if !namePattern.MatchString(c.ConsumerGroup) {
		wrong("consumer_group", "%q is not a group name", c.ConsumerGroup)
	}
	if c.ConsumerProtocol != ProtocolRemoting && c.ConsumerProtocol != ProtocolPOP {
		wrong("consumer_protocol", "%q is neither remoting nor pop", c.ConsumerProtocol)
	}
	if (c.AccessKey == "") != (c.SecretKey == "") {
		wrong("access_key", "access_key and secret_key are needed together")
	}
	if min(c.DialTimeout, c.RequestTimeout, c.SendTimeout, c.SweepMargin) < 0 {
		wrong("request_timeout", "time-outs and the sweep margin may not be negative")
	}
	if c.SendRate < 0 || c.SendConcurrency < 0 || c.MaxSweepMessages < 0 {
		wrong("send_rate", "rates and limits may not be negative")
	}
	return c, errors.Join(errs...)
}

// Validate reports everything that is wrong with the configuration.
func (c Config) Validate() error {
	_, err := c.withDefaults()
	return err
}

func (c Config) peerOptions() remoting.Options {
	return remoting.Options{
		DialTimeout: c.DialTimeout, CallTimeout: c.RequestTimeout,
		TLS: c.TLS, AccessKey: c.AccessKey, SecretKey: c.SecretKey,
	}
}

func (c Config) retryTopic() string { return "%RETRY%" + c.ConsumerGroup }
func (c Config) deadTopic() string  { return "%DLQ%" + c.ConsumerGroup }

// scheduleTopic holds the messages of all groups that wait for a later delivery.
const scheduleTopic = "SCHEDULE_TOPIC_XXXX"

func orDefault[T comparable](value, fallback T) T {
	var zero T
	if value == zero {
		return fallback
	}
	return value
}
