package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seckill/reconciler/reservation"
)

// write puts text into a file of the test's own and returns its name.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// noFile keeps a test from finding a file that happens to be on the machine.
var noFile = []string{}

func TestDefaultIsValid(t *testing.T) {
	if err := Default().Validate(); err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff(reservation.DefaultPolicy(), Default().Policy()); diff != "" {
		t.Errorf("policy (-domain +config):\n%s", diff)
	}
}

// TestFixedNames loads every variable that interface §2 and §7 name.
func TestFixedNames(t *testing.T) {
	l, err := Load(Options{Search: noFile, Environ: []string{
		"RECONCILER=/somewhere/reconciler", "REDIS_CLI=redis-cli", "PSQL=psql", "PATH=/bin",
		"RECONCILER_REDIS_ADDRS=127.0.0.1:7001, 127.0.0.1:7002,127.0.0.1:7003",
		"RECONCILER_REDIS_MODE=cluster",
		"RECONCILER_REDIS_USERNAME=daemon", "RECONCILER_REDIS_PASSWORD=s3cret",
		"RECONCILER_POSTGRES_URL=postgres://u:p@db:5433/shop?sslmode=disable",
		"RECONCILER_POSTGRES_MIGRATE_URL=postgres://owner@db:5433/shop",
		"RECONCILER_ROCKETMQ_NAME_SERVERS=127.0.0.1:9801",
		"RECONCILER_ROCKETMQ_TOPIC=t", "RECONCILER_ROCKETMQ_CONSUMER_GROUP=g",
		"RECONCILER_ROCKETMQ_TAG=", "RECONCILER_ROCKETMQ_CONSUMER_PROTOCOL=pop",
		"RECONCILER_ROCKETMQ_ACCESS_KEY=ak", "RECONCILER_ROCKETMQ_SECRET_KEY=sk",
		"RECONCILER_ADMIN_LISTEN=127.0.0.1:0", "RECONCILER_MODE=act",
		"RECONCILER_SCANNER_SEND_GRACE=100ms", "RECONCILER_SCANNER_UNSENT=release",
		"RECONCILER_FENCER_SETTLE=100ms", "RECONCILER_FENCER_LOST_MESSAGE=release",
		"RECONCILER_FENCER_DEAD_LETTER=release", "RECONCILER_FENCER_DEAD_LETTER_AFTER=100ms",
		"RECONCILER_FENCER_CONFIRM=manual", "RECONCILER_FENCER_ESCALATE_AFTER=100ms",
		"RECONCILER_FENCER_RECHECK=100ms",
		"RECONCILER_FENCER_MAX_RELEASE_PERCENT=12.5", "RECONCILER_FENCER_MAX_RELEASE_MIN=7",
		"RECONCILER_FENCER_MAX_RELEASE_WINDOW=100ms",
		"RECONCILER_RECONCILE_SETTLE=100ms", "RECONCILER_OBSERVE_USER_HASH_KEY=k",
	}})
	if err != nil {
		t.Fatal(err)
	}
	ms := 100 * time.Millisecond
	want := Default()
	want.Mode = ModeAct
	want.Redis.Addrs = []string{"127.0.0.1:7001", "127.0.0.1:7002", "127.0.0.1:7003"}
	want.Redis.Mode = RedisCluster
	want.Redis.Username, want.Redis.Password = "daemon", "s3cret"
	want.Postgres.URL = "postgres://u:p@db:5433/shop?sslmode=disable"
	want.Postgres.MigrateURL = "postgres://owner@db:5433/shop"
	want.RocketMQ.NameServers = []string{"127.0.0.1:9801"}
	want.RocketMQ.Topic, want.RocketMQ.ConsumerGroup = "t", "g"
	want.RocketMQ.ConsumerProtocol = ProtocolPop
	want.RocketMQ.AccessKey, want.RocketMQ.SecretKey = "ak", "sk"
	want.Admin.Listen = "127.0.0.1:0"
	want.Scanner.SendGrace, want.Scanner.Unsent = ms, "release"
	want.Fencer.Settle, want.Fencer.LostMessage = ms, "release"
	want.Fencer.DeadLetter, want.Fencer.DeadLetterAfter = "release", ms
	want.Fencer.Confirm, want.Fencer.EscalateAfter, want.Fencer.Recheck = "manual", ms, ms
	want.Fencer.MaxRelease = MaxRelease{Percent: 12.5, Min: 7, Window: ms}
	want.Reconcile.Settle, want.Observe.UserHashKey = ms, "k"
	if diff := cmp.Diff(want, l.Config); diff != "" {
		t.Errorf("settings (-want +got):\n%s", diff)
	}
	p := l.Config.Policy()
	if p.SendGrace != ms || p.Unsent != "release" || p.Confirm != "manual" || p.DeadLetterAfter != ms {
		t.Errorf("policy does not follow the settings: %+v", p)
	}
}

