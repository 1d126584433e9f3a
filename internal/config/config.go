// Package config reads the settings of the reconciler: defaults, then a YAML
// file, then the environment, then the command line, each overriding the one
// before (interface §2). It is the only reader of config.yaml and of
// RECONCILER_* variables.
//
// A setting has one path, such as scanner.send_grace, which is its place in
// the file and, in capitals with RECONCILER_ before it, its environment
// variable. A name that is not a setting, a value of the wrong kind and
// settings that contradict each other are errors that name the path and where
// the value came from. No error and no listing shows a secret.
//
// The comments on the fields below are the documentation of config.yaml at the
// root of the repository, which is generated from them:
//
//	go test ./internal/config -run TestConfigFile -update
package config

import (
	"time"

	"github.com/seckill/reconciler/reservation"
)

// The values of mode.
const (
	ModeObserve = "observe" // decide, count and report; change nothing
	ModeAct     = "act"     // drive reservations to their end
)

// The values of redis.mode.
const (
	RedisAuto       = "auto"
	RedisStandalone = "standalone"
	RedisSentinel   = "sentinel"
	RedisCluster    = "cluster"
)

// The values of rocketmq.consumer_protocol.
const (
	ProtocolRemoting = "remoting"
	ProtocolPop      = "pop"
)

// The values of transfer.fill_deficit.
const (
	FillOff  = "off"
	FillAuto = "auto"
)

// The values of reconcile.repair.
const (
	RepairOff  = "off"
	RepairAuto = "auto"
)

// Config is every setting. The tags of a field: koanf is its name, oneof its
// accepted values, secret marks what may also be given as <name>_file and is
// never shown: a text, or the passwords in a connection string; reload marks
// what a running daemon can take over.
type Config struct {
	// observe: decide, count and report, but change nothing in Redis, claims or
	// orders. act: drive every stuck reservation to ORDER_CREATED or RELEASED.
	Mode string `koanf:"mode" oneof:"observe act"`

	// The servers that hold the reservations.
	Redis Redis `koanf:"redis"`

	// The database of the orders, which also holds the claims (schema seckill).
	Postgres Postgres `koanf:"postgres"`

	// The brokers between the gateway and the order consumer.
	RocketMQ RocketMQ `koanf:"rocketmq"`

	// Sends what is still to be sent.
	Scanner Scanner `koanf:"scanner"`

	// Settles what has expired.
	Fencer Fencer `koanf:"fencer"`

	// Gives stock back, once.
	Compensator Compensator `koanf:"compensator"`

	// Moves units between the buckets of a version, to the end of each transfer.
	Transfer Transfer `koanf:"transfer"`

	// Gives sold-out buckets what others have left.
	Rebalance Rebalance `koanf:"rebalance"`

	// Compares both sides.
	Reconcile Reconcile `koanf:"reconcile"`

	// Tells others of what waits for a person.
	Notify Notify `koanf:"notify"`

	// What is deleted in time. In mode observe claims and the journal of
	// transfers stay.
	Purge Purge `koanf:"purge"`

	// The lease lets one instance work at a time.
	Lease Lease `koanf:"lease"`

	// The daemon as a process.
	Run Run `koanf:"run"`

	// The HTTP server of health, readiness and metrics.
	Admin Admin `koanf:"admin"`

	// What is written to standard error.
	Log Log `koanf:"log"`

	// What logs, metrics and reports may tell.
	Observe Observe `koanf:"observe"`

	// Spans of every job's run and of its calls, for an OpenTelemetry collector.
	Tracing Tracing `koanf:"tracing"`
}

