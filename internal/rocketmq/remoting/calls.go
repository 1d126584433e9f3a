package remoting

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Pulled is the reply to [Peer.Pull].
type Pulled struct {
	Records   []Record
	Min, Max  int64 // offsets of the queue, Max exclusive
	NextBegin int64 // where to go on
	Code      int   // Success, PullNotFound, PullRetryImmediately or PullOffsetMoved
}

// Pull reads up to limit records of a queue from offset on. It commits nothing,
// waits for nothing and creates no group. The broker may return fewer than
// limit. An empty reply is no error: Code says why it is empty.
func (p *Peer) Pull(ctx context.Context, topic string, queue int32, offset int64, limit int) (Pulled, error) {
	reply, err := p.Call(ctx, RequestPullMessage, map[string]string{
		"consumerGroup": pullGroup, "topic": topic, "queueId": itoa(queue), "queueOffset": itoa(offset),
		"maxMsgNums": itoa(limit), "sysFlag": pullWithSubscription, "commitOffset": "0",
		"suspendTimeoutMillis": "0", "subscription": "*", "subVersion": "0", "expressionType": "TAG",
	}, nil)
	if err != nil {
		return Pulled{}, err
	}
	switch reply.Code {
	case Success, PullNotFound, PullRetryImmediately, PullOffsetMoved:
	default:
		return Pulled{}, p.refused(RequestPullMessage, reply)
	}
	pulled := Pulled{Code: reply.Code}
	if err := errors.Join(
		reply.number("minOffset", &pulled.Min),
		reply.number("maxOffset", &pulled.Max),
		reply.number("nextBeginOffset", &pulled.NextBegin),
	); err != nil {
		return Pulled{}, p.wrap(RequestPullMessage, err)
	}
	if reply.Code == Success {
		if pulled.Records, err = DecodeRecords(reply.Body, limit); err != nil {
			return Pulled{}, p.wrap(RequestPullMessage, err)
		}
	}
	return pulled, nil
}

// QueryByKey reads up to 64 records that the broker's index has under key in
// the time window. The index is no proof of absence, and a hash collision
// returns other keys: only records that carry key are returned.
func (p *Peer) QueryByKey(ctx context.Context, topic, key string, begin, end time.Time) ([]Record, error) {
	reply, err := p.Call(ctx, RequestQueryMessage, map[string]string{
		"topic": topic, "key": key, "maxNum": itoa(maxQueryRecords),
		"beginTimestamp": itoa(begin.UnixMilli()), "endTimestamp": itoa(end.UnixMilli()),
	}, nil)
	switch {
	case err != nil:
		return nil, err
	case reply.Code == QueryNotFound:
		return nil, nil
	case reply.Code != Success:
		return nil, p.refused(RequestQueryMessage, reply)
	}
	records, err := DecodeRecords(reply.Body, maxQueryRecords)
	if err != nil {
		return nil, p.wrap(RequestQueryMessage, err)
	}
	matching := records[:0]
	for _, r := range records {
		if r.HasKey(key) {
			matching = append(matching, r)
		}
	}
	return matching, nil
}

// ViewMessage reads the record at a commit-log offset. A broker that has none
// there refuses with SystemError.
func (p *Peer) ViewMessage(ctx context.Context, topic string, logOffset int64) (Record, error) {
	reply, err := p.Do(ctx, RequestViewMessage, map[string]string{"topic": topic, "offset": itoa(logOffset)}, nil)
	if err != nil {
		return Record{}, err
	}
	records, err := DecodeRecords(reply.Body, 1)
	if err == nil && len(records) != 1 {
		err = fmt.Errorf("%w: no record in the reply", ErrProtocol)
	}
	if err != nil {
		return Record{}, p.wrap(RequestViewMessage, err)
	}
	return records[0], nil
}

// ConsumerOffset is the group's committed offset of a queue. found is false
// if it has none: then nothing has been passed.
func (p *Peer) ConsumerOffset(ctx context.Context, group, topic string, queue int32) (offset int64, found bool, err error) {
	offset, err = p.offset(ctx, RequestQueryConsumerOffset, map[string]string{
		"consumerGroup": group, "topic": topic, "queueId": itoa(queue), "setZeroIfNotFound": "false",
	})
	if IsCode(err, QueryNotFound) {
		return 0, false, nil
	}
	return offset, err == nil, err
}

// SearchOffset is the first offset of a queue whose record was stored at or
// after timeMS.
func (p *Peer) SearchOffset(ctx context.Context, topic string, queue int32, timeMS int64) (int64, error) {
	return p.offset(ctx, RequestSearchOffset, map[string]string{
		"topic": topic, "queueId": itoa(queue), "timestamp": itoa(timeMS), "boundaryType": "lower",
	})
}