func TestPrecedence(t *testing.T) {
	file := write(t, "config.yaml", "scanner:\n  every: 2s\n  batch: 10\nlog:\n  level: warn\nredis:\n  addrs: [a:1, b:2]\nfencer:\n")
	l, err := Load(Options{
		File:    file,
		Environ: []string{"RECONCILER_SCANNER_BATCH=20", "RECONCILER_LOG_LEVEL=error", "RECONCILER_FENCER_BATCH="},
		Flags:   map[string]string{"log.level": "debug"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]Setting{
		"scanner.every": {Value: "2s", Origin: file},
		"scanner.batch": {Value: "20", Origin: "RECONCILER_SCANNER_BATCH"},
		"log.level":     {Value: "debug", Origin: "--log-level"},
		"redis.addrs":   {Value: "a:1,b:2", Origin: file},
		"fencer.batch":  {Value: "256"},
	}
	for _, s := range l.Settings() {
		if w, ok := want[s.Key]; ok {
			w.Key = s.Key
			if diff := cmp.Diff(w, s); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			delete(want, s.Key)
		}
	}
	if len(want) > 0 {
		t.Errorf("not listed: %v", want)
	}
}

// TestShorterList: a list of one must not keep the tail of the default.
func TestShorterList(t *testing.T) {
	file := write(t, "config.yaml", "redis: {addrs: [a:1, b:2, c:3]}")
	l, err := Load(Options{File: file, Environ: []string{"RECONCILER_REDIS_ADDRS=d:4"}})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"d:4"}, l.Config.Redis.Addrs); diff != "" {
		t.Error(diff)
	}
}

