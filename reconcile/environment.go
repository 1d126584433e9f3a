package reconcile

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/seckill/reconciler/reservation"
)

// Nodes is the Redis side of the check environment: what the servers are set
// to, each read once.
type Nodes interface {
	Nodes(ctx context.Context) []RedisNode
}

// Server is the PostgreSQL side of the check environment.
type Server interface {
	Server(ctx context.Context) (PostgresServer, error)
}

// RedisNode is how one Redis server that takes writes is set up (spec §6).
type RedisNode struct {
	Addr string
	// Unread says why a group of settings could not be read, by name: "INFO",
	// "ACL WHOAMI". The fields that it would fill mean nothing then.
	Unread map[string]string

	// From INFO.
	Role           string // master or slave
	Replicas       int64  // connected ones
	MinReplicas    bool   // min-replicas-to-write is set, so that a cut-off master refuses writes
	EvictionPolicy string // maxmemory-policy
	MaxMemory      int64  // bytes; 0: no limit
	AppendOnly     bool   // appendonly yes
	LastAOFWriteOK bool

	// From ACL WHOAMI and ACL GETUSER.
	User      string
	AllRights bool // on every key, with every command
}

// PostgresServer is how PostgreSQL is set up for the daemon's login.
type PostgresServer struct {
	InRecovery        bool
	SynchronousCommit string
	Fsync             string
	FullPageWrites    string
}

// EnvironmentIssue is a setting that a promise rests on and that is not what
// it has to be, or that could not be read.
type EnvironmentIssue struct {
	Subject string // the server and the setting, such as "redis 127.0.0.1:6379 maxmemory-policy"
	Message string
	Remedy  string
	Unread  bool // it could not be read
	Source  string
	Value   any
}

// JudgeRedis says what of a Redis server's settings puts stock at risk.
func JudgeRedis(n RedisNode) []EnvironmentIssue {
	j := judging{source: SourceRedis, server: "redis " + n.Addr}
	for _, group := range slices.Sorted(maps.Keys(n.Unread)) {
		j.unread(group, n.Unread[group])
	}
	if _, unread := n.Unread["INFO"]; !unread {
		j.redisInfo(n)
	}
	if n.User == "default" && n.AllRights {
		j.issue("acl-user", n.User, "the daemon logs in as the user default, which may run every command on every key",
			"make a user of its own with the rights that docs/operations.md lists, and set redis.username")
	}
	return j.issues
}

func (j *judging) redisInfo(n RedisNode) {
	if n.Role != "master" {
		j.issue("role", n.Role, "it is a replica: what it shows may be old, and it takes no writes",
			"name the master in redis.addrs, or the sentinels and redis.sentinel.master")
		return
	}
	if n.EvictionPolicy != "noeviction" {
		j.issue("maxmemory-policy", n.EvictionPolicy, "when memory is full it removes keys: reservations and stock are lost without an error",
			"CONFIG SET maxmemory-policy noeviction, and the same in redis.conf")
	}
	if n.MaxMemory == 0 {
		j.issue("maxmemory", n.MaxMemory, "memory has no limit: the system ends the server when it runs out, instead of one refused write",
			"CONFIG SET maxmemory to about 70 % of the machine's memory, and the same in redis.conf")
	}
	switch {
	case n.Replicas == 0:
		j.issue("replicas", n.Replicas, "no replica is connected: what this server holds is lost with it",
			"add a replica in another failure domain")
	case !n.MinReplicas:
		j.issue("min-replicas-to-write", 0, "a master that is cut off from its replicas goes on taking writes, which a failover then undoes",
			"CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 2, and the same in redis.conf")
	}
	switch {
	case !n.AppendOnly:
		j.issue("appendonly", "no", "the append-only file is off: a restart goes back to the last snapshot, or to nothing",
			"CONFIG SET appendonly yes (appendfsync everysec), and the same in redis.conf")
	case !n.LastAOFWriteOK:
		j.issue("aof-write", "err", "the last write of the append-only file failed", "see the server's log: the disk is full or broken")
	}
}

