package approval

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/seckill/reconciler/internal/pass"
	"github.com/seckill/reconciler/internal/redisstore"
	"github.com/seckill/reconciler/lua"
	"github.com/seckill/reconciler/reservation"
)

// schemaVersion is that of the hashes which are rebuilt.
const schemaVersion = 1

// is says what became of a result.
func (r *Result) is(o Outcome, detail string) { r.Outcome, r.Detail = o, detail }

func (r *Result) failed(err error) { r.is(Failed, err.Error()) }

// confirm makes reservations ORDER_CREATED whose order exists.
func (a *Approver) confirm(ctx context.Context, w *work, results []*Result) {
	chains := make([][]reservation.Effect, len(results))
	for i, r := range results {
		chains[i] = []reservation.Effect{{
			Op: reservation.OpConfirm, Scope: r.Scope, ID: r.ID, OrderID: w.is[r.ID].orders.OrderID,
		}}
	}
	for i, applied := range a.Redis.Apply(ctx, chains) {
		results[i].judge(applied)
	}
}

// judge reads the outcome from the last effect of a chain: a step before it
// that was refused because the reservation is further already does no harm.
func (r *Result) judge(applied []reservation.Applied) {
	for _, one := range applied {
		if one.Result == reservation.Failed {
			r.failed(fmt.Errorf("%s: %w", one.Effect.Op, one.Err))
			return
		}
	}
	switch last := applied[len(applied)-1]; {
	case last.Result == reservation.Changed:
		r.is(Applied, "")
	case last.Result == reservation.Already:
		r.is(Already, fmt.Sprintf("it was %s before", last.Status))
	case last.Err != nil:
		r.is(Refused, last.Err.Error())
	default:
		r.is(Refused, fmt.Sprintf("%s.lua refused: %s, it is %s", last.Effect.Op, last.Code, orNone(last.Status)))
	}
}

// restore runs restore.lua: for a lost hash as the order says, for a RELEASED
// one in operator mode.
func (a *Approver) restore(ctx context.Context, w *work, results []*Result) {
	if len(results) == 0 {
		return
	}
	args := make([]lua.RestoreArgs, len(results))
	for i, r := range results {
		args[i] = w.is[r.ID].restoreArgs(r.Action)
	}
	soldOut := false
	for i, reply := range a.Redis.Restore(ctx, w.plan.Scope, args) {
		r := results[i]
		switch {
		case reply.Err != nil:
			r.failed(reply.Err)
		case reply.Code == lua.RestoreWithUnit:
			r.is(Applied, "a unit was taken")
			if marker := reply.PreviousMarker; marker != "" && marker != r.ID {
				r.Detail = joinText(r.Detail, "its user's marker named "+marker+" before, which has to end by itself")
			}
			soldOut = soldOut || reply.Available == 0
		case reply.Code == lua.RestoreHashOnly:
			r.is(Applied, "its unit was still deducted: no stock moved")
		case reply.Code == lua.RestoreExists:
			r.is(Moved, fmt.Sprintf("its hash is there, as %s", reply.Status))
		case reply.Code == lua.RestoreDeficit:
			r.is(Refused, "DEFICIT: no unit is available, so none can be taken for its order; approve it again when one comes free, or cancel an order")
		default:
			r.is(Refused, fmt.Sprintf("restore.lua refused: %s", reply.Code))
		}
	}
	if soldOut {
		_ = a.Redis.PublishSoldOut(ctx, w.plan.Scope) // best effort (spec §5)
	}
}

// restoreArgs are what restore.lua needs; what the lost hash alone knew comes
// from the order.
func (s subject) restoreArgs(action Action) lua.RestoreArgs {
	order := s.record.Orders[0]
	at := s.nowMS
	if !order.CreatedAt.IsZero() {
		at = order.CreatedAt.UnixMilli()
	}
	args := lua.RestoreArgs{
		ReservationID: s.ID, RequestID: order.RequestID, UserID: order.UserID, MessageID: reservation.MessageID(s.ID),
		OrderID: order.OrderID, ReservedAtMS: at, ExpiresAtMS: at, SchemaVersion: schemaVersion, Mode: lua.RestoreCancelled,
	}
	if order.Active {
		args.Mode = lua.RestoreActive
	}
	if action == TakeUnit {
		// The script compares them with the hash, which is there.
		args.RequestID, args.UserID, args.Mode = s.Reservation.RequestID, s.Reservation.UserID, lua.RestoreOperator
	}
	return args
}

// Reasons of fences and releases that a person approved.
const (
	reasonDeadLetter = "dead_letter_approved"
	reasonForced     = "force_settled"
	reasonOrphan     = "orphan_approved"
	reasonLeaked     = "leaked_approved"
)

// release fences reservations, walks those whose fence stands to
// RELEASE_PENDING and gives their units back.
func (a *Approver) release(ctx context.Context, w *work, results []*Result) {
	reason := reasonForced
	if w.plan.Task.Kind == reservation.TaskDeadLetter {
		reason = reasonDeadLetter
	}
	fenced := a.fence(ctx, w, results, reason)
	chains := make([][]reservation.Effect, len(fenced))
	for i, r := range fenced {
		m := w.is[r.ID].Member
		chains[i] = releaseCase(w.is[r.ID], reservation.Path(m.Reservation.Status, reservation.StatusReleasePending), reason).Effects()
	}
	a.giveBack(ctx, w, fenced, chains)
}

