package remoting

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"strings"
)

// Property names of a record that evidence is read from.
const (
	PropertyKeys      = "KEYS"
	PropertyTags      = "TAGS"
	PropertyRealTopic = "REAL_TOPIC" // of a delayed record: where it goes afterwards
)

// Record is what evidence needs of a stored message. Its strings do not share
// memory with the reply.
type Record struct {
	Topic       string
	QueueID     int32
	QueueOffset int64
	LogOffset   int64 // commit-log offset, bytes
	StoreMS     int64 // store time, on the broker's clock
	Properties  map[string]string
}

// HasKey says whether key is one of the record's keys.
func (r *Record) HasKey(key string) bool {
	for k := range r.Keys() {
		if k == key {
			return true
		}
	}
	return false
}

// Keys are the record's keys, in order.
func (r *Record) Keys() iter.Seq[string] { return strings.FieldsSeq(r.Properties[PropertyKeys]) }

// Record layout, version 1 and 2 (2 has a topic length of two bytes).
const (
	magicV1         = 0xDAA320A7
	magicV2         = 0xDAA320AB
	flagBornHostV6  = 1 << 4
	flagStoreHostV6 = 1 << 5
	flagInnerBatch  = 1 << 7
)

// ErrInnerBatch says that a record holds several messages under one offset
// (topic attribute queue.type=BatchCQ), which evidence cannot be read from.
var ErrInnerBatch = errors.New("record is an inner batch, which is not supported")

// DecodeRecords decodes the body of a PULL, QUERY or VIEW reply: at most limit
// records. Any length that does not add up is [ErrProtocol].
func DecodeRecords(body []byte, limit int) ([]Record, error) {
	var records []Record
	for len(body) > 0 {
		if len(records) == limit {
			return nil, fmt.Errorf("%w: more than %d records", ErrProtocol, limit)
		}
		if len(body) < 4 {
			return nil, fmt.Errorf("%w: %d stray bytes after %d records", ErrProtocol, len(body), len(records))
		}
		size := int64(binary.BigEndian.Uint32(body))
		if size < 4 || size > int64(len(body)) {
			return nil, fmt.Errorf("%w: record of %d bytes, %d are left", ErrProtocol, size, len(body))
		}
		record, err := decodeRecord(body[4:size])
		if err != nil {
			return nil, fmt.Errorf("record %d: %w", len(records), err)
		}
		records = append(records, record)
		body = body[size:]
	}
	return records, nil
}

// decodeRecord decodes one record, without its leading size.
func decodeRecord(b []byte) (Record, error) {
	f := fields{rest: b}
	magic := f.u32()
	if !f.short && magic != magicV1 && magic != magicV2 {
		return Record{}, fmt.Errorf("%w: magic code %#x", ErrProtocol, magic)
	}
	var r Record
	f.skip(4) // body CRC
	r.QueueID = f.i32()
	f.skip(4) // flag
	r.QueueOffset = f.i64()
	r.LogOffset = f.i64()
	sysFlag := f.u32()
	f.skip(8) // born time
	f.skip(hostLen(sysFlag&flagBornHostV6 != 0))
	r.StoreMS = f.i64()
	f.skip(hostLen(sysFlag&flagStoreHostV6 != 0))
	f.skip(4 + 8)          // reconsume times, prepared transaction offset
	f.skip(int64(f.i32())) // body
	topicLen := int64(f.u8())
	if magic == magicV2 {
		topicLen = topicLen<<8 | int64(f.u8())
	}
	r.Topic = string(f.take(topicLen))
	properties := f.take(int64(f.u16()))
	switch {
	case f.short:
		return Record{}, fmt.Errorf("%w: cut short", ErrProtocol)
	case r.QueueID < 0 || r.QueueOffset < 0 || r.LogOffset < 0 || r.StoreMS < 0:
		return Record{}, fmt.Errorf("%w: negative position or time", ErrProtocol)
	case sysFlag&flagInnerBatch != 0:
		return Record{}, ErrInnerBatch
	}
	r.Properties = decodeProperties(string(properties))
	return r, nil
}

func hostLen(v6 bool) int64 {
	if v6 {
		return 16 + 4
	}
	return 4 + 4
}

// decodeProperties splits name \x01 value \x02 …; what has no \x01 is no property.
func decodeProperties(s string) map[string]string {
	properties := make(map[string]string, 8)
	for pair := range strings.SplitSeq(s, "\x02") {
		if name, value, ok := strings.Cut(pair, "\x01"); ok {
			properties[name] = value
		}
	}
	return properties
}

// fields reads big-endian values and remembers whether there were too few bytes.
type fields struct {
	rest  []byte
	short bool
}

func (f *fields) take(n int64) []byte {
	if f.short || n < 0 || n > int64(len(f.rest)) {
		f.short = true
		return nil
	}
	taken := f.rest[:n]
	f.rest = f.rest[n:]
	return taken
}

func (f *fields) skip(n int64) { f.take(n) }

func (f *fields) u8() byte {
	if b := f.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (f *fields) u16() uint16 {
	if b := f.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (f *fields) u32() uint32 {
	if b := f.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

// i32 and i64 are Java's signed numbers: what is negative is refused later.
func (f *fields) i32() int32 { return int32(f.u32()) } //nolint:gosec // the wrap is meant

func (f *fields) i64() int64 {
	if b := f.take(8); b != nil {
		return int64(binary.BigEndian.Uint64(b)) //nolint:gosec // the wrap is meant
	}
	return 0
}
