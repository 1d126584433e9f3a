package pass

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/seckill/reconciler/reservation"
)

// Cursor is a place in an index: behind the member Member at Score. The zero
// Cursor is the start. Scores are kept as Redis has them, fractions and
// negative ones included, since a corrupt score must not hide a member.
type Cursor struct {
	Score   float64
	Member  string
	Started bool
}

// PageRequest asks for the next members of one index that are due.
type PageRequest struct {
	Scope reservation.Scope
	Index reservation.Index
	After Cursor
	Limit int
	// UntilMS ends the range at what was due then; 0: at what is due now.
	UntilMS int64
	All     bool // every member, not only those whose score has passed
}

// PageReply is one page, or why it could not be read. A page that could not be
// read says nothing about its scope: it is not an empty one.
type PageReply struct {
	reservation.Page
	Next Cursor
	End  bool // the range ended with this page
	Err  error
}

// Pager reads pages of indexes, one reply for each request.
type Pager interface {
	Pages(ctx context.Context, requests []PageRequest) []PageReply
}

// Limits bound one pass of a worker.
type Limits struct {
	Batch int           // members in one round over all scopes: one round trip to each side
	Items int           // members in the pass
	Time  time.Duration // no further round begins after it
}

// Walk goes through the due members of one index of many scopes. Its cursors
// outlive a pass: what a bounded pass did not reach is where the next one
// begins, and only the end of a range returns to its start. So members that
// stay due, of another worker or undecidable, never hide those behind them.
type Walk struct {
	Index reservation.Index
	All   bool // walk every member, due or not
	// Held is asked before every round, so that a hold takes effect within one:
	// a pass may be long. Nil: nothing is held.
	Held func(ctx context.Context) (map[reservation.Scope]bool, error)

	cursors map[reservation.Scope]Cursor
	turn    int // which scope comes first, when not all fit into a round
}

// Each reads rounds of pages and gives each round to handle, until every
// range has ended or a limit is reached; complete tells which. The range is what
// was due at a scope's first page: members that a pass defers, and that are due
// again while it is still going on, are the next one's. A scope whose
// page cannot be read is noted in the tally and left for the next pass.
func (w *Walk) Each(ctx context.Context, pager Pager, scopes []reservation.Scope, limits Limits, tally *Tally,
	handle func(ctx context.Context, pages []reservation.Page),
) {
	w.forget(scopes)
	deadline := time.Now().Add(limits.Time)
	open := w.inTurn(scopes)
	left := limits.Items
	until := map[reservation.Scope]int64{}
	for len(open) > 0 {
		if ctx.Err() != nil {
			tally.Failed(fmt.Errorf("pass over %s abandoned: %w", w.Index, context.Cause(ctx)))
			return
		}
		if left <= 0 || time.Now().After(deadline) {
			return
		}
		if open = w.notHeld(ctx, open, tally); len(open) == 0 {
			break
		}
		requests := w.requests(open, min(limits.Batch, left), until)
		var pages []reservation.Page
		rest := open[len(requests):]
		var more []reservation.Scope
		for _, reply := range pager.Pages(ctx, requests) {
			if reply.Err != nil {
				tally.Failed(reply.Err)
				continue
			}
			until[reply.Scope] = cmp.Or(until[reply.Scope], reply.NowMS)
			left -= len(reply.Members)
			w.cursors[reply.Scope] = reply.Next
			if reply.End {
				delete(w.cursors, reply.Scope)
			} else {
				more = append(more, reply.Scope)
			}
			if len(reply.Members) > 0 {
				pages = append(pages, reply.Page)
			}
		}
		if len(pages) > 0 {
			handle(ctx, pages)
		}
		open = append(append([]reservation.Scope(nil), rest...), more...)
	}
	tally.Complete = tally.Err() == nil
}

// notHeld drops the scopes that are held by now; all of them if that cannot be
// told.
func (w *Walk) notHeld(ctx context.Context, open []reservation.Scope, tally *Tally) []reservation.Scope {
	if w.Held == nil {
		return open
	}
	held, err := w.Held(ctx)
	if err != nil {
		tally.Failed(fmt.Errorf("which scopes are held: %w", err))
		return nil
	}
	return slices.DeleteFunc(slices.Clone(open), func(s reservation.Scope) bool { return held[s] })
}

// requests shares a round's members out evenly: with more scopes than members
// the rest wait for the next round.
func (w *Walk) requests(open []reservation.Scope, batch int, until map[reservation.Scope]int64) []PageRequest {
	share := max(batch/len(open), min(minShare, batch))
	requests := make([]PageRequest, 0, len(open))
	for left := batch; len(requests) < len(open) && left > 0; left -= share {
		s := open[len(requests)]
		requests = append(requests, PageRequest{
			Scope: s, Index: w.Index, After: w.cursors[s], Limit: min(share, left), UntilMS: until[s], All: w.All,
		})
	}
	return requests
}

// minShare keeps pages from becoming so small that round trips outweigh them.
const minShare = 32

// inTurn starts each pass with another scope, so that a pass that ends early
// does not always end before the same ones.
func (w *Walk) inTurn(scopes []reservation.Scope) []reservation.Scope {
	if len(scopes) == 0 {
		return nil
	}
	w.turn = (w.turn + 1) % len(scopes)
	return append(append([]reservation.Scope(nil), scopes[w.turn:]...), scopes[:w.turn]...)
}

// forget drops the cursors of scopes that are no longer walked.
func (w *Walk) forget(scopes []reservation.Scope) {
	if w.cursors == nil {
		w.cursors = map[reservation.Scope]Cursor{}
	}
	if len(w.cursors) <= len(scopes) {
		return
	}
	keep := make(map[reservation.Scope]Cursor, len(scopes))
	for _, s := range scopes {
		if c, ok := w.cursors[s]; ok {
			keep[s] = c
		}
	}
	w.cursors = keep
}