// JudgePostgres says what of PostgreSQL's settings puts claims at risk.
func JudgePostgres(p PostgresServer) []EnvironmentIssue {
	j := judging{source: SourcePostgres, server: "postgres"}
	if p.InRecovery {
		j.issue("recovery", true, "it is a standby: it takes no claims, and what it shows may be old", "name the primary in postgres.url")
	}
	if p.SynchronousCommit == "off" {
		j.issue("synchronous_commit", p.SynchronousCommit, "orders that were confirmed are lost when the server crashes",
			"ALTER SYSTEM SET synchronous_commit = on, and look for ALTER ROLE or ALTER DATABASE that lower it")
	}
	if p.Fsync == "off" {
		j.issue("fsync", p.Fsync, "a crash of the machine may destroy the whole database", "set fsync = on in postgresql.conf and restart")
	}
	if p.FullPageWrites == "off" {
		j.issue("full_page_writes", p.FullPageWrites, "a crash of the machine may leave torn pages", "set full_page_writes = on in postgresql.conf")
	}
	return j.issues
}

// judging gathers the issues of one server.
type judging struct {
	source, server string
	issues         []EnvironmentIssue
}

func (j *judging) issue(setting string, value any, message, remedy string) {
	j.issues = append(j.issues, EnvironmentIssue{
		Subject: j.server + " " + setting, Message: j.server + ": " + message, Remedy: remedy, Source: j.source, Value: value,
	})
}

// unread: what may not be read is said, and never passed over in silence.
func (j *judging) unread(group, why string) {
	j.issues = append(j.issues, EnvironmentIssue{
		Subject: j.server + " " + group, Message: fmt.Sprintf("%s: %s could not be read, so that its settings are not known: %s", j.server, group, oneLine(why)),
		Remedy: "give the daemon's login the right to run it, or see that the server answers", Unread: true, Source: j.source,
	})
}

// Environment reads and judges both sides. It never fails: what cannot be read
// is an issue. A nil side is not looked at.
func Environment(ctx context.Context, nodes Nodes, server Server) []EnvironmentIssue {
	var issues []EnvironmentIssue
	if nodes != nil {
		for _, n := range nodes.Nodes(ctx) {
			issues = append(issues, JudgeRedis(n)...)
		}
	}
	if server != nil {
		p, err := server.Server(ctx)
		if err != nil {
			j := judging{source: SourcePostgres, server: "postgres"}
			j.unread("settings", err.Error())
			return append(issues, j.issues...)
		}
		issues = append(issues, JudgePostgres(p)...)
	}
	return issues
}

// environment makes the check of that name: once a run, and one round does.
func (r *run) environment(ctx context.Context) {
	at := slices.IndexFunc(r.checks, func(c Check) bool { return c.ID == CheckEnvironment })
	if at < 0 {
		return
	}
	if !r.options.Deep && !slices.Contains(r.options.Checks, CheckEnvironment) {
		r.report.notMade(CheckEnvironment, "made by --deep, or when --checks names it")
		return
	}
	for _, i := range Environment(ctx, r.source.Nodes, r.source.Server) {
		f := r.finding(subject{CheckEnvironment, reservation.Scope{}}, &standing{rounds: 1, last: contradiction{
			check: CheckEnvironment, subject: i.Subject, cause: i.Subject, message: i.Message,
		}})
		side := map[string]any{"value": i.Value}
		if i.Unread {
			side = map[string]any{"unread": true}
		}
		if i.Source == SourceRedis {
			f.Evidence.Redis = side
		} else {
			f.Evidence.Postgres = side
		}
		f.Repair.Detail = i.Remedy
		r.report.Findings = append(r.report.Findings, f)
	}
}

// sayWhatWasNotMade takes checks out of the summary that had nothing to look
// at: zero findings of a check that was not made would be a lie.
func (r *run) sayWhatWasNotMade() {
	if !slices.ContainsFunc(r.checks, func(c Check) bool { return c.ID == CheckSoldMismatch }) {
		return
	}
	for _, s := range r.latest {
		if s.soldCompared {
			return
		}
	}
	r.report.notMade(CheckSoldMismatch, notMadeSold)
}

// notMade says that a check was not made, and why.
func (r *Report) notMade(check, why string) {
	delete(r.Summary, check)
	if r.NotMade == nil {
		r.NotMade = map[string]string{}
	}
	r.NotMade[check] = why
}