// Redis is how the reservations' servers are reached (spec §6).
type Redis struct {
	// Servers, each host:port: the one server, the sentinels, or some nodes of
	// the cluster.
	Addrs []string `koanf:"addrs"`
	// How the servers are arranged. auto: sentinel if sentinel.master is set,
	// else what the first server that answers says.
	Mode string `koanf:"mode" oneof:"auto standalone sentinel cluster"`
	// ACL user; empty for the default user.
	Username string `koanf:"username"`
	// Password of that user.
	Password string `koanf:"password" secret:"text"`
	// Settings of the sentinels, for mode sentinel.
	Sentinel Sentinel `koanf:"sentinel"`
	// TLS to the servers and sentinels.
	TLS TLS `koanf:"tls"`
	// Time to wait for a connection.
	DialTimeout time.Duration `koanf:"dial_timeout"`
	// Time to wait for one reply, or for all replies of one pipeline. What is
	// not answered by then has an unknown outcome and is asked again with the
	// same ids (spec §5).
	CommandTimeout time.Duration `koanf:"command_timeout"`
	// Connections to each server, for each of the separate pools of scanning,
	// changing and reconciling.
	PoolSize int `koanf:"pool_size"`
	// Replicas of each master that new scopes are to reach before `scope create`
	// and `scope roll` end (WAIT). A best effort, reported and never an error.
	WaitReplicas int `koanf:"wait_replicas"`
	// Whether new scopes are to be on the disks of master and replicas too
	// (WAITAOF; Redis 7.2 or later with appendonly).
	WaitAOF bool `koanf:"wait_aof"`
	// Longest such wait at each master.
	WaitTimeout time.Duration `koanf:"wait_timeout"`
}

// Sentinel is how a master is found through sentinels.
type Sentinel struct {
	// Name of the master set, as the sentinels know it.
	Master string `koanf:"master"`
	// ACL user at the sentinels; empty for the default user.
	Username string `koanf:"username"`
	// Password at the sentinels.
	Password string `koanf:"password" secret:"text"`
}

// TLS is an encrypted and verified connection.
type TLS struct {
	// Whether to use TLS.
	Enabled bool `koanf:"enabled"`
	// PEM file of the authorities that the server's certificate is checked
	// against; empty for those of the system.
	CAFile string `koanf:"ca_file"`
	// PEM file of the client's certificate; empty for none.
	CertFile string `koanf:"cert_file"`
	// PEM file of the client certificate's key.
	KeyFile string `koanf:"key_file"`
	// Name that the server's certificate must carry; empty for the host that
	// was dialled.
	ServerName string `koanf:"server_name"`
}

// Postgres is how orders and claims are reached.
type Postgres struct {
	// Connection string, as a URL or as keyword=value pairs; TLS by its sslmode.
	// The role needs the rights of seckill_daemon, for commands that decide
	// tasks those of seckill_operator.
	URL string `koanf:"url" secret:"connection"`
	// Connection string of the owner of schema seckill, for `migrate`; empty:
	// the same as url.
	MigrateURL string `koanf:"migrate_url" secret:"connection"`
	// Connections in the pool; the lease has one more of its own.
	MaxConns int `koanf:"max_conns"`
	// Time to wait for a connection.
	ConnectTimeout time.Duration `koanf:"connect_timeout"`
	// Longest time of one statement.
	StatementTimeout time.Duration `koanf:"statement_timeout"`
}

// RocketMQ is how messages are sent and found (protocol §2, interface §3).
type RocketMQ struct {
	// Name servers, each host:port.
	NameServers []string `koanf:"name_servers"`
	// Topic of the order messages, as the gateway has it.
	Topic string `koanf:"topic"`
	// Consumer group of the order consumer. A wrong one makes every message
	// look unread or lost; fencer.max_release bounds the harm.
	ConsumerGroup string `koanf:"consumer_group"`
	// Tag of the order messages, the same as the gateway's; empty for none.
	Tag string `koanf:"tag"`
	// How the order consumer reads. With pop its offsets prove nothing, so
	// neither "consumed" nor "absent" is ever concluded.
	ConsumerProtocol string `koanf:"consumer_protocol" oneof:"remoting pop"`
	// Access key of the brokers' access control; empty for none.
	AccessKey string `koanf:"access_key"`
	// Secret key that belongs to it.
	SecretKey string `koanf:"secret_key" secret:"text"`
	// TLS to name servers and brokers. Where evidence is read, the servers are
	// verified; for sending, the client library encrypts but verifies nobody.
	TLS TLS `koanf:"tls"`
	// Time to wait for a connection.
	DialTimeout time.Duration `koanf:"dial_timeout"`
	// Time to wait for the answer to one question.
	RequestTimeout time.Duration `koanf:"request_timeout"`
	// Time to wait for the answer to one send. After it the outcome is unknown
	// (SEND_UNKNOWN): the message can still be stored later.
	SendTimeout time.Duration `koanf:"send_timeout"`
	// Messages sent per second at most, over all scopes.
	SendRate float64 `koanf:"send_rate" reload:"yes"`
	// Sends under way at once at most.
	SendConcurrency int `koanf:"send_concurrency"`
	// How far before a reservation's start a sweep begins: the clocks of Redis
	// and brokers differ. A skew of over half of it makes the evidence unknown.
	SweepMargin time.Duration `koanf:"sweep_margin"`
	// Messages of the sweep's window that are remembered at most, 8 bytes each. A
	// window that does not fit makes the evidence unknown.
	MaxSweepMessages int64 `koanf:"max_sweep_messages"`
}

