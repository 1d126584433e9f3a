package reconcile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seckill/reconciler/reservation"
)

// progressSchema is the schema number of [Progress] as JSON.
const progressSchema = 1

// defaultCheckpoint is how often a deep pass says how far it got.
const defaultCheckpoint = 5 * time.Second

// Progress is how far a deep pass has got, for a run that is to continue it.
// The orders of a SKU are walked by their reservation ids, a scope's request
// results shard by shard; an index is walked as a whole, since a cursor of Redis
// does not outlive its server. What was suspicious by then is kept, and takes its
// rounds when the walk is through.
type Progress struct {
	Schema    int             `json:"schema"`
	Selection Selection       `json:"selection"`
	Looked    int64           `json:"looked"` // members
	SKUs      []SKUProgress   `json:"skus"`
	Scopes    []ScopeProgress `json:"scopes"`
	Suspects  []Suspect       `json:"suspects"`
	Beyond    []Beyond        `json:"beyond,omitempty"`
}

// Selection is what a pass compares. Only a run of the same one continues it.
type Selection struct {
	ActivityID string   `json:"activity_id,omitempty"`
	SKUID      string   `json:"sku_id,omitempty"`
	Version    *int64   `json:"activity_version,omitempty"`
	Bucket     *int64   `json:"bucket_id,omitempty"`
	Checks     []string `json:"checks"`
	Deep       bool     `json:"deep"`
}

// SKUProgress is how far the orders of a SKU were compared.
type SKUProgress struct {
	ActivityID string  `json:"activity_id"`
	SKUID      string  `json:"sku_id"`
	Scopes     []Scope `json:"scopes"` // those that its orders were looked for in
	After      string  `json:"after"`  // the last reservation id
	Done       bool    `json:"done"`
}

// ScopeProgress is how far what Redis holds of a scope was compared.
type ScopeProgress struct {
	Scope   Scope               `json:"scope"`
	Shard   int                 `json:"shard"`   // the next request shard
	Indexes []reservation.Index `json:"indexes"` // those that are through
}

// Suspect is a member, or a request result, that contradicted when it was read.
type Suspect struct {
	Scope         Scope       `json:"scope"`
	ReservationID string      `json:"reservation_id,omitempty"`
	UserID        string      `json:"user_id,omitempty"`
	RequestID     string      `json:"request_id,omitempty"`
	Shard         int         `json:"shard,omitempty"`
	Open          []Suspicion `json:"open"`
}

// Suspicion is one contradiction of a [Suspect].
type Suspicion struct {
	Check   string `json:"check"`
	Subject string `json:"subject"`
	Cause   string `json:"cause"`
}

// Beyond counts the suspects of a check that are not kept.
type Beyond struct {
	Check string `json:"check"`
	Scope Scope  `json:"scope"`
	Count int    `json:"count"`
}

// Resume names the run that is to be continued.
type Resume struct {
	RunID     string
	StartedAt time.Time
	Progress  Progress
}

// ErrOtherSelection says that a run compared other scopes or made other checks
// than the one that is to continue it.
var ErrOtherSelection = errors.New("the interrupted run compared something else")

// check says in what an interrupted run's selection differs from that of the
// run which is to continue it.
func (s Selection) check(now Selection) error {
	for _, d := range []struct{ what, was, is string }{
		{"--activity", s.ActivityID, now.ActivityID},
		{"--sku", s.SKUID, now.SKUID},
		{"--version", number(s.Version), number(now.Version)},
		{"--bucket", number(s.Bucket), number(now.Bucket)},
		{"the checks", without(s.Checks, now.Checks), without(now.Checks, s.Checks)},
		{"--deep", strconv.FormatBool(s.Deep), strconv.FormatBool(now.Deep)},
	} {
		if d.was != d.is {
			return fmt.Errorf("%w: %s: %q, now %q. Continue it with the same selection, or run without --resume", ErrOtherSelection, d.what, d.was, d.is)
		}
	}
	return nil
}

// without lists what is in all and not in others.
func without(all, others []string) string {
	return strings.Join(slices.DeleteFunc(slices.Clone(all), func(id string) bool { return slices.Contains(others, id) }), ",")
}

func number(n *int64) string {
	if n == nil {
		return ""
	}
	return strconv.FormatInt(*n, 10)
}

// selection is what the options select.
func (o Options) selection(checks []Check) Selection {
	s := Selection{ActivityID: o.Filter.ActivityID, SKUID: o.Filter.SKUID, Version: o.Filter.Version, Bucket: o.Filter.Bucket, Deep: o.Deep}
	for _, c := range checks {
		s.Checks = append(s.Checks, c.ID)
	}
	slices.Sort(s.Checks)
	return s
}

// walked is how far a set pass has got.
type walked struct {
	skus   map[skuName]*SKUProgress
	scopes map[reservation.Scope]*ScopeProgress

	every time.Duration
	next  time.Time
}

func newWalked(every time.Duration) *walked {
	every = orDefault(every, defaultCheckpoint)
	return &walked{skus: map[skuName]*SKUProgress{}, scopes: map[reservation.Scope]*ScopeProgress{}, every: every, next: time.Now().Add(every)}
}

