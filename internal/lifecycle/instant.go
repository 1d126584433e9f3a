package lifecycle

import (
	"fmt"
	"strings"
	"time"
)

// Instant is a point in time as people write it: RFC 3339, `now`, or `+10m`
// from now. It is a flag's value and a value of a file.
type Instant struct {
	At       time.Time
	Relative bool // to now
	text     string
}

// String is what was written.
func (i *Instant) String() string { return i.text }

// Type names the value in help texts.
func (i *Instant) Type() string { return "time" }

// Set reads what was written.
func (i *Instant) Set(text string) error {
	at, relative := time.Now(), true
	var err error
	if after, ok := strings.CutPrefix(text, "+"); ok {
		var d time.Duration
		d, err = time.ParseDuration(after)
		at = at.Add(d)
	} else if text != "now" {
		at, err = time.Parse(time.RFC3339, text)
		relative = false
	}
	if err != nil {
		return fmt.Errorf("want now, +10m or 2026-11-11T00:00:00Z: %w", err)
	}
	*i = Instant{At: at, Relative: relative, text: text}
	return nil
}

// UnmarshalText is [Instant.Set].
func (i *Instant) UnmarshalText(text []byte) error { return i.Set(string(text)) }
