package lua

import (
	"fmt"

	"github.com/seckill/reconciler/reservation"
)

// Missing stands for a number that is not there: numbers of the contract are
// never negative.
const Missing int64 = -1

// values reads a script's reply element by element and remembers the first
// one that is not what the script documents.
type values struct {
	all []any
	err error
}

func newValues(reply any, n int) *values {
	v := &values{}
	all, ok := reply.([]any)
	if !ok || len(all) != n {
		v.err = fmt.Errorf("want an array of %d, got %T of %d", n, reply, len(all))
		return v
	}
	v.all = all
	return v
}

func (v *values) fail(i int, want string) {
	if v.err == nil {
		v.err = fmt.Errorf("element %d: want %s, got %.60q", i+1, want, fmt.Sprint(v.all[i]))
	}
}

// integer is an element that is always a number.
func (v *values) integer(i int) int64 {
	if v.err != nil {
		return Missing
	}
	n, ok := v.all[i].(int64)
	if !ok {
		v.fail(i, "a number")
		return Missing
	}
	return n
}

// number is an element that is a number, or empty for [Missing].
func (v *values) number(i int) int64 {
	if v.err != nil {
		return Missing
	}
	if text, ok := v.all[i].(string); ok && text == "" {
		return Missing
	}
	n := v.integer(i)
	if v.err == nil && (n < 0 || n >= reservation.MaxNumber) {
		v.fail(i, "a number in [0, 2^53)")
	}
	return n
}

// count is a number of which empty means none yet.
func (v *values) count(i int) int64 { return max(v.number(i), 0) }

func (v *values) text(i int) string {
	if v.err != nil {
		return ""
	}
	s, ok := v.all[i].(string)
	if !ok {
		v.fail(i, "a text")
	}
	return s
}

func (v *values) status(i int) reservation.Status { return reservation.Status(v.text(i)) }

// flag is a number that is 0 or 1.
func (v *values) flag(i int) bool {
	n := v.integer(i)
	if v.err == nil && n != 0 && n != 1 {
		v.fail(i, "0 or 1")
	}
	return n == 1
}

// code is the first element, one of the codes that the script documents.
func code[C ~int64](v *values, names map[C]string) C {
	c := C(v.integer(0))
	if v.err == nil {
		if _, ok := names[c]; !ok {
			v.fail(0, "a documented code")
		}
	}
	return c
}
