package devstack

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

const (
	nameServerName = "name-server"
	brokerName     = "broker"
	clusterOfMQ    = "devstack"
)

// Requests that bring a broker into service; the daemon makes none of them.
const (
	requestCreateTopic        = 17
	requestUpdateBrokerConfig = 25
	requestCreateGroup        = 200
)

// requestLimit bounds one such request: a broker writes to its disk for it.
const requestLimit = 10 * time.Second

// jvmFlags keep the JVMs small and quick to start.
var jvmFlags = []string{
	"-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-XX:-UsePerfData", "-Xss512k",
	"-Djava.net.preferIPv4Stack=true",
}

// brokerDefaults: small files, no slow background services, no topics that
// nobody created, and every retry delay 1 s (the first is 10 s by default).
var brokerDefaults = []string{
	"brokerClusterName=" + clusterOfMQ, "brokerId=0", "brokerRole=ASYNC_MASTER", "flushDiskType=ASYNC_FLUSH",
	"brokerIP1=127.0.0.1", "brokerIP2=127.0.0.1", "bindAddress=127.0.0.1",
	"mappedFileSizeCommitLog=16777216", "mappedFileSizeConsumeQueue=600000", "maxHashSlotNum=50000", "maxIndexNum=200000",
	"messageIndexSafe=true", "timerWheelEnable=false", "transientStorePoolEnable=false", "enableCompaction=false",
	"autoCreateTopicEnable=false", "autoCreateSubscriptionGroup=true", "registerNameServerPeriod=10000",
	"flushConsumerOffsetInterval=1000", "diskMaxUsedSpaceRatio=95", "popConsumerFSServiceInit=false",
	"recoverThreadPoolNums=2", "messageDelayLevel=" + strings.TrimSuffix(strings.Repeat("1s ", 18), " "),
}

//go:embed logback.xml
var logback []byte

func (s *Stack) bringUpRocketMQ(ctx context.Context) error {
	if s.parts.Brokers == 0 {
		return nil
	}
	ns, err := s.service(nameServerName, 1, 0, s.defineNameServer)
	if err != nil {
		return err
	}
	if err := s.run(ctx, ns); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	for i := range s.parts.Brokers {
		// A broker listens on L (clients), L−2 (fast remoting) and L+1 (replication).
		svc, err := s.service(fmt.Sprintf("%s-%d", brokerName, i), 4, 2, s.defineBroker)
		if err != nil {
			return errors.Join(err, g.Wait())
		}
		g.Go(func() error { return s.run(ctx, svc) })
	}
	return g.Wait()
}

func (s *Stack) defineNameServer(rec *record) error {
	rec.Kind = kindNameServer
	conf := []string{"listenPort=" + strconv.Itoa(rec.Port), "bindAddress=127.0.0.1"}
	return s.defineJava(rec, "org.apache.rocketmq.namesrv.NamesrvStartup", conf, "-Xms32m", "-Xmx128m")
}

func (s *Stack) defineBroker(rec *record) error {
	rec.Kind = kindBroker
	conf := append([]string{
		"brokerName=" + rec.Name, "listenPort=" + strconv.Itoa(rec.Port), "haListenPort=" + strconv.Itoa(rec.Port+1),
		"namesrvAddr=" + s.NameServer().Addr(), "storePathRootDir=" + filepath.Join(rec.Dir, "store"),
	}, brokerDefaults...)
	conf = append(conf, s.opts.BrokerSettings...) // a later line wins
	return s.defineJava(rec, "org.apache.rocketmq.broker.BrokerStartup", conf, "-Xms64m", "-Xmx384m", "-XX:MaxDirectMemorySize=256m")
}

func (s *Stack) defineJava(rec *record, class string, conf []string, memory ...string) error {
	confFile := filepath.Join(rec.Dir, "server.conf")
	logFile := filepath.Join(rec.Dir, "logback.xml")
	if err := os.WriteFile(confFile, []byte(strings.Join(conf, "\n")+"\n"), 0o644); err != nil {
		return fmt.Errorf("write the configuration of %s: %w", rec.Name, err)
	}
	if err := os.WriteFile(logFile, logback, 0o644); err != nil {
		return fmt.Errorf("write the log configuration of %s: %w", rec.Name, err)
	}
	rec.Version = rocketmqVersion
	rec.Launch.Path = s.install.java
	rec.Launch.Env = []string{"ROCKETMQ_HOME=" + rec.Dir}
	// A server unpacks 12 MB of libraries and leaves them there when it is killed.
	rec.Launch.Args = append(append(memory, jvmFlags...), "-Djava.io.tmpdir="+rec.Dir,
		"-Duser.home="+rec.Dir, "-Drmq.logback.configurationFile="+logFile,
		"-cp", filepath.Join(s.install.rocketmq, "*"), class, "-c", confFile)
	return nil
}