// MaxOffset is where the next record of a queue goes. It is 0, and no error,
// for a topic that does not exist: [Peer.TopicStats] tells the difference.
func (p *Peer) MaxOffset(ctx context.Context, topic string, queue int32) (int64, error) {
	return p.offset(ctx, RequestMaxOffset, map[string]string{"topic": topic, "queueId": itoa(queue)})
}

// MinOffset is the first offset of a queue that is still kept; for a topic
// that does not exist see [Peer.MaxOffset].
func (p *Peer) MinOffset(ctx context.Context, topic string, queue int32) (int64, error) {
	return p.offset(ctx, RequestMinOffset, map[string]string{"topic": topic, "queueId": itoa(queue)})
}

func (p *Peer) offset(ctx context.Context, code int, ext map[string]string) (int64, error) {
	reply, err := p.Do(ctx, code, ext, nil)
	if err != nil {
		return 0, err
	}
	var offset int64
	if err := reply.number("offset", &offset); err != nil {
		return 0, p.wrap(code, err)
	}
	return offset, nil
}

// AllDelayOffsets is how far each delay level of SCHEDULE_TOPIC_XXXX has been
// delivered: level → offset. A level that is missing has delivered nothing.
func (p *Peer) AllDelayOffsets(ctx context.Context) (map[int]int64, error) {
	var table struct {
		OffsetTable map[string]int64 `json:"offsetTable"`
	}
	if err := p.query(ctx, RequestAllDelayOffset, nil, &table); err != nil {
		return nil, err
	}
	offsets := make(map[int]int64, len(table.OffsetTable))
	for text, offset := range table.OffsetTable {
		level, err := strconv.Atoi(text)
		if err != nil || level < 1 || level > maxQueues || offset < 0 {
			return nil, p.wrap(RequestAllDelayOffset, fmt.Errorf("%w: delay level %.40q at %d", ErrProtocol, text, offset))
		}
		offsets[level] = offset
	}
	return offsets, nil
}

// RuntimeInfo is what a broker says of itself.
type RuntimeInfo struct {
	Now        time.Time // the broker's clock, cut to the second
	EarliestMS int64     // store time of the oldest record of any topic; 0 if there is none
	// DispatchBehind is how many bytes of the commit log are not yet in the queues:
	// stored messages that a read of the queues cannot see.
	DispatchBehind int64
	LogEnd         int64 // end of the commit log: whatever was stored before lies before it
	Version        string
}

// BrokerRuntimeInfo reads the broker's clock and the age of its oldest record.
func (p *Peer) BrokerRuntimeInfo(ctx context.Context) (RuntimeInfo, error) {
	var body struct {
		Table map[string]string `json:"table"`
	}
	if err := p.query(ctx, RequestBrokerRuntimeInfo, nil, &body); err != nil {
		return RuntimeInfo{}, err
	}
	now, err := brokerClock(body.Table)
	if err != nil {
		return RuntimeInfo{}, p.wrap(RequestBrokerRuntimeInfo, err)
	}
	earliest, err1 := strconv.ParseInt(body.Table["earliestMessageTimeStamp"], 10, 64)
	behind, err2 := strconv.ParseInt(body.Table["dispatchBehindBytes"], 10, 64)
	logEnd, err3 := strconv.ParseInt(body.Table["commitLogMaxOffset"], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return RuntimeInfo{}, p.wrap(RequestBrokerRuntimeInfo, fmt.Errorf("%w: %w", ErrProtocol, err))
	}
	return RuntimeInfo{
		Now: now, EarliestMS: max(earliest, 0), DispatchBehind: behind, LogEnd: logEnd, Version: body.Table["brokerVersionDesc"],
	}, nil
}

// BrokerConfig is the broker's settings by name.
func (p *Peer) BrokerConfig(ctx context.Context) (map[string]string, error) {
	reply, err := p.Do(ctx, RequestBrokerConfig, nil, nil)
	if err != nil {
		return nil, err
	}
	settings := make(map[string]string)
	for line := range strings.Lines(string(reply.Body)) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			settings[name] = value
		}
	}
	return settings, nil
}

