package view

import (
	"time"

	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/reservation"
)

// Explanation is everything known of one reservation in JSON. A user appears
// as a hash only.
type Explanation struct {
	Schema        int        `json:"schema"`
	Scope         string     `json:"scope"` // empty: it is nowhere in what answered
	ReservationID string     `json:"reservation_id"`
	Now           *time.Time `json:"now"` // on the clock of the scope's Redis node
	Held          bool       `json:"held"`
	Redis         *Hash      `json:"redis"`    // null: the hash is gone, or could not be read
	Postgres      Record     `json:"postgres"` // P
	MQ            Message    `json:"mq"`       // M
	Decision      *Decision  `json:"decision"` // null: it could not be read
	Next          Next       `json:"next"`
	Indexes       []Indexed  `json:"indexes"`
	Unread        []Unread   `json:"unread"`
}

// Hash is a reservation's hash.
type Hash struct {
	Status        string     `json:"status"`
	Malformed     string     `json:"malformed,omitempty"`
	RequestID     string     `json:"request_id"`
	MessageID     string     `json:"message_id"`
	UserIDHash    string     `json:"user_id_hash"`
	ReservedAt    *time.Time `json:"reserved_at"`
	ExpiresAt     *time.Time `json:"expires_at"`
	UpdatedAt     *time.Time `json:"updated_at"`
	OrderID       string     `json:"order_id"`
	ErrorCode     string     `json:"error_code"`
	ReleaseReason string     `json:"release_reason"`
	ReleasedAt    *time.Time `json:"released_at"`
	LastSentAt    *time.Time `json:"last_sent_at"`
	SendCount     int64      `json:"send_count"`
	ResendCount   int64      `json:"resend_count"`
	RetryCount    int64      `json:"retry_count"`
	Position      string     `json:"mq_position"`
}

// Record is what PostgreSQL holds.
type Record struct {
	State     string     `json:"state"`
	Cause     string     `json:"cause"`
	Claim     string     `json:"claim"` // outcome, or empty
	ClaimedBy string     `json:"claimed_by"`
	ClaimedAt *time.Time `json:"claimed_at"`
	Reason    string     `json:"reason"`
	Orders    []Order    `json:"orders"`
}

// Order is one order of a reservation.
type Order struct {
	OrderID       string     `json:"order_id"`
	ReservationID string     `json:"reservation_id,omitempty"`
	Active        bool       `json:"active"`
	CreatedAt     *time.Time `json:"created_at"`
}

// Message is what RocketMQ knows of the message.
type Message struct {
	State  string     `json:"state"` // empty: not asked
	Since  *time.Time `json:"since"`
	Cause  string     `json:"cause"`
	Detail string     `json:"detail"`
}

// Decision is the row of the decision table.
type Decision struct {
	Row   string   `json:"row"`
	Verb  string   `json:"verb"`
	Path  []string `json:"path"`
	Cause string   `json:"cause"`
	Task  string   `json:"task"`
}

// Next is what the daemon does next, in words.
type Next struct {
	Does     string     `json:"does"`
	Why      string     `json:"why"`
	When     string     `json:"when"`
	At       *time.Time `json:"at"`
	HeldBack []string   `json:"held_back"`
}

// Indexed is a place in one of the indexes.
type Indexed struct {
	Index string    `json:"index"`
	Due   time.Time `json:"due"`
}

// Unread is a source that did not say what it was asked.
type Unread struct {
	Source string `json:"source"`
	Reason string `json:"reason"`
}

// OfExplanation is an explanation, with users by their hash.
func OfExplanation(e daemon.Explanation, hasher observe.UserHasher) Explanation {
	m := e.Input.Member
	v := Explanation{
		Schema: 1, ReservationID: e.ID, Held: e.Held, Postgres: ofRecord(e), Indexes: []Indexed{}, Unread: OfUnread(e.Unread),
		MQ:   Message{State: string(e.Messages.State), Since: AtMS(e.Messages.SinceMS), Cause: e.Messages.Cause, Detail: e.Messages.Detail},
		Next: Next{e.Next.Does, e.Next.Why, e.Next.When, OrNull(e.Next.At), NonNil(e.Next.HeldBack)},
	}
	if e.Scope != (reservation.Scope{}) {
		v.Scope = e.Scope.Tag()
	}
	if !e.Decided {
		return v
	}
	v.Now, v.Decision = AtMS(e.Input.NowMS), ofAction(e.Action)
	if m.InPending {
		v.Indexes = append(v.Indexes, Indexed{string(reservation.SendPending), time.UnixMilli(m.PendingScoreMS).UTC()})
	}
	if m.InExpiry {
		v.Indexes = append(v.Indexes, Indexed{string(reservation.ReservationExpiry), time.UnixMilli(m.ExpiryScoreMS).UTC()})
	}
	if !m.Missing {
		v.Redis = ofHash(m, hasher)
	}
	return v
}

func ofAction(a reservation.Action) *Decision {
	d := &Decision{Row: pass.RowName(a.Row), Verb: string(a.Verb), Cause: a.Cause, Path: []string{}}
	for _, status := range a.Path {
		d.Path = append(d.Path, string(status))
	}
	if a.Task != nil {
		d.Task = a.Task.Kind
	}
	return d
}

