package remoting_test

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

// encodeRecord is a record as a broker writes it.
func encodeRecord(r remoting.Record, v2, v6 bool, body string) []byte {
	var properties []byte
	for name, value := range r.Properties {
		properties = append(properties, name+"\x01"+value+"\x02"...)
	}
	magic, sysFlag, host := uint32(0xDAA320A7), uint32(0), make([]byte, 8)
	if v2 {
		magic = 0xDAA320AB
	}
	if v6 {
		sysFlag, host = 1<<4|1<<5, make([]byte, 20)
	}
	be := binary.BigEndian
	b := be.AppendUint32(nil, magic)
	b = be.AppendUint32(b, 0x1234)
	b = be.AppendUint32(b, uint32(r.QueueID))
	b = be.AppendUint32(b, 0)
	b = be.AppendUint64(b, uint64(r.QueueOffset))
	b = be.AppendUint64(b, uint64(r.LogOffset))
	b = be.AppendUint32(b, sysFlag)
	b = append(be.AppendUint64(b, 1), host...)
	b = append(be.AppendUint64(b, uint64(r.StoreMS)), host...)
	b = be.AppendUint64(be.AppendUint32(b, 2), 0)
	b = append(be.AppendUint32(b, uint32(len(body))), body...)
	if v2 {
		b = be.AppendUint16(b, uint16(len(r.Topic)))
	} else {
		b = append(b, byte(len(r.Topic)))
	}
	b = append(b, r.Topic...)
	b = append(be.AppendUint16(b, uint16(len(properties))), properties...)
	return append(be.AppendUint32(nil, uint32(len(b)+4)), b...)
}

func sampleRecord() remoting.Record {
	return remoting.Record{
		Topic: "orders", QueueID: 3, QueueOffset: 1 << 40, LogOffset: 1 << 50, StoreMS: 1_700_000_000_000,
		Properties: map[string]string{"KEYS": "reserve-order:a:v1 other", "TAGS": "t", "REAL_TOPIC": "%RETRY%g"},
	}
}

func TestRecordsAreDecoded(t *testing.T) {
	want := sampleRecord()
	for _, form := range []struct{ v2, v6 bool }{{}, {v2: true}, {v6: true}, {true, true}} {
		one := encodeRecord(want, form.v2, form.v6, "body")
		got, err := remoting.DecodeRecords(append(bytes.Clone(one), one...), 2)
		if err != nil {
			t.Fatalf("%+v: %v", form, err)
		}
		if diff := cmp.Diff([]remoting.Record{want, want}, got); diff != "" {
			t.Errorf("%+v: %s", form, diff)
		}
		if _, err := remoting.DecodeRecords(append(bytes.Clone(one), one...), 1); !errors.Is(err, remoting.ErrProtocol) {
			t.Errorf("more records than asked for: %v", err)
		}
		for n := 1; n < len(one); n++ { // cut anywhere, with and without the length corrected
			cut := bytes.Clone(one[:n])
			if _, err := remoting.DecodeRecords(cut, 2); !errors.Is(err, remoting.ErrProtocol) {
				t.Fatalf("cut at %d: %v", n, err)
			}
			if n >= 4 {
				binary.BigEndian.PutUint32(cut, uint32(n))
				if _, err := remoting.DecodeRecords(cut, 2); !errors.Is(err, remoting.ErrProtocol) {
					t.Fatalf("cut at %d, length corrected: %v", n, err)
				}
			}
		}
	}
	r := sampleRecord()
	if !r.HasKey("other") || !r.HasKey("reserve-order:a:v1") || r.HasKey("reserve-order:a:v1 other") || r.HasKey("") {
		t.Error("keys are not told apart")
	}
	batch := encodeRecord(want, false, false, "")
	batch[39] |= 1 << 7 // sysFlag
	if _, err := remoting.DecodeRecords(batch, 1); !errors.Is(err, remoting.ErrInnerBatch) {
		t.Errorf("inner batch: %v", err)
	}
}