// brokerClock is the boot time plus the uptime, "[ 0 days, 1 hours, 2 minutes, 3 seconds ]".
func brokerClock(table map[string]string) (time.Time, error) {
	bootMS, err := strconv.ParseInt(table["bootTimestamp"], 10, 64)
	if err != nil || bootMS <= 0 {
		return time.Time{}, fmt.Errorf("%w: bootTimestamp %.40q", ErrProtocol, table["bootTimestamp"])
	}
	var days, hours, minutes, seconds int64
	if _, err := fmt.Sscanf(table["runtime"], "[ %d days, %d hours, %d minutes, %d seconds ]",
		&days, &hours, &minutes, &seconds); err != nil {
		return time.Time{}, fmt.Errorf("%w: runtime %.80q", ErrProtocol, table["runtime"])
	}
	up := time.Duration(((days*24+hours)*60+minutes)*60+seconds) * time.Second
	return time.UnixMilli(bootMS).Add(up), nil
}

// Route says where a topic is.
type Route struct {
	Queues  []RouteQueues
	Brokers []RouteBroker
}

// RouteQueues is how many queues of a topic a broker has.
type RouteQueues struct {
	Broker      string `json:"brokerName"`
	ReadQueues  int32  `json:"readQueueNums"`
	WriteQueues int32  `json:"writeQueueNums"`
	Perm        int    `json:"perm"`
}

// RouteBroker is one broker name with its instances' addresses by id.
type RouteBroker struct {
	Cluster string            `json:"cluster"`
	Name    string            `json:"brokerName"`
	Addrs   map[string]string `json:"brokerAddrs"`
}

// Master is the address of the broker's master, "" if the name server knows none.
func (b RouteBroker) Master() string { return b.Addrs["0"] }

// Route asks a name server where a topic is. A topic that it does not know is
// a [*CodeError] with TopicNotExist.
func (p *Peer) Route(ctx context.Context, topic string) (Route, error) {
	var body struct {
		Queues  []RouteQueues `json:"queueDatas"`
		Brokers []RouteBroker `json:"brokerDatas"`
	}
	ext := map[string]string{"topic": topic, "acceptStandardJsonOnly": "true"}
	if err := p.query(ctx, RequestRoute, ext, &body); err != nil {
		return Route{}, err
	}
	if len(body.Brokers) > maxBrokers || len(body.Queues) > maxBrokers {
		return Route{}, p.wrap(RequestRoute, fmt.Errorf("%w: %d brokers", ErrProtocol, len(body.Brokers)))
	}
	for _, q := range body.Queues {
		if q.ReadQueues < 0 || q.WriteQueues < 0 || q.ReadQueues > maxQueues || q.WriteQueues > maxQueues {
			return Route{}, p.wrap(RequestRoute, fmt.Errorf("%w: %d and %d queues on %.100q", ErrProtocol, q.ReadQueues, q.WriteQueues, q.Broker))
		}
	}
	return Route{Queues: body.Queues, Brokers: body.Brokers}, nil
}

// ClusterInfo asks a name server for every broker that it knows.
func (p *Peer) ClusterInfo(ctx context.Context) ([]RouteBroker, error) {
	var body struct {
		Brokers map[string]RouteBroker `json:"brokerAddrTable"`
	}
	if err := p.query(ctx, RequestClusterInfo, nil, &body); err != nil {
		return nil, err
	}
	brokers := make([]RouteBroker, 0, len(body.Brokers))
	for name, b := range body.Brokers {
		b.Name = name
		brokers = append(brokers, b)
	}
	return brokers, nil
}

// Groups are the names of the consumer groups that the broker knows. Asking
// creates none, unlike the request for a single group.
func (p *Peer) Groups(ctx context.Context) (map[string]bool, error) {
	var body struct {
		Table map[string]json.RawMessage `json:"subscriptionGroupTable"`
	}
	if err := p.query(ctx, RequestAllGroups, nil, &body); err != nil {
		return nil, err
	}
	groups := make(map[string]bool, len(body.Table))
	for name := range body.Table {
		groups[name] = true
	}
	return groups, nil
}

// QueueRange is what a broker keeps of a queue: offsets from Min to Max, Max exclusive.
type QueueRange struct {
	Queue    int32
	Min, Max int64
	LastMS   int64 // store time of the last record; 0 if there is none
}

// TopicStats is what the broker keeps of each queue of a topic. A topic that
// the broker does not have is a [*CodeError] with TopicNotExist.
func (p *Peer) TopicStats(ctx context.Context, topic string) (map[int32]QueueRange, error) {
	table, err := p.offsetTable(ctx, RequestTopicStats, map[string]string{"topic": topic})
	if err != nil {
		return nil, err
	}
	ranges := make(map[int32]QueueRange, len(table))
	for _, row := range table {
		r := QueueRange{row.key.Queue, row.value.MinOffset, row.value.MaxOffset, row.value.LastUpdateTimestamp}
		if row.key.Topic != topic || r.Min < 0 || r.Max < r.Min {
			return nil, p.wrap(RequestTopicStats, fmt.Errorf("%w: queue %d of %.100q from %d to %d", ErrProtocol, r.Queue, row.key.Topic, r.Min, r.Max))
		}
		ranges[r.Queue] = r
	}
	return ranges, nil
}

