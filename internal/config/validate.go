package config

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/seckill/reconciler/internal/schedule"
	"github.com/seckill/reconciler/reservation"
)

// minInterval is the shortest pause between passes and checks: below it a
// worker would do nothing but start.
const minInterval = 10 * time.Millisecond

// minLeaseTTL leaves room for a few heartbeats.
const minLeaseTTL = 100 * time.Millisecond

// checker collects what is wrong with a Config.
type checker struct{ errs []error }

func (k *checker) failf(path, format string, args ...any) {
	k.errs = append(k.errs, fmt.Errorf("%s: "+format, append([]any{path}, args...)...))
}

// Validate reports every setting that is out of its range and every pair that
// contradicts each other, all at once. Its messages name the path and contain
// no secret.
func (c Config) Validate() error {
	k := &checker{}
	k.words(c)
	k.policy(c.Policy())
	k.redis(c.Redis)
	k.postgres(c.Postgres)
	k.rocketmq(c.RocketMQ)
	k.workers(c)
	k.purge(c)
	k.transfer(c.Transfer)
	k.rebalance(c.Rebalance)
	k.reconcile(c.Reconcile)
	k.webhook(c.Notify.Webhook)
	k.admin(c.Admin)
	if c.Lease.TTL < minLeaseTTL {
		k.failf("lease.ttl", "%s is below %s", FormatDuration(c.Lease.TTL), minLeaseTTL)
	}
	k.positive("run.stop_timeout", c.Run.StopTimeout)
	k.tracing(c.Tracing)
	return errors.Join(k.errs...)
}

// words checks the settings that are one of a few words.
func (k *checker) words(c Config) {
	v := reflect.ValueOf(c)
	for _, f := range fields {
		if len(f.oneOf) == 0 {
			continue
		}
		if got := v.FieldByIndex(f.index).String(); !slices.Contains(f.oneOf, got) {
			k.failf(f.path, "%q is not one of %s", got, strings.Join(f.oneOf, ", "))
		}
	}
}

// policy checks what words does not.
func (k *checker) policy(p reservation.Policy) {
	d := reservation.DefaultPolicy()
	p.LostMessage, p.DeadLetter, p.Confirm, p.Unsent = d.LostMessage, d.DeadLetter, d.Confirm, d.Unsent
	if err := p.Validate(); err != nil {
		k.errs = append(k.errs, err)
	}
}

func (k *checker) redis(r Redis) {
	k.hostPorts("redis.addrs", r.Addrs)
	k.tls("redis.tls", r.TLS)
	k.positive("redis.dial_timeout", r.DialTimeout)
	k.positive("redis.command_timeout", r.CommandTimeout)
	k.atLeast("redis.pool_size", r.PoolSize, 1)
	k.atLeast("redis.wait_replicas", r.WaitReplicas, 0)
	k.positive("redis.wait_timeout", r.WaitTimeout)
	switch s := r.Sentinel; {
	case r.Mode == RedisSentinel && s.Master == "":
		k.failf("redis.sentinel.master", "is not set, but redis.mode is sentinel: name the master set")
	case s.Master != "" && (r.Mode == RedisStandalone || r.Mode == RedisCluster):
		k.failf("redis.sentinel.master", "is set, but redis.mode is %s: remove one of them", r.Mode)
	case s.Master == "" && (s.Username != "" || s.Password != ""):
		k.failf("redis.sentinel.master", "is not set, but a user or password of the sentinels is")
	}
	if r.Mode == RedisStandalone && len(r.Addrs) > 1 {
		k.failf("redis.addrs", "names %d servers, but redis.mode is standalone: name one, or choose another mode", len(r.Addrs))
	}
	if r.Username != "" && r.Password == "" {
		k.failf("redis.password", "is not set, but redis.username is")
	}
}

