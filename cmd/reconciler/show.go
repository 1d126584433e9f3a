package main

import (
	"context"
	"strconv"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/spf13/cobra"

	"github.com/seckill/reconciler/internal/daemon"
	"github.com/seckill/reconciler/internal/observe"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

func newShow(a *app) *cobra.Command {
	cmd := group("show", "Show everything that is known of one thing",
		"Gathers what Redis, PostgreSQL and RocketMQ say, and what the daemon would do next and why.",
		newShowReservation(a))
	cmd.Example = "  reconciler show reservation uekb4ncu7j4dst4xyjqugyamc3"
	return cmd
}

func newShowReservation(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "reservation ID",
		Short:   "Explain one reservation",
		Example: "  reconciler show reservation uekb4ncu7j4dst4xyjqugyamc3 --output json",
		Args:    args("ID"),
	}
	out := outputFlag(a, cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		loaded, err := a.settings(cmd)
		if err != nil {
			return err
		}
		hasher := observe.NewUserHasher(loaded.Config.Observe.UserHashKey)
		return openDaemon(cmd.Context(), daemon.Options{Config: loaded.Config, DryRun: true}, func(ctx context.Context, d *daemon.Daemon) error {
			e, err := d.Explain(ctx, args[0])
			if err != nil {
				return err
			}
			return printExplanation(out, viewExplanation(e, hasher))
		})
	}
	return cmd
}

// explanationView is an explanation in JSON.
type explanationView struct {
	Schema        int           `json:"schema"`
	Scope         string        `json:"scope"`
	ReservationID string        `json:"reservation_id"`
	Now           time.Time     `json:"now"` // on the clock of the scope's Redis node
	Held          bool          `json:"held"`
	Redis         *redisView    `json:"redis"`    // null: the hash is gone
	Postgres      postgresView  `json:"postgres"` // P
	MQ            messageView   `json:"mq"`       // M
	Decision      decisionView  `json:"decision"`
	Indexes       []indexedView `json:"indexes"`
}

