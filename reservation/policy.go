package reservation

import (
	"errors"
	"fmt"
	"hash/fnv"
	"slices"
	"strconv"
	"time"
)

// The choices of a policy that are words.
const (
	LostMessageResend  = "resend"  // send an absent message again, then release
	LostMessageRelease = "release" // release at once
	DeadLetterHold     = "hold"    // a task, and release after DeadLetterAfter
	DeadLetterRelease  = "release" // release at once
	ConfirmAuto        = "auto"    // RELEASE_PENDING with an order becomes ORDER_CREATED
	ConfirmManual      = "manual"  // a person confirms it
	UnsentResend       = "resend"  // send for as long as it takes
	UnsentRelease      = "release" // once expired, treat as ENQUEUED
)

// Policy holds the choices that protocol §3 leaves to an operator.
type Policy struct {
	SendGrace       time.Duration // a RESERVED younger than this belongs to its gateway
	Settle          time.Duration // an absence counts this long after the last send attempt
	Recheck         time.Duration // the fencer's interval for what the scanner owns
	LostMessage     string        // LostMessageResend or LostMessageRelease
	MaxResends      int64         // resends of a lost message before its release
	DeadLetter      string        // DeadLetterHold or DeadLetterRelease
	DeadLetterAfter time.Duration // counted from the dead-letter record's store time
	Confirm         string        // ConfirmAuto or ConfirmManual
	EscalateAfter   time.Duration // a wait for evidence becomes a task; counted from expiry
	Unsent          string        // UnsentResend or UnsentRelease
	MaxRefusals     int64         // refusals of the message itself before a person is asked
	BackoffMin      time.Duration // first wait of a member that cannot be decided
	BackoffMax      time.Duration // longest wait
}

// DefaultPolicy is the policy of interface §2 and protocol §3.
func DefaultPolicy() Policy {
	return Policy{
		SendGrace:       3 * time.Second,
		Settle:          10 * time.Second,
		Recheck:         30 * time.Second,
		LostMessage:     LostMessageResend,
		MaxResends:      3,
		DeadLetter:      DeadLetterHold,
		DeadLetterAfter: 24 * time.Hour,
		Confirm:         ConfirmAuto,
		EscalateAfter:   time.Hour,
		Unsent:          UnsentResend,
		MaxRefusals:     3,
		BackoffMin:      time.Second,
		BackoffMax:      5 * time.Minute,
	}
}

// Validate reports every choice that is not one of its values.
func (p Policy) Validate() error {
	var errs []error
	word := func(key, got string, accepted ...string) {
		if !slices.Contains(accepted, got) {
			errs = append(errs, fmt.Errorf("%s: %q is not one of %q", key, got, accepted))
		}
	}
	word("fencer.lost_message", p.LostMessage, LostMessageResend, LostMessageRelease)
	word("fencer.dead_letter", p.DeadLetter, DeadLetterHold, DeadLetterRelease)
	word("fencer.confirm", p.Confirm, ConfirmAuto, ConfirmManual)
	word("scanner.unsent", p.Unsent, UnsentResend, UnsentRelease)
	positive := func(key string, d time.Duration) {
		if d <= 0 {
			errs = append(errs, fmt.Errorf("%s: %s is not positive", key, d))
		}
	}
	positive("scanner.send_grace", p.SendGrace)
	positive("fencer.settle", p.Settle)
	positive("fencer.recheck", p.Recheck)
	positive("fencer.escalate_after", p.EscalateAfter)
	positive("fencer.backoff_min", p.BackoffMin)
	if p.DeadLetterAfter < 0 {
		errs = append(errs, fmt.Errorf("fencer.dead_letter_after: %s is negative", p.DeadLetterAfter))
	}
	if p.BackoffMax < p.BackoffMin {
		errs = append(errs, fmt.Errorf("fencer.backoff_max: %s is below fencer.backoff_min %s", p.BackoffMax, p.BackoffMin))
	}
	if p.MaxResends < 0 {
		errs = append(errs, fmt.Errorf("fencer.max_resends: %d is negative", p.MaxResends))
	}
	if p.MaxRefusals < 1 {
		errs = append(errs, fmt.Errorf("scanner.max_refusals: %d is below 1", p.MaxRefusals))
	}
	return errors.Join(errs...)
}

// Backoff is the wait before the attempt'th look at a member: doubling from
// BackoffMin to BackoffMax, spread over its upper half. The spread is derived
// from the member, not drawn, so that a decision stays a function of its input
// while members that became due together still drift apart.
func (p Policy) Backoff(id string, attempt int64) time.Duration {
	wait := p.BackoffMin
	for i := int64(0); i < attempt && wait < p.BackoffMax; i++ {
		wait *= 2
	}
	wait = min(wait, p.BackoffMax)
	h := fnv.New64a()
	_, _ = h.Write([]byte(id + "\x00" + strconv.FormatInt(attempt, 10)))
	half := wait / 2
	if half <= 0 {
		return wait
	}
	return wait - half + time.Duration(h.Sum64()%uint64(half+1)) //nolint:gosec // half is positive and the remainder below it
}