// orders is the position in a SKU's orders. It begins again where the orders
// are to be looked for in a scope that is new since.
func (w *walked) orders(k SKU, scopes []reservation.Scope) *SKUProgress {
	name := skuName{k.ActivityID, k.SKUID}
	var names []Scope
	for _, s := range scopes {
		names = append(names, jsonScope(s))
	}
	at := w.skus[name]
	if at == nil || slices.ContainsFunc(names, func(s Scope) bool { return !slices.Contains(at.Scopes, s) }) {
		at = &SKUProgress{ActivityID: k.ActivityID, SKUID: k.SKUID, Scopes: names}
		w.skus[name] = at
	}
	return at
}

// scope is the position in a scope.
func (w *walked) scope(s reservation.Scope) *ScopeProgress {
	if w.scopes[s] == nil {
		w.scopes[s] = &ScopeProgress{Scope: jsonScope(s)}
	}
	return w.scopes[s]
}

// checkpoint says how far the pass has got, if it is time to. Saying so takes
// no more than a small part of the time.
func (p *sets) checkpoint(ctx context.Context) {
	const share = 20
	tell := p.run.options.Checkpoint
	if tell == nil || !p.run.options.Deep || time.Now().Before(p.walked.next) {
		return
	}
	began := time.Now()
	tell(ctx, p.progress())
	p.walked.next = time.Now().Add(max(p.walked.every, share*time.Since(began)))
}

// progress is the state of the walk, in a fixed order.
func (p *sets) progress() Progress {
	out := Progress{
		Schema: progressSchema, Selection: p.run.options.selection(p.run.checks), Looked: p.done,
		SKUs: []SKUProgress{}, Scopes: []ScopeProgress{}, Suspects: make([]Suspect, 0, len(p.suspects)),
	}
	for _, at := range p.walked.skus {
		out.SKUs = append(out.SKUs, *at)
	}
	for _, at := range p.walked.scopes {
		out.Scopes = append(out.Scopes, *at)
	}
	for _, s := range p.suspects {
		out.Suspects = append(out.Suspects, s.suspect())
	}
	for in, n := range p.beyond {
		out.Beyond = append(out.Beyond, Beyond{in.check, jsonScope(in.scope), n})
	}
	slices.SortFunc(out.SKUs, func(a, b SKUProgress) int {
		return cmp.Or(cmp.Compare(a.ActivityID, b.ActivityID), cmp.Compare(a.SKUID, b.SKUID))
	})
	slices.SortFunc(out.Scopes, func(a, b ScopeProgress) int { return compareScopes(a.Scope, b.Scope) })
	slices.SortFunc(out.Suspects, func(a, b Suspect) int {
		return cmp.Or(compareScopes(a.Scope, b.Scope), cmp.Compare(a.ReservationID, b.ReservationID),
			cmp.Compare(a.Shard, b.Shard), cmp.Compare(a.RequestID, b.RequestID))
	})
	return out
}

func (s *suspects) suspect() Suspect {
	out := Suspect{
		Scope: jsonScope(s.query.Scope), ReservationID: s.query.ID, UserID: s.query.UserID, RequestID: s.query.RequestID,
	}
	if s.query.ID == "" {
		out.Scope, out.Shard, out.RequestID = jsonScope(s.result.Scope), s.result.Shard, s.result.RequestID
	}
	for key, st := range s.open {
		out.Open = append(out.Open, Suspicion{key.check, key.subject, st.last.cause})
	}
	slices.SortFunc(out.Open, func(a, b Suspicion) int {
		return cmp.Or(cmp.Compare(a.Check, b.Check), cmp.Compare(a.Subject, b.Subject))
	})
	return out
}

// resume takes up where an interrupted walk ended. Scopes that are no longer
// compared are left out.
func (p *sets) resume(from Progress) {
	p.done = from.Looked
	for _, at := range from.SKUs {
		p.walked.skus[skuName{at.ActivityID, at.SKUID}] = &at
	}
	for _, at := range from.Scopes {
		p.walked.scopes[at.Scope.Reservation()] = &at
	}
	for _, b := range from.Beyond {
		if in := (checkIn{b.Check, b.Scope.Reservation()}); p.targets[in.scope] != nil {
			p.beyond[in], p.kept[in] = b.Count, maxSuspects
		}
	}
	for _, s := range from.Suspects {
		if p.targets[s.Scope.Reservation()] != nil {
			p.suspectAgain(s)
		}
	}
}

// suspectAgain takes up a suspect of an interrupted run, as if it had been
// found in the first round of this one.
func (p *sets) suspectAgain(s Suspect) {
	scope := s.Scope.Reservation()
	of := suspects{query: MemberQuery{Ref{scope, s.ReservationID}, s.UserID, s.RequestID}, open: map[aspect]*standing{}}
	if s.ReservationID == "" {
		of.query, of.result = MemberQuery{}, RequestResult{Scope: scope, Shard: s.Shard, RequestID: s.RequestID}
	}
	for _, o := range s.Open {
		of.open[aspect{o.Check, o.Subject}] = &standing{rounds: 1, alike: true, last: contradiction{
			check: o.Check, scope: scope, subject: o.Subject, cause: o.Cause,
		}}
		if in := (checkIn{o.Check, scope}); p.beyond[in] == 0 {
			p.kept[in]++
		}
	}
	p.suspects[of.origin()] = &of
}

// Resumable says whether the run was told to stop and left what another run
// continues from.
func (r *Report) Resumable() bool { return r.resumable }