// QueueProgress is how far a group is on a queue of a broker.
type QueueProgress struct {
	Topic    string
	Broker   string
	Queue    int32
	Max      int64 // where the next record goes
	Consumed int64 // the committed offset; 0 also if there is none
	LastMS   int64 // store time of the last consumed record
}

// ConsumeStats is how far a group is on the broker's queues, of one topic or
// of all that it has offsets for (topic ""). It cannot tell "offset 0" from
// "no offset": [Peer.ConsumerOffset] can.
func (p *Peer) ConsumeStats(ctx context.Context, group, topic string) ([]QueueProgress, error) {
	ext := map[string]string{"consumerGroup": group}
	if topic != "" {
		ext["topic"] = topic
	}
	table, err := p.offsetTable(ctx, RequestConsumeStats, ext)
	if err != nil {
		return nil, err
	}
	progress := make([]QueueProgress, 0, len(table))
	for _, row := range table {
		progress = append(progress, QueueProgress{
			row.key.Topic, row.key.Broker, row.key.Queue,
			row.value.BrokerOffset, row.value.ConsumerOffset, row.value.LastTimestamp,
		})
	}
	return progress, nil
}

type offsetRow struct {
	key struct {
		Topic  string `json:"topic"`
		Broker string `json:"brokerName"`
		Queue  int32  `json:"queueId"`
	}
	value struct {
		BrokerOffset   int64 `json:"brokerOffset"` // consume stats
		ConsumerOffset int64 `json:"consumerOffset"`
		LastTimestamp  int64 `json:"lastTimestamp"`

		MinOffset           int64 `json:"minOffset"` // topic stats
		MaxOffset           int64 `json:"maxOffset"`
		LastUpdateTimestamp int64 `json:"lastUpdateTimestamp"`
	}
}

func (p *Peer) offsetTable(ctx context.Context, code int, ext map[string]string) ([]offsetRow, error) {
	var body struct {
		Table map[string]json.RawMessage `json:"offsetTable"`
	}
	if err := p.query(ctx, code, ext, &body); err != nil {
		return nil, err
	}
	if len(body.Table) > maxConsumeStatEntries {
		return nil, p.wrap(code, fmt.Errorf("%w: %d queues", ErrProtocol, len(body.Table)))
	}
	rows := make([]offsetRow, 0, len(body.Table))
	for key, value := range body.Table {
		var row offsetRow
		if err := errors.Join(json.Unmarshal([]byte(key), &row.key), json.Unmarshal(value, &row.value)); err != nil {
			return nil, p.wrap(code, fmt.Errorf("%w: row %.200s: %w", ErrProtocol, key, err))
		}
		if row.key.Queue < 0 || row.key.Queue >= maxQueues {
			return nil, p.wrap(code, fmt.Errorf("%w: queue id %d", ErrProtocol, row.key.Queue))
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// query is Do for a request whose reply's body is JSON.
func (p *Peer) query(ctx context.Context, code int, ext map[string]string, into any) error {
	reply, err := p.Do(ctx, code, ext, nil)
	if err != nil {
		return err
	}
	text, err := RewriteJSON(reply.Body)
	if err != nil {
		return p.wrap(code, err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		return p.wrap(code, fmt.Errorf("%w: body: %w", ErrProtocol, err))
	}
	return nil
}

func (p *Peer) wrap(code int, err error) error {
	return fmt.Errorf("request %d to %s: %w", code, p.addr, err)
}

func (p *Peer) refused(code int, reply *Command) error {
	return fmt.Errorf("%s: %w", p.addr, &CodeError{Request: code, Code: reply.Code, Remark: strings.TrimSpace(reply.Remark)})
}

// number reads a non-negative number from the reply's fields.
func (c *Command) number(name string, into *int64) error {
	n, err := strconv.ParseInt(c.ExtFields[name], 10, 64)
	if err != nil || n < 0 {
		return fmt.Errorf("%w: field %s is %.40q", ErrProtocol, name, c.ExtFields[name])
	}
	*into = n
	return nil
}

func itoa[N int | int32 | int64](n N) string { return strconv.FormatInt(int64(n), 10) }