func TestRefused(t *testing.T) {
	tests := map[string]struct {
		yaml    string
		environ []string
		want    []string // each in the message
	}{
		"unknown key": {
			yaml: "scanner:\n  send_grce: 3s\n",
			want: []string{"config.yaml: scanner.send_grce: unknown setting", "did you mean scanner.send_grace?"},
		},
		"unknown section":     {yaml: "wholly:\n  new: 1\n", want: []string{"wholly.new: unknown setting", "config show"}},
		"unknown top":         {yaml: "moed: act\n", want: []string{"moed: unknown setting", "did you mean mode?"}},
		"other case":          {yaml: "Mode: act\n", want: []string{"Mode: unknown setting", "did you mean mode?"}},
		"dotted key":          {yaml: "scanner.send_grce: 3s\n", want: []string{"scanner.send_grce: unknown setting"}},
		"below a setting":     {yaml: "mode:\n  a: 1\n", want: []string{"mode.a: unknown setting"}},
		"section as setting":  {yaml: "scanner: 5\n", want: []string{"scanner: is a section"}},
		"unknown key is null": {yaml: "scanner:\n  nothing:\n", want: []string{"scanner.nothing: unknown setting"}},
		"key twice":           {yaml: "mode: act\nmode: observe\n", want: []string{"already defined"}},
		"not yaml":            {yaml: "mode: [", want: []string{"config.yaml"}},
		"unknown variable": {
			environ: []string{"RECONCILER_SCANER_EVERY=3s"},
			want:    []string{"RECONCILER_SCANER_EVERY: unknown setting", "RECONCILER_SCANNER_EVERY (scanner.every)?"},
		},
		"variable named like a path": {environ: []string{"RECONCILER_scanner.every=1s"}, want: []string{"RECONCILER_scanner.every: unknown setting"}},
		"only the prefix":            {environ: []string{"RECONCILER_=1"}, want: []string{"RECONCILER_: unknown setting"}},
		"all at once": {
			yaml: "a: 1\nb: 2\n", environ: []string{"RECONCILER_XYZ=1"},
			want: []string{"a: unknown", "b: unknown", "RECONCILER_XYZ: unknown"},
		},
		"word": {
			yaml: "redis: {mode: single}",
			want: []string{`redis.mode: "single" is not one of auto, standalone, sentinel, cluster`},
		},
		"policy word":          {yaml: "fencer: {confirm: never, settle: 0s}", want: []string{`fencer.confirm: "never" is not one of auto, manual`, "fencer.settle"}},
		"empty word":           {environ: []string{"RECONCILER_MODE="}, want: []string{`mode: "" is not one of observe, act`}},
		"number as duration":   {yaml: "scanner: {every: 3}", want: []string{"config.yaml: scanner.every: want a duration"}},
		"no unit":              {environ: []string{"RECONCILER_SCANNER_EVERY=3"}, want: []string{"RECONCILER_SCANNER_EVERY: scanner.every: want a duration"}},
		"not a number":         {environ: []string{"RECONCILER_SCANNER_BATCH=many"}, want: []string{"RECONCILER_SCANNER_BATCH: scanner.batch: want a whole number"}},
		"fraction":             {yaml: "scanner: {batch: 2.7}", want: []string{"scanner.batch: want a whole number"}},
		"bool as number":       {yaml: "scanner: {max_refusals: true}", want: []string{"scanner.max_refusals: want a whole number"}},
		"not a bool":           {environ: []string{"RECONCILER_REDIS_TLS_ENABLED=sure"}, want: []string{"redis.tls.enabled: want true or false"}},
		"number as text":       {yaml: "redis: {password: 12345}", want: []string{"redis.password: want a text"}},
		"text as list of maps": {yaml: "redis: {addrs: [{a: 1}]}", want: []string{"redis.addrs[0]"}},
		"too often":            {yaml: "scanner: {every: 1ms}", want: []string{"scanner.every: 1ms is below 10ms"}},
		"min above max":        {yaml: "fencer: {backoff_min: 10m}", want: []string{"fencer.backoff_max: 5m0s is below fencer.backoff_min"}},
		"items below batch":    {yaml: "fencer: {pass_items: 5}", want: []string{"fencer.pass_items: 5 is below fencer.batch 256"}},
		"percent":              {yaml: "fencer: {max_release: {percent: 101}}", want: []string{"fencer.max_release.percent: 101"}},
		"percent not a number": {yaml: "fencer: {max_release: {percent: .nan}}", want: []string{"fencer.max_release.percent"}},
		"rebalance share":      {yaml: "rebalance: {share_percent: 0, keep: -1}", want: []string{"rebalance.share_percent: 0 is not from 1 to 100", "rebalance.keep: -1 is below 0"}},
		"rebalance limits":     {yaml: "rebalance: {min_units: 5, max_units: 4}", want: []string{"rebalance.max_units: 4 is below rebalance.min_units 5"}},
		"transfer":             {yaml: "transfer: {fill_deficit: maybe, stuck_after: 0s}", want: []string{`transfer.fill_deficit: "maybe" is not one of off, auto`, "transfer.stuck_after"}},
		"rate zero":            {yaml: "rocketmq: {send_rate: 0}", want: []string{"rocketmq.send_rate"}},
		"sentinel, no master":  {yaml: "redis: {mode: sentinel}", want: []string{"redis.sentinel.master: is not set"}},
		"master, no sentinel":  {yaml: "redis: {mode: cluster, sentinel: {master: m}}", want: []string{"redis.sentinel.master: is set, but redis.mode is cluster"}},
		"standalone, two":      {yaml: "redis: {mode: standalone, addrs: [a:1, b:1]}", want: []string{"redis.addrs: names 2 servers"}},
		"no servers":           {environ: []string{"RECONCILER_REDIS_ADDRS=,"}, want: []string{"redis.addrs: is empty"}},
		"no port":              {yaml: "redis: {addrs: [localhost]}", want: []string{`redis.addrs: "localhost" is not host:port: missing port`}},
		"bad port":             {yaml: "rocketmq: {name_servers: ['a:70000']}", want: []string{"rocketmq.name_servers", "below 65536"}},
		"tls off":              {yaml: "redis: {tls: {ca_file: x}}", want: []string{"redis.tls.enabled: is false"}},
		"tls half":             {yaml: "redis: {tls: {enabled: true, key_file: x}}", want: []string{"redis.tls.cert_file: and redis.tls.key_file"}},
		"key without secret":   {yaml: "rocketmq: {access_key: x}", want: []string{"rocketmq.access_key: and rocketmq.secret_key"}},
		"user, no password":    {yaml: "redis: {username: x}", want: []string{"redis.password: is not set"}},
		"topic":                {yaml: "rocketmq: {topic: 'a b'}", want: []string{`rocketmq.topic: "a b" is not a name`}},
		"remote tokens": {
			yaml: "admin: {listen: '0.0.0.0:80', allow_remote: true, read_token_sha256: " + strings.Repeat("a", 64) + "}",
			want: []string{"admin.tls_cert_file: is needed", "in the clear"},
		},
		"remote admin":      {yaml: "admin: {listen: '0.0.0.0:80'}", want: []string{"admin.listen: 0.0.0.0:80 can be reached", "admin.allow_remote"}},
		"remote admin, any": {yaml: "admin: {listen: ':80'}", want: []string{"admin.listen: :80 can be reached"}},
		"no database":       {environ: []string{"RECONCILER_POSTGRES_URL="}, want: []string{"postgres.url: is empty"}},
		"both secret forms": {
			environ: []string{"RECONCILER_REDIS_PASSWORD=a", "RECONCILER_REDIS_PASSWORD_FILE=/b"},
			want:    []string{"RECONCILER_REDIS_PASSWORD_FILE: redis.password and redis.password_file are both given"},
		},
		"secret file missing": {
			environ: []string{"RECONCILER_REDIS_PASSWORD_FILE=/nowhere/x"},
			want:    []string{"RECONCILER_REDIS_PASSWORD_FILE: redis.password_file: read /nowhere/x: no such file"},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			opts := Options{Search: noFile, Environ: tt.environ}
			if opts.Environ == nil {
				opts.Environ = []string{}
			}
			if tt.yaml != "" {
				opts.File = write(t, "config.yaml", tt.yaml)
			}
			_, err := Load(opts)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("message:\n%v\nlacks %q", err, want)
				}
			}
		})
	}
}

