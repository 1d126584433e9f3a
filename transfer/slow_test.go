//go:build slow

package transfer_test

import "testing"

// Many more histories than the fast part has time for, and longer ones.
func TestSlowRandomHistories(t *testing.T) { random(t, 800, 120) }