// Pass bounds one pass of a worker (protocol §4).
type Pass struct {
	// Pause between the starts of two passes; a pass that is still running when
	// the next is due is not run twice.
	Every time.Duration `koanf:"every"`
	// Reservations in one page: one round trip to Redis and one to PostgreSQL.
	Batch int `koanf:"batch"`
	// Longest time of one pass; what is left is taken up by the next one.
	PassLimit time.Duration `koanf:"pass_limit"`
	// Most reservations in one pass, over all scopes.
	PassItems int `koanf:"pass_items"`
}

// Scanner is how unsent reservations are treated (protocol §4).
type Scanner struct {
	Pass `koanf:",squash"`
	// A RESERVED reservation younger than this belongs to its gateway.
	SendGrace time.Duration `koanf:"send_grace" reload:"yes"`
	// What becomes of a reservation that expired unsent. resend: it is sent for
	// as long as it takes. release: it is released once its message is proven
	// absent.
	Unsent string `koanf:"unsent" oneof:"resend release" reload:"yes"`
	// Times that a broker refuses the message itself (too large, illegal)
	// before a person is asked. A broker that cannot be reached is not counted.
	MaxRefusals int64 `koanf:"max_refusals" reload:"yes"`
}

// Fencer is how expired reservations are settled (protocol §3).
type Fencer struct {
	Pass `koanf:",squash"`
	// A message counts as absent only this long after the last attempt to send
	// it.
	Settle time.Duration `koanf:"settle" reload:"yes"`
	// Pause before looking again at an unsent reservation, which is the
	// scanner's.
	Recheck time.Duration `koanf:"recheck" reload:"yes"`
	// What becomes of a reservation whose message is proven absent. resend: send
	// it again, at most max_resends times, then release. release: at once.
	LostMessage string `koanf:"lost_message" oneof:"resend release" reload:"yes"`
	// Times that a lost message is sent again before the release.
	MaxResends int64 `koanf:"max_resends" reload:"yes"`
	// What becomes of a reservation whose message is in the dead-letter topic.
	// hold: a task for a person, and release after dead_letter_after. release:
	// at once.
	DeadLetter string `koanf:"dead_letter" oneof:"hold release" reload:"yes"`
	// How long a dead letter is held, counted from when the broker stored it.
	DeadLetterAfter time.Duration `koanf:"dead_letter_after" reload:"yes"`
	// What becomes of a reservation that was to be released but has an order.
	// auto: it becomes ORDER_CREATED. manual: a person confirms it.
	Confirm string `koanf:"confirm" oneof:"auto manual" reload:"yes"`
	// A wait for evidence becomes a task this long after the reservation's
	// expiry.
	EscalateAfter time.Duration `koanf:"escalate_after" reload:"yes"`
	// First wait before looking again at what cannot be decided; it doubles each
	// time, with jitter.
	BackoffMin time.Duration `koanf:"backoff_min" reload:"yes"`
	// Longest such wait.
	BackoffMax time.Duration `koanf:"backoff_max" reload:"yes"`
	// The halt on releases: beyond it a scope's releases stop and a task
	// release_storm is opened.
	MaxRelease MaxRelease `koanf:"max_release"`
}

// MaxRelease bounds the releases of one scope in a window (protocol §3).
type MaxRelease struct {
	// Percent of the units that the scope had reserved at the window's start.
	Percent float64 `koanf:"percent" reload:"yes"`
	// Releases that are always allowed, however few units are reserved.
	Min int64 `koanf:"min" reload:"yes"`
	// The window's length.
	Window time.Duration `koanf:"window" reload:"yes"`
}

// Compensator is how stock is given back (protocol §4).
type Compensator struct {
	Pass `koanf:",squash"`
}

