package daemon

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seckill/reconciler/internal/config"
	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/pgstore"
	"github.com/seckill/reconciler/internal/rocketmq"
	"github.com/seckill/reconciler/reservation"
)

// Next is what the daemon does next with a reservation, in words for people.
type Next struct {
	Does     string    // what
	Why      string    // the evidence that it rests on, and the row of the decision table
	When     string    // in words
	At       time.Time // the earliest time, on the clock of the scope's node; zero: no time is set
	HeldBack []string  // what keeps it from happening
}

// situation is what holds everything up, or one scope's releases.
type situation struct {
	observes bool
	known    bool // PostgreSQL told the rest
	running  bool // some instance holds the lease
	paused   []string
	halts    []pgstore.Task
	notReady bool // the order fence
}

// situation reads what could hold work back. Without PostgreSQL nothing is
// known of it, and nothing works either.
func (i *Inspector) situation(ctx context.Context) situation {
	now := situation{observes: i.d.cfg.Mode != config.ModeAct}
	if i.postgresErr != nil {
		return now
	}
	lease, err := i.d.Postgres.LeaseHolder(ctx, pgstore.LeaseDaemon)
	if err != nil {
		return now
	}
	jobs, err := i.d.Postgres.Jobs(ctx)
	if err != nil {
		return now
	}
	if now.halts, err = i.d.Postgres.Halts(ctx); err != nil {
		return now
	}
	now.known, now.running = true, lease.Held
	for _, j := range jobs {
		if j.Paused {
			now.paused = append(now.paused, j.Name)
		}
	}
	now.notReady = i.d.Postgres.FenceReady(ctx) != nil
	return now
}

// next puts the decision into words.
func (now situation) next(e Explanation, c config.Config) Next {
	if !e.Decided {
		return undecided(e)
	}
	n := Next{Does: does(e), Why: why(e)}
	worker, every := firstWorker(e, c)
	n.When, n.At = when(e, worker, every)
	n.HeldBack = now.heldBack(e, worker)
	return n
}

func undecided(e Explanation) Next {
	switch {
	case hasUnread(e, SourceRedis):
		return Next{
			Does: "nothing: the reservation cannot be read, and what cannot be read is left alone",
			Why:  "Redis holds its state; no evidence of the other side can stand for it",
			When: "the pass after Redis answers again",
		}
	case e.Scope == (reservation.Scope{}):
		return Next{Does: "nothing is known of it in what could be asked", Why: "see what did not answer", When: "-"}
	default:
		return Next{Does: "nothing", Why: "it could not be read", When: "-"}
	}
}

// does says what the verb means for this reservation.
func does(e Explanation) string {
	a, r := e.Action, e.Input.Member.Reservation
	switch a.Verb {
	case reservation.VerbUnindex:
		if !e.Input.Member.InPending && !e.Input.Member.InExpiry {
			return "nothing: it is decided (" + string(r.Status) + ") and out of the indexes"
		}
		return "drops what is left of it in the indexes: it is decided (" + string(r.Status) + ")"
	case reservation.VerbConfirm:
		return "makes it ORDER_CREATED: the order stands, no stock moves"
	case reservation.VerbAdvance:
		return "makes it " + walk(a.Path) + ": no stock moves"
	case reservation.VerbCompensate:
		return strings.TrimSpace("gives its unit back, once"+via(a.Path)) + "; no order can come any more"
	case reservation.VerbRelease:
		return "puts a fence into PostgreSQL so that no order can come any more; if no order is faster, it gives the unit back, once"
	case reservation.VerbSend:
		return "sends its order message, with the same message_id as ever"
	case reservation.VerbResend:
		return fmt.Sprintf("sends its lost order message again, the same message_id, as resend %d of at most %d",
			r.ResendCount+1, e.Input.Policy.MaxResends)
	default:
		if a.Task != nil {
			return "nothing by itself: it waits, and asks a person (task " + a.Task.Kind + ")"
		}
		return "nothing yet: it waits and looks again"
	}
}

func walk(path []reservation.Status) string {
	names := make([]string, len(path))
	for i, status := range path {
		names[i] = string(status)
	}
	return strings.Join(names, ", then ")
}

func via(path []reservation.Status) string {
	if len(path) == 0 {
		return ""
	}
	return " (" + walk(path) + ", then RELEASED)"
}

