package devstack

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/seckill/reconciler/internal/admin"
)

// Files of a stack's directory.
const (
	// EnvFile is a shell file that exports the stack's addresses.
	EnvFile = "env"
	// ConfigFile is the same as a config.yaml.
	ConfigFile = "config.yaml"
)

// Topic and consumer group of the environment file, interface §2's defaults.
const (
	Topic         = "seckill-order"
	ConsumerGroup = "seckill-order-consumer"
	// TopicQueues is the number of queues on each broker.
	TopicQueues = 8
)

// setting is one setting of the daemon, as environment variable and as path of
// the configuration file. An empty path is not a setting of the daemon.
type setting struct {
	env, path string
	values    []string
	list      bool
}

// WriteEnvironment writes [EnvFile] and [ConfigFile] into the stack's
// directory. binary is the path that RECONCILER gets.
func (s *Stack) WriteEnvironment(binary string) error {
	var env, yaml strings.Builder
	env.WriteString("# Written by make up; use it with: . " + filepath.Join(s.dir, EnvFile) + "\n")
	yaml.WriteString("# Written by make up for the services that it started.\n")
	section := ""
	token, hashed := admin.NewToken() // of the console: a new one each time
	for _, set := range append(s.settings(), setting{
		env: "RECONCILER_ADMIN_CHANGE_TOKEN_SHA256", path: "admin.change_token_sha256", values: []string{hashed.String()},
	}) {
		fmt.Fprintf(&env, "export %s=%s\n", set.env, shellQuote(strings.Join(set.values, ",")))
		group, key, nested := strings.Cut(set.path, ".")
		if nested && group != section {
			section = group
			fmt.Fprintf(&yaml, "%s:\n", group)
		}
		indent := "  "
		if !nested {
			key, indent = group, ""
		}
		if set.list {
			fmt.Fprintf(&yaml, "%s%s: [%s]\n", indent, key, `"`+strings.Join(set.values, `", "`)+`"`)
		} else {
			fmt.Fprintf(&yaml, "%s%s: %q\n", indent, key, set.values[0])
		}
	}
	for _, tool := range append(s.tools(binary), setting{env: "CONSOLE_TOKEN", values: []string{token}}) {
		fmt.Fprintf(&env, "export %s=%s\n", tool.env, shellQuote(tool.values[0]))
	}
	if err := writeFile(filepath.Join(s.dir, ConfigFile), []byte(yaml.String())); err != nil {
		return err
	}
	return writeFile(filepath.Join(s.dir, EnvFile), []byte(env.String()))
}

// settings are in the order of the sections of the configuration file.
func (s *Stack) settings() []setting {
	var out []setting
	one := func(env, path, value string) {
		out = append(out, setting{env: env, path: path, values: []string{value}})
	}
	one("RECONCILER_MODE", "mode", "act")
	if addrs := s.redisAddrs(); len(addrs) > 0 {
		out = append(out, setting{env: "RECONCILER_REDIS_ADDRS", path: "redis.addrs", values: addrs, list: true})
	}
	if s.Postgres() != nil {
		one("RECONCILER_POSTGRES_URL", "postgres.url", s.PostgresURL(Database, daemonLogin))
		one("RECONCILER_POSTGRES_MIGRATE_URL", "postgres.migrate_url", s.PostgresURL(Database, superuser))
	}
	if s.NameServer() != nil {
		out = append(out, setting{env: "RECONCILER_ROCKETMQ_NAME_SERVERS", path: "rocketmq.name_servers", values: []string{s.NameServer().Addr()}, list: true})
		one("RECONCILER_ROCKETMQ_TOPIC", "rocketmq.topic", Topic)
		one("RECONCILER_ROCKETMQ_CONSUMER_GROUP", "rocketmq.consumer_group", ConsumerGroup)
	}
	return out
}

// redisAddrs: a cluster, if there is one, is what the daemon shall use.
func (s *Stack) redisAddrs() []string {
	if addrs := s.Cluster().Addrs(); len(addrs) > 0 {
		return addrs
	}
	if s.Redis() != nil {
		return []string{s.Redis().Addr()}
	}
	return nil
}

// tools are commands that reach the services.
func (s *Stack) tools(binary string) []setting {
	var out []setting
	add := func(env, value string) { out = append(out, setting{env: env, values: []string{value}}) }
	if nodes := s.Cluster(); len(nodes) > 0 {
		add("REDIS_CLI", fmt.Sprintf("%s -c -h 127.0.0.1 -p %d", s.install.redisCLI, nodes[0].Port()))
	} else if s.Redis() != nil {
		add("REDIS_CLI", fmt.Sprintf("%s -h 127.0.0.1 -p %d", s.install.redisCLI, s.Redis().Port()))
	}
	if s.Postgres() != nil {
		add("PSQL", fmt.Sprintf("%s postgres://%s@%s/%s", s.install.psql, superuser, s.Postgres().Addr(), Database))
		add("SHOP_POSTGRES_URL", s.PostgresURL(Database, consumerLogin))
	}
	if binary != "" {
		add("RECONCILER", binary)
	}
	return out
}

// shellQuote makes one shell word of any text.
func shellQuote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }
