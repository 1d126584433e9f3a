package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
)

// Check asks one dependency whether it can be used now.
type Check struct {
	Name string
	// Run returns why not. It is called from one goroutine at a time.
	Run func(ctx context.Context) error
}

// LeaseState is how the single instance's lease stands.
type LeaseState string

// The states of the lease. An instance that waits is ready: a replacement could
// otherwise never become ready beside the instance that it replaces.
const (
	LeaseHeld    LeaseState = "held"    // this instance works
	LeaseWaiting LeaseState = "waiting" // another instance works
	LeaseLost    LeaseState = "lost"    // it was held; all work has stopped
)

// Lease is what /readyz tells of the lease.
type Lease struct {
	State  LeaseState `json:"state"`
	Holder string     `json:"holder,omitempty"` // of the lease, if it is known
	Since  time.Time  `json:"since,omitzero"`   // when the state began
}

// readiness is the answer of /readyz.
type readiness struct {
	Ready  bool                  `json:"ready"`
	Lease  *Lease                `json:"lease,omitempty"`
	Checks map[string]dependency `json:"checks"`
}

// dependency is the outcome of one check.
type dependency struct {
	OK        bool   `json:"ok"`
	Error     string `json:"error,omitempty"`
	LatencyMS int64  `json:"latency_ms"`
}

// readinessHandler runs all checks at once, each bounded in time. Requests that
// come while a check is running share it, so a check that hangs is not started
// again and again.
type readinessHandler struct {
	opts   Options
	shared singleflight.Group
}

func newReadiness(opts Options) *readinessHandler { return &readinessHandler{opts: opts} }

func (h *readinessHandler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer := h.ask(r.Context())
	body, err := json.MarshalIndent(answer, "", "  ")
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	if !answer.Ready {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_, _ = w.Write(append(body, '\n')) // the client may be gone
}

func (h *readinessHandler) ask(ctx context.Context) readiness {
	answer := readiness{Ready: true, Checks: make(map[string]dependency, len(h.opts.Checks))}
	var (
		mu sync.Mutex
		wg sync.WaitGroup
	)
	for _, c := range h.opts.Checks {
		wg.Go(func() {
			d := h.check(ctx, c)
			mu.Lock()
			defer mu.Unlock()
			answer.Checks[c.Name] = d
			answer.Ready = answer.Ready && d.OK
		})
	}
	wg.Wait()
	if h.opts.Lease != nil {
		lease := h.opts.Lease()
		answer.Lease = &lease
		answer.Ready = answer.Ready && lease.State != LeaseLost
	}
	return answer
}

// check runs c or joins the run that is going on. It waits no longer than the
// limit, even for a check that ignores its context.
func (h *readinessHandler) check(ctx context.Context, c Check) dependency {
	started := time.Now()
	result := h.shared.DoChan(c.Name, func() (_ any, err error) {
		defer func() {
			if v := recover(); v != nil { // else it would end the process
				err = fmt.Errorf("the check panicked: %v", v)
			}
		}()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), h.opts.CheckTimeout)
		defer cancel()
		return nil, c.Run(ctx)
	})
	limit := time.NewTimer(h.opts.CheckTimeout)
	defer limit.Stop()
	var err error
	select {
	case r := <-result:
		err = r.Err
	case <-limit.C:
		err = fmt.Errorf("no answer within %s", h.opts.CheckTimeout)
	case <-ctx.Done():
		err = errors.New("the request ended before the check")
	}
	d := dependency{OK: err == nil, LatencyMS: time.Since(started).Milliseconds()}
	if err != nil {
		d.Error = err.Error()
	}
	return d
}
