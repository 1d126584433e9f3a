// Package fencer settles what has expired: the due members of
// reservation_expiry (protocol §4).
//
// For each round of pages it reads claims and orders, then the whereabouts of
// the messages that the decision needs, then claims and orders again, since a
// consumer may have finished meanwhile; it decides, and acts on every row of
// the table. What it releases goes through the [Gate], which fences within the
// limit of max_release, and to the compensator in the same pass.
package fencer

import (
	"context"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// Messages finds messages in RocketMQ: M of protocol §2, by message_id. What
// it has no answer for is UNKNOWN.
type Messages interface {
	Gather(ctx context.Context, nowMS int64, queries []reservation.MessageQuery) map[string]reservation.MessageEvidence
}

// Settler carries out releases, compensations and confirmations.
type Settler interface {
	Settle(ctx context.Context, cases []pass.Case, tally *pass.Tally)
}

// Resender sends lost messages again.
type Resender interface {
	Resend(ctx context.Context, cases []pass.Case, tally *pass.Tally)
	Refusals(id string) int64
}

// Fencer settles expired reservations.
type Fencer struct {
	Actor    *pass.Actor
	Claims   pass.Claims
	Messages Messages
	Settler  Settler
	Resender Resender
	Pager    pass.Pager
	Scopes   pass.Scopes
	Tasks    pass.Tasks
	Policy   func() reservation.Policy
	Limits   pass.Limits

	walk pass.Walk
}

// Pass goes once through the due members of reservation_expiry, within the
// limits. Its error joins what went wrong; the tally counts what was done all
// the same.
func (f *Fencer) Pass(ctx context.Context) (*pass.Tally, error) {
	tally := pass.NewTally()
	scopes, err := pass.ListScopes(ctx, f.Scopes, tally)
	if err != nil {
		return tally, err
	}
	f.walk.Index, f.walk.Held = reservation.ReservationExpiry, f.Scopes.Held
	f.walk.Each(ctx, f.Pager, scopes, f.Limits, tally, func(ctx context.Context, pages []reservation.Page) {
		f.settle(ctx, f.Inputs(ctx, pages, tally), tally)
	})
	pass.Finish(ctx, f.Tasks, tally)
	return tally, tally.Err()
}

// Inputs gathers the evidence for the members of the pages: P, then M where
// the decision needs it, then P again for those. It changes nothing; `status`
// and `show` explain members with it.
func (f *Fencer) Inputs(ctx context.Context, pages []reservation.Page, tally *pass.Tally) []reservation.Input {
	var ids []string
	for _, page := range pages {
		ids = append(ids, page.NeedOrders()...)
	}
	orders := pass.ReadOrders(ctx, f.Claims, ids, tally)
	policy := f.Policy()
	var inputs []reservation.Input
	for _, page := range pages {
		for _, m := range page.Members {
			inputs = append(inputs, reservation.Input{
				Member: m, Orders: orders.Of(m), NowMS: page.NowMS,
				Refusals: f.Resender.Refusals(m.ID), Policy: policy,
			})
		}
	}
	f.addMessages(ctx, inputs, tally)
	return inputs
}

// addMessages fills in M where it matters and reads P again behind it: an
// order that was created while RocketMQ was asked must not be missed.
func (f *Fencer) addMessages(ctx context.Context, inputs []reservation.Input, tally *pass.Tally) {
	var queries []reservation.MessageQuery
	var ids []string
	var need []int
	nowMS := int64(0)
	for i, in := range inputs {
		if reservation.NeedsMessages(in) {
			need = append(need, i)
			ids = append(ids, in.Member.ID)
			queries = append(queries, in.Member.Reservation.MessageQuery())
			nowMS = max(nowMS, in.NowMS)
		}
	}
	if len(need) == 0 {
		return
	}
	messages := f.Messages.Gather(ctx, nowMS, queries)
	orders := pass.ReadOrders(ctx, f.Claims, ids, tally)
	for _, i := range need {
		inputs[i].Messages = messages[inputs[i].Member.Reservation.MessageID]
		inputs[i].Orders = orders.Of(inputs[i].Member)
	}
}

// settle decides the inputs and acts on every row.
func (f *Fencer) settle(ctx context.Context, inputs []reservation.Input, tally *pass.Tally) {
	var simple, unsent, resends, settles []pass.Case
	for _, in := range inputs {
		c := pass.Decide(in, reservation.ReservationExpiry, tally)
		switch c.Action.Verb {
		case reservation.VerbRelease, reservation.VerbCompensate, reservation.VerbConfirm:
			settles = append(settles, c)
		case reservation.VerbSend:
			unsent = append(unsent, c)
		case reservation.VerbResend:
			resends = append(resends, c)
		default:
			simple = append(simple, c)
		}
	}
	f.Actor.Carry(ctx, simple, tally)
	f.leaveToScanner(ctx, unsent, tally)
	if !f.Actor.Observe {
		f.Resender.Resend(ctx, resends, tally)
		f.Settler.Settle(ctx, settles, tally)
	}
}

// leaveToScanner puts unsent members back into send_pending if they are
// missing there: otherwise nobody would ever send them (row 9 ⚑).
func (f *Fencer) leaveToScanner(ctx context.Context, cases []pass.Case, tally *pass.Tally) {
	var missing []pass.Case
	for _, c := range cases {
		if !c.Member().InPending {
			missing = append(missing, c)
		}
	}
	f.Actor.Reindex(ctx, missing, tally)
	f.Actor.Defer(ctx, cases, tally)
}