func TestFileLookup(t *testing.T) {
	first, second := write(t, "a.yaml", "mode: act"), write(t, "b.yaml", "mode: observe")
	absent := filepath.Join(t.TempDir(), "none.yaml")
	load := func(o Options) Loaded {
		t.Helper()
		o.Environ = []string{}
		l, err := Load(o)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	if l := load(Options{Search: []string{absent, first, second}}); l.File != first || l.Config.Mode != ModeAct {
		t.Errorf("read %q, mode %s", l.File, l.Config.Mode)
	}
	if l := load(Options{Search: []string{absent}}); l.File != "" || l.Config.Mode != ModeObserve {
		t.Errorf("read %q, mode %s", l.File, l.Config.Mode)
	}
	if l := load(Options{File: second, Search: []string{first}}); l.File != second {
		t.Errorf("read %q", l.File)
	}
	if _, err := Load(Options{File: absent, Environ: []string{}}); err == nil || !strings.Contains(err.Error(), absent) {
		t.Errorf("a named file that is missing: %v", err)
	}
	t.Chdir(t.TempDir())
	if err := os.WriteFile("config.yaml", []byte("mode: act"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l := load(Options{}); l.File != "config.yaml" || l.Config.Mode != ModeAct {
		t.Errorf("working directory: read %q, mode %s", l.File, l.Config.Mode)
	}
}

func TestSecretFiles(t *testing.T) {
	secret := write(t, "secret", "from file\n")
	file := write(t, "config.yaml", "redis: {password: plain}\nobserve: {user_hash_key_file: "+secret+"}\n")
	l, err := Load(Options{File: file, Environ: []string{"RECONCILER_REDIS_PASSWORD_FILE=" + secret}})
	if err != nil {
		t.Fatal(err)
	}
	if l.Config.Redis.Password != "from file" || l.Config.Observe.UserHashKey != "from file" {
		t.Errorf("got %q and %q", l.Config.Redis.Password, l.Config.Observe.UserHashKey)
	}
	want := map[string]string{"redis.password": "RECONCILER_REDIS_PASSWORD_FILE", "observe.user_hash_key": file}
	if diff := cmp.Diff(want, l.origins); diff != "" {
		t.Errorf("origins (-want +got):\n%s", diff)
	}
}

// TestNoSecretIsShown sets every secret and looks for it in listings and errors.
func TestNoSecretIsShown(t *testing.T) {
	const secret = "hunter2://x@y" // looks like a URL, which must not help it
	for _, url := range []string{
		"postgres://u:hunter2@db:5432/s?sslmode=disable&sslpassword=hunter2",
		"postgres://db:5432/s?user=u&password=hunter2",
		"host=db user=u password=hunter2 dbname=s",
		"host=db user=u password = 'hunter2 \\' hunter2' dbname=s",
	} {
		environ := []string{
			"RECONCILER_POSTGRES_URL=" + url, "RECONCILER_POSTGRES_MIGRATE_URL=" + url,
			"RECONCILER_REDIS_PASSWORD=" + secret, "RECONCILER_ROCKETMQ_ACCESS_KEY=ak",
			"RECONCILER_ROCKETMQ_SECRET_KEY=" + secret, "RECONCILER_OBSERVE_USER_HASH_KEY=" + secret,
			"RECONCILER_REDIS_SENTINEL_MASTER=m", "RECONCILER_REDIS_SENTINEL_PASSWORD=" + secret,
		}
		l, err := Load(Options{Search: noFile, Environ: environ})
		if err != nil {
			t.Fatalf("%s: %v", url, err)
		}
		for _, s := range l.Settings() {
			if strings.Contains(s.Value, "hunter2") {
				t.Errorf("%s is shown as %s", s.Key, s.Value)
			}
			if s.Key == "postgres.url" && !strings.Contains(s.Value, "db") {
				t.Errorf("%s is shown as %s: the server should be seen", s.Key, s.Value)
			}
		}
	}
	for _, url := range []string{
		"postgres://u:hunter2@db:port/s", "postgres://u:hunter2 @db/s", "mysql://u:hunter2@db/s",
		"postgres://u:hunter2@db/s?sslmode=hunter2", "host=db password=hunter2 sslmode=strange",
		"host=db password='hunter2", "postgres://u:hunter2%@db/s", "hunter2",
	} {
		_, err := Load(Options{Search: noFile, Environ: []string{"RECONCILER_POSTGRES_URL=" + url}})
		if err == nil {
			t.Errorf("%s: accepted", url)
		} else if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: the error shows the password: %v", url, err)
		}
	}
}

// TestNamesAreDistinct: two paths with one variable would be ambiguous.
func TestNamesAreDistinct(t *testing.T) {
	seen := map[string]string{}
	for name, path := range names() {
		if !strings.HasPrefix(name, envPrefix) {
			continue
		}
		if other, ok := seen[path]; ok {
			t.Errorf("%s and %s both mean %s", name, other, path)
		}
		seen[path] = name
	}
	paths := 0
	for _, f := range fields {
		paths++
		if f.secret != public {
			paths++
		}
	}
	if len(seen) != paths {
		t.Errorf("%d variables for %d paths", len(seen), paths)
	}
}

func FuzzMaskConnection(f *testing.F) {
	f.Add("hunter2", false)
	f.Add("a b'c\\", true)
	f.Fuzz(func(t *testing.T, password string, keyword bool) {
		around := "postgres://u:@db:5432/s host=db user=u password=''" + masked
		if len(password) < 4 || strings.Contains(around, password) {
			t.Skip()
		}
		text := "postgres://u:" + password + "@db:5432/s"
		if keyword {
			text = "host=db user=u password='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(password) + "'"
		}
		if shown := maskConnection(text); strings.Contains(shown, password) {
			t.Errorf("%q is shown as %q", text, shown)
		}
	})
}
