package reconcile

import (
	"context"
	"slices"
)

// lookUnnamed looks at members that orders or indexes name, but for those that
// the result of their own request names too: the walk through the request
// shards looks at them, with everything that belongs to them. Most of a sale is
// looked at once for that, and not once for every place that names it. What is
// named by its result when it is asked and by none when the shard is read has
// lost it in between: the next pass finds it.
func (p *sets) lookUnnamed(ctx context.Context, queries []MemberQuery) error {
	for page := range slices.Chunk(queries, p.run.options.Batch) {
		var rest []MemberQuery
		for i, value := range p.members.OwnResults(ctx, page) {
			if !namesRequest(value, page[i].ID) {
				rest = append(rest, page[i])
			}
		}
		named := len(page) - len(rest)
		if err := p.limiter.WaitN(ctx, min(named, p.limiter.Burst())); err != nil && cancelled(ctx) {
			return context.Cause(ctx)
		}
		p.done += int64(named)
		if p.run.options.Progress != nil {
			p.run.options.Progress(p.done, p.expected())
		}
		if err := p.look(ctx, rest); err != nil {
			return err
		}
	}
	return nil
}