func ofHash(m reservation.Member, hasher observe.UserHasher) *Hash {
	r := m.Reservation
	v := &Hash{
		Status: string(r.Status), RequestID: r.RequestID, MessageID: r.MessageID,
		ReservedAt: AtMS(r.ReservedAtMS), ExpiresAt: AtMS(r.ExpiresAtMS), UpdatedAt: AtMS(r.UpdatedAtMS),
		OrderID: r.OrderID, ErrorCode: r.ErrorCode, ReleaseReason: r.ReleaseReason, ReleasedAt: AtMS(r.ReleasedAtMS),
		LastSentAt: AtMS(r.LastSentAtMS), SendCount: r.SendCount, ResendCount: r.ResendCount, RetryCount: r.RetryCount,
		Position: r.Position,
	}
	if r.UserID != "" {
		v.UserIDHash = hasher.Hash(r.UserID)
	}
	if m.Malformed != nil {
		v.Malformed = m.Malformed.Error()
	}
	return v
}

func ofRecord(e daemon.Explanation) Record {
	p := Record{State: string(e.Input.Orders.State), Cause: e.Input.Orders.Cause, Orders: []Order{}}
	if c := e.Record.Claim; c != nil {
		p.Claim, p.ClaimedBy, p.ClaimedAt, p.Reason = string(c.Outcome), c.ClaimedBy, OrNull(c.ClaimedAt), c.Reason
	}
	for _, o := range e.Record.Orders {
		p.Orders = append(p.Orders, Order{OrderID: o.OrderID, Active: o.Active, CreatedAt: OrNull(o.CreatedAt)})
	}
	return p
}

// OfUnread are the sources that did not answer.
func OfUnread(unread []daemon.Unread) []Unread {
	views := make([]Unread, len(unread))
	for i, u := range unread {
		views[i] = Unread(u)
	}
	return views
}

// AtMS is the time of a number of milliseconds; nil for 0.
func AtMS(ms int64) *time.Time {
	if ms == 0 {
		return nil
	}
	at := time.UnixMilli(ms).UTC()
	return &at
}

// RequestFinding is everything known of a request in JSON.
type RequestFinding struct {
	Schema       int           `json:"schema"`
	RequestID    string        `json:"request_id"`
	Results      []Result      `json:"results"`
	Orders       []Order       `json:"orders"`
	Reservations []Explanation `json:"reservations"`
	Unread       []Unread      `json:"unread"`
}

// Result is what a scope keeps of a request.
type Result struct {
	Scope         string `json:"scope"`
	Code          int64  `json:"code"`
	Status        string `json:"status"` // the code's name, or the status of a rebuilt result
	ReservationID string `json:"reservation_id"`
	UserIDHash    string `json:"user_id_hash"`
	Malformed     string `json:"malformed,omitempty"`
}

// OfRequest is what was found of a request.
func OfRequest(f daemon.RequestFinding, hasher observe.UserHasher) RequestFinding {
	v := RequestFinding{
		Schema: 1, RequestID: f.RequestID, Results: []Result{}, Orders: ofOrders(f.Orders),
		Reservations: ofExplanations(f.Reservations, hasher), Unread: OfUnread(f.Unread),
	}
	for _, r := range f.Results {
		row := Result{Scope: r.Scope.Tag(), Malformed: r.Malformed}
		if r.Malformed == "" {
			row.Code, row.Status, row.ReservationID = r.Result.Code, r.Result.Status, r.Result.ReservationID
			row.UserIDHash = hasher.Hash(r.Result.UserID)
		}
		v.Results = append(v.Results, row)
	}
	return v
}

// UserFinding is everything known of a user in JSON.
type UserFinding struct {
	Schema       int           `json:"schema"`
	UserIDHash   string        `json:"user_id_hash"`
	Markers      []Marker      `json:"markers"`
	Orders       []Order       `json:"orders"`
	Reservations []Explanation `json:"reservations"`
	Unread       []Unread      `json:"unread"`
}

// Marker is the live reservation that a user has in a scope.
type Marker struct {
	Scope         string `json:"scope"`
	ReservationID string `json:"reservation_id"`
}

// OfUser is what was found of a user.
func OfUser(userID string, f daemon.UserFinding, hasher observe.UserHasher) UserFinding {
	v := UserFinding{
		Schema: 1, UserIDHash: hasher.Hash(userID), Markers: []Marker{}, Orders: ofOrders(f.Orders),
		Reservations: ofExplanations(f.Reservations, hasher), Unread: OfUnread(f.Unread),
	}
	for _, m := range f.Markers {
		v.Markers = append(v.Markers, Marker{m.Scope.Tag(), m.ReservationID})
	}
	return v
}

func ofOrders(found []pgstore.FoundOrder) []Order {
	orders := make([]Order, len(found))
	for i, o := range found {
		orders[i] = Order{o.OrderID, o.ReservationID, o.Active != nil && *o.Active, OrNull(o.CreatedAt)}
	}
	return orders
}

func ofExplanations(all []daemon.Explanation, hasher observe.UserHasher) []Explanation {
	views := make([]Explanation, len(all))
	for i, e := range all {
		views[i] = OfExplanation(e, hasher)
	}
	return views
}