// Transfer is how transfers are driven (protocol §4).
type Transfer struct {
	// Pause between the starts of two passes. A pass looks at every transfer of
	// the versions that are within their retention.
	Every time.Duration `koanf:"every"`
	// Longest time of one pass.
	PassLimit time.Duration `koanf:"pass_limit"`
	// For how long the units that left one bucket and those that came into the
	// other may differ before reconciliation reports stuck_transfer.
	StuckAfter time.Duration `koanf:"stuck_after"`
	// What becomes of an order for which its bucket has no unit left, and of a
	// transfer that cannot be finished for want of one, while other buckets have
	// some. auto: a repair moves a unit. off: it waits until one comes free.
	FillDeficit string `koanf:"fill_deficit" oneof:"off auto"`
}

// Rebalance is how sold-out buckets that are still asked for get units.
type Rebalance struct {
	// Whether the daemon does it. `reconciler rebalance --plan` shows what it would
	// do, --apply does it once.
	Enabled bool `koanf:"enabled"`
	// Pause between two looks at the running versions. What a bucket was asked for
	// in between is its demand.
	Every time.Duration `koanf:"every"`
	// Units that a bucket keeps at least. It keeps as many as it was asked for
	// between two looks in any case.
	Keep int64 `koanf:"keep"`
	// Percent of what it has above that which a bucket gives at a time. What is
	// left is given the next time, if it still is not asked for.
	SharePercent int64 `koanf:"share_percent"`
	// Least units that a bucket gets at a time.
	MinUnits int64 `koanf:"min_units"`
	// Most units that are moved in one version at a time.
	MaxUnits int64 `koanf:"max_units"`
	// A bucket that took part in a transfer is left alone for so long.
	CoolDown time.Duration `koanf:"cool_down"`
}

// Reconcile is how both sides are compared (protocol §5).
type Reconcile struct {
	// Pause between two rounds. A finding counts only if it is the same in a
	// later round.
	Settle time.Duration `koanf:"settle"`
	// Reservations in one page: one round trip to Redis and one to PostgreSQL.
	Batch int `koanf:"batch"`
	// Most reservations a second that are read one by one; 0: no limit.
	Rate int `koanf:"rate"`
	// When the daemon compares the numbers of all scopes, and the members of
	// those with drift: six cron fields beginning with the second, in UTC, or
	// @every and a duration; empty: never.
	Quick string `koanf:"quick"`
	// Longest time of such a pass; what was not read by then is incomplete.
	QuickLimit time.Duration `koanf:"quick_limit"`
	// When it compares every member of all scopes; as for quick.
	Deep string `koanf:"deep"`
	// Longest time of such a pass; the next one goes on where it ended.
	DeepLimit time.Duration `koanf:"deep_limit"`
	// What the daemon does about findings that are provably safe to put right.
	// auto: puts them right, in mode act. off: reports them.
	Repair string `koanf:"repair" oneof:"off auto"`
	// Most repairs of one pass; what is beyond waits for the next one.
	MaxRepairs int `koanf:"max_repairs"`
	// How long reports are kept in PostgreSQL and in report_dir. The newest
	// finished one of each mode and selection is kept for comparison. 0: for
	// ever.
	Retention time.Duration `koanf:"retention"`
	// Directory where each report is also written, as JSON and as a page to
	// look at; empty for none. It must exist.
	ReportDir string `koanf:"report_dir"`
}

// Purge is what is deleted in time (protocol §4). 0 keeps a kind for ever.
type Purge struct {
	// When the daemon purges: six cron fields beginning with the second, in UTC;
	// empty: never. Look at `reconciler purge --plan` before you set it.
	Schedule string `koanf:"schedule"`
	// Age at which a claim may go. It must be longer than the brokers keep
	// messages, retries and dead letters, and than anybody may replay them: a
	// message that is later than its claim could still make an order. A claim
	// stays in any case while its order exists, and until its version is CLOSED
	// and past its retention.
	ClaimsAfter time.Duration `koanf:"claims_after"`
	// Age, since it was decided, at which a task goes. Open ones stay.
	TasksAfter time.Duration `koanf:"tasks_after"`
	// How long after their version's retention finished transfers are kept.
	TransfersAfter time.Duration `koanf:"transfers_after"`
	// Time since its last run after which a job is forgotten, such as one that
	// this version does not have any more. Paused ones stay.
	JobsAfter time.Duration `koanf:"jobs_after"`
	// Age at which the numbers behind the console's charts go.
	SamplesAfter time.Duration `koanf:"samples_after"`
	// Rows that are looked at or deleted in one statement.
	Batch int `koanf:"batch"`
}

