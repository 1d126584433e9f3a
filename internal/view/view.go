// Package view is the JSON in which commands print and the API answers: one
// shape of each thing, for both.
package view

import (
	"time"
)

// NonNil makes JSON say [] rather than null.
func NonNil[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// OrNull makes JSON say null for a time that never was.
func OrNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
