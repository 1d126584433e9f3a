package notify_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/devstack/stacktest"
	"github.com/seckill/reconciler/internal/notify"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const secret = "a secret of the test"

// receiver is an endpoint that keeps what it took.
type receiver struct {
	t      *testing.T
	server *httptest.Server
	answer func(attempt int, e notify.Event) int // status; nil: 204
	asked  atomic.Int64

	mu    sync.Mutex
	taken []notify.Event
}

func newReceiver(t *testing.T, answer func(attempt int, e notify.Event) int) *receiver {
	t.Helper()
	r := &receiver{t: t, answer: answer}
	r.server = httptest.NewServer(http.HandlerFunc(r.serve))
	t.Cleanup(r.server.Close)
	return r
}

func (r *receiver) serve(w http.ResponseWriter, request *http.Request) {
	attempt := int(r.asked.Add(1))
	body, err := io.ReadAll(request.Body)
	if err != nil {
		return // it was given up
	}
	var e notify.Event
	if err := json.Unmarshal(body, &e); err != nil {
		r.t.Errorf("%v in %s", err, body)
	}
	timestamp := request.Header.Get(notify.HeaderTimestamp)
	if got := request.Header.Get(notify.HeaderSignature); got != notify.Sign(secret, timestamp, body) || len(got) != len("v1=")+64 {
		r.t.Errorf("signature %q", got)
	}
	if request.Header.Get(notify.HeaderDelivery) != e.ID || request.Header.Get(notify.HeaderEvent) != e.Event || e.Schema != 1 {
		r.t.Errorf("headers %v, body %s", request.Header, body)
	}
	status := http.StatusNoContent
	if r.answer != nil {
		status = r.answer(attempt, e)
	}
	if status == http.StatusFound {
		w.Header().Set("Location", "/elsewhere")
	}
	if status < 300 {
		r.mu.Lock()
		r.taken = append(r.taken, e)
		r.mu.Unlock()
	}
	w.WriteHeader(status)
}

func (r *receiver) kinds() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var kinds []string
	for _, e := range r.taken {
		kinds = append(kinds, e.Event+" "+e.Task.Kind)
	}
	slices.Sort(kinds)
	return kinds
}

// office is the tasks of a test.
type office struct {
	t     *testing.T
	store *pgstore.Store
	log   bytes.Buffer
}