func (k *checker) tracing(t Tracing) {
	if u, err := url.Parse(t.Endpoint); t.Endpoint != "" && (err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https") {
		k.failf("tracing.endpoint", "want http://host:port or https://host:port")
	}
	if t.Endpoint == "" && t.Authorization != "" {
		k.failf("tracing.authorization", "is set, but tracing.endpoint is not")
	}
	if t.Sample < 0 || t.Sample > 1 {
		k.failf("tracing.sample", "%g is not from 0 to 1", t.Sample)
	}
	k.positive("tracing.timeout", t.Timeout)
}

func (k *checker) tls(path string, t TLS) {
	if !t.Enabled && (t.CAFile != "" || t.CertFile != "" || t.KeyFile != "" || t.ServerName != "") {
		k.failf(path+".enabled", "is false, but other settings of %s are given", path)
	}
	if (t.CertFile == "") != (t.KeyFile == "") {
		k.failf(path+".cert_file", "and %s.key_file belong together: give both or none", path)
	}
}

func (k *checker) postgres(p Postgres) {
	if p.URL == "" {
		k.failf("postgres.url", "is empty")
	} else {
		k.connString("postgres.url", p.URL)
	}
	if p.MigrateURL != "" {
		k.connString("postgres.migrate_url", p.MigrateURL)
	}
	k.atLeast("postgres.max_conns", p.MaxConns, 2)
	if p.MaxConns > math.MaxInt32 {
		k.failf("postgres.max_conns", "%d is too many", p.MaxConns)
	}
	k.positive("postgres.connect_timeout", p.ConnectTimeout)
	k.positive("postgres.statement_timeout", p.StatementTimeout)
}

// connString checks what can be checked without connecting. The causes are not
// passed on as they are, since they may quote the string.
func (k *checker) connString(path, text string) {
	if strings.Contains(text, "://") {
		if u, err := url.Parse(text); err != nil || (u.Scheme != "postgres" && u.Scheme != "postgresql") {
			k.failf(path, "is not a URL of the form postgres://user:password@host:port/database")
			return
		}
	}
	if _, err := pgconn.ParseConfig(text); err != nil {
		cause := errors.Unwrap(err)
		if cause == nil {
			k.failf(path, "is not a connection string")
			return
		}
		k.failf(path, "is not a usable connection string: %s", redact(cause.Error(), text))
	}
}

// rocketmqName is what the brokers accept as a topic or group name.
var rocketmqName = regexp.MustCompile(`^[%|a-zA-Z0-9_-]{1,127}$`)

func (k *checker) rocketmq(r RocketMQ) {
	k.hostPorts("rocketmq.name_servers", r.NameServers)
	for _, n := range []struct{ path, name string }{
		{"rocketmq.topic", r.Topic},
		{"rocketmq.consumer_group", r.ConsumerGroup},
	} {
		if !rocketmqName.MatchString(n.name) {
			k.failf(n.path, "%q is not a name: 1 to 127 of letters, digits, _, -, %% and |", n.name)
		}
	}
	if strings.Contains(r.Tag, "|") || strings.TrimSpace(r.Tag) != r.Tag {
		k.failf("rocketmq.tag", "%q is not one tag", r.Tag)
	}
	if (r.AccessKey == "") != (r.SecretKey == "") {
		k.failf("rocketmq.access_key", "and rocketmq.secret_key belong together: give both or none")
	}
	k.tls("rocketmq.tls", r.TLS)
	k.positive("rocketmq.dial_timeout", r.DialTimeout)
	k.positive("rocketmq.request_timeout", r.RequestTimeout)
	k.positive("rocketmq.send_timeout", r.SendTimeout)
	k.positive("rocketmq.sweep_margin", r.SweepMargin)
	if !(r.SendRate > 0) || math.IsInf(r.SendRate, 0) {
		k.failf("rocketmq.send_rate", "%v is not above 0", r.SendRate)
	}
	k.atLeast("rocketmq.send_concurrency", r.SendConcurrency, 1)
	if r.MaxSweepMessages < 1 {
		k.failf("rocketmq.max_sweep_messages", "%d is below 1", r.MaxSweepMessages)
	}
}

