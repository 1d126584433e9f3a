package reconcile

import (
	"maps"
	"slices"
)

// Bounded is the report with at most limit findings: as many of each check as
// fit beside those of the others, the first ones first. What is left out is
// counted in Omitted and OmittedRepaired; summary and verdict stay. A report that fits
// is returned as it is.
func (r *Report) Bounded(limit int) *Report {
	if len(r.Findings) <= limit {
		return r
	}
	groups := map[findingGroup]int{}
	for _, f := range r.Findings {
		groups[groupOf(f)]++
	}
	each := fairShare(slices.Collect(maps.Values(groups)), limit)
	bounded := *r
	bounded.Findings = make([]Finding, 0, limit)
	bounded.Omitted, bounded.OmittedRepaired = maps.Clone(r.Omitted), maps.Clone(r.OmittedRepaired)
	kept := map[findingGroup]int{}
	for _, f := range r.Findings {
		group := groupOf(f)
		if kept[group] < each {
			kept[group]++
			bounded.Findings = append(bounded.Findings, f)
			continue
		}
		omitted := &bounded.Omitted
		if group.repaired {
			omitted = &bounded.OmittedRepaired
		}
		if *omitted == nil {
			*omitted = map[string]int{}
		}
		(*omitted)[f.Check]++
	}
	return &bounded
}

// findingGroup is what shares the room of a bounded report.
type findingGroup struct {
	check    string
	repaired bool
}

func groupOf(f Finding) findingGroup {
	return findingGroup{f.Check, !f.Stands()}
}

// fairShare is the largest share that each of the sizes may have while all
// together stay within limit.
func fairShare(sizes []int, limit int) int {
	slices.Sort(sizes)
	for i, size := range sizes {
		if size*(len(sizes)-i) > limit {
			return limit / (len(sizes) - i)
		}
		limit -= size
	}
	return limit
}