type redisView struct {
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

type postgresView struct {
	State     string     `json:"state"`
	Cause     string     `json:"cause"`
	Claim     string     `json:"claim"` // outcome, or empty
	ClaimedBy string     `json:"claimed_by"`
	ClaimedAt *time.Time `json:"claimed_at"`
	Reason    string     `json:"reason"`
	Orders    []orderRef `json:"orders"`
}

type orderRef struct {
	OrderID   string    `json:"order_id"`
	Active    bool      `json:"active"`
	CreatedAt time.Time `json:"created_at"`
}

type messageView struct {
	State  string     `json:"state"`
	Since  *time.Time `json:"since"`
	Cause  string     `json:"cause"`
	Detail string     `json:"detail"`
}

type decisionView struct {
	Row   string   `json:"row"`
	Verb  string   `json:"verb"`
	Path  []string `json:"path"`
	Cause string   `json:"cause"`
	Task  string   `json:"task"`
}

type indexedView struct {
	Index string    `json:"index"`
	Due   time.Time `json:"due"`
}

func viewExplanation(e daemon.Explanation, hasher observe.UserHasher) explanationView {
	m := e.Input.Member
	v := explanationView{
		Schema: 1, Scope: m.Scope.Tag(), ReservationID: m.ID, Now: time.UnixMilli(e.Input.NowMS).UTC(), Held: e.Held,
		Postgres: viewRecord(e), Indexes: []indexedView{},
		MQ: messageView{State: string(e.Messages.State), Since: orNull(atMS(e.Messages.SinceMS)), Cause: e.Messages.Cause, Detail: e.Messages.Detail},
		Decision: decisionView{
			Row: pass.RowName(e.Action.Row), Verb: string(e.Action.Verb), Cause: e.Action.Cause, Path: []string{},
		},
	}
	for _, status := range e.Action.Path {
		v.Decision.Path = append(v.Decision.Path, string(status))
	}
	if task := e.Action.Task; task != nil {
		v.Decision.Task = task.Kind
	}
	if m.InPending {
		v.Indexes = append(v.Indexes, indexedView{string(reservation.SendPending), atMS(m.PendingScoreMS)})
	}
	if m.InExpiry {
		v.Indexes = append(v.Indexes, indexedView{string(reservation.ReservationExpiry), atMS(m.ExpiryScoreMS)})
	}
	if !m.Missing {
		v.Redis = viewHash(m, hasher)
	}
	return v
}

func viewHash(m reservation.Member, hasher observe.UserHasher) *redisView {
	r := m.Reservation
	v := &redisView{
		Status: string(r.Status), RequestID: r.RequestID, MessageID: r.MessageID,
		ReservedAt: orNull(atMS(r.ReservedAtMS)), ExpiresAt: orNull(atMS(r.ExpiresAtMS)), UpdatedAt: orNull(atMS(r.UpdatedAtMS)),
		OrderID: r.OrderID, ErrorCode: r.ErrorCode, ReleaseReason: r.ReleaseReason, ReleasedAt: orNull(atMS(r.ReleasedAtMS)),
		LastSentAt: orNull(atMS(r.LastSentAtMS)), SendCount: r.SendCount, ResendCount: r.ResendCount, RetryCount: r.RetryCount,
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

func viewRecord(e daemon.Explanation) postgresView {
	p := postgresView{State: string(e.Input.Orders.State), Cause: e.Input.Orders.Cause, Orders: []orderRef{}}
	if c := e.Record.Claim; c != nil {
		p.Claim, p.ClaimedBy, p.ClaimedAt, p.Reason = string(c.Outcome), c.ClaimedBy, orNull(c.ClaimedAt), c.Reason
	}
	for _, o := range e.Record.Orders {
		p.Orders = append(p.Orders, orderRef{o.OrderID, o.Active, o.CreatedAt})
	}
	return p
}

// atMS is the time of a number of milliseconds; the zero time for 0.
func atMS(ms int64) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(ms).UTC()
}

func printExplanation(out *result, v explanationView) error {
	return out.print(v, func() error {
		var rows []table.Row
		add := func(source, what string, value any) {
			if value != "" && value != nil {
				rows = append(rows, table.Row{source, what, value})
			}
		}
		addTime := func(source, what string, at *time.Time) {
			if at != nil {
				add(source, what, at.Format(time.RFC3339Nano))
			}
		}
		add("", "scope", v.Scope)
		addTime("", "now", &v.Now)
		if v.Redis == nil {
			add("redis", "hash", "gone")
		} else {
			r := v.Redis
			add("redis", "status", r.Status)
			add("redis", "malformed", r.Malformed)
			addTime("redis", "reserved", r.ReservedAt)
			addTime("redis", "expires", r.ExpiresAt)
			addTime("redis", "updated", r.UpdatedAt)
			addTime("redis", "last sent", r.LastSentAt)
			add("redis", "sends / resends / waits", strconv.FormatInt(r.SendCount, 10)+" / "+strconv.FormatInt(r.ResendCount, 10)+" / "+strconv.FormatInt(r.RetryCount, 10))
			add("redis", "position", r.Position)
			add("redis", "order", r.OrderID)
			add("redis", "release reason", r.ReleaseReason)
		}
		for _, i := range v.Indexes {
			addTime("redis", "due in "+i.Index, &i.Due)
		}
		add("postgres", "evidence", v.Postgres.State)
		add("postgres", "because", v.Postgres.Cause)
		add("postgres", "claim", v.Postgres.Claim)
		add("postgres", "claimed by", v.Postgres.ClaimedBy)
		for _, o := range v.Postgres.Orders {
			add("postgres", "order", o.OrderID+map[bool]string{true: "", false: " (cancelled)"}[o.Active])
		}
		add("rocketmq", "message", v.MQ.State)
		add("rocketmq", "because", v.MQ.Cause)
		add("rocketmq", "detail", v.MQ.Detail)
		add("next", "row", v.Decision.Row)
		add("next", "does", v.Decision.Verb)
		add("next", "because", v.Decision.Cause)
		add("next", "asks a person", v.Decision.Task)
		if v.Held {
			add("next", "held", "no worker touches this scope: see `reconciler scope list`")
		}
		return out.table("", table.Row{"FROM", "WHAT", v.ReservationID}, rows)
	})
}