func (k *checker) workers(c Config) {
	k.pass("scanner", c.Scanner.Pass)
	k.pass("fencer", c.Fencer.Pass)
	k.pass("compensator", c.Compensator.Pass)
	m := c.Fencer.MaxRelease
	if !(m.Percent >= 0 && m.Percent <= 100) {
		k.failf("fencer.max_release.percent", "%v is not between 0 and 100", m.Percent)
	}
	if m.Min < 0 {
		k.failf("fencer.max_release.min", "%d is negative", m.Min)
	}
	k.positive("fencer.max_release.window", m.Window)
}

func (k *checker) transfer(t Transfer) {
	k.interval("transfer.every", t.Every)
	k.positive("transfer.pass_limit", t.PassLimit)
	k.positive("transfer.stuck_after", t.StuckAfter)
}

func (k *checker) rebalance(r Rebalance) {
	k.interval("rebalance.every", r.Every)
	if r.Keep < 0 {
		k.failf("rebalance.keep", "%d is below 0", r.Keep)
	}
	if r.SharePercent < 1 || r.SharePercent > 100 {
		k.failf("rebalance.share_percent", "%d is not from 1 to 100", r.SharePercent)
	}
	if r.MinUnits < 1 {
		k.failf("rebalance.min_units", "%d is below 1", r.MinUnits)
	}
	if r.MaxUnits < r.MinUnits {
		k.failf("rebalance.max_units", "%d is below rebalance.min_units %d", r.MaxUnits, r.MinUnits)
	}
	if r.CoolDown < 0 {
		k.failf("rebalance.cool_down", "%s is below 0", FormatDuration(r.CoolDown))
	}
}

func (k *checker) reconcile(r Reconcile) {
	k.positive("reconcile.settle", r.Settle)
	k.atLeast("reconcile.batch", r.Batch, 1)
	k.atLeast("reconcile.rate", r.Rate, 0)
	k.schedule("reconcile.quick", r.Quick)
	k.positive("reconcile.quick_limit", r.QuickLimit)
	k.schedule("reconcile.deep", r.Deep)
	k.positive("reconcile.deep_limit", r.DeepLimit)
	k.atLeast("reconcile.max_repairs", r.MaxRepairs, 1)
}

func (k *checker) schedule(path, spec string) {
	if spec == "" {
		return
	}
	if _, err := schedule.ParseSchedule(spec); err != nil {
		k.failf(path, "%w", err)
	}
}

// minSecret is the least length of a key that signs.
const minSecret = 16

func (k *checker) webhook(w Webhook) {
	k.positive("notify.webhook.timeout", w.Timeout)
	k.interval("notify.webhook.every", w.Every)
	switch u, err := url.Parse(w.URL); {
	case w.URL == "" && w.Secret == "":
	case w.URL == "":
		k.failf("notify.webhook.url", "is not set, but notify.webhook.secret is")
	case err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "":
		k.failf("notify.webhook.url", "is not a URL of the form https://host/path")
	case len(w.Secret) < minSecret:
		k.failf("notify.webhook.secret", "is shorter than %d characters: the receiver verifies with it who sends", minSecret)
	}
}

// minClaimAge is what seckill.purge_claims itself demands.
const minClaimAge = time.Hour

func (k *checker) purge(c Config) {
	for _, age := range []struct {
		path string
		d    time.Duration
	}{
		{"reconcile.retention", c.Reconcile.Retention},
		{"purge.claims_after", c.Purge.ClaimsAfter},
		{"purge.tasks_after", c.Purge.TasksAfter},
		{"purge.transfers_after", c.Purge.TransfersAfter},
		{"purge.jobs_after", c.Purge.JobsAfter},
		{"purge.samples_after", c.Purge.SamplesAfter},
	} {
		if age.d < 0 {
			k.failf(age.path, "%s is negative", FormatDuration(age.d))
		}
	}
	if d := c.Purge.ClaimsAfter; d > 0 && d <= minClaimAge {
		k.failf("purge.claims_after", "%s is not above %s: a message may be later than its claim", FormatDuration(d), FormatDuration(minClaimAge))
	}
	k.schedule("purge.schedule", c.Purge.Schedule)
	k.atLeast("purge.batch", c.Purge.Batch, 1)
}

