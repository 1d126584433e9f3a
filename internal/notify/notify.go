// Package notify tells an HTTP endpoint of what waits for a person: each new
// task, and each halt of releases, once it is open.
//
//	tasks in PostgreSQL → look → queue (bounded) → POST, signed → receiver
//
// The task in the database is the queue that lasts. This package looks for
// unresolved tasks that it has not delivered yet, so no worker waits for a
// receiver, and what a receiver missed is still there. Delivery is at least
// once for tasks that are unresolved while the daemon runs: after a restart all
// of them are sent again, under the same id. What was resolved before it could be
// delivered is not sent.
//
// # Signature
//
// Every request carries the headers
//
//	Seckill-Event      task_opened or halt_opened
//	Seckill-Delivery   task-<id>: the same for every attempt, to tell repeats apart
//	Seckill-Timestamp  seconds since 1970, of the attempt
//	Seckill-Signature  v1=<hex of HMAC-SHA256(secret, timestamp + "." + body)>
package notify

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/seckill/reconciler/internal/pgstore"
)

// Schema is the schema number of [Event] as JSON.
const Schema = 1

// The events.
const (
	EventTask = "task_opened"
	EventHalt = "halt_opened" // the task holds back releases
)

// The headers of a request.
const (
	HeaderEvent     = "Seckill-Event"
	HeaderDelivery  = "Seckill-Delivery"
	HeaderTimestamp = "Seckill-Timestamp"
	HeaderSignature = "Seckill-Signature"
)

// Event is the body of a request. It holds no user id.
type Event struct {
	Schema int       `json:"schema"`
	Event  string    `json:"event"`
	ID     string    `json:"id"` // Seckill-Delivery
	SentAt time.Time `json:"sent_at"`
	Task   Task      `json:"task"`
}

// Task is what waits for a person.
type Task struct {
	ID          int64     `json:"id"`
	Kind        string    `json:"kind"`
	Scope       string    `json:"scope"` // empty: the whole installation
	Cause       string    `json:"cause"`
	Count       int64     `json:"count"`
	Sample      []string  `json:"sample"` // a few reservations or requests
	FirstSeenAt time.Time `json:"first_seen_at"`
	LastSeenAt  time.Time `json:"last_seen_at"`
}

// Tasks is where the tasks are; *[pgstore.Store] is one.
type Tasks interface {
	UnresolvedIDs(ctx context.Context, limit int) ([]int64, error)
	TasksOf(ctx context.Context, ids []int64) ([]pgstore.Task, error)
}

// Options say what to post, and where to.
type Options struct {
	URL     string
	Secret  string
	Timeout time.Duration // of one request
	Every   time.Duration // between two looks
	Tasks   Tasks
	// Halts are the kinds of task that hold back releases.
	Halts []string
	Log   *slog.Logger
	// Delivered counts the attempts: "delivered", "refused" or "failed".
	Delivered func(result string)
	// BackoffMin and BackoffMax bound the pause after a failure, which doubles
	// each time; 0 means 1 s and 5 min.
	BackoffMin, BackoffMax time.Duration
}

// Bounds of one look.
const (
	maxKnown  = 10_000 // unresolved tasks that are looked at
	maxQueued = 100    // tasks that are posted before the next look
	maxSample = 5
)

// Notifier posts tasks. [Notifier.Run] does it; it is to run once at a time.
type Notifier struct {
	o         Options
	client    *http.Client
	delivered map[int64]bool // of those that are unresolved
	paused    map[int64]*pause
	away      pause // of the receiver as a whole
}

// pause is a wait after failures.
type pause struct {
	failures int
	until    time.Time
}

// New makes a notifier. It connects to nothing.
func New(o Options) *Notifier {
	if o.BackoffMin <= 0 {
		o.BackoffMin = time.Second
	}
	if o.BackoffMax <= 0 {
		o.BackoffMax = 5 * time.Minute
	}
	if o.Delivered == nil {
		o.Delivered = func(string) {}
	}
	transport := &http.Transport{
		DialContext:         (&net.Dialer{Timeout: o.Timeout}).DialContext,
		TLSHandshakeTimeout: o.Timeout, ForceAttemptHTTP2: true, MaxIdleConns: 1, IdleConnTimeout: time.Minute,
	}
	return &Notifier{
		o: o, delivered: map[int64]bool{}, paused: map[int64]*pause{},
		client: &http.Client{Transport: transport, Timeout: o.Timeout, CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // what is signed for one endpoint is not carried to another
		}},
	}
}