// causes are the stable names of [reservation.Action].Cause in words.
var causes = map[string]string{
	"hash_missing":                "an index names it, and its hash is gone; stock is never moved on such ground",
	"decided":                     "Redis shows its final status",
	"orders_not_read":             "PostgreSQL did not answer, and nothing is decided without it",
	"confirm_manual":              "its order exists although it was to be released, and fencer.confirm is manual",
	"order_exists":                "PostgreSQL has its order, and that is final",
	"release_pending":             "it is to be released, and PostgreSQL has neither an order nor a fence yet",
	"rejected":                    "the consumer has rejected it for good",
	"fenced":                      "it is fenced in PostgreSQL",
	"claim_final":                 "its claim in PostgreSQL excludes an order",
	"send_refused":                "the broker refuses the message itself, again and again",
	"send_grace":                  "it is so young that its gateway is about to send the message (scanner.send_grace)",
	"unsent":                      "nothing shows that its message was ever stored, and there is no order",
	"not_expired":                 "its message was sent, there is no order yet, and it has not expired",
	"not_settled":                 "the last send was so short a time ago that it may still arrive (fencer.settle)",
	"message_pending":             "its message waits in the topic: the consumer has not come to it yet",
	"message_retrying":            "the consumer failed with its message, which waits for another delivery",
	"messages_not_read":           "RocketMQ was not asked",
	"message_lost":                "a complete search found its message nowhere in RocketMQ, and there is no order",
	"unsent_absent":               "it expired without a message, and scanner.unsent is release",
	"consumed_without_claim":      "the consumer has passed its message and made no order of it",
	"dead_letter_held":            "its message is in the dead-letter topic, and is held there for fencer.dead_letter_after",
	"dead_letter":                 "its message is in the dead-letter topic, and the time to replay it has passed",
	rocketmq.UnknownNameServers:   "no RocketMQ name server answers",
	rocketmq.UnknownNoRoute:       "RocketMQ does not say where the topic is",
	rocketmq.UnknownGroup:         "RocketMQ does not know the consumer group: is it the right one?",
	rocketmq.UnknownBroker:        "a broker that may hold its message does not answer",
	rocketmq.UnknownBrokerMissing: "a broker that may hold its message is gone; `reconciler broker forget` gives it up",
	rocketmq.UnknownRetention:     "the brokers no longer keep everything since it was made",
	rocketmq.UnknownClockSkew:     "a broker's clock is too far off",
	rocketmq.UnknownInterrupted:   "the search for its message is not at its end yet",
	rocketmq.UnknownPOP:           "a POP consumer's offsets do not prove that its message was handled",
	"order_missing":               "its claim names an order that is not there",
	"order_after_fence":           "there is an order beside a claim that excludes one",
	"duplicate_order":             "there are two orders for it",
	"order_scope_mismatch":        "order and reservation name different scopes or users",
	"unknown_order_status":        "the order's status is one that order_evidence does not map",
	"not_a_hash":                  "its key holds another type",
	"missing_field":               "a field that every reservation has is missing",
	"not_a_number":                "a number of it is none",
	"id_mismatch":                 "its hash names another reservation",
	"scope_mismatch":              "its hash names another scope",
	"unknown_status":              "its status is none of the contract's",
	"message_mismatch":            "its message_id is not its own",
	"invalid_id":                  "its id is not one of the contract's",
}

func why(e Explanation) string {
	text := causes[e.Action.Cause]
	if text == "" {
		text = "because of " + strings.ReplaceAll(e.Action.Cause, "_", " ")
		if e.Input.Messages.State == reservation.MessageUnknown {
			text = "RocketMQ cannot tell where its message is (" + strings.ReplaceAll(e.Action.Cause, "_", " ") + ")"
		}
	}
	return fmt.Sprintf("row %s of the decision table: %s", pass.RowName(e.Action.Row), text)
}

// firstWorker is the job that comes to the reservation first.
func firstWorker(e Explanation, c config.Config) (name string, every time.Duration) {
	m, row := e.Input.Member, e.Action.Row
	scanners := row == 1 || row == 2 || row == 6 || row == 9 && e.Action.Verb != reservation.VerbRelease
	switch {
	case scanners && m.InPending && (!m.InExpiry || m.PendingScoreMS <= m.ExpiryScoreMS || e.Action.Verb == reservation.VerbSend):
		return JobScanner, c.Scanner.Every
	case row >= 3 && row <= 5:
		return JobCompensator, c.Compensator.Every
	default:
		return JobFencer, c.Fencer.Every
	}
}

// when says when the worker comes.
func when(e Explanation, worker string, every time.Duration) (string, time.Time) {
	m := e.Input.Member
	due, in := m.ExpiryScoreMS, reservation.ReservationExpiry
	if worker == JobScanner {
		due, in = m.PendingScoreMS, reservation.SendPending
	}
	if in == reservation.ReservationExpiry && !m.InExpiry || in == reservation.SendPending && !m.InPending {
		if e.Action.Verb == reservation.VerbUnindex {
			return "-", time.Time{}
		}
		return "no worker comes to it: it is in neither index. `reconciler reconcile --deep --repair` puts it back", time.Time{}
	}
	now := e.Input.NowMS
	text := fmt.Sprintf("the next pass of the %s, within %s", worker, every)
	if due > now {
		text = fmt.Sprintf("when it is due in %s, in %s: the %s passes every %s", in, duration(due-now), worker, every)
	}
	if e.Action.Verb == reservation.VerbWait && e.Action.DeferMS > max(due, now) {
		text += fmt.Sprintf("; if nothing has changed then, again %s later", duration(e.Action.DeferMS-max(due, now)))
	}
	return text, time.UnixMilli(max(due, now)).UTC()
}

func duration(ms int64) time.Duration {
	d := time.Duration(ms) * time.Millisecond
	return d.Round(max(time.Millisecond, d/1000))
}

// heldBack lists what keeps it from happening.
func (now situation) heldBack(e Explanation, worker string) []string {
	var back []string
	add := func(applies bool, format string, args ...any) {
		if applies {
			back = append(back, fmt.Sprintf(format, args...))
		}
	}
	add(e.Held, "the scope is held: no worker touches it until `reconciler scope unhold`")
	add(now.observes, "mode is observe: it is decided and counted, and nothing is changed")
	add(!now.known, "PostgreSQL does not answer: until it does, nothing is sent, marked or released")
	add(now.known && !now.running, "no daemon holds the lease: nothing happens until one runs")
	add(slices.Contains(now.paused, worker), "job %s is paused: `reconciler job resume %[1]s`", worker)
	releases := e.Action.Verb == reservation.VerbRelease || e.Action.Verb == reservation.VerbCompensate
	for _, t := range now.halts {
		add(releases && cmp.Or(t.Scope, e.Scope.Tag()) == e.Scope.Tag(), "releases are halted by task %d (%s): `reconciler task show %[1]d`", t.ID, t.Kind)
	}
	add(releases && now.notReady, "releases wait for the order fence: see task fence_not_ready")
	return back
}