func newOffice(t *testing.T) *office {
	t.Helper()
	store, err := pgstore.Open(t.Context(), pgstore.Config{URL: stacktest.Database(t, stacktest.Shared(t))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	return &office{t: t, store: store}
}

func (o *office) report(kinds ...string) {
	o.t.Helper()
	var reports []reservation.TaskReport
	for _, kind := range kinds {
		reports = append(reports, reservation.TaskReport{Kind: kind, Scope: "a:1:s:2:v:3:b:0", Cause: "test", Count: 2, Sample: []string{"r1", "r2"}})
	}
	if err := o.store.ReportTasks(o.t.Context(), reports); err != nil {
		o.t.Fatal(err)
	}
}

// run notifies until the test or stop ends it.
func (o *office) run(url string, tasks notify.Tasks, change ...func(*notify.Options)) (stop func()) {
	options := notify.Options{
		URL: url, Secret: secret, Timeout: 5 * time.Second, Every: 20 * time.Millisecond, Tasks: tasks,
		Halts: []string{pgstore.TaskReleaseStorm}, Log: slog.New(slog.NewTextHandler(&o.log, nil)),
		BackoffMin: 20 * time.Millisecond, BackoffMax: 100 * time.Millisecond,
	}
	for _, f := range change {
		f(&options)
	}
	ctx, cancel := context.WithCancel(o.t.Context())
	var running sync.WaitGroup
	running.Go(func() { notify.New(options).Run(ctx) })
	stop = func() { cancel(); running.Wait() }
	o.t.Cleanup(stop)
	return stop
}

func eventually(t *testing.T, done func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if err = done(); err == nil {
			return
		}
	}
	t.Fatal(err)
}

func (r *receiver) takes(want ...string) func() error {
	return func() error {
		if got := r.kinds(); !slices.Equal(got, want) {
			return fmt.Errorf("taken %q, want %q", got, want)
		}
		return nil
	}
}

// watched counts the looks for new tasks.
type watched struct {
	notify.Tasks
	looks atomic.Int64
}

func (w *watched) UnresolvedIDs(ctx context.Context, limit int) ([]int64, error) {
	w.looks.Add(1)
	return w.Tasks.UnresolvedIDs(ctx, limit)
}

// Each task is posted once while the daemon runs, whatever else happens to it;
// another one of the same kind is another task.
func TestEachTaskOnce(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	r := newReceiver(t, nil)
	o.report("dead_letter")
	tasks := &watched{Tasks: o.store}
	stop := o.run(r.server.URL, tasks)
	eventually(t, r.takes("task_opened dead_letter"))
	o.report("dead_letter", pgstore.TaskReleaseStorm)
	eventually(t, r.takes("halt_opened release_storm", "task_opened dead_letter"))
	seen := tasks.looks.Load()
	eventually(t, func() error {
		if tasks.looks.Load() < seen+3 {
			return errors.New("it looks no more")
		}
		return r.takes("halt_opened release_storm", "task_opened dead_letter")()
	})
	if e := r.taken[0]; e.Task.Scope != "a:1:s:2:v:3:b:0" || e.Task.Count != 2 || len(e.Task.Sample) != 2 || e.Task.FirstSeenAt.IsZero() {
		t.Errorf("%+v", e)
	}
	if err := o.store.ResolveTask(t.Context(), r.taken[0].Task.ID, "alice", "test"); err != nil {
		t.Fatal(err)
	}
	o.report("dead_letter")
	eventually(t, r.takes("halt_opened release_storm", "task_opened dead_letter", "task_opened dead_letter"))

	// A daemon that starts anew cannot know what was delivered, and says it again
	// under the same ids.
	stop()
	ids := map[string]bool{}
	for _, e := range r.taken {
		ids[e.ID] = true
	}
	o.run(r.server.URL, o.store)
	eventually(t, func() error {
		if got := len(r.kinds()); got != 5 {
			return fmt.Errorf("%d deliveries, want two again", got)
		}
		return nil
	})
	for _, e := range r.taken[3:] {
		if !ids[e.ID] {
			t.Errorf("%s is new", e.ID)
		}
	}
}

// A receiver that is away, slow, failing or moved gets every task that still
// stands once it is back, and is one line in the log until then.
func TestReceiverAway(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]func(r *receiver) int{
		"500":      func(*receiver) int { return http.StatusInternalServerError },
		"404":      func(*receiver) int { return http.StatusNotFound },
		"redirect": func(*receiver) int { return http.StatusFound },
		"slow":     func(*receiver) int { time.Sleep(300 * time.Millisecond); return http.StatusServiceUnavailable },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOffice(t)
			var healed atomic.Bool
			r := newReceiver(t, nil)
			r.answer = func(int, notify.Event) int {
				if healed.Load() {
					return http.StatusNoContent
				}
				return broken(r)
			}
			o.report("dead_letter", "orphan_member", "invariant_broken")
			stop := o.run(r.server.URL, o.store, func(o *notify.Options) {
				if name == "slow" {
					o.Timeout = 50 * time.Millisecond
				}
			})
			eventually(t, func() error {
				if n := r.asked.Load(); n < 4 {
					return fmt.Errorf("%d attempts", n)
				}
				return nil
			})
			if got := r.kinds(); len(got) != 0 {
				t.Fatalf("taken %q", got)
			}
			unresolved, err := o.store.UnresolvedIDs(t.Context(), 10)
			if err != nil {
				t.Fatal(err)
			}
			if err := o.store.ResolveTask(t.Context(), unresolved[0], "alice", "test"); err != nil {
				t.Fatal(err)
			}
			healed.Store(true)
			eventually(t, func() error {
				if got := len(r.kinds()); got < 2 {
					return fmt.Errorf("%d of 2 delivered", got)
				}
				return nil
			})
			stop()
			log := o.log.String()
			if strings.Count(log, "level=WARN") != 1 || !strings.Contains(log, "takes tasks again") || strings.Contains(log, r.server.URL) || strings.Contains(log, secret) {
				t.Errorf("log:\n%s", log)
			}
		})
	}
}

// What a receiver chokes on holds up nothing else.
func TestOneTaskIsRefused(t *testing.T) {
	t.Parallel()
	for _, status := range []int{http.StatusBadRequest, http.StatusInternalServerError} {
		t.Run(strconv.Itoa(status), func(t *testing.T) {
			t.Parallel()
			o := newOffice(t)
			r := newReceiver(t, func(_ int, e notify.Event) int {
				if e.Task.Kind == "dead_letter" {
					return status
				}
				return http.StatusOK
			})
			o.report("dead_letter", "orphan_member", "invariant_broken")
			o.run(r.server.URL, o.store)
			eventually(t, r.takes("task_opened invariant_broken", "task_opened orphan_member"))
		})
	}
}

// Where nobody listens it is tried again and again, says so once, and shows no
// token of the URL.
func TestNobodyThere(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	var failed atomic.Int64
	stop := o.run("http://127.0.0.1:1/hook?token=t0ken", o.store, func(o *notify.Options) {
		o.Delivered = func(result string) {
			if result == "failed" {
				failed.Add(1)
			}
		}
	})
	o.report("dead_letter")
	eventually(t, func() error {
		if n := failed.Load(); n < 3 {
			return fmt.Errorf("%d attempts", n)
		}
		return nil
	})
	stop()
	if log := o.log.String(); strings.Count(log, "level=WARN") != 1 || strings.Contains(log, "t0ken") || strings.Contains(log, "http://") {
		t.Errorf("log:\n%s", log)
	}
}