// Run looks for tasks and posts them until ctx ends.
func (n *Notifier) Run(ctx context.Context) {
	defer n.client.CloseIdleConnections()
	ticker := time.NewTicker(n.o.Every)
	defer ticker.Stop()
	for {
		n.look(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// look posts what is new. A PostgreSQL that cannot be asked is asked next time.
func (n *Notifier) look(ctx context.Context) {
	if time.Now().Before(n.away.until) {
		return
	}
	ids, err := n.o.Tasks.UnresolvedIDs(ctx, maxKnown)
	if err != nil {
		n.o.Log.Debug("new tasks cannot be looked for", "error", err)
		return
	}
	n.forget(ids)
	queue := slices.DeleteFunc(ids, func(id int64) bool {
		return n.delivered[id] || (n.paused[id] != nil && time.Now().Before(n.paused[id].until))
	})
	tasks, err := n.o.Tasks.TasksOf(ctx, queue[:min(len(queue), maxQueued)])
	if err != nil {
		n.o.Log.Debug("new tasks cannot be read", "error", err)
		return
	}
	for _, t := range tasks {
		if ctx.Err() != nil || !n.deliver(ctx, t) {
			return
		}
	}
}

// forget drops what is resolved by now.
func (n *Notifier) forget(unresolved []int64) {
	still := make(map[int64]bool, len(unresolved))
	for _, id := range unresolved {
		still[id] = true
	}
	for id := range n.delivered {
		if !still[id] {
			delete(n.delivered, id)
		}
	}
	for id := range n.paused {
		if !still[id] {
			delete(n.paused, id)
		}
	}
}

// RefusedError is an answer that says no to this one request.
type RefusedError struct{ Status int }

func (e *RefusedError) Error() string { return fmt.Sprintf("the receiver answered %d", e.Status) }

// deliver posts one task, and reports whether others are worth trying now. A
// task that could not be delivered is tried again later and holds up no other:
// next time the others come first.
func (n *Notifier) deliver(ctx context.Context, t pgstore.Task) bool {
	err := n.post(ctx, t)
	if err == nil {
		n.o.Delivered("delivered")
		n.delivered[t.ID] = true
		delete(n.paused, t.ID)
		if n.away.failures > 0 {
			n.o.Log.Info("the webhook takes tasks again", "failures", n.away.failures)
			n.away = pause{}
		}
		return true
	}
	if ctx.Err() != nil {
		return false
	}
	p := n.paused[t.ID]
	if p == nil {
		p = &pause{}
		n.paused[t.ID] = p
	}
	refused, isRefused := errors.AsType[*RefusedError](err)
	if isRefused {
		n.o.Delivered("refused")
		if p.failures == 0 {
			n.o.Log.Warn("the webhook refuses a task; it is tried again", "task", t.ID, "kind", t.Kind, "error", refused)
		}
	} else {
		n.o.Delivered("failed")
		if n.away.failures == 0 { // one line, however long it is away
			n.o.Log.Warn("the webhook does not take tasks; they wait", "error", err)
		}
		n.wait(&n.away)
	}
	n.wait(p)
	return isRefused
}

// wait doubles the pause, with jitter.
func (n *Notifier) wait(p *pause) {
	const mostDoublings = 20
	d := min(n.o.BackoffMin<<min(p.failures, mostDoublings), n.o.BackoffMax)
	p.failures++
	p.until = time.Now().Add(d/2 + rand.N(d/2+1)) //nolint:gosec // jitter
}

// refusals are the answers that concern one request; all others, such as 404,
// concern the receiver.
var refusals = []int{http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity}

// post sends the event of one task.
func (n *Notifier) post(ctx context.Context, t pgstore.Task) error {
	now := time.Now()
	event := n.event(t, now)
	body, err := json.Marshal(event)
	if err != nil {
		return fmt.Errorf("encode task %d: %w", t.ID, err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, n.o.URL, bytes.NewReader(body))
	if err != nil {
		return errors.New("the URL of the webhook is none") // the cause would show it
	}
	timestamp := strconv.FormatInt(now.Unix(), 10)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("User-Agent", "seckill-reconciler")
	request.Header.Set(HeaderEvent, event.Event)
	request.Header.Set(HeaderDelivery, event.ID)
	request.Header.Set(HeaderTimestamp, timestamp)
	request.Header.Set(HeaderSignature, Sign(n.o.Secret, timestamp, body))
	response, err := n.client.Do(request)
	if ue, ok := errors.AsType[*url.Error](err); ok {
		return fmt.Errorf("post task %d: %w", t.ID, ue.Err) // without the URL, which may hold a token
	}
	if err != nil {
		return fmt.Errorf("post task %d: %w", t.ID, err)
	}
	defer func() { _ = response.Body.Close() }()
	const drained = 4 << 10 // so that the connection can be used again
	_, _ = io.CopyN(io.Discard, response.Body, drained)
	switch status := response.StatusCode; {
	case status >= 200 && status < 300:
		return nil
	case slices.Contains(refusals, status):
		return &RefusedError{status}
	case status >= 300 && status < 400:
		return fmt.Errorf("post task %d: the receiver redirects (%d), which is refused: set notify.webhook.url to where it is", t.ID, status)
	default:
		return fmt.Errorf("post task %d: the receiver answered %d", t.ID, status)
	}
}

func (n *Notifier) event(t pgstore.Task, now time.Time) Event {
	e := Event{
		Schema: Schema, Event: EventTask, ID: fmt.Sprintf("task-%d", t.ID), SentAt: now.UTC(),
		Task: Task{
			ID: t.ID, Kind: t.Kind, Scope: t.Scope, Cause: t.Cause, Count: t.Count,
			Sample: append([]string{}, t.Sample[:min(len(t.Sample), maxSample)]...), FirstSeenAt: t.FirstSeenAt, LastSeenAt: t.LastSeenAt,
		},
	}
	if slices.Contains(n.o.Halts, t.Kind) {
		e.Event = EventHalt
	}
	return e
}

// Sign is the value of [HeaderSignature].
func Sign(secret, timestamp string, body []byte) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(timestamp + "."))
	mac.Write(body)
	return "v1=" + hex.EncodeToString(mac.Sum(nil))
}