// adopt gives reservations whose hash is lost one again, and their units back.
// The request is looked for before the fence: where it is not found nothing is
// changed, and the reservation stays with the person.
func (a *Approver) adopt(ctx context.Context, w *work, results []*Result) {
	if len(results) == 0 {
		return
	}
	ids := make([]string, len(results))
	for i, r := range results {
		ids[i] = r.ID
	}
	requests, err := a.Redis.FindRequests(ctx, w.plan.Scope, ids)
	var unclaimed, claimed []*Result
	for _, r := range results {
		_, found := requests[r.ID]
		switch {
		case err != nil:
			r.failed(err)
		case !found:
			r.is(Refused, "no request of the scope names it: whose it was is not known, and it stays with you")
		case w.is[r.ID].orders.State == reservation.OrderNone:
			unclaimed = append(unclaimed, r)
		default: // FENCED or REJECTED: decided already
			claimed = append(claimed, r)
		}
	}
	claimed = append(claimed, a.fence(ctx, w, unclaimed, reasonOrphan)...)
	a.adoptClaimed(ctx, w, claimed, requests)
}

// adoptClaimed runs adopt_orphan.lua and, where it made a hash, compensate.lua.
func (a *Approver) adoptClaimed(ctx context.Context, w *work, results []*Result, requests map[string]redisstore.Request) {
	args := make([]lua.AdoptOrphanArgs, len(results))
	for i, r := range results {
		request := requests[r.ID]
		args[i] = lua.AdoptOrphanArgs{
			ReservationID: r.ID, RequestID: request.RequestID, UserID: request.UserID,
			MessageID: reservation.MessageID(r.ID), SchemaVersion: schemaVersion,
		}
	}
	var adopted []*Result
	var chains [][]reservation.Effect
	for i, reply := range a.Redis.AdoptOrphans(ctx, w.plan.Scope, args) {
		r := results[i]
		switch {
		case reply.Err != nil:
			r.failed(reply.Err)
		case reply.Code == lua.AdoptOrphanAdopted:
			s := w.is[r.ID]
			s.Reservation.UserID = requests[r.ID].UserID
			adopted = append(adopted, r)
			chains = append(chains, releaseCase(s, nil, cmp.Or(s.orders.Reason, reasonOrphan)).Effects())
		case reply.Code == lua.AdoptOrphanHashExists:
			r.is(Moved, "its hash is there again, as "+orNone(reply.Status))
		case reply.Code == lua.AdoptOrphanNoMember:
			r.is(Moved, "no index names it any more")
		default:
			r.is(Refused, fmt.Sprintf("adopt_orphan.lua refused: %s", reply.Code))
		}
	}
	a.giveBack(ctx, w, adopted, chains)
}

// releaseCase is a release as the gate and the scripts take it.
func releaseCase(s subject, path []reservation.Status, reason string) pass.Case {
	index := reservation.ReservationExpiry
	if !s.InExpiry && s.InPending {
		index = reservation.SendPending
	}
	return pass.Case{
		Input: reservation.Input{Member: s.Member, Orders: s.orders, NowMS: s.nowMS}, Index: index,
		Action: reservation.Action{Verb: reservation.VerbRelease, Path: path, Cause: reason, DeferMS: s.nowMS},
	}
}

// fence returns the results whose fence stands. An order that was faster wins.
func (a *Approver) fence(ctx context.Context, w *work, results []*Result, reason string) []*Result {
	if len(results) == 0 {
		return nil
	}
	byID := map[string]*Result{}
	cases := make([]pass.Case, len(results))
	for i, r := range results {
		byID[r.ID] = r
		cases[i] = releaseCase(w.is[r.ID], nil, reason)
		r.is(Refused, "Redis takes no writes in its scope now")
	}
	tally := pass.NewTally()
	actor := pass.Actor{Effects: a.Redis}
	writable := actor.Writable(ctx, cases, tally)
	var won []*Result
	if len(writable) > 0 {
		fenced := a.Gate.Fence(ctx, writable, tally)
		for _, c := range fenced.Won {
			won = append(won, byID[c.Member().ID])
		}
		for _, c := range fenced.Lost {
			byID[c.Member().ID].is(Moved, "it has another claim now: the fence was lost")
		}
		for _, c := range fenced.Halted {
			byID[c.Member().ID].is(Refused, "release_storm: the scope's releases are halted; resolve that task first")
		}
		for _, c := range fenced.Unknown {
			byID[c.Member().ID].is(Refused, "whether it is fenced is not known: a consumer may hold it; approve it again")
		}
	}
	if err := tally.Err(); err != nil {
		for _, r := range results {
			if r.Outcome == Refused {
				r.failed(errors.Join(errors.New(r.Detail), err))
			}
		}
	}
	return won
}

// giveBack runs the chains that end in compensate.lua, and announces the units.
func (a *Approver) giveBack(ctx context.Context, w *work, results []*Result, chains [][]reservation.Effect) {
	given := false
	for i, applied := range a.Redis.Apply(ctx, chains) {
		results[i].judge(applied)
		given = given || results[i].Outcome == Applied
	}
	if given {
		_ = a.Redis.PublishAvailable(ctx, []reservation.Scope{w.plan.Scope}) // best effort (spec §5)
	}
}