// nameServerReady: it answers a request, not only its port.
func (s *Stack) nameServerReady(ctx context.Context) error {
	_, err := s.registeredBrokers(ctx)
	return err
}

// brokerReady makes the broker register at the name server and checks that it
// did. Its own registration at boot is often lost and the next one comes 10 s
// later; a change of its configuration registers it completely at once.
func (s *Stack) brokerReady(ctx context.Context, svc *Service) error {
	if err := request(ctx, svc, requestUpdateBrokerConfig, nil, []byte("brokerPermission=6\n")); err != nil {
		return err
	}
	const looks, pause = 10, 50 * time.Millisecond
	for range looks {
		brokers, err := s.registeredBrokers(ctx)
		if err != nil {
			return err
		}
		if brokers[svc.Name()] {
			return brokerAnswers(ctx, svc)
		}
		time.Sleep(pause)
	}
	return errors.New("the name server does not list it yet")
}

// brokerAnswers asks for what evidence is gathered with. In its first second a
// broker fails at its own statistics, of which there are none yet. One that wants
// to know who asks has answered.
func brokerAnswers(ctx context.Context, svc *Service) error {
	peer := remoting.NewPeer(svc.Addr(), remoting.Options{CallTimeout: requestLimit})
	defer peer.Close()
	if _, err := peer.BrokerRuntimeInfo(ctx); err != nil && !remoting.IsCode(err, remoting.NoPermission) {
		return err
	}
	return nil
}

// registerBrokers makes every running broker register again, after the name
// server lost what it knew.
func (s *Stack) registerBrokers(ctx context.Context) error {
	for _, svc := range s.Brokers() {
		if !svc.Alive() || svc.snapshot().Process.stopped() {
			continue
		}
		if err := svc.waitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (s *Stack) registeredBrokers(ctx context.Context) (map[string]bool, error) {
	peer := remoting.NewPeer(s.NameServer().Addr(), remoting.Options{})
	defer peer.Close()
	brokers, err := peer.ClusterInfo(ctx)
	if err != nil {
		return nil, err
	}
	out := make(map[string]bool, len(brokers))
	for _, b := range brokers {
		out[b.Name] = true
	}
	return out, nil
}

// request asks a broker to do something, on a connection of its own: they are
// few, and a broker that was restarted has closed the old ones.
func request(ctx context.Context, broker *Service, code int, fields map[string]string, body []byte) error {
	peer := remoting.NewPeer(broker.Addr(), remoting.Options{CallTimeout: requestLimit})
	defer peer.Close()
	_, err := peer.Do(ctx, code, fields, body)
	return err
}

// CreateTopic creates a topic with so many queues on every broker and returns
// when the name server routes to all of them. It is safe to repeat.
func (s *Stack) CreateTopic(ctx context.Context, topic string, queues int) error {
	fields := map[string]string{
		"topic": topic, "defaultTopic": "TBW102", "readQueueNums": strconv.Itoa(queues), "writeQueueNums": strconv.Itoa(queues),
		"perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false", "attributes": "+message.type=NORMAL",
	}
	for _, broker := range s.Brokers() {
		if err := request(ctx, broker, requestCreateTopic, fields, nil); err != nil {
			return fmt.Errorf("create topic %s on %s: %w", topic, broker.Name(), err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	err := poll(ctx, func(ctx context.Context) error { return s.routed(ctx, topic) })
	if err != nil {
		return fmt.Errorf("wait for the route of topic %s: %w", topic, err)
	}
	return nil
}

func (s *Stack) routed(ctx context.Context, topic string) error {
	peer := remoting.NewPeer(s.NameServer().Addr(), remoting.Options{})
	defer peer.Close()
	route, err := peer.Route(ctx, topic)
	if err != nil {
		return err
	}
	if want := len(s.Brokers()); len(route.Queues) != want {
		return fmt.Errorf("%d of %d brokers in the route", len(route.Queues), want)
	}
	return nil
}

// CreateGroup creates a consumer group and its retry topic on every broker.
// Without the topic a new group's first retry takes 40 s instead of 1 s.
func (s *Stack) CreateGroup(ctx context.Context, group string) error {
	body, err := json.Marshal(map[string]any{
		"groupName": group, "consumeEnable": true, "consumeFromMinEnable": true, "consumeBroadcastEnable": true,
		"retryQueueNums": 1, "retryMaxTimes": 16, "brokerId": 0, "whichBrokerWhenConsumeSlowly": 1,
		"notifyConsumerIdsChangedEnable": true,
	})
	if err != nil {
		return fmt.Errorf("encode group %s: %w", group, err)
	}
	for _, broker := range s.Brokers() {
		if err := request(ctx, broker, requestCreateGroup, nil, body); err != nil {
			return fmt.Errorf("create group %s on %s: %w", group, broker.Name(), err)
		}
	}
	return s.CreateTopic(ctx, "%RETRY%"+group, 1)
}