func TestFastJSONIsRewritten(t *testing.T) {
	tests := map[string]string{ // in → out; "" is an error
		`{}`:                                `{}`,
		` { "a" : [ 1 , -2.5e3 , true ] } `: `{"a":[1,-2.5e3,true]}`,
		`{0:"x",1:{}}`:                      `{"0":"x","1":{}}`,
		`{{"q":3,"t":"a\"b"}:{"o":1}}`:      `{"{\"q\":3,\"t\":\"a\\\"b\"}":{"o":1}}`,
		`{"k":"{1:2}"}`:                     `{"k":"{1:2}"}`,
		`{{"a":{1:2}}:null}`:                `{"{\"a\":{\"1\":2}}":null}`,
		``:                                  "",
		`{`:                                 "",
		`{"a"}`:                             "",
		`{"a":1,}`:                          "",
		`{"a":1}x`:                          "",
		`"open`:                             "",
		`"open\`:                            "",
		`{a:1}`:                             `{"a":1}`,
		`nul`:                               "",
		`--1`:                               "",
		"\"\x01\"":                          "",
		`[1 2]`:                             "",
	}
	for in, want := range tests {
		got, err := remoting.RewriteJSON([]byte(in))
		switch {
		case want == "" && !errors.Is(err, remoting.ErrProtocol):
			t.Errorf("%s: %s, %v, want ErrProtocol", in, got, err)
		case want != "" && (err != nil || string(got) != want):
			t.Errorf("%s: %s, %v, want %s", in, got, err, want)
		}
	}
	deep := bytes.Repeat([]byte("["), 1<<20)
	if _, err := remoting.RewriteJSON(deep); !errors.Is(err, remoting.ErrProtocol) {
		t.Errorf("a million brackets: %v", err)
	}
}

func FuzzReadFrame(f *testing.F) {
	frame, err := remoting.AppendFrame(nil, &remoting.Command{Code: 11, Language: "GO", ExtFields: map[string]string{"a": "b"}, Body: []byte("x")})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(frame)
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := remoting.ReadFrame(bytes.NewReader(raw), 1<<16)
		if err != nil {
			return
		}
		again, err := remoting.AppendFrame(nil, c)
		if err != nil {
			t.Fatal(err)
		}
		c2, err := remoting.ReadFrame(bytes.NewReader(again), 1<<17)
		if err != nil {
			t.Fatalf("what was written cannot be read: %v", err)
		}
		if diff := cmp.Diff(c, c2, cmpopts.EquateEmpty()); diff != "" {
			t.Error(diff)
		}
	})
}

func FuzzDecodeRecords(f *testing.F) {
	f.Add(encodeRecord(sampleRecord(), false, false, "body"))
	f.Add(encodeRecord(sampleRecord(), true, true, ""))
	f.Fuzz(func(t *testing.T, raw []byte) {
		records, err := remoting.DecodeRecords(raw, 64)
		if err != nil && !errors.Is(err, remoting.ErrProtocol) && !errors.Is(err, remoting.ErrInnerBatch) {
			t.Fatalf("untyped error %v", err)
		}
		for _, r := range records {
			if r.QueueOffset < 0 || r.LogOffset < 0 || r.StoreMS < 0 || r.QueueID < 0 {
				t.Fatalf("negative: %+v", r)
			}
		}
	})
}

func FuzzRewriteJSON(f *testing.F) {
	for _, seed := range []string{`{{"queueId":3}:{"a":[1,null]}}`, `{0:"x"}`, `{"a":"\""}`, `[[[`, `{a:1}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		out, err := remoting.RewriteJSON(raw)
		if err != nil {
			if !errors.Is(err, remoting.ErrProtocol) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		var got, want any
		if err := json.Unmarshal(out, &got); err != nil {
			t.Fatalf("not JSON: %v", err)
		}
		if json.Unmarshal(raw, &want) == nil && !reflect.DeepEqual(got, want) {
			t.Fatalf("%s changed to %s", raw, out)
		}
	})
}
