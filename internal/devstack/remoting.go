package devstack

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
)

// Requests of RocketMQ's remoting protocol that bring a broker into service.
const (
	requestCreateTopic        = 17
	requestUpdateBrokerConfig = 25
	requestRoute              = 105
	requestClusterInfo        = 106
	requestCreateGroup        = 200
)

// remotingHeader is the JSON header of a frame.
type remotingHeader struct {
	Code      int               `json:"code"`
	Language  string            `json:"language"`
	Version   int               `json:"version"`
	Opaque    int               `json:"opaque"`
	Flag      int               `json:"flag"`
	Remark    string            `json:"remark,omitempty"`
	ExtFields map[string]string `json:"extFields,omitempty"`
}

const (
	remotingReply    = 1 // bit of Flag
	remotingMaxFrame = 16 << 20
)

// remotingCall makes one request on a connection of its own and returns the
// body of the reply. A reply code other than 0 is an error.
func remotingCall(ctx context.Context, addr string, code int, fields map[string]string, body []byte) ([]byte, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("request %d: %w", code, err)
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	header, err := json.Marshal(remotingHeader{Code: code, Language: "GO", Opaque: 1, ExtFields: fields})
	if err != nil {
		return nil, fmt.Errorf("request %d: encode: %w", code, err)
	}
	frame := binary.BigEndian.AppendUint32(nil, uint32(4+len(header)+len(body))) //nolint:gosec // a few hundred bytes
	frame = binary.BigEndian.AppendUint32(frame, uint32(len(header)))            //nolint:gosec // its top byte, 0, says JSON
	if _, err := conn.Write(append(append(frame, header...), body...)); err != nil {
		return nil, fmt.Errorf("request %d: write: %w", code, err)
	}
	for {
		reply, body, err := readFrame(conn)
		if err != nil {
			return nil, fmt.Errorf("request %d: read the reply: %w", code, errors.Join(err, ctx.Err()))
		}
		if reply.Flag&remotingReply == 0 {
			continue // a request of the server's own
		}
		if reply.Code != 0 {
			return nil, fmt.Errorf("request %d: code %d: %s", code, reply.Code, reply.Remark)
		}
		return body, nil
	}
}

func readFrame(r io.Reader) (remotingHeader, []byte, error) {
	var h remotingHeader
	var prefix [8]byte
	if _, err := io.ReadFull(r, prefix[:]); err != nil {
		return h, nil, err
	}
	size := int(binary.BigEndian.Uint32(prefix[:4])) - 4
	headerSize := int(binary.BigEndian.Uint32(prefix[4:]) & 0xffffff)
	if size < headerSize || size > remotingMaxFrame {
		return h, nil, fmt.Errorf("frame of %d bytes with a header of %d", size, headerSize)
	}
	frame := make([]byte, size)
	if _, err := io.ReadFull(r, frame); err != nil {
		return h, nil, err
	}
	if err := json.Unmarshal(frame[:headerSize], &h); err != nil {
		return h, nil, fmt.Errorf("decode the header: %w", err)
	}
	return h, frame[headerSize:], nil
}

// bareKey is a number as an object key, which the name server writes without
// quotes.
var bareKey = regexp.MustCompile(`([{,])(\d+):`)

func brokerNames(body []byte) (map[string]bool, error) {
	var info struct {
		BrokerAddrTable map[string]json.RawMessage `json:"brokerAddrTable"`
	}
	if err := json.Unmarshal(bareKey.ReplaceAll(body, []byte(`$1"$2":`)), &info); err != nil {
		return nil, fmt.Errorf("decode the list of brokers: %w", err)
	}
	out := make(map[string]bool, len(info.BrokerAddrTable))
	for name := range info.BrokerAddrTable {
		out[name] = true
	}
	return out, nil
}
