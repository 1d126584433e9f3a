package redisstore

import (
	"context"
	"errors"
	"fmt"
	"regexp"

	"github.com/redis/go-redis/extra/redisotel/v9"
	"github.com/redis/go-redis/v9"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/lua"
)

// ErrUnreachable says that no Redis server could be asked. Nothing is known of
// any reservation then.
var ErrUnreachable = errors.New("redis cannot be reached")

// Clients are the daemon's connection pools.
type Clients struct {
	// Mutating runs scripts that change something. It never repeats a command
	// whose reply was lost: a repeated script is a second execution.
	Mutating redis.UniversalClient
	// Reading runs pages, look-ups and notices.
	Reading redis.UniversalClient
}

// Open connects to Redis. Mode auto asks the first server that answers how it
// is arranged; then a server that answers is required, else servers may come
// later.
func Open(ctx context.Context, c config.Redis) (*Clients, error) {
	options, err := universalOptions(c)
	if err != nil {
		return nil, err
	}
	mode := c.Mode
	if mode == config.RedisAuto {
		if mode, err = detectMode(ctx, c, options); err != nil {
			return nil, err
		}
	}
	return &Clients{Mutating: newClient(mode, options), Reading: newClient(mode, options)}, nil
}

// Trace makes spans of commands, without their arguments: keys name users.
func (c *Clients) Trace() error {
	return errors.Join(
		redisotel.InstrumentTracing(c.Mutating, redisotel.WithDBStatement(false), redisotel.WithCallerEnabled(false)),
		redisotel.InstrumentTracing(c.Reading, redisotel.WithDBStatement(false), redisotel.WithCallerEnabled(false)),
	)
}

// Close closes both pools.
func (c *Clients) Close() error {
	return errors.Join(c.Mutating.Close(), c.Reading.Close())
}

func newClient(mode string, o *redis.UniversalOptions) redis.UniversalClient {
	switch mode {
	case config.RedisCluster:
		return redis.NewClusterClient(o.Cluster())
	case config.RedisSentinel:
		return redis.NewFailoverClient(o.Failover())
	default:
		return redis.NewClient(o.Simple())
	}
}

func universalOptions(c config.Redis) (*redis.UniversalOptions, error) {
	o := lua.ClientOptions(&redis.UniversalOptions{
		Addrs:    c.Addrs,
		Username: c.Username, Password: c.Password,
		MasterName: c.Sentinel.Master, SentinelUsername: c.Sentinel.Username, SentinelPassword: c.Sentinel.Password,
		DialTimeout: c.DialTimeout, ReadTimeout: c.CommandTimeout, WriteTimeout: c.CommandTimeout,
		PoolSize: c.PoolSize,
	})
	var err error
	if o.TLSConfig, err = c.TLS.Client("redis.tls"); err != nil {
		return nil, err
	}
	return o, nil
}

var redisMode = regexp.MustCompile(`(?m)^redis_mode:(\w+)`)

// detectMode asks the servers in turn: INFO names standalone, sentinel or cluster.
func detectMode(ctx context.Context, c config.Redis, o *redis.UniversalOptions) (string, error) {
	if c.Sentinel.Master != "" {
		return config.RedisSentinel, nil
	}
	var errs []error
	for _, addr := range c.Addrs {
		probe := *o
		probe.Addrs = []string{addr}
		client := redis.NewClient(probe.Simple())
		askCtx, cancel := context.WithTimeout(ctx, c.DialTimeout+c.CommandTimeout)
		info, err := client.Info(askCtx, "server").Result()
		cancel()
		_ = client.Close() // nothing is in flight
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", addr, err))
			continue
		}
		switch m := redisMode.FindStringSubmatch(info); {
		case m == nil:
			errs = append(errs, fmt.Errorf("%s: INFO names no redis_mode; set redis.mode", addr))
		case m[1] == config.RedisSentinel:
			return "", fmt.Errorf("redis.addrs: %s is a sentinel: set redis.sentinel.master to the name of its master set", addr)
		default:
			return m[1], nil
		}
	}
	return "", fmt.Errorf("%w: %w", ErrUnreachable, errors.Join(errs...))
}

// Ping asks every master for a sign of life.
func (c *Clients) Ping(ctx context.Context) error {
	ping := func(ctx context.Context, node *redis.Client) error { return node.Ping(ctx).Err() }
	var err error
	switch client := c.Reading.(type) {
	case *redis.ClusterClient:
		err = client.ForEachMaster(ctx, ping)
	default:
		err = client.Ping(ctx).Err()
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnreachable, err)
	}
	return nil
}
