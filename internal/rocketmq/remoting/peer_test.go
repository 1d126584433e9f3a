package remoting_test

import (
	"context"
	"crypto/hmac"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/seckill/reconciler/internal/rocketmq/remoting"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRepliesFindTheirRequestsInAnyOrder(t *testing.T) {
	const n = 50
	var held []*remoting.Command
	s := startServer(t, answering(func(request *remoting.Command) []*remoting.Command {
		reply := replyTo(request)
		reply.Remark = request.ExtFields["n"]
		if held = append(held, reply); len(held) < n {
			return nil
		}
		slices.Reverse(held) // and a request of the server's own, and a reply to nothing
		return append([]*remoting.Command{{Code: 40, Opaque: request.Opaque}, {Opaque: -7, Flag: 1}}, held...)
	}))
	p := newPeer(t, s.addr(), remoting.Options{})
	var calls sync.WaitGroup
	for i := range n {
		calls.Go(func() {
			reply, err := p.Do(t.Context(), 1000, map[string]string{"n": strconv.Itoa(i)}, nil)
			if err != nil || reply.Remark != strconv.Itoa(i) {
				t.Errorf("call %d: %+v, %v", i, reply, err)
			}
		})
	}
	calls.Wait()
	if s.accepted() != 1 {
		t.Errorf("%d connections, want 1", s.accepted())
	}
}

// frame builds a frame from parts that need not fit.
func frame(total uint32, kind byte, headerLen uint32, rest string) []byte {
	b := binary.BigEndian.AppendUint32(nil, total)
	b = binary.BigEndian.AppendUint32(b, uint32(kind)<<24|headerLen)
	return append(b, rest...)
}

func TestHostileFramesAreRefused(t *testing.T) {
	header := `{"code":0,"flag":1,"opaque":1}`
	n := uint32(len(header))
	tests := map[string][]byte{
		"text":                     []byte("HTTP/1.1 400 Bad Request\r\n\r\n"),
		"zeros":                    make([]byte, 64),
		"longer than allowed":      frame(remoting.DefaultMaxFrame+1, 0, n, header),
		"longest length":           frame(0xffffffff, 0, n, header),
		"header longer than frame": frame(4+n, 0, n+1, header),
		"longest header":           frame(remoting.DefaultMaxFrame, 0, 0xffffff, header),
		"binary header":            frame(4+n, 1, n, header),
		"header not JSON":          frame(4+n, 0, n, header[:n-1]+"]"),
		"header of other types":    frame(4+26, 0, 26, `{"code":"0","opaque":[1] }`),
	}
	for name, raw := range tests {
		t.Run(name, func(t *testing.T) {
			s := startServer(t, writing(raw))
			p := newPeer(t, s.addr(), remoting.Options{CallTimeout: 20 * time.Second})
			_, err := p.Call(t.Context(), 1, nil, nil)
			if !errors.Is(err, remoting.ErrProtocol) || !errors.Is(err, remoting.ErrLost) {
				t.Errorf("error %v, want ErrProtocol and ErrLost", err)
			}
		})
	}
}

func TestAPromisedLengthCostsNoMemory(t *testing.T) {
	s := startServer(t, writing(frame(remoting.DefaultMaxFrame, 0, 0, "only this much")))
	p := newPeer(t, s.addr(), remoting.Options{CallTimeout: 200 * time.Millisecond})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := p.Call(t.Context(), 1, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want a time-out", err)
	}
	runtime.ReadMemStats(&after)
	if grown := after.TotalAlloc - before.TotalAlloc; grown > 4<<20 {
		t.Errorf("%d bytes were allocated for a frame that never came", grown)
	}
}

