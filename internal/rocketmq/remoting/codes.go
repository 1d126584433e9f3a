package remoting

// Request codes (services §3).
const (
	RequestPullMessage         = 11
	RequestQueryMessage        = 12
	RequestQueryConsumerOffset = 14
	RequestBrokerConfig        = 26
	RequestBrokerRuntimeInfo   = 28
	RequestSearchOffset        = 29
	RequestMaxOffset           = 30
	RequestMinOffset           = 31
	RequestViewMessage         = 33
	RequestAllDelayOffset      = 45
	RequestRoute               = 105
	RequestClusterInfo         = 106
	RequestAllGroups           = 201
	RequestTopicStats          = 202
	RequestConsumeStats        = 208
)

// Response codes.
const (
	Success               = 0
	SystemError           = 1
	SystemBusy            = 2
	MessageIllegal        = 13
	ServiceNotAvailable   = 14
	NoPermission          = 16
	TopicNotExist         = 17
	PullNotFound          = 19 // nothing at or beyond the offset yet
	PullRetryImmediately  = 20 // nothing at this offset: go on at nextBeginOffset
	PullOffsetMoved       = 21 // the offset is outside of the queue
	QueryNotFound         = 22
	InvalidParameter      = 29
	FlowControl           = 215
	pullGroup             = "TOOLS_CONSUMER" // exists on every broker, so that a read creates no group
	pullWithSubscription  = "4"              // sysFlag: subscription in the request; no commit, no waiting
	maxQueryRecords       = 64               // the broker's own cap
	maxQueues             = 4096             // per topic and broker; a reply that names more is not believed
	maxBrokers            = 4096
	maxConsumeStatEntries = 1 << 17
)
