package daemon_test

import (
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracev1 "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/internal/rocketmq/remoting"
	"github.com/seckill/reconciler/reservation"
)

// spans collects what is exported to it, by trace.
type spans struct {
	mu      sync.Mutex
	byTrace map[string][]*tracev1.Span
}

func (c *spans) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var request collector.ExportTraceServiceRequest
	body, err := io.ReadAll(r.Body)
	if err == nil {
		err = proto.Unmarshal(body, &request)
	}
	if err != nil || r.Header.Get("Authorization") != "Bearer collector" {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, of := range request.GetResourceSpans() {
		for _, scope := range of.GetScopeSpans() {
			for _, span := range scope.GetSpans() {
				id := hex.EncodeToString(span.GetTraceId())
				c.byTrace[id] = append(c.byTrace[id], span)
			}
		}
	}
}

// trace is the spans of one trace, so far.
func (c *spans) trace(id string) []*tracev1.Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.byTrace[id])
}

// A message that was sent again leads to the run of the job that sent it, and to
// all that this run asked of Redis, PostgreSQL and RocketMQ.
func TestTraceOfAResend(t *testing.T) { // not in parallel: the provider is the process's
	collected := &spans{byTrace: map[string][]*tracev1.Span{}}
	server := httptest.NewServer(collected)
	t.Cleanup(server.Close)
	s := newSale(t, stacktest.Shared(t), hurried, func(c *config.Config) { c.Tracing.Endpoint = server.URL })
	stop, err := observe.StartTracing(t.Context(), observe.Tracing{
		Endpoint: server.URL, Authorization: "Bearer collector", Sample: 1, Timeout: 5 * time.Second, Version: "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	id := s.reserve(time.Minute)
	service := s.serve()
	s.eventually(time.Minute, func() error { return s.is(reservation.StatusEnqueued, id) })
	service.end()
	if err := stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	trace := s.traceOf(id)
	found := collected.trace(trace)
	if len(found) == 0 {
		t.Fatalf("nothing was exported of trace %q, which the message of %s names", trace, id)
	}
	names := map[string]int{}
	for _, span := range found {
		if span.GetName() == "job scanner" && len(span.GetParentSpanId()) == 0 {
			names["the job's run"]++
		}
		text := prototext.Format(span)
		for kind, mark := range map[string]string{"redis": `"redis"`, "postgres": `"postgresql"`, "rocketmq": "rocketmq send"} {
			if strings.Contains(text, mark) {
				names[kind]++
			}
		}
		user := fmt.Sprint("u", s.users)
		if strings.Contains(text, "user:"+user) {
			t.Errorf("a span names the user: %s", text)
		}
	}
	for _, want := range []string{"the job's run", "redis", "postgres", "rocketmq"} {
		if names[want] == 0 {
			t.Errorf("the trace has no span of %s: %v", want, found)
		}
	}
}

// traceOf is the trace that the reservation's message names.
func (s *sale) traceOf(id string) string {
	s.t.Helper()
	for _, broker := range s.stack.Brokers() {
		peer := remoting.NewPeer(broker.Addr(), remoting.Options{})
		s.t.Cleanup(peer.Close)
		for queue := range int32(2) {
			pulled, err := peer.Pull(s.t.Context(), s.config.RocketMQ.Topic, queue, 0, 32)
			if err != nil {
				s.t.Fatal(err)
			}
			for _, record := range pulled.Records {
				if strings.Contains(record.Properties["KEYS"], id) {
					return record.Properties[rocketmq.TraceProperty]
				}
			}
		}
	}
	s.t.Fatalf("no message of %s", id)
	return ""
}