// Notify is who is told of what waits for a person.
type Notify struct {
	// New tasks and halts are posted to it; see docs/operations.md.
	Webhook Webhook `koanf:"webhook"`
}

// Webhook is an HTTP endpoint that is told of new tasks.
type Webhook struct {
	// Where to post to, http or https; empty: nowhere. Redirects are refused, and
	// no proxy is used.
	URL string `koanf:"url" secret:"text"`
	// Key of the signature, of at least 16 characters.
	Secret string `koanf:"secret" secret:"text"`
	// Time that one request may take.
	Timeout time.Duration `koanf:"timeout"`
	// Pause between two looks for new tasks.
	Every time.Duration `koanf:"every"`
}

// Lease is the single instance's lock, a PostgreSQL advisory lock on its own
// connection (protocol §4).
type Lease struct {
	// How long a holder that is not heard of keeps the lease. It gives up by
	// itself after two thirds of that, so two never work at a time.
	TTL time.Duration `koanf:"ttl"`
}

// Run is the daemon as a process.
type Run struct {
	// Time that a stop may take: running passes are told to end and waited for.
	StopTimeout time.Duration `koanf:"stop_timeout"`
}

// Admin is the HTTP server (interface §6).
type Admin struct {
	// Address to listen on, host:port; empty for no server, port 0 for a free
	// one.
	Listen string `koanf:"listen"`
	// Whether listen may be an address that other machines reach. Health and
	// metrics need no token there, and tokens need tls_cert_file.
	AllowRemote bool `koanf:"allow_remote"`
	// Names, beside localhost and the address listened on, under which requests
	// may come (the Host header without its port). Others are refused, which
	// keeps a web page from reading the server through a rebound name.
	AllowedHosts []string `koanf:"allowed_hosts"`
	// Time that one readiness check may take.
	CheckTimeout time.Duration `koanf:"check_timeout"`
	// SHA-256 of the token that may read the console and the API, as
	// `reconciler config token` prints it; empty: nobody may.
	ReadTokenSHA256 string `koanf:"read_token_sha256"`
	// SHA-256 of the token that may change things there too; empty: nobody may.
	ChangeTokenSHA256 string `koanf:"change_token_sha256"`
	// How long a browser stays signed in; a restart of the daemon signs it out.
	SessionTime time.Duration `koanf:"session_time"`
	// PEM file of the server's certificate; empty for plain HTTP.
	TLSCertFile string `koanf:"tls_cert_file"`
	// PEM file of the certificate's key.
	TLSKeyFile string `koanf:"tls_key_file"`
}

// Log is the process's own log, on standard error.
type Log struct {
	// Least level that is written.
	Level string `koanf:"level" oneof:"debug info warn error" reload:"yes"`
	// Lines as text or as JSON objects.
	Format string `koanf:"format" oneof:"text json"`
}

// Observe is what logs, metrics and reports may tell (spec §7).
type Observe struct {
	// Key of the hash that stands for a user id in logs and reports. Empty: one
	// drawn at start, so hashes of two processes cannot be compared.
	UserHashKey string `koanf:"user_hash_key" secret:"text"`
}

// Tracing is where spans go.
type Tracing struct {
	// Address of an OTLP/HTTP collector, such as http://127.0.0.1:4318; empty
	// for no traces.
	Endpoint string `koanf:"endpoint"`
	// Value of the Authorization header at the collector; empty for none.
	Authorization string `koanf:"authorization" secret:"text"`
	// Part of the runs that are traced, from 0 to 1.
	Sample float64 `koanf:"sample"`
	// Longest time of one export.
	Timeout time.Duration `koanf:"timeout"`
}