func (k *checker) pass(worker string, p Pass) {
	k.interval(worker+".every", p.Every)
	k.atLeast(worker+".batch", p.Batch, 1)
	k.positive(worker+".pass_limit", p.PassLimit)
	if p.PassItems < p.Batch {
		k.failf(worker+".pass_items", "%d is below %s.batch %d", p.PassItems, worker, p.Batch)
	}
}

func (k *checker) admin(a Admin) {
	k.positive("admin.check_timeout", a.CheckTimeout)
	k.positive("admin.session_time", a.SessionTime)
	k.tokenHash("admin.read_token_sha256", a.ReadTokenSHA256)
	k.tokenHash("admin.change_token_sha256", a.ChangeTokenSHA256)
	if a.ReadTokenSHA256 != "" && strings.EqualFold(a.ReadTokenSHA256, a.ChangeTokenSHA256) {
		k.failf("admin.change_token_sha256", "is the same as admin.read_token_sha256: who may read could change everything")
	}
	if (a.TLSCertFile == "") != (a.TLSKeyFile == "") {
		k.failf("admin.tls_cert_file", "and admin.tls_key_file belong together: give both or none")
	}
	for _, h := range a.AllowedHosts {
		if strings.ContainsAny(h, ":/ ") {
			k.failf("admin.allowed_hosts", "%q is not a host name without a port", h)
		}
	}
	if a.Listen == "" {
		return
	}
	host, _, err := splitHostPort(a.Listen)
	if err != nil {
		k.failf("admin.listen", "%q is not host:port: %w", a.Listen, err)
		return
	}
	if !a.AllowRemote && !isLoopback(host) {
		k.failf("admin.listen", "%s can be reached from other machines, and metrics need no token: "+
			"use a loopback address such as 127.0.0.1, or set admin.allow_remote", a.Listen)
	}
	if !isLoopback(host) && a.TLSCertFile == "" && a.ReadTokenSHA256+a.ChangeTokenSHA256 != "" {
		k.failf("admin.tls_cert_file", "is needed, as tokens would go over the network in the clear: "+
			"give a certificate, or listen on a loopback address such as 127.0.0.1")
	}
}

var sha256Hex = regexp.MustCompile(`^[0-9a-fA-F]{64}$`)

func (k *checker) tokenHash(path, text string) {
	if text != "" && !sha256Hex.MatchString(text) {
		k.failf(path, "want the 64 hexadecimal digits that `reconciler config token` prints, and not the token itself")
	}
}

func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

func (k *checker) hostPorts(path string, addrs []string) {
	if len(addrs) == 0 {
		k.failf(path, "is empty: name at least one host:port")
	}
	for _, addr := range addrs {
		host, port, err := splitHostPort(addr)
		if err == nil && host == "" {
			err = errors.New("host missing")
		}
		if err == nil && port == 0 {
			err = errors.New("port 0")
		}
		if err != nil {
			k.failf(path, "%q is not host:port: %w", addr, err)
		}
	}
}

func splitHostPort(addr string) (string, uint16, error) {
	host, text, err := net.SplitHostPort(addr)
	if ae, ok := errors.AsType[*net.AddrError](err); ok {
		return "", 0, errors.New(ae.Err)
	}
	if err != nil {
		return "", 0, err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("port %q is not a number below 65536", text)
	}
	return host, uint16(port), nil
}

func (k *checker) positive(path string, d time.Duration) {
	if d <= 0 {
		k.failf(path, "%s is not above 0", FormatDuration(d))
	}
}

func (k *checker) interval(path string, d time.Duration) {
	if d < minInterval {
		k.failf(path, "%s is below %s", FormatDuration(d), minInterval)
	}
}

func (k *checker) atLeast(path string, n, least int) {
	if n < least {
		k.failf(path, "%d is below %d", n, least)
	}
}
