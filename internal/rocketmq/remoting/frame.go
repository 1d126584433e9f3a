package remoting

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// Limits of what a frame may hold. A PULL reply is at most 256 KiB unless a
// single message is larger; the broker's default limit for one is 4 MiB.
const (
	DefaultMaxFrame = 16 << 20 // bytes, header and body
	maxHeader       = 256 << 10
)

// ErrProtocol says that a server sent what the protocol does not allow.
var ErrProtocol = errors.New("remoting protocol violated")

const flagResponse = 1

// clientVersion is the remoting version that requests name: 4.9.4, which every
// broker since understands.
const clientVersion = 399

// Command is one request or reply.
type Command struct {
	Code      int               `json:"code"`
	Language  string            `json:"language"`
	Version   int               `json:"version"`
	Opaque    int32             `json:"opaque"`
	Flag      int32             `json:"flag"`
	Remark    string            `json:"remark,omitempty"`
	ExtFields map[string]string `json:"extFields,omitempty"`
	Body      []byte            `json:"-"`
}

// IsResponse says whether the command answers a request.
func (c *Command) IsResponse() bool { return c.Flag&flagResponse != 0 }

// AppendFrame appends the command as a frame. It fails only if the header
// cannot be encoded or is too long.
func AppendFrame(dst []byte, c *Command) ([]byte, error) {
	header, err := json.Marshal(c)
	if err != nil {
		return dst, fmt.Errorf("encode the header of request %d: %w", c.Code, err)
	}
	if len(header) > maxHeader || len(c.Body) > DefaultMaxFrame {
		return dst, fmt.Errorf("request %d has a header of %d bytes and a body of %d: too long", c.Code, len(header), len(c.Body))
	}
	dst = binary.BigEndian.AppendUint32(dst, uint32(4+len(header)+len(c.Body))) //nolint:gosec // bounded above
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(header)))               //nolint:gosec // top byte 0: JSON
	dst = append(dst, header...)
	return append(dst, c.Body...), nil
}

// ReadFrame reads one frame of at most maxFrame bytes. It takes memory only for
// what has arrived. A frame that breaks the rules is [ErrProtocol]; the stream
// cannot be used any further then. The end of the stream between two frames is
// [io.EOF].
func ReadFrame(r io.Reader, maxFrame int) (*Command, error) {
	var prefix [8]byte
	if _, err := io.ReadFull(r, prefix[:]); err != nil {
		return nil, err
	}
	total := int64(binary.BigEndian.Uint32(prefix[:4]))
	word := binary.BigEndian.Uint32(prefix[4:])
	headerLen := int64(word & 0xffffff)
	switch {
	case word>>24 != 0:
		return nil, fmt.Errorf("%w: serialize type %d, only 0 (JSON) is spoken", ErrProtocol, word>>24)
	case total > int64(maxFrame):
		return nil, fmt.Errorf("%w: frame of %d bytes, at most %d are allowed", ErrProtocol, total, maxFrame)
	case headerLen > maxHeader || total < 4+headerLen:
		return nil, fmt.Errorf("%w: header of %d bytes in a frame of %d", ErrProtocol, headerLen, total)
	}
	buf, err := readN(r, total-4)
	if err != nil {
		return nil, err
	}
	c := new(Command)
	if err := json.Unmarshal(buf[:headerLen], c); err != nil {
		return nil, fmt.Errorf("%w: header: %w", ErrProtocol, err)
	}
	c.Body = buf[headerLen:]
	return c, nil
}

// readN reads exactly n bytes. The buffer grows with what arrives, so that a
// length that is never delivered costs nothing.
func readN(r io.Reader, n int64) ([]byte, error) {
	const upFront = 512 << 10
	var buf bytes.Buffer
	buf.Grow(int(min(n, upFront)))
	if _, err := io.CopyN(&buf, r, n); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return buf.Bytes(), nil
}