// Default is the settings in force where nothing else is said.
func Default() Config {
	p := reservation.DefaultPolicy()
	return Config{
		Mode: ModeObserve,
		Redis: Redis{
			Addrs:          []string{"127.0.0.1:6379"},
			Mode:           RedisAuto,
			DialTimeout:    2 * time.Second,
			CommandTimeout: 2 * time.Second,
			PoolSize:       10,
			WaitTimeout:    time.Second,
		},
		Postgres: Postgres{
			URL:              "postgres://127.0.0.1:5432/seckill",
			MaxConns:         8,
			ConnectTimeout:   3 * time.Second,
			StatementTimeout: 10 * time.Second,
		},
		RocketMQ: RocketMQ{
			NameServers:      []string{"127.0.0.1:9876"},
			Topic:            "seckill-order",
			ConsumerGroup:    "seckill-order-consumer",
			ConsumerProtocol: ProtocolRemoting,
			DialTimeout:      time.Second,
			RequestTimeout:   3 * time.Second,
			SendTimeout:      3 * time.Second,
			SendRate:         5000,
			SendConcurrency:  64,
			SweepMargin:      5 * time.Minute,
			MaxSweepMessages: 8_000_000,
		},
		Scanner: Scanner{
			Pass:        Pass{Every: time.Second, Batch: 256, PassLimit: 10 * time.Second, PassItems: 20_000},
			SendGrace:   p.SendGrace,
			Unsent:      p.Unsent,
			MaxRefusals: p.MaxRefusals,
		},
		Fencer: Fencer{
			Pass:            Pass{Every: 5 * time.Second, Batch: 256, PassLimit: 30 * time.Second, PassItems: 50_000},
			Settle:          p.Settle,
			Recheck:         p.Recheck,
			LostMessage:     p.LostMessage,
			MaxResends:      p.MaxResends,
			DeadLetter:      p.DeadLetter,
			DeadLetterAfter: p.DeadLetterAfter,
			Confirm:         p.Confirm,
			EscalateAfter:   p.EscalateAfter,
			BackoffMin:      p.BackoffMin,
			BackoffMax:      p.BackoffMax,
			MaxRelease:      MaxRelease{Percent: 5, Min: 20, Window: 10 * time.Minute},
		},
		Compensator: Compensator{
			Pass: Pass{Every: time.Second, Batch: 256, PassLimit: 10 * time.Second, PassItems: 50_000},
		},
		Transfer: Transfer{
			Every: 2 * time.Second, PassLimit: 10 * time.Second, StuckAfter: time.Minute, FillDeficit: FillAuto,
		},
		Rebalance: Rebalance{
			Every: 10 * time.Second, SharePercent: 50, MinUnits: 1, MaxUnits: 1000, CoolDown: 20 * time.Second,
		},
		Reconcile: Reconcile{
			Settle: 5 * time.Second, Batch: 1000, Rate: 20_000,
			Quick: "0 * * * * *", QuickLimit: 50 * time.Second, Deep: "0 30 3 * * *", DeepLimit: 6 * time.Hour,
			Repair: RepairAuto, MaxRepairs: 1000, Retention: 7 * 24 * time.Hour,
		},
		Notify: Notify{Webhook: Webhook{Timeout: 5 * time.Second, Every: 5 * time.Second}},
		Purge: Purge{
			ClaimsAfter: 30 * 24 * time.Hour, TasksAfter: 90 * 24 * time.Hour, TransfersAfter: 30 * 24 * time.Hour,
			JobsAfter: 30 * 24 * time.Hour, SamplesAfter: 7 * 24 * time.Hour, Batch: 1000,
		},
		Lease: Lease{TTL: 5 * time.Second},
		Run:   Run{StopTimeout: 20 * time.Second},
		Admin: Admin{
			Listen:       "127.0.0.1:8642",
			CheckTimeout: 2 * time.Second,
			SessionTime:  12 * time.Hour,
		},
		Log:     Log{Level: "info", Format: "text"},
		Tracing: Tracing{Sample: 1, Timeout: 5 * time.Second},
	}
}

// Policy is the part of the settings that [reservation.Decide] rests on
// (protocol §3).
func (c Config) Policy() reservation.Policy {
	return reservation.Policy{
		SendGrace:       c.Scanner.SendGrace,
		Settle:          c.Fencer.Settle,
		Recheck:         c.Fencer.Recheck,
		LostMessage:     c.Fencer.LostMessage,
		MaxResends:      c.Fencer.MaxResends,
		DeadLetter:      c.Fencer.DeadLetter,
		DeadLetterAfter: c.Fencer.DeadLetterAfter,
		Confirm:         c.Fencer.Confirm,
		EscalateAfter:   c.Fencer.EscalateAfter,
		Unsent:          c.Scanner.Unsent,
		MaxRefusals:     c.Scanner.MaxRefusals,
		BackoffMin:      c.Fencer.BackoffMin,
		BackoffMax:      c.Fencer.BackoffMax,
	}
}
