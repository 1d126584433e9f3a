package remoting

import (
	"encoding/json"
	"fmt"
)

// maxJSONDepth bounds the nesting of a body; real ones have at most 5 levels.
const maxJSONDepth = 32

// RewriteJSON turns what the servers' JSON library writes into JSON: it uses
// objects and bare numbers as keys ({{"queueId":3}:{…}}, {0:"addr"}). Such a
// key becomes a string that holds its text. Anything else that is not JSON is
// [ErrProtocol].
func RewriteJSON(body []byte) ([]byte, error) {
	w := jsonRewriter{in: body, out: make([]byte, 0, len(body)+len(body)/4)}
	w.space()
	if err := w.value(0); err != nil {
		return nil, err
	}
	w.space()
	if w.at < len(w.in) {
		return nil, w.errorf("more after the value")
	}
	if !json.Valid(w.out) { // literals and numbers are copied unchecked
		return nil, w.errorf("not JSON")
	}
	return w.out, nil
}

type jsonRewriter struct {
	in  []byte
	at  int
	out []byte
}

func (w *jsonRewriter) errorf(what string) error {
	return fmt.Errorf("%w: body at byte %d: %s", ErrProtocol, w.at, what)
}

// peek is the next byte, or 0 at the end.
func (w *jsonRewriter) peek() byte {
	if w.at < len(w.in) {
		return w.in[w.at]
	}
	return 0
}

func (w *jsonRewriter) space() {
	for w.at < len(w.in) {
		switch w.in[w.at] {
		case ' ', '\t', '\r', '\n':
			w.at++
		default:
			return
		}
	}
}

// punct copies the byte c, and the space around it is dropped.
func (w *jsonRewriter) punct(c byte) error {
	w.space()
	if w.peek() != c {
		return w.errorf("missing " + string(c))
	}
	w.at++
	w.out = append(w.out, c)
	w.space()
	return nil
}

func (w *jsonRewriter) value(depth int) error {
	if depth > maxJSONDepth {
		return w.errorf("nested too deep")
	}
	switch w.peek() {
	case '{':
		return w.collection('{', '}', func() error {
			if err := w.key(depth); err != nil {
				return err
			}
			if err := w.punct(':'); err != nil {
				return err
			}
			return w.value(depth + 1)
		})
	case '[':
		return w.collection('[', ']', func() error { return w.value(depth + 1) })
	case '"':
		return w.text()
	default:
		return w.scalar()
	}
}

func (w *jsonRewriter) collection(open, closing byte, element func() error) error {
	if err := w.punct(open); err != nil {
		return err
	}
	for first := true; w.peek() != closing; first = false {
		if !first {
			if err := w.punct(','); err != nil {
				return err
			}
		}
		if err := element(); err != nil {
			return err
		}
		w.space()
	}
	return w.punct(closing)
}

// key copies a key; one that is not a string becomes a string of its own text.
func (w *jsonRewriter) key(depth int) error {
	if w.peek() == '"' {
		return w.text()
	}
	mark := len(w.out)
	if err := w.value(depth + 1); err != nil {
		return err
	}
	quoted, err := json.Marshal(string(w.out[mark:]))
	if err != nil {
		return w.errorf(err.Error())
	}
	w.out = append(w.out[:mark], quoted...)
	return nil
}

func (w *jsonRewriter) text() error {
	start := w.at
	for w.at++; w.at < len(w.in); w.at++ {
		switch w.in[w.at] {
		case '\\':
			w.at++
		case '"':
			w.at++
			w.out = append(w.out, w.in[start:w.at]...)
			return nil
		}
	}
	w.at = min(w.at, len(w.in))
	return w.errorf("text does not end")
}

// scalar copies a number or a literal.
func (w *jsonRewriter) scalar() error {
	start := w.at
	for w.at < len(w.in) && isScalarByte(w.in[w.at]) {
		w.at++
	}
	if w.at == start {
		return w.errorf("a value is missing")
	}
	w.out = append(w.out, w.in[start:w.at]...)
	return nil
}

func isScalarByte(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c == '-' || c == '+' || c == '.' || c == 'E'
}