func TestASilentServerIsBoundedAndLeftForANewConnection(t *testing.T) {
	s := startServer(t, func(conn net.Conn, n int) {
		if n == 0 {
			_, _ = conn.Read(make([]byte, 1<<16))
			_, _ = conn.Read(make([]byte, 1)) // never answers
			return
		}
		answering(func(r *remoting.Command) []*remoting.Command { return []*remoting.Command{replyTo(r)} })(conn, n)
	})
	p := newPeer(t, s.addr(), remoting.Options{CallTimeout: 100 * time.Millisecond})
	began := time.Now()
	if _, err := p.Call(t.Context(), 1, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("first call: %v, want a time-out", err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("took %s", took)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	patient := newPeer(t, s.addr(), remoting.Options{})
	if _, err := patient.Call(ctx, 1, nil, nil); err != nil {
		t.Errorf("another peer: %v", err)
	}
	for { // the same peer gets a new connection; its time limit is short, so it may need more than one call
		if _, err := p.Call(ctx, 1, nil, nil); err == nil {
			break
		} else if ctx.Err() != nil {
			t.Fatalf("never recovered: %v", err)
		}
	}
}

func TestAShortDeadlineDoesNotEndTheConnectionOfOthers(t *testing.T) {
	busy, release := make(chan struct{}), make(chan struct{})
	s := startServer(t, answering(func(r *remoting.Command) []*remoting.Command {
		if r.Code == 2 {
			close(busy)
			<-release
		}
		return []*remoting.Command{replyTo(r)}
	}))
	p := newPeer(t, s.addr(), remoting.Options{CallTimeout: time.Minute})
	if _, err := p.Call(t.Context(), 1, nil, nil); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { _, err := p.Call(t.Context(), 2, nil, nil); done <- err }()
	<-busy
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := p.Call(ctx, 3, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("impatient call: %v", err)
	}
	close(release)
	if err := <-done; err != nil {
		t.Errorf("patient call: %v", err)
	}
	if s.accepted() != 1 {
		t.Errorf("%d connections, want 1", s.accepted())
	}
}

func TestALostConnectionIsReplacedAndNothingIsSentTwice(t *testing.T) {
	var mu sync.Mutex
	seen := map[int]int{}
	s := startServer(t, func(conn net.Conn, n int) {
		answering(func(r *remoting.Command) []*remoting.Command {
			mu.Lock()
			seen[r.Code]++
			mu.Unlock()
			if n == 0 {
				_ = conn.Close()
				return nil
			}
			return []*remoting.Command{replyTo(r)}
		})(conn, n)
	})
	p := newPeer(t, s.addr(), remoting.Options{})
	if _, err := p.Call(t.Context(), 1, nil, nil); !errors.Is(err, remoting.ErrLost) {
		t.Errorf("first call: %v, want ErrLost", err)
	}
	if _, err := p.Call(t.Context(), 2, nil, nil); err != nil {
		t.Errorf("second call: %v", err)
	}
	mu.Lock()
	defer mu.Unlock()
	if seen[1] != 1 || seen[2] != 1 {
		t.Errorf("the server saw %v", seen)
	}
}

func TestARefusedDialIsToldApart(t *testing.T) {
	var lc net.ListenConfig
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	_ = ln.Close()
	p := newPeer(t, addr, remoting.Options{})
	_, err = p.Call(t.Context(), 1, nil, nil)
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "dial" {
		t.Errorf("error %v, want one of dialling", err)
	}
}

func TestCloseEndsCallsUnderWay(t *testing.T) {
	s := startServer(t, answering(func(*remoting.Command) []*remoting.Command { return nil }))
	p := remoting.NewPeer(s.addr(), remoting.Options{CallTimeout: time.Minute})
	errs := make(chan error, 10)
	for range cap(errs) {
		go func() { _, err := p.Call(t.Context(), 1, nil, nil); errs <- err }()
	}
	for s.accepted() == 0 {
		time.Sleep(time.Millisecond)
	}
	p.Close()
	for range cap(errs) {
		if err := <-errs; !errors.Is(err, remoting.ErrClosed) {
			t.Errorf("error %v, want ErrClosed", err)
		}
	}
	if _, err := p.Call(t.Context(), 1, nil, nil); !errors.Is(err, remoting.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestTheServersRefusalIsTyped(t *testing.T) {
	s := startServer(t, answering(func(r *remoting.Command) []*remoting.Command {
		reply := replyTo(r)
		reply.Code, reply.Remark = remoting.NoPermission, "no"
		return []*remoting.Command{reply}
	}))
	p := newPeer(t, s.addr(), remoting.Options{})
	_, err := p.TopicStats(t.Context(), "t")
	if !remoting.IsCode(err, remoting.NoPermission) || remoting.IsCode(err, remoting.Success) {
		t.Errorf("error %v", err)
	}
}

// The typed calls must survive replies whose frames are right and whose
// contents are not.
func TestHostileContentsAreRefused(t *testing.T) {
	contents := []struct {
		ext  map[string]string
		body string
	}{
		{nil, ""},
		{nil, "null"},
		{nil, "[]"},
		{nil, "{"},
		{map[string]string{"offset": "-1"}, `{"offsetTable":{"0":-1}}`},
		{map[string]string{"offset": "9999999999999999999"}, `{"offsetTable":{{"topic":"t","queueId":-1}:{}}}`},
		{map[string]string{"minOffset": "1", "maxOffset": "x", "nextBeginOffset": "1"}, `{"offsetTable":{{"topic":"t","queueId":0}:7}}`},
		{map[string]string{"minOffset": "0", "maxOffset": "1", "nextBeginOffset": "1"}, "\x00\x00\x00\x05\x00"},
		{map[string]string{"minOffset": "0", "maxOffset": "1", "nextBeginOffset": "1"}, "\x7f\xff\xff\xff\xda\xa3\x20\xa7"},
		{nil, `{"queueDatas":[{"brokerName":"b","readQueueNums":-1}]}`},
		{nil, `{"queueDatas":[{"brokerName":"b","readQueueNums":2000000000}]}`},
		{nil, `{"table":{"bootTimestamp":"1","runtime":"soon","earliestMessageTimeStamp":"1"}}`},
	}
	for i, c := range contents {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			s := startServer(t, answering(func(r *remoting.Command) []*remoting.Command {
				reply := replyTo(r)
				reply.ExtFields, reply.Body = c.ext, []byte(c.body)
				return []*remoting.Command{reply}
			}))
			p := newPeer(t, s.addr(), remoting.Options{})
			ctx := t.Context()
			ask := map[string]func() error{
				"pull":    func() error { _, err := p.Pull(ctx, "t", 0, 0, 32); return err },
				"view":    func() error { _, err := p.ViewMessage(ctx, "t", 0); return err },
				"offset":  func() error { _, _, err := p.ConsumerOffset(ctx, "g", "t", 0); return err },
				"runtime": func() error { _, err := p.BrokerRuntimeInfo(ctx); return err },
			}
			for name, call := range ask {
				if c.ext["maxOffset"] == "1" && name != "pull" && name != "view" {
					continue
				}
				if err := call(); !errors.Is(err, remoting.ErrProtocol) {
					t.Errorf("%s: %v, want ErrProtocol", name, err)
				}
			}
			// These may accept an empty answer; they must not panic.
			_, _ = p.TopicStats(ctx, "t")
			_, _ = p.ConsumeStats(ctx, "g", "")
			_, _ = p.AllDelayOffsets(ctx)
			_, _ = p.Route(ctx, "t")
			_, _ = p.ClusterInfo(ctx)
			_, _ = p.Groups(ctx)
			_, _ = p.QueryByKey(ctx, "t", "k", time.Unix(0, 0), time.Now())
		})
	}
}

func TestRequestsAreSigned(t *testing.T) {
	p := newPeer(t, "127.0.0.1:1", remoting.Options{AccessKey: "ak", SecretKey: "sk"})
	ext := map[string]string{"topic": "T", "queueId": "3"}
	signed := p.Sign(ext, []byte("body"))
	mac := hmac.New(sha1.New, []byte("sk"))
	_, _ = fmt.Fprint(mac, "ak", "3", "T", "body") // AccessKey, queueId, topic: the order of the names
	if want := base64.StdEncoding.EncodeToString(mac.Sum(nil)); signed["Signature"] != want || signed["AccessKey"] != "ak" {
		t.Errorf("signed %v, want signature %s", signed, want)
	}
	if len(ext) != 2 {
		t.Errorf("the caller's fields were changed: %v", ext)
	}
	if open := newPeer(t, "127.0.0.1:1", remoting.Options{}).Sign(ext, nil); len(open) != 2 {
		t.Errorf("without keys: %v", open)
	}
}
