// Package scanner re-sends what is still to be sent: the due members of
// send_pending (protocol §4).
//
// For each page it reads claims and orders, decides, and acts on rows 1, 2, 6
// and 9 of the table; whatever else it meets it leaves to the fencer, after
// making sure that the fencer can find it. It never releases anything: a
// message that cannot be sent waits, for as long as it takes.
package scanner

import (
	"context"
	"slices"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/reservation"
)

// Scanner sends the messages of due reservations.
type Scanner struct {
	Actor    *pass.Actor
	Claims   pass.Claims
	Dispatch *Dispatcher
	Pager    pass.Pager
	Scopes   pass.Scopes
	Tasks    pass.Tasks
	Policy   func() reservation.Policy
	Limits   pass.Limits

	walk pass.Walk
}

// Pass goes once through the due members of send_pending, within the limits.
// Its error joins what went wrong; the tally counts what was done all the same.
func (s *Scanner) Pass(ctx context.Context) (*pass.Tally, error) {
	tally := pass.NewTally()
	scopes, err := pass.ListScopes(ctx, s.Scopes, tally)
	if err != nil {
		return tally, err
	}
	blocked := false // with RocketMQ away a pass is not spent on failing sends: one round tells
	s.walk.Index, s.walk.Held = reservation.SendPending, s.Scopes.Held
	s.walk.Each(ctx, s.Pager, scopes, s.Limits, tally, func(ctx context.Context, pages []reservation.Page) {
		blocked = !s.scan(ctx, pages, blocked, tally)
	})
	pass.Finish(ctx, s.Tasks, tally)
	return tally, tally.Err()
}

// scan decides one round of pages and acts on it. It reports whether RocketMQ
// takes messages; with blocked it sends none, and the members stay due.
func (s *Scanner) scan(ctx context.Context, pages []reservation.Page, blocked bool, tally *pass.Tally) (available bool) {
	var ids []string
	for _, page := range pages {
		ids = append(ids, page.NeedOrders()...)
	}
	orders := pass.ReadOrders(ctx, s.Claims, ids, tally)
	policy := s.Policy()
	var own, sends, others []pass.Case
	for _, page := range pages {
		for _, m := range page.Members {
			in := reservation.Input{
				Member: m, Orders: orders.Of(m), NowMS: page.NowMS,
				Refusals: s.Dispatch.Refusals(m.ID), Policy: policy,
			}
			if reservation.NeedsMessages(in) {
				tally.Seen++ // the fencer decides, which asks RocketMQ
				others = append(others, pass.Case{Input: in, Index: page.Index})
				continue
			}
			switch c := pass.Decide(in, page.Index, tally); {
			case c.Action.Verb == reservation.VerbSend:
				sends = append(sends, c)
			case owns(c.Action.Row):
				own = append(own, c)
			default:
				others = append(others, c)
			}
		}
	}
	s.Actor.Carry(ctx, own, tally)
	s.leave(ctx, others, tally)
	if blocked {
		return false
	}
	return s.Dispatch.Send(ctx, sends, tally)
}

// owns says whether the scanner acts on decisions of the row itself. Orphans
// and malformed members wait here as they do there.
func owns(row int) bool {
	return slices.Contains([]int{reservation.RowOrphan, 0, 1, 2, 6, 9}, row)
}

// leave makes sure that the fencer finds the members, and defers them here.
func (s *Scanner) leave(ctx context.Context, cases []pass.Case, tally *pass.Tally) {
	s.Actor.Reindex(ctx, cases, tally)
	for i := range cases {
		in := cases[i].Input
		cases[i].Action.DeferMS = in.NowMS + max(in.Policy.Recheck.Milliseconds(), 1)
	}
	s.Actor.Defer(ctx, cases, tally)
}
